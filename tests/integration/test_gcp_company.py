"""Google Cloud as companies set it up: custom subnets, Shared VPC, rules of their own, organisation policies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import yaml

from policies.model import Scope
from provisioners import permissions
from provisioners.gcp.check import PERMISSIONS
from provisioners.gcp.firewall_rules import prefix_of
from provisioners.gcp.network import TAG
from provisioners.port.errors import ProvisionError, QuotaError, RefusedError
from provisioners.port.firewall import FirewallAccess
from provisioners.port.vm import Finding, Level
from tests.clouds.gcp.gcp_controller import OWNER, SOURCE, ZONE, Controller, controller, order_of
from tests.clouds.gcp.gcp_ground import PROJECT, SHARED

INSERT = "compute.instances.insert"
ORDER = order_of()
NAME = f"s{ORDER.token}"
BLOCK, OTHER = f"{SOURCE}/32", "198.51.100.8/32"
KEY = "projects/p/locations/us-central1/keyRings/r/cryptoKeys/k"
OF_NETWORK = frozenset(yaml.safe_load(permissions.text_of("gcp-network"))["includedPermissions"])


@pytest.fixture
def gcp() -> Iterator[Controller]:
    with controller() as found:
        yield found


def card(gcp: Controller, name: str = NAME) -> dict[str, Any]:
    found: dict[str, Any] = gcp.world.instances[ZONE.name, name]["networkInterfaces"][0]
    return found


def shared_vpc(gcp: Controller) -> dict[str, str]:
    """A network of another project in custom subnet mode, as `subnets`."""
    gcp.world.add_network("company", project=SHARED, is_auto=False)
    return {"us-central1": gcp.world.add_subnetwork("us-central1", "models", "company", project=SHARED)}


def of(found: list[Finding] | Any, level: Level) -> dict[str, str]:
    return {one.what: one.message for one in found if one.level is level}


# --- subnetworks ------------------------------------------------------------------------------------------------------


def test_a_network_in_custom_mode_needs_a_subnetwork(gcp: Controller) -> None:
    gcp.world.add_network("company", is_auto=False)
    path = gcp.world.add_subnetwork("us-central1", "models", "company")
    with pytest.raises(RefusedError, match=r"clouds\.gcp\.subnets") as caught:
        gcp.another(network="company").create(ORDER)
    assert caught.value.scope is Scope.REGION
    for number, options in enumerate(({"network": "company"}, {})):
        gcp.another(subnets={"us-central1": path}, **options).create(order_of(f"chat-{number}"))
        assert card(gcp, f"chat-{number}")["subnetwork"].endswith(path)
    assert set(gcp.world.networks) == {"company"}
    assert gcp.world.reach("chat-1", 22, BLOCK)


def test_rules_of_a_shared_vpc_are_in_its_project_and_follow(gcp: Controller) -> None:
    machines = gcp.another(subnets=shared_vpc(gcp))
    machines.create(ORDER)
    assert (gcp.world.networks, gcp.world.firewalls) == ({}, {})
    assert len(gcp.world.host_firewalls) == 3
    assert [gcp.world.reach(NAME, port, BLOCK) for port in (22, 8080, 9000)] == [True, True, False]
    machines.admit(OWNER, FirewallAccess(frozenset({OTHER}), {"Chat": frozenset({"192.0.2.1/32"})}))
    assert [gcp.world.reach(NAME, 22, block) for block in (BLOCK, OTHER)] == [False, True]
    assert gcp.world.reach(NAME, 8080, "192.0.2.1/32")
    again = gcp.another(subnets=machines._setup.subnets)
    again.create(order_of("second"))
    assert len(gcp.world.host_firewalls) == 3
    assert machines.owners() == [OWNER]
    assert {one.kind for one in machines.shared(OWNER)} == {"firewall rule"}
    assert machines.delete_shared(OWNER) == []
    assert (set(gcp.world.host_networks), gcp.world.host_firewalls) == ({"company"}, {})


def test_a_network_of_another_project_is_named_by_its_path(gcp: Controller) -> None:
    gcp.world.add_network("company", project=SHARED, is_auto=False)
    path = gcp.world.add_subnetwork("us-central1", "models", "company", project=SHARED)
    network = f"projects/{SHARED}/global/networks/company"
    gcp.another(network=network, subnets={"us-central1": path}).create(ORDER)
    assert card(gcp)["network"].endswith(network)
    assert len(gcp.world.host_firewalls) == 3


def test_where_no_subnetwork_is_named_nothing_is_made(gcp: Controller) -> None:
    subnets = shared_vpc(gcp)
    east = order_of("east", zone=type(ZONE)("gcp", "us-east1", "us-east1-b"))
    with pytest.raises(RefusedError, match="no subnetwork for us-east1"):
        gcp.another(subnets=subnets).create(east)
    gone = {"us-central1": f"projects/{SHARED}/regions/us-central1/subnetworks/gone"}
    with pytest.raises(RefusedError, match=r"check clouds\.gcp\.subnets"):
        gcp.another(subnets=gone).create(ORDER)
    assert gcp.world.count("compute.networks.insert") == gcp.world.count(INSERT) == 0


def test_without_manage_firewall_no_rule_is_looked_at(gcp: Controller) -> None:
    machines = gcp.another(subnets=shared_vpc(gcp), manage_firewall=False)
    gcp.world.denied = {one for one in OF_NETWORK if ".firewalls." in one}
    machines.create(ORDER)
    machines.admit(OWNER, FirewallAccess(frozenset({BLOCK})))
    assert machines.delete_shared(OWNER) == []
    assert [call.id for call in gcp.world.calls if "firewalls" in call.id] == []
    assert gcp.world.instances[ZONE.name, NAME]["tags"]["items"] == [TAG, prefix_of(OWNER)]


def test_a_controller_that_dies_in_a_shared_vpc_leaves_one_machine_and_its_rules(gcp: Controller) -> None:
    subnets = shared_vpc(gcp)
    steps = 0
    for after in (False, True):
        for at in range(20):
            order = order_of(f"t-{after:d}-{at}", ports=(9000 + 100 * after + at,))
            gcp.world.crash = (at, after)
            with suppress(ProvisionError):
                gcp.another(subnets=subnets).create(order)
            died, gcp.world.crash, gcp.world.is_down = gcp.world.is_down, None, False
            steps += died
            machine = gcp.insist(lambda order=order: gcp.another(subnets=subnets).create(order))  # type: ignore[misc]
            assert gcp.world.reach(machine.id, order.ports[0], BLOCK)
            if not died:
                break
    assert steps > 8


# --- findings of the check ----------------------------------------------------------------------------------------------


def test_the_two_roles_are_enough_in_a_shared_vpc(gcp: Controller) -> None:
    subnets = shared_vpc(gcp)
    mine = {one for one in PERMISSIONS if one not in OF_NETWORK and ".networks." not in one}
    gcp.world.role = frozenset(mine | {"compute.firewalls.list"})
    gcp.world.host_role = OF_NETWORK
    machines = gcp.another(subnets=subnets)
    assert of(machines.check(), Level.MISSING) == {}
    machines.destroy(machines.create(ORDER))
    gcp.world.advance(60.0)
    assert machines.delete_shared(OWNER) == []


@pytest.mark.parametrize("permission", sorted(OF_NETWORK - {"compute.routers.list"}))
def test_what_the_project_of_the_network_does_not_give_is_named(gcp: Controller, permission: str) -> None:
    gcp.world.host_role = OF_NETWORK - {permission}
    missing = of(gcp.another(subnets=shared_vpc(gcp)).check(), Level.MISSING)
    assert len(missing) == 1
    assert permission in next(iter(missing))
    assert "--policy gcp-network" in next(iter(missing.values()))


def test_what_is_given_on_the_subnetwork_alone_counts(gcp: Controller) -> None:
    subnets = shared_vpc(gcp)
    gcp.world.host_role = frozenset()
    gcp.world.subnet_role = frozenset(one for one in OF_NETWORK if ".subnetworks." in one)
    machines = gcp.another(subnets=subnets, manage_firewall=False)
    assert of(machines.check(), Level.MISSING) == {}
    machines.create(ORDER)


@pytest.mark.parametrize(
    ("options", "nats", "said"),
    [
        pytest.param({}, [], "it has no Cloud NAT", id="a network of our own"),
        pytest.param({"subnets": True}, [], "company has no Cloud NAT in us-central1", id="subnets without"),
        pytest.param({"subnets": True}, ["us-east1"], "no Cloud NAT in us-central1", id="elsewhere"),
        pytest.param({"subnets": True}, ["us-central1"], "", id="subnets with"),
        pytest.param({"network": True}, [], "no Cloud NAT in any region", id="network without"),
        pytest.param({"network": True}, ["us-east1"], "", id="network with"),
        pytest.param(
            {"network": True, "regions": ("us-east1", "us-west1")},
            ["us-east1"],
            "NAT in us-west1",
            id="regions",
        ),
    ],
)
def test_private_machines_without_a_way_out_are_a_note(
    gcp: Controller, options: dict[str, Any], nats: list[str], said: str
) -> None:
    subnets = shared_vpc(gcp)
    for region in nats:
        gcp.world.add_nat(region, "company", project=SHARED)
    if "subnets" in options:
        options = {**options, "subnets": subnets}
    if "network" in options:
        options = {**options, "network": f"projects/{SHARED}/global/networks/company"}
    found = gcp.another(use_private_ip=True, **options).check()
    notes = of(found, Level.NOTE).get("way out of private networks", "")
    assert said in notes if said else notes == ""
    assert of(found, Level.MISSING) == {}
    assert "way out of private networks" not in {one.what for one in gcp.machines.check()}


def test_a_project_full_of_networks_says_what_to_set(gcp: Controller) -> None:
    gcp.world.add_network("first")
    gcp.world.quotas["", "NETWORKS"] = 1.0
    with pytest.raises(QuotaError, match=r"clouds\.gcp\.network") as caught:
        gcp.machines.create(ORDER)
    assert caught.value.scope is Scope.CLOUD
    gcp.world.quotas["", "NETWORKS"] = 0.0
    assert "clouds.gcp.subnets" in of(gcp.machines.check(), Level.NOTE)["quota NETWORKS"]
    assert "quota NETWORKS" not in of(gcp.another(network="first").check(), Level.NOTE)


# --- policies of the organisation -------------------------------------------------------------------------------------


def metadata(gcp: Controller) -> set[str]:
    return {item["key"] for item in gcp.world.instances[ZONE.name, NAME]["metadata"]["items"]}


def test_os_login_is_left_on_where_the_organisation_requires_it(gcp: Controller) -> None:
    gcp.world.requires_os_login = True
    gcp.machines.create(ORDER)
    assert not {"enable-oslogin", "ssh-keys"} & metadata(gcp)
    assert gcp.another().create(ORDER).id == NAME
    gcp.machines.create(order_of("second"))
    assert gcp.world.count(INSERT) == 3  # one was refused, and it was tried once only


def test_os_login_that_is_turned_off_against_the_policy_says_what_to_set(gcp: Controller) -> None:
    gcp.world.requires_os_login = True
    with pytest.raises(RefusedError, match=r"set clouds\.gcp\.os_login to auto or true"):
        gcp.another(os_login="false").create(ORDER)
    gcp.another(os_login="true").create(ORDER)
    assert "startup-script" in metadata(gcp)


@pytest.mark.parametrize("os_login", ["auto", "false"])
def test_os_login_is_turned_off_where_that_is_allowed(gcp: Controller, os_login: str) -> None:
    gcp.another(os_login=os_login).create(ORDER)
    assert {"enable-oslogin", "ssh-keys"} <= metadata(gcp)


def test_shielded_instances_meet_the_policy(gcp: Controller) -> None:
    gcp.world.requires_shielded = True
    with pytest.raises(RefusedError, match=r"clouds\.gcp\.shielded"):
        gcp.machines.create(ORDER)
    gcp.another(shielded=True).create(ORDER)


@pytest.mark.parametrize("key", [KEY, {"us-central1": KEY}], ids=["one", "by region"])
def test_disks_are_encrypted_by_the_key(gcp: Controller, key: Any) -> None:
    gcp.another(kms_key=key).create(ORDER)
    (inserted,) = [call for call in gcp.world.calls if call.id == INSERT]
    assert inserted.body["disks"][0]["diskEncryptionKey"] == {"kmsKeyName": KEY}


def test_a_region_without_a_key_is_refused(gcp: Controller) -> None:
    with pytest.raises(RefusedError, match="no key for us-central1") as caught:
        gcp.another(kms_key={"us-east1": KEY}).create(ORDER)
    assert caught.value.scope is Scope.REGION
    assert gcp.world.count(INSERT) == gcp.world.count("compute.networks.insert") == 0


def test_instances_and_disks_have_the_labels(gcp: Controller) -> None:
    gcp.world.required_labels = frozenset({"cost-center"})
    with pytest.raises(RefusedError, match="customConstraints"):
        gcp.machines.create(ORDER)
    gcp.machines.create(order_of(labels={"cost-center": "42"}))
    assert gcp.world.disks[ZONE.name, NAME]["labels"]["cost-center"] == "42"
    assert PROJECT in gcp.world.instances[ZONE.name, NAME]["selfLink"]
