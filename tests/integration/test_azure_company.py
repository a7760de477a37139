"""Azure as companies set it up: subnets and keys of their own, tags on everything, no public addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from policies.model import Scope
from provisioners.port.errors import RefusedError
from provisioners.port.vm import Finding, Level
from tests.clouds.azure.azure_harness import OWNER, azure, order
from tests.clouds.azure.azure_server import AzureServer
from tests.clouds.azure.azure_world import DISK, GROUP, NET, VM, World

LABELS = {"cost-center": "42"}
SET = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/diskEncryptionSets/models"
WAY = "way out of "


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    assert world.violations == []


@pytest.fixture
def server(world: World) -> Iterator[AzureServer]:
    with AzureServer(world).running() as server:
        yield server


def subnet(world: World, **properties: Any) -> str:
    """The id of a subnet of a network that is there."""
    group = f"/subscriptions/{world.subscription}/resourceGroups/company"
    network = f"{group}/providers/Microsoft.Network/virtualNetworks/models"
    world.put(group, GROUP, {"location": "eastus"})
    subnets = [{"name": "gpus", "properties": {"addressPrefix": "10.1.0.0/24", **properties}}]
    body = {
        "location": "eastus",
        "properties": {"addressSpace": {"addressPrefixes": ["10.1.0.0/16"]}, "subnets": subnets},
    }
    world.put(network, NET, body)
    return f"{network}/subnets/gpus"


def ways(found: Any) -> list[Finding]:
    return [one for one in found if one.what.startswith(WAY)]


@pytest.mark.parametrize(
    ("encryption", "sent"),
    [(None, None), (SET, {"id": SET}), ({"eastus": SET}, {"id": SET})],
    ids=["none", "one", "by region"],
)
def test_disks_are_encrypted_by_the_set(server: AzureServer, encryption: Any, sent: Any) -> None:
    azure(server, disk_encryption_set=encryption).create(order())
    (put,) = [call for call in server.calls if call.method == "PUT" and "/virtualMachines/" in call.path]
    disk = put.body["properties"]["storageProfile"]["osDisk"]
    assert disk["managedDisk"].get("diskEncryptionSet") == sent


def test_a_policy_for_keys_of_the_customer_is_met(server: AzureServer, world: World) -> None:
    world.requires_encryption_set = True
    with pytest.raises(RefusedError, match="customer-managed key"):
        azure(server).create(order())
    with pytest.raises(RefusedError, match="has none for eastus") as caught:
        azure(server, disk_encryption_set={"westeurope": SET}).create(order())
    assert caught.value.scope is Scope.REGION
    azure(server, disk_encryption_set=SET).create(order())


def test_everything_carries_the_labels(server: AzureServer, world: World) -> None:
    """Refused otherwise, as a policy does it."""
    world.required_tags = frozenset(LABELS)
    machine_order = order(labels=LABELS)
    with pytest.raises(RefusedError, match="Require a tag"):
        azure(server).create(machine_order)
    cloud = azure(server, labels=LABELS)
    machine = cloud.create(machine_order)
    lacking = [
        each.id for each in world.resources.values() if each.body.get("tags", {}).get("cost-center") != "42"
    ]
    assert lacking == []
    assert len({each.kind for each in world.resources.values()}) == 8  # of all that there is
    cloud.destroy(machine)  # its record is written once more
    world.pass_time(60.0)
    assert cloud.machines(OWNER)[0].state.is_gone


def test_a_disk_that_takes_no_tags_keeps_no_machine_away(server: AzureServer, world: World) -> None:
    server.fail("PATCH", "/disks/", 403, "AuthorizationFailed")
    assert azure(server).create(order()).id
    (disk,) = [each for each in world.resources.values() if each.kind == DISK]
    assert "tags" not in disk.body
    azure(server).create(order())
    assert disk.body["tags"]["team"] == "ml"
    assert len(world.alive(VM)) == 1


def test_private_machines_without_a_way_out_are_a_note(server: AzureServer, world: World) -> None:
    assert ways(azure(server).check()) == []
    (own,) = ways(azure(server, use_private_ip=True).check())
    assert (own.level, "clouds.azure.subnets" in own.message) == (Level.NOTE, True)


@pytest.mark.parametrize(
    ("properties", "level"),
    [
        pytest.param({}, Level.NOTE, id="no way out"),
        pytest.param({"natGateway": {"id": "/subscriptions/s/nat"}}, Level.FINE, id="NAT gateway"),
        pytest.param({"routeTable": {"id": "/subscriptions/s/routes"}}, Level.FINE, id="routes"),
    ],
)
def test_the_check_looks_at_the_subnet(
    server: AzureServer, world: World, properties: dict[str, Any], level: Level
) -> None:
    path = subnet(world, **properties)
    (found,) = ways(azure(server, use_private_ip=True, subnet_ids={"eastus": path}).check())
    assert found.level is level


@pytest.mark.parametrize("gone", ["subnets/gpus", "virtualNetworks/models"])
def test_a_subnet_that_is_not_there_is_missing(server: AzureServer, world: World, gone: str) -> None:
    path = subnet(world).replace(gone, f"{gone}-2")
    (found,) = ways(azure(server, use_private_ip=True, subnet_ids={"eastus": path}).check())
    assert (found.level, "check clouds.azure.subnets" in found.message) == (Level.MISSING, True)


def test_a_subnet_of_another_subscription_cannot_be_looked_at(server: AzureServer, world: World) -> None:
    path = subnet(world).replace(world.subscription, "00000000-0000-0000-0000-000000000001")
    (found,) = ways(azure(server, use_private_ip=True, subnet_ids={"eastus": path}).check())
    assert (found.level, "not determined" in found.message) == (Level.NOTE, True)
