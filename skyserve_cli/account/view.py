"""The account of a service as JSON: what `serve report -o json` prints and the dashboard shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyserve_cli.account.service_history import ServiceHistory

_DIGITS = 6
#: Points of a curve.
_POINTS = 240


def report_view(account: ServiceHistory, history: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a service; `history` is what they were made of (`controller.api.views.history_view`)."""
    run = account.run
    shown: dict[str, Any] = {
        "name": history["name"],
        "version": history["version"],
        "down": history["down"],
        "policy": run.policy,
        "overprovision": run.overprovision,
        "availability_target": run.availability_target,
        "wanted": run.n_target,
        "counted_from": account.counted_from,
        "counted_to": account.counted_to,
        "complete_from": history["complete_from"],
        "cold_start_s": account.simulation.cold_start_s,
        "availability": run.availability,
        "capacity_fraction": run.capacity_fraction,
        "usd": run.usd,
        "usd_on_demand": run.usd_on_demand,
        "cost_relative": run.cost_relative,
        "on_demand_cost_share": run.on_demand_cost_share,
        "launches": run.launches,
        "preemptions": account.preemptions,
        "failed_launches": account.failed_launches,
        "crashes": account.crashes,
        "zones": [each._asdict() for each in account.bought],
    }
    rounded: dict[str, Any] = _rounded(shown)
    return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, _DIGITS) if isinstance(value, float) else value


def curves_view(account: ServiceHistory) -> dict[str, Any]:
    """Return what was spent until when, really and with the target on demand: UNIX seconds, and US dollars.

    The last points are exactly the figures of `report_view`.
    """
    from skyserve_cli.account.curves import spend, spend_on_demand  # numpy, which only this needs

    begin = account.simulation.counted_from_s
    at, paid = spend(account.run, account.simulation.price_ratio, _POINTS, begin_s=begin)
    _, due = spend_on_demand(account.run, _POINTS, begin_s=begin)
    return {
        "at": [account.counted_from + float(each) for each in at],
        "usd": [round(float(each), _DIGITS) for each in paid],
        "usd_on_demand": [round(float(each), _DIGITS) for each in due],
    }
