"""By forecast: replicas are launched one cold start before the demand that needs them.

Once a minute, with capacity c of one replica within the SLO, cold start d and headroom g:

    needed = max(g * F(busiest minute in [now + d, now + d + 2 min)), g * demand of the last minute) / (60 c) + backlog
    kept   = max(needed, g * F(busiest minute until now + d + 10 min) / (60 c))

F is the 55 % quantile of `forecast.demand`. The size rises to `needed` at once, and sinks to `kept`: a replica that is
terminated now and wanted again would be missing for a cold start. Since `needed` counts the demand of the last minute, a
forecast can add replicas to what the present requests, and never take one away. Without a forecast (`forecast` False) F is
the last minute's demand, and the busiest of the last 15 minutes for the replicas kept.

*Headroom* is steered by an error budget, as in RiskHedge: b grows with every late request and shrinks by what the SLO allows,
in units of what it allows in a day, within -2.5 and +6. g = 1.06 + 0.045 b, at least 1. A service whose demand jumps buys
more headroom than one that is calm, and no user has to guess a target.

*Ignorance.* Between two minutes, and without a report of the last one, the size stays; a missing minute is not zero demand.

The forecast is fitted to the 14 days before the last multiple of 6 hours (of one hour in the first two days), so it is a
function of the history: after a restart it is the same. Fits are cached by the series they were made from.

Memory: {"target": n, "minute": the first that is not counted yet, "spent": b}.

The idea (forecast one cold start ahead, top up by measured load) is that of PreServe's scaler; the quantile of the busiest minute,
the headroom and its budget are not in the paper.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from policies.forecast.demand import DAY_MIN, Floats, Horizon, Model, fit
from policies.goals import SloGoal
from policies.history import History
from policies.model import Json, Observation
from policies.scaling.base import Size

QUANTILE = 0.55
ADD_MIN = 2  # minutes from the end of a cold start that a launch is for
KEEP_MIN = 10
UNFORECAST_KEEP_MIN = 15

HEADROOM = 1.06
GAIN = 0.045
LEAST_HEADROOM = 1.0
BUDGET_MIN = DAY_MIN
LEAST_SPENT, MOST_SPENT = -2.5, 6.0

FIT_EVERY_MIN = 360
FIRST_FITS_EVERY_MIN = 60
FIT_MIN = 14 * DAY_MIN
READ_MIN = 7 * DAY_MIN + 180  # what a forecast looks at: a week, and some
DRAINED_IN_S = 300.0  # a backlog gets replicas that drain it in this time
_ROUNDING = 1e-9


class Predictive:
    """See the top of this file."""

    def target(self, observation: Observation, memory: Json) -> Size:
        goal, history, load = observation.goal.scaling, observation.history, observation.load
        slo = goal.slo
        assert slo is not None  # noqa: S101 - the registry chose this scaler by it
        current = min(max(memory.get("target", goal.min_replicas), goal.min_replicas), goal.max_replicas)
        busy = 1 if load.in_flight + load.queued > 0 else 0
        floor = min(max(current, busy), goal.max_replicas)
        if history is None or history.end <= memory.get("minute", 0) or not len(history.requests):
            return Size(floor, {**memory, "target": floor})
        requests = np.frombuffer(history.requests, dtype=np.float64)
        spent = _spent(history, requests, memory, slo)
        after = {"minute": history.end, "spent": spent}
        last = float(requests[-1])
        if math.isnan(last):
            return Size(floor, {**after, "target": floor})
        headroom = headroom_of(spent)
        add, keep = _ahead(history, requests, slo) if slo.forecast else _behind(requests)
        carried = 60.0 * slo.capacity_qps / headroom
        backlog = load.queued / (slo.capacity_qps * DRAINED_IN_S)
        needed = max(add, last) / carried + backlog
        kept = max(needed, keep / carried)
        size = max(current, _whole(needed)) if _whole(needed) > current else min(current, _whole(kept))
        size = min(max(size, busy, goal.min_replicas), goal.max_replicas)
        return Size(size, {**after, "target": size})


def headroom_of(spent: float) -> float:
    """Return how much more than the forecast is provided for, as a factor, with the error budget overdrawn by `spent` days."""
    return max(LEAST_HEADROOM, HEADROOM + GAIN * spent)


def _spent(history: History, requests: Floats, memory: Json, slo: SloGoal) -> float:
    """Return the error budget after the minutes that it has not counted yet.

    Without its memory it begins with the last one.
    """
    spent, since = float(memory.get("spent", 0.0)), int(memory.get("minute", history.end - 1))
    start = max(0, since - history.first)
    within = np.frombuffer(history.within_slo, dtype=np.float64)
    usual = requests[-DAY_MIN:]
    usual = usual[~np.isnan(usual)]
    mean = float(usual.mean()) if len(usual) else 0.0
    allowed = 1.0 - slo.attainment
    a_day = mean * allowed * BUDGET_MIN  # late requests that the SLO allows
    for asked, met in zip(requests[start:].tolist(), within[start:].tolist(), strict=True):
        if a_day <= 0.0 or math.isnan(asked) or math.isnan(met):
            continue
        change = (asked - met - allowed * asked) / a_day
        spent = min(MOST_SPENT, max(LEAST_SPENT, spent + change))
    return spent


def _ahead(history: History, requests: Floats, slo: SloGoal) -> tuple[float, float]:
    """Return the forecast of what replicas have to be added for, and of what has to be kept for; requests per minute."""
    cold_start = max(1, math.ceil(slo.cold_start_s / 60.0))
    every = FIT_EVERY_MIN if len(requests) >= 2 * DAY_MIN else FIRST_FITS_EVERY_MIN
    fitted_at = history.end // every * every - history.first
    taught = requests[max(0, fitted_at - FIT_MIN) : max(0, fitted_at)].tobytes()
    horizons = (Horizon(cold_start, ADD_MIN), Horizon(1, cold_start + KEEP_MIN))
    recent = requests[-READ_MIN:]
    add, keep = (float(_fitted(taught, each).quantiles(recent, (QUANTILE,))[0]) for each in horizons)
    return add, keep


@lru_cache(maxsize=256)
def _fitted(taught: bytes, horizon: Horizon) -> Model:
    return fit(np.frombuffer(taught, dtype=np.float64), horizon)


def _behind(requests: Floats) -> tuple[float, float]:
    """Return the same without a forecast."""
    return float(requests[-1]), float(np.nanmax(requests[-UNFORECAST_KEEP_MIN:]))


def _whole(replicas: float) -> int:
    return math.ceil(replicas - _ROUNDING)
