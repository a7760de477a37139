"""How many in the last seconds: counters over a sliding window, in whole-second buckets. Pure; `now` is given."""

from __future__ import annotations

import math
from collections import deque

MAX_WINDOW_S = 600.0


class WindowCounter:
    """Counts occurrences and forgets those older than MAX_WINDOW_S; `now` must not run backwards.

    An answer is exact to one bucket of one second; memory is bounded by the window, not by the traffic.
    """

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, int]] = deque()  # (second, how many), oldest first

    def add(self, now: float) -> None:
        second = math.floor(now)
        if self._buckets and self._buckets[-1][0] >= second:
            last, count = self._buckets[-1]
            self._buckets[-1] = (last, count + 1)
            return
        self._buckets.append((second, 1))
        while self._buckets[0][0] < second - MAX_WINDOW_S:
            self._buckets.popleft()

    def count(self, now: float, window_s: float) -> int:
        """Occurrences in the last `window_s` seconds (at most MAX_WINDOW_S)."""
        oldest = math.floor(now - min(window_s, MAX_WINDOW_S))
        total = 0
        for second, count in reversed(self._buckets):
            if second <= oldest:
                break
            total += count
        return total
