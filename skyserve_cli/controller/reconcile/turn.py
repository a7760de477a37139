"""The turn of one service: apply events, learn, plan, and return the changes to write. It writes and calls nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from policies import balancers
from policies.balancers import FAREWELL_S, Decision
from policies.brake import Evidence, TerminationLog, judge
from policies.deadlines import due
from policies.goals import Goal
from policies.history import Load
from policies.model import EndReason, Event, GaveUp, Launch, Observation, Offer, Plan, Replica, Role
from policies.plan import learn, plan
from policies.registry import policies_for
from policies.rollout import wanted_version
from provisioners.port.base import Requirements
from skyserve_cli.controller.reconcile.adoption import Adoption
from skyserve_cli.controller.reconcile.demand import merged
from skyserve_cli.controller.reconcile.demand_book import DemandBook
from skyserve_cli.controller.reconcile.mappers import (
    agent_fleet_of,
    agent_requirements_of,
    goal_of,
    name_orders_of,
    requirements_of,
    stands_beside,
)
from skyserve_cli.controller.reconcile.ports import (
    BalancerFleet,
    InstanceListing,
    InstancePoller,
    Names,
    Offers,
    Regional,
    Specs,
)
from skyserve_cli.controller.reconcile.transitions import Change
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.state.values import Commit, ServiceRow, Story

AGENT_START_S = 1200.0
AGENT_SILENCE_S = 600.0


@dataclass(slots=True)
class Decided:
    """What was decided about one service, before it is written."""

    row: ServiceRow
    spec: ServiceSpec
    goal: Goal
    load: Load
    change: Change
    agents: Change
    plan: Plan
    needs: tuple[Requirements, ...]
    offers: tuple[tuple[Offer, ...] | None, ...]
    commit: Commit | None  # None: nothing changed


class TickOffers:
    """The offers of one tick: each need is asked for once. Equal offers are the same object from tick to tick."""

    def __init__(self, offers: Offers) -> None:
        self._offers = offers
        self._needs: dict[Requirements, Requirements] = {}  # equal ones are one object
        self._last: dict[int, tuple[Offer, ...] | None] = {}  # by id of the object in `_needs`
        self._found: dict[int, tuple[Offer, ...] | None] = {}  # in this tick

    def begin(self) -> None:
        """A tick begins."""
        self._found = {}

    def kept(self, need: Requirements) -> Requirements:
        """The one object of all equal needs."""
        return self._needs.setdefault(need, need)

    def of(self, need: Requirements) -> tuple[Offer, ...] | None:
        """`need` is one that `kept` returned. None while the offers are not known."""
        key = id(need)
        if key not in self._found:
            found, last = self._offers.get(need), self._last.get(key)
            self._found[key] = self._last[key] = last if found == last else found
        return self._found[key]


class ServiceTurn:
    """Decides about one service at a time. `seen` counts the listings of each cloud since this process started."""

    def __init__(
        self,
        *,
        specs: Specs,
        offers: TickOffers,
        instance_poller: InstancePoller,
        fleet: BalancerFleet,
        regional: Regional,
        names: Names,
        evidence: Callable[[str], Evidence],
        adoption: Adoption | None,
        seen: Mapping[str, int],
        demand: DemandBook,
    ) -> None:
        self._specs = specs
        self._offers = offers
        self._instance_poller = instance_poller
        self._fleet = fleet
        self._regional = regional
        self._names = names
        self._evidence = evidence
        self._adoption = adoption
        self._seen = seen
        self._demand = demand
        self._given_up: dict[str, TerminationLog] = {}  # for failed probes, by service

    def decide(
        self,
        row: ServiceRow,
        answers: Sequence[Event],
        sightings: Sequence[InstanceListing],
        now: float,
        room_usd_hour: float = math.inf,
    ) -> Decided:
        """`room_usd_hour` is the rest of the budget of all services together."""
        spec = self._specs.get(row.name, row.version)
        goal = goal_of(row, spec, now)
        load = self.load(row, spec)
        change = Change(row.replicas, goal, now)
        change.observe(answers, sightings)
        doubts = [self._give_up(row.name, row.name, change, goal, load)]
        agents = Change(row.balancers, agent_goal(goal), now, Role.LOAD_BALANCER)
        agents.observe(answers, sightings)
        doubts.append(self._give_up(row.name, f"{row.name}/agents", agents, agent_goal(goal), Load()))

        policies = policies_for(goal)
        history = None if goal.scaling.slo is None else self._demand.history(row.name, now)
        read_cache = Observation(now, goal, change.live(), (), load, tuple(change.events), history=history)
        memory = learn(read_cache, change.before, row.memory, policies)
        learned = balancers.learn(memory.balancers, agents.events, agents.before, now)
        memory = replace(memory, balancers=learned)
        # What was just learned may have changed which version is wanted, and so what to ask the clouds for.
        wanted = self._specs.get(row.name, wanted_version(goal, memory.rollout))
        needs = () if goal.down else self._needed(requirements_of(wanted))
        if not goal.down and spec.regional.places:
            needs += self._needed(agent_requirements_of(spec.regional))
        offers = tuple(self._offers.of(need) for need in needs)
        own = offers[0] if offers else ()
        decided = Plan((), memory, (row.notes,) if row.notes else (), row.target, row.wanted)
        is_awaited = self._adoption is not None and self._adoption.is_awaited(row.name, now)
        if goal.down or (own is not None and self._knows_all(read_cache.replicas) and not is_awaited):
            decided = plan(
                replace(read_cache, offers=own or (), room_usd_hour=room_usd_hour), memory, policies
            )
            decided = self._with_agents(
                row, goal, change, agents, decided, offers[1] if offers[1:] else (), now
            )
        if is_awaited:
            decided = replace(decided, wake_at=now)  # the wait ends with time, or with an adoption
        doubts += self._blindness(read_cache.replicas, decided.notes)
        new = dict.fromkeys(
            doubt for doubt in doubts if doubt and not any(doubt in note for note in decided.notes)
        )
        decided = replace(decided, notes=(*decided.notes, *new))
        change.scale(row.wanted, decided.wanted, decided.why)
        change.act(one for one in decided.actions if change.concerns(one))
        agents.act(one for one in decided.actions if not change.concerns(one))
        commit = _commit_of(row, change, agents, decided)
        return Decided(row, spec, goal, load, change, agents, decided, needs, offers, commit)

    def load(self, row: ServiceRow, spec: ServiceSpec) -> Load:
        """Return the demand that all agents of the service have seen."""
        beside = [self._fleet.load(row.name)] if stands_beside(row, spec) else []
        return merged([*beside, *self._regional.loads(row.name)])

    def take_demand(self, row: ServiceRow, spec: ServiceSpec, now: float) -> bool:
        """Store the minutes that its agents have reported. Returns whether there were any."""
        beside = [self._fleet.demand(row.name)] if stands_beside(row, spec) else []
        return self._demand.take(row.name, [*beside, *self._regional.demands(row.name)], now)

    def _needed(self, need: Requirements) -> tuple[Requirements, ...]:
        return (self._offers.kept(need),)

    def _give_up(self, service: str, log_of: str, change: Change, goal: Goal, load: Load) -> str:
        """Apply the deadlines that have passed, as far as this controller can trust its own probes. Returns why not all."""
        replicas = tuple(change.replicas.values())
        overdue = tuple(due(replicas, goal, load, change.now))
        if not overdue:
            return ""
        evidence = self._evidence(service)
        if log_of != service:
            evidence = replace(evidence, failed=None)  # agents have keepers, and no probes
        terminated = self._given_up.setdefault(log_of, TerminationLog())
        verdict = judge(overdue, replicas, goal, evidence, terminated, change.now)
        change.take(verdict.events)
        for event in verdict.events:
            if isinstance(event, GaveUp) and event.reason is EndReason.PROBE_FAILED:
                terminated.add(change.now)
        return verdict.note

    def _with_agents(
        self,
        row: ServiceRow,
        goal: Goal,
        change: Change,
        agents: Change,
        decided: Plan,
        offers: Sequence[Offer] | None,
        now: float,
    ) -> Plan:
        """Return the plan, and the orders for agents on machines of their own."""
        memory = decided.memory
        found = Decision()
        if goal.down or (offers is not None and self._knows_all(agents.live())):
            fleet = agent_fleet_of(row, agents.live(), partial(self._specs.get, row.name))
            names = name_orders_of(row, agents.live(), partial(self._specs.get, row.name))
            is_named = not all(map(self._names.is_settled, names))
            fleet = replace(fleet, is_needed=bool(change.live()) or (is_named and bool(agents.live())))
            found = balancers.decide(fleet, offers or (), goal, memory.balancers, memory.next_replica_id, now)
        launches = sum(isinstance(action, Launch) for action in found.actions)
        next_id = memory.next_replica_id + launches
        return replace(
            decided,
            actions=(*decided.actions, *found.actions),
            memory=replace(memory, next_replica_id=next_id),
            notes=(*decided.notes, *found.notes),
            wake_at=now
            if found.notes
            else decided.wake_at,  # while an agent is missing, each tick looks for one
        )

    def _knows_all(self, replicas: Iterable[Replica]) -> bool:
        return all(replica.zone.cloud in self._seen for replica in replicas)

    def _blindness(self, replicas: Iterable[Replica], reported: Sequence[str]) -> Iterator[str]:
        """Yield what keeps us from seeing how the replicas are, unless it has been reported."""
        zones = {replica.zone for replica in replicas}
        places = {
            place
            for zone in zones
            for place in (zone.cloud, f"{zone.cloud}/{zone.region}", f"{zone.cloud}/{zone.name}")
        }
        for place, sentence in sorted(self._instance_poller.trouble().items()):
            note = f"{place} cannot be listed: {sentence}"
            if place in places and not any(note in one for one in reported):
                yield note


def _commit_of(row: ServiceRow, change: Change, agents: Change, decided: Plan) -> Commit | None:
    """Intents, memory and story; None where nothing changed."""
    notes = "; ".join(decided.notes)
    memory = None if decided.memory == row.memory else decided.memory
    story = [*change.story, *agents.story]
    if notes and notes != row.notes:
        story.append(Story("note", notes))
    changed = [*change.changed(), *agents.changed()]
    same = (decided.wanted, decided.target, notes) == (row.wanted, row.target, row.notes)
    if not changed and not story and memory is None and same:
        return None
    return Commit(
        row.name,
        now=change.now,
        changed=changed,
        memory=memory,
        wanted=decided.wanted,
        target=decided.target,
        notes=notes,
        story=story,
    )


def agent_goal(goal: Goal) -> Goal:
    """Patience with agents: one that cannot be reached from here may serve all the same."""
    return replace(
        goal,
        initial_delay_s=AGENT_START_S,
        probe_failure_threshold_s=AGENT_SILENCE_S,
        drain_timeout_s=FAREWELL_S,
    )
