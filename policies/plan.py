"""plan(observation, memory) -> Plan: the whole decision of one tick, pure.

The same function prints `serve plan`, drives the daemon and runs in the simulator. It reads like the sentence
it implements: end what must end, decide how many, replace the old, drop the surplus, place new ones.
Every action says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from policies import budget, notices, retiring, rollout
from policies.goals import UpdateMode
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
from policies.placement.base import View
from policies.registry import Policies
from policies.scaling import cold_start

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
        why = "the service goes down"
        ends = [_end(r, EndReason.SERVICE_DOWN, why, observation) for r in _live(observation)]
        return Plan((*ends, *_cut_short(observation)), memory, target=0)

    live = {replica.id: replica for replica in _live(observation)}
    killed = [r for r in live.values() if r.id in goal.killed]
    actions: list[Action] = [_end(r, EndReason.USER, "asked for by id", observation) for r in killed]
    staying = [replica for replica in observation.replicas if replica not in killed]
    doomed, staying = notices.split(staying, [r for r in live.values() if r not in killed])
    actions += notices.drains(doomed, goal, now)

    scaled = policies.scaler.target(observation, memory.scaling)
    wanted, scaling, rescale_at, outlook = scaled.wanted, scaled.memory, scaled.wake_at, scaled.outlook
    size = wanted + goal.placement.num_overprovision if wanted > 0 else 0
    memory, refused = _without_hope(observation, memory)
    new, old = rollout.split(staying, goal, memory.rollout)
    announced = [replica for replica in new if retiring.is_announced(replica)]
    leaving = retiring.leaving(new, observation.replicas, goal, now)
    new = [replica for replica in new if replica not in leaving]
    complete = rollout.is_complete(size, new)
    memory = replace(memory, scaling=scaling, rollout=rollout.settle(complete, old, goal, memory.rollout))
    retired = rollout.to_retire(size, new, old, goal, memory.rollout)
    version = rollout.wanted_version(goal, memory.rollout)
    old = [replica for replica in old if replica not in retired]

    held_back, retry_at = rollout.may_launch(goal, memory.rollout, now)
    if (
        refused and not held_back
    ):  # these offers are the refused version's, not those of the one wanted from now on
        held_back, retry_at = refused, now
    side_by_side = old if goal.update_mode is UpdateMode.ROLLING else []
    view = View(
        now=now,
        wanted=wanted,
        goal=goal.placement,
        replicas=tuple(new),
        others=tuple(side_by_side),
        offers=observation.offers,
        limit=0 if held_back else rollout.launch_limit(size, new, old, goal),
        wanted_qps=scaled.qps,
        least=goal.scaling.min_replicas,
        leaving=tuple(doomed),
        wanted_later=None if outlook is None else outlook.later,
        wanted_then=None if outlook is None else outlook.then,
        needed_now=None if outlook is None else outlook.now,
    )
    gone: list[Replica] = []
    if leaving:
        # A placer may keep more than the size, or be content with less; of the fleet as it is it says how many.
        every = replace(view, replicas=(*new, *leaving), limit=0)
        whole = policies.placer.decide(every, memory.placement)
        kept = max(whole.target, len(every.replicas) - len(whole.ends))
        gone = retiring.to_drain(kept, new, leaving, goal, now)
        leaving = [replica for replica in leaving if replica not in gone]
        others = (*side_by_side, *leaving)
        limit = min(view.limit, retiring.launch_limit(kept, new, others, goal))
        view = replace(view, others=others, limit=limit)
    decided = policies.placer.decide(view, memory.placement)
    if old and not held_back and not decided.launches and rollout.is_enough(wanted, new):
        # The replicas beyond the wanted number are not available now: an update does not wait for them.
        memory = replace(memory, rollout=rollout.settle(True, old, goal, memory.rollout))
        retired += old
    if (
        leaving
        and view.limit > 0
        and not held_back
        and not decided.launches
        and rollout.is_enough(wanted, new)
    ):
        gone += leaving  # the placer wants no more replicas than stay
    why = f"version {version} takes over"
    actions += [_end(r, EndReason.REPLACED, why, observation) for r in retired]
    actions += [_end(r, EndReason.REPLACED, r.message or _RETIRED, observation) for r in gone]
    actions += [_end(live[e.replica_id], EndReason.SCALED_DOWN, e.why, observation) for e in decided.ends]

    purse = budget.Budget(goal.max_usd_hour, budget.usd_hour(observation.replicas), observation.room_usd_hour)
    places, over = budget.affordable(decided.launches, purse)
    first = memory.next_replica_id
    launches = [
        Launch(first + i, replace(place.offer, preference=0, places=None), version, place.why)
        for i, place in enumerate(places)
    ]
    memory = replace(memory, placement=decided.memory, next_replica_id=first + len(launches))
    notes = (*decided.notes, over) if over else decided.notes
    if decided.target > len(new):
        if held_back:
            notes = (held_back,)
        elif not observation.offers:
            notes = (f"no offer fits version {version}",)
    look_at = now + budget.LOOK_AGAIN_S if len(places) < len(decided.launches) else None
    last_calls = (retiring.drains_at(replica, goal) for replica in announced if replica not in gone)
    drains = (at for replica in doomed if (at := notices.drains_at(replica, goal)) > now)
    waits = (decided.wake_at, rescale_at, retry_at, look_at, *last_calls, *drains)
    wakes = [at for at in waits if at is not None]
    return Plan(
        (*actions, *launches), memory, notes, decided.target, wanted, min(wakes, default=None), scaled.why
    )


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
