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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from urllib.parse import urlsplit

from sqlalchemy.exc import SQLAlchemyError

from lb.config.schema import Table
from policies import balancers
from policies.balancers import FAREWELL_S, Decision
from policies.brake import Evidence, TerminationLog, judge
from policies.deadlines import due
from policies.model import (
    EndReason,
    Event,
    GaveUp,
    Goal,
    Launch,
    Load,
    Observation,
    Offer,
    Plan,
    Replica,
    ReplicaState,
    Role,
)
from policies.plan import learn, plan
from policies.registry import policies_for
from policies.rollout import wanted_version
from provisioners.base import Instance, InstanceState
from skyserve_cli.controller.adoption import Adoption
from skyserve_cli.controller.change import Change
from skyserve_cli.controller.clock import Clock
from skyserve_cli.controller.loads import merged
from skyserve_cli.controller.orders import (
    agent_fleet_of,
    agent_requirements_of,
    goal_of,
    known_tokens,
    name_orders_of,
    requirements_of,
    stands_beside,
    token_of,
)
from skyserve_cli.controller.ports import (
    AgentOrder,
    Call,
    CallKind,
    LbFleet,
    NameOrder,
    Names,
    NoNames,
    NoRegions,
    Offers,
    ProbeOrder,
    Prober,
    Regional,
    RegionalOrder,
    Runner,
    Sighting,
    Specs,
    Witness,
)
from skyserve_cli.controller.sightings import orphans, unattended
from skyserve_cli.controller.store_health import StoreHealth
from skyserve_cli.controller.tables import table_of, without_loopback
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import ServiceRow, Story

log = logging.getLogger(__name__)

_PROBED = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.NOT_READY)
_CONNECTED = (*_PROBED, ReplicaState.DRAINING)
AGENT_START_S = 1200.0
AGENT_SILENCE_S = 600.0
#: Listings of a cloud in which a controller that has just begun believes nothing to be an orphan.
LISTINGS_BEFORE_ORPHANS = 2
_OUTSTANDING = {ReplicaState.REQUESTED: CallKind.LAUNCH, ReplicaState.TERMINATING: CallKind.TERMINATE}


@dataclass(slots=True)
class _Turn:
    """What one tick gathers for the hands."""

    calls: list[Call] = field(default_factory=list)
    probes: list[ProbeOrder] = field(default_factory=list)
    agents: dict[str, AgentOrder | None] = field(default_factory=dict)
    regional: list[RegionalOrder] = field(default_factory=list)
    names: list[NameOrder] = field(default_factory=list)
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
        regional: Regional | None = None,
        names: Names | None = None,
        evidence: Callable[[str], Evidence] | None = None,
        adoption: Adoption | None = None,
        epoch: Callable[[], int] = lambda: 0,
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
        self._regional: Regional = NoRegions() if regional is None else regional
        self._names: Names = NoNames() if names is None else names
        self._evidence = _no_doubt if evidence is None else evidence
        self._adoption = adoption
        self._given_up: dict[str, TerminationLog] = {}  # for failed probes, by service
        self._owner = store.owner()
        self._epoch = epoch
        self._seen: Counter[str] = Counter()  # listings of each cloud since this process started
        self._suspects: dict[str, frozenset[str]] = {}
        self._agents: Mapping[str, AgentOrder | None] = {}  # as last ordered
        self._regional_orders: Sequence[RegionalOrder] = ()
        self._name_orders: Sequence[NameOrder] = ()
        self.plans: dict[str, Plan] = {}  # of the last tick
        self.store_health = StoreHealth(clock.now())

    def tick(self) -> None:
        """One turn over all services. Never sleeps, never waits for the network."""
        self.store_health.begin()
        try:
            self._tick(self._clock.now())
            if self.store_health.is_unproven:  # this turn may have had nothing to write
                self._store.try_to_write()
        except SQLAlchemyError as error:
            self.store_health.failed(error)  # the next tick is another chance
        self.store_health.end(self._clock.now())

    def _tick(self, now: float) -> None:
        answers = _by_service((*self._runner.drain(), *self._prober.drain(), *self._regional.drain()))
        sightings = self._witness.drain()
        listings = [sighting for sighting in sightings if sighting.is_listing]
        self._seen.update(listing.cloud for listing in listings)
        turn = _Turn(clouds=set(self._enabled_clouds))
        self.plans = {}
        rows = self._store.services()
        if self._adoption is not None and self._adoption.take(rows, listings, now):
            rows = self._store.services()
        for row in rows:
            try:
                self._turn_service(row, answers.get(row.name, ()), sightings, now, turn)
            except LeaseLostError:  # whatever was decided, it is not ours to decide
                raise
            except SQLAlchemyError as error:
                self.store_health.failed(error)
                self._keep(row, turn)
            except Exception:  # one service's trouble must not stop the others
                log.exception("tick of service %s", row.name)
                self._keep(row, turn)
        self._agents, self._regional_orders, self._name_orders = turn.agents, turn.regional, turn.names
        self._fleet.ensure(turn.agents)  # first: cheap, and no request goes where none should
        self._regional.ensure(turn.regional)
        self._names.ensure(turn.names)
        self._prober.watch(turn.probes)
        self._runner.ensure(turn.calls)
        self._abandon_orphans(listings)
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
        load = self._load(row, spec)
        change = Change(row.replicas, goal, now)
        change.observe(answers, sightings)
        doubts = [self._give_up(row.name, row.name, change, goal, load)]
        agents = Change(row.balancers, _agent_goal(goal), now, Role.LOAD_BALANCER)
        agents.observe(answers, sightings)
        doubts.append(self._give_up(row.name, f"{row.name}/agents", agents, _agent_goal(goal), Load()))

        policies = policies_for(goal)
        photograph = Observation(now, goal, change.live(), (), load, tuple(change.events))
        memory = learn(photograph, change.before, row.memory, policies)
        learned = balancers.learn(memory.balancers, agents.events, agents.before, now)
        memory = replace(memory, balancers=learned)
        # What was just learned may have changed which version is wanted, and so what to ask the clouds for.
        wanted = self._specs.get(row.name, wanted_version(goal, memory.rollout))
        offers = () if goal.down else self._offers.get(requirements_of(wanted))
        decided = Plan((), memory, (row.notes,) if row.notes else (), row.target, row.wanted)
        is_awaited = self._adoption is not None and self._adoption.is_awaited(row.name, now)
        if goal.down or (offers is not None and self._knows_all(photograph.replicas) and not is_awaited):
            decided = plan(replace(photograph, offers=offers or ()), memory, policies)
            decided = self._with_agents(row, goal, change, agents, decided, now)
        doubts += self._blindness(photograph.replicas, decided.notes)
        new = dict.fromkeys(
            doubt for doubt in doubts if doubt and not any(doubt in note for note in decided.notes)
        )
        decided = replace(decided, notes=(*decided.notes, *new))
        self.plans[row.name] = decided
        change.scale(row.wanted, decided.wanted)
        change.act(one for one in decided.actions if change.concerns(one))
        agents.act(one for one in decided.actions if not change.concerns(one))
        self._commit(row, change, agents, decided)

        memory = decided.memory
        live = change.live()
        table = table_of(row.name, spec, live, goal, memory.rollout, now, self._epoch())
        window_s = spec.replica_policy.load_window_s
        tls = None if spec.tls is None else (spec.tls.certfile, spec.tls.keyfile)
        if (live or not goal.down) and stands_beside(row, spec):
            host = spec.load_balancer.host or self._lb_host
            turn.agents[row.name] = AgentOrder(row.name, host, row.lb_port, table, tls, window_s)
        self._order(row, (*live, *agents.live()), sightings, turn)
        turn.names += name_orders_of(row, agents.live(), partial(self._specs.get, row.name))
        remote = without_loopback(table)
        turn.regional += [
            self._regional_order(row, agent, remote, tls, window_s)
            for agent in agents.live()
            if agent.state in _CONNECTED and agent.endpoint is not None
        ]

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

    def _load(self, row: ServiceRow, spec: ServiceSpec) -> Load:
        """The demand that all agents of the service have seen."""
        beside = [self._fleet.load(row.name)] if stands_beside(row, spec) else []
        return merged([*beside, *self._regional.loads(row.name)])

    def _with_agents(
        self, row: ServiceRow, goal: Goal, change: Change, agents: Change, decided: Plan, now: float
    ) -> Plan:
        """The plan, and what is to be done about agents on machines of their own."""
        memory = decided.memory
        regional = self._specs.get(row.name, row.version).regional
        offers: Sequence[Offer] | None = ()
        if regional.places and not goal.down:
            offers = self._offers.get(agent_requirements_of(regional))
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
        )

    def _regional_order(
        self, row: ServiceRow, agent: Replica, table: Table, tls: tuple[str, str] | None, window_s: float
    ) -> RegionalOrder:
        token = token_of(self._owner, row.name, row.incarnation, agent.id, agent.offer)
        return RegionalOrder(
            service=row.name,
            replica_id=agent.id,
            instance=Instance(
                id=agent.instance_id or "",
                token=token,
                owner=self._owner,
                service=row.name,
                replica_id=agent.id,
                zone=agent.zone,
                capacity_type=agent.offer.capacity_type,
                state=InstanceState.RUNNING,
            ),
            port=urlsplit(agent.endpoint or "").port or 0,
            table=table,
            tls=tls,
            window_s=window_s,
            passing=_passing(agent),
        )

    def _knows_all(self, replicas: Iterable[Replica]) -> bool:
        return all(replica.zone.cloud in self._seen for replica in replicas)

    def _blindness(self, replicas: Iterable[Replica], told: Sequence[str]) -> Iterator[str]:
        """What keeps us from seeing how the replicas are, unless it has been told."""
        clouds = {replica.zone.cloud for replica in replicas}
        for cloud, sentence in sorted(self._witness.trouble().items()):
            note = f"{cloud} cannot be listed: {sentence}"
            if cloud in clouds and not any(note in one for one in told):
                yield note

    def _commit(self, row: ServiceRow, change: Change, agents: Change, decided: Plan) -> None:
        """Intents, memory and story, in one transaction; nothing at all where nothing changed."""
        notes = "; ".join(decided.notes)
        memory = None if decided.memory == row.memory else decided.memory
        story = [*change.story, *agents.story]
        if notes and notes != row.notes:
            story.append(Story("note", notes))
        changed = [*change.changed(), *agents.changed()]
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
            if replica.role is not Role.REPLICA:
                continue  # whoever brings it its table sees how it is
            if replica.state in _PROBED and replica.endpoint is not None:
                probe = self._specs.probe(row.name, replica.version)
                order = ProbeOrder(row.name, replica.id, replica.endpoint, probe, _passing(replica))
                turn.probes.append(order)

    def _keep(self, row: ServiceRow, turn: _Turn) -> None:
        """After an internal error: leave what lives alone. Its load balancer goes on with the table it has."""
        turn.agents[row.name] = self._agents.get(row.name)
        turn.regional += [order for order in self._regional_orders if order.service == row.name]
        turn.names += [order for order in self._name_orders if order.service == row.name]
        turn.clouds.update(one.zone.cloud for one in row.attempts)

    def _abandon_orphans(self, sightings: Sequence[Sighting]) -> None:
        if not sightings:
            return
        # The rows as they now stand, after the clouds were listed: see `leaks`.
        tokens = known_tokens(self._owner, self._store.services())
        for sighting in sightings:
            suspects = self._suspects.get(sighting.cloud, frozenset())
            found, self._suspects[sighting.cloud] = orphans(sighting, tokens, suspects)
            is_early = self._seen[sighting.cloud] <= LISTINGS_BEFORE_ORPHANS
            for orphan in () if is_early else found:
                if self._adoption is not None and self._adoption.spares(orphan):
                    continue
                self._runner.abandon(orphan)


def _agent_goal(goal: Goal) -> Goal:
    """Patience with agents: one that cannot be reached from here may serve all the same."""
    return replace(
        goal,
        initial_delay_s=AGENT_START_S,
        probe_failure_threshold_s=AGENT_SILENCE_S,
        drain_timeout_s=FAREWELL_S,
    )


def _no_doubt(_: str) -> Evidence:
    return Evidence()


def _passing(replica: Replica) -> bool | None:
    """What the last probe said; None: there was none."""
    return None if replica.state is ReplicaState.STARTING else replica.state is ReplicaState.READY


def _by_service(events: Iterable[tuple[str, Event]]) -> dict[str, list[Event]]:
    grouped: dict[str, list[Event]] = {}
    for service, event in events:
        grouped.setdefault(service, []).append(event)
    return grouped
