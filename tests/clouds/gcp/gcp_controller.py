"""What a controller does with a `GcpMachines`, for tests: orders, retries, restarts, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from policies.model import CapacityType, Zone
from provisioners.gcp.machines import GcpMachines
from provisioners.port.errors import TransientError
from provisioners.port.vm import Machine, MachineOrder
from tests.clouds.gcp.gcp_ground import PROJECT
from tests.clouds.gcp.gcp_server import serving
from tests.clouds.gcp.gcp_world import World

OWNER = "0a1b2c3d"
ZONE = Zone("gcp", "us-central1", "us-central1-a")
SOURCE = "198.51.100.7"

T = TypeVar("T")


class Controller:
    """One make-believe Google Cloud, and a client that requests machines. A restart forgets everything."""

    def __init__(self, world: World, url: str) -> None:
        self.world = world
        self.url = url
        self.machines = self.another()

    def another(self, **options: Any) -> GcpMachines:
        """One more process that uses the project."""
        clock = self.world.clock
        usual = {"project": PROJECT, "endpoint": self.url, "now": clock.now, "sleep": clock.sleep}
        every: dict[str, Any] = {**usual, **options}
        return GcpMachines(**every)

    def restart(self) -> None:
        self.world.is_down, self.world.crash = False, None
        self.machines = self.another()

    def insist(self, act: Callable[[], T]) -> T:
        """As a controller does: transient errors are waited for, a bounded number of times."""
        for _ in range(20):
            try:
                return act()
            except TransientError as error:
                self.world.advance(error.retry_after_s)
        return act()

    def create(self, order: MachineOrder) -> Machine:
        return self.insist(lambda: self.machines.create(order))

    def listed(self, owner: str = OWNER) -> dict[str, Machine]:
        """By token."""
        return {machine.token: machine for machine in self.insist(lambda: self.machines.machines(owner))}


@contextmanager
def controller(world: World | None = None) -> Iterator[Controller]:
    """On the way out: the fake's responses were all valid, and no one ever had two machines for one order."""
    world = world or World()
    with serving(world) as url:
        yield Controller(world, url)
    assert world.violations == []
    assert world.refused == []
    assert all(count == 1 for count in world.launches.values()), world.launches


FIRST = "0a1b2c3d-chat-1-0123456789"


def order_of(token: str = FIRST, **changes: Any) -> MachineOrder:
    defaults: dict[str, Any] = {
        "token": token,
        "owner": OWNER,
        "service": "Chat",
        "replica_id": 1,
        "rank": 0,
        "num_nodes": 1,
        "zone": ZONE,
        "instance_type": "g2-standard-8",
        "capacity_type": CapacityType.SPOT,
        "public_key": "ssh-ed25519 AAAA controller",
        "user_data": "#!/bin/sh\ntrue\n",
        "accelerator": "L4",
        "accelerator_count": 1.0,
        "ports": (8080,),
        "sources": (f"{SOURCE}/32",),
    }
    return MachineOrder(**{**defaults, **changes})


def eventually(controller: Controller, token: str, holds: Callable[[Machine], bool]) -> Machine:
    """The machine once that holds of it; polls in virtual time, a bounded number of times."""
    for _ in range(60):
        machine = controller.listed()[token]
        if holds(machine):
            return machine
        controller.world.advance(2.0)
    raise AssertionError(controller.listed()[token])
