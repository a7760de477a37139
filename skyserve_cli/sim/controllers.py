"""The controller in a recorded market, in two forms that do the same to the last event.

`WholeController` is the production one: its tick, with the store and all orders. `DirectController` has the decision alone, which reads
everything and writes nothing (`ServiceTurn.decide`), and applies it to a row in memory: several times as fast.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import orjson

from policies.model import Memory, Plan, ReplicaState
from skyserve_cli.controller.clouds.caches import SpecCache
from skyserve_cli.controller.reconcile.demand_cache import DemandCache
from skyserve_cli.controller.reconcile.inputs import NO_DOUBTS, BalancerPorts, ReplicaPorts
from skyserve_cli.controller.reconcile.planning import new_row
from skyserve_cli.controller.reconcile.ports import CloudOperation, ProbeOrder
from skyserve_cli.controller.reconcile.reconciler import Reconciler
from skyserve_cli.controller.reconcile.service_orders import OUTSTANDING
from skyserve_cli.controller.reconcile.turn import ServiceTurn, TickOffers
from skyserve_cli.controller.secret_box import SecretBox
from skyserve_cli.sim.market import CLOUD, EPOCH_S, TickClock, TraceMarket
from skyserve_cli.sim.trace_ports import (
    ReplayFleet,
    ReplayInstancePoller,
    ReplayOffers,
    ReplayOperationRunner,
    ReplayProber,
)
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.model import Probe, ServiceSpec
from skyserve_cli.state.codec import memory_from_json, memory_to_json
from skyserve_cli.state.database import Database
from skyserve_cli.state.read_cache import ReadCache
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import Commit, DemandRow, EventRecord, ServiceRow

SERVICE = "simulated"
_KEY = b"c2ltdWxhdGVkLXNpbXVsYXRlZC1zaW11bGF0ZWQtLSE="
_OWNER = "simulator"


class World(NamedTuple):
    """What a controller is put into. `known` is the demand of the minutes before it began."""

    clock: TickClock
    market: TraceMarket
    fleet: ReplayFleet
    spec: ServiceSpec
    known: Sequence[DemandRow]
    seed: int


class Controller(Protocol):
    """A controller of one service."""

    @property
    def row(self) -> ServiceRow:
        """The service as it stands."""
        ...

    @property
    def plan(self) -> Plan:
        """The last decision."""
        ...

    @property
    def idle(self) -> bool:
        """Return whether no result of a cloud call waits for the next tick."""
        ...

    def tick(self) -> None:
        """One turn, and what the cloud makes of its orders."""
        ...

    def event_lines(self) -> list[str]:
        """Return every line that was written about the service."""
        ...

    def close(self) -> None: ...


class WholeController:
    """The production controller, with a database in memory."""

    def __init__(self, world: World) -> None:
        rng = random.Random(world.seed)
        self._store = Store(Database("sqlite://", draw=lambda size: rng.randbytes(size).hex()))
        specs = SpecCache(self._store, SecretBox(_KEY))
        owner = self._store.database.owner()
        market = world.market
        self._runner = ReplayOperationRunner(market, owner, world.spec)
        self._reconciler = Reconciler(
            world.clock,
            self._store,
            specs,
            ReplicaPorts(
                enabled=frozenset({CLOUD}),
                offers=ReplayOffers(market),
                runner=self._runner,
                instance_poller=ReplayInstancePoller(market, owner),
                prober=ReplayProber(market),
            ),
            BalancerPorts(world.fleet, "127.0.0.1"),
        )
        self._store.put_service(
            SERVICE,
            spec_to_json(world.spec),
            replica_hash="",
            sealed_secrets=b"",
            lb_port=0,
            target=0,
            mode=None,
            now=EPOCH_S,
        )
        if world.known:
            self._store.put_demand(SERVICE, world.known)

    @property
    def row(self) -> ServiceRow:
        (row,) = self._store.services()
        return row

    @property
    def plan(self) -> Plan:
        return self._reconciler.plans[SERVICE]

    @property
    def idle(self) -> bool:
        return self._runner.idle

    def tick(self) -> None:
        self._reconciler.tick()
        self._runner.act()

    def event_lines(self) -> list[str]:
        return [_line(line.at, line.record) for line in self._store.events(SERVICE, limit=10_000_000)]

    def close(self) -> None:
        self._store.close()


class DirectController:
    """The production decision, without a store and without the tables of load balancers."""

    def __init__(self, world: World) -> None:
        self._clock, self._fleet, market = world.clock, world.fleet, world.market
        self._spec = world.spec
        self._runner = ReplayOperationRunner(market, _OWNER, world.spec)
        self._prober, self._poller = ReplayProber(market), ReplayInstancePoller(market, _OWNER)
        self._offers = TickOffers(ReplayOffers(market))
        self._seen: Counter[str] = Counter()
        self._turn = ServiceTurn(
            _OWNER,
            _OneSpec(world.spec),
            self._offers,
            self._poller,
            BalancerPorts(world.fleet, "127.0.0.1"),
            NO_DOUBTS,
            self._seen,
            DemandCache(_KnownDemand(world.known)),
        )
        self._rows = ReadCache(0, {SERVICE: replace(new_row(world.spec, EPOCH_S), name=SERVICE)})
        self._events = [(EPOCH_S, EventRecord("goal", "up: version 1"))]
        self.plan = Plan((), Memory())

    @property
    def row(self) -> ServiceRow:
        return self._rows.rows[SERVICE]

    @property
    def idle(self) -> bool:
        return self._runner.idle

    def tick(self) -> None:
        row, now = self.row, self._clock.now()
        results = [event for _, event in (*self._runner.drain(), *self._prober.drain())]
        listings = self._poller.drain()
        self._seen.update(listing.cloud for listing in listings)
        self._offers.begin()
        if self._spec.slo is not None:
            self._turn.take_demand(row, self._spec, now)
        decided = self._turn.decide(row, results, listings, now)
        self.plan = decided.plan
        if decided.commit is not None:
            self._take(decided.commit)
        live = decided.change.live()
        calls = [
            CloudOperation(SERVICE, "", OUTSTANDING[one.state], one)
            for one in live
            if one.state in OUTSTANDING
        ]
        starting = [one for one in live if one.state is ReplicaState.STARTING]
        self._fleet.draining = frozenset(one.id for one in live if one.state is ReplicaState.DRAINING)
        self._prober.watch(
            [ProbeOrder(SERVICE, one.id, one.endpoint or "", self._spec.probe, None) for one in starting]
        )
        self._runner.ensure(calls)
        self._runner.act()

    def event_lines(self) -> list[str]:
        return [_line(at, record) for at, record in self._events]

    def close(self) -> None:
        pass

    def _take(self, commit: Commit) -> None:
        """Take in what was decided, with the memory as a store would return it."""
        self._events += [(commit.now, record) for record in commit.records]
        if commit.memory is not None:
            read = orjson.loads(orjson.dumps(memory_to_json(commit.memory)))
            commit = replace(commit, memory=memory_from_json(read, commit.memory.next_replica_id))
        self._rows.follow(self._rows.count + 1, [commit])


class _OneSpec:
    """The `Specs` of one version."""

    def __init__(self, spec: ServiceSpec) -> None:
        self._spec = spec

    def get(self, service: str, version: int) -> ServiceSpec:
        return self._spec

    def trouble(self, service: str, version: int) -> str:
        return ""

    def probe(self, service: str, version: int) -> Probe:
        return self._spec.probe


class _KnownDemand:
    """The `DemandRows` of a service that stores none."""

    def __init__(self, known: Sequence[DemandRow]) -> None:
        self._known = known

    def demand(self, name: str, *, since: int = 0) -> list[DemandRow]:
        return [row for row in self._known if row.minute >= since]

    def put_demand(self, name: str, rows: Sequence[DemandRow], *, drop_from: int | None = None) -> None:
        pass


def _line(at: float, record: EventRecord) -> str:
    return f"{at - EPOCH_S:.0f} {record.replica_id} {record.kind} {record.state} {record.message}"
