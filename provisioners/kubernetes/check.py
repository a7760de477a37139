"""`serve check` for clusters: the credentials, the version, each permission by the API's own review, nodes, their room, and quotas.

Last comes what admission says of the very objects that a launch would create, by a dry run. Nothing is changed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from policies.model import CapacityType, Role
from provisioners import permissions
from provisioners.kubernetes import placement, rehearsal
from provisioners.kubernetes.api import KubeApi
from provisioners.kubernetes.node_state import is_ready
from provisioners.kubernetes.nodes import NodeShape, accelerator_labels, offers_of, shapes_of
from provisioners.kubernetes.quantities import amount
from provisioners.kubernetes.settings import Cluster
from provisioners.port.base import Candidate, LaunchOrder, Requirements
from provisioners.port.errors import AuthError, ProvisionError, RefusedError
from provisioners.port.vm import Finding, Level

_OF_AGENTS = "skyserve-load-balancers"
OLDEST = (1, 25)  # policy/v1, batch/v1 and NetworkPolicies with endPort are in all servers since
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
    found += _version(cluster, api)
    found += _permissions(region, api, has_agents=cluster.agent_image is not None)
    found += _nodes(cluster, api)
    found += _quotas(region, api)
    found += _admission(cluster, api)
    return found


def too_old(version: tuple[int, int, str]) -> str:
    """Return what is wrong with the server's version; "" if nothing is, or if it has no number, as builds from sources have none."""
    major, minor, name = version
    if (major, minor) >= OLDEST or not major:
        return ""
    return f"it is {name or f'{major}.{minor}'}; the oldest that works is {OLDEST[0]}.{OLDEST[1]}"


def _version(cluster: Cluster, api: KubeApi) -> Iterator[Finding]:
    try:
        version, groups = api.version(), api.groups()
    except ProvisionError as error:
        yield Finding(f"{cluster.region}: version", Level.NOTE, f"cannot be seen: {error.message}")
        return
    wrong = too_old(version)
    yield Finding(f"{cluster.region}: version", Level.MISSING if wrong else Level.FINE, wrong or version[2])
    needed_groups = {"apps/v1", "policy/v1"} if cluster.agent_image is not None else set()
    needed_groups |= {"batch/v1", "coordination.k8s.io/v1"} if cluster.reaper_account else set()
    for group in sorted(needed_groups - groups):
        yield Finding(f"{cluster.region}: API {group}", Level.MISSING, "the server does not have it")


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
        reasons = Counter(why_not(one, cluster) for one in nodes)
        listed = ", ".join(f"{count} {why}" for why, count in sorted(reasons.items()))
        said = f"none of {len(nodes)} takes our Pods: {listed}" if nodes else "the cluster has none"
        yield Finding(f"{cluster.region}: nodes", Level.MISSING, said)
        return
    try:
        taken, unseen = requested_by_node(api.list_all_pods().items), ""
    except ProvisionError as error:
        taken, unseen = None, f"; what is free cannot be seen: {_short(error)}"
    yield Finding(f"{cluster.region}: nodes", message=_room(shapes, nodes, taken) + unseen)
    nameless = sum(why_not(one, cluster).startswith("without a label") for one in nodes)
    if nameless:
        message = (
            f"{nameless} of {len(nodes)} have accelerators of which no label says the kind: they are not used"
        )
        yield Finding(f"{cluster.region}: labels of nodes", Level.NOTE, message)


def why_not(node: Mapping[str, Any], cluster: Cluster) -> str:
    """Return what keeps our Pods from a node, as a phrase that follows a number; "" if nothing does."""
    spec, labels = node.get("spec") or {}, node["metadata"].get("labels") or {}
    conditions = (node.get("status") or {}).get("conditions") or ()
    if any(one.get("type") == "Ready" and one.get("status") != "True" for one in conditions):
        return "not ready"
    if spec.get("unschedulable"):
        return "cordoned"
    if any(labels.get(key) != value for key, value in cluster.node_selector.items()):
        return "without the labels of node_selector"
    has = (node.get("status") or {}).get("allocatable") or {}
    names = [cluster.gpu_resource] if cluster.gpu_resource else placement.RESOURCES
    resource = next((name for name in names if amount(has.get(name))), "")
    if resource and not placement.accelerator_of(labels)[0]:
        return f"without a label that names the kind of {resource}"
    market = CapacityType.SPOT if placement.is_spot(labels) else CapacityType.ON_DEMAND
    accepted = placement.tolerations(market, resource, cluster.tolerations)
    for taint in spec.get("taints") or ():
        if taint.get("effect") == "NoSchedule" and not placement.tolerates(taint, accepted):
            return f"with the taint {taint['key']}, which no toleration of ours covers"
    return ""


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
    except ProvisionError as error:
        yield Finding(f"{region}: quotas", Level.NOTE, f"cannot be seen: {_short(error)}")
        return
    for quota in quotas:
        status = quota.get("status") or {}
        hard, used = status.get("hard") or {}, status.get("used") or {}
        for name, most in sorted(hard.items()):
            if amount(used.get(name)) >= amount(most):
                message = f"{used.get(name)} of {most} are used: ask for a larger ResourceQuota"
                yield Finding(f"{region}: quota {quota['metadata']['name']}/{name}", Level.NOTE, message)


def _admission(cluster: Cluster, api: KubeApi) -> Iterator[Finding]:
    """Send a Pod of each market as a dry run, on the cheapest offer, and a load balancer where there may be any."""
    try:
        shapes = shapes_of(api.list_nodes().items, cluster)
    except ProvisionError:
        shapes = shapes_of((), cluster)
    anything = tuple(
        Candidate(accelerator=name or None, accelerator_count=1.0 if name else 0.0, use_spot=use_spot)
        for name in sorted({one.accelerator for one in shapes}, reverse=True)
        for use_spot in (True, False)
    )
    offers = offers_of(Requirements(anything), [(cluster, shapes)])[:1]
    for offer in offers:
        order = LaunchOrder("check", "check", "check", 1, 1, offer, None, "true", secrets={"CHECK": "x"})
        labels = accelerator_labels(shapes, offer.accelerator)
        yield from _said(cluster, "replicas", rehearsal.of_replica(cluster, api, order, labels))
    need = Requirements((Candidate(),), role=Role.LOAD_BALANCER)
    for offer in offers_of(need, [(cluster, shapes)])[:1]:
        order = LaunchOrder("check", "check", "check", 1, 1, offer, None, "true", secrets={"CHECK": "x"})
        yield from _said(cluster, "load balancers", rehearsal.of_agent(cluster, api, order))


def _said(cluster: Cluster, what: str, found: Iterable[rehearsal.Rehearsed]) -> Iterator[Finding]:
    name, accepted, limited = f"{cluster.region}: admission of {what}", True, set[str]()
    for one in found:
        limited |= one.limited
        if one.error is None:
            continue
        if one.kind == rehearsal.CLAIM and isinstance(one.error, AuthError):
            yield Finding(f"{cluster.region}: claims", Level.NOTE, f"cannot be seen: {_short(one.error)}")
            continue
        accepted = False
        if isinstance(one.error, AuthError):
            continue  # the line of that permission says it
        level = Level.MISSING if isinstance(one.error, RefusedError) else Level.NOTE
        message = one.error.message
        if what != "replicas":
            message = message.replace("kubernetes.pod", "agent_pod").replace("name: main", "name: agent")
        yield Finding(name, level, f"{one.kind}: {message}")
    if accepted:
        more = f"; the quota wants limits of {', '.join(sorted(limited))}, which are set to the requests"
        yield Finding(name, message="accepted" + (more if limited else ""))


def _short(error: ProvisionError) -> str:
    """Return ``may not list resourcequotas``, if that is what the server says."""
    found = re.search(r'cannot (\w+) resource "([^"]+)"', error.message)
    return f"the role may not {found[1]} {found[2]}" if found else error.message
