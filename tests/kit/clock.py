"""Virtual time: a clock and the heap of future events."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class SimClock:
    """Time moves only in `advance`, which runs everything that falls due on the way, in order."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def now(self) -> float:
        return self._now

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` in `delay_s` seconds; actions of the same instant run in the order they were asked for."""
        self._count += 1
        heapq.heappush(self._heap, (self._now + delay_s, self._count, action))

    def advance(self, to: float) -> None:
        while self._heap and self._heap[0][0] <= to:
            self._now, _, action = heapq.heappop(self._heap)
            action()
        self._now = max(self._now, to)
