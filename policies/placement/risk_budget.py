"""What an hour below the wanted number is worth to RiskHedge, steered so that the target is met.

    mu = PENALTY_SHARE * price of the wanted number on demand / 1 % * (1 % / aim) ^ EXPONENT * e^b

and at least `LEAST_PENALTY` times that price. The cheapest way to a given mean availability has one constant mu, so b is
moved slowly, and by what the policy predicts at every decision rather than by the rare outages:

    db/dt = (c * predicted chance of a shortfall / aim - 1) / STEER_S,    within +-MOST_OVERDRAWN

c corrects the prediction by what came true: (time short + PRIOR_WINDOWS w) / (time predicted short + PRIOR_WINDOWS w), where
w is the time that a replacement takes. Both times fade within `FADE_S`. `aim` is what the target allows, less what losses took
of the last month beyond it, or more what they left of it, made even within `EVEN_S`: a month is to be as requested, neither
worse nor better and dearer. Growth is left out there: where it cannot be hedged, more insurance against losses is of no use.

What a fleet saves against the wanted number on demand is put by, up to `SAVED_H` hours of that price, and so is `LOAN_H`, .25 % of a
week, in advance, every week. Trials and insurance against growth are paid from it: while less than `LOAN_H` is left, growth is
hedged for a part of what it is worth, and below nothing neither is bought. Without growth the cheapest fleet is no dearer than
plain on demand, which is one of those it is chosen from, but replicas that are lost while they start were paid beside it: where that
has come to more than the advance, no spot replica is requested if on-demand ones can be had.

Memory: {"spent": b, "at": instant of b, "rate": its growth per second, "short": seconds short, "due": seconds predicted
short, "seen": [short now, chance predicted, what the fleet was like], "even": [seconds short by losses, seconds], both fading within
a month, "grew": whether it is short because it grew, "saved": [USD, share of growth hedged, USD saved per hour, since]}, and for
`risk_availability` "began": its first instant,
"down": seconds short since then, "days": [[start of a day, seconds short in it], ...] of the last month, "outages": how many
began, "window": w. It begins when the wanted number is first ready, and is
written when the fleet or the wanted number has changed, else hourly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

from policies.model import Json

AVAILABILITY_TARGET = 0.995
#: A shortfall costs this share of the fleet on demand at a target of 99 %.
PENALTY_SHARE = 0.1
EXPONENT = 1.25
#: Being short is always worse than paying for the fleet on demand, by this factor.
LEAST_PENALTY = 2.0
LOAN_H = 0.42  # hours of the wanted number on demand: a quarter of 1 % of a week
LOAN_EVERY_H = 168.0
SHARE_STEP = 0.25
SAVED_H = 4.0  # 2.4 % of a week
STEER_S = 2 * 86_400.0
EVEN_S = 7 * 86_400.0
MOST_AIM = 2.0
MOST_OVERDRAWN = 2.5
PRIOR_WINDOWS = 4.0
FADE_S = 90 * 86_400.0
WRITE_EVERY_S = 3600.0
DAY_S = 86_400.0
KEPT_DAYS = 31

_SURELY = 1e-5  # unavailability below which a target is the same as none


def allowed(target: float | None) -> float:
    """Return the share of the time in which fewer replicas than wanted may be ready."""
    return max(_SURELY, 1.0 - (AVAILABILITY_TARGET if target is None else target))


def aim(budget: Json | None, target: float | None, now: float) -> float:
    """Return the share of the time that losses may leave short from now on: what was spent beyond the target is made up for."""
    share = allowed(target)
    lost_s, watched_s, _ = _even(budget, now)
    return share * max(1.0 / MOST_AIM, min(MOST_AIM, 1.0 + (watched_s - lost_s / share) / EVEN_S))


def _even(budget: Json | None, now: float) -> list[float]:
    """Return the seconds short by losses and the seconds in all, both fading within a month, up to now."""
    if budget is None or "even" not in budget:
        return [0.0, 0.0, now]
    lost_s, watched_s, since = budget["even"]
    span_s = max(0.0, now - since)
    left = math.exp(-span_s / (KEPT_DAYS * DAY_S))
    was_lost = budget["seen"][0] and not budget["grew"]
    return [lost_s * left + span_s * was_lost, watched_s * left + span_s, max(since, now)]


def penalty_share(budget: Json | None, target: float | None, now: float) -> float:
    """Return mu as a multiple of what the wanted number costs on demand."""
    share = PENALTY_SHARE / 0.01 * math.pow(0.01 / aim(budget, target, now), EXPONENT)
    return max(LEAST_PENALTY, share * math.exp(overdrawn(budget, now)))


def overdrawn(budget: Json | None, now: float) -> float:
    """Return b."""
    if budget is None:
        return 0.0
    spent: float = budget["spent"] + budget["rate"] * max(0.0, now - budget["at"])
    return max(-MOST_OVERDRAWN, min(MOST_OVERDRAWN, spent))


class Means(NamedTuple):
    """USD saved lately, and a little in advance. Growth is hedged for `share` of what it is worth."""

    usd: float
    share: float


def means(budget: Json | None, plain_usd_hour: float, now: float) -> Means:
    """Return them where the wanted number on demand costs `plain_usd_hour`."""
    loan = LOAN_H * plain_usd_hour
    if budget is None or "saved" not in budget:
        return Means(loan, 1.0)
    usd, share, usd_hour, since = budget["saved"]
    usd += (usd_hour + loan / LOAN_EVERY_H) * max(0.0, now - since) / 3600.0
    there = max(0.0, min(1.0, usd / loan))
    if abs(there - share) >= SHARE_STEP or there in (0.0, 1.0):
        share = there  # not at every look: replicas would come and go with it
    return Means(min(SAVED_H * plain_usd_hour, usd), share)


def is_spent(there: Means, plain_usd_hour: float) -> bool:
    """Return whether fleets have come to more than plain on demand, by more than the advance."""
    return there.usd < -LOAN_H * plain_usd_hour


def correction(budget: Json | None, window_s: float) -> float:
    """Return c, by which predictions are multiplied."""
    if budget is None or "due" not in budget:
        return 1.0
    prior = PRIOR_WINDOWS * window_s
    return float((budget["short"] + prior) / (budget["due"] + prior))


def paused(budget: Json | None, now: float) -> Json | None:
    """Return the budget while nothing is wanted: it stands still."""
    if not _is_begun(budget) or budget["seen"] == [False, 0.0]:
        return budget
    usd, share, *_ = budget.get("saved", (0.0, 1.0))
    saved = {"saved": [usd, share, 0.0, now]} if "saved" in budget else {}
    return {**budget, **until(budget, now), "rate": 0.0, "seen": [False, 0.0], **saved}


def written(
    budget: Json | None,
    *,
    now: float,
    short: bool,
    predicted: float,
    fleet: Sequence[int],
    target: float | None,
    window_s: float,
    saved: Sequence[float],
) -> Json | None:
    """Return the budget after a decision; the same object if there is nothing to write down.

    `fleet` are numbers that change only with events, the wanted number first; `saved` are the `Means`, what the fleet saves per hour
    against the wanted number on demand, and since when.
    """
    grew = False
    if not _is_begun(budget):
        if short:
            return budget
        after: dict[str, Any] = {"spent": 0.0, "at": now, "short": 0.0, "due": 0.0, "began": now}
        after |= {"down": 0.0, "days": [], "outages": 0}
    else:
        was_short, _, *was = budget["seen"]
        if (was_short, was) == (short, list(fleet)) and 0.0 <= now - budget["at"] < WRITE_EVERY_S:
            return budget
        after = until(budget, now)
        after |= {"outages": after["outages"] + (short and not was_short)}
        grew = short and (budget.get("grew", False) if was_short else [*was, fleet[0]][0] < fleet[0])
    as_of = saved[-1]  # what the decision was based on: a second look at the same moment finds the same
    after |= {
        "spent": overdrawn(budget, as_of) if _is_begun(budget) else 0.0,
        "even": _even(budget, as_of),
        "rate": 0.0,
        "seen": [short, predicted, *fleet],
        "window": window_s,
        "saved": list(saved),
        "grew": grew,
    }
    rate = (min(1.0, correction(after, window_s) * predicted) / aim(after, target, as_of) - 1.0) / STEER_S
    return {**after, "rate": rate}


def _is_begun(budget: Json | None) -> TypeGuard[Json]:
    """Return whether there is a budget; that of an older release, which was steered otherwise, is none."""
    return budget is not None and "began" in budget


def until(budget: Json, now: float) -> dict[str, Any]:
    """Return the sums of the budget up to now."""
    span_s = max(0.0, now - budget["at"])
    was_short, was_predicted, *_ = budget["seen"]
    left = math.exp(-span_s / FADE_S)
    return {
        "spent": overdrawn(budget, now),
        "at": now,
        "short": budget["short"] * left + span_s * was_short,
        "due": budget["due"] * left + span_s * was_predicted,
        "began": budget["began"],
        "down": budget["down"] + span_s * was_short,
        "days": _by_day(budget["days"], budget["at"], now) if was_short else budget["days"],
        "outages": budget["outages"],
    }


def _by_day(days: Sequence[tuple[float, float]], since: float, now: float) -> list[list[float]]:
    """Return the seconds short of each day of the last month that had any, with those from `since` to `now`."""
    short = dict(days)
    at = max(since, now - KEPT_DAYS * DAY_S)
    while at < now:
        day = at // DAY_S * DAY_S
        end = min(now, day + DAY_S)
        short[day] = short.get(day, 0.0) + end - at
        at = end
    return [[day, seconds] for day, seconds in short.items() if day > now - (KEPT_DAYS + 1) * DAY_S]
