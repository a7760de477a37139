"""Azure's shapes of our values, both ways and pure: names, the bodies we send, and what the responses mean.

*Names.* A resource group per owner, service and region; in it a machine is named by its token, and what comes with it
by the token and a suffix, so that a card, an address or a disk shows whose it was when nothing else does.

*Records.* Azure forgets a machine the moment it is deleted, and it deletes a spot machine that it takes back. So every
machine that Azure has accepted gets a record: a resource of the type sshPublicKeys, which costs nothing, does nothing, and
keeps tags. A record without a machine says that the machine is dead, and by whose will: we note ours before we act on
it. Azure's activity log would show it too, but minutes late.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from azure.mgmt.compute.models import InstanceViewStatus, SshPublicKeyResource, VirtualMachine

from policies.model import CapacityType, FailureKind, Role, Zone
from provisioners.azure.errors import CLOUD, meaning
from provisioners.offers.reservations import Reservation
from provisioners.port.errors import InvalidRequestError, Refusal
from provisioners.port.image_family import ImageFamily
from provisioners.port.vm import (
    CAPACITY_TAG,
    NODES_TAG,
    OWNER_TAG,
    RANK_TAG,
    REPLICA_TAG,
    SERVICE_TAG,
    TOKEN_TAG,
    Machine,
    MachineOrder,
    MachineState,
    role_in,
)

ZONE_TAG = "skyserve-zone"
LAUNCHED_TAG = "skyserve-launched"  # UNIX seconds
ENDED_TAG = "skyserve-ended"  # MachineState of a dead machine
ENDED_AT_TAG = "skyserve-ended-at"  # UNIX seconds

NIC_SUFFIX, ADDRESS_SUFFIX, DISK_SUFFIX = "-nic", "-ip", "-os"

#: publisher:offer:sku:version. The images for HPC have the driver, CUDA or ROCm, and Docker.
IMAGES: Mapping[ImageFamily, str] = MappingProxyType(
    {
        ImageFamily.PLAIN: "Canonical:ubuntu-24_04-lts:server:latest",
        ImageFamily.PLAIN_ARM64: "Canonical:ubuntu-24_04-lts:server-arm64:latest",
        ImageFamily.CUDA: "microsoft-dsvm:ubuntu-hpc:2204:latest",
        ImageFamily.ROCM: "microsoft-dsvm:ubuntu-hpc:2204-rocm:latest",
    }
)

# Which version of the network provider makes the card and the address that a machine is ordered with.
_NETWORK_API_VERSION = "2022-11-01"

_MAX_SLUG = 40

_S = MachineState


@dataclass(frozen=True, slots=True)
class NetworkIds:
    """Ids of the shared network resources that a machine uses. It has no public address if `is_private`."""

    subnet_id: str
    security_group_id: str
    is_private: bool = False


@dataclass(frozen=True, slots=True)
class Addresses:
    """Of one machine: from outside, and from its own region."""

    public: str | None = None
    private: str | None = None


# --- Names ------------------------------------------------------------------------------------------------------------


def group_name(owner: str, service: str, region: str) -> str:
    """Return the resource group of a service's machines in a region. The digest keeps owners apart, and names short."""
    digest = hashlib.sha256("\0".join((owner, service, region)).encode()).hexdigest()[:12]
    slug = re.sub(r"[^a-z0-9]+", "-", service.lower()).strip("-")[:_MAX_SLUG]
    return f"skyserve-{slug}-{region}-{digest}"


def group_of(resource_id: str) -> str:
    """Return the name of the resource group in an id."""
    parts = resource_id.split("/")
    lowered = [part.lower() for part in parts]
    return parts[lowered.index("resourcegroups") + 1]


def name_of(resource_id: str) -> str:
    return resource_id.rstrip("/").rsplit("/", 1)[-1]


def zone_number(zone: Zone) -> str | None:
    """ "1" of `eastus-1`; None of `eastus`, which is the region without a choice of zone."""
    if zone.name == zone.region:
        return None
    region, _, number = zone.name.rpartition("-")
    if region != zone.region or not number.isdigit():
        raise InvalidRequestError(
            f"{zone.name!r} is no zone of {zone.region}: write {zone.region}-1, or {zone.region} for any",
            cloud=CLOUD,
            zone=zone,
        )
    return number


def zone_of(location: str, zones: list[str] | None) -> Zone:
    region = location.replace(" ", "").lower()
    return Zone(CLOUD, region, f"{region}-{zones[0]}" if zones else region)


def image_reference(image: str) -> dict[str, str]:
    """Of `publisher:offer:sku:version`, or of the id of an image, a gallery image or a version of one."""
    if image.startswith("/"):
        shared = image.lower()
        key = "sharedGalleryImageId" if shared.startswith("/sharedgalleries/") else "id"
        key = "communityGalleryImageId" if shared.startswith("/communitygalleries/") else key
        return {key: image}
    parts = image.split(":")
    if len(parts) != 4 or not all(parts):
        raise InvalidRequestError(
            f"{image!r} is no image: write publisher:offer:sku:version, or a resource id", cloud=CLOUD
        )
    return dict(zip(("publisher", "offer", "sku", "version"), parts, strict=True))


# --- Bodies -----------------------------------------------------------------------------------------------------------


def machine_body(
    order: MachineOrder,
    place: NetworkIds,
    image: str,
    identity: str | None = None,
    dead_man_identity: str | None = None,
    disk_encryption_set: str | None = None,
    reservation: Reservation | None = None,
) -> dict[str, Any]:
    """Return the machine with its card, address and disk in one PUT: all that is created is deleted with it.

    The disk has no tags here (`AzureMachines` adds them).

    Replicas get `identity`, all other machines, and replicas without it, `dead_man_identity`: with two of them, the metadata
    service would give a token only to those who name one.
    """
    zone = zone_number(order.zone)
    properties: dict[str, Any] = {
        "hardwareProfile": {"vmSize": order.instance_type},
        "storageProfile": {
            "imageReference": image_reference(image),
            "osDisk": _disk(order, disk_encryption_set),
        },
        "osProfile": _login(order),
        "networkProfile": {
            "networkApiVersion": _NETWORK_API_VERSION,
            "networkInterfaceConfigurations": [_card(order, place)],
        },
    }
    if order.capacity_type is CapacityType.SPOT:
        properties |= {
            "priority": "Spot",
            "evictionPolicy": "Delete",
            "billingProfile": {"maxPrice": -1},  # up to the on-demand price, and never evicted for the price
        }
    if reservation is not None:
        properties["capacityReservation"] = {"capacityReservationGroup": {"id": reservation.id}}
    body: dict[str, Any] = {"location": order.zone.region, "tags": order.tags, "properties": properties}
    if identity is None or order.role is Role.LOAD_BALANCER:
        identity = dead_man_identity
    if identity is not None:
        body["identity"] = {"type": "UserAssigned", "userAssignedIdentities": {identity: {}}}
    return body if zone is None else {**body, "zones": [zone]}


def _disk(order: MachineOrder, encryption_set: str | None) -> dict[str, Any]:
    managed: dict[str, Any] = {"storageAccountType": "StandardSSD_LRS"}
    if encryption_set is not None:
        managed["diskEncryptionSet"] = {"id": encryption_set}
    disk: dict[str, Any] = {
        "name": order.token + DISK_SUFFIX,
        "createOption": "FromImage",
        "deleteOption": "Delete",
        "managedDisk": managed,
    }
    return disk if order.disk_gb is None else {**disk, "diskSizeGB": order.disk_gb}


def _login(order: MachineOrder) -> dict[str, Any]:
    key = {"path": f"/home/{order.user}/.ssh/authorized_keys", "keyData": order.public_key}
    profile: dict[str, Any] = {
        "computerName": order.token,
        "adminUsername": order.user,
        "linuxConfiguration": {"disablePasswordAuthentication": True, "ssh": {"publicKeys": [key]}},
    }
    if order.user_data:
        profile["customData"] = base64.b64encode(order.user_data.encode()).decode()
    return profile


def _card(order: MachineOrder, place: NetworkIds) -> dict[str, Any]:
    address: dict[str, Any] = {"primary": True, "subnet": {"id": place.subnet_id}}
    if not place.is_private:
        address["publicIPAddressConfiguration"] = {
            "name": order.token + ADDRESS_SUFFIX,
            "sku": {"name": "Standard"},
            "tags": order.tags,
            "properties": {"deleteOption": "Delete", "publicIPAllocationMethod": "Static"},
        }
    return {
        "name": order.token + NIC_SUFFIX,
        "tags": order.tags,
        "properties": {
            "primary": True,
            "deleteOption": "Delete",
            "networkSecurityGroup": {"id": place.security_group_id},
            "ipConfigurations": [{"name": "primary", "properties": address}],
        },
    }


def record_body(
    machine: Machine, ended: MachineState | None, now: float, labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the record of a machine, running or gone. `labels` are the user's."""
    tags = {
        **(labels or {}),
        OWNER_TAG: machine.owner,
        SERVICE_TAG: machine.service,
        REPLICA_TAG: str(machine.replica_id),
        TOKEN_TAG: machine.token,
        RANK_TAG: str(machine.rank),
        NODES_TAG: str(machine.num_nodes),
        CAPACITY_TAG: machine.capacity_type.value,
        ZONE_TAG: machine.zone.name,
        LAUNCHED_TAG: str(int(now if machine.launched_at is None else machine.launched_at)),
    }
    if ended is not None:
        tags |= {ENDED_TAG: ended.value, ENDED_AT_TAG: str(int(now))}
    return {"location": machine.zone.region, "tags": tags, "properties": {}}


# --- Responses --------------------------------------------------------------------------------------------------------


def machine_of(vm: VirtualMachine, addresses: Addresses | None = None) -> Machine | None:
    """Return the machine that Azure describes, or None if it is not one of ours. `vm` has its instance view."""
    properties, tags = vm.properties, vm.tags or {}
    if properties is None or vm.id is None or not _is_ours(tags):
        return None
    capacity_type = CapacityType(tags[CAPACITY_TAG])
    statuses = statuses_of(vm)
    state = machine_state(properties.provisioning_state or "", power_of(statuses), capacity_type)
    at = addresses or Addresses()
    return Machine(
        id=vm.id,
        token=tags[TOKEN_TAG],
        owner=tags[OWNER_TAG],
        service=tags[SERVICE_TAG],
        replica_id=int(tags[REPLICA_TAG]),
        rank=int(tags[RANK_TAG]),
        num_nodes=int(tags[NODES_TAG]),
        zone=zone_of(vm.location, vm.zones),
        capacity_type=capacity_type,
        state=state,
        address=at.public or at.private,
        private_address=at.private,
        launched_at=None if properties.time_created is None else properties.time_created.timestamp(),
        message=_message(state, capacity_type, statuses),
        refusal=_refusal(state, capacity_type, statuses),
        instance_type=(properties.hardware_profile.vm_size or "") if properties.hardware_profile else "",
        role=role_in(tags),
    )


def machine_of_record(record: SshPublicKeyResource, machine_id: str) -> Machine | None:
    """Return the machine that a record remembers. It is TERMINATED as long as the record does not say how it terminated."""
    tags = record.tags or {}
    if not _is_ours(tags) or ZONE_TAG not in tags:
        return None
    state = MachineState(tags.get(ENDED_TAG, _S.TERMINATED.value))
    capacity_type = CapacityType(tags[CAPACITY_TAG])
    return Machine(
        id=machine_id,
        token=tags[TOKEN_TAG],
        owner=tags[OWNER_TAG],
        service=tags[SERVICE_TAG],
        replica_id=int(tags[REPLICA_TAG]),
        rank=int(tags[RANK_TAG]),
        num_nodes=int(tags[NODES_TAG]),
        zone=Zone(CLOUD, record.location, tags[ZONE_TAG]),
        capacity_type=capacity_type,
        state=state,
        launched_at=float(tags[LAUNCHED_TAG]),
        message=_message(state, capacity_type, []),
    )


def machine_state(provisioning: str, power: str, capacity_type: CapacityType) -> MachineState:
    """From `provisioningState` and the PowerState of the instance view ("" where there is none).

    "Failed" alone shows little: Azure also calls a machine so that runs, but whose agent was late. The power state decides. A machine
    that is switched off from inside is "stopped", and costs what a running one does.
    """
    if provisioning == "Deleting":
        return _S.STOPPING
    if power == "running":
        return _S.RUNNING
    if power in ("deallocating", "deallocated") and capacity_type is CapacityType.SPOT:
        return _S.PREEMPTED
    if provisioning == "Failed" or power in ("stopping", "stopped", "deallocating", "deallocated"):
        return _S.FAILED
    if provisioning == "Succeeded" and power == "":
        return _S.RUNNING
    return _S.PENDING


def is_deleting(vm: VirtualMachine) -> bool:
    return vm.properties is not None and vm.properties.provisioning_state == "Deleting"


def statuses_of(vm: VirtualMachine) -> list[InstanceViewStatus]:
    view = None if vm.properties is None else vm.properties.instance_view
    return [] if view is None else view.statuses or []


def power_of(statuses: list[InstanceViewStatus]) -> str:
    """ "running" of PowerState/running; "" if Azure does not say."""
    return _status("PowerState/", statuses)


def failure_of(statuses: list[InstanceViewStatus]) -> tuple[str, str]:
    """(code, message) of a creation that failed, of ProvisioningState/failed/AllocationFailed."""
    for status in statuses:
        if (status.code or "").lower().startswith("provisioningstate/failed"):
            code = (status.code or "").split("/")
            return (code[2] if len(code) > 2 else ""), status.message or ""
    return "", ""


def _status(prefix: str, statuses: list[InstanceViewStatus]) -> str:
    codes = [status.code or "" for status in statuses]
    return next((code.removeprefix(prefix) for code in codes if code.startswith(prefix)), "")


def _message(state: MachineState, capacity_type: CapacityType, statuses: list[InstanceViewStatus]) -> str:
    if state is _S.PREEMPTED:
        return "Azure took the spot machine back"
    if state is _S.TERMINATED and capacity_type is CapacityType.ON_DEMAND:
        return "the machine was deleted"
    if state is not _S.FAILED:
        return ""
    code, text = failure_of(statuses)
    return f"{code}: {text}" if code else f"the machine is switched off ({power_of(statuses) or 'failed'})"


def _refusal(
    state: MachineState, capacity_type: CapacityType, statuses: list[InstanceViewStatus]
) -> Refusal | None:
    """Return what the failure of a creation means that outlasted our wait for it."""
    code, text = failure_of(statuses)
    if state is not _S.FAILED or not code:
        return None
    row = meaning(code, None, text, capacity_type)
    return None if row.kind is FailureKind.TRANSIENT else Refusal(row.kind, row.scope)


def _is_ours(tags: Mapping[str, str]) -> bool:
    """Return whether all that a machine is known by is there, and readable."""
    whole = (REPLICA_TAG, RANK_TAG, NODES_TAG)
    return (
        all(tag in tags for tag in (OWNER_TAG, SERVICE_TAG, TOKEN_TAG))
        and all(tags.get(tag, "").isdigit() for tag in whole)
        and tags.get(CAPACITY_TAG) in {kind.value for kind in CapacityType}
    )
