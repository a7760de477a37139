"""`GcpMachines`: Google's own SDK against a make-believe Google Cloud that validates every request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from google.oauth2.credentials import Credentials

from policies.model import CapacityType, FailureKind, Zone
from provisioners.gcp.check import PERMISSIONS
from provisioners.gcp.machines import GcpMachines
from provisioners.gcp.network import prefix_of
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
from provisioners.port.vm import Level, MachineState, OrphanedResource
from tests.clouds.gcp.gcp_controller import OWNER, SOURCE, ZONE, Controller, controller, eventually, order_of
from tests.clouds.gcp.gcp_ground import sku
from tests.clouds.gcp.gcp_parts import Fault, MachineFacts, RealClock
from tests.clouds.gcp.gcp_world import World

S = MachineState
INSERT = "compute.instances.insert"
ORDER = order_of()
NAME = f"s{ORDER.token}"


@pytest.fixture
def gcp() -> Iterator[Controller]:
    with controller() as found:
        yield found


# --- life ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="spot with a built-in accelerator"),
        pytest.param({"capacity_type": CapacityType.ON_DEMAND}, id="on demand"),
        pytest.param({"instance_type": "n1-standard-8", "accelerator": "T4"}, id="n1 with an accelerator"),
        pytest.param({"instance_type": "n1-standard-8+1xnvidia-tesla-t4"}, id="n1 spelled out"),
        pytest.param(
            {"instance_type": "e2-small", "accelerator": None, "capacity_type": CapacityType.ON_DEMAND},
            id="without accelerators",
        ),
        pytest.param(
            {"disk_gb": 50, "image": "mine", "labels": {"team": "blue"}}, id="disk, image and labels"
        ),
    ],
)
def test_a_machine_is_listed_with_what_was_ordered(gcp: Controller, changes: dict[str, object]) -> None:
    order = order_of(**changes)
    made = gcp.machines.create(order)
    assert (made.token, made.state) == (order.token, S.PENDING)
    machine = eventually(gcp, order.token, lambda machine: machine.state is S.RUNNING)
    told = (machine.owner, machine.service, machine.replica_id, machine.rank, machine.num_nodes, machine.zone)
    assert told == (OWNER, "Chat", 1, 0, 1, ZONE)
    assert machine.capacity_type is order.capacity_type
    assert machine.address is not None
    assert machine.private_address is not None
    assert made.launched_at == machine.launched_at
    assert gcp.world.instances[ZONE.name, NAME]["labels"].items() >= dict(order.labels).items()


def test_the_world_learns_what_it_needs_to_boot_the_machine(gcp: Controller) -> None:
    booted: list[MachineFacts] = []
    gone: list[tuple[str, str]] = []
    gcp.world.on_launch, gcp.world.on_gone = booted.append, lambda name, why: gone.append((name, why))
    machine = gcp.machines.create(ORDER)
    assert [(facts.name, facts.private_ip, facts.user_data) for facts in booted] == [
        (NAME, machine.private_address, ORDER.user_data)
    ]
    assert booted[0].ssh_keys.endswith(ORDER.public_key)
    gcp.world.preempt(ZONE.name, NAME)
    gcp.world.advance(gcp.world.preemption_s)
    assert gone == [(NAME, "preempted")]


def test_the_address_is_the_private_one_where_we_are_inside(gcp: Controller) -> None:
    machine = gcp.another(use_private_ip=True).create(ORDER)
    assert machine.address == machine.private_address
    assert "accessConfigs" not in gcp.world.instances[ZONE.name, NAME]["networkInterfaces"][0]


def test_the_same_order_twice_is_the_same_machine(gcp: Controller) -> None:
    first = gcp.machines.create(ORDER)
    assert gcp.machines.create(ORDER).id == first.id
    assert gcp.another().create(ORDER).id == first.id
    assert gcp.world.count(INSERT) == 1


def test_the_same_order_from_many_threads_is_the_same_machine(gcp: Controller) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: gcp.create(ORDER), range(8)))
    assert {machine.id for machine in made} == {NAME}
    assert gcp.world.alive() == [NAME]


def test_the_same_order_from_many_controllers_is_the_same_machine(gcp: Controller) -> None:
    others = [gcp.another() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda other: gcp.insist(lambda: other.create(ORDER)), others))
    assert {machine.id for machine in made} == {NAME}
    assert len(gcp.world.networks) == 1


def test_different_orders_from_many_threads_are_different_machines(gcp: Controller) -> None:
    orders = [order_of(f"chat-{number}", replica_id=number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(gcp.create, orders))
    assert gcp.world.alive() == sorted(order.token for order in orders)
    assert {machine.replica_id for machine in gcp.listed().values()} == set(range(8))


def test_a_destroyed_machine_takes_its_disk_along_and_is_told_of(gcp: Controller) -> None:
    machine = gcp.machines.create(ORDER)
    gcp.machines.destroy(machine)
    assert gcp.listed()[ORDER.token].state is S.STOPPING
    assert eventually(gcp, ORDER.token, lambda machine: machine.state.is_gone).state is S.TERMINATED
    assert gcp.world.disks == {}
    gcp.machines.destroy(machine)
    assert gcp.listed()[ORDER.token].state is S.TERMINATED


@pytest.mark.parametrize("how", ["destroyed", "preempted", "deleted by somebody"])
def test_the_order_of_a_dead_machine_gives_the_dead_machine(gcp: Controller, how: str) -> None:
    machine = gcp.machines.create(ORDER)
    if how == "preempted":
        gcp.world.preempt(ZONE.name, NAME)
    else:
        (gcp.machines if how == "destroyed" else gcp.another()).destroy(machine)
    gcp.world.advance(7200.0)  # longer than idempotency keys are remembered
    expected = S.PREEMPTED if how == "preempted" else S.TERMINATED
    assert gcp.machines.create(ORDER).state is expected
    gcp.restart()
    assert gcp.machines.create(ORDER).state is expected
    assert gcp.listed()[ORDER.token].state is expected
    assert gcp.world.alive() == []


def test_destroying_what_never_was_is_success(gcp: Controller) -> None:
    machine = gcp.machines.create(ORDER)
    gcp.machines.destroy(replace(machine, id="never-was", token="never-was"))
    assert gcp.world.alive() == [NAME]
    assert set(gcp.listed()) == {ORDER.token}


def test_what_is_destroyed_while_it_is_made_does_not_stay(gcp: Controller) -> None:
    gcp.world.hidden_s, gcp.world.operation_s = 20.0, 20.0
    gcp.world.faults.append(Fault("compute.zoneOperations.wait", 401, "authError", "Invalid Credentials"))
    gcp.machines._network.ensure(ORDER)
    machine = gcp.machines.create(ORDER)  # accepted, and no one can see it yet
    assert machine.address is None
    gcp.insist(lambda: gcp.machines.destroy(machine))
    gcp.world.advance(60.0)
    assert gcp.world.alive() == []


@pytest.mark.parametrize("age_s", [0.0, 100.0], ids=["just made", "a while ago"])
def test_a_machine_that_is_not_listed_yet_is_not_taken_for_dead(gcp: Controller, age_s: float) -> None:
    gcp.world.list_lag_s = 300.0
    gcp.machines.create(ORDER)
    gcp.world.advance(age_s)
    assert gcp.listed()[ORDER.token].state in (S.PENDING, S.RUNNING)


# --- ends ---------------------------------------------------------------------------------------------------


def test_a_preemption_is_seen_coming_and_then_told(gcp: Controller) -> None:
    gcp.machines.create(ORDER)
    eventually(gcp, ORDER.token, lambda machine: machine.state is S.RUNNING)
    gcp.world.preempt(ZONE.name, NAME)
    going = gcp.listed()[ORDER.token]
    assert (going.state, going.preempt_at) == (S.STOPPING, gcp.world.clock.now() + gcp.world.preemption_s)
    gone = eventually(gcp, ORDER.token, lambda machine: machine.state.is_gone)
    assert (gone.state, gone.preempt_at) == (S.PREEMPTED, None)
    assert gcp.world.disks == {}


def test_the_dead_are_told_of_for_an_hour(gcp: Controller) -> None:
    gcp.machines.create(ORDER)
    gcp.world.preempt(ZONE.name, NAME)
    gcp.world.advance(60.0)
    assert gcp.listed()[ORDER.token].state is S.PREEMPTED
    before = gcp.world.count("compute.zoneOperations.list")
    assert gcp.listed()[ORDER.token].state is S.PREEMPTED
    assert gcp.world.count("compute.zoneOperations.list") == before  # the cloud is not asked again
    gcp.world.advance(3601.0)
    assert gcp.listed() == {}


def test_a_machine_that_was_stopped_is_to_be_destroyed(gcp: Controller) -> None:
    machine = gcp.machines.create(ORDER)
    gcp.world.stop(ZONE.name, NAME)
    assert gcp.listed()[ORDER.token].state is S.FAILED
    gcp.machines.destroy(machine)
    assert eventually(gcp, ORDER.token, lambda machine: machine.state.is_gone).state is S.TERMINATED


# --- refusals -----------------------------------------------------------------------------------------------

L4 = "PREEMPTIBLE_NVIDIA_L4_GPUS"
NO_PERMISSION = "Required 'compute.instances.create' permission for 'projects/proj-1'"

REFUSALS: dict[str, tuple[Fault, type[ProvisionError], str]] = {
    "no permission": (Fault(INSERT, 403, "forbidden", NO_PERMISSION), AuthError, "compute.instances.create"),
    "API not enabled": (
        Fault(INSERT, 403, "accessNotConfigured", "not used before"),
        AuthError,
        "gcloud services",
    ),
    "no billing": (Fault(INSERT, 403, "forbidden", "Billing account is disabled"), AuthError, "billing"),
    "stock-out at once": (Fault(INSERT, 503, "stockout", "none left"), CapacityError, "no spot capacity"),
    "quota": (
        Fault(INSERT, 403, "quotaExceeded", f"Quota '{L4}' exceeded.  Limit: 0.0 in region us-central1."),
        QuotaError,
        L4,
    ),
    "wrong": (Fault(INSERT, 400, "invalid", "Invalid value for field 'x'"), RefusedError, "field 'x'"),
}


@pytest.mark.parametrize(("fault", "raised", "told"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_refusal_leaves_nothing(
    gcp: Controller, fault: Fault, raised: type[ProvisionError], told: str
) -> None:
    gcp.world.faults.append(replace(fault, times=1))
    with pytest.raises(raised, match=told) as caught:
        gcp.machines.create(ORDER)
    assert caught.value.__cause__ is not None
    assert gcp.world.alive() == []
    assert gcp.listed() == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "retry_after_s"),
    [
        pytest.param(Fault(INSERT, 429, "rateLimitExceeded", headers={"Retry-After": "9"}), 9.0, id="429"),
        pytest.param(Fault(INSERT, 403, "rateLimitExceeded"), 15.0, id="403 of throttling"),
        pytest.param(Fault(INSERT, 503, "backendError"), 3.0, id="503"),
        pytest.param(Fault(INSERT, 500, "internalError"), 3.0, id="500"),
        pytest.param(Fault(INSERT), 3.0, id="connection breaks before"),
        pytest.param(Fault(INSERT, after=True), 3.0, id="connection breaks after"),
        pytest.param(Fault(INSERT, 500, "internalError", after=True), 3.0, id="500 after"),
    ],
)
def test_a_lost_answer_or_a_throttled_call_is_tried_again(
    gcp: Controller, fault: Fault, retry_after_s: float
) -> None:
    gcp.world.faults.append(replace(fault, times=1))
    with pytest.raises(TransientError) as caught:
        gcp.machines.create(ORDER)
    assert caught.value.retry_after_s == retry_after_s
    assert gcp.world.count(INSERT) == 1  # the SDK did not try again behind our back
    assert gcp.machines.create(ORDER).id == NAME
    assert gcp.world.alive() == [NAME]


def test_a_zone_without_room_is_refused_after_it_was_accepted(gcp: Controller) -> None:
    gcp.world.room[ZONE.name, True] = 0
    with pytest.raises(CapacityError, match="no spot capacity") as caught:
        gcp.machines.create(ORDER)
    assert (caught.value.code, caught.value.zone) == ("ZONE_RESOURCE_POOL_EXHAUSTED", ZONE)
    assert gcp.world.alive() == []
    assert gcp.world.disks == {}
    assert gcp.listed() == {}
    assert (
        gcp.machines.create(replace(ORDER, capacity_type=CapacityType.ON_DEMAND, token="other")).id == "other"
    )


def test_the_same_order_may_be_sent_again_after_a_stock_out(gcp: Controller) -> None:
    gcp.world.room[ZONE.name, True] = 0
    for _ in range(2):
        with pytest.raises(CapacityError):
            gcp.machines.create(ORDER)
    gcp.world.room.clear()
    assert gcp.machines.create(ORDER).id == NAME


@pytest.mark.parametrize(
    ("code", "status", "message", "raised"),
    [
        pytest.param("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", 503, "", CapacityError, id="stock-out"),
        pytest.param("UNSUPPORTED_OPERATION", 400, "preempted", CapacityError, id="preempted at once"),
        pytest.param(
            "QUOTA_EXCEEDED", 403, "Quota 'GPUS_ALL_REGIONS' exceeded globally.", QuotaError, id="quota"
        ),
        pytest.param("PERMISSIONS_ERROR", 403, NO_PERMISSION, AuthError, id="permission"),
        pytest.param("INVALID_USAGE", 400, "no", RefusedError, id="wrong"),
        pytest.param("INTERNAL_ERROR", 500, "oops", TransientError, id="internal error"),
    ],
)
def test_an_operation_that_fails_leaves_nothing(
    gcp: Controller, code: str, status: int, message: str, raised: type[ProvisionError]
) -> None:
    gcp.world.failing.append((code, message, status))
    with pytest.raises(raised) as caught:
        gcp.machines.create(ORDER)
    assert caught.value.code == code
    assert gcp.world.alive() == []
    assert gcp.machines.create(ORDER).id == NAME  # with a new key: the old one stands for the failure


def test_a_slow_creation_is_pending_and_may_fail_later(gcp: Controller) -> None:
    gcp.world.operation_s = 1.0
    gcp.machines._network.ensure(ORDER)
    gcp.world.operation_s = 150.0
    gcp.world.room[ZONE.name, True] = 0
    machine = gcp.machines.create(ORDER)
    assert machine.state is S.PENDING
    failed = eventually(gcp, ORDER.token, lambda machine: machine.state is S.FAILED)
    assert "does not have enough resources" in failed.message
    assert failed.refusal == Refusal(FailureKind.CAPACITY)
    gcp.machines.destroy(failed)
    assert gcp.listed()[ORDER.token].state is S.TERMINATED


def test_credentials_that_die_after_the_cloud_accepted_lose_no_machine(gcp: Controller) -> None:
    gcp.machines._network.ensure(ORDER)
    gcp.world.faults.append(Fault("compute.zoneOperations.wait", 401, "authError", "Invalid Credentials"))
    assert gcp.machines.create(ORDER).state is S.PENDING
    assert set(gcp.listed()) == {ORDER.token}


def test_dead_credentials_are_said_so_by_every_call(gcp: Controller) -> None:
    machine = gcp.machines.create(ORDER)
    gcp.world.dead_token = True
    for act in (
        lambda: gcp.machines.create(order_of("another")),
        lambda: gcp.machines.machines(OWNER),
        lambda: gcp.machines.destroy(machine),
        lambda: gcp.machines.orphans(OWNER),
    ):
        with pytest.raises(AuthError, match="gcloud auth"):
            act()
    gcp.world.dead_token = False
    assert gcp.world.alive() == [NAME]


@pytest.mark.parametrize(
    ("changes", "raised"),
    [
        pytest.param({"image": "nope"}, InvalidRequestError, id="image"),
        pytest.param({"labels": {"Team": "x"}}, InvalidRequestError, id="label"),
        pytest.param(
            {"instance_type": "e2-small", "accelerator": "T4"}, InvalidRequestError, id="accelerator"
        ),
        pytest.param({"sources": ("everywhere",)}, InvalidRequestError, id="source"),
        pytest.param({"instance_type": "a9-huge"}, RefusedError, id="type that is not offered"),
        pytest.param(
            {"instance_type": "n1-standard-8+1xnvidia-tesla-v100"},
            RefusedError,
            id="accelerator that is not offered",
        ),
    ],
)
def test_a_wrong_order_leaves_nothing(
    gcp: Controller, changes: dict[str, object], raised: type[ProvisionError]
) -> None:
    with pytest.raises(raised):
        gcp.machines.create(order_of(**changes))
    assert gcp.world.alive() == []
    assert gcp.world.disks == {}


def test_a_quota_that_is_used_up_is_named(gcp: Controller) -> None:
    gcp.world.quotas["us-central1", L4] = 1
    gcp.machines.create(ORDER)
    with pytest.raises(QuotaError, match=L4) as caught:
        gcp.machines.create(order_of("second"))
    assert caught.value.retry_at is not None
    assert caught.value.retry_at > gcp.world.clock.now()
    assert gcp.machines.create(order_of("third", zone=Zone("gcp", "us-east1", "us-east1-b"))).token == "third"


def test_a_project_that_is_not_there_is_not_an_empty_one(gcp: Controller) -> None:
    machine = gcp.machines.create(ORDER)
    with pytest.raises(AuthError):
        gcp.another(project="proj-2").destroy(machine)
    with pytest.raises(AuthError):
        gcp.another(project="proj-2").remove(
            OrphanedResource("disk", "zones/us-east1-b/disks/lost", "us-east1")
        )


@pytest.mark.parametrize("method", ["aggregatedList", "get"])
def test_the_sdk_does_not_try_again_behind_our_back(gcp: Controller, method: str) -> None:
    gcp.machines.create(ORDER)
    before = gcp.world.count(f"compute.instances.{method}")
    gcp.world.faults.append(Fault(f"compute.instances.{method}", 503, "backendError"))
    gcp.world.list_lag_s = 300.0
    with pytest.raises(TransientError):
        gcp.machines.machines(OWNER)
    assert gcp.world.count(f"compute.instances.{method}") == before + 1


# --- others -------------------------------------------------------------------------------------------------


def test_nobody_sees_another_owners_machines(gcp: Controller) -> None:
    gcp.machines.create(ORDER)
    gcp.machines.create(order_of("theirs", owner="somebody"))
    assert set(gcp.listed()) == {ORDER.token}
    assert set(gcp.listed("somebody")) == {"theirs"}
    assert gcp.listed("nobody") == {}


def test_an_instance_of_that_name_that_is_not_ours_is_left_alone(gcp: Controller) -> None:
    gcp.machines.create(replace(ORDER, owner="somebody"))
    with pytest.raises(InvalidRequestError, match="another owner"):
        gcp.machines.create(ORDER)
    gcp.world.operations.clear()  # so long ago that nothing is remembered of how it was made
    with pytest.raises(InvalidRequestError, match="another owner"):
        gcp.another().create(ORDER)
    assert gcp.listed() == {}
    assert gcp.world.alive() == [NAME]


def test_our_own_instance_is_adopted_when_nothing_is_remembered_of_its_making(gcp: Controller) -> None:
    gcp.machines.create(ORDER)
    gcp.world.operations.clear()
    gcp.world.advance(7200.0)
    gcp.restart()
    assert gcp.machines.create(ORDER).id == NAME


def test_all_pages_and_all_zones_are_listed(gcp: Controller) -> None:
    gcp.world.page_size = 2
    zones = [Zone("gcp", "us-central1", name) for name in gcp.world.zones[:3]] * 3
    for number, zone in enumerate(zones):
        gcp.machines.create(order_of(f"chat-{number}", zone=zone))
    assert {machine.zone for machine in gcp.listed().values()} == set(zones)
    assert len(gcp.listed()) == len(zones)


def test_a_list_that_lacks_a_zone_is_none(gcp: Controller) -> None:
    gcp.machines.create(ORDER)
    gcp.world.unreachable = {ZONE.name}
    with pytest.raises(TransientError, match=ZONE.name):
        gcp.machines.machines(OWNER)
    with pytest.raises(TransientError, match=ZONE.name):
        gcp.machines.orphans(OWNER)
    gcp.world.unreachable = set()
    assert set(gcp.listed()) == {ORDER.token}


# --- the network --------------------------------------------------------------------------------------------


def test_the_ports_are_open_to_the_sources_alone(gcp: Controller) -> None:
    gcp.machines.create(ORDER)
    gcp.machines.create(order_of("other", ports=(9000,)))
    world, block = gcp.world, f"{SOURCE}/32"
    assert [world.reach(NAME, port, block) for port in (22, 8080, 9000)] == [True, True, False]
    assert [world.reach("other", port, block) for port in (22, 8080, 9000)] == [True, False, True]
    assert not world.reach(NAME, 22, "0.0.0.0/0")


def test_the_network_is_made_once(gcp: Controller) -> None:
    for number in range(3):
        gcp.machines.create(order_of(f"chat-{number}"))
    assert gcp.world.count("compute.networks.insert") == 1
    assert gcp.world.count("compute.networks.get") == 1
    assert gcp.world.count("compute.firewalls.insert") == 3  # inner, ssh, ports


def test_machines_of_a_service_reach_each_other_and_none_of_another(gcp: Controller) -> None:
    services = {"chat-0": "chat", "chat-1": "chat", "other-0": "other"}
    for token, service in services.items():
        gcp.machines.create(replace(order_of(token), service=service))
    tags = {name: set(each["tags"]["items"]) for (_, name), each in gcp.world.instances.items()}

    def reaches(one: str, another: str) -> bool:
        """Whether a rule lets in what comes from the tags of one machine."""
        rules = gcp.world.firewalls.values()
        named = [(set(rule.get("sourceTags", [])), set(rule["targetTags"])) for rule in rules]
        return any(tags[one] & source and tags[another] & target for source, target in named)

    found = {(one, other) for one in services for other in services if one != other and reaches(one, other)}
    assert found == {("chat-0", "chat-1"), ("chat-1", "chat-0")}
    assert all(gcp.world.reach(token, 22, f"{SOURCE}/32") for token in services)


def test_a_rule_that_somebody_widened_is_put_right(gcp: Controller) -> None:
    gcp.machines.create(ORDER)
    for rule in gcp.world.firewalls.values():
        if "sourceRanges" in rule:
            rule["sourceRanges"] = ["0.0.0.0/0"]
    gcp.restart()
    gcp.machines.create(order_of("other"))
    assert not gcp.world.reach(NAME, 22, "0.0.0.0/0")
    assert gcp.world.reach(NAME, 22, f"{SOURCE}/32")


def test_a_network_that_somebody_removed_is_made_again(gcp: Controller) -> None:
    machine = gcp.machines.create(ORDER)
    gcp.machines.destroy(machine)
    gcp.world.advance(60.0)
    assert gcp.another().delete_shared(OWNER) == []
    assert gcp.create(order_of("other")).token == "other"


def test_a_network_of_the_users_own_is_used_as_it_is(gcp: Controller) -> None:
    gcp.world.add_network("theirs")
    own = gcp.another(network="theirs")
    own.create(ORDER)
    assert set(gcp.world.networks) == {"theirs"}
    assert own.delete_shared(OWNER) == []
    assert (set(gcp.world.networks), gcp.world.firewalls) == ({"theirs"}, {})


def test_a_network_that_is_not_there_is_refused(gcp: Controller) -> None:
    with pytest.raises(RefusedError, match="cannot be found"):
        gcp.another(network="missing").create(ORDER)


def test_forgetting_an_owner_leaves_nothing_and_nobody_else_without(gcp: Controller) -> None:
    machine = gcp.machines.create(ORDER)
    gcp.machines.create(order_of("theirs", owner="somebody"))
    (sentence,) = gcp.machines.delete_shared(OWNER)  # there is a machine in it
    assert prefix_of(OWNER) in sentence
    gcp.machines.destroy(machine)
    gcp.world.advance(60.0)
    assert gcp.machines.delete_shared(OWNER) == []
    assert set(gcp.world.networks) == {prefix_of("somebody")}
    assert gcp.machines.delete_shared(OWNER) == []


# --- leftovers, checks, prices ------------------------------------------------------------------------------


def test_what_belongs_to_no_machine_is_found_and_removed(gcp: Controller) -> None:
    gcp.machines.create(ORDER)
    labels = {"skyserve-owner": OWNER}
    gcp.world.make_disk("us-east1-b", "lost", labels, users=[])
    gcp.world.make_disk("us-east1-b", "theirs", {"skyserve-owner": "somebody"}, users=[])
    gcp.world.make_address("us-east1", "lost", labels)
    assert gcp.machines.orphans(OWNER) == []  # they may be part of something that is being made
    gcp.world.advance(300.0)
    found = gcp.machines.orphans(OWNER)
    assert found == [
        OrphanedResource("disk", "zones/us-east1-b/disks/lost", "us-east1"),
        OrphanedResource("address", "regions/us-east1/addresses/lost", "us-east1"),
    ]
    for leftover in found * 2:  # already gone is success
        gcp.machines.remove(leftover)
        gcp.world.advance(10.0)
    assert gcp.machines.orphans(OWNER) == []
    assert {name for _, name in gcp.world.disks} == {NAME, "theirs"}
    with pytest.raises(InvalidRequestError):
        gcp.machines.remove(OrphanedResource("card", "nics/x", "us-east1"))


def test_a_check_in_order(gcp: Controller) -> None:
    gcp.world.quotas |= {("", "GPUS_ALL_REGIONS"): 16.0, ("us-east1", L4): 8.0, ("us-central1", L4): 0.0}
    findings = gcp.machines.check()
    assert all(finding.ok for finding in findings)
    assert [finding.what for finding in findings] == [
        "credentials",
        "permissions",
        "quota GPUS_ALL_REGIONS",
        f"quota {L4}",
    ]
    assert findings[-1].message == "us-east1 0 of 8"


def test_a_check_names_what_is_missing(gcp: Controller) -> None:
    gcp.world.denied = {"compute.instances.create"}
    gcp.world.quotas["", "GPUS_ALL_REGIONS"] = 0.0
    found = gcp.machines.check()
    assert [finding.what for finding in found if finding.level is Level.MISSING] == [
        "permission compute.instances.create",
        "quota GPUS_ALL_REGIONS",
    ]
    assert [finding.what for finding in found if finding.level is Level.NOTE] == ["quotas of GPUs"]
    assert "compute.instances.create" in PERMISSIONS


def test_without_credentials_nothing_else_is_looked_at(gcp: Controller) -> None:
    gcp.world.dead_token = True
    (finding,) = gcp.machines.check()
    assert (finding.what, finding.ok) == ("credentials", False)


def test_a_check_says_when_permissions_cannot_be_looked_at(gcp: Controller) -> None:
    method = "cloudresourcemanager.projects.testIamPermissions"
    gcp.world.faults.append(Fault(method, 403, "accessNotConfigured", "not used before"))
    finding = gcp.machines.check()[1]
    assert "cloudresourcemanager" in finding.message
    assert finding.level is Level.NOTE


def test_there_are_no_spot_prices_without_a_key(gcp: Controller) -> None:
    assert gcp.machines.spot_prices(["us-central1"]) == {}
    assert gcp.world.calls == []


def test_spot_prices_are_put_together_from_their_parts(gcp: Controller) -> None:
    gcp.world.page_size = 3
    here = ["us-central1", "us-east1"]
    gpu = "GPU attached to Spot Preemptible VMs running in Americas"
    gcp.world.skus = [
        sku("Spot Preemptible G2 Instance Core running in Americas", here, 0.01, "h"),
        sku("Spot Preemptible G2 Instance Ram running in Americas", here, 0.001, "GiBy.h"),
        sku(f"Nvidia L4 {gpu}", here, 0.25, "h"),
        sku("Spot Preemptible N1 Predefined Instance Core running in Americas", here, 0.005, "h"),
        sku("Spot Preemptible N1 Predefined Instance Ram running in Americas", here, 0.0005, "GiBy.h"),
        sku(f"Nvidia Tesla T4 {gpu}", here, 0.1, "h"),
        sku(
            "Spot Preemptible A2 Instance Core running in Americas", here, 0.01, "h"
        ),  # and no price of its memory
    ]
    prices = gcp.another(billing_api_key="key-1").spot_prices(["us-central1"])
    assert prices["g2-standard-8", "us-central1-b"] == pytest.approx(8 * 0.01 + 32 * 0.001 + 0.25)
    assert prices["n1-standard-4+2xnvidia-tesla-t4", "us-central1-a"] == pytest.approx(
        4 * 0.005 + 15 * 0.0005 + 0.2
    )
    assert {zone.rpartition("-")[0] for _, zone in prices} == {"us-central1"}
    assert not any(name.startswith("a2-") for name, _ in prices)
    assert {zone for name, zone in prices if name.startswith("n1-")} == {"us-central1-a"}
    with pytest.raises(AuthError):
        gcp.another(billing_api_key="wrong").spot_prices(["us-central1"])


def test_whoever_has_no_credentials_is_told_to_log_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # do not look for a metadata service
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    (finding,) = GcpMachines("proj-1").check()
    assert (finding.what, finding.ok) == ("credentials", False)
    assert "gcloud auth application-default login" in finding.message


def test_credentials_that_cannot_be_renewed_are_an_auth_error(gcp: Controller) -> None:
    revoked = Credentials(
        token=None,
        refresh_token="revoked",
        token_uri=f"{gcp.url}/token",
        client_id="id",
        client_secret="secret",
    )
    with pytest.raises(AuthError, match="gcloud auth"):
        gcp.another(credentials=revoked).create(ORDER)


def test_a_project_nobody_names_is_asked_for(gcp: Controller) -> None:
    with pytest.raises(AuthError, match="project"):
        gcp.another(project=None).create(ORDER)


def test_a_cloud_that_cannot_be_reached_is_tried_again() -> None:
    with controller() as gcp:
        pass  # its server is gone now
    with pytest.raises(TransientError, match="cannot be reached"):
        gcp.machines.create(ORDER)


def test_the_make_believe_cloud_also_runs_in_real_time() -> None:
    booted: list[MachineFacts] = []
    with controller(World(clock=RealClock(), operation_s=0.01, boot_s=0.0, on_launch=booted.append)) as gcp:
        machine = gcp.machines.create(ORDER)
        assert [facts.private_ip for facts in booted] == [machine.private_address]
        assert gcp.listed()[ORDER.token].state is S.RUNNING


def test_whose_things_there_are_is_known_by_the_labels_key(gcp: Controller) -> None:
    assert gcp.machines.owners() == []
    gcp.create(ORDER)
    gcp.create(order_of("ffffffff-chat-1-0123456789", owner="Some One"))
    gcp.world.make_disk(ZONE.name, "alone", {"skyserve-owner": "third"}, [])
    gcp.world.make_disk(ZONE.name, "theirs", {"team": "blue"}, [])
    assert gcp.another().owners() == sorted([OWNER, "Some One", "third"])
