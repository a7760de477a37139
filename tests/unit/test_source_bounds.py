"""A bound of the source: no function has a body of more than 60 lines. A module is as long as its subject."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "policies",
    "lb",
    "provisioners",
    "skyserve",
    "skyserve_cli",
    "benchmarks",
    "scripts",
    "tests/kit",
)
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MOST_BODY_LINES = 60

#: Why a function is longer.
LONG_FUNCTIONS = {
    "lb/agent/agent.py:__init__": "the parts of an agent, one after the other; each is complete when it is made",
    "lb/__main__.py:_parser": "one call per option, in the order of --help",
    "skyserve_cli/state/migrations/versions/0007_release_0_2_0.py:upgrade": "a migration is never edited",
}


def test_the_packages_are_there() -> None:
    assert len(FILES) > 400


@pytest.mark.parametrize("package", PACKAGES)
def test_no_body_of_a_function_is_too_long(package: str) -> None:
    found = {
        name: lines
        for path in FILES
        if path.is_relative_to(ROOT / package)
        for name, lines in bodies(path)
        if lines > MOST_BODY_LINES
    }
    assert {name: lines for name, lines in found.items() if name not in LONG_FUNCTIONS} == {}


@pytest.mark.parametrize("name", list(LONG_FUNCTIONS))
def test_exceptions_are_still_needed(name: str) -> None:
    file, _, _ = name.partition(":")
    assert dict(bodies(ROOT / file))[name] > MOST_BODY_LINES


def bodies(path: Path) -> list[tuple[str, int]]:
    """Return file:function and the lines of its body, signature excluded, of every function of a module."""
    return [
        (f"{path.relative_to(ROOT)}:{node.name}", (node.end_lineno or 0) - node.body[0].lineno + 1)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
