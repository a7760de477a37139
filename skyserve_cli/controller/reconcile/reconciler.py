"""The tick: the page to read first.

    observe -> apply events -> learn -> plan -> commit intent -> publish target tables -> touch the clouds

One thread runs it and nothing else writes replicas. Everything it knows comes from the store and from events,
so a controller that is killed at any instruction and started again goes on where the rows stand: a REQUESTED
row has a launch outstanding, a TERMINATING row a terminate, whichever process wrote them. Calls carry a token derived from
the row, so making one again is the same as having made it once.

A tick costs by what changed: a service is only decided about again when something that the decision depends on differs
(`kept`), and all that the tick writes is one transaction.

On start nothing is planned for a service until every cloud it has instances in has been listed once: what
happened while no controller ran is learned before anything is decided.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from sqlalchemy.exc import OperationalError, SQLAlchemyError

from policies.brake import Evidence
from policies.budget import usd_hour
from policies.deadlines import next_due
from policies.model import Event, Launch, Plan, ReplicaState
from policies.registry import reads_load
from skyserve_cli.controller.reconcile.adoption import Adoption
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.demand_book import DemandBook
from skyserve_cli.controller.reconcile.fleets import agent_goal
from skyserve_cli.controller.reconcile.listing_events import orphans
from skyserve_cli.controller.reconcile.mappers import agent_addresses, known_tokens
from skyserve_cli.controller.reconcile.ports import (
    AgentOrder,
    BalancerFleet,
    CloudOperation,
    Firewalls,
    InstanceListing,
    InstancePoller,
    NameOrder,
    Names,
    NoDns,
    NoFirewalls,
    NoRegions,
    Offers,
    OperationKind,
    OperationRunner,
    ProbeOrder,
    Prober,
    Regional,
    RegionalOrder,
    Specs,
)
from skyserve_cli.controller.reconcile.service_orders import OrderMaker
from skyserve_cli.controller.reconcile.store_health import StoreHealth
from skyserve_cli.controller.reconcile.tick_cache import (
    CHECKED_EVERY_S,
    CHECKED_PER_TICK,
    Around,
    Demand,
    Kept,
    Listings,
    Orders,
    demand_of,
    is_news,
    note_listings,
    why_again,
)
from skyserve_cli.controller.reconcile.turn import Decided, ServiceTurn, TickOffers
from skyserve_cli.spec.schedule import limits_at
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import ServiceRow

log = logging.getLogger(__name__)

#: Listings of a cloud in which a controller that has just started believes nothing to be an orphan.
LISTINGS_BEFORE_ORPHANS = 2


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
    """Brings every service to its goal, one tick at a time.

    `enabled_clouds` are polled even when no replica is there, so that orphans of an earlier life are found.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        store: Store,
        specs: Specs,
        offers: Offers,
        runner: OperationRunner,
        instance_poller: InstancePoller,
        prober: Prober,
        fleet: BalancerFleet,
        enabled_clouds: frozenset[str],
        lb_host: str,
        regional: Regional | None = None,
        names: Names | None = None,
        firewalls: Firewalls | None = None,
        evidence: Callable[[str], Evidence] | None = None,
        adoption: Adoption | None = None,
        epoch: Callable[[], int] = lambda: 0,
        keeps: bool = True,
        targets_ca: str = "",
        max_usd_hour: float | None = None,
    ) -> None:
        """`keeps` False decides about every service in every tick, to the same result.

        `max_usd_hour` is the budget of all services together.
        """
        self._max_usd_hour = max_usd_hour
        self._clock = clock
        self._store = store
        self._specs = specs
        self._offers = TickOffers(offers)
        self._runner = runner
        self._instance_poller = instance_poller
        self._prober = prober
        self._fleet = fleet
        self._enabled_clouds = enabled_clouds
        self._regional: Regional = NoRegions() if regional is None else regional
        self._names: Names = NoDns() if names is None else names
        self._firewalls: Firewalls = NoFirewalls() if firewalls is None else firewalls
        self._adoption = adoption
        self._owner = owner = store.owner()
        self._epoch = epoch
        self._seen: Counter[str] = Counter()  # listings of each cloud since this process started
        self._order_maker = OrderMaker(specs, owner, lb_host, epoch, targets_ca)
        self._demand = DemandBook(store)
        self._service_turn = ServiceTurn(
            specs=specs,
            offers=self._offers,
            instance_poller=instance_poller,
            fleet=fleet,
            regional=self._regional,
            names=self._names,
            evidence=_no_doubt if evidence is None else evidence,
            adoption=adoption,
            seen=self._seen,
            demand=self._demand,
        )
        self._suspects: dict[str, frozenset[str]] = {}
        self._keeps = keeps
        self._kept: dict[str, Kept] = {}
        self._orders: dict[str, Orders] = {}  # of each service, as last given
        self._turn = _Turn(clouds=set(enabled_clouds))  # of all services, as last given
        self._listings = Listings()
        self._tokens: dict[str, tuple[ServiceRow, frozenset[str]]] = {}
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
        rows = self._store.services()  # first: if it fails, no event and no listing is lost
        results = _by_service((*self._runner.drain(), *self._prober.drain(), *self._regional.drain()))
        listings = self._instance_poller.drain()
        complete = [listing for listing in listings if listing.is_listing]
        self._seen.update(one.cloud for one in complete)
        if self._adoption is not None and self._adoption.take(rows, complete, now):
            rows = self._store.services()
        changed = self._listings.changed(listings)
        around = Around(self._epoch(), frozenset(self._seen), self._instance_poller.trouble())
        self._offers.begin()
        orders: dict[str, Orders] = {}
        decided: list[Decided] = []
        checks = CHECKED_PER_TICK
        room = self._room(rows)
        for row in rows:
            kept = self._kept.get(row.name)
            mine = results.get(row.name, ())
            try:
                self._take_demand(row, now)
                if kept is not None and not self._why_again(kept, row, mine, listings, changed, around, now):
                    is_check = checks > 0 and now - kept.decided_at >= CHECKED_EVERY_S
                    if not is_check:
                        orders[row.name] = self._stand(kept, row, listings, now)
                        continue
                    checks -= 1
                decision = self._service_turn.decide(row, mine, listings, now, room)
                room -= sum(
                    one.offer.price_usd_hour for one in decision.plan.actions if isinstance(one, Launch)
                )
                decided.append(decision)
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
                kept = self._kept_of(one, listings, around, bool(results.get(name)), now)
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
        self._firewalls.ensure(agent_addresses(rows))  # before any launch
        self._fleet.ensure(turn.agents)  # first: cheap, and no request goes where none should
        self._regional.ensure(turn.regional)
        self._names.ensure(turn.names)
        self._prober.watch(turn.probes)
        self._runner.ensure(turn.calls)
        self._abandon_orphans(complete)
        self._instance_poller.watch(frozenset(turn.clouds))

    def _room(self, rows: Iterable[ServiceRow]) -> float:
        """Return the rest of the budget of all services together, USD per hour."""
        if self._max_usd_hour is None:
            return math.inf
        return self._max_usd_hour - sum(usd_hour(row.attempts) for row in rows)

    def _gathered(self, orders: Sequence[tuple[str, Orders]]) -> _Turn:
        """Return all of them; the same object as in the last tick if they are the same."""
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
        results: Sequence[Event],
        listings: Sequence[InstanceListing],
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
            has_events=bool(results) or bool(listings and is_news(kept, listings, changed)),
            around=around,
            demand=self._demand_of(row, now) if reads else None,
            offers=[self._offers.of(need) for need in kept.needs],
            now=now,
        )

    def _take_demand(self, row: ServiceRow, now: float) -> None:
        """Store the minutes that were reported, before anything is decided by them."""
        if row.down:
            return
        spec = self._specs.get(row.name, row.version)
        if spec.slo is not None:
            self._service_turn.take_demand(row, spec, now)

    def _demand_of(self, row: ServiceRow, now: float) -> Demand:
        spec = self._specs.get(row.name, row.version)
        load = self._service_turn.load(row, spec)
        if spec.slo is None:
            return demand_of(load)
        history = self._demand.history(row.name, now)
        return demand_of(load, 0 if history is None else history.end)

    def _stand(self, kept: Kept, row: ServiceRow, listings: Sequence[InstanceListing], now: float) -> Orders:
        """Return the orders of a service that does not have to be decided about again."""
        return kept.orders

    def _kept_of(
        self,
        decided: Decided,
        listings: Sequence[InstanceListing],
        around: Around,
        had_answers: bool,
        now: float,
    ) -> Kept:
        """Return the cached part of a turn, and until when."""
        row, goal, orders = decided.row, decided.goal, self._order_maker.of(decided, listings, now)
        attempts = (*decided.change.replicas.values(), *decided.agents.replicas.values())
        is_settled = not (
            decided.commit is not None
            or had_answers
            or decided.change.events
            or decided.agents.events
            or goal.down  # waits for names to be unpublished
            or any(one.state is ReplicaState.DRAINING for one in attempts)
            or any(call.kind is OperationKind.ATTEND for call in orders.calls)
        )
        waits = (
            decided.plan.wake_at,
            next_due(decided.change.live(), goal),
            next_due(decided.agents.live(), agent_goal(goal)),
            limits_at(decided.spec, now).until,
        )
        was = self._kept.get(row.name)
        kept = Kept(
            row=row,
            around=around,
            demand=self._demand_of(row, now) if reads_load(goal.scaling) else None,
            needs=decided.needs,
            offers=decided.offers,
            until=min((at for at in waits if at is not None), default=math.inf),
            decided_at=now,
            is_settled=is_settled,
            plan=decided.plan,
            orders=was.orders if was is not None and was.orders == orders else orders,
            listed={} if was is None else was.listed,
        )
        note_listings(kept, listings)
        return kept

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

    def _abandon_orphans(self, listings: Sequence[InstanceListing]) -> None:
        if not listings:
            return
        # The rows as they now stand, after the clouds were listed: see `leaks`.
        tokens = self._known_tokens(self._store.services())
        for listing in listings:
            suspects = self._suspects.get(listing.cloud, frozenset())
            found, self._suspects[listing.cloud] = orphans(listing, tokens, suspects)
            is_early = self._seen[listing.cloud] <= LISTINGS_BEFORE_ORPHANS
            for orphan in () if is_early else found:
                if self._adoption is not None and self._adoption.spares(orphan):
                    continue
                self._runner.abandon(orphan)


class _NotWrittenError(Exception):
    """The commit of a service failed."""


def _no_doubt(_: str) -> Evidence:
    return Evidence()


def _by_service(events: Iterable[tuple[str, Event]]) -> dict[str, list[Event]]:
    grouped: dict[str, list[Event]] = {}
    for service, event in events:
        grouped.setdefault(service, []).append(event)
    return grouped
