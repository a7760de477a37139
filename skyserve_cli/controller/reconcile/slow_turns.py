"""Turns of a service that take long: it rests afterwards, so that all others are decided about in most of the time.

A tick decides about all services, one after the other. After a second turn in a row of more than SLOW_S a service has none for REST
times as long. The first may have another cause: it loads prices, or the machine stood still. What happened to the service meanwhile is
kept for its next turn. A service of LARGE and more replicas rests after each turn, LARGE_REST times as long, without a remark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from policies.model import Event, Progressed
from skyserve_cli.controller.reconcile.tick_cache import Orders

SLOW_S = 1.0
REST = 10.0
LARGE = 1000
LARGE_REST = 15.0  # the decision, which is measured, is a third to a half of what the turn takes


class Turn(NamedTuple):
    """What a turn begins with: all that has happened since the last one, and a remark about the service."""

    events: Sequence[Event]
    remark: str


@dataclass(slots=True)
class _Slow:
    until: float
    remark: str = ""
    is_slow: bool = True


class SlowTurns:
    """One per reconciler. `stopwatch` returns seconds since some instant."""

    def __init__(self, stopwatch: Callable[[], float]) -> None:
        self._stopwatch = stopwatch
        self._slow: dict[str, _Slow] = {}
        self._kept: dict[str, list[Event]] = {}
        self._under_way: tuple[str, float] | None = None

    def rests(self, service: str, events: Sequence[Event], now: float, *, has_listings: bool = False) -> bool:
        """Return whether the service has no turn now; what happened to it is kept then.

        What clouds list is not, so a large service does not rest then.
        """
        slow = self._slow.get(service)
        if slow is None or now >= slow.until or (has_listings and not slow.is_slow):
            return False
        self.keep(service, events)
        return True

    def keep(self, service: str, events: Sequence[Event]) -> None:
        """Keep what happened to a service for its next turn."""
        if events:
            self._kept.setdefault(service, []).extend(events)

    def waiting(self, service: str, orders: Orders) -> Orders:
        """Return the orders of a service that has no turn now, which were given before: without calls that have had their results."""
        done = {one.replica_id for one in self._kept.get(service, ()) if not isinstance(one, Progressed)}
        calls = tuple(call for call in orders.calls if call.replica.id not in done)
        return orders if len(calls) == len(orders.calls) else orders._replace(calls=calls)

    def keeps(self, service: str) -> bool:
        """Return whether something happened to the service that no turn has had yet."""
        return bool(self._kept.get(service))

    def under_way(self) -> tuple[str, float] | None:
        """Return the service that has its turn, and for how long; read by other threads."""
        found = self._under_way
        return None if found is None else (found[0], self._stopwatch() - found[1])

    @contextmanager
    def turn(self, service: str, events: Sequence[Event], now: float, replicas: int = 0) -> Iterator[Turn]:
        """Measure one turn of a service of so many `replicas`. What it has started with is kept for the next one if it fails."""
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
        if took_s < SLOW_S / 2 or ((slow is None or not slow.is_slow) and took_s <= SLOW_S):
            self._slow.pop(service, None)
            if replicas >= LARGE:
                self._slow[service] = _Slow(now + LARGE_REST * took_s, is_slow=False)
            return
        if slow is None or not slow.is_slow:
            self._slow[service] = _Slow(now)
            return
        remark = f"deciding about it takes {took_s:.1f} s, so it is decided about every {REST * took_s:.0f} s at most"
        # The first sentence stands, or each turn would be an event.
        self._slow[service] = _Slow(now + REST * took_s, slow.remark or remark)
