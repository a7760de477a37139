"""Prompts of random short words, with lengths that vary as those of real requests do, or as recorded.

No prompt begins like another one, so none is in a prefix cache: the result holds for traffic without common beginnings, and a
service whose prompts share beginnings carries more.
"""

from __future__ import annotations

import csv
import gzip
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SPREAD = 0.8  # standard deviation of the logarithm of lengths: half of them are below 0.73 of the mean
LONGEST = 8.0  # of the mean
MOST_ROWS = 100_000
COLUMNS = (
    ("prompt_tokens", "response_tokens"),
    ("ContextTokens", "GeneratedTokens"),
    ("input_length", "output_length"),
)
#: Words that tokenizers of today take for one token each, with the space before them.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand part "
    "place case week company system program question work government number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city name team minute idea body back parent face others level office door health person art "
    "war history party result change morning reason research girl guy moment air teacher force education"
)
WORDS = tuple(_TEXT.split())


class Shape(NamedTuple):
    """Tokens of a prompt, and of its response at most."""

    prompt: int
    response: int


class LengthsError(ValueError):
    """The file of lengths cannot be used: its message gives the reason."""


def drawn(rng: random.Random, prompt_mean: float, response_mean: float) -> Iterator[Shape]:
    """Yield shapes without end."""
    while True:
        yield Shape(_length(rng, prompt_mean), _length(rng, response_mean))


def recorded(rng: random.Random, path: Path) -> Iterator[Shape]:
    """Yield the shapes of a CSV file in random order, again and again. Raises LengthsError."""
    shapes = read(path)

    def again() -> Iterator[Shape]:
        while True:
            yield from rng.sample(shapes, len(shapes))

    return again()


def read(path: Path) -> list[Shape]:
    """Return the shapes of a CSV file with a head line, plain or gzipped. Raises LengthsError."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open() as file:
            rows = csv.DictReader(file)
            names = next((pair for pair in COLUMNS if set(pair) <= set(rows.fieldnames or ())), None)
            if names is None:
                pairs = " or ".join(", ".join(pair) for pair in COLUMNS)
                raise LengthsError(f"{path}: the first line names no columns {pairs}")
            prompt, response = names
            shapes = [
                Shape(max(1, int(row[prompt])), max(1, int(row[response])))
                for row, _ in zip(rows, range(MOST_ROWS), strict=False)
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise LengthsError(f"cannot read {path}: {error}") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, LengthsError):
            raise
        raise LengthsError(f"{path}: a row has no whole number of tokens ({error})") from None
    if not shapes:
        raise LengthsError(f"{path}: no row")
    return shapes


def prompt(rng: random.Random, tokens: int) -> str:
    """Return about so many tokens of text."""
    return " ".join(rng.choices(WORDS, k=max(1, tokens)))


def _length(rng: random.Random, mean: float) -> int:
    drawn = mean * math.exp(rng.gauss(-SPREAD * SPREAD / 2, SPREAD))
    return max(1, round(min(drawn, LONGEST * mean)))
