"""`serve check` for Google Cloud: credentials, permissions, quotas. Nothing is changed."""

from __future__ import annotations

import re
from collections import defaultdict

from google.cloud import compute_v1

from provisioners.errors import AuthError, ProvisionError
from provisioners.gcp.api import GcpApi
from provisioners.machines import Finding

_RESOURCE_MANAGER = "cloudresourcemanager.googleapis.com"
_GPU_QUOTA = re.compile(r"(PREEMPTIBLE_)?NVIDIA_\w+_GPUS")
_ALL_GPUS = "GPUS_ALL_REGIONS"

PERMISSIONS = (
    "compute.addresses.delete",
    "compute.addresses.list",
    "compute.disks.create",
    "compute.disks.delete",
    "compute.disks.list",
    "compute.disks.setLabels",
    "compute.firewalls.create",
    "compute.firewalls.delete",
    "compute.firewalls.get",
    "compute.firewalls.list",
    "compute.firewalls.update",
    "compute.globalOperations.get",
    "compute.instances.create",
    "compute.instances.delete",
    "compute.instances.get",
    "compute.instances.list",
    "compute.instances.setLabels",
    "compute.instances.setMetadata",
    "compute.instances.setTags",
    "compute.networks.create",
    "compute.networks.delete",
    "compute.networks.get",
    "compute.networks.updatePolicy",
    "compute.projects.get",
    "compute.regions.list",
    "compute.subnetworks.use",
    "compute.subnetworks.useExternalIp",
    "compute.zoneOperations.get",
    "compute.zoneOperations.list",
)


def check_project(api: GcpApi) -> list[Finding]:
    """The findings, in the order in which they are to be mended."""
    try:
        projects = api.client(compute_v1.ProjectsClient)
        project = api.call(projects.get, compute_v1.GetProjectRequest(project=api.project))
    except ProvisionError as error:
        return [Finding("credentials", ok=False, message=error.message)]
    return [
        Finding("credentials", ok=True, message=f"project {api.project}"),
        *_permissions(api),
        *_quotas(api, project),
    ]


def _permissions(api: GcpApi) -> list[Finding]:
    path = f"v1/projects/{api.project}:testIamPermissions"
    try:
        answer = api.rest("POST", _RESOURCE_MANAGER, path, json={"permissions": list(PERMISSIONS)})
    except AuthError:
        return [
            Finding(
                "permissions",
                ok=False,
                message=f"to look at them, `gcloud services enable {_RESOURCE_MANAGER}`",
            )
        ]
    except ProvisionError as error:
        return [Finding("permissions", ok=False, message=error.message)]
    missing = sorted({*PERMISSIONS} - {*answer.get("permissions", [])})
    if not missing:
        return [Finding("permissions", ok=True, message=f"all {len(PERMISSIONS)} of them")]
    return [
        Finding(
            f"permission {name}",
            ok=False,
            message="is missing: the role Compute Admin has it (roles/compute.admin)",
        )
        for name in missing
    ]


def _quotas(api: GcpApi, project: compute_v1.Project) -> list[Finding]:
    everywhere = next((quota for quota in project.quotas if quota.metric == _ALL_GPUS), None)
    try:
        regions = api.listed(
            api.client(compute_v1.RegionsClient).list, compute_v1.ListRegionsRequest(project=api.project)
        )
    except ProvisionError as error:
        return [Finding("quotas", ok=False, message=error.message)]
    rooms: dict[str, list[str]] = defaultdict(list)
    for region in regions:
        for quota in region.quotas:
            if _GPU_QUOTA.fullmatch(quota.metric) and quota.limit > 0:
                rooms[quota.metric].append(f"{region.name} {quota.usage:g} of {quota.limit:g}")
    ask = "ask for some under IAM & Admin > Quotas"
    found = []
    if everywhere is not None:
        said = f"{everywhere.usage:g} of {everywhere.limit:g} used" if everywhere.limit else f"is 0: {ask}"
        found.append(Finding(f"quota {_ALL_GPUS}", ok=everywhere.limit > 0, message=said))
    if not rooms:
        found.append(Finding("quotas of GPUs", ok=False, message=f"there is none in any region: {ask}"))
    return found + [
        Finding(f"quota {metric}", ok=True, message=", ".join(where))
        for metric, where in sorted(rooms.items())
    ]
