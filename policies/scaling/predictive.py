"""By forecast: replicas are launched one cold start before the demand that needs them.

Once a minute, with capacity c of one replica within the SLO, cold start d and headroom g:

    needed = max(g * F(busiest minute in [now + d, now + d + 2 min)), g * demand of the last minute) / (60 c) + backlog
    kept   = max(needed, g * F(busiest minute until now + d + 10 min) / (60 c))

Demand, backlog and capacity are work (`forecast.work`): requests by their tokens, in requests of the usual size; requests where no
tokens are known. F is the 55 % quantile of `forecast.demand`. As in PreServe (Algorithm 2) the work of prompts and of responses is also
forecast apart for `needed`; F is the larger of the sum of the two and of the forecast of the sum. The size rises to `needed` at once, and sinks to `kept`: a replica that is
terminated now and wanted again would be missing for a cold start. It does not sink while the last replicas it launched have not
had a cold start's time: what one minute wanted and the next did not would be launched and never serve. Since `needed` counts the
demand of the last minute, a forecast can add replicas to what the present requests, and never take one away. Without a forecast
(`forecast` False) F is the last minute's demand, and the busiest of the last 15 minutes for the replicas kept.

*Headroom* is steered by an error budget, as in RiskHedge: b grows with the work of every late request and shrinks by what the SLO
allows, in units of what it allows in a day, within -2.5 and +6. g = 1.06 + 0.045 b, at least 1. A service whose demand jumps buys
more headroom than one that is calm, and no user has to guess a target.

*Ignorance.* Between two minutes, and without a report of the last one, the size stays; a missing minute is not zero demand.

The forecast is fitted to the 14 days before the last multiple of 6 hours (`forecast.past`).

*Capacity and cold start* are those of the goal, or learned (`forecast.capacity`, `scaling.cold_start`).

*Zero.* A service without requests in the last 15 minutes sleeps, if it may and the forecast is nearer to none than to one. It wakes
one cold start before demand began on earlier days (`forecast.waking`).

*Spot* capacity that is let go may not be there again, so where the service may use it, replicas are kept that are wanted back
within two cold starts, if that is longer.

*Outlook.* Placers get the forecast for the time when a replica launched now would be ready: how many of the wanted
replicas will still be wanted then (at the 90 % quantile), and how likely the demand as such, without headroom, exceeds them.
Headroom is for the noise of demand and has its budget here; it is not hedged again there.

Memory: {"target": n, "minute": the first that is not counted yet, "launched": when the size last rose, "spent": b, "work": as in
`forecast.work`, "fit" in it: by which fit its weights are, "capacity": as in `forecast.capacity`, "starts": as
in `scaling.cold_start`, "seen": the inputs of the last decision, "outlook": [now, then, [chances]]}.

The idea (forecast one cold start ahead, top up by measured load) is that of PreServe's scaler; the quantile of the busiest minute,
the headroom and its budget are not in the paper.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from policies.forecast import past, waking, work
from policies.forecast.capacity import UNKNOWN_QPS, capacity, kind_of, learn, prior, ready_kinds
from policies.forecast.demand import DAY_MIN, Floats, Horizon, Known
from policies.goals import SloGoal
from policies.history import History
from policies.model import CapacityType, Json, Observation, Offer
from policies.rollout import COUNTED
from policies.scaling import cold_start
from policies.scaling.base import Outlook, Size

QUANTILE = 0.55
ADD_MIN = 2  # minutes from the end of a cold start that a launch is for
KEEP_MIN = 10
UNFORECAST_KEEP_MIN = 15
SURE_QUANTILE = 0.9  # below it demand is surely gone
CHANCES = 100  # of demand, that the outlook counts
OUTLOOK_MIN = 5  # without a report, after which it is stale
MOST_MORE = 8  # replicas that the outlook distinguishes

HEADROOM = 1.06
GAIN = 0.045
LEAST_HEADROOM = 1.0
BUDGET_MIN = DAY_MIN
LEAST_SPENT, MOST_SPENT = -2.5, 6.0

DRAINED_IN_S = 300.0  # a backlog gets replicas that drain it in this time
LEAST_TO_WAKE = 0.5  # requests of the busiest minute
MOST_COLD_START_S = 3600.0
_SHARES = (QUANTILE, *((index + 0.5) / CHANCES for index in range(CHANCES)))
_ROUNDING = 1e-9
_LITTLE = 1e-6  # of a replica


class Predictive:
    """See the top of this file."""

    def target(self, observation: Observation, memory: Json) -> Size:
        goal, history, load = observation.goal.scaling, observation.history, observation.load
        slo = goal.slo
        assert slo is not None  # noqa: S101 - the registry chose this scaler by it
        current = min(max(memory.get("target", goal.min_replicas), goal.min_replicas), goal.max_replicas)
        busy = 1 if load.in_flight + load.queued > 0 else 0
        floor = min(max(current, busy), goal.max_replicas)
        counted = memory.get("minute", 0)
        if history is None or not len(history.requests) or history.end == counted:
            outlook, until = _last_outlook(memory, floor, observation.now)
            return Size(floor, {**memory, "target": floor}, wake_at=until, outlook=outlook)
        if history.end < counted:  # the clock was set back
            memory = {**memory, "minute": history.end - 1}
        learned = _weights(history, memory, observation)
        demand = past.recent(history, work.in_use(learned))
        spent = _budget_spent(history, demand[0], memory, slo)
        kept = {name: value for name, value in memory.items() if name != "outlook"}
        after = {**kept, "minute": history.end, "spent": round(spent, 6), "work": learned}
        if math.isnan(history.requests[-1]):
            return Size(floor, {**after, "target": floor})
        if slo.capacity_qps is None:
            after["capacity"] = _learn_capacity(history, demand[0], memory, observation)
        ahead = _ahead(demand[0], memory, after, current, observation)
        decided = _decide(ahead, history, demand, current, observation)
        wanted = decided["target"]
        launched = {"launched": history.end} if wanted > current else {}
        after = {**after, **decided, **launched}
        outlook, until = _last_outlook(after, wanted, observation.now)
        add = ahead.last if not slo.forecast else after["seen"]["add"]
        why = ahead.sentence(add, load.queued)
        return Size(wanted, after, wake_at=until, why=why, outlook=outlook)


def _ahead(demand: Floats, memory: Json, after: Json, current: int, observation: Observation) -> _Minute:
    """Return the inputs of the decision; `after` has what the last minute taught."""
    slo, history = observation.goal.scaling.slo, observation.history
    assert slo is not None  # noqa: S101 - the registry chose this scaler by it
    assert history is not None  # noqa: S101 - its last minute is decided about
    start_s, last = cold_start_s(observation, memory), float(demand[-1])
    size = last / history.requests[-1] if last else 1.0
    starting = 0 <= history.end - memory.get("launched", -DAY_MIN) < _minutes(start_s)
    return _Minute(
        capacity_qps=slo.capacity_qps or learned_qps(observation, after),
        cold_start_s=start_s,
        headroom=headroom_of(after["spent"]),
        last=last,
        size=size,
        weights=work.in_use(after["work"]),
        least=current if starting else 0,
    )


def _decide(
    ahead: _Minute, history: History, demand: past.Demand, current: int, observation: Observation
) -> dict[str, Any]:
    """Return the target, what it was decided by, and the outlook, as the memory has them."""
    slo = observation.goal.scaling.slo
    assert slo is not None  # noqa: S101 - the registry chose this scaler by it
    add, keep, then = _without_forecast(demand[0])
    if slo.computes_forecast:
        may_use_spot = any(offer.capacity_type is CapacityType.SPOT for offer in observation.offers)
        add, keep, then = forecast_demand(history, ahead.weights, demand, ahead.cold_start_s, may_use_spot)
    wanted = _size(ahead, add, keep, demand[0], current, observation)
    seen = ahead.seen(add, keep)
    if not slo.forecast:
        if slo.computes_forecast:
            seen["would_want"] = wanted
        wanted = _size(ahead, *_without_forecast(demand[0])[:2], demand[0], current, observation)
        return {"target": wanted, "seen": seen}
    return {"target": wanted, "seen": seen, "outlook": _outlook(ahead, then, wanted, observation)}


def forecast_demand(
    history: History, of: work.Weights | None, demand: past.Demand, cold_start_s: float, keeps_spot: bool
) -> tuple[float, float, Floats]:
    """Return the forecast of what replicas have to be added for, and of what has to be kept for; work per minute.

    The third value are `CHANCES` equally likely values of the first. What to add for is also forecast of prompts and responses
    apart, and the larger counts.
    """
    lead, total = _minutes(cold_start_s), demand[0]
    if waking.is_idle(total) and (first_demand := waking.first_demand(total, lead + ADD_MIN)) is not None:
        return first_demand, first_demand, np.full(CHANCES, first_demand)
    until = max(lead + KEEP_MIN, 2 * lead) if keeps_spot else lead + KEEP_MIN
    soon, known = Horizon(lead, ADD_MIN), [Known.of(one) for one in demand]
    adds = past.fitted(history, of, soon).quantiles(known[0], _SHARES)
    keep = past.fitted(history, of, Horizon(1, until), late=1).quantiles(known[0], (QUANTILE,))
    apart = [
        past.fitted(history, of, soon, part=part).quantiles(known[part], (QUANTILE,))[0]
        for part in range(1, len(known))
    ]
    return max(float(adds[0]), float(sum(apart))), float(keep[0]), adds[1:]


class _Minute(NamedTuple):
    """The inputs of a decision: capacity of a replica, cold start, headroom, the work of the last minute and of a request in it.

    `weights` None: requests are counted. At least `least` replicas stay.
    """

    capacity_qps: float
    cold_start_s: float
    headroom: float
    last: float
    size: float
    weights: work.Weights | None
    least: int

    @property
    def carried(self) -> float:
        """Work per minute that a replica is given."""
        return 60.0 * self.capacity_qps / self.headroom

    def backlog(self, queued: int) -> float:
        """Return the replicas that drain as many requests in time."""
        return queued * self.size / (self.capacity_qps * DRAINED_IN_S)

    def seen(self, add: float, keep: float) -> dict[str, float]:
        """Return what `serve status` and metrics show: work per minute, seconds, and work per second."""
        values = {
            "last": self.last,
            "add": add,
            "keep": keep,
            "headroom": self.headroom,
            "capacity_qps": self.capacity_qps,
            "cold_start_s": self.cold_start_s,
            **({} if self.weights is None else {"size": self.size}),
        }
        return {name: float(f"{value:.4g}") for name, value in values.items()}

    def sentence(self, add: float, queued: int) -> str:
        """Return why, for the event log."""
        in_time = math.ceil(self.cold_start_s / 60.0)
        ahead = f", {add:.0f} in {in_time} min when a replica would be ready" if add > self.last else ""
        waiting = f", {queued} waiting" if queued else ""
        size = "" if self.weights is None else f" of the usual size (each was {self.size:.2f} of it)"
        return (
            f"{self.last:.0f} requests{size} in the last minute{ahead}{waiting}; a replica carries "
            f"{60 * self.capacity_qps:.3g} a minute, headroom {self.headroom:.2f}"
        )


def _size(
    ahead: _Minute, add: float, keep: float, requests: Floats, current: int, observation: Observation
) -> int:
    goal, load = observation.goal.scaling, observation.load
    backlog = ahead.backlog(load.queued)
    needed = _or_zero(max(add, ahead.last)) / ahead.carried + backlog
    kept = max(needed, _or_zero(keep) / ahead.carried)
    if np.fmax.reduce(requests[-UNFORECAST_KEEP_MIN:]) > 0.0:
        kept = max(kept, _LITTLE)  # what was just used does not sleep
    size = max(current, _round_up(needed)) if _round_up(needed) > current else min(current, _round_up(kept))
    busy = 1 if load.in_flight + load.queued > 0 else 0
    return min(max(size, busy, ahead.least, goal.min_replicas), goal.max_replicas)


def _outlook(ahead: _Minute, then: Floats, wanted: int, observation: Observation) -> list[Json | int]:
    """Return the outlook of `wanted` replicas, as JSON; `then` are equally likely demands of the time of a launch."""
    goal, load = observation.goal.scaling, observation.load
    backlog = ahead.backlog(load.queued)
    now = _round_up(ahead.last / (60.0 * ahead.capacity_qps) + backlog)
    at = np.interp(SURE_QUANTILE * (len(then) - 1), np.arange(len(then)), then)  # `then` is sorted
    sure = _round_up(_or_zero(float(at)) / ahead.carried)
    needed = np.ceil(then / (60.0 * ahead.capacity_qps) - _ROUNDING)
    more = np.clip(np.minimum(needed, goal.max_replicas) - wanted, 0, MOST_MORE).astype(int)
    chances = np.bincount(more) / len(then)
    least = min(wanted, goal.min_replicas)
    return [min(wanted, max(now, least)), min(wanted, max(sure, least)), chances.round(4).tolist()]


def _last_outlook(memory: Json, wanted: int, now: float) -> tuple[Outlook | None, float | None]:
    """Return the outlook of the last minute that was decided by, and until when it holds.

    There is none for another size, and none where no minute has been reported for long.
    """
    known = memory.get("outlook")
    until = 60.0 * (memory.get("minute", 0) + OUTLOOK_MIN)
    if known is None or memory.get("target") != wanted or now >= until:
        return None, None
    return Outlook(known[0], known[1], tuple(known[2])), until


def _or_zero(requests: float) -> float:
    """Return the requests of a minute; 0.0 if none is more likely than one."""
    return 0.0 if requests < LEAST_TO_WAKE else requests


def cold_start_s(observation: Observation, memory: Json) -> float:
    """Return how long a replica takes to start: as the service's own did, as far as they have."""
    slo = observation.goal.scaling.slo
    assert slo is not None  # noqa: S101 - the registry chose this scaler by it
    if not slo.learns_cold_start:
        return slo.cold_start_s
    offered = sorted({offer.capacity_type.value for offer in observation.offers})
    kinds = offered or [kind.value for kind in CapacityType]
    found = cold_start.p90(memory.get("starts", {}), kinds)
    return slo.cold_start_s if found is None else min(MOST_COLD_START_S, max(1.0, found))


def _fleet(observation: Observation) -> list[tuple[Offer, int]]:
    """Return (offer, version) of each replica that counts; of the best offer, if there is no fleet."""
    fleet = [(one.offer, one.version) for one in observation.replicas if one.state in COUNTED]
    return fleet or [(offer, observation.goal.version) for offer in observation.offers[:1]]


def learned_qps(observation: Observation, memory: Json) -> float:
    """Return what one replica of the fleet carries, on the mean; of the best offer, if there is no fleet."""
    goal, known = observation.goal, memory.get("capacity", {})
    slo = goal.scaling.slo
    assert slo is not None  # noqa: S101 - the registry chose this scaler by it
    found = [
        capacity(known, kind_of(offer, version, goal), prior(offer), slo.attainment).qps
        for offer, version in _fleet(observation)
    ]
    return sum(found) / len(found) if found else UNKNOWN_QPS


def _weights(history: History, memory: Json, observation: Observation) -> Json:
    """Return the memory of `forecast.work` after the last minute; weights are taken into use when a forecast is fitted."""
    known, goal = memory.get("work", {}), observation.goal
    ready = [kind for kind, _ in ready_kinds(observation.replicas, goal)]
    known = work.learn(known, history, ready, observation.load)
    fit_number = past.fit_number(history)
    if "weights" in known and known.get("fit") == fit_number:
        return known
    kinds, slo = [kind_of(*one, goal) for one in _fleet(observation)], goal.scaling.slo
    known = work.refresh(known, history, kinds, slo.response_weight if slo else None)
    return {**known, "fit": fit_number} if known else known


def _learn_capacity(history: History, demand: Floats, memory: Json, observation: Observation) -> Json:
    """Return the known capacities after the last minute, if the fleet that served it is known."""
    known: Json = memory.get("capacity", {})
    slo = observation.goal.scaling.slo
    fleet = ready_kinds(observation.replicas, observation.goal)
    if slo is None or history.ready is None or len(fleet) != history.ready[-1]:
        return known  # a replica came or went meanwhile
    asked, met = history.requests[-1], history.within_slo[-1]
    if not asked or math.isnan(met):
        return known
    late_share = min(1.0, max(0.0, 1.0 - met / asked))
    return learn(known, fleet, float(demand[-1]) / 60.0, late_share, slo.attainment)


def headroom_of(spent: float) -> float:
    """Return how much more than the forecast is provided for, as a factor, with the error budget overdrawn by `spent` days."""
    return max(LEAST_HEADROOM, HEADROOM + GAIN * spent)


def _budget_spent(history: History, demand: Floats, memory: Json, slo: SloGoal) -> float:
    """Return the error budget after the minutes that it has not counted yet; a late request counts by its work.

    Without its memory it begins with the last one.
    """
    spent, since = float(memory.get("spent", 0.0)), int(memory.get("minute", history.end - 1))
    start = len(demand) - min(len(demand), history.end - since)
    new = history.since(since)
    requests, within = (series[-len(demand) :].tolist() for series in (new.requests, new.within_slo))
    usual = demand[-DAY_MIN:]
    usual = usual[~np.isnan(usual)]
    mean = float(usual.mean()) if len(usual) else 0.0
    allowed = 1.0 - slo.attainment
    a_day = mean * allowed * BUDGET_MIN  # late work that the SLO allows
    for asked, met, carried in zip(requests, within, demand[start:].tolist(), strict=True):
        if a_day <= 0.0 or math.isnan(asked) or math.isnan(met):
            continue
        size = carried / asked if asked else 1.0
        change = (asked - met - allowed * asked) * size / a_day
        spent = min(MOST_SPENT, max(LEAST_SPENT, spent + change))
    return spent


def _without_forecast(requests: Floats) -> tuple[float, float, Floats]:
    """Return what `forecast_demand` returns, without a forecast."""
    return float(requests[-1]), float(np.fmax.reduce(requests[-UNFORECAST_KEEP_MIN:])), requests[-1:]


def _minutes(seconds: float) -> int:
    return max(1, math.ceil(seconds / 60.0))


def _round_up(replicas: float) -> int:
    return math.ceil(replicas - _ROUNDING)
