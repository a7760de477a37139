"""The digest of a working directory: what changes it, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skyserve_cli.controller.content_hash import folder_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "main.py").write_text("print(1)")
    (tmp_path / "run.sh").write_text("true")
    return tmp_path


def edit(folder: Path) -> None:
    (folder / "package" / "main.py").write_text("print(2)")


def rename(folder: Path) -> None:
    (folder / "run.sh").rename(folder / "start.sh")


def make_executable(folder: Path) -> None:
    (folder / "run.sh").chmod(0o755)


def link(folder: Path) -> None:
    (folder / "also").symlink_to("run.sh")


def move_a_byte_from_one_file_to_the_next(folder: Path) -> None:
    (folder / "package" / "main.py").write_text("print(1)t")
    (folder / "run.sh").write_text("rue")


@pytest.mark.parametrize(
    "change", [edit, rename, make_executable, link, move_a_byte_from_one_file_to_the_next]
)
def test_what_replicas_would_see_changes_it(folder: Path, change: Callable[[Path], None]) -> None:
    before = folder_digest(folder)
    change(folder)
    assert folder_digest(folder) != before


def commit(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")


def touch(folder: Path) -> None:
    (folder / "run.sh").touch()


@pytest.mark.parametrize("change", [commit, touch])
def test_what_replicas_would_not_see_does_not(folder: Path, change: Callable[[Path], None]) -> None:
    before = folder_digest(folder)
    change(folder)
    assert folder_digest(folder) == before


def test_no_folder_has_no_digest(tmp_path: Path) -> None:
    assert folder_digest(tmp_path / "nowhere") == ""
