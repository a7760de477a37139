"""What AwsMachines makes of refusals, storms, prices, leftovers and the account's check-up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from policies.model import CapacityType, Scope, Zone
from provisioners.port.errors import (
    AuthError,
    CapacityError,
    InvalidRequestError,
    ProvisionError,
    QuotaError,
    RefusedError,
    RegionClosedError,
    TransientError,
)
from provisioners.port.regions import CLOSED_S
from provisioners.port.vm import OWNER_TAG, Level, OrphanedResource, Trial
from tests.clouds.aws.aws_account import GPU_IMAGE
from tests.clouds.aws.aws_bench import EAST, ORDER, WEST, AwsBench, aws_bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsBench]:
    with aws_bench(monkeypatch) as opened:
        yield opened


def on_demand(**changes: Any) -> Any:
    return replace(ORDER, capacity_type=CapacityType.ON_DEMAND, **changes)


# Errors, by what the caller does next.


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InsufficientInstanceCapacity", CapacityError),
        ("SpotMaxPriceTooLow", CapacityError),
        ("MaxSpotInstanceCountExceeded", QuotaError),
        ("UnauthorizedOperation", AuthError),
        ("ExpiredToken", AuthError),
        ("InvalidUserData.Malformed", InvalidRequestError),
        ("InvalidParameterCombination", RefusedError),
        ("SomethingNew", RefusedError),
    ],
)
def test_a_refusal_is_told_at_once_and_leaves_nothing(
    bench: AwsBench, code: str, kind: type[ProvisionError]
) -> None:
    bench.world.fail("RunInstances", code)
    with pytest.raises(kind) as caught:
        bench.fresh().create(ORDER)
    assert (caught.value.code, caught.value.cloud, caught.value.zone) == (code, "aws", EAST)
    assert caught.value.__cause__ is not None
    assert len(bench.world.asked("RunInstances")) == 1  # the SDK would have asked EC2 again for capacity
    assert bench.world.live() == []


def test_a_full_zone_is_capacity_and_another_zone_is_not(bench: AwsBench) -> None:
    bench.world.room["use1-az1", "g6.xlarge", "spot"] = 0
    machines = bench.fresh()
    with pytest.raises(CapacityError, match=r"spot g6\.xlarge in aws/us-east-1/use1-az1"):
        machines.create(ORDER)
    machines.create(replace(ORDER, token="own-chat-2", zone=replace(EAST, name="use1-az2")))
    machines.create(on_demand(token="own-chat-3"))


@pytest.mark.parametrize(
    ("zone", "instance_type"),
    [
        pytest.param(replace(EAST, name="use1-az3"), "g6.xlarge", id="not-in-this-zone"),
        pytest.param(WEST, "p3.2xlarge", id="not-in-this-region"),
        pytest.param(Zone("aws", "sa-east-1", "sae1-az1"), "g6.xlarge", id="region-not-enabled"),
    ],
)
def test_what_is_not_offered_is_refused_there(bench: AwsBench, zone: Zone, instance_type: str) -> None:
    with pytest.raises(RefusedError):
        bench.fresh(image="/any" if instance_type.startswith("p3") else None).create(
            replace(ORDER, zone=zone, instance_type=instance_type, image=GPU_IMAGE)
        )


@pytest.mark.parametrize(
    ("order", "quota"),
    [
        pytest.param(ORDER, "L-3819A6DF", id="spot"),
        pytest.param(on_demand(), "L-DB2E81BA", id="on-demand"),
    ],
)
def test_a_used_up_quota_is_named(bench: AwsBench, order: Any, quota: str) -> None:
    bench.world.quota_vcpus["us-east-1", quota] = 4
    machines = bench.fresh()
    first = machines.create(order)
    with pytest.raises(QuotaError, match=quota) as caught:
        machines.create(replace(order, token="own-chat-2"))
    assert caught.value.retry_at is not None
    assert caught.value.retry_at > bench.time.now()
    machines.destroy(first)
    machines.create(replace(order, token="own-chat-3"))


def test_a_missing_permission_is_named(bench: AwsBench) -> None:
    bench.world.denied.add("ImportKeyPair")
    with pytest.raises(AuthError, match="ec2:ImportKeyPair"):
        bench.fresh().create(ORDER)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"user_data": "x" * 16_385}, id="user-data-too-long"),
        pytest.param({"image": "ubuntu"}, id="image-is-no-ami"),
        pytest.param({"sources": ("everywhere",)}, id="source-is-no-cidr"),
    ],
)
def test_a_wrong_order_is_refused_before_anything_runs(bench: AwsBench, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        bench.fresh().create(replace(ORDER, **changes))
    assert bench.world.live() == []


def test_an_image_that_is_not_there_is_refused_in_that_region_alone(bench: AwsBench) -> None:
    with pytest.raises(RefusedError, match="there is no such image") as caught:
        bench.fresh().create(replace(ORDER, image="ami-00000000000000000"))
    assert caught.value.scope is Scope.REGION
    assert bench.world.live() == []


SCP = "is not authorized to perform: ec2:X with an explicit deny in a service control policy"


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "message"),
    [
        pytest.param("UnauthorizedOperation", SCP, id="by a policy of the organisation"),
        pytest.param("OptInRequired", "You are not subscribed to this service.", id="not subscribed"),
        pytest.param("AuthFailure", "not able to validate the provided access credentials", id="not enabled"),
    ],
)
def test_a_closed_region_blinds_to_itself_alone_and_is_remembered(
    bench: AwsBench, code: str, message: str
) -> None:
    machines = bench.fresh()
    machine = machines.create(ORDER)
    # STS accepts the credentials: only EC2 of that region does not.
    for action in ("DescribeInstances", "DescribeVpcs", "DescribeSubnets", "DescribeAvailabilityZones"):
        bench.world.fail(action, code, times=1000, region="us-west-2", message=message)
    silent: dict[str, ProvisionError] = {}
    assert [one.id for one in machines.machines("own", silent.__setitem__)] == [machine.id]
    assert isinstance(silent["us-west-2"], RegionClosedError)
    assert "clouds.aws.regions" in machines.closed.why()["us-west-2"]
    assert [one.id for one in machines.machines("own")] == [machine.id]
    asked = len(bench.world.asked("DescribeInstances"))
    machines.machines("own")
    assert len(bench.world.asked("DescribeInstances")) == asked + 1  # of the open region alone
    bench.world.calm()
    bench.time.sleep(CLOSED_S)
    assert len(machines.machines("own", silent.__setitem__)) == 1
    assert len(bench.world.asked("DescribeInstances")) == asked + 3
    assert machines.closed.why() == {}


def test_a_closed_region_is_named_by_the_check(bench: AwsBench) -> None:
    bench.world.fail("DescribeInstances", "UnauthorizedOperation", times=99, region="us-west-2", message=SCP)
    (found,) = [one for one in bench.fresh().check() if one.what == "region us-west-2"]
    assert found.level is Level.NOTE
    assert "clouds.aws.regions" in found.message
    named = bench.fresh(regions=("us-east-1", "us-west-2")).check()
    assert [one.level for one in named if one.what == "region us-west-2"] == [Level.MISSING]


def test_credentials_that_no_service_accepts_close_no_region(bench: AwsBench) -> None:
    machines = bench.fresh()
    bench.world.fail("*", "AuthFailure", times=1000)
    with pytest.raises(AuthError) as caught:
        machines.machines("own", lambda region, error: None)
    assert not isinstance(caught.value, RegionClosedError)
    assert machines.closed.why() == {}


def test_a_region_that_is_down_is_not_waited_for_again_and_again(bench: AwsBench) -> None:
    machines = bench.fresh()
    machine = machines.create(ORDER)
    bench.world.fail("DescribeInstances", "InternalError", times=10_000, region="us-west-2")
    calls = []
    for _ in range(30):
        before = len(bench.world.asked("DescribeInstances"))
        silent: list[str] = []
        listed = machines.machines("own", lambda region, error, silent=silent: silent.append(region))
        assert ([one.id for one in listed], silent) == ([machine.id], ["us-west-2"])
        calls.append(len(bench.world.asked("DescribeInstances")) - before)
        bench.time.sleep(10.0)
    assert calls[0] > 2  # its retries
    assert max(calls[1:]) == 2  # one call, and not at each listing
    assert calls.count(1) > 20


def test_after_an_outage_of_all_regions_the_next_listing_asks_all_of_them(bench: AwsBench) -> None:
    machines = bench.fresh()
    machine = machines.create(ORDER)
    bench.world.fail("DescribeInstances", "InternalError", times=10_000)
    for _ in range(5):
        with pytest.raises(TransientError):
            machines.machines("own", lambda region, error: None)
        bench.time.sleep(10.0)
    bench.world.calm()
    assert [one.id for one in machines.machines("own", lambda region, error: None)] == [machine.id]


def test_a_region_whose_credentials_are_good_again_is_listed_at_once(bench: AwsBench) -> None:
    machines = bench.fresh()
    machine = machines.create(ORDER)
    bench.time.sleep(1000.0)  # what was launched a moment ago is listed without the cloud
    silent: list[tuple[str, ProvisionError]] = []
    bench.world.fail("*", "ExpiredToken", times=10_000, region=machine.zone.region)
    for _ in range(5):
        assert machines.machines("own", lambda *one: silent.append(one)) == []
        bench.time.sleep(10.0)
    assert [(region, type(error)) for region, error in silent] == [(machine.zone.region, AuthError)] * 5
    bench.world.calm()
    assert [one.id for one in machines.machines("own", lambda *one: None)] == [machine.id]


def test_a_dead_network_is_transient(bench: AwsBench, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = bench.fresh(regions=("us-east-1",))
    bench.world.cut("*", times=1000)
    with pytest.raises(TransientError):
        machines.machines("own")


# Many at once.


def test_a_throttling_storm_is_weathered(bench: AwsBench) -> None:
    bench.world.limits.rates = {"RunInstances": (5, 1.0), "DescribeInstances": (2, 1.0)}
    machines = bench.fresh()
    orders = [replace(ORDER, token=f"own-chat-{number}", replica_id=number) for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        ids = {machine.id for machine in pool.map(lambda order: _until_accepted(machines, order), orders)}
    assert sorted(ids) == sorted(bench.world.live())
    assert len(ids) == 40
    refused = [call for call in bench.world.asked("RunInstances") if call.responded == "RequestLimitExceeded"]
    assert len(refused) < 40  # fewer than one refusal a launch, at half of the rate we were promised


# Prices, orphaned resources, what is shared, and the check-up.


def test_spot_prices_are_the_newest_by_zone_id(bench: AwsBench) -> None:
    now = bench.time.now()
    bench.world.prices = [
        ("g6.xlarge", "us-east-1b", 0.31, now - 60),
        ("g6.xlarge", "us-east-1b", 0.29, now - 3600),
        ("g6.xlarge", "us-east-1z", 0.10, now),  # a zone that this account does not have
        ("p5.48xlarge", "us-west-2a", 20.5, now),
    ]
    prices = bench.fresh().spot_prices(["us-east-1", "us-west-2"])
    assert prices == {("g6.xlarge", "use1-az1"): 0.31, ("p5.48xlarge", "usw2-az2"): 20.5}


def test_what_belongs_to_no_machine_is_found_and_removed(bench: AwsBench) -> None:
    machines = bench.fresh()
    alive = machines.create(ORDER)
    ec2 = bench.onlooker()
    subnet_id = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    volume, foreign = (
        ec2.create_volume(Size=10, AvailabilityZone="us-east-1b")["VolumeId"] for _ in range(2)
    )
    card = ec2.create_network_interface(SubnetId=subnet_id)["NetworkInterface"]["NetworkInterfaceId"]
    ours = [{"Key": key, "Value": value} for key, value in replace(ORDER, token="own-chat-0").tags.items()]
    ec2.create_tags(Resources=[volume, card], Tags=ours)
    ec2.create_tags(Resources=[foreign], Tags=[{"Key": OWNER_TAG, "Value": "other"}])
    bench.time.sleep(3600.0)
    found = machines.orphans("own")
    assert set(found) == {
        OrphanedResource("volume", volume, "us-east-1"),
        OrphanedResource("network-interface", card, "us-east-1"),
    }
    for leftover in (*found, *found):
        machines.remove(leftover)
    assert machines.orphans("own") == []
    assert foreign in {one["VolumeId"] for one in ec2.describe_volumes()["Volumes"]}
    machines.remove(OrphanedResource("spot-request", "sir-ffffffff", "us-east-1"))
    assert bench.world.live() == [alive.id]


def test_nothing_is_left_over_by_a_life(bench: AwsBench) -> None:
    machines = bench.fresh()
    machines.destroy(machines.create(ORDER))
    bench.time.sleep(3600.0)
    assert machines.orphans("own") == []
    assert bench.onlooker().describe_volumes()["Volumes"] == []


def test_forgetting_waits_for_the_last_machine(bench: AwsBench) -> None:
    bench.world.shutdown_s = 60.0
    machines = bench.fresh()
    machines.destroy(machines.create(ORDER))
    assert machines.delete_shared("own") == []
    assert bench.groups() == []
    assert bench.onlooker().describe_key_pairs()["KeyPairs"] == []


def test_forgetting_says_what_it_could_not_remove(bench: AwsBench) -> None:
    machines = bench.fresh()
    machine = machines.create(ORDER)
    (left,) = machines.delete_shared("own")
    assert bench.groups()[0]["GroupId"] in left
    machines.destroy(machine)
    assert machines.delete_shared("own") == []


TRIALS = [Trial(EAST, "g6.xlarge", capacity_type, "L4") for capacity_type in CapacityType]
TYPES = ("g6.xlarge", "p5.48xlarge")


def levels(bench: AwsBench, **settings: Any) -> dict[str, Level]:
    found = bench.fresh(regions=("us-east-1",), **settings).check(TRIALS, TYPES)
    return {finding.what: finding.level for finding in found}


def test_a_healthy_account_passes_the_check(bench: AwsBench) -> None:
    for code in ("L-DB2E81BA", "L-3819A6DF"):
        bench.world.quota_vcpus["us-east-1", code] = 64
    found = levels(bench)
    assert next(iter(found)) == "credentials"
    assert set(found.values()) == {Level.FINE}
    assert {"ec2:TerminateInstances", "launch of g6.xlarge (spot) in use1-az1"} <= set(found)
    assert sum(what.startswith("quota") for what in found) == 2
    assert bench.world.live() == []
    assert bench.world.belongings("us-east-1") == []


def test_the_check_names_the_missing_action_and_the_empty_quota(bench: AwsBench) -> None:
    bench.world.denied = {"TerminateInstances", "ImportKeyPair"}
    bench.world.quota_vcpus |= {("us-east-1", "L-3819A6DF"): 0, ("us-east-1", "L-DB2E81BA"): 8}
    found = {one.what: one for one in bench.fresh(regions=("us-east-1",)).check(TRIALS, TYPES)}
    quota = found["quota All G and VT Spot Instance Requests in us-east-1"]
    assert found["ec2:ImportKeyPair"].level is Level.MISSING
    assert found["ec2:TerminateInstances"].level is Level.NOTE  # it may be allowed on what has our tag
    assert "ec2:TerminateInstances" in found["ec2:TerminateInstances"].message
    assert quota.level is Level.NOTE
    assert "L-3819A6DF" in quota.message
    assert "quotas" not in found


def test_an_account_without_any_quota_cannot_be_used(bench: AwsBench) -> None:
    codes = ("L-3819A6DF", "L-DB2E81BA", "L-417A185B", "L-7212CCBC", "L-C4BD4855", "L-7295265B")
    bench.world.quota_vcpus |= dict.fromkeys((("us-east-1", code) for code in codes), 0)
    assert levels(bench)["quotas"] is Level.MISSING


def test_an_account_that_may_use_only_some_families_can_be_used(bench: AwsBench) -> None:
    bench.world.quota_vcpus |= {("us-east-1", "L-3819A6DF"): 8, ("us-east-1", "L-7212CCBC"): 0}
    assert Level.MISSING not in levels(bench).values()


def test_without_permission_for_quotas_the_account_can_be_used(bench: AwsBench) -> None:
    bench.world.denied = {"GetServiceQuota"}
    found = levels(bench)
    assert found["quotas"] is Level.NOTE
    assert Level.MISSING not in found.values()


def test_the_check_launches_in_the_vpc_of_the_configuration(bench: AwsBench) -> None:
    found = levels(bench, vpc="none-of-this-name")
    assert found["launch of g6.xlarge (spot) in use1-az1"] is Level.MISSING


def test_without_credentials_nothing_else_is_looked_at(bench: AwsBench) -> None:
    bench.world.fail("*", "ExpiredToken", times=100)
    (finding,) = bench.fresh().check()
    assert (finding.what, finding.level) == ("credentials", Level.MISSING)
    assert "ExpiredToken" in finding.message


def _until_accepted(machines: Any, order: Any) -> Any:
    """As a caller does: a transient error is the same order again."""
    for _ in range(20):
        try:
            return machines.create(order)
        except TransientError:
            continue
    raise AssertionError("never accepted")
