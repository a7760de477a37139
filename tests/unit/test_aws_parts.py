"""The pure parts of the AWS provisioner."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from policies.model import CapacityType, FailureKind, Scope, Zone
from provisioners.aws.machines import client_token
from provisioners.aws.translate import machine_of, refusal_of, state_of
from provisioners.port.errors import Refusal
from provisioners.port.vm import MachineOrder, MachineState

ORDER = MachineOrder(
    token="own-chat-1",
    owner="own",
    service="chat",
    replica_id=1,
    rank=0,
    num_nodes=1,
    zone=Zone("aws", "us-east-1", "use1-az1"),
    instance_type="g6.xlarge",
    capacity_type=CapacityType.SPOT,
    public_key="ssh-ed25519 AAAA",
)
TAKEN = "EC2 took the spot instance back (Server.SpotInstanceTermination)"


@pytest.mark.parametrize(
    ("name", "code", "state", "message"),
    [
        ("pending", "", MachineState.PENDING, ""),
        ("running", "", MachineState.RUNNING, ""),
        ("shutting-down", "Client.UserInitiatedShutdown", MachineState.STOPPING, ""),
        ("shutting-down", "Server.SpotInstanceTermination", MachineState.STOPPING, TAKEN),
        ("stopping", "Client.UserInitiatedShutdown", MachineState.STOPPING, ""),
        (
            "stopped",
            "Client.UserInitiatedShutdown",
            MachineState.FAILED,
            "it is stopped, and its disk is still billed",
        ),
        ("terminated", "Client.UserInitiatedShutdown", MachineState.TERMINATED, ""),
        ("terminated", "Server.SpotInstanceTermination", MachineState.PREEMPTED, TAKEN),
        (
            "terminated",
            "Server.SpotInstanceShutdown",
            MachineState.PREEMPTED,
            "EC2 took the spot instance back (Server.SpotInstanceShutdown)",
        ),
        ("terminated", "Client.InstanceInitiatedShutdown", MachineState.TERMINATED, "why"),
        (
            "terminated",
            "Server.InternalError",
            MachineState.TERMINATED,
            "EC2 failed to start it; another zone is next (why)",
        ),
        ("terminated", "", MachineState.TERMINATED, ""),
        ("hibernating", "", MachineState.FAILED, "it is hibernating, and its disk is still billed"),
    ],
)
def test_a_state(name: str, code: str, state: MachineState, message: str) -> None:
    described: dict[str, Any] = {"State": {"Name": name}}
    if code:
        described["StateReason"] = {"Code": code, "Message": "why"}
    assert state_of(described) == (state, message)


@pytest.mark.parametrize("name", ["shutting-down", "terminated"])
@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        ("Server.InsufficientInstanceCapacity", Refusal(FailureKind.CAPACITY)),
        ("Server.InternalError", Refusal(FailureKind.CAPACITY)),
        ("Client.VolumeLimitExceeded", Refusal(FailureKind.QUOTA)),
        ("Client.InvalidSnapshot.NotFound", Refusal(FailureKind.REFUSED, Scope.REGION)),
        ("Client.InternalError", Refusal(FailureKind.REFUSED, Scope.REGION)),
        ("Client.UserInitiatedShutdown", None),
        ("Client.InstanceInitiatedShutdown", None),
        ("Server.SpotInstanceTermination", None),
    ],
)
def test_a_death_at_birth_means(name: str, code: str, refusal: Refusal | None) -> None:
    described = {"State": {"Name": name}, "StateReason": {"Code": code, "Message": "why"}}
    assert refusal_of(described, state_of(described)[0]) == refusal


def test_a_description_becomes_the_machine_of_its_order() -> None:
    described = {
        "InstanceId": "i-1",
        "InstanceLifecycle": "spot",
        "State": {"Name": "running"},
        "Placement": {"AvailabilityZone": "us-east-1b"},
        "PrivateIpAddress": "172.31.0.9",
        "PublicIpAddress": "192.0.2.9",
        "LaunchTime": datetime.fromtimestamp(1000, UTC),
        "Tags": [
            {"Key": key, "Value": value} for key, value in replace(ORDER, rank=1, num_nodes=2).tags.items()
        ],
    }
    machine = machine_of(
        described, "us-east-1", {"us-east-1b": "use1-az1"}, use_private_ip=False, preempt_at=1120.0
    )
    assert (machine.id, machine.token, machine.owner, machine.service) == ("i-1", "own-chat-1", "own", "chat")
    assert (machine.replica_id, machine.rank, machine.num_nodes) == (1, 1, 2)
    assert (machine.zone, machine.capacity_type) == (ORDER.zone, CapacityType.SPOT)
    assert (machine.address, machine.private_address) == ("192.0.2.9", "172.31.0.9")
    assert (machine.launched_at, machine.preempt_at) == (1000.0, 1120.0)


def test_a_machine_that_has_lost_its_tags_can_still_be_destroyed() -> None:
    machine = machine_of(
        {
            "InstanceId": "i-1",
            "State": {"Name": "running"},
            "Tags": [{"Key": "skyserve-replica", "Value": "x"}],
        },
        "us-east-1",
        {},
        use_private_ip=True,
    )
    assert (machine.id, machine.zone.region, machine.token, machine.replica_id) == ("i-1", "us-east-1", "", 0)


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({}, True),
        ({"user_data": "other"}, True),
        ({"image": "ami-1"}, True),
        ({"token": "own-chat-2"}, False),
        ({"owner": "other"}, False),
        ({"zone": Zone("aws", "us-east-1", "use1-az2")}, False),
        ({"instance_type": "g5.xlarge"}, False),
        ({"capacity_type": CapacityType.ON_DEMAND}, False),
    ],
    ids=lambda value: "-".join(value) or "nothing" if isinstance(value, dict) else "",
)
def test_a_client_token_is_of_the_attempt(change: dict[str, Any], is_same: bool) -> None:
    token = client_token(ORDER, 0)
    assert (client_token(replace(ORDER, **change), 0) == token) is is_same
    assert client_token(ORDER, 1) != token
    assert len(token) <= 64
    assert token.isascii()


def test_the_sdk_is_not_loaded_before_the_cloud_is_used() -> None:
    program = "import sys, provisioners, provisioners.registry; sys.exit('boto3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
