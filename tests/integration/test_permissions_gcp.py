"""The smallest custom role on Google Cloud: enough for `serve check` and a whole life, and what lacks is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from policies.model import CapacityType
from provisioners.gcp.check import PERMISSIONS
from provisioners.port.errors import ProvisionError
from provisioners.port.vm import Level
from tests.clouds.gcp.gcp_controller import OWNER, Controller, controller, order_of

SPOT = order_of()
ON_DEMAND = order_of("0a1b2c3d-chat-2-0123456789", capacity_type=CapacityType.ON_DEMAND, num_nodes=2)

#: Used where this life does not come (changed rules, global addresses, live prices, one machine by its name), only by the
#: check, or only to learn earlier how a launch went.
ELSEWHERE = {
    "compute.acceleratorTypes.list",
    "compute.firewalls.get",
    "compute.firewalls.update",
    "compute.globalAddresses.delete",
    "compute.globalAddresses.list",
    "compute.instances.get",
    "compute.machineTypes.list",
    "compute.networks.get",
    "compute.projects.get",
    "compute.regions.list",
    "compute.zoneOperations.get",
    "compute.zoneOperations.list",
}


@pytest.fixture
def gcp() -> Iterator[Controller]:
    with controller() as found:
        found.world.role = frozenset(PERMISSIONS)
        yield found


def live(gcp: Controller) -> list[str]:
    """Launches, lists, orphaned resources, the end. Sentences of what failed."""
    said: list[str] = []

    def attempt(step: Callable[[], Any]) -> Any:
        try:
            return gcp.insist(step)
        except ProvisionError as error:
            said.append(str(error))
            return None

    machines = gcp.machines
    made = [attempt(lambda order=order: machines.create(order)) for order in (SPOT, ON_DEMAND)]
    gcp.world.make_disk(SPOT.zone.name, "left", {"skyserve-owner": OWNER, "skyserve-token": "t-gone"}, [])
    gcp.world.make_address(SPOT.zone.region, "left", {"skyserve-owner": OWNER, "skyserve-token": "t-gone"})
    gcp.world.advance(7200.0)
    attempt(lambda: machines.machines(OWNER))
    left = attempt(lambda: machines.orphans(OWNER)) or []
    for one in left:
        attempt(lambda one=one: machines.remove(one))
    for machine in made:
        if machine is not None:
            attempt(lambda machine=machine: machines.destroy(machine))
    gcp.world.advance(300.0)
    said += attempt(lambda: machines.delete_shared(OWNER)) or []
    return said


def test_the_role_is_enough_for_a_whole_life(gcp: Controller) -> None:
    assert live(gcp) == []
    assert gcp.world.instances == {}


def test_the_role_passes_the_check(gcp: Controller) -> None:
    found = gcp.machines.check()
    assert [one for one in found if one.level is Level.MISSING] == []


@pytest.mark.parametrize("permission", PERMISSIONS)
def test_what_the_role_lacks_is_named(gcp: Controller, permission: str) -> None:
    gcp.world.role = frozenset(PERMISSIONS) - {permission}
    (missing,) = [one for one in gcp.machines.check() if one.level is Level.MISSING]
    assert permission in missing.what + missing.message
    if permission not in ELSEWHERE:
        gcp.restart()
        assert any(permission in sentence for sentence in live(gcp))
