"""A controller that crashes before or after any call to Compute Engine, starts again and knows nothing: one machine per order
in the end, and nothing that no one remembers."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from policies.model import Zone
from provisioners.port.errors import CapacityError, ProvisionError, TransientError
from provisioners.port.vm import MachineState
from tests.clouds.gcp.gcp_controller import ZONE, Controller, controller, eventually, order_of
from tests.clouds.gcp.gcp_parts import Fault
from tests.clouds.gcp.gcp_world import World
from tests.clouds.schedules import by_decades

pytestmark = pytest.mark.long

S = MachineState
ORDER = order_of("chat-1")
BEFORE_OR_AFTER = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])


def crashing(gcp: Controller, call: int, after: bool, act: Callable[[], object]) -> bool:
    """Do it with a controller that crashes at that call. Whether it came to that; afterwards a new one is there."""
    gcp.world.crash = call, after
    try:
        act()
    except ProvisionError:
        assert gcp.world.is_down  # there is no other reason
    died = gcp.world.is_down
    gcp.restart()
    return died


@BEFORE_OR_AFTER
def test_a_controller_that_dies_while_it_creates(after: bool) -> None:
    call, died = 0, True
    while died:
        with controller() as gcp:
            died = crashing(gcp, call, after, lambda gcp=gcp: gcp.machines.create(ORDER))
            assert gcp.create(ORDER).id == ORDER.token
            assert gcp.world.alive() == [ORDER.token]
            assert gcp.world.launches == {ORDER.token: 1}
            eventually(gcp, ORDER.token, lambda machine: machine.state is S.RUNNING)
        call += 1
    assert call > 12  # the network, two rules, the machine


@BEFORE_OR_AFTER
def test_a_controller_that_dies_while_there_is_no_room(after: bool) -> None:
    call, died = 0, True
    while died:
        with controller(World(room={(ZONE.name, True): 0})) as gcp:
            died = crashing_without_room(gcp, call, after)
            with pytest.raises(CapacityError):
                gcp.create(ORDER)
            gcp.world.advance(60.0)
            assert gcp.world.alive() == []
            assert gcp.world.disks == {}
            assert gcp.listed() == {}
        call += 1
    assert call > 12


def crashing_without_room(gcp: Controller, call: int, after: bool) -> bool:
    gcp.world.crash = call, after
    try:
        gcp.machines.create(ORDER)
    except CapacityError:
        pass  # it died after that, or not at all
    except TransientError:
        assert gcp.world.is_down
    died = gcp.world.is_down
    gcp.restart()
    return died


@BEFORE_OR_AFTER
def test_a_controller_that_dies_while_it_destroys(after: bool) -> None:
    call, died = 0, True
    while died:
        with controller() as gcp:
            machine = gcp.create(ORDER)
            died = crashing(gcp, call, after, lambda gcp=gcp, machine=machine: gcp.machines.destroy(machine))
            for listed in gcp.listed().values():
                gcp.insist(lambda gcp=gcp, listed=listed: gcp.machines.destroy(listed))
            gcp.world.advance(60.0)
            assert gcp.world.alive() == []
            assert gcp.world.disks == {}
        call += 1
    assert call == 2  # one call is all it takes


@BEFORE_OR_AFTER
def test_a_controller_that_dies_while_it_forgets(after: bool) -> None:
    call, died = 0, True
    while died:
        with controller() as gcp:
            gcp.machines.destroy(gcp.create(ORDER))
            gcp.world.advance(60.0)
            died = crashing(gcp, call, after, lambda gcp=gcp: gcp.machines.delete_shared(ORDER.owner))
            gcp.world.advance(60.0)
            assert gcp.machines.delete_shared(ORDER.owner) == []
            assert (gcp.world.networks, gcp.world.firewalls) == ({}, {})
        call += 1
    assert call > 6


FAULTY = (
    "compute.instances.insert",
    "compute.instances.delete",
    "compute.instances.get",
    "compute.instances.aggregatedList",
    "compute.zoneOperations.list",
    "compute.zoneOperations.wait",
    "compute.firewalls.get",
    "compute.firewalls.insert",
    "compute.networks.insert",
    "compute.globalOperations.wait",
)
FAILURES = ((0, ""), (500, "internalError"), (503, "backendError"), (429, "rateLimitExceeded"))
STOCK_OUT = ("ZONE_RESOURCE_POOL_EXHAUSTED", "none left", 503)
OOPS = ("INTERNAL_ERROR", "oops", 500)


@by_decades
def test_whatever_happens_there_is_one_machine_per_order_and_none_is_lost(seeds: range) -> None:
    for seed in seeds:
        with controller(
            World(operation_s=seed % 7 * 4.0, hidden_s=seed % 3 * 2.0, list_lag_s=seed % 5 * 1.0)
        ) as gcp:
            live_through(gcp, random.Random(seed))


def live_through(gcp: Controller, rng: random.Random) -> None:
    """Thirty steps of work and mishap; then everything works again, and all must come right."""
    world = gcp.world
    zones = [Zone("gcp", "us-central1", name) for name in world.zones[:3]]
    orders = {f"chat-{n}": order_of(f"chat-{n}", replica_id=n, zone=zones[n]) for n in range(3)}
    doomed: set[str] = set()
    for _ in range(30):
        order = orders[rng.choice(sorted(orders))]
        match rng.randrange(9):
            case 0 | 1 | 2:
                if order.token not in doomed:
                    attempt(lambda order=order: gcp.machines.create(order))
            case 3 if rng.random() < 0.3:
                doomed.add(order.token)
                attempt(lambda order=order: destroy_listed(gcp, {order.token}))
            case 4:
                status, reason = rng.choice(FAILURES)
                world.faults.append(Fault(rng.choice(FAULTY), status, reason, after=rng.random() < 0.5))
            case 5:
                world.crash = rng.randrange(8), rng.random() < 0.5
            case 6:
                world.failing.append(rng.choice((STOCK_OUT, OOPS)))
            case 7:
                preempt_one(world, rng)
            case 8:
                world.advance(rng.choice((1.0, 10.0, 100.0)))
                attempt(lambda: gcp.machines.machines(ORDER.owner))
        if world.is_down:
            gcp.restart()
        assert len(world.alive()) == len(set(world.alive()))
    world.faults, world.failing, world.crash = [], [], None
    world.advance(100.0)
    gcp.restart()
    for order in orders.values():
        if order.token not in doomed:
            machine = gcp.create(order)
            assert machine.state.is_gone == (order.token not in world.alive())
    destroy_listed(gcp, doomed)
    world.advance(100.0)
    listed = {token for token, machine in gcp.listed().items() if not machine.state.is_gone}
    assert listed == set(world.alive())
    assert not doomed & set(world.alive())
    destroy_listed(gcp, set(orders))
    world.advance(100.0)
    assert world.alive() == []
    assert world.disks == {}


def destroy_listed(gcp: Controller, tokens: set[str]) -> None:
    """As a controller does: of what the cloud lists, whatever is not wanted."""
    for token, machine in gcp.listed().items():
        if token in tokens:
            gcp.insist(lambda machine=machine: gcp.machines.destroy(machine))


def attempt(act: Callable[[], object]) -> None:
    with suppress(TransientError, CapacityError):  # reported, and tried again by a later step
        act()


def preempt_one(world: World, rng: random.Random) -> None:
    running = [
        key for key, instance in world.instances.items() if instance["status"] in ("STAGING", "RUNNING")
    ]
    if running:
        world.preempt(*rng.choice(running))
