"""What differs between the two fleets of a service: its replicas, and its load balancer agents on machines of their own.

`turn.ServiceTurn` treats both alike: observe, give up, learn, look at the offers, plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from policies import balancers
from policies.balancers import FAREWELL_S
from policies.brake import Evidence
from policies.goals import Goal, TeamRoom
from policies.history import History, Load
from policies.model import Launch, Memory, Observation, Offer, Plan, Replica, Role
from policies.plan import learn, plan
from policies.registry import policies_for
from policies.rollout import wanted_version
from provisioners.port.base import Requirements
from skyserve_cli.controller.reconcile.mappers import (
    agent_fleet_of,
    agent_requirements_of,
    name_orders_of,
    requirements_of,
)
from skyserve_cli.controller.reconcile.ports import Names, Specs
from skyserve_cli.controller.reconcile.transitions import TickTransitions
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.state.values import ServiceRow

MOST_LAUNCHES = (
    100  # of one service in one tick: the rest follows in the next ones, after what other services need
)
AGENT_START_S = 1200.0
AGENT_SILENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Service:
    """One service at the start of its turn.

    `room_usd_hour` is the rest of the budget of all services together, `team` what its team leaves to it (None: no limit).
    """

    row: ServiceRow
    spec: ServiceSpec
    goal: Goal
    load: Load
    now: float
    room_usd_hour: float
    history: History | None  # None: the service has no SLO
    team: TeamRoom | None = None


class Fleet(Protocol):
    """The rows of one role, and the decisions about them.

    `load` is what decides whether a drain is over. `name` is that of the fleet in the log of terminations.
    """

    role: Role
    name: str
    rows: tuple[Replica, ...]
    goal: Goal
    load: Load

    def for_fleet(self, evidence: Evidence) -> Evidence:
        """Return as much of the evidence of the service's probes as is about this fleet."""
        ...

    def learn(self, change: TickTransitions, memory: Memory) -> Memory:
        """Return the memory after this tick's events."""
        ...

    def need(self, memory: Memory) -> Requirements | None:
        """Return what to request from the clouds; None: nothing."""
        ...

    def plan(self, change: TickTransitions, offers: Sequence[Offer], memory: Memory) -> Plan:
        """Return what to do now."""
        ...


class ReplicaFleet:
    """The replicas of a service."""

    role = Role.REPLICA

    def __init__(self, service: Service, specs: Specs) -> None:
        self._service = service
        self._specs = specs
        self._policies = policies_for(service.goal)
        self.name = service.row.name
        self.rows = service.row.replicas
        self.goal = service.goal
        self.load = service.load

    def for_fleet(self, evidence: Evidence) -> Evidence:
        return evidence

    def learn(self, change: TickTransitions, memory: Memory) -> Memory:
        return learn(self._observed(change), change.before, memory, self._policies)

    def need(self, memory: Memory) -> Requirements | None:
        """What was just learned may have changed which version is wanted, and so what to request from the clouds."""
        if self.goal.down:
            return None
        return requirements_of(self._specs.get(self.name, wanted_version(self.goal, memory.rollout)))

    def plan(self, change: TickTransitions, offers: Sequence[Offer], memory: Memory) -> Plan:
        team = self._service.team
        if team is not None:
            wanted = self._specs.get(self.name, wanted_version(self.goal, memory.rollout))
            team = replace(team, num_nodes=wanted.num_nodes)
        observed = replace(
            self._observed(change),
            offers=tuple(offers),
            room_usd_hour=self._service.room_usd_hour,
            team=team,
            most_launches=MOST_LAUNCHES,
        )
        return plan(observed, memory, self._policies)

    def _observed(self, change: TickTransitions) -> Observation:
        service = self._service
        return Observation(
            service.now,
            self.goal,
            change.live(),
            (),
            self.load,
            tuple(change.events),
            history=service.history,
        )


class AgentFleet:
    """The load balancer agents on machines of their own. `replicas` are those they serve, at this point of the turn."""

    role = Role.LOAD_BALANCER

    def __init__(
        self, service: Service, owner: str, specs: Specs, names: Names, replicas: TickTransitions
    ) -> None:
        self._service = service
        self._owner = owner
        self._specs = specs
        self._names = names
        self._replicas = replicas
        self.name = f"{service.row.name}/agents"
        self.rows = service.row.balancers
        self.goal = agent_goal(service.goal)
        self.load = Load()

    def for_fleet(self, evidence: Evidence) -> Evidence:
        """Agents have supervisors, and no probes."""
        return replace(evidence, failed=None, work={})

    def learn(self, change: TickTransitions, memory: Memory) -> Memory:
        learned = balancers.learn(memory.balancers, change.events, change.before, self._service.now)
        return replace(memory, balancers=learned)

    def need(self, memory: Memory) -> Requirements | None:
        regional = self._service.spec.regional
        return None if self.goal.down or not regional.places else agent_requirements_of(regional)

    def plan(self, change: TickTransitions, offers: Sequence[Offer], memory: Memory) -> Plan:
        row, agents, now = self._service.row, change.live(), self._service.now
        spec_of = partial(self._specs.get, row.name)
        names = name_orders_of(self._owner, row, agents, spec_of)
        is_named = not all(map(self._names.is_settled, names))
        is_needed = bool(self._replicas.live()) or (is_named and bool(agents))
        fleet = replace(agent_fleet_of(row, agents, spec_of), is_needed=is_needed)
        found = balancers.decide(
            fleet, offers, self._service.goal, memory.balancers, memory.next_replica_id, now
        )
        launches = sum(isinstance(action, Launch) for action in found.actions)
        return Plan(
            found.actions,
            replace(memory, next_replica_id=memory.next_replica_id + launches),
            found.notes,
            wake_at=now if found.notes else None,  # while an agent is missing, each tick looks for one
        )


def agent_goal(goal: Goal) -> Goal:
    """Return the deadlines of agents: one that cannot be reached from here may serve anyway."""
    return replace(
        goal,
        initial_delay_s=AGENT_START_S,
        probe_failure_threshold_s=AGENT_SILENCE_S,
        drain_timeout_s=FAREWELL_S,
    )
