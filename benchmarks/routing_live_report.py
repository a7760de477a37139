"""From the runs of `benchmarks.routing_live` to its tables: what each system measured, and how it compares.

Systems are compared within rounds, where they had the same calls to serve: ratios of times and rates, differences of
hit rates. The median over rounds is printed with the interval of the sign test. If the interval holds "no difference", what
is between them is noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from benchmarks.router.rows import interval
from benchmarks.traffic.measure import Metrics
from policies.routing.names import SERVICE_POLICY

REFERENCE = "sglang-router"
CLAIMANT = SERVICE_POLICY


@dataclass(frozen=True, slots=True)
class Row:
    """One run. `wall_s` is 0 and nothing is busy where nothing ran: in the simulator. `faults` are the first of
    `metrics.refused` calls that got no whole response."""

    round: int
    workload: str
    system: str
    version: str
    metrics: Metrics
    wall_s: float = 0.0
    busy: float = 0.0  # share of all processors, by anybody
    late_s: float = 0.0  # how late the client was woken, 99th percentile
    faults: Sequence[str] = ()

    def __str__(self) -> str:
        cells = ", ".join(f"{column.head} {column.value(self.metrics):{column.form}}" for column in COLUMNS)
        faults = f"; {self.metrics.refused} lost: {', '.join(self.faults)}" if self.faults else ""
        return f"{self.system:14} {cells}, {self.wall_s:.0f} s, machine {self.busy:.0%}, late {self.late_s:.3f} s{faults}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Row:
        return cls(**{**plain, "metrics": Metrics(**plain["metrics"])})


class Column(NamedTuple):
    """`better` is 1 if more is better, -1 if less is. `differs`: compared by difference, not by ratio."""

    head: str
    value: Callable[[Metrics], float]
    form: str
    better: int
    differs: bool = False

    def compare(self, mine: Metrics, other: Metrics) -> float:
        a, b = self.value(mine), self.value(other)
        return a - b if self.differs else a / b


COLUMNS = (
    Column("hit rate", lambda m: m.hit_rate, ".3f", 1, differs=True),
    Column("TTFT p50 s", lambda m: m.ttft_p50_s, ".2f", -1),
    Column("p90", lambda m: m.ttft_p90_s, ".2f", -1),
    Column("p99", lambda m: m.ttft_p99_s, ".2f", -1),
    Column("tokens/s", lambda m: m.tokens_per_s, ".0f", 1),
    Column("imbalance", lambda m: m.imbalance, ".2f", -1),
)


class Middle(NamedTuple):
    """A median and its interval."""

    median: float
    low: float
    high: float
    values: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Middle:
        low, high, _ = interval(values)
        return cls(statistics.median(values), low, high, len(values))

    def shown(self, form: str) -> str:
        text = f"{self.median:{form}}"
        return text + (f" [{self.low:{form}}, {self.high:{form}}]" if self.values > 1 else "")


def comparison(rows: Sequence[Row], column: Column, system: str, other: str) -> Middle | None:
    """Of two systems on one workload, round by round; None if no round has both."""
    of = {(row.round, row.system): row.metrics for row in rows}
    pairs = [
        column.compare(metrics, of[number, other])
        for (number, name), metrics in of.items()
        if name == system and (number, other) in of
    ]
    return Middle.of(pairs) if pairs else None


def verdict(found: Middle, column: Column) -> str:
    """`better` or `worse` only if the whole interval says so, and there are rounds enough for one."""
    none = 0.0 if column.differs else 1.0
    if found.values < 2 or found.low <= none <= found.high:
        return ""
    return "better" if (found.median > none) == (column.better > 0) else "worse"


def worse(rows: Sequence[Row]) -> list[str]:
    """In what our version of the reference's own policy is worse than the reference."""
    found = []
    for workload in _ordered(row.workload for row in rows):
        here = [row for row in rows if row.workload == workload]
        for column in COLUMNS:
            compared = comparison(here, column, CLAIMANT, REFERENCE)
            if compared is not None and verdict(compared, column) == "worse":
                found.append(f"{workload}: {column.head} {compared.shown('.2f')}")
    return found


def render(rows: Sequence[Row], title: str) -> str:
    """Markdown, aligned to be read as it is."""
    parts = [title]
    for workload in _ordered(row.workload for row in rows):
        here = [row for row in rows if row.workload == workload]
        calls = sorted(row.metrics.calls for row in here)
        parts.append(f"### {workload}: {calls[0]} to {calls[-1]} calls a run\n\n{_values(here)}")
        if any(row.system == REFERENCE for row in here):
            parts.append(f"Compared with {REFERENCE}, round by round:\n\n{_comparisons(here)}")
    return "\n\n".join(parts) + "\n"


def _values(rows: Sequence[Row]) -> str:
    table = [["system", *(column.head for column in COLUMNS), "lost", "wall s", "machine", "late s"]]
    for system in _ordered(row.system for row in rows):
        mine = [row for row in rows if row.system == system]
        values = [
            Middle.of([column.value(row.metrics) for row in mine]).shown(column.form) for column in COLUMNS
        ]
        lost = str(sum(row.metrics.refused for row in mine))
        table.append([f"{system} {mine[0].version}".strip(), *values, lost, *_circumstances(mine)])
    return _aligned(table)


def _circumstances(rows: Sequence[Row]) -> list[str]:
    """How long a run took, how busy the machine was, how late the client: nothing of a simulated one."""
    if not rows[0].wall_s:
        return ["", "", ""]
    wall_s, busy, late_s = (
        statistics.median(values)
        for values in zip(*((row.wall_s, row.busy, row.late_s) for row in rows), strict=True)
    )
    return [f"{wall_s:.0f}", f"{busy:.0%}", f"{late_s:.3f}"]


def _comparisons(rows: Sequence[Row]) -> str:
    table = [["system", *(column.head for column in COLUMNS)]]
    for system in _ordered(row.system for row in rows if row.system != REFERENCE):
        line = [system]
        for column in COLUMNS:
            found = comparison(rows, column, system, REFERENCE)
            form = "+.3f" if column.differs else ".2f"
            line.append(f"{found.shown(form)} {verdict(found, column)}".strip() if found else "-")
        table.append(line)
    return _aligned(table)


def _ordered(names: Iterable[str]) -> list[str]:
    """Each once: what really ran before what was simulated, by name."""
    return sorted(set(names), key=lambda name: (name.startswith("simulated"), name))


def _aligned(table: Sequence[Sequence[str]]) -> str:
    widths = [max(3, *(len(cell) for cell in column)) for column in zip(*table, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in table
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
