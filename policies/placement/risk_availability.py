"""What RiskHedge was asked for and what came of it, from its error budget (`risk_budget`)."""

from __future__ import annotations

from typing import NamedTuple

from policies.model import Json
from policies.placement import risk_budget

MONTH_S = 30 * 86_400.0


class Availability(NamedTuple):
    """Shares of the time in which the wanted number is ready: asked for, since it first was, within 30 days, predicted.

    `outages_left`: how many more outages of one cold start the target allows within the 30 days that began 30 days ago, or
    with the service; negative where it is missed.
    """

    target: float
    since: float
    realised: float
    realised_month: float
    predicted: float
    outages: int
    outages_left: float


def availability(budget: Json | None, target: float | None, now: float) -> Availability | None:
    """Return what was asked and achieved; None before the wanted number was first ready."""
    if budget is None or "began" not in budget:
        return None
    seen = risk_budget.until(budget, now)
    age_s = max(1.0, now - budget["began"])
    month_s = min(MONTH_S, age_s)
    short_s = min(month_s, sum(short for day, short in seen["days"] if day > now - MONTH_S))
    share = risk_budget.allowed(target)
    window_s = max(1.0, budget["window"])
    expected = min(1.0, risk_budget.correction(budget, window_s) * budget["seen"][1])
    return Availability(
        target=1.0 - share,
        since=budget["began"],
        realised=1.0 - min(1.0, seen["down"] / age_s),
        realised_month=1.0 - short_s / month_s,
        predicted=1.0 - expected,
        outages=budget["outages"],
        outages_left=(share * MONTH_S - short_s) / window_s,
    )
