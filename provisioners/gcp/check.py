"""`serve check` for Google Cloud: credentials, permissions, the way out of private networks, quotas. Nothing is changed.

Which permissions matter, and in which project, follows from the networks that are configured.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import yaml
from google.cloud import compute_v1

from provisioners import permissions
from provisioners.gcp.api import GcpApi
from provisioners.gcp.outbound import outbound
from provisioners.gcp.paths import NetworkSetup, network_of, subnetwork_of
from provisioners.port.errors import AuthError, ProvisionError
from provisioners.port.vm import Finding, Level

_RESOURCE_MANAGER = "cloudresourcemanager.googleapis.com"
_GPU_QUOTA = re.compile(r"(PREEMPTIBLE_)?NVIDIA_\w+_GPUS")
_ALL_GPUS, _NETWORKS = "GPUS_ALL_REGIONS", "NETWORKS"

PERMISSIONS: tuple[str, ...] = tuple(yaml.safe_load(permissions.text_of("gcp"))["includedPermissions"])

# What only some networks need.
_OF_OWN_NETWORKS = frozenset(f"compute.networks.{verb}" for verb in ("create", "delete", "get"))
_LISTING_RULES = frozenset({"compute.firewalls.list"})
_CHANGING_RULES = frozenset(
    {f"compute.firewalls.{verb}" for verb in ("create", "delete", "get", "update")}
    | {"compute.networks.updatePolicy", "compute.globalOperations.get"}
)
_USING_SUBNETWORKS = frozenset({"compute.subnetworks.use", "compute.subnetworks.useExternalIp"})


def check_project(api: GcpApi, setup: NetworkSetup, regions: Sequence[str] = ()) -> list[Finding]:
    """Return the findings, in the order in which they are to be fixed. `regions` are those of the configuration."""
    try:
        projects = api.client(compute_v1.ProjectsClient)
        project = api.call(projects.get, compute_v1.GetProjectRequest(project=api.project))
    except ProvisionError as error:
        return [Finding("credentials", Level.MISSING, message=error.message)]
    return [
        Finding("credentials", Level.FINE, message=f"project {api.project}"),
        *(
            one
            for each, wanted in needed(setup, api.project).items()
            for one in _permissions(api, each, wanted)
        ),
        *(one for path in setup.subnets.values() for one in _subnetwork(api, setup, path)),
        *outbound(api, setup, regions),
        *_quotas(api, project, setup),
    ]


def needed(setup: NetworkSetup, own: str) -> Mapping[str, frozenset[str]]:
    """Return the permissions that are needed in each project.

    Those on the subnetworks of others may be given on these alone, so they are not among them.
    """
    rules_in = set(setup.projects(own) if setup.manage_firewall else ())
    if setup.manage_firewall and not setup.makes_networks:
        used = {subnetwork_of(path).project for path in setup.subnets.values()}
        used |= {network_of(setup.network, own).project} if setup.network is not None else set()
        rules_in = used
    mine = frozenset(PERMISSIONS)
    if not setup.makes_networks:
        mine -= _OF_OWN_NETWORKS
    if setup.subnets:
        mine -= _USING_SUBNETWORKS
    if setup.use_private_ip:
        mine -= {"compute.subnetworks.useExternalIp"}
    if own not in rules_in:
        mine -= _CHANGING_RULES
    if not setup.manage_firewall:
        mine -= _LISTING_RULES
    theirs = _LISTING_RULES | _CHANGING_RULES
    return {own: mine, **dict.fromkeys(sorted(rules_in - {own}), theirs)}


def _permissions(api: GcpApi, project: str, wanted: frozenset[str]) -> list[Finding]:
    path = f"v1/projects/{project}:testIamPermissions"
    policy = "gcp" if project == api.project else "gcp-network"
    where = "" if project == api.project else f" in {project}"
    try:
        reply = api.rest("POST", _RESOURCE_MANAGER, path, json={"permissions": sorted(wanted)})
    except AuthError as error:
        message = f"not determined: to test them, `gcloud services enable {_RESOURCE_MANAGER}`"
        if where:
            message = f"not determined: {error.message}"
        return [Finding(f"permissions{where}", Level.NOTE, message)]
    except ProvisionError as error:
        return [Finding(f"permissions{where}", Level.NOTE, f"not determined: {error.message}")]
    missing = sorted(wanted - {*reply.get("permissions", [])})
    if not missing:
        return [Finding(f"permissions{where}", message=f"all {len(wanted)} of them")]
    return [
        Finding(
            f"permission {name}{where}",
            Level.MISSING,
            f"is missing: a role with every permission is printed by `serve check --policy {policy}`",
        )
        for name in missing
    ]


def _subnetwork(api: GcpApi, setup: NetworkSetup, path: str) -> Iterator[Finding]:
    """Yield whether machines may be put into it: a permission of the subnetwork, or of its project."""
    project, region, name = subnetwork_of(path)
    wanted = {"compute.subnetworks.use"}
    if not setup.use_private_ip:
        wanted.add("compute.subnetworks.useExternalIp")
    if setup.manage_firewall:
        wanted.add("compute.subnetworks.get")
    request = compute_v1.TestIamPermissionsSubnetworkRequest(
        project=project,
        region=region,
        resource=name,
        test_permissions_request_resource=compute_v1.TestPermissionsRequest(permissions=sorted(wanted)),
    )
    client = api.client(compute_v1.SubnetworksClient)
    try:
        reply = api.find(client.test_iam_permissions, request, name)
    except ProvisionError as error:
        yield Finding(f"subnetwork {path}", Level.NOTE, f"not determined: {error.message}")
        return
    if reply is None:
        yield Finding(f"subnetwork {path}", Level.MISSING, "does not exist: check clouds.gcp.subnets")
        return
    missing = sorted(wanted - {*reply.permissions})
    for permission in missing:
        message = "is missing: a role with it is printed by `serve check --policy gcp-network`"
        yield Finding(f"permission {permission} on {path}", Level.MISSING, message)
    if not missing:
        yield Finding(f"subnetwork {path}")


def _quotas(api: GcpApi, project: compute_v1.Project, setup: NetworkSetup) -> list[Finding]:
    """Return the regions whose quotas allow GPUs.

    GPUs of the H100's generation and later have quotas by family (GPUS_PER_GPU_FAMILY), which the Compute API does not list: that no quota is listed is no evidence about them.
    """
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
    for quota in project.quotas:
        if quota.metric == _NETWORKS and setup.makes_networks and quota.usage >= quota.limit:
            message = (
                f"{quota.usage:g} of {quota.limit:g} are used, and a home that has no network yet makes one: set"
                f" clouds.gcp.network or clouds.gcp.subnets to those of yours, or {advice}"
            )
            found.append(Finding(f"quota {_NETWORKS}", Level.NOTE, message))
    return found + [
        Finding(f"quota {metric}", message=", ".join(where)) for metric, where in sorted(rooms.items())
    ]
