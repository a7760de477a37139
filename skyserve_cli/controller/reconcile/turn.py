"""The turn of one service: apply events, learn, plan, and return the changes to write. It writes and calls nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from policies.brake import JUDGED, Evidence, TerminationLog, confirmed
from policies.deadlines import due
from policies.goals import Goal, TeamRoom
from policies.health import FailedProbe, failing, loaded, sifted, with_engines
from policies.history import Load
from policies.model import EndReason, Event, GaveUp, Memory, Offer, Plan, Replica, Role
from provisioners.port.base import Requirements
from skyserve_cli.controller.reconcile.demand import merged
from skyserve_cli.controller.reconcile.demand_cache import DemandCache
from skyserve_cli.controller.reconcile.fleets import AgentFleet, Fleet, ReplicaFleet, Service
from skyserve_cli.controller.reconcile.inputs import BalancerPorts, Doubts
from skyserve_cli.controller.reconcile.mappers import goal_of, has_local_agent
from skyserve_cli.controller.reconcile.ports import InstanceListing, InstancePoller, Offers, Specs
from skyserve_cli.controller.reconcile.transitions import TickTransitions
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.state.values import Commit, EventRecord, ServiceRow


@dataclass(slots=True)
class Decided:
    """What was decided about one service, before it is written."""

    row: ServiceRow
    spec: ServiceSpec
    goal: Goal
    load: Load
    change: TickTransitions
    agents: TickTransitions
    plan: Plan
    needs: tuple[Requirements, ...]
    offers: tuple[tuple[Offer, ...] | None, ...]
    commit: Commit | None  # None: nothing changed


@dataclass(frozen=True, slots=True)
class _FleetTurn:
    """What was decided about one fleet. `plan` is None if it was too early to decide, `doubt` why not all deadlines count."""

    change: TickTransitions
    memory: Memory
    plan: Plan | None = None
    doubt: str = ""
    need: Requirements | None = None
    offers: tuple[Offer, ...] | None = None


class TickOffers:
    """The offers of one tick: each need is requested once. Equal offers are the same object from tick to tick."""

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
        owner: str,
        specs: Specs,
        offers: TickOffers,
        instance_poller: InstancePoller,
        balancers: BalancerPorts,
        doubts: Doubts,
        seen: Mapping[str, int],
        demand: DemandCache,
    ) -> None:
        self._owner = owner
        self._specs = specs
        self._offers = offers
        self._instance_poller = instance_poller
        self._balancers = balancers
        self._doubts = doubts
        self._seen = seen
        self._demand = demand
        self._given_up: dict[str, TerminationLog] = {}  # for failed probes, by service

    def decide(
        self,
        row: ServiceRow,
        results: Sequence[Event],
        listings: Sequence[InstanceListing],
        now: float,
        room_usd_hour: float = math.inf,
        team: TeamRoom | None = None,
        remark: str = "",
    ) -> Decided:
        """`room_usd_hour` is the rest of the budget of all services together, `team` what its team leaves to it.

        `remark` is one more sentence for the notes.
        """
        spec = self._specs.get(row.name, row.version)
        goal = goal_of(row, spec, now)
        load = self.load(row, spec)
        history = None if goal.scaling.slo is None else self._demand.history(row.name, now)
        service = Service(row, spec, goal, load, now, room_usd_hour, history, team)
        adoption = self._doubts.adoption
        is_awaited = adoption is not None and adoption.is_awaited(row.name, now)
        happened = (results, listings)
        replicas = ReplicaFleet(service, self._specs)
        own = self._turn_fleet(replicas, service, happened, row.memory, is_early=is_awaited)
        agents = _FleetTurn(TickTransitions((), goal, now, Role.LOAD_BALANCER), own.memory)
        if row.balancers or spec.regional.places:
            balancers = AgentFleet(service, self._owner, self._specs, self._balancers.names, own.change)
            agents = self._turn_fleet(balancers, service, happened, own.memory, is_early=own.plan is None)
        decided = self._noted(_together(row, own, agents), own, agents, remark)
        if is_awaited:
            decided = replace(decided, wake_at=now)  # the wait ends with time, or with an adoption
        own.change.scale(row.wanted, decided.wanted, decided.why)
        for turn in (own, agents):
            turn.change.act(() if turn.plan is None else turn.plan.actions)
        asked = [turn for turn in (own, agents) if turn.need is not None]
        return Decided(
            row=row,
            spec=spec,
            goal=goal,
            load=replicas.load,
            change=own.change,
            agents=agents.change,
            plan=decided,
            needs=tuple(turn.need for turn in asked if turn.need is not None),
            offers=tuple(turn.offers for turn in asked),
            commit=_commit_of(row, own.change, agents.change, decided),
        )

    def _turn_fleet(
        self,
        fleet: Fleet,
        service: Service,
        happened: tuple[Sequence[Event], Sequence[InstanceListing]],
        memory: Memory,
        *,
        is_early: bool,
    ) -> _FleetTurn:
        """Apply what happened to one fleet, and plan.

        Unless it `is_early`, its offers are not known yet, or one of its clouds has not been listed yet.
        """
        change = TickTransitions(fleet.rows, fleet.goal, service.now, fleet.role)
        evidence = fleet.for_fleet(self._doubts.evidence(service.row.name))
        results, listings = happened
        failed, threshold_s = evidence.failed or {}, fleet.goal.probe_failure_threshold_s
        change.observe(sifted(results, failed, evidence.work, threshold_s, service.now), listings)
        doubt = self._give_up(fleet, change, evidence)
        live = change.live()
        fleet.load = with_engines(fleet.load, live, evidence.work)
        if failed:
            now_loaded = loaded(live, failed, evidence.work, threshold_s, service.now)
            fleet.load = replace(fleet.load, loaded=now_loaded)
        memory = fleet.learn(change, memory)
        need = fleet.need(memory)
        need = None if need is None else self._offers.kept(need)
        offers = () if need is None else self._offers.of(need)
        made = None
        is_known = not is_early and offers is not None and self._knows_all(change.live())
        if fleet.goal.down or is_known:
            made = fleet.plan(change, offers or (), memory)
        return _FleetTurn(change, memory if made is None else made.memory, made, doubt, need, offers)

    def load(self, row: ServiceRow, spec: ServiceSpec) -> Load:
        """Return the demand that all agents of the service have seen."""
        local_loads = [self._balancers.fleet.load(row.name)] if has_local_agent(row, spec) else []
        return merged([*local_loads, *self._balancers.regional.loads(row.name)])

    def take_demand(self, row: ServiceRow, spec: ServiceSpec, now: float) -> bool:
        """Store the minutes that its agents have reported. Returns whether there were any."""
        local_demands = [self._balancers.fleet.demand(row.name)] if has_local_agent(row, spec) else []
        return self._demand.take(row.name, [*local_demands, *self._balancers.regional.demands(row.name)], now)

    def _give_up(self, fleet: Fleet, change: TickTransitions, evidence: Evidence) -> str:
        """Apply the deadlines that have passed, as far as this controller can trust its own probes. Returns why not all."""
        replicas = tuple(change.replicas.values())
        overdue = (
            *due(replicas, fleet.goal, fleet.load, change.now),
            *failing(replicas, evidence.work, fleet.goal.probe_failure_threshold_s, change.now),
        )
        if not overdue:
            return ""
        terminated = self._given_up.setdefault(fleet.name, TerminationLog())
        verdict = confirmed(overdue, replicas, fleet.goal, evidence, terminated, change.now)
        change.take(_with_causes(verdict.events, evidence.failed or {}))
        for event in verdict.events:
            if isinstance(event, GaveUp) and event.reason in JUDGED:
                terminated.add(change.now)
        return verdict.note

    def _noted(self, decided: Plan, own: _FleetTurn, agents: _FleetTurn, remark: str) -> Plan:
        """Return the plan with its doubts as notes, each once."""
        doubts = [own.doubt, agents.doubt, remark, *self._blindness(own.change.live(), decided.notes)]
        new = dict.fromkeys(
            doubt for doubt in doubts if doubt and not any(doubt in note for note in decided.notes)
        )
        return replace(decided, notes=(*decided.notes, *new)) if new else decided

    def _knows_all(self, replicas: Iterable[Replica]) -> bool:
        return {replica.offer.zone.cloud for replica in replicas} <= self._seen.keys()

    def _blindness(self, replicas: Iterable[Replica], reported: Sequence[str]) -> Iterator[str]:
        """Yield what keeps us from seeing how the replicas are, unless it has been reported."""
        trouble = self._instance_poller.trouble()
        if not trouble:
            return
        zones = {replica.zone for replica in replicas}
        places = {
            place
            for zone in zones
            for place in (zone.cloud, f"{zone.cloud}/{zone.region}", f"{zone.cloud}/{zone.name}")
        }
        for place, sentence in sorted(trouble.items()):
            note = f"{place} cannot be listed: {sentence}"
            if place in places and not any(note in one for one in reported):
                yield note


def _with_causes(events: Iterable[Event], failed: Mapping[int, FailedProbe]) -> list[Event]:
    """Return the events with what their last probe met, where time was up for a probe to pass."""
    return [
        replace(event, message=f"{event.message}; {failed[event.replica_id].why}")
        if isinstance(event, GaveUp)
        and event.reason in (EndReason.START_TIMEOUT, EndReason.PROBE_FAILED)
        and event.replica_id in failed
        else event
        for event in events
    ]


def _together(row: ServiceRow, own: _FleetTurn, agents: _FleetTurn) -> Plan:
    """Return one plan for both fleets. Without one for the replicas, the displayed state of the service stays as it is."""
    if own.plan is None:
        return Plan((), agents.memory, (row.notes,) if row.notes else (), row.target, row.wanted)
    if agents.plan is None:
        return replace(own.plan, memory=agents.memory)
    return replace(
        own.plan,
        actions=(*own.plan.actions, *agents.plan.actions),
        memory=agents.memory,
        notes=(*own.plan.notes, *agents.plan.notes),
        wake_at=own.plan.wake_at if agents.plan.wake_at is None else agents.plan.wake_at,
    )


def _commit_of(
    row: ServiceRow, change: TickTransitions, agents: TickTransitions, decided: Plan
) -> Commit | None:
    """Return the intents, memory and events of the tick; None where nothing changed."""
    notes = "; ".join(decided.notes)
    memory = None if decided.memory == row.memory else decided.memory
    records = [*change.records, *agents.records]
    if notes and notes != row.notes:
        records.append(EventRecord("note", notes))
    changed = [*change.changed(), *agents.changed()]
    same = (decided.wanted, decided.target, notes) == (row.wanted, row.target, row.notes)
    if not changed and not records and memory is None and same:
        return None
    return Commit(
        row.name,
        now=change.now,
        changed=changed,
        memory=memory,
        wanted=decided.wanted,
        target=decided.target,
        notes=notes,
        records=records,
    )
