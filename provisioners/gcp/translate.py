"""Between our orders and Compute Engine's instances: names, labels, machine shapes, images. Pure.

*Spot* machines are deleted by their preemption, so that nothing of them is billed. A machine whose lease is
over deletes itself (`termination`), if there is a service account for that. None is restarted by the cloud: a failed machine is replaced, and a start-up script runs at every boot, which so
is the first one.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType

from google.cloud import compute_v1

from policies.model import CapacityType, Role, Zone
from provisioners.gcp.errors import CLOUD
from provisioners.gcp.protection import PLAIN, Protection
from provisioners.offers.reservations import Reservation
from provisioners.port.errors import InvalidRequestError
from provisioners.port.image_family import ImageFamily
from provisioners.port.vm import (
    CAPACITY_TAG,
    NODES_TAG,
    OWNER_TAG,
    RANK_TAG,
    REPLICA_TAG,
    ROLE_TAG,
    SERVICE_TAG,
    TOKEN_TAG,
    Machine,
    MachineOrder,
    MachineState,
    default_image,
    role_in,
)

GPU_IMAGE = "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580"
CPU_IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
IMAGES: Mapping[ImageFamily, str] = MappingProxyType(
    {
        ImageFamily.PLAIN: CPU_IMAGE,
        ImageFamily.PLAIN_ARM64: "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-arm64",
        ImageFamily.CUDA: GPU_IMAGE,
        ImageFamily.CUDA_LEGACY: GPU_IMAGE,  # driver 580 is the last one that knows Volta and older
        ImageFamily.CUDA_ARM64: "projects/ubuntu-os-accelerator-images/global/images/family/"
        "ubuntu-accelerator-2404-arm64-with-nvidia-580",
    }
)
GPU_DISK_GB = 200  # of a machine with accelerators, without a disk_size: an image, an engine and its weights

_MAX_LABEL = 63
_CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"  # IAM decides, not the scope
_COMPUTE = "https://www.googleapis.com/auth/compute"
_OUR_TAGS = (OWNER_TAG, SERVICE_TAG, REPLICA_TAG, TOKEN_TAG, RANK_TAG, NODES_TAG, CAPACITY_TAG, ROLE_TAG)
_NAMESPACE = uuid.UUID("5f1b8f4e-43c5-5b0c-9f3e-6d2d8e1c7a90")

# What n1 machines can be given; every other family has its accelerators built in.
_GUEST_ACCELERATORS = {
    "T4": "nvidia-tesla-t4",
    "V100": "nvidia-tesla-v100",
    "P100": "nvidia-tesla-p100",
    "P4": "nvidia-tesla-p4",
}
_BUILT_IN = re.compile(r"[ag][0-9]+x?-")
_HYPERDISK_ONLY = re.compile(r"(a3-ultragpu|a4|a4x|g4|c4|c4a|c4d|n4)-")  # these take no persistent disks

_S = MachineState
_STATES = {
    "PENDING": _S.PENDING,
    "PROVISIONING": _S.PENDING,
    "STAGING": _S.PENDING,
    "REPAIRING": _S.PENDING,
    "RUNNING": _S.RUNNING,
    "PENDING_STOP": _S.STOPPING,
    "STOPPING": _S.STOPPING,
    "DEPROVISIONING": _S.STOPPING,
    "SUSPENDING": _S.STOPPING,
    "STOPPED": _S.FAILED,
    "SUSPENDED": _S.FAILED,
    "TERMINATED": _S.FAILED,
}


def name_of(token: str) -> str:
    """Return the instance's name. Names begin with a letter, tokens need not."""
    return token if token[:1].isalpha() else f"s{token}"


def request_id(project: str, zone: Zone, token: str, failures: int, variant: str = "") -> str:
    """Return the idempotency key of one insertion.

    Google remembers a key for an hour together with its outcome, so after an insertion that failed the next one needs
    another; how many have failed, the cloud remembers. A `variant` of the request has a key of its own.
    """
    return str(uuid.uuid5(_NAMESPACE, f"{project}/{zone.name}/{token}/{failures}{variant}"))


def encode_label(value: str) -> str:
    """Return the value of a label (lower-case letters, digits, hyphens, underscores) that stands for `value`.

    Everything else becomes two underscores and its byte in hexadecimal, as does an underscore before an underscore.
    """

    def escape(found: re.Match[str]) -> str:
        return "".join(f"__{byte:02x}" for byte in found[0].encode())

    encoded = re.sub(r"[^a-z0-9_-]|_(?=_)", escape, value)
    if len(encoded) > _MAX_LABEL:
        raise InvalidRequestError(f"{value!r} is too long for a label of Google Cloud", cloud=CLOUD)
    return encoded


def decode_label(label: str) -> str:
    """Return what `encode_label` was given."""
    pattern = re.compile(rb"__([0-9a-f]{2})")
    return pattern.sub(lambda found: bytes([int(found[1], 16)]), label.encode()).decode(errors="replace")


def labels_of(order: MachineOrder) -> dict[str, str]:
    """Return our tags, encoded, and the user's labels, which must be labels as they are."""
    for key, value in order.labels.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key) or not re.fullmatch(r"[a-z0-9_-]{0,63}", value):
            raise InvalidRequestError(
                f"label {key}={value} is none on Google Cloud: lower-case letters, digits, - and _, at most 63 of them,"
                " and a key begins with a letter",
                cloud=CLOUD,
            )
    return {**order.labels, **{key: encode_label(order.tags[key]) for key in _OUR_TAGS}}


def same_tags(order: MachineOrder, labels: Mapping[str, str]) -> bool:
    """Return whether a resource with these labels was made for this order."""
    return all(labels.get(tag) == encode_label(order.tags[tag]) for tag in (OWNER_TAG, TOKEN_TAG))


def owned(owner: str) -> str:
    """Return the filter of listings."""
    return f'labels.{OWNER_TAG}="{encode_label(owner)}"'


def shape_of(order: MachineOrder) -> tuple[str, str | None, int]:
    """(machine type, guest accelerator or None, how many). `n1-standard-8+2xnvidia-tesla-t4` says all of it."""
    machine_type, plus, guest = order.instance_type.partition("+")
    if plus:
        found = re.fullmatch(r"([1-9][0-9]?)x([a-z0-9-]+)", guest)
        if found is None:
            raise _wrong(
                order, f"instance type {order.instance_type} is not like n1-standard-8+1xnvidia-tesla-t4"
            )
        return machine_type, found[2], int(found[1])
    if order.accelerator is None or _BUILT_IN.match(machine_type):
        return machine_type, None, 0
    guest_type = _GUEST_ACCELERATORS.get(order.accelerator)
    if guest_type is None or not machine_type.startswith("n1-"):
        raise _wrong(order, f"{machine_type} cannot have the accelerator {order.accelerator}")
    if order.accelerator_count != int(order.accelerator_count) or order.accelerator_count < 1:
        raise _wrong(order, f"a machine has whole accelerators, not {order.accelerator_count:g}")
    return machine_type, guest_type, int(order.accelerator_count)


def image_of(order: MachineOrder, project: str) -> str:
    """`projects/…/images/…` as it is, `PROJECT/FAMILY` the newest of a family, a bare name one of our own project."""
    if order.image is None:
        has_gpu = shape_of(order)[1] is not None or _BUILT_IN.match(order.instance_type) is not None
        return default_image(order, IMAGES, "a GPU" if has_gpu else None)
    if "/images/" in order.image:
        return order.image[order.image.index("projects/") :] if "projects/" in order.image else order.image
    owner, slash, family = order.image.partition("/")
    if slash:
        return f"projects/{owner}/global/images/family/{family}"
    return f"projects/{project}/global/images/{order.image}"


def instance_of(
    order: MachineOrder,
    *,
    project: str,
    public: bool,
    network: str = "",
    network_tags: tuple[str, ...] = (),
    service_account: str | None = None,
    dead_man_account: str | None = None,
    protection: Protection = PLAIN,
    reservation: Reservation | None = None,
) -> compute_v1.Instance:
    """Return the request for Compute Engine. InvalidRequestError if the order cannot be said there.

    Replicas get the identity `service_account` (its email address), all other machines, and replicas without it,
    `dead_man_account`, for Compute Engine alone. An instance has one at most. With a `reservation` it is launched there or not at
    all.
    """
    if not re.fullmatch(r"[a-z0-9-]*[a-z0-9]", order.token) or len(name_of(order.token)) > _MAX_LABEL:
        raise _wrong(order, f"token {order.token!r} cannot name an instance")
    machine_type, accelerator, count = shape_of(order)
    zone, labels = order.zone.name, labels_of(order)
    is_spot = order.capacity_type is CapacityType.SPOT
    has_gpu = accelerator is not None or _BUILT_IN.match(machine_type) is not None
    disk_gb = order.disk_gb or (GPU_DISK_GB if has_gpu else None)
    instance = compute_v1.Instance(
        name=name_of(order.token),
        machine_type=f"zones/{zone}/machineTypes/{machine_type}",
        labels=labels,
        tags=compute_v1.Tags(items=list(network_tags)),
        disks=[_boot_disk(order, project, labels, disk_gb, protection)],
        network_interfaces=[
            compute_v1.NetworkInterface(
                **({"network": network} if network else {}),
                access_configs=[compute_v1.AccessConfig(name="External NAT", type_="ONE_TO_ONE_NAT")]
                if public
                else [],
            )
        ],
        metadata=compute_v1.Metadata(
            items=[
                compute_v1.Items(key=key, value=value)
                for key, value in _metadata(order, has_gpu, protection.leaves_os_login).items()
            ]
        ),
        scheduling=_scheduling(is_spot, has_gpu),
    )
    if reservation is not None:
        _reserve(instance, reservation)
    if protection.shielded:
        instance.shielded_instance_config = compute_v1.ShieldedInstanceConfig(
            enable_secure_boot=True, enable_vtpm=True, enable_integrity_monitoring=True
        )
    instance.service_accounts = _accounts(order, service_account, dead_man_account)
    if accelerator is not None:
        instance.guest_accelerators = [
            compute_v1.AcceleratorConfig(
                accelerator_type=f"zones/{zone}/acceleratorTypes/{accelerator}", accelerator_count=count
            )
        ]
    return instance


def _boot_disk(
    order: MachineOrder, project: str, labels: Mapping[str, str], disk_gb: int | None, protection: Protection
) -> compute_v1.AttachedDisk:
    zone = order.zone.name
    disk_type = "hyperdisk-balanced" if _HYPERDISK_ONLY.match(shape_of(order)[0]) else "pd-balanced"
    disk = compute_v1.AttachedDisk(
        boot=True,
        auto_delete=True,
        initialize_params=compute_v1.AttachedDiskInitializeParams(
            source_image=image_of(order, project),
            disk_type=f"zones/{zone}/diskTypes/{disk_type}",
            labels=labels,
            **({} if disk_gb is None else {"disk_size_gb": disk_gb}),
        ),
    )
    key = protection.key_in(order.zone)
    if key is not None:
        disk.disk_encryption_key = compute_v1.CustomerEncryptionKey(kms_key_name=key)
    return disk


def _reserve(instance: compute_v1.Instance, reservation: Reservation) -> None:
    """Let the instance be launched in the reservation, or not at all."""
    instance.reservation_affinity = compute_v1.ReservationAffinity(
        consume_reservation_type="SPECIFIC_RESERVATION",
        key="compute.googleapis.com/reservation-name",
        values=[reservation.id],
    )
    if reservation.kind == "bound":
        instance.scheduling.provisioning_model = "RESERVATION_BOUND"
        instance.scheduling.instance_termination_action = "DELETE"


def _accounts(
    order: MachineOrder, service_account: str | None, dead_man_account: str | None
) -> list[compute_v1.ServiceAccount]:
    """Return the identity of the instance: at most one."""
    if service_account is not None and order.role is not Role.LOAD_BALANCER:
        return [compute_v1.ServiceAccount(email=service_account, scopes=[_CLOUD_PLATFORM])]
    if dead_man_account is not None:
        return [compute_v1.ServiceAccount(email=dead_man_account, scopes=[_COMPUTE])]
    return []


def _metadata(order: MachineOrder, has_gpu: bool, leaves_os_login: bool) -> dict[str, str]:
    script = "user-data" if order.user_data.startswith("#cloud-config") else "startup-script"
    # OS Login ignores keys in metadata, and removes them where it is turned on. Then only user data makes our user and its
    # key, which sshd reads besides what OS Login responds.
    keys = {
        "ssh-keys": f"{order.user}:{order.public_key}",
        "block-project-ssh-keys": "TRUE",  # no other keys
        "enable-oslogin": "FALSE",
    }
    return {
        **({} if leaves_os_login else keys),
        **({script: order.user_data} if order.user_data else {}),
        **({"install-nvidia-driver": "True"} if has_gpu else {}),
    }


def _scheduling(is_spot: bool, has_gpu: bool) -> compute_v1.Scheduling:
    moves = not (is_spot or has_gpu)  # machines that cannot be moved to another host must be terminated there
    scheduling = compute_v1.Scheduling(
        on_host_maintenance="MIGRATE" if moves else "TERMINATE", automatic_restart=False
    )
    if is_spot:
        scheduling.provisioning_model = "SPOT"
        scheduling.instance_termination_action = "DELETE"
    return scheduling


def machine_of(instance: compute_v1.Instance, *, public: bool) -> Machine | None:
    """Return the instance as ours, or None if it does not say that it is.

    The owner's label is enough: one whose other labels are damaged must be seen to be cleaned up.
    """
    labels = {key: decode_label(value) for key, value in instance.labels.items() if key in _OUR_TAGS}
    if OWNER_TAG not in labels:
        return None
    card = instance.network_interfaces[0] if instance.network_interfaces else compute_v1.NetworkInterface()
    outer = card.access_configs[0].nat_i_p if card.access_configs else ""
    state = _STATES.get(instance.status, _S.PENDING)
    is_spot = instance.scheduling.provisioning_model == "SPOT"
    return Machine(
        id=instance.name,
        token=labels.get(TOKEN_TAG, instance.name),
        owner=labels[OWNER_TAG],
        service=labels.get(SERVICE_TAG, ""),
        replica_id=_number(labels, REPLICA_TAG, 0),
        rank=_number(labels, RANK_TAG, 0),
        num_nodes=_number(labels, NODES_TAG, 1),
        zone=zone_of(instance.zone),
        capacity_type=CapacityType.SPOT if is_spot else CapacityType.ON_DEMAND,
        state=state,
        address=(outer if public else card.network_i_p) or None,
        private_address=card.network_i_p or None,
        launched_at=unix_s(instance.creation_timestamp),
        message=_message(instance) if state is _S.FAILED else "",
        instance_type=last(instance.machine_type),
        role=role_in(labels),
    )


def accepted(order: MachineOrder, now: float) -> Machine:
    """Return the machine before the cloud shows it."""
    return order.machine(name_of(order.token), _S.PENDING, launched_at=now, role=order.role)


def zone_of(url: str) -> Zone:
    """Return the zone of `…/zones/us-central1-a` or of a scope's name."""
    name = last(url)
    return Zone(CLOUD, name.rpartition("-")[0], name)


def last(url: str) -> str:
    """Return the last part of a resource's URL: its name."""
    return url.rpartition("/")[2]


def unix_s(timestamp: str) -> float | None:
    """UNIX seconds of an RFC 3339 time, None of none."""
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else None


def _message(instance: compute_v1.Instance) -> str:
    said = f" ({instance.status_message})" if instance.status_message else ""
    return f"the machine was stopped and does not come back{said}; its disk is still billed"


def _number(labels: Mapping[str, str], tag: str, default: int) -> int:
    value = labels.get(tag, "")
    return int(value) if value.isdecimal() else default


def _wrong(order: MachineOrder, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, cloud=CLOUD, zone=order.zone)
