"""The README is short, names commands that exist, and repeats figures of the benchmark page without change."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()


def rows(heading: str) -> list[str]:
    """Returns the body rows of the table below a heading of the README."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| |")]


@pytest.mark.parametrize("command", ["quickstart.sh", "test.sh"])
def test_the_commands_named_can_be_run(command: str) -> None:
    assert f"./{command}" in README
    assert os.access(ROOT / command, os.X_OK)


def test_the_readme_stays_short() -> None:
    assert len(README.encode()) < 10_000


def test_the_figures_are_those_of_the_benchmark_page() -> None:
    assert len(rows("Benchmark")) == 4
    for row in rows("Benchmark"):
        assert row in BENCHMARKS, row


def test_nothing_is_installed_by_a_package_name_of_an_index() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = [
        page.name for page in pages if re.search(r"pip install [^\n`]*\bskyserve(\[|\b)", page.read_text())
    ]
    assert named == []
