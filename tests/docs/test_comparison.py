"""The comparison with other projects has no open cell, and each claim has a source and the day on which it was read."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text().partition("\n## Comparison\n")[2].partition("\n## ")[0]
PAGE = (ROOT / "docs" / "comparison.md").read_text()
OVERVIEW = PAGE.partition("\n## Overview\n")[2].partition("\n## ")[0]
SECTIONS = re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", PAGE, re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\([^)\s]+\)")


class Table(NamedTuple):
    """A table of Markdown: its head, and its rows by their first cell."""

    head: list[str]
    rows: dict[str, list[str]]


def table(text: str) -> Table:
    """Returns the only table of a text."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    head, _, *rows = lines
    return Table(head[1:], {row[0]: row[1:] for row in rows})


def open_cells(found: Table) -> list[str]:
    """Returns the rows with a cell that is empty, missing or a question mark."""
    return [
        name
        for name, cells in found.rows.items()
        if not name or len(cells) != len(found.head) or any(cell.strip("`* ") in {"", "?"} for cell in cells)
    ]


ALL = {"README": table(README), "overview": table(OVERVIEW)} | {name: table(text) for name, text in SECTIONS}


@pytest.mark.parametrize("name", ALL)
def test_no_cell_is_open(name: str) -> None:
    assert ALL[name].rows
    assert open_cells(ALL[name]) == []


def test_an_open_cell_is_found() -> None:
    text = "| | a | b |\n|---|---|---|\n| one | x | y |\n| two | ? | y |\n| three | x | |\n| four | x |\n| five | `?` | y |\n"
    assert open_cells(table(text)) == ["two", "three", "four", "five"]


def test_the_readme_repeats_cells_of_the_overview() -> None:
    overview, readme = ALL["overview"], ALL["README"]
    for name, cells in readme.rows.items():
        whole = dict(zip(overview.head, overview.rows[name], strict=True))
        assert dict(zip(readme.head, cells, strict=True)).items() <= whole.items(), name


def test_every_row_of_the_overview_has_its_claims() -> None:
    assert [name.lower() for name, _ in SECTIONS] == [name.lower() for name in ALL["overview"].rows]


@pytest.mark.parametrize("name", [name for name, _ in SECTIONS])
def test_every_claim_has_a_source_and_a_date(name: str) -> None:
    claims = ALL[name]
    assert claims.head == ["claim", "source", "read"]
    assert list(claims.rows) == ALL["overview"].head
    for project, (_, source, read) in claims.rows.items():
        assert LINK.search(source), project
        assert date.fromisoformat(read) >= date(2026, 11, 29), project


@pytest.mark.parametrize("name", ALL["overview"].rows)
def test_what_is_not_documented_says_so_in_both_places(name: str) -> None:
    short = dict(zip(ALL["overview"].head, ALL["overview"].rows[name], strict=True))
    claims = next(table(text) for title, text in SECTIONS if title.lower() == name.lower())
    for project, (claim, _, _) in claims.rows.items():
        assert (short[project] == "not documented") == claim.startswith("Not documented"), project
