"""What an agent reports of the demand of each minute, as a value <-> JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lb.config.decode import Fields, WireError

_COLUMNS = ("requests", "prompt_tokens", "response_tokens", "late", "ready")
_MOST = 2**53
_MOST_MINUTES = 10_000


@dataclass(frozen=True, slots=True)
class Demand:
    """Consecutive minutes from `first` on, which is counted since 1970; one number for each in every column.

    `now` is the agent's UNIX time. `requests` arrived in the minute; tokens are those of requests that ended in it, as is the
    number of `late` ones. `ready` targets were there when its first request came (0: none came).
    """

    now: float
    first: int
    requests: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    response_tokens: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    ready: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The first minute that is not over."""
        return self.first + len(self.requests)

    def to_json(self) -> dict[str, Any]:
        return {"now": self.now, "first": self.first} | {name: list(getattr(self, name)) for name in _COLUMNS}

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Demand:
        fields = Fields(value, path)
        now, first = fields.number("now", 0.0, 1e12), fields.count("first")
        columns = {name: _counts(fields.take(name), fields.at(name)) for name in _COLUMNS}
        fields.done()
        if len({len(column) for column in columns.values()}) > 1:
            raise WireError(path, "expected as many numbers in each column")
        return cls(now, first, **columns)


def _counts(value: object, path: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MOST_MINUTES:
        raise WireError(path, f"expected a list of at most {_MOST_MINUTES} numbers")
    if not all(type(one) is int and 0 <= one <= _MOST for one in value):
        raise WireError(path, "expected counts")
    return tuple(value)
