"""The smallest custom role on Azure: enough for `serve check` and a whole life, and what lacks is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from policies.model import CapacityType
from provisioners import permissions
from provisioners.port.errors import ProvisionError
from provisioners.port.vm import Level
from tests.clouds.azure.azure_harness import OWNER, azure, order
from tests.clouds.azure.azure_server import AzureServer
from tests.clouds.azure.azure_world import World

ACTIONS: list[str] = json.loads(permissions.text_of("azure"))["Actions"]

#: Used where this life does not come: groups of images, registration, what is only left over after trouble.
ELSEWHERE = {
    "Microsoft.Authorization/permissions/read",
    "Microsoft.Compute/disks/read",
    "Microsoft.Compute/locations/usages/read",
    "Microsoft.Compute/register/action",
    "Microsoft.Compute/skus/read",
    "Microsoft.Compute/sshPublicKeys/delete",
    "Microsoft.Compute/sshPublicKeys/read",
    "Microsoft.Network/networkInterfaces/read",
    "Microsoft.Network/networkSecurityGroups/read",
    "Microsoft.Network/publicIPAddresses/delete",
    "Microsoft.Network/publicIPAddresses/read",
    "Microsoft.Network/register/action",
    "Microsoft.Network/virtualNetworks/read",
    "Microsoft.Resources/subscriptions/providers/read",
    "Microsoft.Resources/subscriptions/read",
    "Microsoft.Resources/subscriptions/resourceGroups/read",
}


@pytest.fixture
def server() -> Iterator[AzureServer]:
    world = World()
    world.actions = list(ACTIONS)
    with AzureServer(world).running() as serving:
        yield serving
    assert world.violations == []


def live(server: AzureServer) -> list[str]:
    """Launches, lists, orphaned resources, the end. Sentences of what failed."""
    said: list[str] = []

    def attempt(step: Callable[[], Any]) -> Any:
        try:
            return step()
        except ProvisionError as error:
            said.append(str(error))
            return None

    cloud, clock = azure(server), server.world.clock
    orders = (order(), order("chat-8", replica_id=8, capacity_type=CapacityType.ON_DEMAND))
    made = [attempt(lambda one=one: cloud.create(one)) for one in orders]
    clock.sleep(120.0)
    attempt(lambda: cloud.machines(OWNER))
    attempt(lambda: cloud.orphans(OWNER))
    for machine in made:
        if machine is not None:
            attempt(lambda machine=machine: cloud.destroy(machine))
    clock.sleep(300.0)
    said += attempt(lambda: cloud.delete_shared(OWNER)) or []
    return said


def test_the_role_is_enough_for_a_whole_life(server: AzureServer) -> None:
    assert live(server) == []


def test_the_role_passes_the_check(server: AzureServer) -> None:
    assert [one for one in azure(server).check() if one.level is Level.MISSING] == []


@pytest.mark.parametrize("action", ACTIONS)
def test_what_the_role_lacks_is_named(server: AzureServer, action: str) -> None:
    server.world.actions = [one for one in ACTIONS if one != action]
    missing = [one.message for one in azure(server).check() if one.level is not Level.FINE]
    assert any(action in sentence for sentence in missing)
    if action not in ELSEWHERE:
        assert any(action.lower() in sentence.lower() for sentence in live(server))
