"""JSON that another program sends: what parsers let through and nothing behind them takes is refused, by its path.

As `yaml_tree` does for files: a key written twice, numbers that are not finite or too large, characters that no process,
header or database can be given, and documents that are too large or too deep.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from skyserve_cli.spec.problems import Loc, Problem, SpecError, dotted, shown

MAX_BYTES = 256 << 10  # of a file, and of a text in it
LARGEST = (1 << 63) - 1
# What no process, header or database can be given: NUL, and halves of surrogate pairs.
UNUSABLE = re.compile("[\x00\ud800-\udfff]")
MAX_VALUES = 100_000
MAX_DEPTH = 20
_CHARACTER = "a character that cannot be passed on (NUL or half a surrogate pair)"


class _Twice:
    """The value of a key that was written twice."""


def read_json(text: bytes) -> Any:
    """Return the value of the text. Raises SpecError with the paths of what is wrong."""
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise SpecError([Problem("", f"nested more than {MAX_DEPTH} levels deep")]) from None
    except ValueError as error:  # also of what is no text
        raise SpecError([Problem("", f"not valid JSON: {error}")]) from None
    insist_on_usable(value)
    return value


def insist_on_usable(value: object) -> None:
    """Raise SpecError unless everything in the value can be stored and passed on."""
    problems = list(_unusable(value))
    if problems:
        raise SpecError(problems)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        found[key] = _Twice() if key in found else value
    return found


def _unusable(document: object) -> Iterator[Problem]:
    waiting: list[tuple[Loc, object]] = [((), document)]
    seen = 0
    while waiting:
        loc, value = waiting.pop()
        seen += 1
        if seen > MAX_VALUES:
            yield Problem("", f"has more than {MAX_VALUES:,} values")
            return
        if len(loc) > MAX_DEPTH:
            yield Problem(dotted(loc[:3]), f"is nested more than {MAX_DEPTH} levels deep")
        elif isinstance(value, dict):
            waiting += [((*loc, str(key)), inner) for key, inner in value.items()]
            if any(UNUSABLE.search(str(key)) for key in value):
                yield Problem(dotted(loc), f"has a key with {_CHARACTER}")
        elif isinstance(value, list):
            waiting += [((*loc, index), inner) for index, inner in enumerate(value)]
        elif isinstance(value, _Twice):
            yield Problem(dotted(loc), "appears twice")
        elif isinstance(value, float) and not math.isfinite(value):
            yield Problem(dotted(loc), f"must be a finite number (got {shown(value)})")
        elif isinstance(value, int) and abs(value) > LARGEST:
            yield Problem(dotted(loc), "must be a whole number of a reasonable size")
        elif isinstance(value, str) and UNUSABLE.search(value):
            yield Problem(dotted(loc), f"holds {_CHARACTER}")
