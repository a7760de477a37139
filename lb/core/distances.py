"""The round trip to a target in another region, from polls that run anyway. Pure.

A poll takes the round trip and the engine's time for it, so the shortest of the last WINDOW_S (or of the last few polls,
where they are rare) is the distance. A route that becomes longer is believed once the window has passed.
"""

from __future__ import annotations

from math import inf

WINDOW_S = 10.0
DEVIATION_SHARE = 0.1  # of the newest poll in the usual deviation


class Distance:
    """The shortest poll of the present and of the last half window, and how far polls usually are above it."""

    __slots__ = ("_before", "_half_until", "_now", "deviation_s")

    def __init__(self) -> None:
        self._before = self._now = inf
        self._half_until = -inf
        self.deviation_s = 0.0

    def observe(self, took_s: float, now: float, every_s: float = 0.0) -> float:
        """A poll took `took_s`, the next one follows in `every_s`. Returns the distance in seconds."""
        if now >= self._half_until:
            half_s = max(WINDOW_S / 2, 2.0 * every_s)
            stale = now >= self._half_until + half_s
            self._before, self._now = inf if stale else self._now, inf
            self._half_until = now + half_s
        self._now = min(self._now, took_s)
        distance_s = min(self._before, self._now)
        self.deviation_s += DEVIATION_SHARE * (took_s - distance_s - self.deviation_s)
        return distance_s
