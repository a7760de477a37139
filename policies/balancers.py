"""Which load balancer agents should stand on machines of their own, in which regions. Pure.

`count` agents are kept in each wanted region: small on-demand machines, each an attempt in one zone like a replica
(`lifecycle`), in another zone than its fellows where there is one. A region that refuses is tried again as a zone is for
replicas (`placement.zone_backoff`), and an agent that fails soon after its launch is followed by the next one ever later.

Agents serve clients, so nothing that serves ends before what takes its place: an agent in a region that is no longer
wanted, or of another shape than is wanted now, ends when every wanted one is ready, and drains first, which is the time
that names need to forget its address. When the service goes down they go last, after the last replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from policies.backoff import delay_s
from policies.goals import AgentRegion, Goal
from policies.lifecycle import NOTICE_MARGIN_S
from policies.model import (
    Action,
    BootstrapFailed,
    Drain,
    EndReason,
    Event,
    FailureKind,
    GaveUp,
    Json,
    Launch,
    LaunchFailed,
    Offer,
    ProbePassed,
    Replica,
    ReplicaState,
    Role,
    RunExited,
    Terminate,
)
from policies.placement import zone_backoff

FAREWELL_S = 60.0
"""How long an agent that serves goes on when its end is decided: two lives of a DNS record."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0

_S = ReplicaState
_COUNTED = (_S.REQUESTED, _S.PROVISIONING, _S.STARTING, _S.READY, _S.NOT_READY)
_SERVING = (_S.READY, _S.NOT_READY)


@dataclass(frozen=True, slots=True)
class AgentFleetState:
    """The wanted state, and the present one.

    `agents` are the live ones, `fitting` those of them that are of the wanted shape; `is_needed`: though the service goes
    down, something of it is left that comes before them.
    """

    places: tuple[AgentRegion, ...]
    count: int
    agents: tuple[Replica, ...]
    fitting: frozenset[int]
    is_needed: bool = False


class AgentDecision(NamedTuple):
    actions: tuple[Action, ...] = ()
    notes: tuple[str, ...] = ()


def learn(memory: Json, events: Sequence[Event], before: Mapping[int, Replica], now: float) -> Json:
    """Return the memory after this tick's events: {"blocks": see `placement.zone_backoff`, "pauses": {place: {"until", "failures"}}}.

    `before` are the agents as they were when the events came.
    """
    if not events:
        return memory
    closed = zone_backoff.learn(memory.get("blocks", {}), events, before, now)
    pauses: dict[str, dict[str, float]] = {
        place: pause
        for place, pause in memory.get("pauses", {}).items()
        if pause["until"] + zone_backoff.FORGET_AFTER_S > now
    }
    for event in events:
        agent = before.get(event.replica_id)
        if agent is None:
            continue
        place = str(place_of(agent))
        if isinstance(event, ProbePassed):
            pauses.pop(place, None)
        elif _is_failure(event) or zone_backoff.is_early_loss(event, agent):
            failures = int(pauses.get(place, {"failures": 0})["failures"]) + 1
            wait_s = delay_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
            pauses[place] = {"until": now + wait_s, "failures": failures}
    learned: dict[str, Any] = {"blocks": closed, "pauses": pauses}
    return {key: value for key, value in learned.items() if value}


def decide(
    fleet: AgentFleetState, offers: Sequence[Offer], goal: Goal, memory: Json, next_id: int, now: float
) -> AgentDecision:
    """Return what to do now. Running it again on its own outcome gives no action. New agents get ids from `next_id` on."""
    if goal.down:
        return AgentDecision() if fleet.is_needed else AgentDecision(_farewells(fleet))
    killed = [agent for agent in fleet.agents if agent.id in goal.killed and agent.state in _COUNTED]
    actions: list[Action] = [_end(agent, EndReason.USER, "asked for by id", now) for agent in killed]
    leaving = [agent for agent in fleet.agents if agent.state in _COUNTED and agent.preempt_at is not None]
    actions += [_farewell(agent, now) for agent in leaving if agent not in killed]
    counted = [
        agent for agent in fleet.agents if agent.state in _COUNTED and agent not in (*killed, *leaving)
    ]
    kept = {place: _kept(place, counted, fleet) for place in fleet.places}
    notes: list[str] = []
    for place, agents in kept.items():
        missing = fleet.count - len(agents)
        launches = (
            _launches(place, missing, counted, offers, goal, memory, next_id, now) if missing > 0 else []
        )
        next_id += len(launches)
        actions += launches
        if missing > len(launches):
            notes.append(_why_missing(place, missing - len(launches), offers, memory))
    chosen = {agent.id for agents in kept.values() for agent in agents}
    ready = sum(agent.state is _S.READY for agents in kept.values() for agent in agents)
    is_complete = ready == fleet.count * len(fleet.places)
    for agent in counted:
        if agent.id not in chosen and (is_complete or agent.state not in _SERVING):
            actions.append(
                _end(agent, EndReason.REPLACED, f"no agent of {place_of(agent)} is wanted in its place", now)
            )
    return AgentDecision(tuple(actions), tuple(notes))


def place_of(agent: Replica) -> AgentRegion:
    return AgentRegion(agent.zone.cloud, agent.zone.region)


def _kept(place: AgentRegion, counted: Sequence[Replica], fleet: AgentFleetState) -> list[Replica]:
    """Return the agents that are to stay there: those that serve before those that come up, the older first."""
    here = [agent for agent in counted if place_of(agent) == place and agent.id in fleet.fitting]
    return sorted(here, key=lambda agent: (agent.state is not _S.READY, agent.id))[: fleet.count]


def _launches(
    place: AgentRegion,
    missing: int,
    counted: Sequence[Replica],
    offers: Sequence[Offer],
    goal: Goal,
    memory: Json,
    first_id: int,
    now: float,
) -> list[Launch]:
    if memory.get("pauses", {}).get(str(place), {"until": now})["until"] > now:
        return []
    here = [offer for offer in offers if (offer.zone.cloud, offer.zone.region) == place]
    usable = zone_backoff.open_offers(here, memory.get("blocks", {}), now)
    taken = Counter(agent.zone for agent in counted)
    launches = []
    for number in range(missing if usable else 0):
        offer = min(usable, key=lambda one: (taken[one.zone], one.price_usd_hour, one.zone))
        taken[offer.zone] += 1
        why = f"load balancer agent of {place}"
        launches.append(Launch(first_id + number, offer, goal.version, why, Role.LOAD_BALANCER))
    return launches


def _why_missing(place: AgentRegion, missing: int, offers: Sequence[Offer], memory: Json) -> str:
    what = "agent" if missing == 1 else "agents"
    if not any((offer.zone.cloud, offer.zone.region) == place for offer in offers):
        return f"{missing} load balancer {what} missing in {place}: nothing is on offer there"
    if str(place) in memory.get("pauses", {}):
        return f"{missing} load balancer {what} missing in {place}: the last one failed; trying again soon"
    return f"{missing} load balancer {what} missing in {place}: it had no room when last asked; trying again soon"


def _farewells(fleet: AgentFleetState) -> tuple[Action, ...]:
    """The service goes down, and nothing is left to be served."""
    ending = (*_COUNTED, _S.DRAINING)
    why = "the service goes down"
    return tuple(
        Terminate(agent.id, EndReason.SERVICE_DOWN, why) for agent in fleet.agents if agent.state in ending
    )


def _farewell(agent: Replica, now: float) -> Drain:
    """Return the drain of an agent with a preemption notice: clients are to learn other addresses at once."""
    end = now + FAREWELL_S if agent.preempt_at is None else agent.preempt_at - NOTICE_MARGIN_S
    return Drain(agent.id, EndReason.PREEMPTED, agent.message, min(now + FAREWELL_S, end))


def _end(agent: Replica, reason: EndReason, why: str, now: float) -> Drain | Terminate:
    if agent.state in _SERVING:
        return Drain(agent.id, reason, why, now + FAREWELL_S)
    return Terminate(agent.id, reason, why)


def _is_failure(event: Event) -> bool:
    """Return whether the next one may well fare no better. Refusals of full zones are handled by `zone_backoff`."""
    if isinstance(event, LaunchFailed):
        return event.kind is FailureKind.CONFIG
    return isinstance(event, (BootstrapFailed, RunExited, GaveUp))
