"""How likely more replicas will be wanted one cold start from now.

A service that scales is short for a cold start after every step up, however safe its replicas are. So RiskHedge counts
steps into the chance of a shortfall. Where a scaler forecasts demand, `View.wanted_later` holds the chances. Else they
are learned from the steps so far: steps come at the time of day at which they came before, or at any time,

    steps per hour = (sum over past steps of (daily * near(time of day between) + (1 - daily) * room / 24 h)
                      + PRIOR_DAYS * steps / (24 h * days)) / (days + PRIOR_DAYS)

with `near` a triangle of area 1 over +-NEAR_H, `daily` the chance that steps follow the time of day, by how well each was
foretold by those before it, and `room` how many of the sizes seen lie above the present one, against their mean. A step leads beyond
the largest size so far as often as steps did that. A service that has never changed its size is expected to keep it.

Memory: {"size": wanted number when last seen, "from": since when sizes are watched, "steps": [[at, more, size], ...]}, steps of
the last `KEPT_DAYS` only, and at most `MOST_STEPS`; those of older releases have no size. It changes when the wanted number does. Steps
from zero replicas are left out: without a replica nothing can be short.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from policies.model import Json
from policies.placement.risk_odds import NO_GROWTH, Growth

DAY_S = 86_400.0
HOUR_S = 3600.0
NEAR_H = 0.75
PRIOR_DAYS = 0.5
KEPT_DAYS = 14.0
MOST_STEPS = 200

_SURELY = 30.0  # log odds that are as good as certainty


def watched(memory: Json | None, wanted: int, now: float) -> Json:
    """Return the memory after the wanted number was seen; the same object if it is what it was."""
    if memory is None:
        return {"size": wanted, "from": now}
    before = memory["size"]
    if wanted == before:
        return memory
    steps = [step for step in memory.get("steps", ()) if now - step[0] < KEPT_DAYS * DAY_S]
    if 0 < before < wanted:
        steps = [*steps, [now, wanted - before, wanted]][-MOST_STEPS:]
    after = {"size": wanted, "from": memory["from"]}
    return {**after, "steps": steps} if steps else after


def expected(memory: Json | None, wanted: int, now: float, window_h: float) -> Growth:
    """Return the chances of steps within `window_h` hours, by their size in replicas."""
    steps = () if memory is None else memory.get("steps", ())
    if not steps or memory is None:
        return NO_GROWTH
    since = now - memory["from"]
    if len(steps) == MOST_STEPS or since > KEPT_DAYS * DAY_S:
        since = min(since, KEPT_DAYS * DAY_S, max(DAY_S, now - steps[0][0]))
    days = since / DAY_S
    daily = _daily(tuple([step[0] for step in steps]))
    base = ((1.0 - daily) * _room(steps, wanted) + PRIOR_DAYS / max(1.0, days)) / 24.0
    middle = now + 0.5 * window_h * HOUR_S
    top, records = _records(steps)
    beyond = (records + 1.0) / (len(steps) + 2.0)
    per_hour: dict[int, float] = {}
    for at, more, *_ in steps:
        rate = (daily * _near(middle - at) + base) / (days + PRIOR_DAYS)
        size, below = int(more), max(0, top - wanted)
        for one, part in ((size, 1.0),) if size <= below else ((size, beyond), (below, 1.0 - beyond)):
            if one:
                per_hour[one] = per_hour.get(one, 0.0) + part * rate
    total = sum(per_hour.values())
    grows = -math.expm1(-total * window_h)
    return ((0, 1.0 - grows), *((size, grows * rate / total) for size, rate in sorted(per_hour.items())))


def _records(steps: Sequence[Sequence[float]]) -> tuple[int, int]:
    """Return the largest size that was wanted, and how many steps went beyond all before; those of an older release did."""
    top = records = 0
    for _, more, *after in steps:
        size = int(after[0]) if after else top + int(more)
        records += size > top
        top = max(top, size)
    return top, records


def _room(steps: Sequence[Sequence[float]], wanted: int) -> float:
    """Return how much likelier a step comes from this size than from those that were wanted: as it has more of them above it."""
    sizes = Counter(
        int(size) for _, more, *after in steps for size in (*after, *(one - more for one in after))
    )
    count = sum(sizes.values())
    mean = 0.5 * (1.0 - sum((n / count) ** 2 for n in sizes.values())) if count else 0.0
    return sum(n for size, n in sizes.items() if size > wanted) / count / mean if mean else 1.0


@lru_cache(maxsize=256)
def _daily(steps: tuple[float, ...]) -> float:
    """Return the chance that steps follow the time of day, from how well those before foretold each one."""
    odds = 0.0
    for number, at in enumerate(steps):
        near = sum(_near(at - before) for before in steps[:number])
        odds += math.log((24.0 * near + 1.0) / (number + 1.0))
    return 1.0 / (1.0 + math.exp(-max(-_SURELY, min(_SURELY, odds))))


def forecast(chances: Sequence[float]) -> Growth:
    """Return what a scaler forecasts: at index i the chance that i replicas more are wanted then."""
    found = tuple((more, p) for more, p in enumerate(chances) if p > 0.0)
    return NO_GROWTH if not found or found[-1][0] == 0 else found


def partly(growth: Growth, share: float) -> Growth:
    """Return the growth with a share of its chances."""
    if growth is NO_GROWTH or share >= 1.0:
        return growth
    grows = tuple((more, p * share) for more, p in growth if more)
    return ((0, 1.0 - sum(p for _, p in grows)), *grows) if share > 0.0 else NO_GROWTH


def _near(apart_s: float) -> float:
    """Return how likely, per hour, a step comes this far from the time of day of another."""
    apart_h = abs((apart_s + DAY_S / 2) % DAY_S - DAY_S / 2) / HOUR_S
    return max(0.0, 1.0 - apart_h / NEAR_H) / NEAR_H
