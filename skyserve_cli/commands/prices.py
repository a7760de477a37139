"""A plan on the screen: every replica with its place and its price, and the question before it costs money."""

from __future__ import annotations

import sys

import typer
from rich.table import Table

from skyserve_cli.commands.options import View
from skyserve_cli.output import CommandFailed, WrongUsage, accelerators, place, plural, saving, table, usd


def plan_table(plan: View) -> Table:
    return table(
        ("REPLICA", "ZONE", "CAPACITY", "INSTANCE", "ACCELERATOR", "$/H", "WHY"),
        [
            (
                str(launch["replica_id"]),
                place(launch),
                launch["capacity_type"],
                launch["instance_type"],
                accelerators(launch),
                usd(launch["price_usd_hour"]),
                launch["why"],
            )
            for launch in plan["launches"]
        ],
    )


def plan_total(plan: View) -> str:
    """One sentence: ``3 replicas for $1.05 per hour, 68% less than $3.30 on demand.``"""
    paid, on_demand = plan["usd_per_hour"], plan["usd_per_hour_on_demand"]
    cost = f"{plural(len(plan['launches']), 'replica')} for ${usd(paid)} per hour"
    less = saving(paid, on_demand)
    return f"{cost}, {less} less than ${usd(on_demand)} on demand." if less else f"{cost}."


def insist_on_offers(plan: View) -> None:
    """A service that can run nowhere is refused before it is asked for. Raises CommandFailed."""
    if plan["target"] > 0 and plan["offers"] == 0:
        raise CommandFailed(
            f"{plan['name']}: no enabled cloud offers what `resources` asks for; `serve check` lists the clouds"
        )


def ask(question: str, *, yes: bool) -> None:
    """Go on, or raise: WrongUsage where nobody can answer, CommandFailed where the answer is no or Ctrl-C."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise WrongUsage(
            "nobody is here to confirm (stdin is not a terminal); pass -y to go ahead without asking"
        )
    try:
        agreed = typer.confirm(question, default=True, err=True)
    except (typer.Abort, KeyboardInterrupt):
        raise CommandFailed("\ninterrupted; nothing has changed", 130) from None
    if not agreed:
        raise CommandFailed("nothing has changed")
