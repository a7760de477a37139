"""The tick: the page to read first.

    observe -> apply events -> learn -> plan -> commit intent -> publish target tables -> touch the clouds

One thread runs it and nothing else writes replicas. Everything it knows comes from the store and from events,
so a controller that is killed at any instruction and started again goes on where the rows stand: a REQUESTED
row has a launch outstanding, a TERMINATING row a terminate, whoever wrote them. Calls carry a token derived from
the row, so making one again is the same as having made it once.

On start nothing is planned for a service until every cloud it has instances in has been listed once: what
happened while nobody looked is learned before anything is decided.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from policies.deadlines import due
from policies.lifecycle import InvalidTransition, apply, request
from policies.model import (
    Action,
    Event,
    Goal,
    Launch,
    Observation,
    Plan,
    ProbeFailed,
    ProbePassed,
    Replica,
    ReplicaState,
)
from policies.plan import learn, plan
from policies.registry import policies_for
from policies.rollout import wanted_version
from skyserve_cli.controller.clock import Clock
from skyserve_cli.controller.orders import goal_of, known_tokens, requirements_of
from skyserve_cli.controller.ports import (
    AgentOrder,
    Call,
    CallKind,
    LbFleet,
    Offers,
    ProbeOrder,
    Prober,
    Runner,
    Sighting,
    Specs,
    Witness,
)
from skyserve_cli.controller.sightings import events_of, orphans, unattended
from skyserve_cli.controller.tables import table_of
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import ServiceRow, Story

log = logging.getLogger(__name__)

_PROBED = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.NOT_READY)
_OUTSTANDING = {ReplicaState.REQUESTED: CallKind.LAUNCH, ReplicaState.TERMINATING: CallKind.TERMINATE}


@dataclass(slots=True)
class _Turn:
    """What one tick gathers for the hands."""

    calls: list[Call] = field(default_factory=list)
    probes: list[ProbeOrder] = field(default_factory=list)
    agents: dict[str, AgentOrder | None] = field(default_factory=dict)
    clouds: set[str] = field(default_factory=set)


class Reconciler:
    """Brings every service to its goal, one tick at a time. `enabled_clouds` are looked at even when no replica
    lives there, so that orphans of an earlier life are found."""

    def __init__(
        self,
        *,
        clock: Clock,
        store: Store,
        specs: Specs,
        offers: Offers,
        runner: Runner,
        witness: Witness,
        prober: Prober,
        fleet: LbFleet,
        enabled_clouds: frozenset[str],
        lb_host: str,
    ) -> None:
        self._clock = clock
        self._store = store
        self._specs = specs
        self._offers = offers
        self._runner = runner
        self._witness = witness
        self._prober = prober
        self._fleet = fleet
        self._enabled_clouds = enabled_clouds
        self._lb_host = lb_host
        self._owner = store.owner()
        self._seen: set[str] = set()  # clouds listed at least once since this process started
        self._suspects: dict[str, frozenset[str]] = {}
        self._agents: Mapping[str, AgentOrder | None] = {}  # as last ordered
        self.plans: dict[str, Plan] = {}  # of the last tick, for whoever watches

    def tick(self) -> None:
        """One turn over all services. Never sleeps, never waits for the network."""
        now = self._clock.now()
        answers = _by_service((*self._runner.drain(), *self._prober.drain()))
        sightings = self._witness.drain()
        self._seen.update(sighting.cloud for sighting in sightings)
        turn = _Turn(clouds=set(self._enabled_clouds))
        self.plans = {}
        for row in self._store.services():
            try:
                self._turn_service(row, answers.get(row.name, ()), sightings, now, turn)
            except Exception:  # one service's trouble must not stop the others
                log.exception("tick of service %s", row.name)
                self._keep(row, turn)
        self._agents = turn.agents
        self._fleet.ensure(turn.agents)  # first: cheap, and no request goes where none should
        self._prober.watch(turn.probes)
        self._runner.ensure(turn.calls)
        self._abandon_orphans(sightings)
        self._witness.watch(frozenset(turn.clouds))

    # --- one service --------------------------------------------------------------------------------------

    def _turn_service(
        self,
        row: ServiceRow,
        answers: Sequence[Event],
        sightings: Sequence[Sighting],
        now: float,
        turn: _Turn,
    ) -> None:
        spec = self._specs.get(row.name, row.version)
        goal = goal_of(row, spec)
        load = self._fleet.load(row.name)
        change = _Change(row, goal, now)
        change.take(answers)
        for sighting in sightings:
            instances = {instance.id: instance for instance in sighting.instances}
            here = [r for r in change.replicas.values() if r.zone.cloud == sighting.cloud]
            change.take(events_of(here, instances, sighting.asked_at))
        change.take(due(tuple(change.replicas.values()), goal, load, now))

        policies = policies_for(goal)
        photograph = Observation(now, goal, change.live(), (), load, tuple(change.events))
        memory = learn(photograph, change.before, row.memory, policies)
        # What was just learned may have changed which version is wanted, and so what to ask the clouds for.
        wanted = self._specs.get(row.name, wanted_version(goal, memory.rollout))
        offers = () if goal.down else self._offers.get(requirements_of(wanted))
        decided = Plan((), memory, (row.notes,) if row.notes else (), row.target, row.wanted)
        if goal.down or (offers is not None and self._knows_all(photograph.replicas)):
            decided = plan(replace(photograph, offers=offers or ()), memory, policies)
        self.plans[row.name] = decided
        change.scale(row.wanted, decided.wanted)
        change.act(decided.actions)
        self._commit(row, change, decided)

        memory = decided.memory
        live = change.live()
        table = table_of(row.name, spec, live, goal, memory.rollout, now)
        if live or not goal.down:
            host = spec.load_balancer.host or self._lb_host
            tls = None if spec.tls is None else (spec.tls.certfile, spec.tls.keyfile)
            window_s = spec.replica_policy.load_window_s
            turn.agents[row.name] = AgentOrder(row.name, host, row.lb_port, table, tls, window_s)
        self._order(row, live, sightings, turn)

    def _knows_all(self, replicas: Iterable[Replica]) -> bool:
        return all(replica.zone.cloud in self._seen for replica in replicas)

    def _commit(self, row: ServiceRow, change: _Change, decided: Plan) -> None:
        """Intents, memory and story, in one transaction; nothing at all where nothing changed."""
        notes = "; ".join(decided.notes)
        memory = None if decided.memory == row.memory else decided.memory
        story = list(change.story)
        if notes and notes != row.notes:
            story.append(Story("note", notes))
        changed = change.changed()
        same = (decided.wanted, decided.target, notes) == (row.wanted, row.target, row.notes)
        if not changed and not story and memory is None and same:
            return
        self._store.commit(
            row.name,
            now=change.now,
            changed=changed,
            memory=memory,
            wanted=decided.wanted,
            target=decided.target,
            notes=notes,
            story=story,
        )

    def _order(
        self, row: ServiceRow, live: Sequence[Replica], sightings: Sequence[Sighting], turn: _Turn
    ) -> None:
        """What the rows, as they now stand, ask of the hands."""
        alone = unattended(sightings)
        for replica in live:
            turn.clouds.add(replica.zone.cloud)
            kind = _OUTSTANDING.get(replica.state)
            if kind is None and replica.instance_id in alone:
                kind = CallKind.ATTEND
            if kind is not None:
                turn.calls.append(Call(row.name, row.incarnation, kind, replica))
            if replica.state in _PROBED and replica.endpoint is not None:
                probe = self._specs.probe(row.name, replica.version)
                passing = (
                    None if replica.state is ReplicaState.STARTING else replica.state is ReplicaState.READY
                )
                turn.probes.append(ProbeOrder(row.name, replica.id, replica.endpoint, probe, passing))

    def _keep(self, row: ServiceRow, turn: _Turn) -> None:
        """After an internal error: leave what lives alone. Its load balancer goes on with the table it has."""
        turn.agents[row.name] = self._agents.get(row.name)
        turn.clouds.update(replica.zone.cloud for replica in row.replicas)

    def _abandon_orphans(self, sightings: Sequence[Sighting]) -> None:
        if not sightings:
            return
        tokens = known_tokens(
            self._owner, self._store.services()
        )  # as they now stand: after the clouds were listed
        for sighting in sightings:
            suspects = self._suspects.get(sighting.cloud, frozenset())
            found, self._suspects[sighting.cloud] = orphans(sighting, tokens, suspects)
            for orphan in found:
                self._runner.abandon(orphan)


class _Change:
    """The replicas of one service during one tick, and the story of what happened to them."""

    def __init__(self, row: ServiceRow, goal: Goal, now: float) -> None:
        self.before: Mapping[int, Replica] = {replica.id: replica for replica in row.replicas}
        self.replicas = dict(self.before)
        self.events: list[Event] = []
        self.story: list[Story] = []
        self.now = now
        self._goal = goal

    def take(self, events: Iterable[Event]) -> None:
        """Apply events in order. One that a replica cannot handle is set aside, with its story."""
        for event in events:
            replica = self.replicas.get(event.replica_id)
            if replica is None or replica.state is ReplicaState.GONE:
                continue  # the answer to a question nobody asks any more
            try:
                after = apply(replica, event, self.now, self._goal.drain_timeout_s)
            except InvalidTransition as error:
                log.error("%s", error)
                self.story.append(Story("error", str(error), replica.id))
                continue
            self.events.append(event)
            self._record(type(event).__name__, replica, after, event)

    def scale(self, before: int, wanted: int) -> None:
        if before != wanted:
            told = f"{wanted} replicas wanted" + (f", {before} before" if before else "")
            self.story.append(Story("scale", told, state=str(wanted)))

    def act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Launch):
                born = request(action, self.now)
                self.replicas[born.id] = born
                self.story.append(Story("Launch", _told(action), born.id, born.state.value))
                continue
            replica = self.replicas[action.replica_id]
            after = apply(replica, action, self.now, self._goal.drain_timeout_s)
            self._record(type(action).__name__, replica, after, action)

    def live(self) -> tuple[Replica, ...]:
        return tuple(r for r in self.replicas.values() if r.state is not ReplicaState.GONE)

    def changed(self) -> list[Replica]:
        return [r for i, r in self.replicas.items() if self.before.get(i) is not r]

    def _record(self, kind: str, before: Replica, after: Replica, cause: Event | Action) -> None:
        self.replicas[after.id] = after
        if after is before and isinstance(cause, (ProbePassed, ProbeFailed)):
            return
        message = getattr(cause, "message", "") or getattr(cause, "why", "") or _detail(cause)
        self.story.append(Story(kind, message, after.id, after.state.value))


def _told(launch: Launch) -> str:
    offer = launch.offer
    price = f"{offer.price_usd_hour:.3f} USD/h"
    return f"{offer.zone} {offer.capacity_type.value} at {price}: {launch.why}"


def _detail(cause: Event | Action) -> str:
    for name in ("endpoint", "instance_id"):
        value = getattr(cause, name, None)
        if value:
            return str(value)
    return ""


def _by_service(events: Iterable[tuple[str, Event]]) -> dict[str, list[Event]]:
    grouped: dict[str, list[Event]] = {}
    for service, event in events:
        grouped.setdefault(service, []).append(event)
    return grouped
