"""Turns of a service that take long: it rests afterwards, so that all others are decided about in most of the time.

A tick decides about all services, one after the other. After a second turn in a row of more than SLOW_S a service has none for REST
times as long. The first may have another cause: it loads prices, or the machine stood still. What happened to the service meanwhile is
kept for its next turn.
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
    remark: str = ""


class SlowTurns:
    """One per reconciler. `stopwatch` returns seconds since some instant."""

    def __init__(self, stopwatch: Callable[[], float]) -> None:
        self._stopwatch = stopwatch
        self._slow: dict[str, _Slow] = {}
        self._kept: dict[str, list[Event]] = {}
        self._under_way: tuple[str, float] | None = None

    def rests(self, service: str, events: Sequence[Event], now: float) -> bool:
        """Return whether the service has no turn now; what happened to it is kept then."""
        slow = self._slow.get(service)
        if slow is None or now >= slow.until:
            return False
        self._kept.setdefault(service, []).extend(events)
        return True

    def keeps(self, service: str) -> bool:
        """Return whether something happened to the service that no turn has had yet."""
        return bool(self._kept.get(service))

    def under_way(self) -> tuple[str, float] | None:
        """Return the service that has its turn, and for how long; read by other threads."""
        found = self._under_way
        return None if found is None else (found[0], self._stopwatch() - found[1])

    @contextmanager
    def turn(self, service: str, events: Sequence[Event], now: float) -> Iterator[Turn]:
        """Measure one turn. What it has started with is kept for the next one if it fails."""
        slow = self._slow.get(service)
        began = self._stopwatch()
        happened = [*self._kept.get(service, ()), *events]
        if happened:
            self._kept[service] = happened
        self._under_way = service, began
        try:
            yield Turn(happened, "" if slow is None else slow.remark)
        finally:
            self._under_way = None
        self._kept.pop(service, None)
        took_s = self._stopwatch() - began
        if took_s < SLOW_S / 2 or (slow is None and took_s <= SLOW_S):
            self._slow.pop(service, None)
            return
        if slow is None:
            self._slow[service] = _Slow(now)
            return
        remark = f"deciding about it takes {took_s:.1f} s, so it is decided about every {REST * took_s:.0f} s at most"
        # The first sentence stands, or each turn would be an event.
        self._slow[service] = _Slow(now + REST * took_s, slow.remark or remark)
