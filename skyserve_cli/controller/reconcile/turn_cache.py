"""The last turn of every service, and whether the next tick has to decide about it again (`tick_cache`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from policies.deadlines import next_due
from policies.model import Event, Offer, Plan, ReplicaState
from policies.registry import reads_load
from skyserve_cli.controller.reconcile.demand_cache import DemandCache
from skyserve_cli.controller.reconcile.fleets import agent_goal
from skyserve_cli.controller.reconcile.ports import InstanceListing, OperationKind, Specs
from skyserve_cli.controller.reconcile.region_tables import is_linked, settles_at
from skyserve_cli.controller.reconcile.service_orders import OrderMaker
from skyserve_cli.controller.reconcile.tick_cache import (
    CHECKED_EVERY_S,
    CHECKED_PER_TICK,
    Around,
    Demand,
    Kept,
    Orders,
    demand_of,
    is_relevant,
    note_listings,
    why_again,
)
from skyserve_cli.controller.reconcile.turn import Decided, ServiceTurn, TickOffers
from skyserve_cli.spec.schedule import limits_at
from skyserve_cli.state.values import ServiceRow

DISTANCES_EVERY_S = 5.0  # between two decisions about a service whose agents have not measured all regions


class Observed(NamedTuple):
    """What one tick has observed. `changed` are the services whose instances differ from their cloud's last listing."""

    now: float
    results: dict[str, list[Event]]  # by service
    listings: Sequence[InstanceListing]
    changed: Collection[str]
    around: Around


class TurnCache:
    """By service. Of the turns that stand, CHECKED_PER_TICK are decided about again in each tick after CHECKED_EVERY_S."""

    def __init__(
        self,
        specs: Specs,
        offers: TickOffers,
        demand: DemandCache,
        service_turn: ServiceTurn,
        order_maker: OrderMaker,
    ) -> None:
        self._specs = specs
        self._offers = offers
        self._demand = demand
        self._service_turn = service_turn
        self._order_maker = order_maker
        self._kept: dict[str, Kept] = {}
        self._checks = 0

    def begin(self) -> None:
        """Begin a tick."""
        self._checks = CHECKED_PER_TICK

    def standing(self, row: ServiceRow, tick: Observed) -> Orders | None:
        """Return the orders of a service whose last turn still stands; None if it must be decided about again."""
        kept = self._kept.get(row.name)
        if kept is None or self._why_again(kept, row, tick):
            return None
        if self._checks > 0 and tick.now - kept.decided_at >= CHECKED_EVERY_S:
            self._checks -= 1
            return None
        return kept.orders

    def keep(self, decided: Decided, tick: Observed) -> Orders:
        """Keep a turn that the store has written. Returns its orders."""
        row, goal, now = decided.row, decided.goal, tick.now
        orders = self.orders_of(decided, tick)
        waits = (
            decided.plan.wake_at,
            next_due(decided.change.live(), goal),
            next_due(decided.agents.live(), agent_goal(goal)),
            limits_at(decided.spec, now).until,
            self._linked_until(decided, now) if is_linked(decided.spec) else None,
        )
        was = self._kept.get(row.name)
        kept = self._kept[row.name] = Kept(
            row=row,
            around=tick.around,
            demand=self._demand_of(row, now) if reads_load(goal.scaling) else None,
            needs=decided.needs,
            offers=decided.offers,
            until=min((at for at in waits if at is not None), default=math.inf),
            decided_at=now,
            is_settled=_is_settled(decided, orders, had_results=bool(tick.results.get(row.name))),
            plan=decided.plan,
            orders=was.orders if was is not None and was.orders == orders else orders,
            listed={} if was is None else was.listed,
        )
        note_listings(kept, tick.listings)
        return kept.orders

    def orders_of(self, decided: Decided, tick: Observed) -> Orders:
        return self._order_maker.of(decided, tick.listings, tick.now)

    def _linked_until(self, decided: Decided, now: float) -> float:
        """Return until when the owners of the replicas stand."""
        agents = decided.agents.live()
        until = settles_at(agents, now)
        awaits = self._order_maker.awaits_distances(decided.row.name, agents, now)
        return min(until, now + DISTANCES_EVERY_S) if awaits else until

    def forget(self, name: str) -> None:
        self._kept.pop(name, None)
        self._order_maker.forget(name)

    def forget_others(self, names: Collection[str]) -> None:
        for name in self._kept.keys() - names:
            self.forget(name)

    def cheapest(self, name: str) -> Offer | None:
        """Return the cheapest offer for a replica at the last turn of the service, if it is known."""
        kept = self._kept.get(name)
        offers = kept.offers[0] if kept is not None and kept.offers else None
        return min(offers, key=lambda offer: offer.price_usd_hour) if offers else None

    def plans(self) -> dict[str, Plan]:
        """Return the last plan of each service."""
        return {name: kept.plan for name, kept in self._kept.items()}

    def _why_again(self, kept: Kept, row: ServiceRow, tick: Observed) -> str:
        has_results = bool(tick.results.get(row.name))
        has_events = has_results or bool(tick.listings and is_relevant(kept, tick.listings, tick.changed))
        return why_again(
            kept,
            row,
            has_events=has_events,
            around=tick.around,
            demand=self._demand_of(row, tick.now) if kept.demand is not None else None,
            offers=[self._offers.of(need) for need in kept.needs],
            now=tick.now,
        )

    def _demand_of(self, row: ServiceRow, now: float) -> Demand:
        spec = self._specs.get(row.name, row.version)
        load = self._service_turn.load(row, spec)
        if spec.slo is None:
            return demand_of(load)
        history = self._demand.history(row.name, now)
        return demand_of(load, 0 if history is None else history.end)


def _is_settled(decided: Decided, orders: Orders, *, had_results: bool) -> bool:
    """Return whether the turn may be the last one: nothing was written or happened, and nothing is under way."""
    attempts = (*decided.change.replicas.values(), *decided.agents.replicas.values())
    return not (
        decided.commit is not None
        or had_results
        or decided.change.events
        or decided.agents.events
        or decided.goal.down  # waits for names to be unpublished
        or any(one.state is ReplicaState.DRAINING for one in attempts)
        or any(call.kind is OperationKind.ATTEND for call in orders.calls)
    )
