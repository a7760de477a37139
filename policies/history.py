"""What a service was requested, minute by minute and at this moment, as policies see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Requests, requests within the SLO, ready replicas and tokens of consecutive minutes; NaN where nothing was reported.

    `first` is the number of the first minute since 1970. The series are read-only buffers of doubles, which NumPy reads without
    a copy; this module needs no NumPy. They do not change afterwards, so longer histories may share them. Requests that turned out to be late are subtracted in the minute in which they ended, so
    of a quiet minute after a busy one fewer than none may be within the SLO. `prompt` and `response` are tokens of requests that
    ended in the minute. None: not known.
    """

    first: int
    requests: memoryview
    within_slo: memoryview
    ready: memoryview | None = None
    prompt: memoryview | None = None
    response: memoryview | None = None

    @property
    def end(self) -> int:
        """The number of the first minute that is not over."""
        return self.first + len(self.requests)

    def until(self, end: int) -> History:
        """Return what was known when minute `end` began. No copy."""
        return self._cut(0, min(max(0, end - self.first), len(self.requests)))

    def since(self, first: int) -> History:
        """Return the minutes from `first` on. No copy."""
        return self._cut(min(max(0, first - self.first), len(self.requests)), len(self.requests))

    def _cut(self, start: int, end: int) -> History:
        optional = (self.ready, self.prompt, self.response)
        return History(
            self.first + start,
            self.requests[start:end],
            self.within_slo[start:end],
            *(None if series is None else series[start:end] for series in optional),
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Demand of one service as its load balancers saw it, summed over regions.

    `requests` arrived in the last `window_s` seconds, served or not. `in_flight` and `queued` are at this moment;
    `ongoing` is the mean of their sum over the window. `empty` are the draining replicas to which every LB has
    promised to send nothing more and has nothing left to finish. From the replicas in `responsive` some LB has lately received
    a response or a sign of life. `warming` are new replicas whose caches some LB fills before it sends them requests. `loaded`
    are ready ones whose probes wait behind requests (`health`). The engines of `engines` ready replicas report their load: `engine_queue`
    requests wait in them together, and `kv_usage` is the sum of their KV cache usage (0 to 1 each). `asked` replicas are
    needed whatever a scaler measures.
    """

    window_s: float = 60.0
    requests: int = 0
    in_flight: int = 0
    queued: int = 0
    ongoing: float = 0.0
    empty: frozenset[int] = frozenset()
    responsive: frozenset[int] = frozenset()
    warming: frozenset[int] = frozenset()
    loaded: frozenset[int] = frozenset()
    engines: int = 0
    engine_queue: float = 0.0
    kv_usage: float = 0.0
    asked: int = 0
    known: bool = False  # False: no LB has reported since the controller started


NO_LOAD = Load()
