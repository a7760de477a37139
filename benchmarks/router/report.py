"""From rows to tables: what was measured, the goals, and every cell. The worst row of a family of systems comes first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.router.cells import BY_NAME, CELLS, Cell, Measure
from benchmarks.router.rows import Ratio, Row, best_rust, ratio, ratio_of_cells
from benchmarks.router.systems import Family, Group

_ONE_SIDED = 0.6  # of the responses from one target of four


@dataclass(frozen=True, slots=True)
class Headline:
    cell: Cell
    system: str
    best: str | None
    cost: float | None  # median; None: no row without faults
    to_best: Ratio | None
    to_nginx: Ratio | None
    to_envoy: Ratio | None = None

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
    """For each cell that was measured and each of ours, the worst of a cell first."""
    found: list[Headline] = []
    for cell in CELLS:
        here = [row for row in rows if row.cell == cell.name]
        best = best_rust(here)
        for name in _names(row for row in here if row.family is Family.OURS):
            to_best = ratio(here, name, best) if best else None
            costs = [row.cost for row in here if row.system == name and not row.faults]
            cost = statistics.median(costs) if costs else None
            peers = (ratio(here, name, "nginx"), ratio(here, name, "envoy"))
            found.append(Headline(cell, name, best, cost, to_best, *peers))
    return found


def render(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """Markdown, aligned to be read as it is."""
    parts = [", ".join(f"{name} {value}" for name, value in facts.items())]
    parts += ["\n".join(_aligned(table)) for table in (_measured_table(rows),) if len(table) > 1]
    parts.append("\n".join(_headline_table(headlines(rows))))
    for cell in CELLS:
        here = [row for row in rows if row.cell == cell.name]
        if here:
            parts.append(f"### {cell.title}\n\n" + "\n".join(_cell_table(cell, here, rows)))
    return "\n\n".join(parts) + "\n"


def _measured_table(rows: Sequence[Row]) -> list[list[str]]:
    """What each of ours was, by its own status: a line for each way in which it ran, with the cells of it."""
    cells: dict[tuple[str, ...], list[str]] = {}
    columns = list(dict.fromkeys(name for row in rows for name in row.facts))
    for row in rows:
        if row.family is Family.OURS and row.facts:
            line = (row.system, row.version, *(str(row.facts.get(name, "")) for name in columns))
            cells.setdefault(line, []).append(row.cell)
    lines = [[*line, ", ".join(dict.fromkeys(names))] for line, names in cells.items()]
    return [["what was measured", "version", *columns, "cells"], *lines]


def _headline_table(lines: Sequence[Headline]) -> list[str]:
    table = [
        [
            "cell",
            "system",
            "median",
            "of the best Rust router",
            "which is",
            "goal",
            "",
            "of nginx",
            "of Envoy",
        ]
    ]
    for line in lines:
        verdict = {None: "", True: "holds", False: "does not hold"}[line.holds]
        best, nginx, envoy = line.to_best or "-", line.to_nginx or "-", line.to_envoy or "-"
        cost = "-" if line.cost is None else f"{line.cost:.1f}"
        table.append(
            [
                line.cell.title,
                line.system,
                cost,
                str(best),
                line.best or "-",
                line.goal,
                verdict,
                str(nginx),
                str(envoy),
            ]
        )
    return _aligned(table)


def _cell_table(cell: Cell, here: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """`here` are the rows of the cell, `rows` all of them."""
    names, best = _names(here), best_rust(here)
    lines = [_system_line(cell, [row for row in here if row.system == name], rows, best) for name in names]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    return _aligned([columns, *([line.get(name, "-") for name in columns] for line in lines)])


def _system_line(cell: Cell, mine: Sequence[Row], rows: Sequence[Row], best: str | None) -> dict[str, str]:
    """Return the line of a system, by column."""
    good = [row for row in mine if not row.faults]
    first, notes = mine[0], sorted({row.faults for row in mine if row.faults})
    line = {"system": f"{first.system} {first.version}".strip(), "policy": first.policy}
    line |= _values(cell, good, rows, best) if good else {}
    if (
        good
        and first.family is not Family.DIRECT
        and _median(good, lambda row: row.largest_share) > _ONE_SIDED
    ):
        notes.append("NOT SPREAD over the targets")
    if not all(row.is_in_pace for row in good):
        notes.append(f"NOT IN PACE: {_median(good, lambda row: row.wanted_s):.0f} requests/s were due")
    return {**line, "notes": "; ".join(notes)}


def _values(cell: Cell, good: Sequence[Row], rows: Sequence[Row], best: str | None) -> dict[str, str]:
    cost = f"{cell.measure.value}/{cell.unit}" if cell.measure is Measure.CPU else cell.measure.value
    system, costs = good[0].system, [row.cost for row in good]
    here = [row for row in rows if row.cell == cell.name]
    line: dict[str, str] = {}

    def add(column: str, value: object, shown: bool = True) -> None:
        line[column] = str(value) if shown else "-"

    has_cost = good[0].family is not Family.DIRECT or cell.measure is Measure.FIRST_CHUNK
    add(f"{cost}: median", f"{statistics.median(costs):.1f}", has_cost)
    add("min - max", f"{min(costs):.1f} - {max(costs):.1f}", has_cost)
    add("of best Rust", (best and ratio(here, system, best)) or "-", has_cost)
    if cell.beside and any(row.cell == cell.beside for row in rows):
        beside = ratio_of_cells(rows, system, cell.name, cell.beside)
        add(f"of its own in {BY_NAME[cell.beside].name}", beside or "-", has_cost)
    rate = "chunks/s" if cell.mode == "streams" else "requests/s"
    add(rate, f"{_median(good, lambda row: row.rate_s):.0f}", cell.mode != "idle")
    add("cores used", f"{_median(good, lambda row: row.cores_used):.2f}")
    if cell.mode == "streams":
        add("chunks/read", f"{_median(good, lambda row: row.load['events'] / max(1, row.load['reads'])):.2f}")
    if _has_latency(cell):
        for percentile in ("p50", "p99"):
            values = [row.load[f"{percentile}_us"] for row in good if f"{percentile}_us" in row.load]
            add(f"{percentile} µs", f"{statistics.median(values):.0f}" if values else "-")
    add("busiest target", f"{_median(good, lambda row: row.largest_share):.0%}")
    if cell.group is Group.PREFIX:
        add("affinity", f"{_median(good, lambda row: row.load['affinity']):.2f}")
    add("ambient cores", f"{_median(good, lambda row: row.ambient_cores):.2f}")
    return line


def _has_latency(cell: Cell) -> bool:
    return cell.mode == "unary" or cell.measure is Measure.FIRST_CHUNK


def _median(rows: Iterable[Row], value: Callable[[Row], float]) -> float:
    return statistics.median(value(row) for row in rows)


def _names(rows: Iterable[Row]) -> list[str]:
    """Return the systems of a cell by family, the worst first. One without a row that counts is the worst."""
    by_system: dict[tuple[Family, str], list[float]] = {}
    for row in rows:
        by_system.setdefault((row.family, row.system), []).append(math.inf if row.faults else row.cost)

    def rank(item: tuple[tuple[Family, str], list[float]]) -> tuple[int, float, str]:
        (family, name), costs = item
        counted = [cost for cost in costs if math.isfinite(cost)]
        return list(Family).index(family), -statistics.median(counted) if counted else -math.inf, name

    return [name for (_, name), _ in sorted(by_system.items(), key=rank)]


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(3, *(len(cell) for cell in column)) for column in zip(*table, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in table
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
