"""The RunInstances request of a machine: values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from policies.model import CapacityType, Role
from provisioners.aws.image import Image
from provisioners.machines import MachineOrder, Trial
from provisioners.reservations import Reservation

# Accelerators whose models have 40 GB and more: at gp3's 125 MB/s a cold start would wait a quarter of an hour for them. The rest costs
# about 0.025 USD per hour (0.04 USD per MB/s and month, 0.005 per operation per second and month, at list prices of us-east-1).
_LARGE = frozenset(
    {"A100", "A100-80GB", "H100", "H200", "B200", "B300", "GB200", "GB300", "L40S", "RTX-PRO-6000"}
)
_FAST_DISK = {"Throughput": 500, "Iops": 4000}


def request_of(
    order: MachineOrder,
    token: str,
    image: Image,
    *,
    key_name: str | None,
    subnet: str,
    groups: Sequence[str],
    use_private_ip: bool,
    instance_profile: str | None = None,
    is_encrypted: bool = False,
    kms_key: str | None = None,
    reservation: Reservation | None = None,
) -> dict[str, Any]:
    """The parameters of RunInstances for one machine, `token` being its client token. Without `kms_key` an encrypted disk has the
    account's default key. With a `reservation` it is launched there or not at all."""
    interface: dict[str, Any] = {
        "DeviceIndex": 0,
        "SubnetId": subnet,
        "AssociatePublicIpAddress": not use_private_ip,
        "DeleteOnTermination": True,
    }
    if groups:
        interface["Groups"] = list(groups)
    disk: dict[str, Any] = {
        "VolumeSize": max(order.disk_gb or 0, image.disk_gb, 1),
        "VolumeType": "gp3",
        "DeleteOnTermination": True,
    }
    if order.accelerator in _LARGE:
        disk |= _FAST_DISK
    if is_encrypted or kms_key is not None:
        disk["Encrypted"] = True
    if kms_key is not None:
        disk["KmsKeyId"] = kms_key
    params: dict[str, Any] = {
        "ClientToken": token,
        "ImageId": image.id,
        "InstanceType": order.instance_type,
        "MinCount": 1,
        "MaxCount": 1,
        "UserData": order.user_data,
        "NetworkInterfaces": [interface],
        "BlockDeviceMappings": [{"DeviceName": image.root_device, "Ebs": disk}],
        # One hop: what runs in a container behind a bridge, the first hop, is to read neither user data nor the notices,
        # which are watched on the host. A container in the host's own network can.
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
        },
        # A machine that no controller has visited for a long time shuts itself down.
        "InstanceInitiatedShutdownBehavior": "terminate",
    }
    if instance_profile is not None and order.role is Role.REPLICA:
        by = "Arn" if instance_profile.startswith("arn:") else "Name"
        params["IamInstanceProfile"] = {by: instance_profile}
    if key_name is not None:
        params["KeyName"] = key_name
    kinds = ["instance", "volume", "network-interface"]
    if order.capacity_type is CapacityType.SPOT:
        kinds.append("spot-instances-request")
        params["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
        }
    if reservation is not None:
        by = "CapacityReservationResourceGroupArn" if ":" in reservation.id else "CapacityReservationId"
        params["CapacityReservationSpecification"] = {"CapacityReservationTarget": {by: reservation.id}}
        if reservation.kind == "capacity_block":
            params["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    tags = {"Name": order.token, **order.tags}
    labels = [{"Key": key, "Value": value} for key, value in tags.items()]
    params["TagSpecifications"] = [{"ResourceType": kind, "Tags": labels} for kind in kinds]
    return params


def trial_order(trial: Trial, labels: Mapping[str, str] | None = None) -> MachineOrder:
    """The order with which `serve check` asks about a machine that it does not launch."""
    return MachineOrder(
        token="skyserve-check",  # noqa: S106 - the name of a machine
        owner="check",
        service="check",
        replica_id=0,
        rank=0,
        num_nodes=1,
        zone=trial.zone.physical,
        reservation=trial.zone.reservation,
        instance_type=trial.instance_type,
        capacity_type=trial.capacity_type,
        public_key="",
        user_data="",
        accelerator=trial.accelerator,
        labels=labels or {},
    )


def client_token(order: MachineOrder, attempt: int) -> str:
    """The idempotency token of a launch, at most 64 ASCII characters: it has all by which two launches of the same
    machine can differ on purpose. `attempt` counts from 0."""
    parts = (
        order.owner,
        order.token,
        str(order.zone),
        order.instance_type,
        order.capacity_type.value,
        str(attempt),
    )
    return sha256("\n".join(parts).encode()).hexdigest()[:48]
