"""What can be said about a YAML file: problems (they stop it) and warnings (they do not).

A path is written the way the user's file is read: ``resources.any_of[1].cloud``.
"""

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Loc = tuple[str | int, ...]

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `message` is a whole sentence and already quotes the value, shortened."""

    path: str
    message: str
    value: object | None = None
    hint: str | None = None

    def __str__(self) -> str:
        sentence = f"{self.path}: {self.message}" if self.path else self.message
        return f"{sentence}; {self.hint}" if self.hint else sentence


@dataclass(frozen=True, slots=True)
class SpecWarning:
    """Something the user should know although the file is accepted."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class SpecError(ValueError):
    """The file describes no service we can run; `problems` holds every reason, never only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        unique = {(problem.path, problem.message): problem for problem in problems}
        self.problems: tuple[Problem, ...] = tuple(unique.values())
        super().__init__(*self.problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def dotted(loc: Sequence[str | int]) -> str:
    """``("resources", "any_of", 1, "cloud")`` -> ``resources.any_of[1].cloud``; odd keys are quoted."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _PLAIN_KEY.fullmatch(part):
            path += f".{part}" if path else part
        else:
            path += f"[{shown(part)}]"
    return path


def shown(value: object) -> str:
    """The value as the user may recognise it, in one short printable line."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = ascii(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return a hint when `word` looks like a slip of one of the known words, else None."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower()[:64], by_lower, n=1, cutoff=0.6)
    return f'did you mean "{by_lower[close[0]]}"?' if close else None
