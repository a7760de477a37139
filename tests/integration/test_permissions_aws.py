"""The smallest IAM policy: it is enough for `serve check` and for a machine's whole life, and what lacks is named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from policies.model import CapacityType
from provisioners import permissions
from provisioners.port.errors import AuthError, ProvisionError
from provisioners.port.vm import Level, Trial
from tests.clouds.aws.aws_bench import EAST, ORDER, AwsBench, aws_bench

POLICY: dict[str, Any] = json.loads(permissions.text_of("aws"))
TRIALS = [Trial(EAST, "g6.xlarge", capacity_type, "L4") for capacity_type in CapacityType]
ON_DEMAND = replace(ORDER, token="own-chat-2", replica_id=2, capacity_type=CapacityType.ON_DEMAND)

#: Used elsewhere than in a machine's life: names of endpoints, the catalog, the rules of a firewall, and what is only
#: left over where EC2 has lost something.
ELSEWHERE = {
    "ec2:CancelSpotInstanceRequests",
    "ec2:DeleteNetworkInterface",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceTypes",
    "ec2:RevokeSecurityGroupIngress",
    "iam:CreateServiceLinkedRole",
    "route53:ChangeResourceRecordSets",
    "route53:ChangeTagsForResource",
    "route53:CreateHealthCheck",
    "route53:DeleteHealthCheck",
    "route53:ListHealthChecks",
    "route53:ListHostedZonesByName",
    "route53:ListResourceRecordSets",
    "route53:ListTagsForResources",
    "servicequotas:ListServiceQuotas",
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsBench]:
    with aws_bench(monkeypatch) as opened:
        opened.world.policy = POLICY
        for code in ("L-DB2E81BA", "L-3819A6DF"):
            opened.world.quota_vcpus["us-east-1", code] = 64
        yield opened


def actions_of(policy: Mapping[str, Any]) -> list[str]:
    found = set()
    for statement in policy["Statement"]:
        action = statement["Action"]
        found |= {action} if isinstance(action, str) else set(action)
    return sorted(found)


def without(policy: Mapping[str, Any], action: str) -> dict[str, Any]:
    """The policy, not allowing one action."""
    statements = []
    for statement in policy["Statement"]:
        actions = statement["Action"]
        kept = [one for one in ([actions] if isinstance(actions, str) else actions) if one != action]
        if kept:
            statements.append({**statement, "Action": kept})
    return {**policy, "Statement": statements}


def live(bench: AwsBench) -> list[str]:
    """A whole life in an account: launches, lists, prices, orphaned resources, the end. Sentences of what failed."""
    machines = bench.fresh(regions=None)
    said: list[str] = []

    def attempt(step: Any) -> Any:
        try:
            return step()
        except ProvisionError as error:
            said.append(str(error))
            return None

    made = [attempt(lambda order=order: machines.create(order)) for order in (ORDER, ON_DEMAND)]
    attempt(lambda: machines.machines("own"))
    attempt(lambda: machines.spot_prices(["us-east-1"]))
    volume = bench.onlooker_volume(ORDER.tags)
    attempt(lambda: [machines.remove(left) for left in machines.orphans("own") if left.id == volume])
    for machine in made:
        if machine is not None:
            attempt(lambda machine=machine: machines.destroy(machine))
    bench.time.sleep(120.0)
    said += attempt(lambda: machines.delete_shared("own")) or []
    return said


def test_the_policy_is_enough_for_a_whole_life(bench: AwsBench) -> None:
    assert live(bench) == []
    assert bench.world.live() == []
    assert bench.world.belongings("us-east-1") == []


def test_the_policy_passes_the_check(bench: AwsBench) -> None:
    found = bench.fresh(regions=None).check(TRIALS, ["g6.xlarge"])
    assert [one for one in found if one.level is Level.MISSING] == []
    notes = {one.what for one in found if one.level is Level.NOTE}
    assert notes == {  # a dry run has no resource with our tag
        "ec2:AuthorizeSecurityGroupIngress",
        "ec2:CancelSpotInstanceRequests",
        "ec2:DeleteKeyPair",
        "ec2:DeleteNetworkInterface",
        "ec2:DeleteSecurityGroup",
        "ec2:DeleteVolume",
        "ec2:RevokeSecurityGroupIngress",
        "ec2:TerminateInstances",
    }
    assert {one.what for one in found} >= {
        "launch of g6.xlarge (spot) in use1-az1",
        "launch of g6.xlarge (on_demand) in use1-az1",
    }


@pytest.mark.long
@pytest.mark.parametrize("action", [one for one in actions_of(POLICY) if one not in ELSEWHERE])
def test_what_the_policy_lacks_is_named(bench: AwsBench, action: str) -> None:
    bench.world.policy = without(POLICY, action)
    found = bench.fresh(regions=None).check(TRIALS, ["g6.xlarge"])
    said = [one.message for one in found if one.level is not Level.FINE]
    assert any(action in sentence for sentence in said) or any(action in sentence for sentence in live(bench))


def test_a_machine_without_our_tag_cannot_be_terminated(bench: AwsBench) -> None:
    bench.world.policy = None
    machines = bench.fresh()
    machine = machines.create(ON_DEMAND)
    narrow = json.loads(
        json.dumps(POLICY).replace(
            '"aws:ResourceTag/skyserve-owner": "*"', '"aws:ResourceTag/skyserve-owner": "other"'
        )
    )
    bench.world.policy = narrow
    with pytest.raises(AuthError, match="ec2:TerminateInstances"):
        machines.destroy(machine)
