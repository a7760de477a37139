"""Which native modules a machine gets: what the controller has, and what the machine says of its Pythons."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from skyserve_cli.controller.balancers.bundle import agent_bundle
from skyserve_cli.controller.balancers.native_modules import (
    NativeSet,
    Python,
    choose,
    look_script,
    native_sets,
    own_set,
    own_sources,
    pythons_of,
)


def python(minor: int, machine: str = "x86_64", glibc: int | None = 36, command: str = "python3") -> Python:
    libc = "gnu" if glibc is not None else "musl"
    return Python(command, (3, minor), f".cpython-3{minor}-{machine}-linux-{libc}.so", machine, glibc)


def native(of: Python, *names: str, glibc: int = 34, problem: str = "") -> NativeSet:
    return NativeSet(of.suffix, {f"lb/{name}{of.suffix}": b"" for name in names}, glibc, problem)


P311, P312, ARM = python(11), python(12), python(12, "aarch64")
FULL = native(P312, "core/api_keys", "proxy/_fast_path")
HELPER = native(P312, "proxy/_fast_path")
OTHER_CODE = native(P312, "core/api_keys", problem="x.whl was built of other code than this release")
OLD_GLIBC = python(12, glibc=31)
MUSL = python(12, glibc=None)
SECOND = python(12, command="python3.12")


@pytest.mark.parametrize(
    ("sets", "pythons", "chosen", "files", "why"),
    [
        pytest.param([FULL], [P312], P312, FULL, "", id="its own kind"),
        pytest.param([FULL], [P311], P311, None, "there are no native modules for CPython 3.11 on x86_64", id="another minor version"),
        pytest.param([FULL], [ARM], ARM, None, "there are no native modules for CPython 3.12 on aarch64", id="another architecture"),
        pytest.param([FULL], [MUSL], MUSL, None, "there are no native modules for CPython 3.12 on x86_64", id="another C library"),
        pytest.param([native(MUSL, "core/x", glibc=0)], [MUSL], MUSL, "first", "", id="musl for musl"),
        pytest.param([FULL], [OLD_GLIBC], OLD_GLIBC, None, "the native modules for CPython 3.12 on x86_64 need glibc 2.34, and there is 2.31", id="an older glibc"),
        pytest.param([FULL], [P311, SECOND], SECOND, FULL, "", id="the Python they are for, though it is the second"),
        pytest.param([FULL], [P312, SECOND], P312, FULL, "", id="the first of equal Pythons"),
        pytest.param([HELPER], [P312], P312, HELPER, "", id="the helper of an interpreted controller"),
        pytest.param([HELPER], [P311, SECOND], SECOND, HELPER, "", id="the Python that the helper is for"),
        pytest.param([HELPER], [ARM], ARM, None, "there are no native modules for CPython 3.12 on aarch64", id="not even the helper"),
        pytest.param([HELPER, FULL], [P312], P312, FULL, "", id="a wheel beside an interpreted controller"),
        pytest.param([HELPER, native(ARM, "core/x")], [P312, ], P312, HELPER, "there are no native modules for CPython 3.12 on x86_64", id="a wheel for others"),
        pytest.param([native(P311, "core/x"), FULL], [P311, SECOND], P311, "first", "", id="both Pythons have them"),
        pytest.param([HELPER, OTHER_CODE], [P312], P312, HELPER, "x.whl was built of other code than this release", id="a wheel of another release"),
        pytest.param([], [P312], P312, None, "there are no native modules for CPython 3.12 on x86_64", id="a controller without a compiler"),
        pytest.param([FULL], [python(9), SECOND], SECOND, FULL, "", id="the first is too old"),
    ],
)  # fmt: skip
def test_what_a_machine_gets(
    sets: list[NativeSet], pythons: list[Python], chosen: Python, files: object, why: str
) -> None:
    choice = choose(sets, pythons)
    assert choice is not None
    assert choice == (chosen, sets[0] if files == "first" else files, why)


def test_no_python_is_new_enough() -> None:
    assert choose([FULL], [python(8), python(9)]) is None
    assert choose([FULL], []) is None


def test_a_machine_describes_its_interpreters() -> None:
    script = look_script(["no-such-python", sys.executable])
    printed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    (found,) = pythons_of(f"welcome to this host\n{printed}")
    assert found.command == sys.executable
    assert found.version == sys.version_info[:2]
    assert found.suffix == sysconfig.get_config_var("EXT_SUFFIX")
    assert found.glibc is None or found.glibc > 16
    musl = "python3 3 12 .cpython-312-x86_64-linux-musl.so x86_64  "
    assert pythons_of(f"{musl}\n{musl.rstrip()} musl 1.2.4\n") == [MUSL, MUSL]


def wheel(folder: Path, name: str, sources: Mapping[str, bytes], *natives: str) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, content in sources.items():
            archive.writestr(path, content)
        for path in natives:
            archive.writestr(f"{path}{P312.suffix}", b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.17\0")


def test_wheels_in_the_home_are_read(tmp_path: Path) -> None:
    wheel(tmp_path, "a.whl", own_sources(), "lb/core/x", "skyserve_lb__mypyc")
    wheel(tmp_path, "b.whl", {**own_sources(), "lb/more.py": b""}, "lb/core/x")
    wheel(tmp_path, "c.whl", own_sources())
    (tmp_path / "d.whl").write_bytes(b"half of a whe")
    (good, other) = [one for one in native_sets(tmp_path) if one is not own_set()]
    assert (good.suffix, good.glibc, good.problem, good.has_modules) == (P312.suffix, 34, "", True)
    assert other.problem == "b.whl was built of other code than this release"
    assert native_sets(tmp_path)[-2] is good  # read once
    wheel(tmp_path, "a.whl", {**own_sources(), "lb/even_more.py": b""}, "lb/core/x")
    assert native_sets(tmp_path)[-2].problem
    assert native_sets(tmp_path / "none") == native_sets(None)


def test_a_bundle_is_of_what_is_in_it() -> None:
    versions = {
        agent_bundle().version,
        agent_bundle(FULL).version,
        agent_bundle(HELPER).version,
        agent_bundle(None, "no native modules").version,
    }
    assert len(versions) == 4
    assert agent_bundle(native(P312, "proxy/_fast_path")).version == agent_bundle(HELPER).version
