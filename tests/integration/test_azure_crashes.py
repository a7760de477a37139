"""The controller crashes before and after every call to Azure. In the end there is one machine, or nothing at all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from policies.model import CapacityType
from provisioners.azure.machines import AzureMachines
from provisioners.port.errors import CapacityError, ProvisionError, TransientError
from provisioners.port.vm import Machine, MachineOrder, MachineState
from tests.clouds.azure.azure_harness import OWNER, T4, Crash, Killer, azure, order
from tests.clouds.azure.azure_server import AzureServer
from tests.clouds.azure.azure_world import World
from tests.clouds.schedules import by_decades

pytestmark = pytest.mark.long

WHOLE = ["chat-7", "chat-7-ip", "chat-7-nic", "chat-7-os"]
LIVE = (MachineState.PENDING, MachineState.RUNNING)

WHEN = pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])


def killed_everywhere(
    is_after: bool, prepare: Callable[[AzureServer], object], what: Callable[[AzureMachines], object]
) -> Iterator[tuple[AzureServer, World]]:
    """The worlds that are left when `what` ends at its first call, its second, and so on up to its last."""
    for at in range(100):
        world = World()
        with AzureServer(world).running() as server:
            prepare(server)
            try:
                what(azure(server, Killer(at, is_after)))
            except Crash:
                yield server, world
                assert world.violations == []
            except ProvisionError:
                return  # what failed as it should, with calls to spare
            else:
                return
    raise AssertionError("it never ends")


def persistently(cloud: AzureMachines, what: MachineOrder, world: World) -> Machine:
    """As a controller repeats an order: the same one, after the delay that it receives, and not for ever."""
    for _ in range(20):
        try:
            return cloud.create(what)
        except TransientError as error:
            world.pass_time(error.retry_after_s)
    raise AssertionError("transient for ever")


def nothing(server: AzureServer) -> None:
    """An untouched world."""


@WHEN
@pytest.mark.parametrize("pause_s", [0.0, 100.0], ids=["at once", "later"])
def test_killed_at_any_call_of_create(is_after: bool, pause_s: float) -> None:
    seen = 0
    for server, world in killed_everywhere(is_after, nothing, lambda cloud: cloud.create(order())):
        world.pass_time(pause_s)
        fresh = azure(server)
        machine = persistently(fresh, order(), world)
        assert machine.state in LIVE
        assert (world.parts(), world.launched) == (WHOLE, 1)
        assert [each.id for each in fresh.machines(OWNER)] == [machine.id]
        assert fresh.orphans(OWNER) == []
        seen += 1
    assert seen >= 12


@WHEN
def test_killed_at_any_call_of_create_and_then_given_up(is_after: bool) -> None:
    """The replica is not wanted any more: what was made is found by its tag, and destroyed."""
    for server, world in killed_everywhere(is_after, nothing, lambda cloud: cloud.create(order())):
        world.pass_time(100)
        fresh = azure(server)
        for machine in fresh.machines(OWNER):
            fresh.destroy(machine)
        world.pass_time(100)
        assert world.parts() == []
        assert fresh.delete_shared(OWNER) == []
        assert world.resources == {}


@WHEN
def test_killed_at_any_call_of_destroy(is_after: bool) -> None:
    def destroy(cloud: AzureMachines) -> None:
        (machine,) = cloud.machines(OWNER)
        cloud.destroy(machine)

    seen = 0
    for server, world in killed_everywhere(is_after, _create, destroy):
        fresh = azure(server)
        (machine,) = fresh.machines(OWNER)
        fresh.destroy(machine)
        world.pass_time(100)
        assert world.parts() == []
        assert [each.state for each in fresh.machines(OWNER)] == [MachineState.TERMINATED]
        seen += 1
    assert seen >= 7


@WHEN
@pytest.mark.parametrize("failing", ["at once", "later", "vanishes"])
def test_killed_at_any_call_of_a_create_that_fails(is_after: bool, failing: str) -> None:
    def full(server: AzureServer) -> None:
        server.world.failing = failing
        server.world.room["eastus-1", T4, True] = 0

    for server, world in killed_everywhere(is_after, full, lambda cloud: cloud.create(order())):
        world.pass_time(100)
        with pytest.raises(CapacityError):
            persistently(azure(server), order(), world)
        world.pass_time(100)
        assert world.parts() == []


@WHEN
def test_killed_at_any_call_of_forget(is_after: bool) -> None:
    def dead(server: AzureServer) -> None:
        azure(server).destroy(_create(server))
        server.world.pass_time(100)

    for server, world in killed_everywhere(is_after, dead, lambda cloud: cloud.delete_shared(OWNER)):
        assert azure(server).delete_shared(OWNER) == []
        assert world.resources == {}


@WHEN
def test_killed_at_any_call_while_a_preemption_is_noted(is_after: bool) -> None:
    def preempted(server: AzureServer) -> None:
        _create(server)
        server.world.preempt("chat-7")
        server.world.pass_time(100)

    for server, _ in killed_everywhere(is_after, preempted, lambda cloud: cloud.machines(OWNER)):
        (machine,) = azure(server).machines(OWNER)
        assert machine.state is MachineState.PREEMPTED


def _create(server: AzureServer) -> Machine:
    return azure(server).create(order())


# --- Random schedules -------------------------------------------------------------------------------------------------

FAULTS = [
    (0, "", {}),
    (429, "TooManyRequests", {"Retry-After": "3"}),
    (429, "TooManyRequests", {"Retry-After": "300"}),
    (500, "InternalServerError", {}),
    (503, "ServerTimeout", {}),
    (409, "Conflict", {}),
]


class Story:
    """A controller that keeps two lists, of what it wants and of what it has given up, and crashes now and then."""

    def __init__(self, server: AzureServer, seed: int) -> None:
        self.server, self.world = server, server.world
        self.rng = random.Random(seed)
        self.cloud = azure(server)
        self.wanted: dict[str, CapacityType] = {}
        self.made: set[str] = set()
        self.numbers = 0

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.3:
            status, code, headers = rng.choice(FAULTS)
            method = rng.choice(["GET", "PUT", "DELETE"])
            self.server.fail(
                method, "/subscriptions/", status, code, "x", headers=headers, is_after=rng.random() < 0.5
            )
        killer = Killer(rng.randrange(25), rng.random() < 0.5) if rng.random() < 0.5 else Killer()
        self.cloud = azure(self.server, killer)
        with suppress(Crash, TransientError):
            rng.choice(
                [self.launch, self.launch, self.again, self.destroy, self.look, self.evict, self.tidy]
            )()
        self.world.pass_time(rng.choice([0.0, 1.0, 5.0, 60.0]))

    def launch(self) -> None:
        self.numbers += 1
        name = f"chat-{self.numbers}"
        spot = self.rng.random() < 0.7
        self.wanted[name] = CapacityType.SPOT if spot else CapacityType.ON_DEMAND
        self.world.failing = self.rng.choice(["at once", "later", "vanishes"])
        self.world.room["eastus-1", T4, spot] = self.rng.choice([0, 5, 5])
        self.order(name)

    def again(self) -> None:
        if self.wanted:
            self.order(self.rng.choice(sorted(self.wanted)))

    def order_of(self, name: str) -> MachineOrder:
        return order(name, replica_id=int(name[5:]), capacity_type=self.wanted[name])

    def order(self, name: str) -> None:
        try:
            machine = self.cloud.create(
                order(name, replica_id=int(name[5:]), capacity_type=self.wanted[name])
            )
        except CapacityError:
            del self.wanted[name]  # another zone, under another name
            return
        self.made.add(name)
        if machine.state not in LIVE:
            del self.wanted[name]

    def destroy(self) -> None:
        for machine in self.cloud.machines(OWNER):
            if not machine.state.is_gone and self.rng.random() < 0.5:
                self.wanted.pop(machine.token, None)
                self.cloud.destroy(machine)

    def look(self) -> None:
        told = {machine.token: machine.state for machine in self.cloud.machines(OWNER)}
        for name in self.made & set(self.wanted):
            assert told[name] in (*LIVE, MachineState.PREEMPTED, MachineState.STOPPING), name

    def evict(self) -> None:
        spot = [name for name, kind in self.wanted.items() if kind is CapacityType.SPOT]
        for name in set(spot) & set(self.world.alive()):
            self.world.preempt(name)

    def tidy(self) -> None:
        for leftover in self.cloud.orphans(OWNER):
            self.cloud.remove(leftover)


@by_decades
def test_random_schedules_end_with_what_is_wanted_and_then_with_nothing(seeds: range) -> None:
    for seed in seeds:
        world = World()
        with AzureServer(world).running() as server:
            story = Story(server, seed)
            for _ in range(8):
                story.step()
            server.faults.clear()
            world.pass_time(400)
            cloud = azure(server)
            world.room.clear()
            kept = set()
            for name in sorted(story.wanted):
                with suppress(CapacityError):  # of a creation that failed before
                    if persistently(cloud, story.order_of(name), world).state in LIVE:
                        kept.add(name)
            listed = {machine.token for machine in cloud.machines(OWNER) if machine.state in LIVE}
            world.pass_time(100)
            assert kept <= listed <= set(world.alive()), seed
            assert cloud.orphans(OWNER) == [], seed
            for machine in cloud.machines(OWNER):
                if not machine.state.is_gone:
                    cloud.destroy(machine)
            world.pass_time(100)
            assert world.parts() == [], seed
            assert cloud.delete_shared(OWNER) == [], seed
            assert (world.resources, world.violations) == ({}, []), seed
