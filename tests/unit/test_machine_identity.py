"""The identity of machines: the settings, and what they put into the requests of the three clouds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.cloud import compute_v1

from policies.model import CapacityType, Role, Zone
from provisioners.aws.image import Image
from provisioners.aws.translate import request_of, trial_order
from provisioners.azure.translate import NetworkIds, machine_body
from provisioners.gcp.translate import instance_of
from provisioners.port.vm import Trial
from skyserve_cli.config import ConfigError, load_config
from tests.clouds.azure.azure_contract import request_problems
from tests.clouds.azure.azure_harness import order as azure_order
from tests.clouds.azure.azure_world import VM

ACCOUNT = "models@acme.iam.gserviceaccount.com"
ARN = "arn:aws:iam::123456789012:instance-profile/models"
IDENTITY = (
    "/subscriptions/s/resourceGroups/g/providers/Microsoft.ManagedIdentity/userAssignedIdentities/models"
)


@pytest.mark.parametrize(
    ("profile", "sent"), [(None, None), ("models", {"Name": "models"}), (ARN, {"Arn": ARN})]
)
def test_an_aws_request_names_the_instance_profile(profile: str | None, sent: dict[str, str] | None) -> None:
    order = trial_order(Trial(Zone("aws", "us-east-1", "use1-az1"), "g6.xlarge", CapacityType.SPOT, "L4"))
    request = request_of(
        order,
        "token",
        Image("ami-1", "/dev/sda1", 30),
        key_name=None,
        subnet="subnet-1",
        groups=(),
        use_private_ip=False,
        instance_profile=profile,
    )
    assert request.get("IamInstanceProfile") == sent


@pytest.mark.parametrize(
    ("accelerator", "fast"), [("A100-80GB", True), ("H100", True), ("L4", False), ("T4", False)]
)
def test_the_disk_of_large_gpus_is_fast(accelerator: str, fast: bool) -> None:
    order = trial_order(
        Trial(Zone("aws", "us-east-1", "use1-az1"), "any.xlarge", CapacityType.SPOT, accelerator)
    )
    request = request_of(
        order,
        "t",
        Image("ami-1", "/dev/sda1", 30),
        key_name=None,
        subnet="s",
        groups=(),
        use_private_ip=False,
    )
    (mapping,) = request["BlockDeviceMappings"]
    assert (mapping["Ebs"].get("Throughput"), mapping["Ebs"].get("Iops")) == (
        (500, 4000) if fast else (None, None)
    )


def test_load_balancers_have_no_identity() -> None:
    trial = Trial(Zone("aws", "us-east-1", "use1-az1"), "g6.xlarge", CapacityType.SPOT, "L4")
    order = replace(trial_order(trial), role=Role.LOAD_BALANCER, public_key="ssh-ed25519 AAAA test")
    image, place = (
        Image("ami-1", "/dev/sda1", 30),
        NetworkIds("/subscriptions/s/subnets/m", "/subscriptions/s/nsg/m"),
    )
    request = request_of(
        order, "t", image, key_name=None, subnet="s", groups=(), use_private_ip=False, instance_profile=ARN
    )
    assert "IamInstanceProfile" not in request
    azure = replace(azure_order("chat-1"), role=Role.LOAD_BALANCER)
    assert "identity" not in machine_body(azure, place, "Canonical:ubuntu-24_04-lts:server:latest", IDENTITY)
    gcp = replace(order, zone=Zone("gcp", "us-central1", "us-central1-a"), instance_type="g2-standard-4")
    instance = instance_of(
        gcp, project="acme", network="", network_tags=(), public=True, service_account=ACCOUNT
    )
    assert not instance.service_accounts


def test_the_machine_of_a_controller_has_its_identity_and_outlives_a_shutdown() -> None:
    trial = Trial(Zone("aws", "us-east-1", "use1-az1"), "t3.small", CapacityType.ON_DEMAND)
    order = replace(trial_order(trial), role=Role.CONTROLLER, public_key="ssh-ed25519 AAAA test")
    image, place = (
        Image("ami-1", "/dev/sda1", 8),
        NetworkIds("/subscriptions/s/subnets/m", "/subscriptions/s/nsg/m"),
    )
    request = request_of(
        order, "t", image, key_name=None, subnet="s", groups=(), use_private_ip=False, instance_profile=ARN
    )
    assert request["IamInstanceProfile"] == {"Arn": ARN}
    assert request["InstanceInitiatedShutdownBehavior"] == "stop"
    azure = replace(azure_order("chat-1"), role=Role.CONTROLLER)
    body = machine_body(azure, place, "Canonical:ubuntu-24_04-lts:server:latest", IDENTITY)
    assert body["identity"]["userAssignedIdentities"] == {IDENTITY: {}}
    gcp = replace(order, zone=Zone("gcp", "us-central1", "us-central1-a"), instance_type="e2-small")
    instance = instance_of(
        gcp, project="acme", network="", network_tags=(), public=True, service_account=ACCOUNT
    )
    assert [one.email for one in instance.service_accounts] == [ACCOUNT]


@pytest.mark.parametrize("account", [None, ACCOUNT])
def test_a_gcp_instance_has_the_service_account_with_the_scope_of_the_platform(account: str | None) -> None:
    zone = Zone("gcp", "us-central1", "us-central1-a")
    order = replace(
        trial_order(Trial(zone, "g2-standard-4", CapacityType.SPOT, "L4")), public_key="ssh-ed25519 AAAA test"
    )
    instance = instance_of(
        order, project="acme", network="", network_tags=(), public=True, service_account=account
    )
    body: dict[str, Any] = compute_v1.Instance.to_dict(instance)
    scope = "https://www.googleapis.com/auth/cloud-platform"
    assert body["service_accounts"] == ([] if account is None else [{"email": ACCOUNT, "scopes": [scope]}])


@pytest.mark.parametrize("identity", [None, IDENTITY])
def test_an_azure_machine_has_the_identity(identity: str | None) -> None:
    place = NetworkIds("/subscriptions/s/subnets/machines", "/subscriptions/s/networkSecurityGroups/machines")
    body = machine_body(azure_order("chat-1"), place, "Canonical:ubuntu-24_04-lts:server:latest", identity)
    assigned = {"type": "UserAssigned", "userAssignedIdentities": {IDENTITY: {}}}
    assert body.get("identity") == (None if identity is None else assigned)
    assert not request_problems(VM, body)


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ("aws: {instance_profile: ''}", "clouds.aws.instance_profile"),
        ("gcp: {service_account: models}", "clouds.gcp.service_account"),
        ("azure: {subscription_id: s, identity: models}", "clouds.azure.identity"),
    ],
)
def test_a_bad_identity_is_an_error_with_the_path_of_the_key(section: str, path: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"clouds: {{{section}}}\n")
    with pytest.raises(ConfigError, match=path):
        load_config(config)
