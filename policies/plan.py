"""plan(observation, memory) -> Plan: the whole decision of one tick, pure.

The same function prints `serve plan`, drives the daemon and runs in the simulator. It reads like the sentence
it implements: end what must end, decide how many, replace the old, drop the surplus, place new ones.
Every action has its reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from policies import budget, notices, quotas, retiring, rollout
from policies.goals import Goal, UpdateMode
from policies.model import (
    Action,
    Drain,
    EndReason,
    Json,
    Launch,
    Memory,
    Observation,
    Plan,
    Replica,
    ReplicaState,
    Terminate,
)
from policies.placement import zone_backoff
from policies.placement.base import PlannedLaunch, View
from policies.registry import Policies
from policies.scaling import cold_start
from policies.scaling.base import Size

_RETIRED = "its machine was announced to go"


def learn(
    observation: Observation, before: Mapping[int, Replica], memory: Memory, policies: Policies
) -> Memory:
    """Return the memory after this tick's events. `before` are the replicas as they were when the events came."""
    if not observation.events:
        return memory
    events, goal, now = observation.events, observation.goal, observation.now
    return replace(
        memory,
        placement=policies.placer.learn(memory.placement, events, before, now),
        rollout=rollout.learn(memory.rollout, events, before, goal, now),
        scaling=_starts(memory.scaling, observation, before),
    )


def _starts(scaling: Json, observation: Observation, before: Mapping[int, Replica]) -> Json:
    """Return the scaler's memory with how long replicas took to start, where it plans with that."""
    slo = observation.goal.scaling.slo
    if slo is None or not slo.learns_cold_start:
        return scaling
    was = scaling.get("starts", {})
    starts = cold_start.learn(was, observation.events, before, observation.now)
    return scaling if starts is was else {**scaling, "starts": starts}


def plan(observation: Observation, memory: Memory, policies: Policies) -> Plan:
    """Return what to do now.

    Running it again on its own outcome, with no new event, gives no action (where accelerators carry different loads, after
    as many ticks as it takes to find out what was obtained; RiskHedge may miss an announced replica once it drains).
    """
    goal, now = observation.goal, observation.now
    if goal.down:
        return _going_down(observation, memory)
    live = {replica.id: replica for replica in _live(observation)}
    actions, doomed, staying = _ended_by_others(observation, live.values())

    scaled = policies.scaler.target(observation, memory.scaling)
    wanted = scaled.wanted
    size = wanted + goal.placement.num_overprovision if wanted > 0 else 0
    memory, refused = _without_hope(observation, memory)
    new, old = rollout.split(staying, goal, memory.rollout)
    trial = rollout.trial(memory.rollout, new, goal, now)
    actions += [_end(r, EndReason.SCALED_DOWN, trial.note, observation) for r in trial.surplus]
    announced = [replica for replica in trial.kept if retiring.is_announced(replica)]
    leaving = retiring.leaving(trial.kept, observation.replicas, goal, now)
    new = [replica for replica in trial.kept if replica not in leaving]
    settled = rollout.settle(rollout.is_complete(size, new), old, goal, trial.memory)
    memory = replace(memory, scaling=scaled.memory, rollout=settled)
    retired = rollout.to_retire(size, new, old, goal, memory.rollout)
    version = rollout.wanted_version(goal, memory.rollout)
    old = [replica for replica in old if replica not in retired]

    held_back, retry_at = rollout.may_launch(goal, memory.rollout, now)
    if refused and not held_back:  # the offers are those of the refused version
        held_back, retry_at = refused, now
    limit = min(observation.most_launches, rollout.launch_limit(size, new, old, goal), trial.limit)
    limit = 0 if held_back else limit
    view = _view(observation, scaled, new, old, doomed, limit)
    view, leaving, gone = _turn_over(view, leaving, policies, memory, goal)
    decided = policies.placer.decide(view, memory.placement)
    # The replicas beyond the wanted number are not available now: neither an update nor a notice waits for them.
    is_content = not held_back and not decided.launches and rollout.is_enough(wanted, new)
    if old and is_content:
        memory = replace(memory, rollout=rollout.settle(True, old, goal, memory.rollout))
        retired += old
    if leaving and view.limit > 0 and is_content:
        gone += leaving
    actions += _replaced(retired, gone, version, observation)
    actions += [_end(live[e.replica_id], EndReason.SCALED_DOWN, e.why, observation) for e in decided.ends]

    places, over = _affordable(decided.launches, observation)
    launches = _launches(places, memory.next_replica_id, version)
    memory = replace(memory, placement=decided.memory, next_replica_id=memory.next_replica_id + len(launches))
    why_fewer = held_back or ("" if observation.offers else f"no offer fits version {version}")
    notes = (why_fewer,) if why_fewer and decided.target > len(new) else (*decided.notes, *over)
    notes = tuple(dict.fromkeys(filter(None, (trial.note, *notes))))
    look_at = now + budget.LOOK_AGAIN_S if len(places) < len(decided.launches) else None
    ends_at = _drains_at(doomed, [replica for replica in announced if replica not in gone], goal, now)
    wake_at = _earliest(decided.wake_at, scaled.wake_at, retry_at, trial.until, look_at, *ends_at)
    return Plan((*actions, *launches), memory, notes, decided.target, wanted, wake_at, scaled.why)


def _drains_at(
    doomed: Iterable[Replica], announced: Iterable[Replica], goal: Goal, now: float
) -> Iterator[float]:
    """Yield when replicas with a notice, and those whose machines were announced to go, begin to drain."""
    yield from (at for replica in doomed if (at := notices.drains_at(replica, goal)) > now)
    yield from (retiring.drains_at(replica, goal) for replica in announced)


def _ended_by_others(
    observation: Observation, live: Collection[Replica]
) -> tuple[list[Action], Sequence[Replica], list[Replica]]:
    """Return what ends those that the user or a cloud ends, which of them have a notice, and the replicas that stay."""
    goal = observation.goal
    killed = [replica for replica in live if replica.id in goal.killed]
    actions: list[Action] = [_end(r, EndReason.USER, "asked for by id", observation) for r in killed]
    staying = [replica for replica in observation.replicas if replica not in killed]
    doomed, staying = notices.split(staying, [replica for replica in live if replica not in killed])
    return [*actions, *notices.drains(doomed, goal, observation.now)], doomed, staying


def _going_down(observation: Observation, memory: Memory) -> Plan:
    why = "the service goes down"
    ends = [_end(r, EndReason.SERVICE_DOWN, why, observation) for r in _live(observation)]
    return Plan((*ends, *_cut_short(observation)), memory, target=0)


def _view(
    observation: Observation,
    scaled: Size,
    new: Sequence[Replica],
    old: Sequence[Replica],
    doomed: Sequence[Replica],
    limit: int,
) -> View:
    """Return what the placer decides by: replicas of the `new` version, and, in a rolling update, the `old` beside them."""
    goal, outlook = observation.goal, scaled.outlook
    return View(
        now=observation.now,
        wanted=scaled.wanted,
        goal=goal.placement,
        replicas=tuple(new),
        others=tuple(old) if goal.update_mode is UpdateMode.ROLLING else (),
        offers=observation.offers,
        limit=limit,
        wanted_qps=scaled.qps,
        least=goal.scaling.min_replicas,
        leaving=tuple(doomed),
        wanted_later=None if outlook is None else outlook.later,
        wanted_then=None if outlook is None else outlook.then,
        needed_now=None if outlook is None else outlook.now,
    )


class _TurnedOver(NamedTuple):
    """Of replicas that are `leaving`: those that are `gone` have enough others in their place, the rest still serves."""

    view: View
    leaving: list[Replica]
    gone: list[Replica]


def _turn_over(
    view: View, leaving: list[Replica], policies: Policies, memory: Memory, goal: Goal
) -> _TurnedOver:
    """Decide which replicas on announced machines can drain, and let the placer launch the others' replacements."""
    if not leaving:
        return _TurnedOver(view, [], [])
    # A placer may keep more than the size, or be content with less; of the fleet as it is it says how many.
    every = replace(view, replicas=(*view.replicas, *leaving), limit=0)
    whole = policies.placer.decide(every, memory.placement)
    kept = max(whole.target, len(every.replicas) - len(whole.ends))
    gone = retiring.to_drain(kept, view.replicas, leaving, goal, view.now)
    staying = [replica for replica in leaving if replica not in gone]
    others = (*view.others, *staying)
    limit = min(view.limit, retiring.launch_limit(kept, view.replicas, others, goal))
    return _TurnedOver(replace(view, others=others, limit=limit), staying, gone)


def _replaced(
    retired: Sequence[Replica], gone: Sequence[Replica], version: int, observation: Observation
) -> list[Drain | Terminate]:
    """Return the ends of replicas of another version, and of those on announced machines."""
    why = f"version {version} takes over"
    ends = [_end(r, EndReason.REPLACED, why, observation) for r in retired]
    return ends + [_end(r, EndReason.REPLACED, r.message or _RETIRED, observation) for r in gone]


def _earliest(*instants: float | None) -> float | None:
    return min((at for at in instants if at is not None), default=None)


def _affordable(
    launches: Sequence[PlannedLaunch], observation: Observation
) -> tuple[list[PlannedLaunch], list[str]]:
    """Return the launches that fit into the budgets and into the quota of the team, and why others do not."""
    spent = budget.usd_hour(observation.replicas)
    purse = budget.Budget(observation.goal.max_usd_hour, spent, observation.room_usd_hour)
    places, over = budget.affordable(launches, purse)
    places, beyond = quotas.permitted(places, observation.team)
    return places, [sentence for sentence in (over, beyond) if sentence]


def _launches(places: Sequence[PlannedLaunch], first_id: int, version: int) -> list[Launch]:
    return [
        Launch(first_id + i, replace(place.offer, preference=0, places=None), version, place.why)
        for i, place in enumerate(places)
    ]


def _without_hope(observation: Observation, memory: Memory) -> tuple[Memory, str]:
    """Return the memory, and a sentence if the wanted version is given up now because every offer has refused it."""
    goal, closed = observation.goal, memory.placement.get("blocks", {})
    if not zone_backoff.all_rejected(observation.offers, closed):
        return memory, ""
    version, after = rollout.wanted_version(goal, memory.rollout), rollout.give_up(goal, memory.rollout)
    if after == memory.rollout:
        return memory, ""
    placement = {**memory.placement, "blocks": zone_backoff.without_refusals(closed)}
    return (
        replace(memory, rollout=after, placement=placement),
        f"version {version} has failed: every machine on offer was refused",
    )


def _live(observation: Observation) -> list[Replica]:
    """Return those whose end has not been decided yet."""
    return [replica for replica in observation.replicas if replica.state in rollout.COUNTED]


def _end(replica: Replica, reason: EndReason, why: str, observation: Observation) -> Drain | Terminate:
    """Drain what may hold requests, terminate what cannot."""
    if replica.state in (ReplicaState.READY, ReplicaState.NOT_READY):
        return Drain(replica.id, reason, why, observation.now + observation.goal.drain_timeout_s)
    return Terminate(replica.id, reason, why)


def _cut_short(observation: Observation) -> list[Terminate]:
    """Return the drains that a user without patience no longer waits for."""
    if observation.goal.drain_timeout_s > 0:
        return []
    draining = [r for r in observation.replicas if r.state is ReplicaState.DRAINING]
    late = [r for r in draining if r.drain_by is None or r.drain_by > observation.now]
    return [Terminate(r.id, EndReason.SERVICE_DOWN, "down, without drain") for r in late]
