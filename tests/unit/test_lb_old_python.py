"""Agents run on Python 3.10, where `asyncio.TimeoutError` is neither `TimeoutError` nor an `OSError`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "lb").rglob("*.py"))


@pytest.mark.parametrize(
    ("clause", "is_enough"),
    [
        ("except (TimeoutError, OSError): pass", False),
        ("except TimeoutError: pass", False),
        ("except (asyncio.TimeoutError, OSError): pass", True),
        ("except OSError: pass", True),
    ],
)
def test_what_is_looked_for(clause: str, is_enough: bool) -> None:
    assert (builtin_alone(f"try: pass\n{clause}") == []) is is_enough


def test_a_clause_for_a_time_limit_names_that_of_asyncio() -> None:
    found = {path.name: lines for path in FILES if (lines := builtin_alone(path.read_text()))}
    assert len(FILES) > 100
    assert found == {}


def builtin_alone(source: str) -> list[int]:
    """Return the lines of the clauses that catch `TimeoutError` and not `asyncio.TimeoutError`."""
    names = {
        handler.lineno: ast.unparse(handler.type).strip("()").split(", ")
        for handler in ast.walk(ast.parse(source))
        if isinstance(handler, ast.ExceptHandler) and handler.type is not None
    }
    return [
        line
        for line, caught in names.items()
        if "TimeoutError" in caught and "asyncio.TimeoutError" not in caught
    ]
