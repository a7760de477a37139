"""Turns of a service that take long: it rests afterwards, so that all others are decided about in most of the time.

A tick decides about all services, one after the other. After a turn of more than SLOW_S a service has none for REST times as long.
What happened to it meanwhile is kept for its next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from policies.model import Event

SLOW_S = 1.0
REST = 10.0


class Turn(NamedTuple):
    """What a turn begins with: all that has happened since the last one, and a remark about the service."""

    events: Sequence[Event]
    remark: str


@dataclass(slots=True)
class _Slow:
    until: float
    remark: str


class SlowTurns:
    """One per reconciler. `stopwatch` returns seconds since some instant."""

    def __init__(self, stopwatch: Callable[[], float]) -> None:
        self._stopwatch = stopwatch
        self._slow: dict[str, _Slow] = {}
        self._kept: dict[str, list[Event]] = {}

    def rests(self, service: str, events: Sequence[Event], now: float) -> bool:
        """Return whether the service has no turn now; what happened to it is kept then."""
        slow = self._slow.get(service)
        if slow is None or now >= slow.until:
            return False
        self._kept.setdefault(service, []).extend(events)
        return True

    @contextmanager
    def turn(self, service: str, events: Sequence[Event], now: float) -> Iterator[Turn]:
        """Measure one turn."""
        slow = self._slow.get(service)
        began = self._stopwatch()
        yield Turn((*self._kept.pop(service, ()), *events), "" if slow is None else slow.remark)
        took_s = self._stopwatch() - began
        if took_s < SLOW_S / 2 or (slow is None and took_s <= SLOW_S):
            self._slow.pop(service, None)
            return
        remark = f"deciding about it takes {took_s:.1f} s, so it is decided about every {REST * took_s:.0f} s at most"
        # The first sentence stands, or each turn would be an event.
        self._slow[service] = _Slow(now + REST * took_s, remark if slow is None else slow.remark)
