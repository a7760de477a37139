"""The history of a service in cells and sentences: the same on the screen, in the page and in the picture."""

from __future__ import annotations

from skyserve_cli.account.service_history import ServiceHistory
from skyserve_cli.output import date_time, plural, span, usd

Table = tuple[list[str], list[list[str]]]  # columns, named as `tables.table` wants them, and rows

KNOWN = "What was ready is what the controller knew"

#: What the columns mean, for those who look at the table alone.
GLOSSARY = (
    ("available", "share of the time in which at least as many replicas were ready as were wanted"),
    ("capacity", "mean of the ready replicas, up to the wanted number, over that number"),
    ("cost", "what was paid, over the price of the wanted replicas on demand"),
    ("on demand", "share of that cost that went to on-demand replicas"),
    ("preempted, failed", "spot replicas lost, and launches without success"),
    (
        "crashed",
        "replicas whose setup or run failed, that were not ready in time, or whose probe failed for too long",
    ),
)


def title(history: ServiceHistory) -> str:
    return f"What {history.simulation.trace} has done"


def setting(history: ServiceHistory) -> str:
    """Return the circumstances, in one line."""
    simulation, run = history.simulation, history.run
    length = span(history.counted_to - history.counted_from)
    wanted = {count for _, count in run.wanted if count} or {run.n_target}
    least, most = min(wanted), max(wanted)
    size = plural(most, "replica") if least == most else f"{least} to {most} replicas"
    return (
        f"{run.label}, {size} wanted, {plural(len(simulation.zones), 'zone')}, cold start {span(simulation.cold_start_s)}, "
        f"{date_time(history.counted_from)} to {date_time(history.counted_to)} ({length})"
    )


def verdict(history: ServiceHistory) -> str:
    """Return how it went, in a sentence."""
    run = history.run
    said = f"The wanted replicas were ready {run.availability:.2%} of the time, for ${usd(run.usd)}"
    if not run.usd_on_demand:
        return f"{said}."
    saved = f", {1 - run.cost_relative:.1%} less" if run.cost_relative < 1 else ""
    return f"{said}: {run.cost_relative:.1%} of ${usd(run.usd_on_demand)} on demand{saved}."


def totals(history: ServiceHistory) -> Table:
    """Return one row."""
    run = history.run
    columns = [
        "#AVAILABLE",
        "#CAPACITY",
        "#COST",
        "$",
        "$ ON DEMAND",
        "#ON DEMAND",
        "#PREEMPTED",
        "#FAILED",
        "#CRASHED",
    ]
    cells = [
        f"{run.availability:.2%}",
        f"{run.capacity_fraction:.2%}",
        f"{run.cost_relative:.1%}",
        usd(run.usd),
        usd(run.usd_on_demand),
        f"{run.on_demand_cost_share:.1%}",
        str(history.preemptions),
        str(history.failed_launches),
        str(history.crashes),
    ]
    return columns, [cells]


def bought(history: ServiceHistory) -> Table:
    """Return a row for each zone and capacity type."""
    columns = [
        "ZONE",
        "REGION",
        "CAPACITY",
        "#LAUNCHED",
        "#PREEMPTED",
        "#FAILED",
        "#CRASHED",
        "#REPLICA TIME",
        "$",
    ]
    rows = [
        [
            each.zone,
            each.region,
            each.capacity_type,
            str(each.launches),
            str(each.preemptions),
            str(each.failed_launches),
            str(each.crashes),
            span(each.hours * 3600),
            usd(each.usd),
        ]
        for each in history.bought
    ]
    return columns, rows
