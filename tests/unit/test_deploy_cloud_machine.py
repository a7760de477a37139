"""The machine of a controller in a cloud: one, found again, and terminated with all that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from policies.model import CapacityType, Offer, Role
from provisioners.port.base import Requirements
from provisioners.port.vm import CONTROLLER_OWNER, OrphanedResource
from skyserve_cli.deployment.cloud_machine import CloudTarget, ControllerMachine, MachineFiles
from skyserve_cli.home import Home
from skyserve_cli.output import CommandFailed
from tests.clouds.memory_machines import CLOUD, ZONES, MemoryMachines

TARGET = CloudTarget(CLOUD, "us")


class Killed(BaseException):
    """As `kill -9`: nothing after it is run."""


@dataclass
class Cloud:
    machines: MemoryMachines
    opened: list[str] = field(default_factory=list)

    def offers(self, need: Requirements) -> Sequence[Offer]:
        region = need.candidates[0].region
        zones = [zone for zone in ZONES if zone.region == region]
        return [Offer(zone, "small", None, 0.0, CapacityType.ON_DEMAND, 0.1, 0.1) for zone in zones]

    def open_for(self, owner: str) -> None:
        self.opened.append(owner)

    def delete_shared(self, owner: str) -> Sequence[str]:
        return self.machines.delete_shared(owner)


@dataclass
class World:
    folder: Path
    now: float = 1000.0
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = MemoryMachines(lambda: self.now, late_s=20.0)
        self.home = Home(self.folder, "")
        self.files = MachineFiles(self.home, TARGET)

    def machine(self) -> ControllerMachine:
        """As the next command sees it."""
        return ControllerMachine(
            Cloud(self.memory), TARGET, self.files, self.said.append, now=lambda: self.now, sleep=self.sleep
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def live(self) -> list[str]:
        return [token for token, kept in self.memory.kept.items() if kept.end is None]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def kill(world: World, call: str, *, after: bool) -> None:
    def hook(name: str, token: str) -> None:
        if name == call:
            world.memory.before = world.memory.after = lambda name, token: None
            raise Killed

    if after:
        world.memory.after = hook
    else:
        world.memory.before = hook


def test_it_is_launched_with_an_owner_of_its_own_and_without_a_lease(world: World) -> None:
    machine = world.machine()
    made = machine.launch("small", "image")
    (kept,) = world.memory.kept.values()
    assert made.owner == machine.owner == kept.order.owner
    assert machine.owner.startswith(CONTROLLER_OWNER)
    assert (kept.order.role, kept.order.image, kept.order.ports) == (Role.CONTROLLER, "image", ())
    assert "deadman" not in kept.order.user_data
    world.now += 30
    found = world.machine().find()
    assert found is not None
    assert found.id == made.id
    assert {path.stat().st_mode & 0o077 for path in world.files.folder.iterdir()} == {0}


@pytest.mark.parametrize("after", [False, True], ids=["before the call", "after it"])
@pytest.mark.parametrize("instance_type", ["small", "large"])
def test_a_killed_launch_leads_to_one_machine(world: World, after: bool, instance_type: str) -> None:
    kill(world, "create", after=after)
    with pytest.raises(Killed):
        world.machine().launch("small", None)
    again = world.machine()
    assert again.find() is None  # it is not listed yet
    again.launch(instance_type, None)
    assert len(world.live()) == 1


def test_a_killed_launch_is_repeated_in_its_zone_though_another_has_room_again(world: World) -> None:
    world.memory.room["us-a", CapacityType.ON_DEMAND] = 0
    kill(world, "create", after=True)
    with pytest.raises(Killed):
        world.machine().launch("small", None)
    world.memory.room.clear()
    world.machine().launch("small", None)
    assert [kept.order.zone.name for kept in world.memory.kept.values()] == ["us-b"]


def test_the_reason_of_each_zone_is_shown_and_nothing_is_left(world: World) -> None:
    world.memory.room = {(zone.name, CapacityType.ON_DEMAND): 0 for zone in ZONES}
    with pytest.raises(CommandFailed, match="no machine can be launched"):
        world.machine().launch("small", None)
    assert world.live() == []
    began = world.now
    world.machine().terminate()  # without waiting for what cannot be there
    assert world.now == began


def test_one_that_was_terminated_by_other_means_is_replaced(world: World) -> None:
    first = world.machine().launch("small", None)
    world.memory.destroy(first)
    world.now += 3600
    second = world.machine().launch("small", None)
    assert (first.id != second.id, len(world.live())) == (True, 1)


def test_an_unlisted_machine_is_waited_for_before_its_end(world: World) -> None:
    kill(world, "create", after=True)
    with pytest.raises(Killed):
        world.machine().launch("small", None)
    world.memory.left = [OrphanedResource("disk", "d", "us")]
    world.memory.common = [OrphanedResource("group", "g", "us")]
    world.machine().terminate()
    assert (world.live(), world.memory.left, world.memory.common) == ([], [], [])


def test_a_killed_termination_is_completed(world: World) -> None:
    world.machine().launch("small", None)
    world.now += 30
    kill(world, "destroy", after=False)
    with pytest.raises(Killed):
        world.machine().terminate()
    world.machine().terminate()
    assert world.live() == []
    with pytest.raises(CommandFailed, match="has no region mars"):
        ControllerMachine(
            Cloud(world.memory), CloudTarget(CLOUD, "mars"), world.files, print, now=lambda: 0.0
        ).zones()
