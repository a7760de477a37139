"""What the hot path counts: plain numbers in plain attributes, incremented where things happen.

A labelled counter of a metrics library costs a microsecond or two per increment (a tuple of labels, a lookup, a
lock), `counts.requests += 1` some twenty nanoseconds. So labels are resolved once (`lb.observe.metrics.Metrics.of`), and
Prometheus' shapes are made at a scrape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

TIME_TO_FIRST_BYTE_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
QUEUE_WAIT_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
INTER_TOKEN_S = (
    0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
LOOP_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
DURATION_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1800.0)


class Histogram:
    """Counts of observations between fixed bounds, and their sum.

    `counts[i]` are those above `bounds[i - 1]` and up to and with `bounds[i]`; the last are those above all bounds.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        at = 0
        for bound in self.bounds:  # compiled, faster than a binary search that has to be called
            if value <= bound:
                break
            at += 1
        self.counts[at] += 1
        self.sum += value

    def add(self, other: Histogram) -> None:
        """Add the observations of another histogram with the same bounds."""
        self.counts = [one + another for one, another in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, how many up to it), as Prometheus has its buckets."""
        rows: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), total))
        return rows


def _by_status() -> defaultdict[int, int]:
    return defaultdict(int)


def _by_kind() -> defaultdict[str, int]:
    return defaultdict(int)


@dataclass(slots=True, eq=False)
class Counts:
    """The agent's own, of requests. `responses[f]` are responses to clients with a status of f hundred.

    Of a request's prompt `prompt_bytes` were seen by the policy, and `matched_bytes` of them were thought to be
    in the chosen target's cache; the cache match ratio is one over the other.
    """

    requests: int = 0
    responses: list[int] = field(default_factory=lambda: [0] * 6)
    codes: defaultdict[int, int] = field(default_factory=_by_status)  # responses by status
    errors: defaultdict[str, int] = field(
        default_factory=_by_kind
    )  # requests that ended otherwise than well, by reason
    local_failures: int = 0  # connects that failed for want of something of this host
    rejected: int = 0  # no target could take them
    residency_denied: defaultdict[str, int] = field(default_factory=_by_kind)  # 503 by zone
    limited: int = 0  # 429 by the limits of a key
    unauthorized: int = 0
    client_gone: int = 0
    cut: int = 0  # broken off after their first byte
    retries: int = 0
    moves: int = 0
    queued_total: int = 0
    continued: int = 0
    continued_inexactly: defaultdict[str, int] = field(default_factory=_by_kind)
    continue_refused: defaultdict[str, int] = field(default_factory=_by_kind)
    handed_over: int = 0
    warmups: defaultdict[str, int] = field(default_factory=_by_kind)  # by why they ended
    warmed_prefixes: int = 0
    warmed_bytes: int = 0
    warming_s: float = 0.0
    stalled: int = 0
    prompt_bytes: int = 0
    matched_bytes: int = 0
    deadlines: defaultdict[str, int] = field(default_factory=_by_kind)  # requests with one, by outcome
    tokens_in: int = 0
    tokens_out: int = 0
    bytes_out: int = 0
    duration: Histogram = field(default_factory=lambda: Histogram(DURATION_S))
    queue_wait: Histogram = field(default_factory=lambda: Histogram(QUEUE_WAIT_S))
    ttft: Histogram = field(default_factory=lambda: Histogram(TIME_TO_FIRST_BYTE_S))

    def responded(self, status: int) -> None:
        """A client was sent a response."""
        self.responses[status // 100] += 1
        self.codes[status] += 1


@dataclass(slots=True, eq=False)
class TargetCounts:
    """Of attempts on one target under one policy, or on those of one region, zone and capacity type."""

    attempts: int = 0
    failures: defaultdict[str, int] = field(default_factory=_by_kind)
    ejections: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    ttfb: Histogram = field(default_factory=lambda: Histogram(TIME_TO_FIRST_BYTE_S))
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_S))
    duration: Histogram = field(default_factory=lambda: Histogram(DURATION_S))

    def add(self, other: TargetCounts) -> None:
        """Add the counts of another target."""
        self.attempts += other.attempts
        self.ejections += other.ejections
        self.tokens_in += other.tokens_in
        self.tokens_out += other.tokens_out
        for kind, count in other.failures.items():
            self.failures[kind] += count
        self.ttfb.add(other.ttfb)
        self.inter_token.add(other.inter_token)
        self.duration.add(other.duration)


@dataclass(slots=True, eq=False)
class KeyCounts:
    """Of the requests of one API key's owner that got an error response of ours."""

    refusals: defaultdict[str, int] = field(default_factory=_by_kind)


@dataclass(slots=True, eq=False)
class KeyModelCounts:
    """Of the requests of one API key's owner for one model."""

    requests: int = 0  # that were let in, and are over
    tokens_in: int = 0
    tokens_out: int = 0
