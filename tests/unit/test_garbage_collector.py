"""The janitor over a cloud in memory: what it finds, when it removes it, what it keeps its hands off."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from policies.model import CapacityType, Offer
from provisioners.port.base import LaunchOrder
from provisioners.port.errors import AuthError, ProvisionError, TransientError
from provisioners.port.vm import Machine, OrphanedResource, Silent
from skyserve_cli.controller.clouds.garbage_collector import AGAIN_S, PATIENCE_S, Sweeper
from skyserve_cli.controller.clouds.orphans import Part
from tests.clouds.memory_machines import CLOUD, ZONES, KilledError, MemoryMachines
from tests.clouds.orphan_bench import LeakBench
from tests.clouds.vms.vm_bench import until

TOKEN = "own-chat-1-0a1b2c3d4e"
DISK = OrphanedResource("disk", "d-1", "us", "own-chat-9-0a1b2c3d4e")
GROUP = OrphanedResource("group", "g-1", "us")


@dataclass
class Time:
    at: float = 1000.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


@dataclass
class Flaky(MemoryMachines):
    """Its region `eu` does not respond as long as `trouble` is set; nor, if `is_deaf`, does any."""

    trouble: ProvisionError | None = None
    is_deaf: bool = False

    def machines(self, owner: str, silent: Silent | None = None) -> Sequence[Machine]:
        listed = super().machines(owner)
        if self.trouble is None:
            return listed
        if silent is None or self.is_deaf:
            raise self.trouble
        silent("eu", self.trouble)
        return [one for one in listed if one.zone.region != "eu"]


@dataclass
class World:
    time: Time = field(default_factory=Time)
    machines: Flaky = field(init=False)
    bench: LeakBench = field(init=False)

    def __post_init__(self) -> None:
        self.machines = Flaky(self.time.now)
        self.restart()

    def restart(self) -> None:
        self.bench = LeakBench(self.machines, "own", self.time.now)

    def launch(self, token: str = TOKEN, zone: int = 0, owner: str = "own") -> None:
        self.bench.fleet.launch(order(token, zone, owner))


def order(token: str, zone: int = 0, owner: str = "own") -> LaunchOrder:
    offer = Offer(ZONES[zone], "big", None, 0.0, CapacityType.SPOT, 1.0)
    return LaunchOrder(token, owner, "chat", 1, 1, offer, None, "serve")


@pytest.fixture
def world() -> World:
    return World()


def test_an_instance_without_a_row_is_found_and_ended_and_one_with_a_row_is_not(world: World) -> None:
    world.launch()
    world.launch("own-chat-2-0a1b2c3d4e")
    world.launch("them-chat-1-0a1b2c3d4e", owner="them")
    world.bench.tokens = {"own-chat-2-0a1b2c3d4e"}
    assert world.bench.orphans() == ["m-1"]
    world.bench.end_strays()
    assert world.machines.live() == ["own-chat-2-0a1b2c3d4e", "them-chat-1-0a1b2c3d4e"]
    assert world.bench.orphans() == []


def test_what_a_look_has_not_found_is_not_removed(world: World) -> None:
    world.launch()
    world.bench.tokens = {TOKEN}
    assert (
        world.bench.garbage_collector.remove((CLOUD, "instance", "m-1", "us")).why == ""
    )  # as of something that is gone
    assert world.machines.live() == [TOKEN]


def test_what_another_process_has_found_is_looked_for_and_removed(world: World) -> None:
    world.machines.left = [DISK]
    assert world.bench.orphans() == ["d-1"]
    world.restart()
    assert world.bench.garbage_collector.remove((CLOUD, "disk", "d-1", "us")).why == ""
    assert world.machines.left == []


def test_a_leftover_is_removed_when_it_is_seen_twice(world: World) -> None:
    world.machines.left = [DISK]
    first = world.bench.tidy()
    assert (first.removed, first.waiting) == ((), ("disk d-1 in memory/us seems to be left over",))
    world.time.sleep(AGAIN_S - 1.0)
    assert world.bench.tidy().removed == ()
    world.time.sleep(1.0)
    assert world.bench.tidy().removed == ("disk d-1 in memory/us",)
    assert world.machines.left == []
    assert [(line.kind, line.message) for line in world.bench.events] == [
        ("Removed", "disk d-1 in memory/us, which belonged to nothing")
    ]


def test_a_leftover_that_was_away_has_to_be_seen_twice_again(world: World) -> None:
    world.machines.left = [DISK]
    world.bench.tidy()
    world.machines.left = []
    world.time.sleep(AGAIN_S)
    world.bench.tidy()
    world.machines.left = [DISK]
    world.time.sleep(AGAIN_S)
    assert world.bench.tidy().removed == ()


def test_what_a_launch_under_way_is_about_to_use_is_left_alone(world: World) -> None:
    world.machines.left = [DISK]
    world.machines.common = [GROUP]
    world.bench.tokens, world.bench.clouds = {DISK.token}, {CLOUD}
    for _ in range(3):
        assert world.bench.tidy().view() == {"removed": (), "waiting": (), "problems": ()}
        world.time.sleep(1000.0)
    assert (world.machines.left, world.machines.common) == ([DISK], [GROUP])
    assert list(world.bench.garbage_collector.forget(CLOUD)) != []
    assert world.machines.common == [GROUP]


def test_what_machines_share_goes_with_the_last_of_them(world: World) -> None:
    world.machines.common = [GROUP]
    world.launch()
    step = world.bench.tidy(["chat"])
    assert step.waiting == ("instance m-1 in memory/us is not gone yet",)
    assert world.machines.common == [GROUP]
    world.bench.end_strays()
    assert world.bench.tidy(["chat"]).removed == ("group g-1 in memory/us",)
    assert world.machines.common == []
    assert world.bench.tidy() == type(step)()


def test_the_instances_of_other_services_are_not_waited_for(world: World) -> None:
    world.launch()
    assert world.bench.tidy(["embed"]).waiting == ()
    assert world.bench.tidy().waiting != ()


def test_a_region_that_is_silent_is_named_and_the_others_are_tidied(world: World) -> None:
    world.launch(zone=0)
    world.launch("own-chat-2-0a1b2c3d4e", zone=2)
    world.machines.left, world.machines.common = [DISK], [GROUP]
    world.machines.trouble = TransientError("no answer", cloud=CLOUD)
    look = world.bench.garbage_collector.inspect(CLOUD)
    assert [str(one) for one in look.unlisted] == ["memory/eu cannot be listed: no answer"]
    assert [orphan.id for orphan in look.orphans] == ["m-1", "d-1"]  # and nothing that is shared
    world.bench.end_strays()
    assert world.bench.garbage_collector.remove(("memory", "disk", "d-1", "us")).why == ""
    step = world.bench.tidy()
    assert (step.removed, step.waiting) == ((), ("memory/eu cannot be listed: no answer",))
    world.time.sleep(PATIENCE_S)
    step = world.bench.tidy()
    assert (step.waiting, step.problems) == ((), ("memory/eu cannot be listed: no answer",))
    assert world.machines.common == [GROUP]


@pytest.mark.parametrize(
    ("places", "has_shared", "is_awaited"),
    [
        pytest.param({"us", "us-a"}, False, False, id="where-the-service-never-was"),
        pytest.param({"us", "eu"}, False, True, id="where-the-service-was"),
        pytest.param(None, False, True, id="for-a-sweep"),
        pytest.param({"us", "us-a"}, True, True, id="where-machines-may-need-what-they-share"),
    ],
)
def test_whether_a_silent_region_is_waited_for(
    world: World, places: set[str] | None, has_shared: bool, is_awaited: bool
) -> None:
    world.machines.common = [GROUP] if has_shared else []
    world.machines.trouble = TransientError("no answer", cloud=CLOUD)
    step = world.bench.garbage_collector.tidy(CLOUD, ["chat"], places)
    assert step.waiting == (("memory/eu cannot be listed: no answer",) if is_awaited else ())
    assert step.problems == ()
    assert len(world.machines.common) == has_shared


@pytest.mark.parametrize(
    ("trouble", "where"),
    [
        pytest.param(TransientError("storm", cloud=CLOUD), "waiting", id="passes"),
        pytest.param(
            AuthError("ec2:DescribeInstances is missing", cloud=CLOUD), "problems", id="does-not-pass"
        ),
    ],
)
def test_a_cloud_that_cannot_be_asked(world: World, trouble: ProvisionError, where: str) -> None:
    world.machines.common = [GROUP]
    world.machines.trouble, world.machines.is_deaf = trouble, True
    assert world.bench.tidy().view()[where] == (f"memory cannot be listed: {trouble.message}",)
    assert world.machines.common == [GROUP]


def test_what_cannot_be_removed_is_told_once(world: World) -> None:
    def refuse(call: str, token: str) -> None:
        if call == "remove":
            raise AuthError("ec2:DeleteVolume is missing", cloud=CLOUD)

    world.machines.before = refuse
    world.machines.left = [DISK]
    world.bench.tidy()
    for _ in range(3):
        world.time.sleep(AGAIN_S)
        (problem,) = world.bench.tidy().problems
        assert problem == "disk d-1 in memory/us cannot be removed: ec2:DeleteVolume is missing"
    assert [line.kind for line in world.bench.events] == ["NotRemoved"]


def test_the_sweeper_comes_again_and_outlives_a_bug(world: World) -> None:
    sweeps = 0

    def count(owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        nonlocal sweeps
        sweeps += 1
        if sweeps == 2:
            raise LookupError("a bug")
        world.time.sleep(AGAIN_S)
        return list(world.machines.left)

    world.machines.left = [DISK]
    world.machines.orphans = count  # type: ignore[method-assign]
    sweeper = Sweeper(world.bench.garbage_collector, (CLOUD,), every_s=0.001)
    sweeper.start()
    until(lambda: not world.machines.left and sweeps > 3, "the end of the disk")
    sweeper.stop()
    sweeper.join()
    assert [line.kind for line in world.bench.events] == ["Removed"]


class TestForgettingAndLaunching:
    """The second one waits, or gives way: a launch never finds half of what it needs."""

    def test_nothing_is_forgotten_while_a_machine_lives(self, world: World) -> None:
        world.machines.common = [GROUP]
        world.launch()
        (sentence,) = world.bench.fleet.delete_shared("own")
        assert "m-1" in sentence
        assert world.machines.common == [GROUP]

    def test_nothing_is_forgotten_while_a_launch_is_under_way(self, world: World) -> None:
        said: list[str] = []

        def meanwhile(call: str, token: str) -> None:
            if call == "create":
                said.extend(world.bench.fleet.delete_shared("own"))

        world.machines.common = [GROUP]
        world.machines.before = meanwhile
        world.launch()
        assert said == ["memory has a launch under way, so nothing that machines share is removed"]
        assert world.machines.common == [GROUP]

    def test_a_launch_that_begins_meanwhile_waits(self, world: World) -> None:
        order_of_calls: list[str] = []
        forgetting = threading.Event()
        launch = threading.Thread(target=lambda: (forgetting.wait(), world.launch()))  # type: ignore[func-returns-value]

        def slow(call: str, token: str) -> None:
            if call == "delete_shared":
                forgetting.set()
                launch.join(timeout=0.2)  # it cannot end, for it waits for us
                assert launch.is_alive()
            order_of_calls.append(call)

        world.machines.before = slow
        world.machines.common = [GROUP]
        launch.start()
        assert list(world.bench.fleet.delete_shared("own")) == []
        launch.join()
        assert order_of_calls == ["delete_shared", "create"]
        assert world.machines.live() == [TOKEN]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("at", range(4))
def test_a_controller_that_dies_at_any_call_leaves_the_rest_to_the_next(at: int, moment: str) -> None:
    world = World()
    world.launch()
    world.launch("own-chat-2-0a1b2c3d4e")
    world.launch("them-chat-1-0a1b2c3d4e", owner="them")
    world.machines.left, world.machines.common = [DISK], [GROUP]
    calls = 0

    def die(call: str, token: str) -> None:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise KilledError

    setattr(world.machines, moment, die)
    try:
        world.bench.end_strays()
        world.bench.settle(world.time.sleep)
    except KilledError:
        world.restart()
    setattr(world.machines, moment, lambda call, token: None)
    world.bench.end_strays()
    done = world.bench.settle(world.time.sleep)
    assert done.problems == ()
    assert world.machines.live() == ["them-chat-1-0a1b2c3d4e"]
    assert (world.machines.left, world.machines.common) == ([], [])
    assert world.bench.orphans(Part.INSTANCE) == []
