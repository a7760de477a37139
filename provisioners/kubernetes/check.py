"""`serve check` for clusters: the credentials, each permission by the API's own review, nodes, their room, and quotas.

Nothing is changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from provisioners import permissions
from provisioners.kubernetes import placement
from provisioners.kubernetes.api import KubeApi
from provisioners.kubernetes.node_state import is_ready
from provisioners.kubernetes.nodes import NodeShape, shapes_of
from provisioners.kubernetes.quantities import amount
from provisioners.kubernetes.settings import Cluster
from provisioners.port.errors import AuthError, ProvisionError
from provisioners.port.vm import Finding, Level

_OF_AGENTS = "skyserve-load-balancers"
_ADVICE = "is missing: `serve check --policy kubernetes` prints a role with every permission"


def check_cluster(cluster: Cluster, api: KubeApi) -> list[Finding]:
    """Return the findings, in the order in which they are to be fixed."""
    region = cluster.region
    try:
        api.list("pod")
    except AuthError as error:
        return [Finding(f"{region}: credentials", Level.MISSING, error.message)]
    except ProvisionError as error:
        return [Finding(f"{region}: namespace", Level.MISSING, error.message)]
    found = [Finding(f"{region}: credentials", message=f"namespace {api.namespace}")]
    found += _permissions(region, api, has_agents=cluster.agent_image is not None)
    found += _nodes(cluster, api)
    found += _quotas(region, api)
    return found


def needed(*, has_agents: bool = True) -> Iterator[tuple[dict[str, str], bool]]:
    """Yield what the roles allow, verb by verb, and whether no Pod can be run without it.

    `has_agents`: also what only load balancers need.
    """
    for document in yaml.safe_load_all(permissions.text_of("kubernetes")):
        if document["kind"] not in ("Role", "ClusterRole"):
            continue
        if document["metadata"]["name"] == _OF_AGENTS and not has_agents:
            continue
        for rule in document["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    for verb in rule["verbs"]:
                        name, _, sub = resource.partition("/")
                        attributes = {"verb": verb, "group": group, "resource": name}
                        is_required = document["kind"] == "Role" and name != "events"
                        yield attributes | ({"subresource": sub} if sub else {}), is_required


def _permissions(region: str, api: KubeApi, *, has_agents: bool) -> Iterator[Finding]:
    count = 0
    is_complete = True
    for attributes, is_required in needed(has_agents=has_agents):
        what = f"{attributes['verb']} {attributes['resource']}"
        what += f"/{attributes['subresource']}" if "subresource" in attributes else ""
        try:
            is_allowed, reason = api.may(attributes)
        except ProvisionError as error:
            yield Finding(f"{region}: permissions", Level.NOTE, f"not determined: {error.message}")
            return
        count += 1
        if not is_allowed:
            is_complete = False
            level = Level.MISSING if is_required else Level.NOTE
            yield Finding(
                f"{region}: permission {what}", level, f"{_ADVICE}{f' ({reason})' if reason else ''}"
            )
    if is_complete:
        yield Finding(f"{region}: permissions", message=f"all {count} of them")


def _nodes(cluster: Cluster, api: KubeApi) -> Iterator[Finding]:
    try:
        nodes = api.list_nodes().items
    except ProvisionError as error:
        level = Level.NOTE if cluster.pools else Level.MISSING
        yield Finding(f"{cluster.region}: nodes", level, f"cannot be listed: {error.message}")
        return
    shapes = shapes_of(nodes, cluster)
    if not shapes:
        yield Finding(f"{cluster.region}: nodes", Level.MISSING, f"none of {len(nodes)} takes our Pods")
        return
    try:
        taken = requested_by_node(api.list_all_pods().items)
    except ProvisionError:
        taken = None  # it is no business of ours
    yield Finding(f"{cluster.region}: nodes", message=_room(shapes, nodes, taken))


def requested_by_node(pods: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return what the Pods on each node request, by resource."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for pod in pods:
        node = (pod.get("spec") or {}).get("nodeName")
        if node:
            for container in pod["spec"].get("containers") or ():
                for name, value in ((container.get("resources") or {}).get("requests") or {}).items():
                    found[node][name] += amount(value)
    return found


def _room(
    shapes: Iterable[NodeShape],
    nodes: Iterable[Mapping[str, Any]],
    taken: Mapping[str, Mapping[str, float]] | None,
) -> str:
    """Return how many nodes and accelerators there are by kind, and how many of those are free."""
    counts: dict[str, int] = defaultdict(int)
    for shape in shapes:
        counts[shape.accelerator] += shape.count if shape.accelerator else 1
    free: dict[str, int] = defaultdict(int)
    for node in filter(is_ready, nodes):
        name, _ = placement.accelerator_of(node["metadata"].get("labels") or {})
        has = (node.get("status") or {}).get("allocatable") or {}
        used = (taken or {}).get(node["metadata"]["name"], {})
        free[name] += int(sum(amount(has.get(one)) - used.get(one, 0.0) for one in placement.RESOURCES))
    parts = [f"{counts['']} without accelerators"] if counts[""] else []
    parts += [
        f"{counts[name]} {name}" + (f" ({free[name]} free)" if taken is not None else "")
        for name in sorted(filter(None, counts))
    ]
    return ", ".join(parts)


def _quotas(region: str, api: KubeApi) -> Iterator[Finding]:
    try:
        quotas = api.list("resource_quota", managed=False).items
    except ProvisionError:
        return
    for quota in quotas:
        status = quota.get("status") or {}
        hard, used = status.get("hard") or {}, status.get("used") or {}
        for name, most in sorted(hard.items()):
            if amount(used.get(name)) >= amount(most):
                message = f"{used.get(name)} of {most} are used: ask for a larger ResourceQuota"
                yield Finding(f"{region}: quota {quota['metadata']['name']}/{name}", Level.NOTE, message)
