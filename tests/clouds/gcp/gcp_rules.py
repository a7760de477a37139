"""What Google requires of a new instance beyond its discovery document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.clouds.gcp.gcp_ground import PROJECT, Ground
from tests.clouds.gcp.gcp_parts import Refusal, last, not_found

_IMAGES = re.compile(
    r"projects/(deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580"
    r"|ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64|proj-1/global/images/mine)"
)


def check_instance(ground: Ground, zone: str, body: Mapping[str, Any]) -> None:
    """What the discovery document does not say."""
    machine_type = last(body.get("machineType", ""))
    if machine_type not in ground.types_in(zone):
        raise _invalid(
            "resource.machineType",
            body.get("machineType"),
            f"Machine type with name '{machine_type}' does not exist in zone '{zone}'.",
        )
    guests = body.get("guestAccelerators", [])
    if guests and (
        not machine_type.startswith("n1-") or last(guests[0]["acceleratorType"]) not in ground.guests_in(zone)
    ):
        raise not_found(
            f"projects/{PROJECT}/zones/{zone}/acceleratorTypes/{last(guests[0]['acceleratorType'])}"
        )
    if len(body.get("disks", [])) != 1 or not body["disks"][0].get("boot"):
        raise _invalid("resource.disks", None, "Exactly one boot disk is required.")
    key = body["disks"][0].get("diskEncryptionKey", {}).get("kmsKeyName")
    region = zone.rpartition("-")[0]
    if key is not None and f"/locations/{region}/" not in key and "/locations/global/" not in key:
        raise Refusal(400, "invalid", f"Cloud KMS key {key} is in another location than {region}.")
    image = body["disks"][0]["initializeParams"]["sourceImage"]
    if not _IMAGES.fullmatch(image):
        raise not_found(image)
    if len(body.get("networkInterfaces", [])) != 1:
        raise _invalid("resource.networkInterfaces", None, "At least one network interface is required.")
    ground.attachment(zone, body["networkInterfaces"][0])
    _check_constraints(ground, body)
    scheduling = body.get("scheduling", {})
    is_spot = scheduling.get("provisioningModel") == "SPOT"
    has_gpu = bool(guests) or bool(ground.machine_types[machine_type].accelerators)
    if (is_spot or has_gpu) and scheduling.get("onHostMaintenance") != "TERMINATE":
        raise _invalid("resource.scheduling.onHostMaintenance", None, "Must be TERMINATE.")
    if is_spot and scheduling.get("automaticRestart") is not False:
        raise _invalid("resource.scheduling.automaticRestart", None, "Must be false for Spot.")
    if not is_spot and "instanceTerminationAction" in scheduling:
        raise _invalid("resource.scheduling.instanceTerminationAction", None, "Only for Spot.")
    for key, value in body.get("labels", {}).items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key) or not re.fullmatch(r"[a-z0-9_-]{0,63}", value):
            raise _invalid("resource.labels", f"{key}={value}", "Invalid label.")
    tags = body.get("tags", {}).get("items", [])
    if any(not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", tag) for tag in tags):
        raise _invalid("resource.tags.items", tags, "Invalid tag.")


def _check_constraints(ground: Ground, body: Mapping[str, Any]) -> None:
    """What the organisation forbids."""
    metadata = {item["key"]: item["value"] for item in body.get("metadata", {}).get("items", [])}
    if ground.requires_os_login and metadata.get("enable-oslogin", "TRUE").upper() != "TRUE":
        raise _violated("compute.requireOsLogin", "enable-oslogin must be TRUE.")
    shielded = body.get("shieldedInstanceConfig", {})
    wanted = ("enableSecureBoot", "enableVtpm", "enableIntegrityMonitoring")
    if ground.requires_shielded and not all(shielded.get(key) for key in wanted):
        raise _violated("compute.requireShieldedVm", "Secure Boot is not enabled.")
    disk = body["disks"][0]["initializeParams"]
    for label in ground.required_labels:
        if label not in body.get("labels", {}) or label not in disk.get("labels", {}):
            raise Refusal(
                412,
                "conditionNotMet",
                f"Operation denied by org policy on resource: 'customConstraints/custom.{label}'.",
            )


def _violated(constraint: str, why: str) -> Refusal:
    text = f"Constraint constraints/{constraint} violated for project {PROJECT}. {why}"
    return Refusal(412, "conditionNotMet", text)


def _invalid(name: str, value: object, message: str) -> Refusal:
    return Refusal(400, "invalid", f"Invalid value for field '{name}': '{value}'. {message}")
