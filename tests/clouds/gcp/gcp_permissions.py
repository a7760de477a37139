"""Which permissions a call to Compute Engine needs, as its REST reference lists them ("IAM Permissions" of each method).

What an insert needs depends on its body.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "compute.instances.get": ("compute.instances.get",),
    "compute.instances.delete": ("compute.instances.delete",),
    "compute.instances.aggregatedList": ("compute.instances.list",),
    "compute.zoneOperations.list": ("compute.zoneOperations.list",),
    "compute.zoneOperations.wait": ("compute.zoneOperations.get",),
    "compute.globalOperations.wait": ("compute.globalOperations.get",),
    "compute.disks.aggregatedList": ("compute.disks.list",),
    "compute.disks.delete": ("compute.disks.delete",),
    "compute.addresses.aggregatedList": ("compute.addresses.list",),
    "compute.addresses.delete": ("compute.addresses.delete",),
    "compute.networks.get": ("compute.networks.get",),
    "compute.networks.insert": ("compute.networks.create",),
    "compute.networks.delete": ("compute.networks.delete",),
    "compute.firewalls.get": ("compute.firewalls.get",),
    "compute.firewalls.list": ("compute.firewalls.list",),
    "compute.firewalls.insert": ("compute.firewalls.create", "compute.networks.updatePolicy"),
    "compute.firewalls.update": ("compute.firewalls.update", "compute.networks.updatePolicy"),
    "compute.firewalls.delete": ("compute.firewalls.delete", "compute.networks.updatePolicy"),
    "compute.subnetworks.get": ("compute.subnetworks.get",),
    "compute.routers.aggregatedList": ("compute.routers.list",),
    "compute.projects.get": ("compute.projects.get",),
    "compute.regions.list": ("compute.regions.list",),
    "compute.machineTypes.aggregatedList": ("compute.machineTypes.list",),
    "compute.acceleratorTypes.aggregatedList": ("compute.acceleratorTypes.list",),
}


def needs_of(method: str, project: str, body: Any) -> Iterator[tuple[str, str]]:
    """The permissions, each with its project, in the order in which a refusal names the first that is missing. Methods of other
    services need none here."""
    if method != "compute.instances.insert":
        yield from ((permission, project) for permission in _NEEDS.get(method, ()))
        return
    yield "compute.instances.create", project
    for disk in body["disks"]:
        yield "compute.disks.create", project
        if disk.get("initializeParams", {}).get("labels"):
            yield "compute.disks.setLabels", project
    for interface in body["networkInterfaces"]:
        subnetwork = interface.get("subnetwork", "")
        where = subnetwork.split("/")[1] if subnetwork else project
        yield "compute.subnetworks.use", where
        if interface.get("accessConfigs"):
            yield "compute.subnetworks.useExternalIp", where
    for part, permission in (("metadata", "setMetadata"), ("labels", "setLabels"), ("tags", "setTags")):
        if body.get(part):
            yield f"compute.instances.{permission}", project
