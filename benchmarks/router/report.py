"""From rows to tables: medians over rounds, and ratios of what was measured in the same round.

A ratio is taken within a round, where both systems met the same neighbours on the machine; the median over rounds is
the headline. Its interval is the sign test's: from the k-th smallest to the k-th largest, which holds the true median
with a probability that depends on the number of rounds alone (5 rounds: smallest to largest, 94 %).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.router.cells import CELLS, Cell, Measure
from benchmarks.router.systems import Family, Group

_CONFIDENCE = 0.9
_ONE_SIDED = 0.6  # of the responses from one target of four


@dataclass(frozen=True, slots=True)
class Row:
    """One system in one cell of one round. `load` is what the load generator printed."""

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
    """Of the costs of two systems, round by round."""
    costs = {(row.round, row.system): row.cost for row in rows if not row.faults}
    pairs = [
        cost / costs[number, other]
        for (number, name), cost in costs.items()
        if name == system and costs.get((number, other), 0) > 0
    ]
    if not pairs:
        return None
    return Ratio(statistics.median(pairs), *interval(pairs), len(pairs))


def best_rust(rows: Sequence[Row]) -> str | None:
    """The Rust router with the lowest median cost."""
    costs: dict[str, list[float]] = {}
    for row in rows:
        if row.family is Family.RUST and not row.faults:
            costs.setdefault(row.system, []).append(row.cost)
    return min(costs, key=lambda name: statistics.median(costs[name]), default=None)


@dataclass(frozen=True, slots=True)
class Headline:
    cell: Cell
    system: str
    best: str | None
    cost: float | None  # median; None: no row without faults
    to_best: Ratio | None
    to_nginx: Ratio | None

    @property
    def holds(self) -> bool | None:
        """None: this cell has no goal, or nothing to compare with."""
        if self.cell.limit is not None and self.cost is not None:
            return self.cost <= self.cell.limit
        if self.cell.goal is None or self.to_best is None:
            return None
        return self.to_best.median <= self.cell.goal

    @property
    def goal(self) -> str:
        if self.cell.limit is not None:
            return f"{self.cell.limit:g} {self.cell.measure.value}"
        return "" if self.cell.goal is None else f"{self.cell.goal:.2f}"


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """For each cell that was measured and each of ours."""
    found = []
    for cell in CELLS:
        here = [row for row in rows if row.cell == cell.name]
        best = best_rust(here)
        for name in _names(row for row in here if row.family is Family.OURS):
            to_best = ratio(here, name, best) if best else None
            costs = [row.cost for row in here if row.system == name and not row.faults]
            cost = statistics.median(costs) if costs else None
            found.append(Headline(cell, name, best, cost, to_best, ratio(here, name, "nginx")))
    return found


def render(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """Markdown, aligned to be read as it is."""
    parts = [", ".join(f"{name} {value}" for name, value in facts.items())]
    parts.append("\n".join(_headline_table(headlines(rows))))
    for cell in CELLS:
        here = [row for row in rows if row.cell == cell.name]
        if here:
            parts.append(f"### {cell.title}\n\n" + "\n".join(_cell_table(cell, here)))
    return "\n\n".join(parts) + "\n"


def _headline_table(lines: Sequence[Headline]) -> list[str]:
    table = [["cell", "system", "median", "of the best Rust router", "which is", "goal", "", "of nginx"]]
    for line in lines:
        verdict = {None: "", True: "holds", False: "does not hold"}[line.holds]
        best, nginx = line.to_best or "-", line.to_nginx or "-"
        cost = "-" if line.cost is None else f"{line.cost:.1f}"
        table.append(
            [line.cell.title, line.system, cost, str(best), line.best or "-", line.goal, verdict, str(nginx)]
        )
    return _aligned(table)


def _cell_table(cell: Cell, rows: Sequence[Row]) -> list[str]:
    cost = f"{cell.measure.value}/{cell.unit}" if cell.measure is Measure.CPU else cell.measure.value
    rate = "chunks/s" if cell.mode == "streams" else "requests/s"
    head = ["system", "policy", f"{cost}: median", "min - max", "of best Rust", rate, "cores used"]
    head += ["chunks/read"] if cell.mode == "streams" else []
    head += ["p50 µs"] if _has_latency(cell) else []
    head += (
        ["busiest target"] + (["affinity"] if cell.group is Group.PREFIX else []) + ["ambient cores", "notes"]
    )
    best = best_rust(rows)
    lines = [
        _system_line(cell, [row for row in rows if row.system == name], rows, best) for name in _names(rows)
    ]
    return _aligned([head, *lines])


def _system_line(cell: Cell, mine: Sequence[Row], rows: Sequence[Row], best: str | None) -> list[str]:
    good = [row for row in mine if not row.faults]
    first, notes = mine[0], sorted({row.faults for row in mine if row.faults})
    name = f"{first.system} {first.version}".strip()
    if not good:
        columns = 7 + (cell.mode == "streams") + _has_latency(cell) + (cell.group is Group.PREFIX)
        return [name, first.policy, *["-"] * columns, "; ".join(notes)]
    costs = [row.cost for row in good]
    has_cost = first.family is not Family.DIRECT or cell.measure is Measure.FIRST_CHUNK
    line = [name, first.policy]
    line.append(f"{statistics.median(costs):.1f}" if has_cost else "-")
    line.append(f"{min(costs):.1f} - {max(costs):.1f}" if has_cost else "-")
    line.append(str(ratio(rows, first.system, best) or "-") if best and has_cost else "-")
    line.append(f"{_median(good, lambda row: row.rate_s):.0f}" if cell.mode != "idle" else "-")
    line.append(f"{_median(good, lambda row: row.load['proxy_cpu_s'] / row.load['window_s']):.2f}")
    if cell.mode == "streams":
        line.append(f"{_median(good, lambda row: row.load['events'] / max(1, row.load['reads'])):.2f}")
    if _has_latency(cell):
        line.append(f"{_median(good, lambda row: row.load['p50_us']):.0f}")
    share = _median(good, lambda row: row.largest_share)
    line.append(f"{share:.0%}")
    if cell.group is Group.PREFIX:
        line.append(f"{_median(good, lambda row: row.load['affinity']):.2f}")
    line.append(f"{_median(good, lambda row: row.ambient_cores):.2f}")
    if share > _ONE_SIDED and has_cost:
        notes.append("NOT SPREAD over the targets")
    return [*line, "; ".join(notes)]


def _has_latency(cell: Cell) -> bool:
    return cell.mode == "unary" or cell.measure is Measure.FIRST_CHUNK


def _median(rows: Iterable[Row], value: Callable[[Row], float]) -> float:
    return statistics.median(value(row) for row in rows)


def _names(rows: Iterable[Row]) -> list[str]:
    return list(
        dict.fromkeys(
            row.system for row in sorted(rows, key=lambda row: (list(Family).index(row.family), row.system))
        )
    )


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(3, *(len(cell) for cell in column)) for column in zip(*table, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in table
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
