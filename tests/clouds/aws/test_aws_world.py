"""The world is as strict as EC2: checked with the bare SDK. The first test is the canary for moto's insides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto.ec2.models.instances import Instance, InstanceState, StateReason

from tests.clouds.aws.aws_account import PLAIN_IMAGE
from tests.clouds.aws.aws_bench import PUBLIC_KEY, AwsBench, aws_bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsBench]:
    with aws_bench(monkeypatch) as opened:
        yield opened


def launch(bench: AwsBench, token: str = "t-1", **changes: Any) -> str:  # noqa: S107
    ec2 = bench.onlooker()
    subnets = ec2.describe_subnets(Filters=[{"Name": "availability-zone-id", "Values": ["use1-az1"]}])[
        "Subnets"
    ]
    groups = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["default"]}])[
        "SecurityGroups"
    ]
    if not ec2.describe_key_pairs()["KeyPairs"]:
        ec2.import_key_pair(KeyName="k", PublicKeyMaterial=PUBLIC_KEY.encode())
    card = {"DeviceIndex": 0, "SubnetId": subnets[0]["SubnetId"], "Groups": [groups[0]["GroupId"]]}
    params: dict[str, Any] = {
        "ClientToken": token,
        "ImageId": bench.world.images["us-east-1", PLAIN_IMAGE],
        "InstanceType": "t3.medium",
        "MinCount": 1,
        "MaxCount": 1,
        "KeyName": "k",
        "NetworkInterfaces": [card],
    }
    return str(ec2.run_instances(**(params | changes))["Instances"][0]["InstanceId"])


def state(bench: AwsBench, instance_id: str) -> tuple[str, str | None]:
    described = bench.onlooker().describe_instances(InstanceIds=[instance_id])["Reservations"][0][
        "Instances"
    ][0]
    return described["State"]["Name"], described.get("StateReason", {}).get("Code")


def test_the_seam_in_moto_is_where_it_was(bench: AwsBench) -> None:
    bench.world.boot_s, bench.world.shutdown_s = 10.0, 10.0
    instance_id = launch(bench)
    (life,) = bench.world._lives.values()
    assert isinstance(life.instance, Instance)
    assert isinstance(life.instance._state, InstanceState)
    assert isinstance(life.instance.state_reason, StateReason)
    assert state(bench, instance_id)[0] == "pending"
    bench.time.sleep(10.0)
    assert state(bench, instance_id)[0] == "running"
    bench.world.preempt(instance_id)
    assert state(bench, instance_id) == ("shutting-down", "Server.SpotInstanceTermination")
    bench.time.sleep(10.0)
    bench.onlooker().terminate_instances(InstanceIds=[instance_id])
    assert state(bench, instance_id) == ("terminated", "Server.SpotInstanceTermination")


def test_a_client_token_is_idempotent(bench: AwsBench) -> None:
    assert launch(bench, "t-1") == launch(bench, "t-1") != launch(bench, "t-2")


@pytest.mark.parametrize("fails_first", [False, True], ids=["after-success", "after-failure"])
def test_a_client_token_is_of_its_parameters(bench: AwsBench, fails_first: bool) -> None:
    if fails_first:
        bench.world.room["use1-az1", "t3.medium", "on-demand"] = 0
        with pytest.raises(ClientError, match="InsufficientInstanceCapacity"):
            launch(bench)
    else:
        launch(bench)
    with pytest.raises(ClientError, match="IdempotentParameterMismatch"):
        launch(bench, InstanceType="t3.large")


def test_the_client_token_of_a_dead_instance_is_dead(bench: AwsBench) -> None:
    bench.onlooker().terminate_instances(InstanceIds=[launch(bench)])
    with pytest.raises(ClientError, match="IdempotentInstanceTerminated"):
        launch(bench)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"InstanceType": "t3.gigantic"}, "InvalidParameterValue"),
        ({"KeyName": "nobody"}, "InvalidKeyPair.NotFound"),
        ({"ImageId": "ami-00000000000000000"}, "InvalidAMIID.NotFound"),
        ({"MaxCount": 2}, "InvalidParameterValue"),
        ({"UserData": "x" * 16_385}, "InvalidParameterValue"),
        (
            {"NetworkInterfaces": [{"DeviceIndex": 0, "SubnetId": "subnet-0", "Groups": ["x"]}]},
            "InvalidSubnetID.NotFound",
        ),
    ],
    ids=["type", "key", "image", "count", "user-data", "subnet"],
)
def test_a_wrong_launch_is_refused(bench: AwsBench, changes: dict[str, Any], code: str) -> None:
    with pytest.raises(ClientError, match=code):
        launch(bench, **changes)
    assert bench.world.live() == []


@pytest.mark.parametrize(
    ("code", "status", "sent"),
    [
        ("InsufficientInstanceCapacity", 500, 3),
        ("RequestLimitExceeded", 503, 3),
        ("UnauthorizedOperation", 403, 1),
        ("VcpuLimitExceeded", 400, 1),
    ],
)
def test_errors_have_ec2s_statuses_by_which_the_sdk_repeats(
    bench: AwsBench, monkeypatch: pytest.MonkeyPatch, code: str, status: int, sent: int
) -> None:
    """That the SDK, left alone, hides a full zone behind its own repetitions is why ours are off."""
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda seconds: None)
    bench.world.fail("DescribeVpcs", code, times=100)
    with pytest.raises(ClientError) as caught:
        bench.onlooker().describe_vpcs()
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert len(bench.world.asked("DescribeVpcs")) == sent


def test_hooks_see_a_machine_come_and_go(bench: AwsBench) -> None:
    seen: list[str] = []
    bench.world.on_launch = lambda launched: seen.append(launched.id)
    bench.world.on_gone = lambda instance_id: seen.append(f"-{instance_id}")
    instance_id = launch(bench)
    bench.world.preempt(instance_id)
    bench.onlooker().terminate_instances(InstanceIds=[instance_id])
    assert seen == [instance_id, f"-{instance_id}"]
