"""plan(observation, memory) -> Plan: the whole decision of one tick, pure.

The same function prints `serve plan`, drives the daemon and runs in the simulator. It reads like the sentence
it implements: end what must end, decide how many, replace the old, drop the surplus, place what is missing.
Every action says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from policies import rollout
from policies.model import (
    Action,
    Drain,
    EndReason,
    Launch,
    Memory,
    Observation,
    Plan,
    Replica,
    ReplicaState,
    Terminate,
)
from policies.placement.static import next_opening
from policies.registry import Policies

_ENDING_ORDER = {
    ReplicaState.REQUESTED: 0,
    ReplicaState.PROVISIONING: 1,
    ReplicaState.STARTING: 2,
    ReplicaState.NOT_READY: 3,
    ReplicaState.READY: 4,
}


def learn(
    observation: Observation, before: Mapping[int, Replica], memory: Memory, policies: Policies
) -> Memory:
    """The memory after this tick's events. `before` are the replicas as they were when the events came."""
    if not observation.events:
        return memory
    events, goal, now = observation.events, observation.goal, observation.now
    return replace(
        memory,
        placement=policies.placer.learn(memory.placement, events, before, now),
        rollout=rollout.learn(memory.rollout, events, before, goal, now),
    )


def plan(observation: Observation, memory: Memory, policies: Policies) -> Plan:
    """What to do now. Running it again on its own outcome, with no new event, gives no action."""
    goal = observation.goal
    if goal.down:
        why = "the service goes down"
        ends = [_end(r, EndReason.SERVICE_DOWN, why, observation) for r in _live(observation)]
        return Plan((*ends, *_cut_short(observation)), memory, target=0)

    killed = [r for r in _live(observation) if r.id in goal.killed]
    actions: list[Action] = [_end(r, EndReason.USER, "asked for by id", observation) for r in killed]
    staying = tuple(r for r in observation.replicas if r not in killed)

    wanted, scaling = policies.scaler.target(observation, memory.scaling)
    memory = replace(memory, scaling=scaling)
    target = wanted + goal.scaling.num_overprovision if wanted > 0 else 0
    new, old = rollout.split(staying, goal, memory.rollout)

    memory = replace(memory, rollout=rollout.settle(target, new, old, goal, memory.rollout))
    retired = rollout.to_retire(target, new, old, goal, memory.rollout)
    why = f"version {rollout.wanted_version(goal, memory.rollout)} takes over"
    actions += [_end(r, EndReason.REPLACED, why, observation) for r in retired]
    surplus = _surplus(target, new)
    why = f"{len(new)} replicas, {target} wanted"
    actions += [_end(r, EndReason.SCALED_DOWN, why, observation) for r in surplus]

    missing = rollout.launches_allowed(target, new, [r for r in old if r not in retired], goal)
    launches, memory, notes = _launch(missing, replace(observation, replicas=staying), memory, policies)
    return Plan((*actions, *launches), memory, notes, target)


def _live(observation: Observation) -> list[Replica]:
    """Those whose end has not been decided yet."""
    return [replica for replica in observation.replicas if replica.state in _ENDING_ORDER]


def _end(replica: Replica, reason: EndReason, why: str, observation: Observation) -> Drain | Terminate:
    """Drain what may hold requests, terminate what cannot."""
    if replica.state in (ReplicaState.READY, ReplicaState.NOT_READY):
        return Drain(replica.id, reason, why, observation.now + observation.goal.drain_timeout_s)
    return Terminate(replica.id, reason, why)


def _cut_short(observation: Observation) -> list[Terminate]:
    """The drains that a user without patience no longer waits for."""
    if observation.goal.drain_timeout_s > 0:
        return []
    draining = [r for r in observation.replicas if r.state is ReplicaState.DRAINING]
    late = [r for r in draining if r.drain_by is None or r.drain_by > observation.now]
    return [Terminate(r.id, EndReason.SERVICE_DOWN, "down, without drain") for r in late]


def _surplus(target: int, new: Sequence[Replica]) -> list[Replica]:
    """The replicas too many: first those that do not serve yet, then the oldest version, then the youngest."""
    order = sorted(new, key=lambda r: (_ENDING_ORDER[r.state], r.version, -r.id))
    return order[: max(0, len(new) - target)]


def _launch(
    count: int, observation: Observation, memory: Memory, policies: Policies
) -> tuple[list[Launch], Memory, tuple[str, ...]]:
    if count <= 0:
        return [], memory, ()
    goal, now = observation.goal, observation.now
    held_back = rollout.may_launch(goal, memory.rollout, now)
    if held_back is not None:
        return [], memory, (held_back,)
    places, placement = policies.placer.place(count, observation, memory.placement)
    first = memory.next_replica_id
    version = rollout.wanted_version(goal, memory.rollout)
    launches = [Launch(first + i, place.offer, version, place.why) for i, place in enumerate(places)]
    memory = replace(memory, placement=placement, next_replica_id=first + len(launches))
    return launches, memory, _shortfall(count - len(launches), observation, memory, version)


def _shortfall(short: int, observation: Observation, memory: Memory, version: int) -> tuple[str, ...]:
    """Sentences without numbers that change by themselves: an unchanged note costs no write."""
    if short <= 0:
        return ()
    if next_opening(observation.offers, memory.placement, observation.now) is None:
        return (f"no offer fits version {version}",)
    return (f"{short} more wanted, but every zone was out of room when last asked; trying again soon",)
