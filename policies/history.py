"""What a service was requested, minute by minute and at this moment, as policies see it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Requests and requests within the SLO of consecutive minutes; NaN where nothing was reported.

    `first` is the number of the first minute since 1970. Both are read-only buffers of doubles, which NumPy reads without a
    copy; this module needs no NumPy.
    """

    first: int
    requests: memoryview
    within_slo: memoryview

    @classmethod
    def of(cls, first: int, requests: Iterable[float], within_slo: Iterable[float]) -> History:
        """Return a history of two series of the same length. Raises ValueError if they differ in length."""
        both = [memoryview(array("d", series)).toreadonly() for series in (requests, within_slo)]
        if len(both[0]) != len(both[1]):
            raise ValueError(
                f"{len(both[0])} minutes of requests, and {len(both[1])} of requests within the SLO"
            )
        return cls(first, *both)

    @property
    def end(self) -> int:
        """The number of the first minute that is not over."""
        return self.first + len(self.requests)

    def until(self, end: int) -> History:
        """Return what was known when minute `end` began. No copy."""
        length = min(max(0, end - self.first), len(self.requests))
        return History(self.first, self.requests[:length], self.within_slo[:length])


@dataclass(frozen=True, slots=True)
class Load:
    """Demand of one service as its load balancers saw it, summed over regions.

    `requests` arrived in the last `window_s` seconds, served or not. `in_flight` and `queued` are at this moment;
    `ongoing` is the mean of their sum over the window. `empty` are the draining replicas to which every LB has
    promised to send nothing more and has nothing left to finish. From the replicas in `heard` some LB has lately received
    a response or a sign of life.
    """

    window_s: float = 60.0
    requests: int = 0
    in_flight: int = 0
    queued: int = 0
    ongoing: float = 0.0
    empty: frozenset[int] = frozenset()
    heard: frozenset[int] = frozenset()
    known: bool = False  # False: no LB has reported since the controller started


NO_LOAD = Load()
