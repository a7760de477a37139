"""Azure through its unmodified SDK, over HTTP, against a world that is as strict as we know Azure to be."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from policies.model import CapacityType, FailureKind, Role, Zone
from provisioners.azure.machines import AzureMachines
from provisioners.azure.translate import group_name
from provisioners.port.errors import (
    AuthError,
    CapacityError,
    InvalidRequestError,
    ProvisionError,
    QuotaError,
    Refusal,
    RefusedError,
    TransientError,
)
from provisioners.port.vm import Level, Machine, MachineState
from tests.clouds.azure.azure_harness import EASTUS_1, OWNER, SERVICE, T4, azure, order
from tests.clouds.azure.azure_server import AzureServer
from tests.clouds.azure.azure_world import DISK, IP, KEY, NET, NIC, NSG, VM, Facts, World

GROUP = group_name(OWNER, SERVICE, "eastus")
PUT_VM = r"/virtualMachines/chat-7$"
ON_DEMAND = CapacityType.ON_DEMAND


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    assert world.violations == []


@pytest.fixture
def server(world: World) -> Iterator[AzureServer]:
    with AzureServer(world).running() as server:
        yield server


@pytest.fixture
def cloud(server: AzureServer) -> AzureMachines:
    return azure(server)


def only(machines: object) -> Machine:
    (machine,) = machines  # type: ignore[misc]
    assert isinstance(machine, Machine)
    return machine


def nothing_but_records(world: World) -> bool:
    world.pass_time(60)
    return world.parts() == []


# --- Create -----------------------------------------------------------------------------------------------------------


def test_a_machine_is_created_and_told_as_it_is(cloud: AzureMachines, world: World) -> None:
    created = cloud.create(order())
    assert created.state is MachineState.RUNNING
    machine = only(cloud.machines(OWNER))
    assert replace(machine, address=None, private_address=None) == created
    assert (machine.token, machine.owner, machine.service, machine.replica_id) == (
        "chat-7",
        OWNER,
        SERVICE,
        7,
    )
    assert (machine.zone, machine.capacity_type) == (EASTUS_1, CapacityType.SPOT)
    assert (machine.address, machine.private_address) == ("203.0.113.1", "10.64.0.4")
    assert machine.launched_at is not None
    assert 0 <= world.clock.now() - machine.launched_at < 60


def test_one_put_makes_the_machine_with_all_that_goes_with_it(
    cloud: AzureMachines, server: AzureServer
) -> None:
    cloud.create(order(disk_gb=200))
    (put,) = [call for call in server.calls if call.method == "PUT" and "/virtualMachines/" in call.path]
    properties = put.body["properties"]
    assert put.path.split("/")[4] == GROUP
    assert put.body["zones"] == ["1"]
    assert properties["priority"] == "Spot"
    assert properties["evictionPolicy"] == "Delete"
    assert properties["billingProfile"] == {"maxPrice": -1}
    assert base64.b64decode(properties["osProfile"]["customData"]) == b"#!/bin/sh\necho ready\n"
    assert properties["storageProfile"]["osDisk"]["diskSizeGB"] == 200
    assert put.body["tags"]["team"] == "ml"
    assert put.body["tags"]["skyserve-owner"] == OWNER


def test_an_on_demand_machine_without_a_gpu(cloud: AzureMachines, server: AzureServer) -> None:
    cloud.create(order(capacity_type=ON_DEMAND, accelerator=None, instance_type="Standard_D2s_v5"))
    (put,) = [call for call in server.calls if call.method == "PUT" and "/virtualMachines/" in call.path]
    assert not {"priority", "evictionPolicy", "billingProfile"} & set(put.body["properties"])
    assert put.body["properties"]["storageProfile"]["imageReference"]["publisher"] == "Canonical"
    assert only(cloud.machines(OWNER)).capacity_type is ON_DEMAND


def test_a_region_without_zones(cloud: AzureMachines, server: AzureServer) -> None:
    zone = Zone("azure", "northcentralus", "northcentralus")
    cloud.create(order(zone=zone))
    (put,) = [call for call in server.calls if call.method == "PUT" and "/virtualMachines/" in call.path]
    assert "zones" not in put.body
    assert only(cloud.machines(OWNER)).zone == zone


def test_with_private_addresses_no_address_is_rented(server: AzureServer, world: World) -> None:
    cloud = azure(server, use_private_ip=True)
    cloud.create(order())
    assert world.alive(IP) == []
    machine = only(cloud.machines(OWNER))
    assert machine.address == machine.private_address == "10.64.0.4"


def test_addresses_are_listed_for_new_machines_only(server: AzureServer, world: World) -> None:
    cloud = azure(server)

    def lists_of_addresses() -> int:
        before = len(server.calls)
        machines = cloud.machines(OWNER)
        assert all(machine.address and machine.private_address for machine in machines)
        paths = [call.path for call in server.calls[before:]]
        return sum(path.endswith(("/publicIPAddresses", "/networkInterfaces")) for path in paths)

    cloud.create(order())
    assert (lists_of_addresses(), lists_of_addresses()) == (2, 0)
    cloud.create(order(token="chat-8"))
    assert (lists_of_addresses(), lists_of_addresses()) == (2, 0)
    assert len({machine.address for machine in cloud.machines(OWNER)}) == 2


def test_in_a_subnet_of_the_user_no_network_is_made(server: AzureServer, world: World) -> None:
    azure(server).create(order(service="other"))
    (network,) = [each.id for each in world.resources.values() if each.kind == NET]
    azure(server, subnet_ids={"eastus": f"{network}/subnets/mine"}).create(order())
    assert len(world.alive(NET)) == 1
    assert len(world.alive(VM)) == 2


def test_the_same_order_twice_is_one_machine(cloud: AzureMachines, world: World) -> None:
    first, second = cloud.create(order()), cloud.create(order())
    assert (first.id, first.launched_at) == (second.id, second.launched_at)
    assert world.alive() == ["chat-7"]
    assert world.launched == 1


def test_the_same_order_from_8_threads_is_one_machine(server: AzureServer, world: World) -> None:
    clouds = [azure(server), azure(server)]  # two processes, four threads each
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: clouds[number % 2].create(order()), range(8)))
    assert len({machine.id for machine in made}) == 1
    assert world.launched == 1
    assert world.parts() == ["chat-7", "chat-7-ip", "chat-7-nic", "chat-7-os"]


def test_8_orders_at_once_set_the_network_up_once(
    cloud: AzureMachines, server: AzureServer, world: World
) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: cloud.create(order(f"chat-{number}", replica_id=number)), range(8)))
    assert len(cloud.machines(OWNER)) == 8
    assert len(world.alive(NIC)) == len(world.alive(DISK)) == 8
    assert [
        server.count("PUT", f"/{kind}/[^/]+$") for kind in ("networkSecurityGroups", "virtualNetworks")
    ] == [1, 1]
    assert server.count("PUT", "/resourceGroups/[^/]+$") == 1


def test_a_machine_that_is_long_in_coming_is_pending(cloud: AzureMachines, world: World) -> None:
    world.allocate_s = 300.0
    assert cloud.create(order()).state is MachineState.PENDING
    assert only(cloud.machines(OWNER)).state is MachineState.PENDING
    world.pass_time(300)
    assert only(cloud.machines(OWNER)).state is MachineState.RUNNING


def test_what_boots_it_is_told_what_it_is_made_of(cloud: AzureMachines, world: World) -> None:
    booted: list[Facts] = []
    gone: list[Facts] = []
    world.on_launch, world.on_gone = booted.append, gone.append
    cloud.destroy(cloud.create(order()))
    world.pass_time(60)
    assert booted == gone
    assert (booted[0].private_ip, booted[0].user_data) == ("10.64.0.4", "#!/bin/sh\necho ready\n")


# --- Network ----------------------------------------------------------------------------------------------------------


def rules(world: World) -> dict[str, tuple[list[str], list[str]]]:
    """By name: sources and ports."""
    (group,) = [each for each in world.resources.values() if each.kind == NSG]
    found = {rule["name"]: rule["properties"] for rule in group.body["properties"]["securityRules"]}
    assert all((rule["access"], rule["direction"]) == ("Allow", "Inbound") for rule in found.values())
    return {
        name: (rule["sourceAddressPrefixes"], rule["destinationPortRanges"]) for name, rule in found.items()
    }


def test_nothing_is_open_but_what_the_order_names(cloud: AzureMachines, world: World) -> None:
    cloud.create(order())
    us = ["198.51.100.7/32"]
    assert rules(world) == {"skyserve-ssh": (us, ["22"]), "skyserve-ports": (us, ["8080"])}


def test_an_order_without_sources_opens_nothing(cloud: AzureMachines, world: World) -> None:
    cloud.create(order(sources=()))
    assert rules(world) == {}


def test_ports_add_up(server: AzureServer, world: World) -> None:
    azure(server).create(order())
    azure(server).create(order("chat-8", ports=(9090,)))
    assert rules(world)["skyserve-ports"] == (["198.51.100.7/32"], ["8080", "9090"])


def test_a_load_balancers_open_port_is_not_open_on_replicas(cloud: AzureMachines, world: World) -> None:
    cloud.create(order())
    cloud.create(order("chat-lb", role=Role.LOAD_BALANCER, ports=(), public_ports=(8080,)))
    groups = [each for each in world.resources.values() if each.kind == NSG]
    names = [{rule["name"] for rule in group.body["properties"]["securityRules"]} for group in groups]
    assert names == [{"skyserve-ssh", "skyserve-ports"}, {"skyserve-ssh", "skyserve-public"}]


def test_what_fits_already_is_not_written_again(server: AzureServer) -> None:
    azure(server).create(order())
    azure(server).create(order("chat-8"))
    assert server.count("PUT", "/networkSecurityGroups/") == server.count("PUT", "/virtualNetworks/") == 1


def test_a_network_that_somebody_deleted_is_set_up_again(cloud: AzureMachines, world: World) -> None:
    cloud.create(order())
    world.lose_group(GROUP)
    assert cloud.create(order("chat-8")).state is MachineState.RUNNING
    assert world.alive() == ["chat-8"]


def test_a_group_that_takes_long_to_be_deleted_is_told_of(server: AzureServer, world: World) -> None:
    cloud = azure(server)
    cloud.destroy(cloud.create(order()))
    world.pass_time(60)
    world.delete_s = 2000.0
    (problem,) = cloud.delete_shared(OWNER)
    assert "still being deleted" in problem
    with pytest.raises(TransientError, match="being deleted"):
        azure(server).create(order("chat-8"))


# --- Errors -----------------------------------------------------------------------------------------------------------

QUOTA = (
    "Operation could not be completed as it results in exceeding approved standardNCASv3_T4Family Cores quota. "
    "Additional details - Location: eastus, Current Limit: 0, (Minimum) New Limit Required: 4."
)


@pytest.mark.parametrize(
    ("status", "code", "message", "error", "says"),
    [
        (409, "SkuNotAvailable", "not available in eastus", CapacityError, "no room for spot machines"),
        (409, "AllocationFailed", "no capacity", CapacityError, "another zone"),
        (409, "OperationNotAllowed", QUOTA, QuotaError, "'standardNCASv3_T4Family Cores'"),
        (
            400,
            "PublicIPCountLimitReached",
            "Cannot create more than 10",
            QuotaError,
            "'PublicIPCountLimitReached'",
        ),
        (403, "AuthorizationFailed", "action 'Microsoft.Compute/virtualMachines/write'", AuthError, "/write"),
        (401, "ExpiredAuthenticationToken", "expired", AuthError, "az login"),
        (404, "SubscriptionNotFound", "not found", AuthError, "subscription"),
        (409, "MissingSubscriptionRegistration", "'Microsoft.Compute'", AuthError, "az provider register"),
        (404, "PlatformImageNotFound", "a:b:c:d", RefusedError, "check `image`"),
        (400, "InvalidParameter", "vmSize", RefusedError, "vmSize"),
        (500, "InternalServerError", "oops", TransientError, "sent again"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalnum() else "",
)
def test_each_error_is_told_as_what_to_do_next_and_leaves_nothing(
    cloud: AzureMachines,
    server: AzureServer,
    world: World,
    status: int,
    code: str,
    message: str,
    error: type[ProvisionError],
    says: str,
) -> None:
    server.fail("PUT", PUT_VM, status, code, message, times=100)
    with pytest.raises(ProvisionError, match=says) as caught:
        cloud.create(order())
    assert type(caught.value) is error
    assert (caught.value.cloud, caught.value.code) == ("azure", code)
    assert caught.value.zone == EASTUS_1
    assert caught.value.__cause__ is not None
    assert world.parts() == []
    assert cloud.machines(OWNER) == []


def test_a_quota_of_the_world_is_named_and_dated(cloud: AzureMachines, world: World) -> None:
    world.quota["eastus", "lowPriorityCores"] = 4
    cloud.create(order())
    with pytest.raises(QuotaError, match=r"'LowPriorityCores'.*raised to 8 or more") as caught:
        cloud.create(order("chat-8"))
    assert caught.value.retry_at is not None
    assert caught.value.retry_at > world.clock.now()
    assert world.alive() == ["chat-7"]


@pytest.mark.parametrize("capacity_type", list(CapacityType))
@pytest.mark.parametrize(
    ("zone", "code"), [(EASTUS_1, "Overconstrained"), (Zone("azure", "eastus", "eastus"), "Alloc")]
)
def test_an_allocation_that_fails_after_it_was_accepted_is_undone(
    cloud: AzureMachines, world: World, capacity_type: CapacityType, zone: Zone, code: str
) -> None:
    world.failing = "later"
    world.room[zone.name, T4, capacity_type is CapacityType.SPOT] = 0
    with pytest.raises(CapacityError, match=code):
        cloud.create(order(zone=zone, capacity_type=capacity_type))
    assert nothing_but_records(world)
    assert cloud.machines(OWNER) == []
    world.room.clear()
    assert cloud.create(order("chat-8", zone=zone)).state is MachineState.RUNNING


def test_a_spot_machine_that_vanishes_before_it_ran_is_no_capacity(
    cloud: AzureMachines, world: World
) -> None:
    world.failing = "vanishes"
    world.room["eastus-1", T4, True] = 0
    with pytest.raises(CapacityError, match="took the spot machine back"):
        cloud.create(order())
    assert world.parts() == []


def test_a_404_right_after_the_put_is_no_end(cloud: AzureMachines, world: World) -> None:
    world.absent_s = 10.0
    assert cloud.create(order()).state is MachineState.RUNNING


def test_a_failure_that_nobody_waited_for_shows_as_failed(cloud: AzureMachines, world: World) -> None:
    world.failing, world.allocate_s = "later", 300.0
    world.room["eastus-1", T4, True] = 0
    cloud.create(order())
    world.pass_time(300)
    machine = only(cloud.machines(OWNER))
    assert machine.state is MachineState.FAILED
    assert "OverconstrainedZonalAllocationRequest" in machine.message
    assert machine.refusal == Refusal(FailureKind.CAPACITY)
    cloud.destroy(machine)
    assert nothing_but_records(world)


def test_a_failed_machine_that_is_found_is_undone_and_raised(server: AzureServer, world: World) -> None:
    world.failing, world.allocate_s = "later", 300.0
    world.room["eastus-1", T4, True] = 0
    azure(server).create(order())
    world.pass_time(300)
    with pytest.raises(CapacityError):
        azure(server).create(order())
    world.pass_time(1)
    assert nothing_but_records(world)


def test_a_lost_answer_is_asked_for_again(cloud: AzureMachines, server: AzureServer, world: World) -> None:
    server.fail("PUT", PUT_VM, 0, is_after=True)
    assert cloud.create(order()).state is MachineState.RUNNING
    assert (world.alive(), world.launched) == (["chat-7"], 1)
    assert server.count("PUT", PUT_VM) == 2


def test_an_error_after_the_effect_is_no_second_machine(
    cloud: AzureMachines, server: AzureServer, world: World
) -> None:
    server.fail("PUT", PUT_VM, 500, "InternalServerError", "oops", is_after=True, times=100)
    with pytest.raises(TransientError):
        cloud.create(order())
    server.faults.clear()
    assert cloud.create(order()).state is MachineState.RUNNING
    assert world.launched == 1


def test_throttling_is_waited_out_as_azure_says(
    cloud: AzureMachines, server: AzureServer, world: World
) -> None:
    before = world.clock.now()
    server.fail("PUT", PUT_VM, 429, "TooManyRequests", "slow", headers={"Retry-After": "17"}, times=2)
    cloud.create(order())
    assert world.clock.now() - before >= 34
    assert server.count("PUT", PUT_VM) == 3


def test_throttling_for_minutes_is_handed_to_the_caller(cloud: AzureMachines, server: AzureServer) -> None:
    server.fail("PUT", PUT_VM, 429, "TooManyRequests", "slow", headers={"Retry-After": "240"})
    with pytest.raises(TransientError) as caught:
        cloud.create(order())
    assert caught.value.retry_after_s == 240
    assert server.count("PUT", PUT_VM) == 1


def test_calls_that_never_get_through_are_bounded(cloud: AzureMachines, server: AzureServer) -> None:
    server.fail("GET", "/virtualMachines/chat-7$", 503, "ServerTimeout", "busy", times=100)
    with pytest.raises(TransientError):
        cloud.create(order())
    assert len(server.calls) == 5


def test_nobody_listens(world: World) -> None:
    server = AzureServer(world)
    server.url = "http://127.0.0.1:1"
    with pytest.raises(TransientError, match="no response from Azure"):
        azure(server).machines(OWNER)


def test_a_refused_token_is_no_absence(server: AzureServer) -> None:
    azure(server).create(order())
    with pytest.raises(AuthError, match="az login"):
        azure(server, token="bad").machines(OWNER)
    with pytest.raises(AuthError):
        azure(server, token="bad").create(order())


def test_a_missing_subscription_is_no_absence(cloud: AzureMachines, server: AzureServer) -> None:
    machine = cloud.create(order())
    server.fail("GET", "/virtualMachines/chat-7$", 404, "SubscriptionNotFound", "gone", times=5)
    with pytest.raises(AuthError):
        cloud.create(order())
    server.fail("DELETE", "/virtualMachines/chat-7$", 404, "SubscriptionNotFound", "gone")
    with pytest.raises(AuthError):
        cloud.destroy(machine)


def test_a_record_that_cannot_be_written_takes_the_machine_with_it(
    cloud: AzureMachines, server: AzureServer, world: World
) -> None:
    server.fail(
        "PUT", "/sshPublicKeys/", 403, "AuthorizationFailed", "Microsoft.Compute/sshPublicKeys/write", times=9
    )
    with pytest.raises(AuthError, match="sshPublicKeys/write"):
        cloud.create(order())
    assert nothing_but_records(world)


@pytest.mark.parametrize("zone", ["westeurope-1", "eastus-x", "eastus1"])
def test_a_zone_that_is_none(cloud: AzureMachines, server: AzureServer, zone: str) -> None:
    with pytest.raises(InvalidRequestError, match="is no zone of eastus"):
        cloud.create(order(zone=Zone("azure", "eastus", zone)))
    assert server.count("PUT", "/virtualMachines/") == 0


# --- Dying ------------------------------------------------------------------------------------------------------------


def test_destroying_takes_everything_and_is_remembered(cloud: AzureMachines, world: World) -> None:
    cloud.destroy(cloud.create(order()))
    assert only(cloud.machines(OWNER)).state is MachineState.STOPPING
    assert nothing_but_records(world)
    assert only(cloud.machines(OWNER)).state is MachineState.TERMINATED


def test_destroying_twice_is_destroying(cloud: AzureMachines, world: World) -> None:
    machine = cloud.create(order())
    cloud.destroy(machine)
    cloud.destroy(machine)
    world.pass_time(60)
    cloud.destroy(machine)
    assert only(cloud.machines(OWNER)).state is MachineState.TERMINATED


def test_destroying_what_went_with_its_group(cloud: AzureMachines, world: World) -> None:
    machine = cloud.create(order())
    world.lose_group(GROUP)
    cloud.destroy(machine)
    assert cloud.machines(OWNER) == []


def test_a_spot_machine_that_azure_took_is_preempted(cloud: AzureMachines, world: World) -> None:
    machine = cloud.create(order())
    world.preempt("chat-7")
    assert only(cloud.machines(OWNER)).state is MachineState.STOPPING
    world.pass_time(60)
    dead = only(cloud.machines(OWNER))
    assert (dead.state, dead.id, dead.zone) == (MachineState.PREEMPTED, machine.id, machine.zone)
    assert dead.message
    assert world.parts() == []
    assert only(cloud.machines(OWNER)).state is MachineState.PREEMPTED  # and stays so
    cloud.destroy(dead)
    assert only(cloud.machines(OWNER)).state is MachineState.PREEMPTED


def test_an_on_demand_machine_that_is_gone_is_terminated(cloud: AzureMachines, world: World) -> None:
    cloud.create(order(capacity_type=ON_DEMAND))
    world.strip("chat-7")
    assert only(cloud.machines(OWNER)).state is MachineState.TERMINATED


@pytest.mark.parametrize(
    ("end", "state"),
    [("preempted", MachineState.PREEMPTED), ("destroyed", MachineState.TERMINATED)],
)
def test_the_order_of_a_dead_machine_is_that_machine(
    server: AzureServer, world: World, end: str, state: MachineState
) -> None:
    machine = azure(server).create(order())
    if end == "preempted":
        world.preempt("chat-7")
    else:
        azure(server).destroy(machine)
    again = azure(server).create(order())
    assert (again.id, again.state) == (machine.id, MachineState.STOPPING)
    world.pass_time(60)
    again = azure(server).create(order())
    assert (again.id, again.state) == (machine.id, state)
    assert (world.parts(), world.launched) == ([], 1)


@pytest.mark.parametrize(
    ("power", "capacity_type", "state"),
    [
        ("stopped", CapacityType.SPOT, MachineState.FAILED),
        ("stopped", ON_DEMAND, MachineState.FAILED),
        ("deallocated", CapacityType.SPOT, MachineState.PREEMPTED),
        ("deallocated", ON_DEMAND, MachineState.FAILED),
    ],
)
def test_a_machine_that_is_switched_off(
    cloud: AzureMachines, world: World, power: str, capacity_type: CapacityType, state: MachineState
) -> None:
    cloud.create(order(capacity_type=capacity_type))
    world.pass_time(60)
    world.switch_off("chat-7", power)
    machine = only(cloud.machines(OWNER))
    assert machine.state is state
    assert machine.message
    cloud.destroy(machine)
    assert nothing_but_records(world)


# --- Listing ----------------------------------------------------------------------------------------------------------


def test_other_owners_are_not_seen_and_not_touched(cloud: AzureMachines, world: World) -> None:
    cloud.create(order())
    theirs = cloud.create(order(owner="owner-2"))
    assert only(cloud.machines(OWNER)).owner == OWNER
    cloud.destroy(only(cloud.machines(OWNER)))
    world.pass_time(60)
    assert cloud.delete_shared(OWNER) == []
    assert only(cloud.machines("owner-2")).id == theirs.id
    assert only(cloud.machines("owner-2")).state is MachineState.RUNNING
    assert cloud.machines("owner-3") == []


def test_a_gang_and_several_regions_over_many_pages(cloud: AzureMachines) -> None:
    west = Zone("azure", "westeurope", "westeurope-2")
    for rank in range(4):
        token = "chat-7" if rank == 0 else f"chat-7-n{rank}"
        cloud.create(order(token, rank=rank, num_nodes=4))
    cloud.create(order("chat-9", zone=west, service="other"))
    found = cloud.machines(OWNER)
    assert [(machine.token, machine.rank, machine.num_nodes) for machine in found] == [
        ("chat-7", 0, 4),
        ("chat-7-n1", 1, 4),
        ("chat-7-n2", 2, 4),
        ("chat-7-n3", 3, 4),
        ("chat-9", 0, 1),
    ]
    assert len({machine.address for machine in found}) == 5
    assert found[-1].zone == west


def test_a_list_that_is_late_makes_nobody_dead(cloud: AzureMachines, world: World) -> None:
    cloud.create(order())
    (record,) = [each for each in world.resources.values() if each.kind == KEY]
    world.unseen_s = 1000.0
    assert cloud.machines(OWNER) == []  # neither is seen yet
    record.since -= 1000.0
    assert only(cloud.machines(OWNER)).state is MachineState.RUNNING


@pytest.mark.parametrize(
    "path", ["Compute/virtualMachines$", "Compute/sshPublicKeys$", "networkInterfaces$", "publicIPAddresses$"]
)
def test_a_part_of_the_truth_is_an_error(cloud: AzureMachines, server: AzureServer, path: str) -> None:
    cloud.create(order())
    server.fail("GET", f"/providers/Microsoft.*{path}", 403, "AuthorizationFailed", "read", times=9)
    with pytest.raises(AuthError):
        cloud.machines(OWNER)


# --- Leftovers --------------------------------------------------------------------------------------------------------


def test_a_world_in_order_has_no_leftovers(cloud: AzureMachines) -> None:
    cloud.create(order())
    assert cloud.orphans(OWNER) == []


def test_what_a_machine_left_is_found_and_removed(cloud: AzureMachines, world: World) -> None:
    cloud.create(order())
    cloud.create(order("chat-8"))
    world.strip("chat-7")
    found = cloud.orphans(OWNER)
    assert [(left.kind, left.id.rsplit("/", 1)[-1], left.region) for left in found] == [
        ("network interface", "chat-7-nic", "eastus"),
        ("public address", "chat-7-ip", "eastus"),
        ("disk", "chat-7-os", "eastus"),
    ]
    assert cloud.orphans("owner-2") == []
    with pytest.raises(TransientError, match="PublicIPAddressCannotBeDeleted"):
        cloud.remove(found[1])
    for left in found:
        cloud.remove(left)
        world.pass_time(5)
    for left in found:
        cloud.remove(left)
    assert world.parts() == ["chat-8", "chat-8-ip", "chat-8-nic", "chat-8-os"]
    assert cloud.orphans(OWNER) == []


def test_a_spot_machine_that_is_only_switched_off_is_a_leftover(cloud: AzureMachines, world: World) -> None:
    cloud.create(order())
    world.pass_time(60)
    world.switch_off("chat-7", "deallocated")
    (left,) = cloud.orphans(OWNER)
    cloud.remove(left)
    assert nothing_but_records(world)
    assert only(cloud.machines(OWNER)).state is MachineState.PREEMPTED


def test_records_of_the_long_dead_are_leftovers(cloud: AzureMachines, world: World) -> None:
    cloud.destroy(cloud.create(order()))
    world.pass_time(3600)
    assert cloud.orphans(OWNER) == []
    world.pass_time(24 * 3600)
    (left,) = cloud.orphans(OWNER)
    cloud.remove(left)
    cloud.remove(left)
    assert cloud.machines(OWNER) == []


def test_forgetting_removes_everything_of_the_owner(cloud: AzureMachines, world: World) -> None:
    for zone in (EASTUS_1, Zone("azure", "westeurope", "westeurope-1")):
        cloud.create(order(f"chat-{zone.region}", zone=zone))
    (problem, _) = cloud.delete_shared(OWNER)
    assert "still has machines: chat-eastus" in problem
    for machine in cloud.machines(OWNER):
        cloud.destroy(machine)
    world.pass_time(60)
    assert cloud.delete_shared(OWNER) == []
    assert world.resources == {}
    assert cloud.delete_shared(OWNER) == []


# --- Prices and checks ------------------------------------------------------------------------------------------------


def test_spot_prices_come_from_the_public_list(cloud: AzureMachines, world: World) -> None:
    common = {
        "currencyCode": "USD",
        "unitPrice": 0.11,
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "isPrimaryMeterRegion": True,
        "armSkuName": T4,
        "productName": "Virtual Machines NCasT4_v3 Series",
        "effectiveStartDate": "2026-05-01T00:00:00Z",
    }
    spot = {"meterName": "NC4as T4 v3 Spot", "skuName": "NC4as T4 v3 Spot"}
    for region, price in (("eastus", 0.11), ("westeurope", 0.19)):
        world.prices += [
            {
                **common,
                "armRegionName": region,
                "meterName": "NC4as T4 v3",
                "skuName": "NC4as T4 v3",
                "retailPrice": 0.5,
            },
            {
                **common,
                "armRegionName": region,
                **spot,
                "retailPrice": 9.0,
                "productName": "NCasT4_v3 Series Windows",
            },
            {
                **common,
                "armRegionName": region,
                **spot,
                "retailPrice": 9.0,
                "meterName": "Low Priority",
                "skuName": "x",
            },
            {**common, "armRegionName": region, **spot, "retailPrice": price},
        ]
    assert cloud.spot_prices(["eastus", "westeurope"]) == {
        (T4, region + zone): price
        for region, price in (("eastus", 0.11), ("westeurope", 0.19))
        for zone in ("", "-1", "-2", "-3")
    }
    assert cloud.spot_prices(["northcentralus"]) == {}


def findings(cloud: AzureMachines) -> dict[str, str]:
    return {one.what: one.message for one in cloud.check() if one.level is not Level.FINE}


def test_check_finds_nothing_wrong(cloud: AzureMachines, server: AzureServer) -> None:
    assert findings(cloud) == {}
    assert cloud.check()[0].what == "credentials"
    assert {call.method for call in server.calls} == {"GET"}


def test_check_stops_at_bad_credentials(server: AzureServer) -> None:
    (finding,) = azure(server, token="bad").check()
    assert not finding.ok
    assert "az login" in finding.message


def test_check_names_what_is_missing(cloud: AzureMachines, world: World) -> None:
    world.actions = ["Microsoft.Compute/*", "Microsoft.Network/*", "*/read"]
    world.not_actions = ["Microsoft.Network/publicIPAddresses/write"]
    world.registered = False
    world.quota = {("eastus", "lowPriorityCores"): 0, ("eastus", "standardNCASv3_T4Family"): 0}
    world.quota["eastus", "StandardNCADSA100v4Family"] = 0
    world.closed_sizes = {T4, "Standard_NC24ads_A100_v4"}
    told = findings(cloud)
    assert set(told) == {
        "permissions",
        "provider Microsoft.Compute",
        "provider Microsoft.Network",
        "spot quota in eastus",
        "GPU quota in eastus",
        "GPU sizes in eastus",
        "GPUs",
    }
    assert "resourceGroups/write" in told["permissions"]
    assert "publicIPAddresses/write" in told["permissions"]
    assert "virtualMachines/write" not in told["permissions"]
    assert "lowPriorityCores" in told["spot quota in eastus"]
    assert "standardNCASv3_T4Family" in told["GPU quota in eastus"]


def test_check_tells_of_a_dead_subscription(cloud: AzureMachines, world: World) -> None:
    world.subscription_state = "Disabled"
    assert findings(cloud) == {"credentials": "subscription 'Test' is disabled"}


def test_whose_things_there_are_is_known_by_the_tags_key(cloud: AzureMachines) -> None:
    assert cloud.owners() == []
    cloud.create(order())
    cloud.create(order("other-7", owner="owner-2"))
    assert cloud.owners() == [OWNER, "owner-2"]
