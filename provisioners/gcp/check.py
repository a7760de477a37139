"""`serve check` for Google Cloud: credentials, permissions, quotas. Nothing is changed."""

from __future__ import annotations

import re
from collections import defaultdict

import yaml
from google.cloud import compute_v1

from provisioners import permissions
from provisioners.errors import AuthError, ProvisionError
from provisioners.gcp.api import GcpApi
from provisioners.machines import Finding, Level

_RESOURCE_MANAGER = "cloudresourcemanager.googleapis.com"
_GPU_QUOTA = re.compile(r"(PREEMPTIBLE_)?NVIDIA_\w+_GPUS")
_ALL_GPUS = "GPUS_ALL_REGIONS"

PERMISSIONS: tuple[str, ...] = tuple(yaml.safe_load(permissions.text_of("gcp"))["includedPermissions"])


def check_project(api: GcpApi) -> list[Finding]:
    """The findings, in the order in which they are to be fixed."""
    try:
        projects = api.client(compute_v1.ProjectsClient)
        project = api.call(projects.get, compute_v1.GetProjectRequest(project=api.project))
    except ProvisionError as error:
        return [Finding("credentials", Level.MISSING, message=error.message)]
    return [
        Finding("credentials", Level.FINE, message=f"project {api.project}"),
        *_permissions(api),
        *_quotas(api, project),
    ]


def _permissions(api: GcpApi) -> list[Finding]:
    path = f"v1/projects/{api.project}:testIamPermissions"
    try:
        reply = api.rest("POST", _RESOURCE_MANAGER, path, json={"permissions": list(PERMISSIONS)})
    except AuthError:
        message = f"not determined: to test them, `gcloud services enable {_RESOURCE_MANAGER}`"
        return [Finding("permissions", Level.NOTE, message)]
    except ProvisionError as error:
        return [Finding("permissions", Level.NOTE, f"not determined: {error.message}")]
    missing = sorted({*PERMISSIONS} - {*reply.get("permissions", [])})
    if not missing:
        return [Finding("permissions", message=f"all {len(PERMISSIONS)} of them")]
    return [
        Finding(
            f"permission {name}",
            Level.MISSING,
            "is missing: a role with every permission is printed by `serve check --policy gcp`",
        )
        for name in missing
    ]


def _quotas(api: GcpApi, project: compute_v1.Project) -> list[Finding]:
    """GPUs of the H100's generation and later have quotas by family (GPUS_PER_GPU_FAMILY), which the Compute API does
    not list: that no quota is listed says nothing about them."""
    everywhere = next((quota for quota in project.quotas if quota.metric == _ALL_GPUS), None)
    try:
        regions = api.listed(
            api.client(compute_v1.RegionsClient).list, compute_v1.ListRegionsRequest(project=api.project)
        )
    except ProvisionError as error:
        return [Finding("quotas", Level.NOTE, f"not determined: {error.message}")]
    rooms: dict[str, list[str]] = defaultdict(list)
    for region in regions:
        for quota in region.quotas:
            if _GPU_QUOTA.fullmatch(quota.metric) and quota.limit > 0:
                rooms[quota.metric].append(f"{region.name} {quota.usage:g} of {quota.limit:g}")
    advice = "request an increase under IAM & Admin > Quotas"
    found = []
    if everywhere is not None and everywhere.limit > 0:
        used = f"{everywhere.usage:g} of {everywhere.limit:g} used"
        found.append(Finding(f"quota {_ALL_GPUS}", message=used))
    elif everywhere is not None:
        found.append(
            Finding(f"quota {_ALL_GPUS}", Level.MISSING, f"is 0, for all regions together: {advice}")
        )
    if not rooms:
        message = (
            f"none is above 0 in any region, up to the A100 and L4: {advice}; H100 and later are not listed"
        )
        found.append(Finding("quotas of GPUs", Level.NOTE, message))
    return found + [
        Finding(f"quota {metric}", message=", ".join(where)) for metric, where in sorted(rooms.items())
    ]
