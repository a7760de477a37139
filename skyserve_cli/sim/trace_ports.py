"""The controller's hands in a recorded market: each class fills one port of `controller.ports`.

What a tick orders is done in the same tick, by `ReplayOperationRunner.act`; what it came to is seen in the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lb.config.demand import Demand
from lb.config.schema import Readiness
from policies.history import Load
from policies.model import Event, Offer, ProbePassed
from provisioners.port.base import Instance, Requirements
from skyserve_cli.controller.clouds.execute import Retry, perform
from skyserve_cli.controller.clouds.operation_runner import OperationsInFlight
from skyserve_cli.controller.reconcile.mappers import order_of
from skyserve_cli.controller.reconcile.ports import (
    AgentOrder,
    CloudOperation,
    InstanceListing,
    OperationKind,
    ProbeOrder,
)
from skyserve_cli.sim.arrivals import Arrivals
from skyserve_cli.sim.market import CLOUD, NEVER, TraceMarket
from skyserve_cli.sim.served import ServedRequests, next_minute_s
from skyserve_cli.spec.model import ServiceSpec

_LONGEST_SAME_S = 3600.0


class ReplayOperationRunner:
    """Makes the calls of a tick within it."""

    def __init__(self, market: TraceMarket, owner: str, spec: ServiceSpec) -> None:
        self._market = market
        self._owner = owner
        self._spec = spec
        self._book = OperationsInFlight()
        self._calls: list[CloudOperation] = []
        self._results: list[tuple[CloudOperation, Event | Retry | None]] = []

    @property
    def idle(self) -> bool:
        """Return whether no result waits to be drained."""
        return not self._results

    def act(self) -> None:
        """The cloud's part of a tick: ends, then the market, then launches."""
        calls, self._calls = self._calls, []
        for call in calls:
            if call.kind is OperationKind.TERMINATE:
                self._perform(call)
        self._market.preempt()
        for call in calls:
            if call.kind is OperationKind.LAUNCH:
                self._perform(call)

    def ensure(self, calls: Sequence[CloudOperation]) -> None:
        self._calls += self._book.startable(calls, self._market.clock.now())

    def drain(self) -> list[tuple[str, Event]]:
        results, self._results = self._results, []
        now = self._market.clock.now()
        settled = ((call.service, self._book.settled(call, outcome, now)) for call, outcome in results)
        return [(service, event) for service, event in settled if event is not None]

    def abandon(self, orphan: Instance) -> None:
        raise AssertionError(f"an instance without a row: {orphan}")

    def _perform(self, call: CloudOperation) -> None:
        order = order_of(self._owner, call.service, call.incarnation, call.replica, self._spec, {})
        outcome = perform(call, self._market, lambda: order, order.token, self._owner)
        self._results.append((call, outcome))


class ReplayInstancePoller:
    """Lists the market as it was at the end of the tick before, when there is something new to see."""

    def __init__(self, market: TraceMarket, owner: str) -> None:
        self._market = market
        self._owner = owner

    def trouble(self) -> Mapping[str, str]:
        return {}

    def watch(self, clouds: frozenset[str]) -> None:
        pass

    def drain(self) -> list[InstanceListing]:
        if not self._market.has_changes:
            return []
        self._market.has_changes = False
        asked_at = self._market.clock.now() - self._market.trace.tick_s
        return [InstanceListing(CLOUD, asked_at, tuple(self._market.instances(self._owner)))]


class ReplayProber:
    """A replica's first probe passes when its cold start was over at the end of the tick before."""

    def __init__(self, market: TraceMarket) -> None:
        self._market = market
        self._waiting: list[ProbeOrder] = []

    def watch(self, orders: Sequence[ProbeOrder]) -> None:
        self._waiting = [order for order in orders if not order.passing]

    def drain(self) -> list[tuple[str, Event]]:
        seen = self._market.clock.tick - 1
        return [
            (order.service, ProbePassed(order.replica_id))
            for order in self._waiting
            if self._market.is_ready(order.endpoint, seen)
        ]


class ReplayFleet:
    """A load balancer whose requests are over at once, and whose demand is that of `arrivals`.

    With `served`, requests may wait, and their minutes are reported.
    """

    def __init__(
        self,
        market: TraceMarket,
        arrivals: Arrivals | None,
        window_s: float,
        served: ServedRequests | None = None,
    ) -> None:
        self.draining: frozenset[int] = frozenset()
        self._market = market
        self._arrivals = arrivals
        self._window_s = window_s
        self._served = served

    def ensure(self, orders: Mapping[str, AgentOrder | None]) -> None:
        tables = [order.table for order in orders.values() if order is not None]
        self.draining = frozenset(
            int(target.id)
            for table in tables
            for target in table.targets
            if target.state is Readiness.DRAINING
        )

    def demand(self, service: str) -> Demand | None:
        return None if self._served is None else self._served.demand(self._now_s)

    @property
    def _now_s(self) -> float:
        return self._market.clock.tick * self._market.trace.tick_s

    def load(self, service: str) -> Load:
        now = self._now_s
        if self._served is not None:
            came = self._served.came(now - self._window_s, now)
            waiting, ongoing = self._served.ongoing(now)
            return Load(
                self._window_s, came, queued=waiting, ongoing=ongoing, empty=self.draining, known=True
            )
        if self._arrivals is None:
            return Load(empty=self.draining, known=True)
        requests = self._requests(self._arrivals, self._market.clock.tick)
        return Load(self._window_s, requests, empty=self.draining, known=True)

    def next_load(self, *, same_again: bool) -> int:
        """Return the next tick at which the load is to be looked at: a window after this one, or when the minute is over.

        With `same_again` ticks that would see what this one saw are passed over, for an hour at most.
        """
        tick_s, tick = self._market.trace.tick_s, self._market.clock.tick
        if self._served is not None:
            return math.ceil(next_minute_s(tick * tick_s) / tick_s)
        if self._arrivals is None:
            return NEVER
        step = max(1, int(self._window_s / tick_s))
        following = tick + step
        if same_again:
            seen, last = self._requests(self._arrivals, tick), tick + _LONGEST_SAME_S / tick_s
            while following < last and self._requests(self._arrivals, following) == seen:
                following += step
        return following

    def _requests(self, arrivals: Arrivals, tick: int) -> int:
        """Return how many arrived within the window before a tick."""
        at_s = tick * self._market.trace.tick_s
        return arrivals.count(max(0.0, at_s - self._window_s), at_s)


class ReplayOffers:
    """The market's prices."""

    def __init__(self, market: TraceMarket) -> None:
        self._market = market
        self._known: dict[Requirements, tuple[Offer, ...]] = {}

    def get(self, need: Requirements) -> tuple[Offer, ...]:
        if need not in self._known or self._market.prices_move:
            self._known[need] = tuple(self._market.offers(need))
        return self._known[need]
