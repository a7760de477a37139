"""Which native modules of the load balancer a machine gets, and which of its Pythons runs them.

A native module fits one minor version of CPython, one architecture and C library, which its file name has
(`.cpython-312-x86_64-linux-gnu.so`), and glibc from some version on. The controller has those of its own installation, and
those of the wheels of the same release in its home. Whether they load is checked on the machine (`lb.agent.native_files`).
"""

from __future__ import annotations

import re
import shlex
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lb.agent.native_files import HELPER, native_files
from skyserve_cli.controller.agent_files import package_folder

if TYPE_CHECKING:
    from provisioners.port.commands import HostConnection

PACKAGES = ("lb", "policies")
OLDEST = (3, 10)
COMMANDS = ("python3", "python3.14", "python3.13", "python3.12", "python3.11", "python3.10")
"""The interpreters that a machine may have; of equal ones the first is taken."""

_DESCRIBE = """import platform, sys, sysconfig
print(sys.argv[1], *sys.version_info[:2], sysconfig.get_config_var("EXT_SUFFIX"), platform.machine(), *platform.libc_ver())
"""
_DESCRIBED = re.compile(r"(\S+) (\d+) (\d+) (\S+) (\S+) (?:glibc 2\.(\d+)\S*)?")
_GLIBC = re.compile(rb"GLIBC_2\.(\d+)")


class Python(NamedTuple):
    """An interpreter of a machine. `glibc` is the minor version of glibc 2; None: it has another C library."""

    command: str
    version: tuple[int, int]
    suffix: str
    machine: str
    glibc: int | None

    def __str__(self) -> str:
        return f"CPython {self.version[0]}.{self.version[1]} on {self.machine}"

    @property
    def tag(self) -> str:
        """Return the tag of a wheel for it alone."""
        name = f"cp{self.version[0]}{self.version[1]}"
        return f"{name}-cp{self.suffix.split('-')[1]}-linux_{self.machine}"


@dataclass(frozen=True, eq=False)
class NativeSet:
    """Native files for one kind of interpreter, by path. `problem`: why they cannot be used; empty: they can."""

    suffix: str
    files: Mapping[str, bytes]
    glibc: int  # the oldest minor version of glibc 2 that has all they need; 0: they need none
    problem: str = ""

    @property
    def has_modules(self) -> bool:
        """Return whether there is more than the helper in C."""
        return any(not is_helper(path) for path in self.files)


class Choice(NamedTuple):
    """What runs on a machine. `why`: why the modules are interpreted there; empty if they are not, or nowhere are compiled."""

    python: Python
    native: NativeSet | None
    why: str


def is_helper(path: str) -> bool:
    return path.rpartition("/")[2].startswith(HELPER)


def choose(sets: Sequence[NativeSet], pythons: Iterable[Python]) -> Choice | None:
    """Return the Python that gets most of the native files, the first of equal ones; None: no Python is new enough."""
    choices = [_choice(sets, python) for python in pythons if python.version >= OLDEST]
    return max(choices, key=lambda choice: _worth(choice.native), default=None)


def _choice(sets: Sequence[NativeSet], python: Python) -> Choice:
    own = [one for one in sets if one.suffix == python.suffix]
    problems = {one: _problem(one, python) for one in own}
    native = max((one for one in own if not problems[one]), key=_worth, default=None)
    if native is not None and (native.has_modules or not any(one.has_modules for one in sets)):
        return Choice(python, native, "")
    why = next((problem for one, problem in problems.items() if problem and one.has_modules), "")
    return Choice(python, native, why or f"there are no native modules for {python}")


def _worth(native: NativeSet | None) -> int:
    return 0 if native is None else 1 + native.has_modules


def _problem(native: NativeSet, python: Python) -> str:
    if native.problem:
        return native.problem
    if native.glibc > (python.glibc or 0):
        has = "another C library" if python.glibc is None else f"2.{python.glibc}"
        return f"the native modules for {python} need glibc 2.{native.glibc}, and there is {has}"
    return ""


# --- what a machine has


def look_script(commands: Sequence[str] = COMMANDS) -> str:
    """Return a shell script that describes these interpreters, as far as they are there, for `pythons_of`."""
    words = shlex.join(commands)
    return f'for each in {words}; do "$each" -c {shlex.quote(_DESCRIBE)} "$each" 2>/dev/null; done; exit 0'


def pythons_of(printed: str) -> list[Python]:
    """Return the interpreters that the script of `look_script` has described."""
    found = filter(None, map(_DESCRIBED.match, printed.splitlines()))
    return [
        Python(command, (int(major), int(minor)), suffix, machine, None if glibc is None else int(glibc))
        for command, major, minor, suffix, machine, glibc in (one.groups() for one in found)
    ]


def look(shell: HostConnection, commands: Sequence[str] = COMMANDS) -> list[Python]:
    """Return the interpreters of a machine. Raises ShellError."""
    return pythons_of(shell.run(look_script(commands)).out.decode(errors="replace"))


# --- what the controller has


def native_sets(folder: Path | None) -> list[NativeSet]:
    """Return the native files of this installation, and of the wheels in the folder."""
    wheels = [] if folder is None else sorted(folder.glob("*.whl"))
    return [one for one in [own_set(), *map(_of_wheel, wheels)] if one is not None]


@cache
def own_set() -> NativeSet | None:
    """Return the native files of this installation, which fit its own interpreter."""
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    root = package_folder("lb").parent
    files = {path.relative_to(root).as_posix(): path for path in native_files(root)}
    return _set(suffix, {name: path.read_bytes() for name, path in files.items() if name.endswith(suffix)})


@cache
def own_sources() -> Mapping[str, bytes]:
    """Return the Python modules of the agent, by path."""
    return {
        f"{package}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for package in PACKAGES
        for folder in [package_folder(package)]
        for path in sorted(folder.rglob("*.py"))
    }


def _of_wheel(path: Path) -> NativeSet | None:
    found = path.stat()
    return _read_wheel(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=32)
def _read_wheel(path: Path, mtime_ns: int, size: int) -> NativeSet | None:
    """Return the native files of a wheel; None if it has none. `mtime_ns` and `size` tell versions of the file apart."""
    try:
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            files = {name: wheel.read(name) for name in names if name.endswith(".so")}
            sources = {name: wheel.read(name) for name in _of_packages(names) if name.endswith(".py")}
    except (OSError, zipfile.BadZipFile):
        return None
    suffixes = sorted({f".{name.rpartition('/')[2].partition('.')[2]}" for name in files})
    if len(suffixes) != 1:
        return None
    # Native modules run instead of the Python modules of their names, so these have to be the same.
    problem = "" if sources == own_sources() else f"{path.name} was built of other code than this release"
    return _set(suffixes[0], files, problem)


def _of_packages(names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if name.partition("/")[0] in PACKAGES)


def _set(suffix: str, files: Mapping[str, bytes], problem: str = "") -> NativeSet | None:
    if not files:
        return None
    needed = [int(number) for content in files.values() for number in _GLIBC.findall(content)]
    return NativeSet(suffix, files, max(needed, default=0), problem)
