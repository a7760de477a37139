"""How a load balancer agent runs, and what a wheel says whose modules could not be compiled."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from lb.agent.build_kind import NOTE, build_of, own_build
from lb.agent.native_files import NOTE as NOTE_PATH
from lb.config.schema import Build, BuildKind
from lb.config.stats import MAX_REASON
from lb.core import api_keys

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
try:
    import hatch_build
finally:
    sys.path.remove(str(ROOT))


@pytest.mark.parametrize("suffix", EXTENSION_SUFFIXES)
def test_an_extension_module_is_native(tmp_path: Path, suffix: str) -> None:
    note = tmp_path / "note"
    note.write_text("of a build before")
    assert build_of(f"/lb/api_keys{suffix}", note, fast_path=True) == Build(BuildKind.NATIVE, True)


@pytest.mark.parametrize("name", ["api_keys.py", "api_keys.pyc"])
def test_a_module_of_python_is_interpreted(tmp_path: Path, name: str) -> None:
    note = tmp_path / "note"
    assert build_of(name, note, fast_path=False) == Build(BuildKind.INTERPRETED, False)
    note.write_text("command 'gcc' failed:\tNo such\x00 file\n")
    found = build_of(name, note, fast_path=False)
    assert found == Build(BuildKind.INTERPRETED, False, "command 'gcc' failed: No such file")


@pytest.mark.parametrize("content", [b"\xff" * 900, b"\xed\xa0\x80" * 900, b"e\n" * 900], ids=str)
def test_any_reason_passes_the_wire(tmp_path: Path, content: bytes) -> None:
    note = tmp_path / "note"
    note.write_bytes(content)
    found = build_of("api_keys.py", note, fast_path=True)
    assert 0 < len(found.not_compiled) <= MAX_REASON
    assert Build.from_json(found.to_json()) == found


def test_why_tls_is_slow_is_reported_only_if_it_is(tmp_path: Path) -> None:
    quick = own_build(fast_path=True)
    assert "slow_tls" not in quick.to_json()  # which earlier controllers read
    slow = own_build(fast_path=True, slow_tls="OpenSSL is a part of this Python")
    assert slow.to_json()["slow_tls"] == "OpenSSL is a part of this Python"
    assert Build.from_json(slow.to_json()) == slow


def test_this_process() -> None:
    is_native = not (api_keys.__file__ or "").endswith(".py")
    assert own_build(fast_path=True) == Build(
        BuildKind.NATIVE if is_native else BuildKind.INTERPRETED, fast_path=True
    )
    assert NOTE_PATH == hatch_build.NOTE
    assert hatch_build.LONGEST_NOTE == MAX_REASON
    assert not NOTE.exists()


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("a.c:1:10: fatal error: Python.h:  No such file\nTraceback\nCompileError: 'gcc' failed\n", "a.c:1:10: fatal error: Python.h: No such file"),
        ("lb/x.py:3: error: one\nlb/y.py:4: error: two\n", "lb/y.py:4: error: two"),
        ("Traceback\n  File x\nCompileError: command 'gcc' failed: No such file\n\n", "CompileError: command 'gcc' failed: No such file"),
        ("x" * 900, "x" * 300),
        (" \n", "the compiler gave no reason"),
    ],
    ids=["C compiler", "mypyc", "no compiler", "long", "silent"],
)  # fmt: skip
def test_the_last_message_of_a_compiler(output: str, reason: str) -> None:
    assert hatch_build.reason_of(output) == reason


class App:
    """What the hook needs of hatch."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


class Hook(hatch_build.CustomBuildHook):
    """The build hook, with a compiler that fails."""

    def __init__(self) -> None:
        self.said = App()

    @property
    def app(self) -> Any:
        return self.said

    target_name = "wheel"

    def _fast_path(self, build_data: dict[str, Any]) -> bool:
        return False

    def _tls_relay(self, build_data: dict[str, Any]) -> bool:
        return False

    def _compiled(self, folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "lb/y.py:4: error: two\nlast line\n")


def built(version: str = "standard") -> dict[str, Any]:
    """Return what the hook adds to a wheel; `force_include` has the contents by path."""
    hook, data = Hook(), {"artifacts": [], "force_include": {}}
    hook.initialize(version, data)
    included = {target: Path(source).read_text() for source, target in data["force_include"].items()}
    hook.finalize(version, data, "")
    assert not any(Path(source).exists() for source in data["force_include"])
    return {**data, "force_include": included, "warnings": hook.said.warnings}


def test_a_wheel_that_is_not_compiled_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hatch_build.SWITCH, raising=False)
    data = built()
    assert data["force_include"] == {NOTE_PATH: f"{hatch_build.ADVICE}lb/y.py:4: error: two\n"}
    assert "pure_python" not in data
    assert len(data["warnings"]) == 1
    assert not NOTE.exists()


def test_nothing_is_noted_where_nothing_was_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hatch_build.SWITCH, raising=False)
    assert built("editable")["force_include"] == {}
    monkeypatch.setenv(hatch_build.SWITCH, "0")
    assert built()["force_include"] == {}


def test_a_failure_is_an_error_if_it_has_to_be_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(hatch_build.SWITCH, "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="two"):
        built()
    assert list(tmp_path.iterdir()) == []
