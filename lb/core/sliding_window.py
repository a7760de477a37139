"""What went on in the last seconds: counts and means over a sliding window. Pure; `now` is given."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

MAX_WINDOW_S: Final = 600.0


class WindowCounter:
    """Counts occurrences and forgets those older than MAX_WINDOW_S; `now` must not run backwards.

    A result is exact to one bucket of one second; memory is bounded by the window, not by the traffic.
    """

    def __init__(self) -> None:
        self._second = 0  # the last one in which there were any, and how many
        self._count = 0
        self._buckets: deque[tuple[int, int]] = deque()  # those before it: (second, how many), oldest first

    def add(self, now: float) -> None:
        if self._count and now < self._second + 1:
            self._count += 1
            return
        second = math.floor(now)
        if self._count:
            self._buckets.append((self._second, self._count))
        self._second, self._count = second, 1
        while self._buckets and self._buckets[0][0] < second - MAX_WINDOW_S:
            self._buckets.popleft()

    def count(self, now: float, window_s: float) -> int:
        """Occurrences in the last `window_s` seconds (at most MAX_WINDOW_S)."""
        oldest = math.floor(now - min(window_s, MAX_WINDOW_S))
        if self._second <= oldest:
            return 0
        total = self._count
        for second, count in reversed(self._buckets):
            if second <= oldest:
                break
            total += count
        return total


class WindowMean:
    """The mean over time of a number that goes up and down; `now` must not run backwards.

    Keeps the area under the number, with one or two marks a second: a result is exact to what changed within the
    second at the window's far end, and memory is bounded by the window, not by the traffic.
    """

    def __init__(self, now: float) -> None:
        self._level = 0
        self._area = 0.0  # from the beginning to `_at`
        self._at = now
        self._marks: deque[tuple[float, float]] = deque(
            [(now, 0.0)]
        )  # (instant, area until then), oldest first

    def step(self, now: float, by: int) -> None:
        """The number changes."""
        if now - self._marks[-1][0] >= 1.0 and self._at > self._marks[-1][0]:
            self._marks.append((self._at, self._area))  # from here until now it has not changed
        self._area += self._level * (now - self._at)
        self._at = now
        self._level += by
        if now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, self._area))
        while len(self._marks) > 1 and self._marks[1][0] <= now - MAX_WINDOW_S:
            self._marks.popleft()

    def mean(self, now: float, window_s: float) -> float:
        """Over the last `window_s` seconds (at most MAX_WINDOW_S), or since the beginning if that is less."""
        start = max(now - min(window_s, MAX_WINDOW_S), self._marks[0][0])
        if start >= now:
            return float(self._level)
        total = self._area + self._level * (now - self._at)
        later, later_area = now, total
        for at, area in ((self._at, self._area), *reversed(self._marks)):
            if at <= start:
                share = (start - at) / (later - at)
                return (total - area - share * (later_area - area)) / (now - start)
            later, later_area = at, area
        return total / (now - start)
