"""The page about the papers has, in every row, a command of this repository that can be run, or says why nothing is measured."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.regions.papers import CLAIMS
from tests.docs.test_code_blocks import check_command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text()
HEAD = "| what | the paper | here | by | why they differ |"
NOT_MEASURED = "not measured"


def tables(head: str) -> list[list[str]]:
    """Returns the cells of all rows below a head."""
    found = []
    for part in PAGE.split(f"{head}\n")[1:]:
        rows = part.partition("\n\n")[0].splitlines()[1:]
        found += [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    return found


COMMANDS = {name: command.strip("`") for name, command in tables("| by | command |")}
ROWS = tables(HEAD)


def check_module(words: list[str]) -> None:
    """Raises AssertionError if there is no such module, or if its parser has no such option or word."""
    spec = find_spec(words[0])
    assert spec is not None, f"there is no module {words[0]}"
    folders = spec.submodule_search_locations
    path = Path(str(spec.origin)) if folders is None else Path(next(iter(folders))) / "__main__.py"
    source = path.read_text()
    for word in words[1:]:
        if word.startswith("--"):
            assert f'"{word}"' in source, f"{words[0]} has no option {word}"
    if len(words) > 1 and re.fullmatch("[a-z]+", words[1]):
        assert f'"{words[1]}"' in source, f"{words[0]} has no word {words[1]}"


def check_test(words: list[str]) -> None:
    """Raises AssertionError if there is no such test."""
    path, _, name = words[-1].partition("::")
    assert (ROOT / path).is_file(), f"there is no {path}"
    assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path} has no {name}"


def check(command: str) -> None:
    """Raises AssertionError if a command cannot be run."""
    program, *words = shlex.split(command)
    if program == "serve":
        check_command(words)
    elif program == "pytest":
        check_test(words)
    else:
        assert (program, words[0]) == ("python", "-m")
        check_module(words[1:])


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_can_be_run(command: str) -> None:
    check(command)


@pytest.mark.parametrize(
    "command",
    [
        "serve simulat --policy spothedge",
        "serve simulate --polici spothedge",
        "python -m benchmarks.nothing",
        "python -m benchmarks.placement tables FOLDER",
        "python -m benchmarks.placement paper FOLDER --seed 1",
        "python -m benchmarks.regions paper",
        "pytest tests/sim/test_nothing.py",
        "pytest tests/sim/test_sim_replay.py::test_nothing",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    with pytest.raises(AssertionError):
        check(command)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_has_a_command_and_a_figure_or_says_why_not(row: list[str]) -> None:
    what, paper, here, by, why = row
    assert what
    assert re.search(r"\d", paper) or paper in ("ours", "no figure")
    if here == NOT_MEASURED:
        assert by == ""
        assert why
    else:
        assert re.search(r"\d", here)
        assert by
        assert set(by.split(", ")) <= COMMANDS.keys()


def test_every_command_is_used() -> None:
    assert ROWS
    assert set(COMMANDS) == {name for row in ROWS for name in row[3].split(", ") if name}


@pytest.mark.parametrize(
    "published", sorted({one.published for one in CLAIMS if re.search(r"\d", one.published)})
)
def test_what_the_benchmark_of_regions_compares_is_on_the_page(published: str) -> None:
    """Both have the figures of SkyWalker and GORGO from the same papers."""
    assert any(published.replace("-", "–") in row[1] for row in ROWS)
