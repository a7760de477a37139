"""A load balancer agent as Kubernetes objects: a Deployment of one Pod, its Service, PodDisruptionBudget and Secrets. Pure.

The Deployment is created without Pods; a release gives it a template and one replica. A new release is a roll-out: its Pod is ready when it
has its table, and only then does the Pod before it drain. Everything else is owned by the Deployment.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping
from typing import Any

from policies.model import CapacityType
from provisioners.kubernetes import placement
from provisioners.kubernetes.pod_patch import merged
from provisioners.kubernetes.settings import Cluster
from provisioners.kubernetes.translate import (
    END_NOTE,
    MANAGED,
    MANAGER,
    PORT_NOTE,
    ZONE_NOTE,
    known_labels,
    size_of,
)
from provisioners.port.agents import AgentRelease
from provisioners.port.base import Instance, LaunchOrder, peers_port
from provisioners.port.vm import (
    CAPACITY_TAG,
    OWNER_TAG,
    REPLICA_TAG,
    SERVICE_TAG,
    TOKEN_TAG,
)

Json = dict[str, Any]

ROLE_LABEL = "skyserve-role"
ROLE = "load-balancer"
ADMIN_PORT = 30998
DEFAULT_PORT = 8000
RELEASE_NOTE = "skyserve.dev/release"
MOVED_NOTE = "skyserve.dev/moved-from"
MAIN = "agent"
TOKEN_KEY = "admin-token"  # noqa: S105 (a file, not a token)
DRAIN_S = 5  # until every node has heard that the Pod takes no new connections
SHUTDOWN_S = 120  # for responses that are under way
LONGEST_DRAIN_S = 60  # for requests that are held
_SECRETS, _FILES, _STATE = "/run/skyserve/admin", "/run/skyserve/files", "/var/lib/skyserve"
#: Where the user's Secret SERVICE-api-keys is mounted, whether there is one or not.
KEYS = "/run/skyserve/api-keys"
_FIRST_FREE_PORT, _MOVED_UP = 1024, 8000
_USER = 10001


def is_agent(item: Mapping[str, Any]) -> bool:
    """Return whether the object belongs to a load balancer agent."""
    return (item["metadata"].get("labels") or {}).get(ROLE_LABEL) == ROLE


def container_port(port: int) -> int:
    """Return where the container listens for a port of the Service: it may not open the lowest ones."""
    return port if port >= _FIRST_FREE_PORT else port + _MOVED_UP


def deployment_of(order: LaunchOrder, cluster: Cluster) -> Json:
    """Return the Deployment of a new agent, which has no Pod yet."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": order.token,
            "labels": _labels(order, cluster),
            "annotations": {
                ZONE_NOTE: order.offer.zone.name,
                PORT_NOTE: str(order.port or DEFAULT_PORT),
                "skyserve.dev/size": order.offer.instance_type,
            },
        },
        "spec": {
            "replicas": 0,
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": 600,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": {TOKEN_TAG: order.token, ROLE_LABEL: ROLE}},
            "template": {
                "metadata": {"labels": _labels(order, cluster), "annotations": {RELEASE_NOTE: ""}},
                "spec": {"containers": [{"name": MAIN, "image": cluster.agent_image}]},
            },
        },
    }


def parts_of(order: LaunchOrder, deployment: Mapping[str, Any], cluster: Cluster) -> list[tuple[str, Json]]:
    """Return what an agent needs beside its Deployment, the Service last: where it exists, all of it does."""
    port = order.port or DEFAULT_PORT
    ports = [port, peers_port(port)] if order.has_peers else [port]
    token = next(iter(order.secrets.values()), "")
    selector = {TOKEN_TAG: order.token, ROLE_LABEL: ROLE}
    secret = _owned(deployment, "v1", "Secret", f"{order.token}-admin")
    budget = _owned(deployment, "policy/v1", "PodDisruptionBudget", order.token)
    service = _owned(deployment, "v1", "Service", service_name(order.token))
    service["metadata"]["annotations"] = dict(cluster.service_annotations)
    return [
        ("secret", secret | {"type": "Opaque", "data": {TOKEN_KEY: _base64(token.encode())}}),
        (
            "pod_disruption_budget",
            budget | {"spec": {"minAvailable": 1, "selector": {"matchLabels": selector}}},
        ),
        (
            "service",
            service
            | {
                "spec": {
                    "type": cluster.service_type,
                    "selector": selector,
                    "ports": [
                        {"name": name, "port": one, "targetPort": container_port(one), "protocol": "TCP"}
                        for name, one in zip(("clients", "peers"), ports, strict=False)
                    ],
                }
            },
        ),
    ]


def service_name(token: str) -> str:
    """Return the name of an agent's Service, which begins with a letter, as such names must."""
    return f"lb-{token}"[:63].rstrip("-")


def files_of(release: AgentRelease, deployment: Mapping[str, Any]) -> Json | None:
    """Return the Secret with the files of a release; None if it has none. Another release has another Secret."""
    if not release.files:
        return None
    secret = _owned(deployment, "v1", "Secret", _files_name(deployment["metadata"]["name"], release))
    data = {name: _base64(content) for name, content in release.files.items()}
    return secret | {"type": "Opaque", "data": data}


def with_release(
    deployment: Mapping[str, Any], release: AgentRelease, cluster: Cluster, moved_from: str
) -> Json:
    """Return the Deployment with the release. `moved_from`: another one than before has its Pod go to another node."""
    made = copy.deepcopy(dict(deployment))
    made.pop("status", None)
    meta, spec = made["metadata"], made["spec"]
    meta.pop("managedFields", None)
    notes = meta.get("annotations") or {}
    spec["replicas"] = 1
    template = {
        "metadata": {
            "labels": dict(spec["template"]["metadata"]["labels"]),
            "annotations": {RELEASE_NOTE: release.name, MOVED_NOTE: moved_from},
        },
        "spec": _pod_spec(str(meta["name"]), str(meta["labels"][SERVICE_TAG]), notes, release, cluster),
    }
    spec["template"] = merged(template, cluster.agent_pod)
    return made


def ended(deployment: Mapping[str, Any], now: str) -> Json:
    """Return the Deployment with the note that we requested its end."""
    made = copy.deepcopy(dict(deployment))
    made.pop("status", None)
    made["metadata"].pop("managedFields", None)
    made["metadata"]["annotations"] = {**(made["metadata"].get("annotations") or {}), END_NOTE: now}
    return made


def _pod_spec(
    token: str, service: str, notes: Mapping[str, str], release: AgentRelease, cluster: Cluster
) -> Json:
    zone = notes.get(ZONE_NOTE, placement.NO_ZONE)
    volumes: list[Json] = [
        {"name": "admin", "secret": {"secretName": f"{token}-admin", "defaultMode": 0o440}},
        {"name": "state", "emptyDir": {}},
        {
            "name": "keys",
            "secret": {"secretName": f"{service}-api-keys", "optional": True, "defaultMode": 0o440},
        },
    ]
    if release.files:
        secret = {"secretName": _files_name(token, release), "defaultMode": 0o440}
        volumes.append({"name": "files", "secret": secret})
    spec: Json = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": LONGEST_DRAIN_S + SHUTDOWN_S + 10,
        "affinity": placement.affinity(zone, CapacityType.ON_DEMAND, ()),
        "tolerations": placement.tolerations(CapacityType.ON_DEMAND, "", cluster.tolerations),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(notes, release, cluster)],
        "volumes": volumes,
    }
    if cluster.node_selector:
        spec["nodeSelector"] = dict(cluster.node_selector)
    if cluster.priority_class:
        spec["priorityClassName"] = cluster.priority_class
    return spec


def _container(notes: Mapping[str, str], release: AgentRelease, cluster: Cluster) -> Json:
    size = size_of(notes.get("skyserve.dev/size", "1cpu-1gb"))
    token_file = f"{_SECRETS}/{TOKEN_KEY}"
    admin = ["--admin-host", "0.0.0.0", "--admin-port", str(ADMIN_PORT), "--admin-token-file", token_file]  # noqa: S104
    own = ["--open-probes", "--table-file", f"{_STATE}/table.json", "--shutdown-grace", str(SHUTDOWN_S)]
    farewell = ["--port", str(ADMIN_PORT), "--token-file", token_file]
    farewell += ["--least", str(DRAIN_S), "--most", str(LONGEST_DRAIN_S)]
    mounts: list[Json] = [
        {"name": "admin", "mountPath": _SECRETS, "readOnly": True},
        {"name": "state", "mountPath": _STATE},
        {"name": "keys", "mountPath": KEYS, "readOnly": True},
    ]
    if release.files:
        mounts.append({"name": "files", "mountPath": _FILES, "readOnly": True})
    arguments = [f"{_FILES}/{one}" if one in release.files else one for one in release.arguments]
    return {
        "name": MAIN,
        "image": cluster.agent_image,
        "command": ["python", "-m", "lb", *arguments, *admin, *own],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"containerPort": container_port(port), "protocol": "TCP"} for port in release.ports],
        "resources": {"requests": {"cpu": f"{size.cpus:g}", "memory": f"{size.memory_gb:g}G"}},
        # A table is enough: while there is no replica, requests are held. A busy node must not take the only Pod from its
        # Service; a process that has exited is not ready at once, whatever the threshold.
        "readinessProbe": {
            "httpGet": {"path": "/-/ready?table=1", "port": ADMIN_PORT},
            "periodSeconds": 1,
            "timeoutSeconds": 2,
            "failureThreshold": 4,
        },
        "livenessProbe": {
            "httpGet": {"path": "/-/live", "port": ADMIN_PORT},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "lifecycle": {"preStop": {"exec": {"command": ["python", "-m", "lb.agent.farewell", *farewell]}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _files_name(token: str, release: AgentRelease) -> str:
    return f"{token}-{release.name}"


def _labels(order: LaunchOrder, cluster: Cluster) -> dict[str, str]:
    return {
        **known_labels(order, ROLE),
        **cluster.labels,
        MANAGED: MANAGER,
        ROLE_LABEL: ROLE,
        OWNER_TAG: order.owner,
        SERVICE_TAG: order.service,
        REPLICA_TAG: str(order.replica_id),
        TOKEN_TAG: order.token,
        CAPACITY_TAG: order.offer.capacity_type.value,
    }


def _owned(deployment: Mapping[str, Any], version: str, kind: str, name: str) -> Json:
    """Return an object that the cluster deletes together with the Deployment."""
    meta = deployment["metadata"]
    kept = (MANAGED, ROLE_LABEL, OWNER_TAG, SERVICE_TAG, TOKEN_TAG)
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": meta["name"], "uid": meta["uid"]}
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {
            "name": name,
            "labels": {key: meta["labels"][key] for key in kept},
            "ownerReferences": [owner],
        },
    }


def is_of(instance: Instance, deployment: Mapping[str, Any]) -> bool:
    """Return whether the Deployment is the instance's, and not another one of that name."""
    return not instance.id or instance.id == deployment["metadata"]["uid"]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
