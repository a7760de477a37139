"""The controller's hands in virtual time. Each fills one port of `controller.ports`.

A crash of the controller is the loss of these objects. Everything else stays: the cloud, a call that is
already on the wire, and the load balancer agents with the tables they have.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lb.config.demand import Demand
from lb.config.schema import Readiness, Table
from policies.history import Load
from policies.model import Event, Offer, ProbeFailed, ProbePassed
from policies.regions.ownership import NO_DISTANCES, Distances
from provisioners.port.base import Instance, LaunchOrder, Requirements
from provisioners.port.errors import ProvisionError
from skyserve_cli.controller.clouds.execute import Retry, perform
from skyserve_cli.controller.clouds.operation_runner import NOT_ALLOWED, OperationsInFlight
from skyserve_cli.controller.reconcile.listing_events import same_objects
from skyserve_cli.controller.reconcile.mappers import token_of
from skyserve_cli.controller.reconcile.ports import (
    AgentOrder,
    CloudOperation,
    InstanceListing,
    OperationKind,
    ProbeOrder,
    RegionalOrder,
)
from tests.kit.clock import SimClock
from tests.kit.fault_cloud import SimCloud


class Crash(BaseException):
    """The controller is killed, here and now."""


class SimOperationRunner:
    """Calls reach the cloud after a while and respond after another."""

    def __init__(
        self,
        cloud: SimCloud,
        clock: SimClock,
        rng: random.Random,
        owner: str,
        order: Callable[[CloudOperation], LaunchOrder],
        allows: Callable[[OperationKind], bool] = lambda kind: True,
    ) -> None:
        self._allows = allows
        self._cloud = cloud
        self._clock = clock
        self._rng = rng
        self._owner = owner
        self._order = order
        self._book = OperationsInFlight()
        self._answers: list[tuple[CloudOperation, Event | Retry | None]] = []
        self.crash_before_calls = False
        self.dead = False

    def ensure(self, calls: Sequence[CloudOperation]) -> None:
        if self.crash_before_calls:
            raise Crash
        for call in self._book.startable(calls, self._clock.now()):
            self._clock.after(self._delay_s(), lambda call=call: self._arrive(call))  # type: ignore[misc]

    def drain(self) -> list[tuple[str, Event]]:
        answers, self._answers = self._answers, []
        settled = ((call, self._book.settled(call, outcome, self._clock.now())) for call, outcome in answers)
        return [(call.service, event) for call, event in settled if event is not None]

    def abandon(self, orphan: Instance) -> None:
        def end() -> None:
            if not self._allows(OperationKind.TERMINATE):
                return
            try:
                self._cloud.terminate(orphan)
            except ProvisionError:
                return  # it will be seen again

        self._clock.after(self._delay_s(), end)

    def _arrive(self, call: CloudOperation) -> None:
        """At the cloud. A call whose caller has died meanwhile may still arrive: it was on the wire."""
        if self.dead and self._rng.random() < 0.5:
            return
        token = token_of(self._owner, call.service, call.incarnation, call.replica.id, call.replica.offer)
        outcome: Event | Retry | None = NOT_ALLOWED
        if self._allows(call.kind):
            outcome = perform(call, self._cloud, lambda: self._order(call), token, self._owner)
        self._clock.after(self._delay_s(), lambda: self._answers.append((call, outcome)))

    def _delay_s(self) -> float:
        return self._rng.expovariate(1.0 / self._cloud.faults.slow_call_s)


class SimInstancePoller:
    """Lists the cloud every `poll_s`; a listing is a little old when it arrives."""

    def __init__(self, cloud: SimCloud, clock: SimClock, owner: str, poll_s: float = 5.0) -> None:
        self._cloud = cloud
        self._clock = clock
        self._owner = owner
        self._poll_s = poll_s
        self._seen: list[InstanceListing] = []
        self._last: tuple[Instance, ...] = ()
        self._started = False
        self.dead = False

    def trouble(self) -> Mapping[str, str]:
        return {}

    def watch(self, clouds: frozenset[str]) -> None:
        if not self._started:
            self._started = True
            self._look()

    def drain(self) -> list[InstanceListing]:
        seen, self._seen = self._seen, []
        return seen

    def _look(self) -> None:
        if self.dead:
            return
        listing = self._cloud.listing(self._owner)
        self._last = same_objects(self._last, listing.instances)
        seen = InstanceListing("sim", self._clock.now(), self._last, silent=frozenset(listing.silent))
        self._clock.after(0.5, lambda: self._seen.append(seen))
        self._clock.after(self._poll_s, self._look)


class SimProber:
    """Every replica is probed every tick; now and then a probe lies."""

    def __init__(self, cloud: SimCloud, rng: random.Random) -> None:
        self._cloud = cloud
        self._rng = rng
        self._orders: Sequence[ProbeOrder] = ()

    def watch(self, orders: Sequence[ProbeOrder]) -> None:
        self._orders = orders

    def drain(self) -> list[tuple[str, Event]]:
        events: list[tuple[str, Event]] = []
        for order in self._orders:
            instance_id = order.endpoint.removeprefix("http://").partition(".")[0]
            healthy = self._cloud.healthy(instance_id)
            if healthy and self._rng.random() < self._cloud.faults.probe_flap:
                healthy = False
            if healthy and not order.passing:
                events.append((order.service, ProbePassed(order.replica_id)))
            elif not healthy and order.passing:
                events.append((order.service, ProbeFailed(order.replica_id, "simulated")))
        return events


@dataclass(slots=True)
class SimAgents:
    """The load balancer agents of all services. They outlive the controller."""

    clock: SimClock
    rng: random.Random
    tables: dict[str, Table] = field(default_factory=dict)
    regional: dict[tuple[str, int], Table] = field(default_factory=dict)  # of agents on machines of their own
    busy_until: dict[tuple[str, str], float] = field(default_factory=dict)
    requests_per_s: dict[str, float] = field(default_factory=dict)
    minutes: dict[tuple[str, int | None], Demand] = field(default_factory=dict)

    def accept(self, table: Table, replica_id: int | None = None) -> None:
        """A drained target has requests that end some time later. `replica_id` is of the agent's own machine. A table of an
        earlier epoch than the agent's is refused."""
        mine = (
            self.tables.get(table.service)
            if replica_id is None
            else self.regional.get((table.service, replica_id))
        )
        if mine is not None and table.epoch < mine.epoch:
            return
        for target in table.targets:
            key = table.service, target.id
            if target.state is Readiness.DRAINING and key not in self.busy_until:
                self.busy_until[key] = self.clock.now() + self.rng.uniform(0.0, 60.0)
        if replica_id is None:
            self.tables[table.service] = table
        else:
            self.regional[table.service, replica_id] = table

    def demand(self, service: str, replica_id: int | None = None) -> Demand:
        """The minutes of an agent since it was first polled, with its share of the requests. A replica serves two requests per
        second in time. `replica_id` is of the agent's own machine."""
        own = service, replica_id
        table = self.tables[service] if replica_id is None else self.regional[service, replica_id]
        share = (service in self.tables) + sum(name == service for name, _ in self.regional)
        end = int(self.clock.now() // 60)
        known = self.minutes.get(own) or Demand(0.0, end)
        ready = sum(target.state is Readiness.READY for target in table.targets)
        asked = round(60.0 * self.requests_per_s.get(service, 0.0) / share)
        late = max(0, asked - 120 * ready // share)
        missing = end - known.end
        known = Demand(
            self.clock.now(),
            known.first,
            *(
                column + (value,) * missing
                for column, value in (
                    (known.requests, asked),
                    (known.prompt_tokens, 0),
                    (known.response_tokens, 0),
                    (known.late, late),
                    (known.ready, ready),
                )
            ),
        )
        self.minutes[own] = known
        return known

    def load(self, table: Table, share: int = 1) -> Load:
        """What an agent with that table reports; requests go to `share` agents alike."""
        now = self.clock.now()
        draining = [t.id for t in table.targets if t.state is Readiness.DRAINING]
        empty = frozenset(int(name) for name in draining if self.busy_until[table.service, name] <= now)
        requests = round(self.requests_per_s.get(table.service, 0.0) * 60.0 / share)
        return Load(60.0, requests, in_flight=0, queued=0, empty=empty, known=True)


class SimFleet:
    """The controller's side of the agents; a push takes a moment."""

    def __init__(self, agents: SimAgents, clock: SimClock) -> None:
        self._agents = agents
        self._clock = clock
        self._pushed: dict[str, str] = {}
        self.dead = False

    def ensure(self, orders: Mapping[str, AgentOrder | None]) -> None:
        for service, order in orders.items():
            if order is not None and self._pushed.get(service) != order.table.revision:
                self._pushed[service] = order.table.revision
                self._clock.after(0.05, lambda table=order.table: self._push(table))  # type: ignore[misc]
        for service in [service for service in self._agents.tables if service not in orders]:
            del self._agents.tables[service]
            self._pushed.pop(service, None)

    def demand(self, service: str) -> Demand | None:
        return self._agents.demand(service) if service in self._agents.tables else None

    def load(self, service: str) -> Load:
        table = self._agents.tables.get(service)
        return Load() if table is None else self._agents.load(table)

    def _push(self, table: Table) -> None:
        if not self.dead:
            self._agents.accept(table)


class SimRegional:
    """The controller's side of the agents on machines of their own; a push takes a moment."""

    def __init__(self, agents: SimAgents, cloud: SimCloud, clock: SimClock) -> None:
        self._agents = agents
        self._cloud = cloud
        self._clock = clock
        self._orders: Sequence[RegionalOrder] = ()
        self._pushed: dict[tuple[str, int], str] = {}
        self.dead = False

    def ensure(self, orders: Sequence[RegionalOrder]) -> None:
        self._orders = orders
        for order in orders:
            if self._pushed.get(order.key) != order.table.revision and self._answers(order):
                self._pushed[order.key] = order.table.revision
                self._clock.after(0.05, lambda order=order: self._push(order))  # type: ignore[misc]
        wanted = {order.key for order in orders}
        for key in [key for key in self._agents.regional if key not in wanted]:
            del self._agents.regional[key]
            self._pushed.pop(key, None)

    def drain(self) -> list[tuple[str, Event]]:
        events: list[tuple[str, Event]] = []
        for order in self._orders:
            passes = order.key in self._agents.regional and self._answers(order)
            if passes and not order.passing:
                events.append((order.service, ProbePassed(order.replica_id)))
            elif order.passing and not passes:
                events.append((order.service, ProbeFailed(order.replica_id, "simulated")))
        return events

    def demands(self, service: str) -> list[Demand | None]:
        return [
            self._agents.demand(service, order.replica_id) if order.key in self._agents.regional else None
            for order in self._orders
            if order.service == service
        ]

    def distances(self, service: str) -> Distances:
        return NO_DISTANCES

    def loads(self, service: str) -> list[Load]:
        tables = [table for (name, _), table in self._agents.regional.items() if name == service]
        return [self._agents.load(table, len(tables)) for table in tables]

    def _answers(self, order: RegionalOrder) -> bool:
        return self._cloud.healthy(order.instance.id)

    def _push(self, order: RegionalOrder) -> None:
        if not self.dead:
            self._agents.accept(order.table, order.replica_id)


class SimOffers:
    def __init__(self, cloud: SimCloud) -> None:
        self._cloud = cloud
        self._known: dict[Requirements, tuple[Offer, ...]] = {}

    def get(self, need: Requirements) -> tuple[Offer, ...] | None:
        if need not in self._known:
            self._known[need] = tuple(self._cloud.offers(need))
        return self._known[need]
