"""The shape of a rule, and the commands that rules name. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from skyserve_cli.causes.facts import Facts
from skyserve_cli.causes.log_text import quoted


class Found(NamedTuple):
    """What a rule found: a sentence, the next step (with the command that it ends with), and the line of the log that shows it."""

    sentence: str
    next: str
    line: str = ""


class Rule(NamedTuple):
    """`cause` is for programs. `recognise` returns None where the facts are of another cause."""

    cause: str
    recognise: Callable[[Facts], Found | None]


def update(facts: Facts, change: str, *options: str) -> str:
    """Return a change to the service file and the command that makes it."""
    command = " ".join((f"serve update {facts.name} FILE", *options))
    return f"{change}, then: {command}" if change else command


def with_set(facts: Facts, key: str, value: object) -> str:
    """Return the command that changes one key of the service file."""
    return f"serve update {facts.name} FILE --set {key}={value}"


def logs(facts: Facts) -> str:
    """Return the command that prints the replica's log."""
    number = "" if facts.replica is None else f" {facts.replica['id']}"
    return f"serve logs {facts.name}{number}"


def short(text: str, most: int = 80) -> str:
    """Return a part of a sentence that was not written here."""
    return quoted(text, most)


def line_with(pattern: re.Pattern[str], text: str) -> tuple[re.Match[str], str] | None:
    """Return the last match within a line, and that line."""
    for line in reversed(text.splitlines()):
        found = pattern.search(line)
        if found is not None:
            return found, line
    return None
