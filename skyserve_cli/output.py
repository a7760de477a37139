"""How commands print: data to stdout, sentences to stderr, money and time in one way everywhere; for tables see `tables`."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any

#: The exit code of a command whose time was over, as of `timeout`.
DEADLINE = 124


class CommandFailed(Exception):
    """Ends the command with this text on stderr. `code`: 1 failed, 2 wrong usage, DEADLINE, 130 interrupted."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class WrongUsage(CommandFailed):
    """The command line requests something that makes no sense."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 2)


# --- where to -----------------------------------------------------------------------------------------------


def inform(sentence: str) -> None:
    """Print a message for the user: a line on stderr."""
    print(printable(sentence), file=sys.stderr, flush=True)


def put(line: str) -> None:
    """Print a line of the result on stdout."""
    print(line, flush=True)


def put_json(value: object) -> None:
    put(json.dumps(value, indent=2))


# --- what it looks like -------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """`text` without control characters other than newline and tab: what a replica printed must not steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def span(seconds: float) -> str:
    """Return two units at most: ``45s``, ``3m 20s``, ``2h 5m``, ``4d 1h``."""
    whole = max(0, int(seconds))
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    for index, (unit, size) in enumerate(units):
        if whole >= size:
            head, rest = divmod(whole, size)
            if unit == "s":
                return f"{head}s"
            lesser, lesser_size = units[index + 1]
            return f"{head}{unit} {rest // lesser_size}{lesser}" if rest >= lesser_size else f"{head}{unit}"
    return "0s"


def usd(amount: float) -> str:
    """``0.3000`` below a dollar, ``12.30`` from there on."""
    return f"{amount:.4f}" if abs(amount) < 1 else f"{amount:,.2f}"


def saving(paid: float, on_demand: float) -> str:
    """Return the saving against buying everything on demand: ``68%``; empty where nothing is."""
    return f"{1 - paid / on_demand:.0%}" if 0 <= paid < on_demand else ""


def clock_time(at: float) -> str:
    """Return the time of day where the reader is."""
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%H:%M:%S")


def date_time(at: float) -> str:
    """Date and time where the reader is."""
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def place(replica: dict[str, Any]) -> str:
    return f"{replica['cloud']}/{replica['region']}/{replica['zone']}"


def accelerators(replica: dict[str, Any]) -> str:
    """Return those of each node, and how many nodes if there are several: ``2x L4:8``."""
    name, nodes = replica["accelerator"], replica["num_nodes"]
    each = "-" if name is None else f"{name}:{replica['accelerator_count']:g}"
    return each if nodes == 1 else f"{nodes}x {each}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
