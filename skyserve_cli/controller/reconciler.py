"""The tick: the page to read first.

    observe -> apply events -> learn -> plan -> commit intent -> publish target tables -> touch the clouds

One thread runs it and nothing else writes replicas. Everything it knows comes from the store and from events,
so a controller that is killed at any instruction and started again goes on where the rows stand: a REQUESTED
row has a launch outstanding, a TERMINATING row a terminate, whoever wrote them. Calls carry a token derived from
the row, so making one again is the same as having made it once.

A tick costs by what changed: a service is only decided about again when something that the decision depends on differs
(`kept`), and all that the tick writes is one transaction.

On start nothing is planned for a service until every cloud it has instances in has been listed once: what
happened while nobody looked is learned before anything is decided.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from urllib.parse import urlsplit

from sqlalchemy.exc import OperationalError, SQLAlchemyError

from lb.config.schema import Table
from policies import balancers
from policies.balancers import FAREWELL_S, Decision
from policies.brake import Evidence, TerminationLog, judge
from policies.deadlines import due, next_due
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
from policies.registry import policies_for, reads_load
from policies.rollout import wanted_version
from provisioners.base import Instance, InstanceState, Requirements
from skyserve_cli.controller.adoption import Adoption
from skyserve_cli.controller.change import Change
from skyserve_cli.controller.clock import Clock
from skyserve_cli.controller.kept import (
    CHECKED_EVERY_S,
    CHECKED_PER_TICK,
    Around,
    Kept,
    Listings,
    Orders,
    demand_of,
    is_news,
    note_listings,
    why_again,
)
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
from skyserve_cli.controller.served import counts_served, has_one_version
from skyserve_cli.controller.sightings import orphans, unattended
from skyserve_cli.controller.store_health import StoreHealth
from skyserve_cli.controller.tables import table_of, without_loopback
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import Commit, ServiceRow, Story

log = logging.getLogger(__name__)

_PROBED = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.NOT_READY)
_CONNECTED = (*_PROBED, ReplicaState.DRAINING)
AGENT_START_S = 1200.0
AGENT_SILENCE_S = 600.0
#: Listings of a cloud in which a controller that has just started believes nothing to be an orphan.
LISTINGS_BEFORE_ORPHANS = 2
_OUTSTANDING = {ReplicaState.REQUESTED: CallKind.LAUNCH, ReplicaState.TERMINATING: CallKind.TERMINATE}


@dataclass(slots=True)
class _Turn:
    """What one tick gathers of all services."""

    calls: list[Call] = field(default_factory=list)
    probes: list[ProbeOrder] = field(default_factory=list)
    agents: dict[str, AgentOrder | None] = field(default_factory=dict)
    regional: list[RegionalOrder] = field(default_factory=list)
    names: list[NameOrder] = field(default_factory=list)
    clouds: set[str] = field(default_factory=set)

    def add(self, orders: Orders) -> None:
        self.calls += orders.calls
        self.probes += orders.probes
        self.agents |= orders.agents
        self.regional += orders.regional
        self.names += orders.names
        self.clouds |= orders.clouds


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
        keeps: bool = True,
    ) -> None:
        """`keeps` False decides about every service in every tick, to the same result."""
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
        self._keeps = keeps
        self._kept: dict[str, Kept] = {}
        self._orders: dict[str, Orders] = {}  # of each service, as last given
        self._turn = _Turn(clouds=set(enabled_clouds))  # of all services, as last given
        self._listings = Listings()
        self._tokens: dict[str, tuple[ServiceRow, frozenset[str]]] = {}
        self._needs: dict[Requirements, Requirements] = {}  # equal ones are one object
        self._last_offers: dict[int, tuple[Offer, ...] | None] = {}  # by id of the object in `_needs`
        self._offered: dict[int, tuple[Offer, ...] | None] = {}  # in this tick
        self.decided = 0  # services, in the last tick
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
        rows = self._store.services()  # first: if it fails, no event and no sighting is lost
        answers = _by_service((*self._runner.drain(), *self._prober.drain(), *self._regional.drain()))
        sightings = self._witness.drain()
        listings = [sighting for sighting in sightings if sighting.is_listing]
        self._seen.update(listing.cloud for listing in listings)
        if self._adoption is not None and self._adoption.take(rows, listings, now):
            rows = self._store.services()
        changed = self._listings.changed(sightings)
        around = Around(self._epoch(), frozenset(self._seen), self._witness.trouble())
        self._offered = {}
        orders: dict[str, Orders] = {}
        decided: list[Decided] = []
        checks = CHECKED_PER_TICK
        for row in rows:
            kept = self._kept.get(row.name)
            mine = answers.get(row.name, ())
            try:
                if kept is not None and not self._why_again(kept, row, mine, sightings, changed, around, now):
                    is_check = checks > 0 and now - kept.decided_at >= CHECKED_EVERY_S
                    if not is_check:
                        orders[row.name] = self._stand(kept, row, sightings, now)
                        continue
                    checks -= 1
                decided.append(self._decide(row, mine, sightings, now))
            except SQLAlchemyError as error:
                self.store_health.failed(error)
                orders[row.name] = self._unchanged(row)
            except LeaseLostError:
                raise
            except Exception:  # one service's trouble must not stop the others
                log.exception("tick of service %s", row.name)
                orders[row.name] = self._unchanged(row)
        self.decided = len(decided)
        written = self._write(decided)
        for one in decided:
            name = one.row.name
            try:
                if name not in written:
                    raise _NotWrittenError
                kept = self._kept_of(one, sightings, around, bool(answers.get(name)), now)
                self._kept[name], orders[name] = kept, kept.orders
            except _NotWrittenError:
                orders[name] = self._unchanged(one.row)
            except SQLAlchemyError as error:
                self.store_health.failed(error)
                orders[name] = self._unchanged(one.row)
            except Exception:
                log.exception("tick of service %s", name)
                orders[name] = self._unchanged(one.row)
        for name in self._kept.keys() - orders.keys():
            del self._kept[name]
        self.plans = {row.name: self._kept[row.name].plan for row in rows if row.name in self._kept}
        turn = self._gathered([(row.name, orders[row.name]) for row in rows])
        self._fleet.ensure(turn.agents)  # first: cheap, and no request goes where none should
        self._regional.ensure(turn.regional)
        self._names.ensure(turn.names)
        self._prober.watch(turn.probes)
        self._runner.ensure(turn.calls)
        self._abandon_orphans(listings)
        self._witness.watch(frozenset(turn.clouds))

    def _gathered(self, orders: Sequence[tuple[str, Orders]]) -> _Turn:
        """All of them; the same object as in the last tick if they are the same."""
        last = self._orders
        if len(last) != len(orders) or any(last.get(name) is not one for name, one in orders):
            self._turn = _Turn(clouds=set(self._enabled_clouds))
            for _, one in orders:
                self._turn.add(one)
            self._orders = dict(orders)
        return self._turn

    # --- one service --------------------------------------------------------------------------------------

    def _why_again(
        self,
        kept: Kept,
        row: ServiceRow,
        answers: Sequence[Event],
        sightings: Sequence[Sighting],
        changed: Collection[str],
        around: Around,
        now: float,
    ) -> str:
        if not self._keeps:
            return "nothing is kept"
        reads = kept.demand is not None
        return why_again(
            kept,
            row,
            has_events=bool(answers) or bool(sightings and is_news(kept, sightings, changed)),
            around=around,
            demand=demand_of(self._load(row, self._specs.get(row.name, row.version))) if reads else None,
            offers=[self._offers_for(need) for need in kept.needs],
            now=now,
        )

    def _stand(self, kept: Kept, row: ServiceRow, sightings: Sequence[Sighting], now: float) -> Orders:
        """The orders of a service that does not have to be decided about again."""
        return kept.orders

    def _offers_for(self, need: Requirements) -> tuple[Offer, ...] | None:
        """Each need is asked for once per tick. Equal offers are the same object from tick to tick. `need` is of `_needs`."""
        key = id(need)
        if key not in self._offered:
            found, last = self._offers.get(need), self._last_offers.get(key)
            self._offered[key] = self._last_offers[key] = last if found == last else found
        return self._offered[key]

    def _decide(
        self, row: ServiceRow, answers: Sequence[Event], sightings: Sequence[Sighting], now: float
    ) -> Decided:
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
        needs = () if goal.down else self._needed(requirements_of(wanted))
        if not goal.down and spec.regional.places:
            needs += self._needed(agent_requirements_of(spec.regional))
        offers = tuple(self._offers_for(need) for need in needs)
        own = offers[0] if offers else ()
        decided = Plan((), memory, (row.notes,) if row.notes else (), row.target, row.wanted)
        is_awaited = self._adoption is not None and self._adoption.is_awaited(row.name, now)
        if goal.down or (own is not None and self._knows_all(photograph.replicas) and not is_awaited):
            decided = plan(replace(photograph, offers=own or ()), memory, policies)
            decided = self._with_agents(
                row, goal, change, agents, decided, offers[1] if offers[1:] else (), now
            )
        if is_awaited:
            decided = replace(decided, wake_at=now)  # the wait ends with time, or with what is adopted
        doubts += self._blindness(photograph.replicas, decided.notes)
        new = dict.fromkeys(
            doubt for doubt in doubts if doubt and not any(doubt in note for note in decided.notes)
        )
        decided = replace(decided, notes=(*decided.notes, *new))
        change.scale(row.wanted, decided.wanted)
        change.act(one for one in decided.actions if change.concerns(one))
        agents.act(one for one in decided.actions if not change.concerns(one))
        commit = _commit_of(row, change, agents, decided)
        return Decided(row, spec, goal, load, change, agents, decided, needs, offers, commit)

    def _needed(self, need: Requirements) -> tuple[Requirements, ...]:
        return (self._needs.setdefault(need, need),)

    def _orders_of(self, decided: Decided, sightings: Sequence[Sighting], now: float) -> Orders:
        """What the rows, as they now stand, require."""
        row, spec, goal = decided.row, decided.spec, decided.goal
        live, agents = decided.change.live(), decided.agents.live()
        table = table_of(row.name, spec, live, goal, decided.plan.memory.rollout, now, self._epoch())
        window_s = spec.replica_policy.load_window_s
        tls = None if spec.tls is None else (spec.tls.certfile, spec.tls.keyfile)
        beside: dict[str, AgentOrder | None] = {}
        if (live or not goal.down) and stands_beside(row, spec):
            host = spec.load_balancer.host or self._lb_host
            beside[row.name] = AgentOrder(row.name, host, row.lb_port, table, tls, window_s)
        calls, probes = self._calls_and_probes(row, (*live, *agents), sightings)
        remote = without_loopback(table)
        return Orders(
            calls=tuple(calls),
            probes=tuple(probes),
            agents=beside,
            regional=tuple(
                self._regional_order(row, agent, remote, tls, window_s)
                for agent in agents
                if agent.state in _CONNECTED and agent.endpoint is not None
            ),
            names=tuple(name_orders_of(row, agents, partial(self._specs.get, row.name))),
            clouds=frozenset(replica.zone.cloud for replica in (*live, *agents)),
        )

    def _kept_of(
        self,
        decided: Decided,
        sightings: Sequence[Sighting],
        around: Around,
        had_answers: bool,
        now: float,
    ) -> Kept:
        """What is kept of a turn, and until when."""
        row, goal, orders = decided.row, decided.goal, self._orders_of(decided, sightings, now)
        attempts = (*decided.change.replicas.values(), *decided.agents.replicas.values())
        is_settled = not (
            decided.commit is not None
            or had_answers
            or decided.change.events
            or decided.agents.events
            or goal.down  # waits for names to be unpublished
            or any(one.state is ReplicaState.DRAINING for one in attempts)
            or any(call.kind is CallKind.ATTEND for call in orders.calls)
        )
        waits = (
            decided.plan.wake_at,
            next_due(decided.change.live(), goal),
            next_due(decided.agents.live(), _agent_goal(goal)),
        )
        was = self._kept.get(row.name)
        kept = Kept(
            row=row,
            around=around,
            demand=demand_of(decided.load) if reads_load(goal.scaling) else None,
            needs=decided.needs,
            offers=decided.offers,
            until=min((at for at in waits if at is not None), default=math.inf),
            decided_at=now,
            is_settled=is_settled,
            plan=decided.plan,
            orders=was.orders if was is not None and was.orders == orders else orders,
            listed={} if was is None else was.listed,
        )
        note_listings(kept, sightings)
        return kept

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
        self,
        row: ServiceRow,
        goal: Goal,
        change: Change,
        agents: Change,
        decided: Plan,
        offers: Sequence[Offer] | None,
        now: float,
    ) -> Plan:
        """The plan, and what is to be done about agents on machines of their own."""
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

    def _write(self, decided: Sequence[Decided]) -> set[str]:
        """Commit all that was decided in one transaction, or, if that is refused, each service by itself. Returns the names
        of the services for which the store now says what was decided."""
        written = {one.row.name for one in decided if one.commit is None}
        commits = [one.commit for one in decided if one.commit is not None]
        groups = [commits] if commits else []
        while groups:
            group = groups.pop()
            try:
                self._store.commit_all(group)
                written |= {commit.name for commit in group}
            except LeaseLostError:  # whatever was decided, it is not ours to decide
                raise
            except OperationalError as error:  # locked, full or away: so it is for each of them
                self.store_health.failed(error)
            except Exception as error:
                if len(group) > 1:
                    groups = [[commit] for commit in reversed(group)]
                elif isinstance(error, SQLAlchemyError):
                    self.store_health.failed(error)
                else:
                    log.exception("commit of service %s", group[0].name)
        return written

    def _calls_and_probes(
        self, row: ServiceRow, live: Sequence[Replica], sightings: Sequence[Sighting]
    ) -> tuple[list[Call], list[ProbeOrder]]:
        alone = unattended(sightings)
        calls, probes = [], []
        is_settled = has_one_version(row, (one for one in live if one.role is Role.REPLICA))
        for replica in live:
            kind = _OUTSTANDING.get(replica.state)
            if kind is None and replica.instance_id in alone:
                kind = CallKind.ATTEND
            if kind is not None:
                calls.append(Call(row.name, row.incarnation, kind, replica))
            if replica.role is not Role.REPLICA:
                continue  # its state is known from bringing it its table
            if replica.state in _PROBED and replica.endpoint is not None:
                probe = self._specs.probe(row.name, replica.version)
                counts = is_settled and counts_served(replica, probe)
                order = ProbeOrder(
                    row.name, replica.id, replica.endpoint, probe, _passing(replica), counts_served=counts
                )
                probes.append(order)
        return calls, probes

    def _unchanged(self, row: ServiceRow) -> Orders:
        """After an error: leave what lives alone. Its load balancer goes on with the table it has."""
        self._kept.pop(row.name, None)
        last = self._orders.get(row.name, Orders())
        return Orders(
            agents={row.name: last.agents.get(row.name)},
            regional=last.regional,
            names=last.names,
            clouds=frozenset(one.zone.cloud for one in row.attempts),
        )

    def _known_tokens(self, rows: Iterable[ServiceRow]) -> frozenset[str]:
        """`known_tokens`, computed again only for rows that changed."""
        last, self._tokens = self._tokens, {}
        for row in rows:
            was = last.get(row.name)
            same = was is not None and was[0] is row
            self._tokens[row.name] = was if was and same else (row, known_tokens(self._owner, (row,)))
        return frozenset().union(*(tokens for _, tokens in self._tokens.values()))

    def _abandon_orphans(self, sightings: Sequence[Sighting]) -> None:
        if not sightings:
            return
        # The rows as they now stand, after the clouds were listed: see `leaks`.
        tokens = self._known_tokens(self._store.services())
        for sighting in sightings:
            suspects = self._suspects.get(sighting.cloud, frozenset())
            found, self._suspects[sighting.cloud] = orphans(sighting, tokens, suspects)
            is_early = self._seen[sighting.cloud] <= LISTINGS_BEFORE_ORPHANS
            for orphan in () if is_early else found:
                if self._adoption is not None and self._adoption.spares(orphan):
                    continue
                self._runner.abandon(orphan)


class _NotWrittenError(Exception):
    """The commit of a service failed."""


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
