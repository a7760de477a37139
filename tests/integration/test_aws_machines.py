"""AwsMachines with the official SDK against a strict EC2 on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from policies.model import CapacityType, FailureKind
from provisioners.aws.machines import client_token
from provisioners.port.errors import AuthError, CapacityError, Refusal, TransientError
from provisioners.port.vm import MachineState
from tests.clouds.aws.aws_account import GPU_IMAGE, Launched
from tests.clouds.aws.aws_bench import EAST, ORDER, WEST, AwsBench, aws_bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsBench]:
    with aws_bench(monkeypatch) as opened:
        yield opened


def on_demand(**changes: Any) -> Any:
    return replace(ORDER, capacity_type=CapacityType.ON_DEMAND, **changes)


# The requests to EC2.


def test_a_spot_machine_is_one_time_tagged_and_ends_with_all_it_came_with(bench: AwsBench) -> None:
    machine = bench.fresh().create(ORDER)
    (call,) = bench.world.asked("RunInstances")
    asked = call.params
    assert asked["InstanceMarketOptions.SpotOptions.SpotInstanceType"] == "one-time"
    assert asked["InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior"] == "terminate"
    assert asked["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert asked["MetadataOptions.HttpTokens"] == "required"
    assert asked["MetadataOptions.HttpPutResponseHopLimit"] == "1"
    assert asked["NetworkInterface.1.DeleteOnTermination"] == "true"
    assert asked["BlockDeviceMapping.1.Ebs.DeleteOnTermination"] == "true"
    for kind in ("instance", "volume", "network-interface", "spot-instances-request"):
        assert ORDER.tags.items() <= call.tags(kind).items()
    assert (machine.token, machine.zone, machine.capacity_type) == (ORDER.token, EAST, CapacityType.SPOT)
    assert machine.state is MachineState.PENDING


def test_user_data_and_key_reach_the_machine_as_they_are(bench: AwsBench) -> None:
    launched: list[Launched] = []
    bench.world.on_launch = launched.append
    machine = bench.fresh().create(ORDER)
    (facts,) = launched
    assert facts.user_data == ORDER.user_data
    assert facts.public_key == ORDER.public_key
    assert (facts.id, facts.zone, facts.private_ip) == (machine.id, "use1-az1", machine.private_address)


def test_an_on_demand_machine_asks_for_no_market(bench: AwsBench) -> None:
    machine = bench.fresh().create(on_demand())
    assert not [
        name for name in bench.world.asked("RunInstances")[0].params if name.startswith("InstanceMarket")
    ]
    assert machine.capacity_type is CapacityType.ON_DEMAND


@pytest.mark.parametrize("is_private", [False, True], ids=["public", "private"])
def test_the_address_is_the_one_that_can_be_reached(bench: AwsBench, is_private: bool) -> None:
    machines = bench.fresh(use_private_ip=is_private)
    machines.create(ORDER)
    (machine,) = machines.machines("own")
    assert machine.address is not None
    assert (machine.address == machine.private_address) == is_private


def test_the_disk_is_never_smaller_than_the_image(bench: AwsBench) -> None:
    bench.fresh().create(replace(ORDER, disk_gb=500))
    assert bench.world.asked("RunInstances")[0].params["BlockDeviceMapping.1.Ebs.VolumeSize"] == "500"


@pytest.mark.parametrize("by", ["order", "settings"])
def test_the_users_image_wins(bench: AwsBench, by: str) -> None:
    image = bench.world.publish_image("us-east-1", "/mine")
    machines = bench.fresh(image=image if by == "settings" else None)
    machines.create(replace(ORDER, image="/mine" if by == "order" else None))
    assert bench.world.asked("RunInstances")[0].params["ImageId"] == image


def test_the_group_opens_ssh_and_the_ports_to_the_sources_only(bench: AwsBench) -> None:
    bench.fresh().create(replace(ORDER, sources=("203.0.113.7/32", "2001:db8::/64")))
    (group,) = bench.groups()
    opened = {
        (rule["IpProtocol"], rule["FromPort"], rule["ToPort"], block.get("CidrIp") or block.get("CidrIpv6"))
        for rule in group["IpPermissions"]
        for block in (*rule["IpRanges"], *rule["Ipv6Ranges"])
    }
    assert opened == {
        ("tcp", port, port, block) for port in (22, 8080) for block in ("203.0.113.7/32", "2001:db8::/64")
    }


@pytest.mark.parametrize(("num_nodes", "are_open"), [(1, False), (2, True)], ids=["alone", "gang"])
def test_machines_of_a_gang_reach_each_other(bench: AwsBench, num_nodes: int, are_open: bool) -> None:
    bench.fresh().create(replace(ORDER, num_nodes=num_nodes))
    (group,) = bench.groups()
    all_traffic = [rule for rule in group["IpPermissions"] if rule["IpProtocol"] == "-1"]
    peers = [pair["GroupId"] for rule in all_traffic for pair in rule["UserIdGroupPairs"]]
    assert peers == ([group["GroupId"]] if are_open else [])


def test_a_second_launch_costs_one_call(bench: AwsBench) -> None:
    machines = bench.fresh()
    machines.create(ORDER)
    before = len(bench.world.calls)
    machines.create(replace(ORDER, token="own-chat-2", replica_id=2))
    assert [call.action for call in bench.world.calls[before:]] == ["RunInstances"]


def test_a_named_vpc_is_used(bench: AwsBench) -> None:
    ec2 = bench.onlooker()
    vpc_id = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    ec2.create_tags(Resources=[vpc_id], Tags=[{"Key": "Name", "Value": "models"}])
    subnet = ec2.create_subnet(VpcId=vpc_id, CidrBlock="10.9.1.0/24", AvailabilityZoneId="use1-az1")["Subnet"]
    machines = bench.fresh(vpc="models", use_private_ip=True)
    assert (machines.create(ORDER).private_address or "").startswith("10.9.1.")
    assert bench.world.asked("RunInstances")[0].params["NetworkInterface.1.SubnetId"] == subnet["SubnetId"]
    with pytest.raises(CapacityError, match="no subnet"):
        machines.create(replace(ORDER, token="t2", zone=replace(EAST, name="use1-az2")))
    with pytest.raises(CapacityError, match="no VPC models"):
        machines.create(replace(ORDER, token="t3", zone=WEST))


# Once and only once.


def test_the_same_order_twice_is_one_machine(bench: AwsBench) -> None:
    machines = bench.fresh()
    assert machines.create(ORDER).id == machines.create(ORDER).id == bench.fresh().create(ORDER).id
    assert len(bench.world.live()) == 1


def test_the_same_order_from_eight_threads_is_one_machine(bench: AwsBench) -> None:
    machines = [bench.fresh(), bench.fresh()]
    with ThreadPoolExecutor(8) as pool:
        ids = {machine.id for machine in pool.map(lambda n: machines[n % 2].create(ORDER), range(8))}
    assert list(ids) == bench.world.live()
    assert len(bench.groups()) == 1


@pytest.mark.parametrize("trouble", ["cut", "InternalError", "Unavailable", "RequestLimitExceeded"])
@pytest.mark.parametrize("after", [False, True], ids=["before-the-effect", "after-the-effect"])
def test_a_lost_answer_is_asked_for_again(bench: AwsBench, trouble: str, after: bool) -> None:
    bench.world.fail("RunInstances", "" if trouble == "cut" else trouble, times=3, after=after)
    machine = bench.fresh().create(ORDER)
    assert bench.world.live() == [machine.id]
    assert len(bench.world.asked("RunInstances")) == 4


@pytest.mark.parametrize(
    "action",
    [
        "GetParameter",
        "DescribeImages",
        "ImportKeyPair",
        "DescribeVpcs",
        "DescribeSubnets",
        "DescribeSecurityGroups",
        "CreateSecurityGroup",
        "AuthorizeSecurityGroupIngress",
        "RunInstances",
    ],
)
def test_any_call_of_a_launch_may_lose_its_answer(bench: AwsBench, action: str) -> None:
    bench.world.cut(action, after=True)
    machine = bench.fresh().create(ORDER)
    assert bench.world.live() == [machine.id]
    assert len(bench.groups()) == 1


def test_trouble_that_does_not_end_is_transient_and_the_order_can_be_sent_again(bench: AwsBench) -> None:
    bench.world.fail("RunInstances", "InternalError", times=6, after=True)
    with pytest.raises(TransientError, match="InternalError"):
        bench.fresh().create(ORDER)
    assert bench.fresh().create(ORDER).id == bench.world.live()[0]
    assert len(bench.world.live()) == 1


def test_a_dead_machine_stays_the_answer_to_its_order(bench: AwsBench) -> None:
    machines = bench.fresh()
    machine = machines.create(ORDER)
    bench.world.preempt(machine.id)
    again = bench.fresh().create(ORDER)
    assert (again.id, again.state) == (machine.id, MachineState.PREEMPTED)


def test_a_machine_that_ec2_no_longer_lists_is_dead_all_the_same(bench: AwsBench) -> None:
    machines = bench.fresh()
    machine = machines.create(ORDER)
    machines.destroy(machine)
    bench.world.forget_instance(machine.id)
    again = bench.fresh().create(ORDER)
    assert (again.token, again.state) == (ORDER.token, MachineState.TERMINATED)
    machines.destroy(again)
    assert bench.world.live() == []


def test_a_new_image_between_two_sendings_does_not_make_a_second_machine(bench: AwsBench) -> None:
    bench.world.fail("RunInstances", "InternalError", times=6, after=True)
    with pytest.raises(TransientError):
        bench.fresh().create(ORDER)
    bench.world.publish_image("us-east-1", GPU_IMAGE)
    bench.world.listed_after_s = 55.0
    assert [bench.fresh().create(ORDER).id] == bench.world.live()


def test_a_failed_launch_whose_parameters_had_to_change_is_made_under_its_next_token(bench: AwsBench) -> None:
    bench.world.room["use1-az1", "g6.xlarge", "spot"] = 0
    with pytest.raises(CapacityError):
        bench.fresh().create(ORDER)
    bench.world.publish_image("us-east-1", GPU_IMAGE)
    del bench.world.room["use1-az1", "g6.xlarge", "spot"]
    assert [bench.fresh().create(ORDER).id] == bench.world.live()
    used = [call.params["ClientToken"] for call in bench.world.asked("RunInstances")]
    assert used == [client_token(ORDER, 0), client_token(ORDER, 0), client_token(ORDER, 1)]


def test_a_group_that_somebody_deleted_is_made_again(bench: AwsBench) -> None:
    machines = bench.fresh()
    machines.destroy(machines.create(ORDER))
    bench.onlooker().delete_security_group(GroupId=bench.groups()[0]["GroupId"])
    second = machines.create(replace(ORDER, token="own-chat-2", replica_id=2))
    assert bench.world.live() == [second.id]


def test_half_a_group_is_completed(bench: AwsBench) -> None:
    bench.world.denied.add("AuthorizeSecurityGroupIngress")
    with pytest.raises(AuthError, match="AuthorizeSecurityGroupIngress"):
        bench.fresh().create(ORDER)
    bench.world.denied.clear()
    bench.fresh().create(ORDER)
    assert len(bench.groups()) == 1
    assert len(bench.groups()[0]["IpPermissions"]) == 2


# The truth.


def test_only_the_owners_machines_are_shown_and_destroyed(bench: AwsBench) -> None:
    machines = bench.fresh()
    mine = machines.create(ORDER)
    other = machines.create(replace(ORDER, owner="other", token="other-chat-1", zone=WEST))
    assert [machine.id for machine in machines.machines("own")] == [mine.id]
    machines.destroy(mine)
    assert bench.world.live() == [other.id]
    assert machines.delete_shared("own") == []
    assert bench.world.live() == [other.id]
    assert len(bench.groups("us-west-2")) == 1


def test_all_regions_and_all_pages_are_listed(bench: AwsBench) -> None:
    bench.world.page_size = 2
    machines = bench.fresh()
    for number in range(7):
        zone = EAST if number % 2 else WEST
        machines.create(replace(ORDER, token=f"own-chat-{number}", replica_id=number, zone=zone))
    listed = bench.fresh().machines("own")
    assert sorted(machine.replica_id for machine in listed) == list(range(7))
    assert {machine.zone for machine in listed} == {EAST, WEST}


def test_a_region_that_cannot_be_listed_is_an_error(bench: AwsBench) -> None:
    machines = bench.fresh()
    machines.create(ORDER)
    bench.world.fail("DescribeInstances", "UnauthorizedOperation", region="us-west-2")
    with pytest.raises(AuthError, match="us-west-2"):
        machines.machines("own")


def test_a_machine_is_shown_before_ec2_lists_it(bench: AwsBench) -> None:
    bench.world.listed_after_s = 20.0
    machines = bench.fresh()
    machine = machines.create(ORDER)
    assert [one.id for one in machines.machines("own")] == [machine.id]
    assert machines.machines("other") == []
    assert bench.fresh().machines("own") == []  # a restarted one does not know, and sends its orders again
    assert bench.fresh().create(ORDER).id == machine.id
    bench.time.sleep(30.0)
    assert [one.id for one in bench.fresh().machines("own")] == [machine.id]


def test_a_young_machine_that_ec2_does_not_know_is_destroyed_all_the_same(bench: AwsBench) -> None:
    bench.world.listed_after_s = 20.0
    machines = bench.fresh()
    machines.destroy(machines.create(ORDER))
    assert bench.world.live() == []


def test_destroying_is_idempotent_and_keeps_how_it_ended(bench: AwsBench) -> None:
    machines = bench.fresh()
    machine = machines.create(ORDER)
    bench.world.preempt(machine.id)
    machines.destroy(machine)
    machines.destroy(machine)
    (dead,) = machines.machines("own")
    assert dead.state is MachineState.PREEMPTED
    bench.world.forget_instance(machine.id)
    bench.time.sleep(120.0)
    machines.destroy(machine)
    assert machines.machines("own") == []


def test_a_life_from_pending_to_terminated(bench: AwsBench) -> None:
    bench.world.boot_s, bench.world.shutdown_s = 30.0, 40.0
    machines = bench.fresh()
    machine = machines.create(ORDER)
    seen = [bench.states(machines)]
    bench.time.sleep(31.0)
    seen.append(bench.states(machines))
    machines.destroy(machine)
    seen.append(bench.states(machines))
    bench.time.sleep(41.0)
    seen.append(bench.states(machines))
    assert [one[ORDER.token] for one in seen] == ["pending", "running", "stopping", "terminated"]


def test_a_machine_that_never_started_says_why(bench: AwsBench) -> None:
    bench.world.boot_s = 30.0
    machines = bench.fresh()
    machine = machines.create(on_demand())
    bench.world.end(
        machine.id, "Client.VolumeLimitExceeded", "Client.VolumeLimitExceeded: Volume limit exceeded"
    )
    (dead,) = machines.machines("own")
    assert (dead.state, dead.message) == (
        MachineState.TERMINATED,
        "the account's quota of EBS storage is used up (Client.VolumeLimitExceeded: Volume limit exceeded)",
    )
    assert dead.refusal == Refusal(FailureKind.QUOTA)


def test_a_stopped_machine_is_to_be_destroyed(bench: AwsBench) -> None:
    machines = bench.fresh()
    machine = machines.create(on_demand())
    bench.world.stop_instance(machine.id)
    (stopped,) = machines.machines("own")
    assert stopped.state is MachineState.FAILED
    machines.destroy(stopped)
    assert bench.world.live() == []


@pytest.mark.parametrize("code", ["marked-for-termination", "instance-terminated-no-capacity"])
def test_a_notice_stands_while_the_machine_lives(bench: AwsBench, code: str) -> None:
    machines = bench.fresh()
    machine = machines.create(ORDER)
    assert machines.machines("own")[0].preempt_at is None
    bench.world.warn(machine.id, code)
    assert machines.machines("own")[0].preempt_at == bench.time.now() + 120.0
    bench.world.preempt(machine.id)
    assert machines.machines("own")[0].preempt_at is None
