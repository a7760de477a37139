"""Ten minutes at three times the capacity, in virtual time: the real tick, prober, target table and policies, over engines of one seat.

The thresholds are the defaults. The configured rate is wrong (it calls five replicas enough), so that only the probes can
say that the fleet is too small.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from lb.config.schema import Stats
from lb.core.target_state import Booking
from lb.core.targets import TargetTable
from policies.goals import ScalingGoal
from policies.history import Load
from policies.model import Bootstrapped, EndReason, Launched, ReplicaState
from policies.routing.base import RequestView
from skyserve_cli.controller.readiness import HttpProber, ProbeOutcome
from skyserve_cli.controller.reconcile.attention import Attention
from skyserve_cli.controller.reconcile.demand import load_of
from skyserve_cli.controller.reconcile.evidence import DaemonEvidence
from skyserve_cli.controller.reconcile.inputs import Doubts
from skyserve_cli.controller.reconcile.ports import OperationKind, ProbeOrder
from skyserve_cli.controller.reconcile.served_replicas import ServedReplicas, served_report
from skyserve_cli.spec.model import Probe, ServiceSpec
from tests.integration.lb_wires import run
from tests.unit.test_controller_reconciler import World

SEATS, MOST = 5, 10
SERVICE_S = 1.0
PER_S = 3 * SEATS / SERVICE_S
QUEUED = 150  # requests on engines and waiting: beyond it clients get 429
START_S = 30.0
LASTS_S = 600.0
EPOCH = 1000.0  # the controller's clock when the loop's is 0


class Answer(NamedTuple):
    at: float
    status: int
    waited_s: float


@dataclass
class Engine:
    """One seat, first come, first served. Probes wait like requests, unless it has a thread for them."""

    sits: deque[tuple[float, asyncio.Future[int]]] = field(default_factory=deque)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    hangs: bool = False
    status: int = 200

    async def work(self) -> None:
        while True:
            if not self.sits or self.hangs:
                self.came.clear()
                await self.came.wait()
                continue
            takes_s, done = self.sits[0]
            await asyncio.sleep(takes_s)
            if not self.hangs:
                self.sits.popleft()
                if not done.done():
                    done.set_result(self.status if takes_s else 200)

    def sit(self, takes_s: float) -> asyncio.Future[int]:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.sits.append((takes_s, done))
        self.came.set()
        return done


class _NoRegions:
    def loads(self, service: str) -> list[Load]:
        return []


class BusyWorld(World):
    """A whole service."""

    prober_: HttpProber
    served: ServedReplicas

    def begin(self, probe_s: float | None) -> None:
        """`probe_s` is the work of a probe; None: a thread of its own responds."""
        loop = asyncio.get_running_loop()
        self.probe_s, self.loop = probe_s, loop
        self.engines: dict[int, Engine] = {}
        self.answers: list[Answer] = []
        self.refused = 0
        self.waiting: deque[tuple[float, int]] = deque()
        self.sent: set[asyncio.Task[None]] = set()
        attention = Attention(loop, self, self)
        self.served = ServedReplicas()
        self.prober_ = HttpProber(loop, lambda: None, attention, self.served, lambda _: _Line(self))
        self.evidence = DaemonEvidence(attention, self.prober_, self, _NoRegions(), (), self.served)
        self.balancer: TargetTable | None = None
        self.tick_ = self.reconciler()

    def now(self) -> float:
        self.time = EPOCH + asyncio.get_running_loop().time()
        return self.time

    def told(self, hand: str) -> None:
        pass  # thousands of ticks: their order is tested elsewhere

    def doubts(self) -> Doubts:
        return Doubts(evidence=self.evidence.of)

    def load(self, service: str) -> Load:
        return self.loads.get(service, Load())

    # --- each second

    def tick(self) -> None:
        now = self.loop.time()
        if self.balancer is not None:
            stats = Stats(
                "chat",
                "",
                "r",
                now + 1.0,
                60.0,
                round(PER_S * 60),
                0,
                0,
                0,
                PER_S,
                self.balancer.stats(now, 60.0),
            )
            self.served.reported("chat", 0, served_report(stats, now))
            order = self.agents["chat"]
            assert order is not None
            self.loads["chat"] = load_of(stats, order.table)
        self.events += self.prober_.drain()
        self.lists(
            *map(
                self.instance_of, [one for one in self.row().replicas if one.instance_id and not one.ended_at]
            )
        )
        self.tick_.tick()
        self.prober_.watch(self.probes)
        self._act()
        order = self.agents["chat"]
        assert order is not None
        if self.balancer is None:
            self.balancer = TargetTable(order.table, now)
        elif order.table.revision != self.balancer.table.revision:
            self.balancer.apply(order.table, now)
        self.dispatch()

    def _act(self) -> None:
        for call in self.calls:
            number = call.replica.id
            if call.kind is OperationKind.LAUNCH and number not in self.engines:
                engine = self.engines[number] = Engine()
                self.keep(engine.work())
                self.happens(Launched(number, f"i-{number}"))
                self.loop.call_later(START_S, self.happens, Bootstrapped(number, f"http://h:{number}"))

    def keep(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self.sent.add(task)
        task.add_done_callback(self.sent.discard)

    # --- the load balancer: the least loaded target of those that the table offers

    def arrive(self, number: int) -> None:
        in_flight = 0 if self.balancer is None else self.balancer.in_flight
        if in_flight + len(self.waiting) >= QUEUED:
            self.refused += 1
            return
        self.waiting.append((self.loop.time(), number))
        self.dispatch()

    def dispatch(self) -> None:
        now = self.loop.time()
        while self.waiting and self.balancer is not None:
            offers = self.balancer.offers(now)
            if not offers:
                return
            at, number = self.waiting.popleft()
            best = min(offers, key=lambda view: (view.in_flight, view.id))
            booking = self.balancer.book(RequestView(f"r{number}", "POST", "/"), best.id, now)
            self.keep(self._send(booking, at))

    async def _send(self, booking: Booking, came_at: float) -> None:
        assert self.balancer is not None
        status = await self.engines[int(booking.key.id)].sit(SERVICE_S)
        now = self.loop.time()
        self.balancer.responded(booking, now, status)
        self.balancer.release(booking, now)
        self.answers.append(Answer(now, status, now - came_at))


class _Line:
    def __init__(self, world: BusyWorld) -> None:
        self._world = world

    async def probe(self, order: ProbeOrder) -> ProbeOutcome:
        engine = self._world.engines[order.replica_id]
        if self._world.probe_s is None and not engine.hangs:
            return ProbeOutcome(None, reached=True)
        try:
            async with asyncio.timeout(order.probe.timeout_s):
                await engine.sit(self._world.probe_s or 0.0)
        except TimeoutError:
            return ProbeOutcome(
                f"probe took longer than {order.probe.timeout_s:g} s", reached=True, timed_out=True
            )
        return ProbeOutcome(None, reached=True)

    def close(self) -> None:
        pass


@pytest.fixture
def world() -> Iterator[BusyWorld]:
    world = BusyWorld()
    scaling = ScalingGoal(SEATS, MOST, target_qps_per_replica=PER_S, upscale_delay_s=60.0)
    world.up(ServiceSpec("chat", "run", scaling=scaling))
    yield world
    world.store.close()


async def traffic(world: BusyWorld, per_s: float, lasts_s: float, hurt: Any = None) -> None:
    """Evenly spaced requests, and a tick each second. `hurt` is called after half a minute."""
    sent, ends_at = 0, world.loop.time() + lasts_s
    began_at = world.loop.time()
    while world.loop.time() < ends_at:
        world.tick()
        if hurt is not None and world.loop.time() - began_at >= 30.0:
            hurt()
            hurt = None
        for _ in range(round(per_s)):
            world.arrive(sent)
            sent += 1
            await asyncio.sleep(1.0 / per_s)


async def ready(world: BusyWorld) -> None:
    for _ in range(60):
        world.tick()
        await asyncio.sleep(1.0)
    assert sum(one.state is ReplicaState.READY for one in world.row().replicas) == SEATS


def ended(world: BusyWorld) -> list[tuple[int, EndReason | None]]:
    return [(one.id, one.end_reason) for one in world.row().replicas if one.end_reason is not None]


OWN_THREAD = pytest.param(None, id="GET on a thread of its own")
QUEUED_GET = pytest.param(0.0, id="GET in the queue")
POST = pytest.param(SERVICE_S, id="POST", marks=pytest.mark.long)


@pytest.mark.parametrize(
    "probe_s", [OWN_THREAD, pytest.param(0.0, id="GET in the queue", marks=pytest.mark.long), POST]
)
def test_a_fleet_at_three_times_its_capacity_loses_nobody_and_grows(
    world: BusyWorld, probe_s: float | None
) -> None:
    async def story() -> None:
        world.begin(probe_s)
        await ready(world)
        await traffic(world, PER_S, LASTS_S)
        assert ended(world) == []
        # A probe on a thread of its own says nothing of load: then the configured rate decides alone.
        assert len(world.row().replicas) == (SEATS if probe_s is None else MOST)
        waits = sorted(answer.waited_s for answer in world.answers)
        assert waits[int(0.99 * len(waits))] <= (QUEUED / SEATS + 2 * SEATS) * SERVICE_S
        assert all(answer.status == 200 for answer in world.answers)
        await world.prober_.close()

    run(story())


@pytest.mark.parametrize("probe_s", [QUEUED_GET, POST])
def test_one_of_them_that_hangs_is_replaced_within_its_threshold(
    world: BusyWorld, probe_s: float | None
) -> None:
    async def story() -> None:
        world.begin(probe_s)
        await ready(world)
        hung_at = 0.0

        def hang() -> None:
            nonlocal hung_at
            hung_at = world.now()
            world.engines[2].hangs = True

        await traffic(world, PER_S, 300.0, hang)
        assert ended(world) in ([(2, EndReason.PROBE_FAILED)], [])
        lost = [line for line in world.store.events("chat") if line.record.kind == "GaveUp"]
        assert [line.record.replica_id for line in lost] == [2]
        probe = Probe()
        assert lost[0].at - hung_at <= 180.0 + probe.timeout_s + probe.interval_s + 1.0
        await world.prober_.close()

    run(story())


def test_one_that_gives_clients_errors_only_is_replaced_sooner(world: BusyWorld) -> None:
    async def story() -> None:
        world.begin(None)
        await ready(world)
        broke_at = 0.0

        def break_() -> None:
            nonlocal broke_at
            broke_at = world.now()
            world.engines[3].status = 500

        await traffic(world, 0.5 * SEATS / SERVICE_S, 300.0, break_)
        lost = [line for line in world.store.events("chat") if line.record.kind == "GaveUp"]
        assert [line.record.replica_id for line in lost] == [3]
        assert lost[0].at - broke_at <= 180.0
        await world.prober_.close()

    run(story())
