"""A stretch of any open workload, played faster: the same calls, some of them in less time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.traffic.workloads import Arrival, Call, Workload


@dataclass(frozen=True, slots=True)
class Burst:
    """`times` the load from `at_s` on, for `length_s`."""

    at_s: float
    length_s: float
    times: float

    def moved(self, at_s: float) -> float:
        """When a call comes that would have come at `at_s` without the burst."""
        if at_s <= self.at_s:
            return at_s
        within = (at_s - self.at_s) / self.times
        if within <= self.length_s:
            return self.at_s + within
        return at_s - self.length_s * (self.times - 1)

    @property
    def ends_at(self) -> float:
        return self.at_s + self.length_s


class WithBurst:
    """`workload` with a burst in what comes by itself. What the end of a call sets off comes as soon as ever."""

    def __init__(self, workload: Workload, burst: Burst) -> None:
        self.name = workload.name
        self._workload = workload
        self._burst = burst

    def opening(self) -> Iterator[Arrival]:
        for arrival in self._workload.opening():
            yield Arrival(self._burst.moved(arrival.at_s), arrival.call)

    def ended(self, call: Call, now: float) -> Iterable[Arrival]:
        return self._workload.ended(call, now)
