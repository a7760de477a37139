"""AWS as companies set it up: subnets of their own, encrypted disks, tags on everything, no public addresses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from policies.model import CapacityType, Scope
from provisioners.aws.outbound import default_route, problem
from provisioners.port.errors import AuthError, CapacityError, RefusedError
from provisioners.port.vm import Level, Trial
from tests.clouds.aws.aws_bench import EAST, ORDER, WEST, AwsBench, aws_bench

TRIALS = [Trial(EAST, "g6.xlarge", CapacityType.SPOT, "L4")]
LABELS = {"cost-center": "42"}
KEY = "alias/models"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsBench]:
    with aws_bench(monkeypatch) as opened:
        yield opened


def vpc(bench: AwsBench, block: str, *zones: str) -> list[str]:
    """Ids of the subnets of a new VPC, in these zones."""
    ec2 = bench.onlooker()
    vpc_id = ec2.create_vpc(CidrBlock=f"{block}.0.0/16")["Vpc"]["VpcId"]
    return [
        ec2.create_subnet(VpcId=vpc_id, CidrBlock=f"{block}.{number}.0/24", AvailabilityZoneId=zone)[
            "Subnet"
        ]["SubnetId"]
        for number, zone in enumerate(zones, start=1)
    ]


def launched(bench: AwsBench) -> Any:
    return bench.world.asked("RunInstances")[-1].params


# --- subnets ----------------------------------------------------------------------------------------------------------


def test_subnets_of_the_user_are_used_by_zone_or_region(bench: AwsBench) -> None:
    first, second = vpc(bench, "10.9", "use1-az1", "use1-az2")
    (third,) = vpc(bench, "10.8", "use1-az1")
    machines = bench.fresh(subnets={"us-east-1": (first, second), "use1-az1": (third,)})
    there = replace(EAST, name="use1-az2")
    machines.create(ORDER)
    assert launched(bench)["NetworkInterface.1.SubnetId"] == third
    machines.create(replace(ORDER, token="own-chat-2", zone=there))
    assert launched(bench)["NetworkInterface.1.SubnetId"] == second
    vpcs = {group["VpcId"] for group in bench.groups()}
    assert len(vpcs) == 2  # a group belongs to a VPC
    with pytest.raises(CapacityError, match=r"no subnet in clouds\.aws\.subnets"):
        machines.create(replace(ORDER, token="own-chat-3", zone=replace(EAST, name="use1-az4")))
    bench.fresh(subnets={"us-east-1": (first,)}).create(replace(ORDER, token="own-chat-4", zone=WEST))
    for token in ("own-chat-1", "own-chat-2", "own-chat-4"):
        (instance,) = bench.world.live(skyserve_token=token)
        assert (22, "203.0.113.7/32") in bench.world.openings(instance)


def test_a_subnet_that_is_not_there_is_refused(bench: AwsBench) -> None:
    with pytest.raises(RefusedError, match="`aws` section") as caught:
        bench.fresh(subnets={"us-east-1": ("subnet-0123456789abcdef0",)}).create(ORDER)
    assert caught.value.scope is Scope.REGION
    assert bench.world.asked("RunInstances") == []


def test_groups_of_all_vpcs_are_removed(bench: AwsBench) -> None:
    (subnet,) = vpc(bench, "10.9", "use1-az1")
    for number, subnets in enumerate(({}, {"us-east-1": (subnet,)})):
        machines = bench.fresh(subnets=subnets)
        machines.destroy(machines.create(replace(ORDER, token=f"own-chat-{number}")))
    assert len(bench.groups()) == 2
    assert bench.fresh().delete_shared("own") == []
    assert bench.groups() == []


# --- disks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        pytest.param({}, (None, None), id="as the account has it"),
        pytest.param({"encrypted": True}, ("true", None), id="encrypted"),
        pytest.param({"kms_key": KEY}, ("true", KEY), id="by a key"),
        pytest.param({"kms_key": {"us-east-1": KEY}}, ("true", KEY), id="by the region's key"),
    ],
)
def test_disks_are_encrypted(
    bench: AwsBench, settings: dict[str, Any], sent: tuple[str | None, str | None]
) -> None:
    bench.world.kms_keys = (KEY,)
    bench.fresh(**settings).create(ORDER)
    disk = "BlockDeviceMapping.1.Ebs."
    assert tuple(launched(bench).get(disk + name) for name in ("Encrypted", "KmsKeyId")) == sent


def test_a_policy_for_encrypted_disks_is_met(bench: AwsBench) -> None:
    bench.world.requires_encryption = True
    with pytest.raises(RefusedError):
        bench.fresh().create(ORDER)
    bench.fresh(encrypted=True).create(ORDER)


def test_a_key_that_cannot_be_used_or_is_not_named_is_refused_in_that_region(bench: AwsBench) -> None:
    with pytest.raises(RefusedError, match="encrypt") as caught:
        bench.fresh(kms_key=KEY).create(ORDER)
    assert caught.value.scope is Scope.REGION
    with pytest.raises(RefusedError, match="no key for us-east-1"):
        bench.fresh(kms_key={"us-west-2": KEY}).create(ORDER)


# --- tags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity_type", CapacityType)
def test_everything_carries_the_labels(bench: AwsBench, capacity_type: CapacityType) -> None:
    """Denied otherwise, as a service control policy does it."""
    bench.world.required_tags = tuple(LABELS)
    order = replace(ORDER, labels=LABELS, capacity_type=capacity_type)
    with pytest.raises(AuthError, match="explicit deny"):
        bench.fresh().create(order)
    machines = bench.fresh(labels=LABELS)
    assert [one for one in machines.check(TRIALS) if one.level is Level.MISSING] == []
    machines.create(order)
    for action, kind in (("CreateSecurityGroup", "security-group"), ("ImportKeyPair", "key-pair")):
        assert bench.world.asked(action)[-1].tags(kind)["cost-center"] == "42"
    wrong = bench.fresh(labels={"team": "blue"}).check(TRIALS)
    assert {one.what for one in wrong if one.level is Level.MISSING} >= {"ec2:CreateSecurityGroup"}


# --- the way out ------------------------------------------------------------------------------------------------------


def way_out(bench: AwsBench, **settings: Any) -> list[tuple[Level, str]]:
    found = bench.fresh(regions=("us-east-1",), **settings).check(TRIALS)
    return [(one.level, one.message) for one in found if one.what.startswith("way out")]


def test_the_check_follows_the_default_route(bench: AwsBench) -> None:
    assert way_out(bench) == [(Level.FINE, "")]
    ((level, said),) = way_out(bench, use_private_ip=True)
    assert (level, "NAT gateway" in said) == (Level.NOTE, True)
    (subnet,) = vpc(bench, "10.9", "use1-az1")
    ((level, said),) = way_out(bench, subnets={"us-east-1": (subnet,)})
    assert (level, "use_private_ip" in said) == (Level.NOTE, True)
    ec2 = bench.onlooker()
    nat = ec2.create_nat_gateway(SubnetId=subnet, ConnectivityType="private")["NatGateway"]["NatGatewayId"]
    vpc_id = ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]["VpcId"]
    table = ec2.create_route_table(VpcId=vpc_id)["RouteTable"]["RouteTableId"]
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", NatGatewayId=nat)
    ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
    assert way_out(bench, use_private_ip=True, subnets={"use1-az1": (subnet,)}) == [(Level.FINE, "")]
    bench.world.denied = {"DescribeRouteTables"}
    ((level, said),) = way_out(bench)
    assert (level, "ec2:DescribeRouteTables" in said) == (Level.NOTE, True)


def test_a_route_that_is_down_leads_nowhere() -> None:
    route = {"DestinationCidrBlock": "0.0.0.0/0", "NatGatewayId": "nat-1", "State": "blackhole"}
    main = {"Associations": [{"Main": True}], "Routes": [route]}
    assert default_route([main], "subnet-1") is None
    assert "no default route" in problem(None, is_private=True)
    assert problem({**route, "State": "active"}, is_private=True) == ""
