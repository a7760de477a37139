"""How likely more replicas will be wanted one cold start from now.

A service that scales is short for a cold start after every step up, however safe its replicas are. So RiskHedge counts
steps into the chance of a shortfall. Where a scaler forecasts demand, `View.wanted_later` holds the chances. Else they
are learned from the steps so far: steps come at the time of day at which they came before, or at any time,

    steps per hour = (sum over past steps of near(time of day between) + PRIOR_DAYS * steps / (24 h * days)) / (days + PRIOR_DAYS)

with `near` a triangle of area 1 over +-NEAR_H. A service that has never changed its size is expected to keep it.

Memory: {"size": wanted number when last seen, "from": since when sizes are watched, "steps": [[at, more], ...]}, steps of
the last `KEPT_DAYS` only, and at most `MOST_STEPS`. It changes when the wanted number does. Steps from zero replicas are
left out: without a replica nothing can be short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.model import Json
from policies.placement.risk_odds import NO_GROWTH, Growth

DAY_S = 86_400.0
HOUR_S = 3600.0
NEAR_H = 0.75
PRIOR_DAYS = 1.0
KEPT_DAYS = 14.0
MOST_STEPS = 200


def watched(memory: Json | None, wanted: int, now: float) -> Json:
    """Return the memory after the wanted number was seen; the same object if it is what it was."""
    if memory is None:
        return {"size": wanted, "from": now}
    before = memory["size"]
    if wanted == before:
        return memory
    steps = [step for step in memory.get("steps", ()) if now - step[0] < KEPT_DAYS * DAY_S]
    if 0 < before < wanted:
        steps = [*steps, [now, wanted - before]][-MOST_STEPS:]
    after = {"size": wanted, "from": memory["from"]}
    return {**after, "steps": steps} if steps else after


def expected(memory: Json | None, wanted: int, now: float, window_h: float) -> Growth:
    """Return the chances of steps within `window_h` hours, by their size in replicas; at most by as many as there are."""
    steps = () if memory is None else memory.get("steps", ())
    if not steps or memory is None:
        return NO_GROWTH
    since = now - memory["from"]
    if len(steps) == MOST_STEPS or since > KEPT_DAYS * DAY_S:
        since = min(since, KEPT_DAYS * DAY_S, max(DAY_S, now - steps[0][0]))
    days = since / DAY_S
    base = PRIOR_DAYS / (24.0 * max(1.0, days))
    middle = now + 0.5 * window_h * HOUR_S
    per_hour: dict[int, float] = {}
    for at, more in steps:
        size = min(int(more), max(1, wanted))
        per_hour[size] = per_hour.get(size, 0.0) + (_near(middle - at) + base) / (days + PRIOR_DAYS)
    total = sum(per_hour.values())
    grows = -math.expm1(-total * window_h)
    return ((0, 1.0 - grows), *((size, grows * rate / total) for size, rate in sorted(per_hour.items())))


def forecast(chances: Sequence[float]) -> Growth:
    """Return what a scaler forecasts: at index i the chance that i replicas more are wanted then."""
    found = tuple((more, p) for more, p in enumerate(chances) if p > 0.0)
    return NO_GROWTH if not found or found[-1][0] == 0 else found


def _near(apart_s: float) -> float:
    """Return how likely, per hour, a step comes this far from the time of day of another."""
    apart_h = abs((apart_s + DAY_S / 2) % DAY_S - DAY_S / 2) / HOUR_S
    return max(0.0, 1.0 - apart_h / NEAR_H) / NEAR_H
