"""Azure's shapes, pure: states, names, bodies, rules, prices, permissions; and the two descriptions that check bodies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from azure.core.credentials import AccessToken
from azure.mgmt.compute.models import VirtualMachine
from azure.mgmt.network.models import SecurityRule

from policies.model import CapacityType, Zone
from provisioners.azure.check import missing_actions
from provisioners.azure.machines import AzureMachines
from provisioners.azure.network import rules_with
from provisioners.azure.prices import region_spot_prices, spot_prices_of
from provisioners.azure.settings import AzureSettings
from provisioners.azure.sovereign_clouds import CLOUDS
from provisioners.azure.translate import (
    NetworkIds,
    group_name,
    image_reference,
    machine_body,
    machine_state,
    zone_number,
)
from provisioners.port.errors import InvalidRequestError, ProvisionError
from provisioners.port.firewall import FirewallAccess
from provisioners.port.vm import MachineState
from tests.clouds.azure.azure_contract import by_models, by_table, request_problems
from tests.clouds.azure.azure_harness import order
from tests.clouds.azure.azure_world import VM

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
PLACE = NetworkIds("/subscriptions/s/subnets/machines", "/subscriptions/s/networkSecurityGroups/machines")


@pytest.mark.parametrize(
    ("provisioning", "power", "capacity_type", "state"),
    [
        ("Creating", "", SPOT, MachineState.PENDING),
        ("Creating", "starting", SPOT, MachineState.PENDING),
        ("Creating", "running", SPOT, MachineState.RUNNING),
        ("Succeeded", "running", SPOT, MachineState.RUNNING),
        ("Succeeded", "", SPOT, MachineState.RUNNING),
        ("Updating", "running", ON_DEMAND, MachineState.RUNNING),
        ("Failed", "", SPOT, MachineState.FAILED),
        ("Failed", "running", SPOT, MachineState.RUNNING),
        ("Failed", "stopped", ON_DEMAND, MachineState.FAILED),
        ("Succeeded", "stopped", ON_DEMAND, MachineState.FAILED),
        ("Succeeded", "stopping", SPOT, MachineState.FAILED),
        ("Succeeded", "deallocating", SPOT, MachineState.PREEMPTED),
        ("Succeeded", "deallocated", SPOT, MachineState.PREEMPTED),
        ("Succeeded", "deallocated", ON_DEMAND, MachineState.FAILED),
        ("Deleting", "running", SPOT, MachineState.STOPPING),
        ("Deleting", "", ON_DEMAND, MachineState.STOPPING),
    ],
)
def test_what_azure_says_of_a_machine(
    provisioning: str, power: str, capacity_type: CapacityType, state: MachineState
) -> None:
    assert machine_state(provisioning, power, capacity_type) is state


@pytest.mark.parametrize(("name", "number"), [("eastus-1", "1"), ("eastus-3", "3"), ("eastus", None)])
def test_the_number_of_a_zone(name: str, number: str | None) -> None:
    assert zone_number(Zone("azure", "eastus", name)) == number


@pytest.mark.parametrize("name", ["westus-1", "eastus-", "eastus-a", "1"])
def test_no_zone_of_the_region(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="write eastus-1"):
        zone_number(Zone("azure", "eastus", name))


def test_groups_of_owners_services_and_regions_are_apart_and_have_names_that_azure_takes() -> None:
    long = "a-very-" * 20
    names = {
        group_name(owner, service, region)
        for owner in ("a", "b")
        for service in ("chat", "Chat!", "a/b", long, long + "x")
        for region in ("eastus", "germanywestcentral")
    }
    assert len(names) == 20
    assert all(len(name) <= 90 and name[-1] not in ".-" for name in names)


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ("Canonical:ubuntu:server:latest", {"publisher": "Canonical", "offer": "ubuntu"}),
        ("/subscriptions/s/images/mine", {"id": "/subscriptions/s/images/mine"}),
        ("/SharedGalleries/g/Images/i", {"sharedGalleryImageId": "/SharedGalleries/g/Images/i"}),
        ("/CommunityGalleries/g/Images/i", {"communityGalleryImageId": "/CommunityGalleries/g/Images/i"}),
    ],
)
def test_names_of_images(image: str, reference: dict[str, str]) -> None:
    assert reference.items() <= image_reference(image).items()


@pytest.mark.parametrize("image", ["ubuntu", "a:b:c", "a:b:c:", "a:b:c:d:e"])
def test_no_name_of_an_image(image: str) -> None:
    with pytest.raises(InvalidRequestError, match="publisher:offer:sku:version"):
        image_reference(image)


# --- The descriptions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"capacity_type": ON_DEMAND},
        {"zone": Zone("azure", "eastus", "eastus")},
        {"disk_gb": 500},
        {"user_data": ""},
    ],
    ids=["spot", "on demand", "any zone", "a larger disk", "no user data"],
)
def test_what_we_send_fits_both_descriptions(changes: dict[str, Any]) -> None:
    for place in (PLACE, replace(PLACE, is_private=True)):
        assert request_problems(VM, machine_body(order(**changes), place, "a:b:c:d")) == []


def _properties(body: Any) -> Any:
    return body["properties"]


def _card(body: Any) -> Any:
    return body["properties"]["networkProfile"]["networkInterfaceConfigurations"][0]["properties"]


@pytest.mark.parametrize(
    ("spoil", "by_whom"),
    [
        pytest.param(lambda b: _properties(b).update(evictionPolcy="Delete"), "both", id="a misspelt field"),
        pytest.param(
            lambda b: _card(b).update(deletOption="Delete"), "both", id="a misspelt field, deep down"
        ),
        pytest.param(lambda b: _properties(b).update(priority="Spotty"), "models", id="a value that is none"),
        pytest.param(
            lambda b: _properties(b).update(provisioningState="x"), "table", id="what only Azure writes"
        ),
        pytest.param(lambda b: b.pop("location"), "table", id="a field that is missing"),
        pytest.param(lambda b: b.update(zones="1"), "table", id="a text in place of a list"),
        pytest.param(lambda b: b["tags"].update(rank=1), "table", id="a number in place of a text"),
        pytest.param(
            lambda b: _properties(b)["storageProfile"]["osDisk"].update(diskSizeGB="9"),
            "table",
            id="a text as number",
        ),
        pytest.param(lambda b: _card(b).update(primary="yes"), "table", id="a text as boolean"),
    ],
)
def test_the_descriptions_see_what_is_wrong(spoil: Callable[[Any], object], by_whom: str) -> None:
    body = copy.deepcopy(machine_body(order(), PLACE, "a:b:c:d"))
    spoil(body)
    assert bool(by_table("VirtualMachine", body)) == (by_whom in ("table", "both"))
    assert bool(by_models(VirtualMachine, body)) == (by_whom in ("models", "both"))


# --- Rules ------------------------------------------------------------------------------------------------------------


HERE = FirewallAccess(frozenset({"10.0.0.0/8", "::/0"}), {"chat": frozenset({"192.0.2.7/32"})})


def opened(rules: list[dict[str, Any]]) -> dict[str, tuple[list[str], list[str]]]:
    return {
        rule["name"]: (
            rule["properties"]["sourceAddressPrefixes"],
            rule["properties"]["destinationPortRanges"],
        )
        for rule in rules
    }


def test_rules_are_of_ipv4_and_each_kind_of_port_has_its_own_sources() -> None:
    rules = rules_with([], HERE, "chat", (80, 9000), (443,))
    assert rules is not None
    assert opened(rules) == {
        "skyserve-ssh": (["10.0.0.0/8"], ["22"]),
        "skyserve-ports": (["10.0.0.0/8", "192.0.2.7/32"], ["80", "9000"]),
        "skyserve-public": (["0.0.0.0/0"], ["443"]),
    }
    assert len({rule["properties"]["priority"] for rule in rules}) == 3


def test_who_is_not_let_in_any_more_leaves_no_rule() -> None:
    before = [SecurityRule(rule) for rule in rules_with([], HERE, "chat", (80,), ()) or ()]
    after = rules_with(before, FirewallAccess(), "chat", (80,), ())
    assert after == []


def test_rules_that_fit_are_left_alone() -> None:
    before = [SecurityRule(rule) for rule in rules_with([], HERE, "chat", (80,), (443,)) or ()]
    assert rules_with(before, HERE, "chat", (80,), (443,)) is None


def test_rules_of_the_user_stay() -> None:
    theirs = {
        "name": "vpn",
        "properties": {"priority": 100, "destinationPortRange": "1194", "access": "Deny"},
    }
    rules = rules_with([SecurityRule(theirs)], FirewallAccess(frozenset({"10.0.0.0/8"})), "chat", (), ())
    assert rules is not None
    assert rules[0]["name"] == "vpn"
    assert rules[0]["properties"]["access"] == "Deny"
    assert rules[1]["properties"]["priority"] == 101


# --- Prices and permissions -------------------------------------------------------------------------------------------

NOW = 1_780_000_000.0  # 28 May 2026


def _item(price: float, **changes: Any) -> dict[str, Any]:
    return {
        "currencyCode": "USD",
        "retailPrice": price,
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "armSkuName": "Standard_NC4as_T4_v3",
        "armRegionName": "eastus",
        "productName": "Virtual Machines NCasT4_v3 Series",
        "meterName": "NC4as T4 v3 Spot",
        "skuName": "NC4as T4 v3 Spot",
        "effectiveStartDate": "2026-05-01T00:00:00Z",
    } | changes


@pytest.mark.parametrize(
    ("others", "price"),
    [
        pytest.param([], 0.1, id="the one price"),
        pytest.param(
            [_item(9, productName="Virtual Machines NCasT4_v3 Series Windows")], 0.1, id="not of Windows"
        ),
        pytest.param([_item(9, meterName="NC4as T4 v3", skuName="NC4as T4 v3")], 0.1, id="not on demand"),
        pytest.param(
            [_item(9, meterName="x Low Priority", skuName="x Low Priority")], 0.1, id="not Low Priority"
        ),
        pytest.param(
            [_item(9, productName="NCasT4_v3 Series Dedicated Host")], 0.1, id="not of dedicated hosts"
        ),
        pytest.param([_item(9, type="Reservation")], 0.1, id="not reserved"),
        pytest.param([_item(9, currencyCode="EUR")], 0.1, id="not in euros"),
        pytest.param([_item(9, effectiveStartDate="2026-06-01T00:00:00Z")], 0.1, id="not to come"),
        pytest.param([_item(0.2, effectiveStartDate="2026-05-20T00:00:00Z")], 0.2, id="the newest"),
        pytest.param([_item(9, effectiveStartDate="2026-01-20T00:00:00Z")], 0.1, id="not an old one"),
        pytest.param([_item(0.3)], 0.3, id="of two the dearer"),
        pytest.param([_item(0)], 0.1, id="nothing is free"),
    ],
)
def test_which_price_counts(others: list[dict[str, Any]], price: float) -> None:
    for items in ([_item(0.1), *others], [*others, _item(0.1)]):
        assert spot_prices_of(items, NOW) == {"Standard_NC4as_T4_v3": price}


def test_a_list_without_end_is_left() -> None:
    calls = 0

    def endless(url: str, params: object) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        return {"Items": [_item(0.1)], "NextPageLink": "again"}

    assert region_spot_prices(endless, "first", "eastus", NOW)["Standard_NC4as_T4_v3", "eastus-2"] == 0.1
    assert calls < 1000


READ, WRITE, JOIN = (
    "Microsoft.Compute/disks/read",
    "Microsoft.Compute/disks/write",
    "Microsoft.Network/x/join/action",
)


@pytest.mark.parametrize(
    ("granted", "missing"),
    [
        pytest.param([], [READ, WRITE, JOIN], id="nothing"),
        pytest.param([{"actions": ["*"]}], [], id="everything"),
        pytest.param([{"actions": ["*/read"]}], [WRITE, JOIN], id="a reader"),
        pytest.param(
            [{"actions": ["microsoft.compute/*"]}], [JOIN], id="of one provider, in another spelling"
        ),
        pytest.param([{"actions": ["*"], "notActions": ["*/write"]}], [WRITE], id="all but"),
        pytest.param(
            [{"actions": ["*"], "notActions": ["*/write"]}, {"actions": ["*/write"]}], [], id="by another"
        ),
    ],
)
def test_which_actions_are_missing(granted: list[dict[str, Any]], missing: list[str]) -> None:
    assert missing_actions(granted, [READ, WRITE, JOIN]) == missing


@pytest.mark.parametrize(
    ("cloud", "url", "audience", "login"),
    [
        ("public", "https://management.azure.com", "management.azure.com", "login.microsoftonline.com"),
        (
            "us_government",
            "https://management.usgovcloudapi.net",
            "usgovcloudapi.net",
            "login.microsoftonline.us",
        ),
        ("china", "https://management.chinacloudapi.cn", "chinacloudapi.cn", "login.chinacloudapi.cn"),
    ],
)
def test_a_cloud_of_azure_has_its_own_address_audience_and_login(
    cloud: str, url: str, audience: str, login: str
) -> None:
    sovereign = CLOUDS[cloud]
    assert (sovereign.arm_url, sovereign.authority) == (url, login)
    requested: list[str] = []

    class Credential:
        def get_token(self, *scopes: str, **_: object) -> AccessToken:
            requested.extend(scopes)
            return AccessToken("t", 2_000_000_000)

    settings = AzureSettings(
        "00000000-aaaa-bbbb-cccc-000000000005", cloud=cloud, arm_url="https://127.0.0.1:9"
    )
    machines = AzureMachines(settings, credential=Credential(), sleep=lambda seconds: None)
    with pytest.raises(ProvisionError):
        machines.machines("own")
    assert requested
    assert all(audience in scope for scope in requested)
