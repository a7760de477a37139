"""What has no owner: the rules of `leaks`, as tables."""

from __future__ import annotations

import pytest

from policies.model import CapacityType, Zone
from provisioners.port.base import Instance, InstanceState
from provisioners.port.vm import Machine, MachineState, OrphanedResource, machine_token, token_of_replica
from skyserve_cli.controller.clouds.orphans import (
    HOURS_PER_MONTH,
    YOUNG_S,
    KnownInstances,
    Part,
    of_instance,
    of_leftover,
    of_machine,
    stray_instances,
    stray_leftovers,
    stray_machines,
)

KNOWN = KnownInstances(frozenset({"own-chat-1-0a1b2c3d4e"}), frozenset())
ZONE = Zone("aws", "us-east-1", "use1-az1")
NOW = 10_000.0


def machine(token: str, state: MachineState, rank: int = 0) -> Machine:
    return Machine("i-1", token, "own", "chat", 1, rank, 1, ZONE, CapacityType.SPOT, state, launched_at=NOW)


@pytest.mark.parametrize("rank", [0, 1, 7, 12])
@pytest.mark.parametrize("token", ["own-chat-1-0a1b2c3d4e", "n-n1-2-0123456789"])
def test_every_machine_of_a_replica_leads_back_to_its_token(token: str, rank: int) -> None:
    assert token_of_replica(machine_token(token, rank)) == token


@pytest.mark.parametrize(
    ("token", "state", "is_stray"),
    [
        pytest.param("own-chat-1-0a1b2c3d4e", MachineState.RUNNING, False, id="of-a-replica-that-lives"),
        pytest.param("own-chat-1-0a1b2c3d4e-n3", MachineState.RUNNING, False, id="a-node-of-it"),
        pytest.param("own-chat-2-0a1b2c3d4e", MachineState.RUNNING, True, id="of-no-replica"),
        pytest.param("own-chat-2-0a1b2c3d4e", MachineState.PENDING, True, id="of-no-replica-and-booting"),
        pytest.param("own-chat-2-0a1b2c3d4e", MachineState.STOPPING, True, id="of-no-replica-and-dying"),
        pytest.param("own-chat-2-0a1b2c3d4e", MachineState.FAILED, True, id="of-no-replica-and-broken"),
        pytest.param("own-chat-2-0a1b2c3d4e", MachineState.TERMINATED, False, id="dead"),
        pytest.param("own-chat-2-0a1b2c3d4e", MachineState.PREEMPTED, False, id="taken"),
        pytest.param("", MachineState.RUNNING, True, id="its-tags-were-damaged"),
    ],
)
def test_machines(token: str, state: MachineState, is_stray: bool) -> None:
    assert bool(list(stray_machines([machine(token, state)], KNOWN))) is is_stray


@pytest.mark.parametrize(
    ("token", "state", "is_stray"),
    [
        pytest.param("own-chat-1-0a1b2c3d4e", InstanceState.RUNNING, False, id="of-a-replica-that-lives"),
        pytest.param("own-chat-2-0a1b2c3d4e", InstanceState.SETUP_FAILED, True, id="of-no-replica"),
        pytest.param("own-chat-2-0a1b2c3d4e", InstanceState.TERMINATED, False, id="dead"),
    ],
)
def test_instances(token: str, state: InstanceState, is_stray: bool) -> None:
    instance = Instance("i-1", token, "own", "chat", 1, ZONE, CapacityType.SPOT, state)
    assert bool(list(stray_instances([instance], KNOWN))) is is_stray


@pytest.mark.parametrize(
    ("token", "age_s", "is_stray"),
    [
        pytest.param("own-chat-1-0a1b2c3d4e", YOUNG_S * 9, False, id="of-a-replica-that-lives-however-old"),
        pytest.param("own-chat-1-0a1b2c3d4e-n2", None, False, id="of-a-node-of-it"),
        pytest.param("own-chat-2-0a1b2c3d4e", 1.0, True, id="of-no-replica-however-young"),
        pytest.param("", YOUNG_S + 1.0, True, id="of-nobody-and-old"),
        pytest.param("", YOUNG_S - 1.0, False, id="of-nobody-and-young"),
        pytest.param("", None, True, id="of-nobody-and-of-unknown-age"),
    ],
)
def test_leftovers(token: str, age_s: float | None, is_stray: bool) -> None:
    created_at = None if age_s is None else NOW - age_s
    leftover = OrphanedResource("volume", "vol-1", "us-east-1", token, created_at)
    assert list(stray_leftovers([leftover], KNOWN, NOW)) == ([leftover] if is_stray else [])


def test_what_is_said_of_a_stray() -> None:
    one = of_machine(machine("t", MachineState.RUNNING), usd_hour=2.0)
    assert str(one) == "instance i-1 in aws/us-east-1"
    assert (one.part, one.service, one.created_at) == (Part.INSTANCE, "chat", NOW)
    assert one.usd_month == 2.0 * HOURS_PER_MONTH
    assert of_machine(machine("t", MachineState.RUNNING), usd_hour=None).usd_month is None
    plain = of_instance(
        Instance("i-1", "t", "own", "chat", 1, ZONE, CapacityType.SPOT, InstanceState.RUNNING)
    )
    assert plain.key == one.key == ("aws", "instance", "i-1", "us-east-1")
    disk = of_leftover("aws", Part.LEFTOVER, OrphanedResource("volume", "vol-1", "eu-west-1", usd_month=8.0))
    assert (str(disk), disk.usd_month) == ("volume vol-1 in aws/eu-west-1", 8.0)
    assert disk.view()["part"] == "leftover"
