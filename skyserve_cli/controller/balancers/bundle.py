"""What an agent is made of, as one archive: the packages `lb` and `policies`, and the libraries they need, pinned.

The same code and the same libraries make the same bytes, so their hash is the version. The native modules that fit the machine, if there
are any, are in a folder of their own: they get to their places on the machine, if they load there.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from lb.agent.native_files import NOTE
from skyserve_cli.controller.agent_files import package_folder
from skyserve_cli.controller.balancers.native_modules import (
    COMMANDS,
    OLDEST,
    PACKAGES,
    NativeSet,
    choose,
    look,
    native_sets,
)

if TYPE_CHECKING:
    from provisioners.port.commands import HostConnection

NATIVE_FOLDER = "native"
LIBRARIES = ("aiohttp", "httptools", "msgspec", "orjson", "prometheus-client", "pyzmq", "uvloop")
"""What the packages import; `pip` finds what these need in turn."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """`data` is a gzipped tar; `version` its content's hash, of 12 hexadecimal digits.

    `pythons` are the commands of the machine's interpreters that may run it, the one that the native files are for first.
    """

    version: str
    data: bytes = field(repr=False)
    pythons: tuple[str, ...] = ("python3",)


def bundle_for(shell: HostConnection, native_wheels: Path | None) -> Bundle:
    """Return the bundle for a machine. Raises ShellError."""
    from provisioners.port.commands import ShellError

    pythons = look(shell)
    choice = choose(native_sets(native_wheels), pythons)
    if choice is None:
        has = f"only {pythons[0]}" if pythons else "none"
        raise ShellError(
            f"{shell.login.name}: a load balancer agent needs Python 3.10, and this machine has {has}"
        )
    others = [one.command for one in pythons if one.command == COMMANDS[0] and one.version >= OLDEST]
    commands = tuple(dict.fromkeys([choice.python.command, *others]))
    return replace(agent_bundle(choice.native, choice.why), pythons=commands)


@cache
def agent_bundle(native: NativeSet | None = None, why_interpreted: str = "") -> Bundle:
    """Of the code that runs here, with these native files. The agent reports `why_interpreted`."""
    more = {} if native is None else {f"{NATIVE_FOLDER}/{path}": data for path, data in native.files.items()}
    if why_interpreted:
        more[NOTE] = f"{why_interpreted}\n".encode()
    return bundle_of(((package, package_folder(package)) for package in PACKAGES), more=more)


def bundle_of(
    packages: Iterable[tuple[str, Path]],
    libraries: Iterable[str] = LIBRARIES,
    more: Mapping[str, bytes] | None = None,
) -> Bundle:
    """`packages` are names and folders, `libraries` names of installed distributions, `more` other files by path."""
    requirements = "".join(f"{name}=={version(name)}\n" for name in sorted(libraries))
    files = {"requirements.txt": requirements.encode(), **(more or {})}
    for name, folder in packages:
        files |= {f"{name}/{path}": content for path, content in _sources(folder)}
    digest = hashlib.sha256()
    for path, content in sorted(files.items()):
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return Bundle(digest.hexdigest()[:12], _archive(files))


def _sources(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(folder).as_posix(), path.read_bytes()


def _archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path, content in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
