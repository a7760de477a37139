"""Rows, and ratios of what was measured in the same round.

A ratio is taken within a round, where both systems met the same neighbours on the machine; the median over rounds is
the headline. Its interval is the sign test's: from the k-th smallest to the k-th largest, which holds the true median
with a probability that depends on the number of rounds alone (5 rounds: smallest to largest, 94 %).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.router.cells import Measure
from benchmarks.router.systems import Family

_CONFIDENCE = 0.9
_IN_PACE = 0.95  # of the requests that were due, in a window that counts as in pace


@dataclass(frozen=True, slots=True)
class Row:
    """One system in one cell of one round. `load` is what the load generator printed.

    `facts` are how the system ran, ours by its own status. `wanted_s` are the requests per second of a schedule, if there was one.
    """

    round: int
    cell: str
    system: str
    family: Family
    version: str
    policy: str
    load: Mapping[str, Any]
    engine_requests: int  # that reached the backend meanwhile
    streams: int = 0
    measure: Measure = Measure.CPU
    facts: Mapping[str, Any] = field(default_factory=dict)
    wanted_s: float = 0.0

    @property
    def cost(self) -> float:
        """The compared quantity: CPU µs of the proxy per request or chunk, MiB per 1,000 idle streams, or the 99th
        percentile of the milliseconds to the first chunk."""
        if self.measure is Measure.FIRST_CHUNK:
            return float(self.load["p99_us"]) / 1000 if self.load["latencies"] else math.nan
        if self.measure is Measure.MEMORY:
            return float(self.load["rss_kib"] - self.load["rss_before_kib"]) / 1024 * 1000 / self.streams
        units = self.load["events"] if self.streams else self.load["requests"]
        return float(self.load["proxy_cpu_s"]) * 1e6 / units if units else math.nan

    @property
    def rate_s(self) -> float:
        return float(self.load["events"] if self.streams else self.load["requests"]) / float(
            self.load["window_s"]
        )

    @property
    def faults(self) -> str:
        """Why the row does not count; empty if every byte was right and every request had reached one engine once."""
        kinds = ("failed", "wrong", "cut", *(() if self.measure is Measure.MEMORY else ("unfinished",)))
        found = [f"{self.load[kind]} {kind}" for kind in kinds if self.load[kind]]
        if self.measure is Measure.FIRST_CHUNK and not self.load["latencies"]:
            found.append("no first chunk")
        if self.engine_requests != self.load["sent"]:
            found.append(f"engines had {self.engine_requests} of {self.load['sent']}")
        return ", ".join(found)

    @property
    def is_in_pace(self) -> bool:
        """Whether the proxy kept up with the schedule, if there was one."""
        return self.rate_s >= _IN_PACE * self.wanted_s

    @property
    def cores_used(self) -> float:
        """CPU time of all threads and processes of the proxy, per second."""
        return float(self.load["proxy_cpu_s"]) / float(self.load["window_s"])

    @property
    def ambient_cores(self) -> float:
        """What the rest of the machine was doing."""
        own = sum(self.load[f"{who}_cpu_s"] for who in ("proxy", "backend", "load"))
        return max(0.0, float(self.load["machine_cpu_s"] - own) / float(self.load["window_s"]))

    @property
    def largest_share(self) -> float:
        responses = list(self.load["by_target"].values())
        return max(responses) / sum(responses) if responses else math.nan

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Row:
        return cls(**{**plain, "family": Family(plain["family"]), "measure": Measure(plain["measure"])})


@dataclass(frozen=True, slots=True)
class Ratio:
    median: float
    low: float
    high: float
    coverage: float
    rounds: int

    def __str__(self) -> str:
        if self.rounds == 1:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def interval(values: Sequence[float], confidence: float = _CONFIDENCE) -> tuple[float, float, float]:
    """Low, high and coverage of the narrowest sign-test interval of the median that has at least that confidence;
    of the widest there is (smallest to largest) if there are too few values for any."""
    ordered = sorted(values)
    n = len(ordered)
    best = (ordered[0], ordered[-1], 1 - 2 / 2**n)
    for k in range(2, n // 2 + 1):
        coverage = 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n
        if coverage < confidence:
            break
        best = (ordered[k - 1], ordered[n - k], coverage)
    return best


def ratio(rows: Sequence[Row], system: str, other: str) -> Ratio | None:
    """Of the costs of two systems in one cell, round by round."""
    return _ratio([row for row in rows if row.system == system], [row for row in rows if row.system == other])


def ratio_of_cells(rows: Sequence[Row], system: str, cell: str, beside: str) -> Ratio | None:
    """Of the costs of one system in two cells, round by round."""
    mine = [row for row in rows if row.system == system]
    return _ratio([row for row in mine if row.cell == cell], [row for row in mine if row.cell == beside])


def _ratio(above: Sequence[Row], below: Sequence[Row]) -> Ratio | None:
    costs = {row.round: row.cost for row in below if not row.faults and row.cost > 0}
    pairs = [row.cost / costs[row.round] for row in above if not row.faults and row.round in costs]
    return Ratio(statistics.median(pairs), *interval(pairs), len(pairs)) if pairs else None


def best_rust(rows: Sequence[Row]) -> str | None:
    """The Rust router with the lowest median cost."""
    costs: dict[str, list[float]] = {}
    for row in rows:
        if row.family is Family.RUST and not row.faults:
            costs.setdefault(row.system, []).append(row.cost)
    return min(costs, key=lambda name: statistics.median(costs[name]), default=None)
