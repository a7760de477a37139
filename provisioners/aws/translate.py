"""EC2's description of an instance as a `Machine`. Pure.

Sources: "Instance lifecycle" and "Spot request status codes" of the EC2 user guide. A spot instance that is set to
terminate gets its final status code two minutes before it exits: until then, that code is its notice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from policies.model import CapacityType, Role, Scope, Zone
from provisioners.aws.error_codes import AT_BIRTH
from provisioners.aws.errors import CLOUD
from provisioners.aws.image import Image
from provisioners.offers.reservations import Reservation
from provisioners.port.errors import InvalidRequestError, Refusal, RefusedError
from provisioners.port.vm import (
    NODES_TAG,
    OWNER_TAG,
    RANK_TAG,
    REPLICA_TAG,
    SERVICE_TAG,
    TOKEN_TAG,
    Machine,
    MachineOrder,
    MachineState,
    Trial,
    in_region,
    role_in,
)

SPOT_NOTICE_S = 120.0
NOTICE_CODES = (
    "marked-for-termination",
    "instance-terminated-by-price",
    "instance-terminated-capacity-oversubscribed",
    "instance-terminated-no-capacity",
)

_STATES: Mapping[str, MachineState] = MappingProxyType(
    {
        "pending": MachineState.PENDING,
        "running": MachineState.RUNNING,
        "shutting-down": MachineState.STOPPING,
        "stopping": MachineState.STOPPING,
        "stopped": MachineState.FAILED,  # no use any more, and its disk is still billed
        "terminated": MachineState.TERMINATED,
    }
)
_PREEMPTIONS = ("Server.SpotInstanceTermination", "Server.SpotInstanceShutdown")
_ASKED_FOR = "Client.UserInitiatedShutdown"


def machine_of(
    described: Mapping[str, Any],
    region: str,
    zone_ids: Mapping[str, str],
    *,
    use_private_ip: bool,
    preempt_at: float | None = None,
) -> Machine:
    """`zone_ids` are the region's, by the account's zone names.

    Tags that are missing (removed by another owner) leave a machine that can still be seen and destroyed.
    """
    tags = tags_of(described)
    zone_name = described.get("Placement", {}).get("AvailabilityZone", "")
    private_address = described.get("PrivateIpAddress")
    state, message = state_of(described)
    refusal = refusal_of(described, state)
    launched = described.get("LaunchTime")
    return Machine(
        id=described["InstanceId"],
        token=tags.get(TOKEN_TAG, ""),
        owner=tags.get(OWNER_TAG, ""),
        service=tags.get(SERVICE_TAG, ""),
        replica_id=_number(tags.get(REPLICA_TAG), 0),
        rank=_number(tags.get(RANK_TAG), 0),
        num_nodes=_number(tags.get(NODES_TAG), 1),
        zone=Zone(CLOUD, region, zone_ids.get(zone_name, zone_name)),
        capacity_type=(
            CapacityType.SPOT if described.get("InstanceLifecycle") == "spot" else CapacityType.ON_DEMAND
        ),
        state=state,
        address=private_address if use_private_ip else described.get("PublicIpAddress"),
        private_address=private_address,
        launched_at=None if launched is None else launched.timestamp(),
        preempt_at=preempt_at if state in (MachineState.PENDING, MachineState.RUNNING) else None,
        message=message,
        instance_type=described.get("InstanceType", ""),
        refusal=refusal,
        role=role_in(tags),
    )


def state_of(described: Mapping[str, Any]) -> tuple[MachineState, str]:
    """Return the state, and a sentence about its end unless it was requested."""
    state = _STATES.get(described["State"]["Name"], MachineState.FAILED)
    if state in (MachineState.PENDING, MachineState.RUNNING):
        return state, ""
    reason = described.get("StateReason") or {}
    code = reason.get("Code", "")
    if code in _PREEMPTIONS:
        over = state is MachineState.TERMINATED
        return MachineState.PREEMPTED if over else state, f"EC2 took the spot instance back ({code})"
    if state is MachineState.FAILED:
        return state, f"it is {described['State']['Name']}, and its disk is still billed"
    if code in ("", _ASKED_FOR):
        return state, ""
    said = str(reason.get("Message") or code)
    known = AT_BIRTH.find(code, "", None)
    return state, said if known is None else f"{known.advice} ({said})"


def refusal_of(described: Mapping[str, Any], state: MachineState) -> Refusal | None:
    """Return what the end of an instance that EC2 had accepted means, where the reason is one of a launch."""
    code = (described.get("StateReason") or {}).get("Code", "")
    known = AT_BIRTH.find(code, "", None)
    if known is None or state in (MachineState.PENDING, MachineState.RUNNING):
        return None
    return Refusal(known.kind, known.scope)


def tags_of(described: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags", ())}


def forgotten(order: MachineOrder) -> Machine:
    """Return the state of a machine that EC2 remembers by its client token alone."""
    gone = "it was terminated, and EC2 no longer lists it"
    return order.machine(order.token, MachineState.TERMINATED, message=gone)


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdecimal() else default


_MAX_USER_DATA = 16_384

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
    """Return the parameters of RunInstances for one machine, `token` being its client token.

    Without `kms_key` an encrypted disk has the account's default key. With a `reservation` it is launched there or not at
    all.
    """
    interface: dict[str, Any] = {
        "DeviceIndex": 0,
        "SubnetId": subnet,
        "AssociatePublicIpAddress": not use_private_ip,
        "DeleteOnTermination": True,
    }
    if groups:
        interface["Groups"] = list(groups)
    params: dict[str, Any] = {
        "ClientToken": token,
        "ImageId": image.id,
        "InstanceType": order.instance_type,
        "MinCount": 1,
        "MaxCount": 1,
        "UserData": order.user_data,
        "NetworkInterfaces": [interface],
        "BlockDeviceMappings": [
            {"DeviceName": image.root_device, "Ebs": _disk(order, image, is_encrypted, kms_key)}
        ],
        # One hop: what runs in a container behind a bridge, the first hop, is to read neither user data nor the notices,
        # which are watched on the host. A container in the host's own network can.
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
        },
        # A machine that no controller has visited for a long time shuts itself down. That of a controller has state on its disk.
        "InstanceInitiatedShutdownBehavior": "stop" if order.role is Role.CONTROLLER else "terminate",
    }
    if instance_profile is not None and order.role is not Role.LOAD_BALANCER:
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


def _disk(order: MachineOrder, image: Image, is_encrypted: bool, kms_key: str | None) -> dict[str, Any]:
    """Return the boot disk, as EBS takes it."""
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
    return disk


def check_order(
    order: MachineOrder, regions: Collection[str], kms_key: str | Mapping[str, str] | None
) -> None:
    """Raise RefusedError or InvalidRequestError if EC2 cannot, or must not, be requested the machine.

    `regions` are those that are listed, `kms_key` is the setting.
    """
    if order.zone.region not in regions:  # where its machines would never be listed
        raise RefusedError(
            f"{order.zone}: the region is not enabled for this account, or not in config.yaml",
            cloud=CLOUD,
            code="NoRegion",
            zone=order.zone,
            scope=Scope.REGION,
        )
    if kms_key is not None and in_region(kms_key, order.zone.region) is None:
        raise RefusedError(
            f"clouds.aws.kms_key has no key for {order.zone.region}",
            cloud=CLOUD,
            code="NoKey",
            zone=order.zone,
            scope=Scope.REGION,
        )
    if len(order.user_data.encode()) > _MAX_USER_DATA:
        raise InvalidRequestError(
            f"user data has more than {_MAX_USER_DATA} bytes, which is EC2's limit",
            cloud=CLOUD,
            zone=order.zone,
        )


def trial_order(trial: Trial, labels: Mapping[str, str] | None = None) -> MachineOrder:
    """Return the order with which `serve check` tests a machine that it does not launch."""
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
    """Return the idempotency token of a launch, at most 64 ASCII characters.

    It has all by which two launches of the same machine can differ on purpose. `attempt` counts from 0.
    """
    parts = (
        order.owner,
        order.token,
        str(order.zone),
        order.instance_type,
        order.capacity_type.value,
        str(attempt),
    )
    return sha256("\n".join(parts).encode()).hexdigest()[:48]
