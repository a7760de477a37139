"""The tick: the page to read first.

    observe -> apply events -> learn -> plan -> commit intent -> publish target tables -> touch the clouds

One thread runs it and nothing else writes replicas. Everything it knows comes from the store and from events,
so a controller that is killed at any instruction and started again goes on where the rows stand: a REQUESTED
row has a launch outstanding, a TERMINATING row a terminate, whichever process wrote them. Calls carry a token derived from
the row, so making one again is the same as having made it once.

A tick costs by what changed: a service is only decided about again when something that the decision depends on differs
(`turn_cache`), and all that the tick writes is one transaction. Large services follow, each in a pass of its own.

On start nothing is planned for a service until every cloud it has instances in has been listed once: what
happened while no controller ran is learned before anything is decided.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy.exc import OperationalError, SQLAlchemyError

from policies.budget import usd_hour
from policies.model import Event, Launch, Plan
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.demand_cache import DemandCache
from skyserve_cli.controller.reconcile.inputs import (
    NO_DOUBTS,
    NO_LIMITS,
    BalancerPorts,
    Budget,
    Doubts,
    ReplicaPorts,
)
from skyserve_cli.controller.reconcile.listing_events import orphans
from skyserve_cli.controller.reconcile.mappers import agent_addresses, token_of
from skyserve_cli.controller.reconcile.ports import (
    AgentOrder,
    CloudOperation,
    InstanceListing,
    NameOrder,
    OperationRunner,
    ProbeOrder,
    RegionalOrder,
    Specs,
)
from skyserve_cli.controller.reconcile.service_orders import OrderMaker
from skyserve_cli.controller.reconcile.slow_turns import LARGE, SlowTurns
from skyserve_cli.controller.reconcile.store_health import StoreHealth
from skyserve_cli.controller.reconcile.team_ledger import TeamLedger
from skyserve_cli.controller.reconcile.tick_cache import (
    Around,
    Listings,
    Orders,
)
from skyserve_cli.controller.reconcile.troubles import broken, failed_turn
from skyserve_cli.controller.reconcile.turn import Decided, ServiceTurn, TickOffers
from skyserve_cli.controller.reconcile.turn_cache import Observed, TurnCache
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import EventRecord, ServiceRow

if TYPE_CHECKING:
    from skyserve_cli.controller.reconcile.adoption import Adoption

log = logging.getLogger(__name__)


class TickUnderWay(NamedTuple):
    """A tick, and the turn in it. `service` is empty while the tick reads or writes rows of all, or passes orders on."""

    for_s: float
    service: str
    turn_s: float


@dataclass(slots=True)
class _Turn:
    """What one tick gathers of all services."""

    calls: list[CloudOperation] = field(default_factory=list)
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


class Reconciler:
    """Brings every service to its goal, one tick at a time."""

    def __init__(
        self,
        clock: Clock,
        store: Store,
        specs: Specs,
        replicas: ReplicaPorts,
        balancers: BalancerPorts,
        *,
        budget: Budget = NO_LIMITS,
        doubts: Doubts = NO_DOUBTS,
        epoch: Callable[[], int] = lambda: 0,
        keeps: bool = True,
    ) -> None:
        """`epoch` is the controller's term. `keeps` False decides about every service in every tick, to the same result."""
        self._clock = clock
        self._store = store
        self._specs = specs
        self._replicas = replicas
        self._balancers = balancers
        self._budget = budget
        self._adoption = doubts.adoption
        self._epoch = epoch
        self._offers = TickOffers(replicas.offers)
        owner = store.database.owner()
        self._seen: Counter[str] = Counter()  # listings of each cloud since this process started
        self._demand = DemandCache(store)
        self._service_turn = ServiceTurn(
            owner, specs, self._offers, replicas.instance_poller, balancers, doubts, self._seen, self._demand
        )
        self._orphans = OrphanWatch(owner, replicas.runner, self._seen, doubts.adoption)
        self._keeps = keeps
        maker = OrderMaker(specs, owner, balancers, epoch)
        self._kept = TurnCache(specs, self._offers, self._demand, self._service_turn, maker)
        self._teams = TeamLedger(store, specs, budget.quotas, self._kept.cheapest)
        self._orders: dict[str, Orders] = {}  # of each service, as last given
        self._turn = _Turn(clouds=set(replicas.enabled))  # of all services, as last given
        self._listings = Listings()
        self._later: list[str] = []  # the large services about which this tick decides after all others
        self._troubles: dict[str, str] = {}  # by service, as last logged
        self._slow = SlowTurns(budget.stopwatch)
        self._stopwatch = budget.stopwatch
        self._began_at: float | None = None
        self.decided = 0  # services, in the last tick
        self.plans: dict[str, Plan] = {}  # of the last tick
        self.store_health = StoreHealth(clock.now())

    def tick(self) -> None:
        """One turn over all services. Never sleeps, never waits for the network."""
        self.store_health.begin()
        self._began_at = self._stopwatch()
        try:
            self._tick(self._clock.now())
            if self.store_health.is_unproven:  # this turn may have had nothing to write
                self._store.try_to_write()
        except SQLAlchemyError as error:
            self.store_health.failed(error)  # the next tick is another chance
            for name in self._later:
                self._kept.forget(name)  # what clouds have listed may not have been taken in
        finally:
            self._began_at = None
        self.store_health.end(self._clock.now())

    def under_way(self) -> TickUnderWay | None:
        """Return the tick that goes on; None between two. Read by other threads."""
        began, turn = self._began_at, self._slow.under_way()
        return None if began is None else TickUnderWay(self._stopwatch() - began, *(turn or ("", 0.0)))

    def _tick(self, now: float) -> None:
        rows = self._store.services()  # first: if it fails, no event and no listing is lost
        replicas, balancers = self._replicas, self._balancers
        results = _by_service(
            (*replicas.runner.drain(), *replicas.prober.drain(), *balancers.regional.drain())
        )
        listings = replicas.instance_poller.drain()
        complete = [listing for listing in listings if listing.is_listing]
        self._seen.update(one.cloud for one in complete)
        if self._adoption is not None and self._adoption.take(rows, complete, now):
            rows = self._store.services()
        around = Around(self._epoch(), frozenset(self._seen), replicas.instance_poller.trouble())
        tick = Observed(now, results, listings, self._listings.changed(listings), around)
        self._offers.begin()
        self._kept.begin()
        self.decided = 0
        orders = self._pass(rows, rows, tick, {})
        for name in self._later:  # the others need not wait for the decision about a large service
            rows = self._store.services()
            orders = self._pass(rows, [row for row in rows if row.name == name], tick, orders)
        self._kept.forget_others(orders.keys())
        self.plans = self._kept.plans()
        if complete:
            self._orphans.abandon(complete, self._store.services())
        replicas.instance_poller.watch(frozenset(self._turn.clouds))

    def _pass(
        self, rows: Sequence[ServiceRow], some: Sequence[ServiceRow], tick: Observed, last: dict[str, Orders]
    ) -> dict[str, Orders]:
        """Decide about `some` of all rows, write that, and pass it on with the `last` orders of the others. Returns all orders."""
        replicas, balancers = self._replicas, self._balancers
        orders, decided = self._decide(rows, some, tick, is_first=not last)
        self.decided += len(decided)
        orders = last | orders | self._write_and_keep(decided, tick)
        turn = self._gathered([(row.name, orders[row.name]) for row in rows if row.name in orders])
        replicas.firewalls.ensure(agent_addresses(rows))  # before any launch
        balancers.fleet.ensure(turn.agents)  # first: cheap, and no request goes where none should
        balancers.regional.ensure(turn.regional)
        balancers.names.ensure(turn.names)
        replicas.prober.watch(turn.probes)
        replicas.runner.ensure(turn.calls)
        return orders

    def _decide(
        self, rows: Iterable[ServiceRow], some: Iterable[ServiceRow], tick: Observed, *, is_first: bool
    ) -> tuple[dict[str, Orders], list[Decided]]:
        """Return the orders of services whose last turn stands, or about which nothing can be decided, and new decisions.

        The first pass leaves large services for later ones.
        """
        orders: dict[str, Orders] = {}
        decided: list[Decided] = []
        room = self._room(rows)
        self._teams.begin(rows, tick.now)
        if is_first:
            self._later = []
        for row in some:
            try:
                mine = tick.results.get(row.name, ()) if is_first else ()
                size = max(len(row.attempts), row.wanted)  # also before they are launched
                undecided = self._undecided(row, mine, size, tick, is_first=is_first)
                if undecided is not None:
                    orders[row.name] = undecided
                    continue
                with self._slow.turn(row.name, mine, tick.now, size) as turn:
                    team = self._teams.room(row)
                    decision = self._service_turn.decide(
                        row, turn.events, tick.listings, tick.now, room, team, turn.remark
                    )
                launches = [one for one in decision.plan.actions if isinstance(one, Launch)]
                room -= sum(one.offer.price_usd_hour for one in launches)
                self._teams.launched(row, launches)
                decided.append(decision)
                self._troubles.pop(row.name, None)
            except SQLAlchemyError as error:
                self.store_health.failed(error)
                orders[row.name] = self._unchanged(row)
            except LeaseLostError:
                raise
            except Exception as error:  # one service's trouble must not stop the others
                if self._is_troubled(row, failed_turn(error), tick.now):
                    log.exception("tick of service %s", row.name)
                orders[row.name] = self._unchanged(row)
        return orders, decided

    def _undecided(
        self, row: ServiceRow, mine: Sequence[Event], size: int, tick: Observed, *, is_first: bool
    ) -> Orders | None:
        """Return the orders of a service that is not decided about in this pass; None of one that is."""
        trouble = row.trouble or self._specs.trouble(row.name, row.version)
        if trouble and not row.down:
            if self._is_troubled(row, broken(row, trouble), tick.now):
                log.error("service %s: %s", row.name, trouble)
            return self._unchanged(row)
        self._take_demand(row, tick.now)
        is_due = not is_first or self._slow.keeps(row.name)
        standing = None if is_due else self._standing(row, tick)
        if standing is not None:
            return standing
        has_listings = bool(tick.listings)
        if not row.down and self._slow.rests(row.name, mine, tick.now, has_listings=has_listings):
            if has_listings:
                self._kept.forget(row.name)  # so that it is compared with the next ones
            return self._waiting(row)
        if is_first and size >= LARGE:
            self._later.append(row.name)
            self._slow.keep(row.name, mine)
            return self._waiting(row)
        return None

    def _waiting(self, row: ServiceRow) -> Orders:
        """Return the orders of a service that is not decided about now."""
        return self._slow.waiting(row.name, self._orders.get(row.name) or self._unchanged(row))

    def _is_troubled(self, row: ServiceRow, sentence: str, now: float) -> bool:
        """Write what keeps the service from being decided about to its events and notes. Returns whether that is new."""
        is_new = self._troubles.get(row.name) != sentence
        self._troubles[row.name] = sentence
        try:
            if row.notes != sentence:
                note = {"notes": sentence, "records": [EventRecord("note", sentence)]}
                self._store.commit(row.name, now=now, changed=(), memory=None, target=row.target, **note)
        except SQLAlchemyError as error:
            self.store_health.failed(error)
        return is_new

    def _write_and_keep(self, decided: Sequence[Decided], tick: Observed) -> dict[str, Orders]:
        """Write what was decided. Returns the orders of each service, as of before if its decision was not written."""
        orders: dict[str, Orders] = {}
        written = self._write(decided)
        for one in decided:
            name = one.row.name
            try:
                if name not in written:
                    raise _NotWrittenError
                orders[name] = self._kept.keep(one, tick)
            except _NotWrittenError:
                orders[name] = self._unchanged(one.row)
            except SQLAlchemyError as error:
                self.store_health.failed(error)
                orders[name] = self._unchanged(one.row)
            except Exception as error:
                if self._is_troubled(one.row, failed_turn(error), tick.now):
                    log.exception("tick of service %s", name)
                orders[name] = self._unchanged(one.row)
        return orders

    def _room(self, rows: Iterable[ServiceRow]) -> float:
        """Return the rest of the budget of all services together, USD per hour."""
        if self._budget.max_usd_hour is None:
            return math.inf
        return self._budget.max_usd_hour - sum(usd_hour(row.attempts) for row in rows)

    def _gathered(self, orders: Sequence[tuple[str, Orders]]) -> _Turn:
        """Return all of them; the same object as in the last tick if they are the same."""
        last = self._orders
        if len(last) != len(orders) or any(last.get(name) is not one for name, one in orders):
            self._turn = _Turn(clouds=set(self._replicas.enabled))
            for _, one in orders:
                self._turn.add(one)
            self._orders = dict(orders)
        return self._turn

    # --- one service --------------------------------------------------------------------------------------

    def _standing(self, row: ServiceRow, tick: Observed) -> Orders | None:
        """Return the orders of a service that does not have to be decided about again; None for the others."""
        return self._kept.standing(row, tick) if self._keeps else None

    def _take_demand(self, row: ServiceRow, now: float) -> None:
        """Store the minutes that were reported, before anything is decided by them."""
        if row.down:
            return
        spec = self._specs.get(row.name, row.version)
        if spec.slo is not None:
            self._service_turn.take_demand(row, spec, now)

    def _write(self, decided: Sequence[Decided]) -> set[str]:
        """Commit all that was decided in one transaction, or, if that is refused, each service by itself.

        Returns the names of the services for which the store now says what was decided.
        """
        written = {one.row.name for one in decided if one.commit is None}
        commits = [one.commit for one in decided if one.commit is not None]
        groups = [commits] if commits else []
        while groups:
            group = groups.pop()
            try:
                self._store.commit_all(group)
                written |= {commit.name for commit in group}
            except LeaseLostError:  # another controller decides now
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

    def _unchanged(self, row: ServiceRow) -> Orders:
        """After an error: leave live replicas alone. Its load balancer goes on with the table it has."""
        self._kept.forget(row.name)
        last = self._orders.get(row.name, Orders())
        return Orders(
            agents={row.name: last.agents.get(row.name)},
            regional=last.regional,
            names=last.names,
            clouds=frozenset(one.zone.cloud for one in row.attempts),
        )


class _NotWrittenError(Exception):
    """The commit of a service failed."""


def _by_service(events: Iterable[tuple[str, Event]]) -> dict[str, list[Event]]:
    grouped: dict[str, list[Event]] = {}
    for service, event in events:
        grouped.setdefault(service, []).append(event)
    return grouped


#: Listings of a cloud in which a controller that has just started believes nothing to be an orphan.
LISTINGS_BEFORE_ORPHANS = 2


class OrphanWatch:
    """Remembers the suspects of each cloud. `seen` counts the listings of each cloud since this process started."""

    def __init__(
        self, owner: str, runner: OperationRunner, seen: Mapping[str, int], adoption: Adoption | None
    ) -> None:
        self._owner = owner
        self._runner = runner
        self._seen = seen
        self._adoption = adoption
        self._suspects: dict[str, frozenset[str]] = {}
        self._tokens: dict[
            tuple[str, str], dict[int, str]
        ] = {}  # of each replica, by service and incarnation

    def abandon(self, listings: Sequence[InstanceListing], rows: Iterable[ServiceRow]) -> None:
        """Order the end of orphans. `rows` were read after the clouds were listed, so every intent in a listing is in them."""
        tokens = self._known_tokens(rows)
        for listing in listings:
            suspects = self._suspects.get(listing.cloud, frozenset())
            found, self._suspects[listing.cloud] = orphans(listing, tokens, suspects)
            is_early = self._seen[listing.cloud] <= LISTINGS_BEFORE_ORPHANS
            for orphan in () if is_early else found:
                if self._adoption is not None and self._adoption.spares(orphan):
                    continue
                self._runner.abandon(orphan)

    def _known_tokens(self, rows: Iterable[ServiceRow]) -> frozenset[str]:
        """Return the tokens of all instances that we want, or have yet to see the end of. Those of known replicas are not made again.

        Every other instance with our tag is an orphan.
        """
        last, self._tokens = self._tokens, {}
        for row in rows:
            key = row.name, row.incarnation
            before = last.get(key, {})
            self._tokens[key] = {
                one.id: before.get(one.id) or token_of(self._owner, *key, one.id, one.offer)
                for one in row.attempts
            }
        return frozenset().union(*(tokens.values() for tokens in self._tokens.values()))
