"""Counters of an agent since it started, in total and by target, as a value <-> JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lb.config.decode import Fields, WireError

_MOST = 2**53
_MOST_BUCKETS = 100
_MOST_TARGETS = 10_000


class Tally(NamedTuple):
    """Counts since the start of an agent, and two numbers of now.

    Of the agent itself `requests` are those of clients and `errors` the responses of 5xx and those that broke off; of a
    target they are attempts and the attempts that failed. Tokens are as engines count them, of requests that have ended. Of
    `prompt_bytes` that were looked up for routing, `matched_bytes` were thought to be in the cache of the chosen target; of a
    target both are 0. `ttft[i]` requests got their first byte or token within the agent's i-th bound.
    """

    in_flight: int
    queued: int
    requests: int
    errors: int
    tokens_in: int
    tokens_out: int
    prompt_bytes: int
    matched_bytes: int
    ttft: tuple[int, ...]

    def to_json(self) -> list[Any]:
        return [*self[:-1], list(self.ttft)]

    @classmethod
    def from_json(cls, value: object, path: str) -> Tally:
        if not isinstance(value, list) or len(value) != len(cls._fields):
            raise WireError(path, f"expected a list of {len(cls._fields)} values")
        *numbers, ttft = value
        return cls._make((*_counts(numbers, path), _counts(ttft, f"{path}[{len(numbers)}]")))


@dataclass(frozen=True, slots=True)
class Totals:
    """Of an agent that started `uptime_s` ago.

    `bounds` are the upper bounds of the buckets of `Tally.ttft` in seconds; the last bucket has none.
    """

    uptime_s: float
    bounds: tuple[float, ...]
    agent: Tally
    targets: Mapping[str, Tally] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "uptime_s": self.uptime_s,
            "bounds": list(self.bounds),
            "agent": self.agent.to_json(),
            "targets": {name: tally.to_json() for name, tally in self.targets.items()},
        }

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Totals:
        """Raise WireError."""
        fields = Fields(value, path)
        uptime_s = fields.number("uptime_s", 0.0, 1e12)
        bounds = _bounds(fields.take("bounds"), fields.at("bounds"))
        agent = Tally.from_json(fields.take("agent"), fields.at("agent"))
        rows, at = fields.take("targets"), fields.at("targets")
        fields.done()
        if not isinstance(rows, dict) or len(rows) > _MOST_TARGETS:
            raise WireError(at, f"expected at most {_MOST_TARGETS} targets by id")
        targets = {name: Tally.from_json(row, f"{at}.{name}") for name, row in rows.items()}
        if any(len(each.ttft) != len(bounds) + 1 for each in (agent, *targets.values())):
            raise WireError(path, "expected one bucket more than bounds")
        return cls(uptime_s, bounds, agent, targets)


def _counts(value: object, path: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MOST_BUCKETS:
        raise WireError(path, f"expected a list of at most {_MOST_BUCKETS} counts")
    if not all(type(one) is int and 0 <= one <= _MOST for one in value):
        raise WireError(path, "expected counts")
    return tuple(value)


def _bounds(value: object, path: str) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) >= _MOST_BUCKETS:
        raise WireError(path, f"expected a list of less than {_MOST_BUCKETS} numbers")
    if not all(type(one) in (int, float) and 0.0 < one < 1e9 for one in value):
        raise WireError(path, "expected positive numbers")
    if sorted(set(value)) != value:
        raise WireError(path, "expected increasing numbers")
    return tuple(map(float, value))
