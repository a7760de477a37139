"""A simulation in cells and sentences: the same on the screen, in the page and in the picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from skyserve_cli.account.runs import Percentiles, Simulation, percent
from skyserve_cli.output import plural, span, usd
from skyserve_cli.sim.frontier import Point, cost_at
from skyserve_cli.sim.summary import BOUNDS, Estimate, SummaryRow, cheapest, most_available

T = TypeVar("T")
#: Where families of settings are compared.
LEVELS = (0.99, 0.995, 0.999)


def table_cells(rows: Sequence[SummaryRow], *, priced: bool) -> tuple[list[str], list[list[str]]]:
    """Columns, named as `tables.table` wants them, and a row of cells for each row.

    Without the columns in which there is no progress to report.
    """
    aims = any(row.availability_target is not None for row in rows)
    names, columns = [], []
    for name, cell in _COLUMNS.items():
        if (name in ("$/H", "$/H DISKS") and not priced) or (name == "#OUTAGES" and not aims):
            continue
        cells = [cell(row) for row in rows]
        if any(cells) or name in _ALWAYS:
            names.append(name)
            columns.append([one or "-" for one in cells])
    return names, [list(cells) for cells in zip(*columns, strict=True)]


def _spent(row: SummaryRow) -> str:
    """Return the time below the target over what the asked availability allows, of a setting that aims."""
    if row.availability_target is None or row.policy in BOUNDS:
        return ""
    return f"{(1.0 - row.availability.mean) / (1.0 - row.availability_target):.2f}"


def _known(value: T | None, shown: Callable[[T], str]) -> str:
    return "" if value is None else shown(value)


_COLUMNS: dict[str, Callable[[SummaryRow], str]] = {
    "POLICY": lambda row: row.policy,
    "#EXTRA": lambda row: _known(row.overprovision, "+{}".format),
    "#TARGET": lambda row: _known(row.availability_target, percent),
    "#AVAILABLE": lambda row: _hundredths(row.availability),
    "#SHORT/ALLOWED": _spent,
    "#OUTAGES": lambda row: _rate(row.outages),
    "#BY GROWTH": lambda row: _known(row.growth if row.growth.mean else None, _hundredths),
    "#CAPACITY": lambda row: _hundredths(row.capacity_fraction),
    "#COST": lambda row: _share(row.cost_relative, 1),
    "$/H": lambda row: usd(row.usd_hour),
    "$/H DISKS": lambda row: _known(row.usd_hour_beside, usd),
    "#ON DEMAND": lambda row: _share(row.on_demand_cost_share, 1),
    "#PREEMPTED/DAY": lambda row: _rate(row.preemptions_per_day),
    "#FAILED/DAY": lambda row: _rate(row.failed_launches_per_day),
    "#SHORT REQUESTS": lambda row: _known(row.requests_short, _hundredths),
    "#ATTAINMENT": lambda row: _known(row.attainment, _hundredths),
    "#FAILED REQUESTS": lambda row: _known(row.requests_failed, _hundredths),
    "#TTFT P50/P90/P99": lambda row: _seconds(row.ttft_s),
    "#LATENCY P50/P90/P99": lambda row: _seconds(row.latency_s),
    "WHERE": lambda row: row.zones,
}
_ALWAYS = frozenset(
    {"POLICY", "#AVAILABLE", "#CAPACITY", "#COST", "#ON DEMAND", "#PREEMPTED/DAY", "#FAILED/DAY"}
)


#: What the columns mean, for those who look at the table alone.
GLOSSARY = (
    ("extra", "spot replicas beyond the target"),
    ("target", "the availability a policy was asked for"),
    (
        "available",
        "share of the time in which at least the target was ready, from the end of the first cold start on",
    ),
    (
        "short/allowed",
        "time below the target over the time that the asked availability allows: 1 keeps the promise exactly",
    ),
    ("outages", "how often fewer than the target became ready"),
    (
        "by growth",
        "share of the time below the target only because the target had risen within the last cold start",
    ),
    ("capacity", "mean of the ready replicas, up to the target, over the target"),
    ("cost", "what was paid, cold starts included, over the price of the target on demand"),
    ("disks", "what disks and public addresses cost beside that, by list prices of the file's cloud"),
    ("on demand", "share of that cost that went to on-demand replicas"),
    ("preempted, failed", "spot replicas lost, and launches without success, per day"),
    ("short requests", "share of requests that arrived while fewer than the target were ready"),
    ("attainment", "share of requests within the SLO, by what a replica carries, whatever the target was"),
    (
        "failed requests",
        "share of requests that clients gave up, because they took longer than --request-timeout",
    ),
    (
        "TTFT",
        "seconds to the first token of 50, 90 and 99 % of the requests that did not fail, by their wait and an engine's profile",
    ),
    ("latency", "the same to the last token"),
)


def verdict(rows: Sequence[SummaryRow], availability: float, *, priced: bool) -> str:
    """Return what the cheapest that is available enough saves, as a sentence or two."""
    wanted = f"up {percent(availability)} of the time"
    best = cheapest(rows, availability)
    if best is None:
        closest = most_available(rows)
        most = f"; {closest.label} comes closest with {closest.availability.mean:.2%}" if closest else ""
        return f"Nothing here is {wanted}{most}."
    cost = best.cost_relative.mean
    said = f"{best.label} is the cheapest that is {wanted}: {cost:.1%} of the on-demand cost"
    if cost >= 1:
        said += ", nothing saved"
    else:
        said += f", {1 - cost:.1%} saved"
        if priced:
            said += f" (${usd(best.usd_hour)} instead of ${usd(best.usd_hour_on_demand)} per hour)"
    bounds = [row for row in rows if row.policy in BOUNDS and row.availability.mean >= availability]
    bound = min(bounds, key=lambda row: row.cost_relative.mean, default=None)
    knowing = f" {bound.policy}, who knows the future, pays {bound.cost_relative.mean:.1%}." if bound else ""
    return f"{said}.{knowing}"


def availability_sentences(rows: Sequence[SummaryRow]) -> list[str]:
    """Return what each setting that aims was asked for, and what came of it, as sentences; of plans how far from the best they may be."""
    said = []
    for row in rows:
        unproven = [run for run in row.runs if run.cost_bound is not None and run.status != "optimal"]
        if unproven:
            worst = max(unproven, key=lambda run: run.cost_relative - (run.cost_bound or 0.0))
            gap = 1.0 - (worst.cost_bound or 0.0) / worst.cost_relative
            said.append(
                f"{worst.label} is not proven to be the cheapest plan ({worst.status}): that costs {worst.cost_bound:.2%} or more, "
                f"this one {worst.cost_relative:.2%}, up to {gap:.2%} too much."
            )
        if row.availability_target is None or row.policy in BOUNDS:
            continue
        allowed, short = 1.0 - row.availability_target, 1.0 - row.availability.mean
        growth = f", {row.growth.mean:.2%} of it growth" if row.growth.mean > 0 else ""
        said.append(
            f"{row.policy} was asked for {percent(row.availability_target)}: short {short:.2%} of the time"
            f"{growth}, {short / allowed:.2f} of the {percent(allowed)} allowed, in "
            f"{plural(round(row.outages.mean), 'outage')} of {span(row.runs[0].days * 86400)}."
        )
    return said


def setting(simulation: Simulation) -> str:
    """Return the circumstances, in one line."""
    seeds = len({run.seed for run in simulation.runs})
    windows = len({run.window for run in simulation.runs})
    parts = [
        f"trace {simulation.trace}: {plural(len(simulation.zones), 'zone')}, {span(simulation.days * 86400)}",
        f"target {plural(simulation.n_target, 'replica')}",
        f"cold start {simulation.cold_start_s:g} s",
        f"on demand {simulation.price_ratio:g} times spot",
        f"ticks of {simulation.tick_s:g} s",
    ]
    if windows > 1:
        parts.append(f"{windows} windows of {span(simulation.runs[0].days * 86400)}")
    if seeds > 1:
        parts.append(plural(seeds, "seed"))
    return ", ".join(parts)


def equal_availability(rows: Sequence[SummaryRow]) -> list[tuple[str, tuple[float, ...]]]:
    """For each policy that one could run, its cost at each of `LEVELS`, mixed with on demand where it must be."""
    families: dict[str, list[Point]] = {}
    for row in rows:
        if row.policy not in BOUNDS:
            families.setdefault(row.policy, []).append(
                Point(row.cost_relative.mean, 1 - row.availability.mean)
            )
    return [
        (policy, tuple(cost_at(points, 1 - level) for level in LEVELS)) for policy, points in families.items()
    ]


def per_day(rate: float) -> str:
    """Return a rate as text: ``0``, ``0.4``, ``13``, ``2,233``."""
    return f"{rate:,.0f}" if rate >= 9.95 or rate == 0 else f"{rate:.1f}"


def _share(value: Estimate, digits: int) -> str:
    plus_minus = "" if value.half_width is None else f" ±{100 * value.half_width:.{digits}f}"
    return f"{100 * value.mean:.{digits}f}%{plus_minus}"


def _hundredths(value: Estimate) -> str:
    return _share(value, 2)


def _seconds(value: Percentiles | None) -> str:
    return (
        "" if value is None else "/".join(f"{one:.2f}" if one < 10 else f"{one:.0f}" for one in value) + " s"
    )


def _rate(value: Estimate) -> str:
    return per_day(value.mean) + ("" if value.half_width is None else f" ±{per_day(value.half_width)}")
