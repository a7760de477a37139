"""A simulation as JSON: every run, what they come to, and what follows from that.

Money is US dollars, and null where the trace knows no price. Equal arguments give equal text, so what a run took of
the processor is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from skyserve_cli.account.runs import Percentiles, Run, Simulation
from skyserve_cli.report.text import LEVELS, equal_availability
from skyserve_cli.sim.summary import Estimate, SummaryRow, cheapest

_LEFT_OUT = frozenset({"steps", "wanted", "cpu_s"})  # long, or different every time


def to_json(
    simulation: Simulation, rows: Sequence[SummaryRow], targets: Sequence[float], *, capacity: str
) -> dict[str, Any]:
    """`rows` are the runs, summarized; `capacity` is how the trace was read."""
    return {
        "trace": simulation.trace,
        "n_target": simulation.n_target,
        "cold_start_s": simulation.cold_start_s,
        "price_ratio": simulation.price_ratio,
        "tick_s": simulation.tick_s,
        "days": simulation.days,
        "zones": [{"zone": zone, "region": region} for zone, region in simulation.zones],
        "capacity": capacity,
        "runs": [_run_json(run, priced=simulation.priced) for run in simulation.runs],
        "summary": [_row_json(row, priced=simulation.priced) for row in rows],
        "cheapest": [_cheapest_json(rows, target) for target in targets],
        "cost_at_equal_availability": [
            {
                "policy": policy,
                **{f"{level:g}": round(cost, 6) for level, cost in zip(LEVELS, costs, strict=True)},
            }
            for policy, costs in equal_availability(rows)
        ],
    }


def _run_json(run: Run, *, priced: bool) -> dict[str, Any]:
    shown = {field.name: getattr(run, field.name) for field in fields(run) if field.name not in _LEFT_OUT}
    if not priced:
        shown |= {"usd": None, "usd_on_demand": None}
    return {name: _rounded(value) for name, value in shown.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, Percentiles):
        return {name: round(one, 6) for name, one in value._asdict().items()}
    return round(value, 6) if isinstance(value, float) else value


def _row_json(row: SummaryRow, *, priced: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "policy": row.policy,
        "overprovision": row.overprovision,
        "availability_target": row.availability_target,
        "runs": len(row.runs),
        "usd_per_hour": round(row.usd_hour, 6) if priced else None,
        "usd_per_hour_on_demand": round(row.usd_hour_on_demand, 6) if priced else None,
        "usd_per_hour_beside": None if row.usd_hour_beside is None else round(row.usd_hour_beside, 6),
    }
    for field in fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Estimate):
            half = None if value.half_width is None else round(value.half_width, 6)
            shown[field.name] = {"mean": round(value.mean, 6), "half_width_95": half}
        elif isinstance(value, Percentiles):
            shown[field.name] = _rounded(value)
    return shown


def _cheapest_json(rows: Sequence[SummaryRow], target: float) -> dict[str, Any]:
    best = cheapest(rows, target)
    return {
        "availability": target,
        "policy": None if best is None else best.policy,
        "overprovision": None if best is None else best.overprovision,
        "availability_target": None if best is None else best.availability_target,
        "cost_relative": None if best is None else round(best.cost_relative.mean, 6),
    }
