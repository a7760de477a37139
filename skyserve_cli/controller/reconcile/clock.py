"""The controller's clocks enter here, and nowhere else.

`SystemClock` is UNIX time for rows, money, events and notices; `SteadyClock` measures waits inside this process. Both
count the time for which the host was suspended: the instances ran, and cost, meanwhile. CLOCK_MONOTONIC of Linux and
Python's `monotonic` on macOS stand still in suspend, so another source is used where there is one.

A user may also *set* the host's clock. `SystemClock.now` does not follow by itself: it would make waits end, and costs
fall. The ticker sees the jump (`jump_s`), moves the instants of live rows by as much (`Store.move_instants`), and only
then lets the clock follow (`follow`). So durations, ages and costs are what they were, and new instants are right.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

#: A smaller difference is left alone: the steady clock runs at the rate of the host's, so it does not grow.
JUMP_S = 5.0


class Clock(Protocol):
    def now(self) -> float:
        """Return seconds."""
        ...


class Steady(NamedTuple):
    """A source of seconds that cannot be set. `counts_suspension`: it goes on while the host sleeps."""

    read: Callable[[], float]
    counts_suspension: bool


def steady_source() -> Steady:
    """Return the best one of this host."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return Steady(lambda: time.clock_gettime(time.CLOCK_BOOTTIME), counts_suspension=True)
    if sys.platform == "darwin":  # its CLOCK_MONOTONIC goes on in sleep
        return Steady(lambda: time.clock_gettime(time.CLOCK_MONOTONIC), counts_suspension=True)
    return Steady(time.monotonic, counts_suspension=False)


class SteadyClock:
    """Seconds since some instant, for waits of this process alone: neither set nor stopped by a suspension."""

    def __init__(self, steady: Steady | None = None) -> None:
        self._steady = steady_source() if steady is None else steady

    def now(self) -> float:
        return self._steady.read()


class SystemClock:
    """UNIX time, at most JUMP_S off the host's clock after `follow`, and back only by `follow`."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Steady | None = None) -> None:
        self._wall = wall
        self._steady = steady_source() if steady is None else steady
        self._offset_s = wall() - self._steady.read()
        self._jump = (0.0, float("-inf"))

    def now(self) -> float:
        return self._steady.read() + self._offset_s

    def jump_s(self) -> float:
        """By how much the host's clock was set since it was last followed; 0 for a small difference."""
        difference_s = self._wall() - self.now()
        return difference_s if abs(difference_s) > JUMP_S else 0.0

    def follow(self, jump_s: float) -> None:
        """Go on from the host's clock as it was set."""
        self._offset_s += jump_s
        self._jump = jump_s, self._steady.read()

    def last_jump(self) -> tuple[float, float] | None:
        """Return by how much the host's clock was last set, and for how many seconds it has been followed; None: never."""
        by_s, at = self._jump
        return (by_s, self._steady.read() - at) if by_s else None

    def moves_instants(self, jump_s: float) -> bool:
        """Return whether instants of before must move with the clock.

        Not where a jump forwards may have been a suspension: that time has really passed.
        """
        return jump_s < 0 or self._steady.counts_suspension
