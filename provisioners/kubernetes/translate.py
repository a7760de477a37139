"""Our orders as Kubernetes objects. Pure: the same order gives the same objects.

The Pod of the head has the replica's token as its name, so creating it twice is one Pod (409). Everything else is owned by that
Pod but the Pods of other nodes: they show in the list by themselves, as a lost head must not take them away unseen. The Pod
comes first: what it refers to may come later, because the kubelet waits for it.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from provisioners.kubernetes import placement, pod_defaults, scripts
from provisioners.kubernetes.errors import CLOUD
from provisioners.kubernetes.files import PackedFiles
from provisioners.kubernetes.network import host_names, service_of
from provisioners.kubernetes.pod_patch import merged
from provisioners.kubernetes.settings import GRACE_S, Cluster
from provisioners.port.base import DOCKER, LaunchOrder
from provisioners.port.docker_image import PASSWORD, SERVER, USERNAME, full_name, registry_of
from provisioners.port.errors import InvalidRequestError
from provisioners.port.vm import (
    CAPACITY_TAG,
    MAX_TOKEN,
    NODES_TAG,
    OWNER_TAG,
    RANK_TAG,
    REPLICA_TAG,
    SERVICE_TAG,
    TOKEN_TAG,
    machine_token,
)

_APP = "app.kubernetes.io"
MANAGED = f"{_APP}/managed-by"
MANAGER = "skyserve"
ZONE_NOTE = "skyserve.dev/zone"
PORT_NOTE = "skyserve.dev/port"
PARTS_NOTE = "skyserve.dev/has-parts"  # objects that are created after the Pod
COMPLETE_NOTE = "skyserve.dev/complete"  # all of them exist
END_NOTE = "skyserve.dev/terminated"  # we requested its end
DEFAULT_PORT = 8080
MAIN = "main"
CACHE_VOLUME = "skyserve-cache"
_FILES = "files"
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_TOKEN = re.compile(rf"[a-z0-9]([a-z0-9-]{{0,{MAX_TOKEN - 2}}}[a-z0-9])?")
_SIZE = re.compile(r"([\d.]+)cpu-([\d.]+)gb(?:@(.+))?")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Size:
    """What a Pod requests. As the instance type of an offer it is ``4cpu-16gb``, or ``4cpu-16gb@g6.xlarge`` on such nodes only."""

    cpus: float
    memory_gb: float
    node_type: str = ""

    def __str__(self) -> str:
        return f"{self.cpus:g}cpu-{self.memory_gb:g}gb{'@' if self.node_type else ''}{self.node_type}"


def size_of(instance_type: str) -> Size:
    """Raise ValueError if it is no instance type of ours."""
    found = _SIZE.fullmatch(instance_type)
    if found is None:
        raise ValueError(f"{instance_type!r} is no size of a Pod, like 4cpu-16gb")
    return Size(float(found[1]), float(found[2]), found[3] or "")


def check_order(order: LaunchOrder, regions: Iterable[str]) -> None:
    """Raise InvalidRequestError for an order that no cluster can take."""
    zone = order.offer.zone
    if not _TOKEN.fullmatch(order.token):
        raise InvalidRequestError(
            f"{order.token!r} is no token: up to {MAX_TOKEN} lower-case letters, digits and hyphens",
            cloud=CLOUD,
        )
    if zone.cloud != CLOUD or zone.region not in regions:
        raise InvalidRequestError(
            f"{zone} is in none of the clusters of config.yaml ({', '.join(regions) or 'none'})",
            cloud=CLOUD,
            zone=zone,
        )
    try:
        size_of(order.offer.instance_type)
    except ValueError as error:
        raise InvalidRequestError(str(error), cloud=CLOUD, zone=zone) from error
    wrong = [name for name in (*order.env, *order.secrets) if not _ENV_NAME.fullmatch(name)]
    if wrong:
        raise InvalidRequestError(f"{wrong[0]!r} cannot be a variable of a container", cloud=CLOUD, zone=zone)


def pod_of(
    order: LaunchOrder,
    rank: int,
    cluster: Cluster,
    namespace: str,
    accelerator_labels: Iterable[tuple[str, str]] = (),
    files: PackedFiles | None = None,
    limited: Collection[str] = (),
) -> dict[str, Any]:
    """Return the Pod of one node of the replica: ours, the service's patch over it, and the configuration's over that.

    `limited` are the resources of which the namespace wants limits.
    """
    pod = _own_pod(order, rank, cluster, namespace, accelerator_labels, files or PackedFiles())
    for patch in (json.loads(order.pod or "{}"), {"spec": _wishes(cluster)}, cluster.pod):
        pod = merged(pod, patch)
    return pod_defaults.finish(pod, MAIN, limited)


def _own_pod(
    order: LaunchOrder,
    rank: int,
    cluster: Cluster,
    namespace: str,
    accelerator_labels: Iterable[tuple[str, str]],
    files: PackedFiles,
) -> dict[str, Any]:
    offer, gpus = order.offer, gpus_of(order)
    resource = placement.gpu_resource(offer.accelerator, cluster.gpu_resource) if offer.accelerator else ""
    size = size_of(offer.instance_type)
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "hostname": machine_token(order.token, rank),
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": cluster.service_account is not None,
        "enableServiceLinks": False,
        "securityContext": dict(pod_defaults.OF_POD),
        "affinity": placement.affinity(
            offer.zone.name, offer.capacity_type, accelerator_labels, size.node_type
        ),
        "tolerations": placement.tolerations(
            offer.capacity_type, resource if gpus else "", cluster.tolerations
        ),
        "containers": [_main(order, rank, cluster, namespace, files, size, resource)],
        "volumes": _volumes(order, files, cluster, namespace),
    }
    if files.pieces:
        spec["initContainers"] = [_unpacker(order, cluster, files)]
    if order.num_nodes > 1:
        spec["subdomain"] = service_of(order.token)
    if login_of(order) is not None:
        spec["imagePullSecrets"] = [{"name": f"{order.token}-pull"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": machine_token(order.token, rank),
            "labels": _labels(order, rank, cluster),
            "annotations": _annotations(order, rank, cluster, files),
        },
        "spec": spec,
    }


def secrets_of(order: LaunchOrder, pod: Mapping[str, Any], files: PackedFiles) -> list[dict[str, Any]]:
    """Return the Secrets of the replica whose head is `pod`: its variables, its registry's login, its files."""
    found = []
    if order.secrets:
        encoded = {key: _base64(value.encode()) for key, value in order.secrets.items()}
        found.append(_owned(order, pod, "Secret", env_name(order)) | {"type": "Opaque", "data": encoded})
    login = login_of(order)
    if login is not None:
        data = {".dockerconfigjson": _base64(json.dumps(login).encode())}
        found.append(
            _owned(order, pod, "Secret", f"{order.token}-pull")
            | {"type": "kubernetes.io/dockerconfigjson", "data": data}
        )
    for number, piece in enumerate(files.pieces):
        encoded = {key: _base64(data) for key, data in piece.items()}
        found.append(
            _owned(order, pod, "Secret", piece_name(order, number)) | {"type": "Opaque", "data": encoded}
        )
    return found


def services_of(order: LaunchOrder, pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the headless Services by which the nodes of a replica find each other: all of them, and those that are set up."""
    if order.num_nodes == 1:
        return []
    return [
        _owned(order, pod, "Service", service_of(order.token, started=started))
        | {
            "spec": {
                "clusterIP": "None",
                "selector": {TOKEN_TAG: order.token},
                "publishNotReadyAddresses": not started,
            }
        }
        for started in (False, True)
    ]


def has_parts(order: LaunchOrder, files: PackedFiles) -> bool:
    """Return whether anything has to be created beside the Pod of the head."""
    return bool(order.secrets or files.pieces or order.num_nodes > 1)


def gpus_of(order: LaunchOrder) -> int:
    return math.ceil(order.offer.accelerator_count) if order.offer.accelerator else 0


def env_name(order: LaunchOrder) -> str:
    return f"{order.token}-env"


def piece_name(order: LaunchOrder, number: int) -> str:
    return f"{order.token}-files-{number}"


def image_of(order: LaunchOrder, cluster: Cluster) -> str:
    """Return the container image: a Pod has no other, so `docker:` before its name may be left out."""
    name = order.image.removeprefix(DOCKER) if order.image else cluster.image
    return full_name(name, {**order.env, **order.secrets})


def login_of(order: LaunchOrder) -> dict[str, Any] | None:
    """Return the login of the image's registry, as docker's configuration has it, if the service gives one."""
    variables = {**order.env, **order.secrets}
    user, password = variables.get(USERNAME), variables.get(PASSWORD)
    if not user or not password:
        return None
    host = (
        variables.get(SERVER)
        or registry_of((order.image or "").removeprefix(DOCKER))
        or "https://index.docker.io/v1/"
    )
    return {
        "auths": {
            host: {"username": user, "password": password, "auth": _base64(f"{user}:{password}".encode())}
        }
    }


def _labels(order: LaunchOrder, rank: int, cluster: Cluster) -> dict[str, str]:
    """Ours come last, so that the user's cannot take their place."""
    wanted = {**known_labels(order, "replica"), **cluster.labels, **order.labels}
    return {key: value for key, value in wanted.items() if is_label(key, value)} | {
        MANAGED: MANAGER,
        OWNER_TAG: order.owner,
        SERVICE_TAG: order.service,
        REPLICA_TAG: str(order.replica_id),
        TOKEN_TAG: order.token,
        RANK_TAG: str(rank),
        NODES_TAG: str(order.num_nodes),
        CAPACITY_TAG: order.offer.capacity_type.value,
    }


def known_labels(order: LaunchOrder, component: str) -> dict[str, str]:
    """Return the labels by which tools of others group what they show."""
    return {
        f"{_APP}/name": order.service,
        f"{_APP}/instance": order.token,
        f"{_APP}/component": component,
        f"{_APP}/part-of": order.owner,
    }


def _annotations(order: LaunchOrder, rank: int, cluster: Cluster, files: PackedFiles) -> dict[str, str]:
    wanted = {**cluster.labels, **order.labels}
    others = {
        key: value for key, value in wanted.items() if _LABEL_KEY.fullmatch(key) and not is_label(key, value)
    }
    parts = {PARTS_NOTE: "true"} if rank == 0 and has_parts(order, files) else {}
    return {
        **others,
        **parts,
        ZONE_NOTE: order.offer.zone.name,
        PORT_NOTE: str(order.port or DEFAULT_PORT),
    }


def is_label(key: str, value: str) -> bool:
    return _LABEL_KEY.fullmatch(key) is not None and _LABEL.fullmatch(value) is not None


def _main(
    order: LaunchOrder,
    rank: int,
    cluster: Cluster,
    namespace: str,
    files: PackedFiles,
    size: Size,
    resource: str,
) -> dict[str, Any]:
    variables = {**order.env, **order.secrets}
    nodes = host_names(order.token, order.num_nodes) if order.num_nodes > 1 else []
    cached = order.cache.variables if order.cache else ()
    script = scripts.main(order.file_mounts, files.copied, variables, nodes, cached)
    requests = {"cpu": f"{size.cpus:g}", "memory": f"{size.memory_gb:g}G"}
    gpus = {resource: str(gpus_of(order))} if resource else {}
    port = order.port or DEFAULT_PORT
    return {
        "name": MAIN,
        "image": image_of(order, cluster),
        "command": ["/bin/sh", "-c", _literal(script)],
        "env": _environment(order, rank, namespace),
        "ports": [{"containerPort": port, "protocol": "TCP"}],
        "resources": {"requests": requests | gpus, "limits": gpus} if gpus else {"requests": requests},
        "securityContext": dict(pod_defaults.OF_CONTAINER),
        "startupProbe": {
            "exec": {"command": ["/bin/sh", "-c", scripts.IS_STARTED]},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": 2_000_000,  # `setup` takes what it takes; the service file sets the limit
        },
        "volumeMounts": [
            {"name": "work", "mountPath": scripts.ROOT},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 (engines exchange tensors by it)
            *_cache_mounts(order),
        ],
    }


def _unpacker(order: LaunchOrder, cluster: Cluster, files: PackedFiles) -> dict[str, Any]:
    return {
        "name": _FILES,
        "image": image_of(order, cluster),
        "command": ["/bin/sh", "-c", _literal(scripts.unpack(files.targets))],
        "volumeMounts": [
            {"name": "work", "mountPath": scripts.ROOT},
            {"name": _FILES, "mountPath": scripts.FILES, "readOnly": True},
        ],
    }


def _environment(order: LaunchOrder, rank: int, namespace: str) -> list[dict[str, Any]]:
    """The user's variables, and who the node is by SkyPilot's names, so that its recipes run as they are."""
    plain = {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(order.num_nodes),
        "SKYPILOT_NUM_GPUS_PER_NODE": f"{order.offer.accelerator_count if order.offer.accelerator else 0:g}",
        **{key: value for key, value in order.env.items() if key not in order.secrets},
        "SKYSERVE_SERVICE": order.service,
        "SKYSERVE_REPLICA_ID": str(order.replica_id),
        "SKYPILOT_SERVE_REPLICA_ID": str(order.replica_id),
        "SKYSERVE_REGION": order.offer.zone.region,
        "SKYSERVE_ZONE": order.offer.zone.name,
        "SKYSERVE_REPLICA_PORT": str(order.port or DEFAULT_PORT),
        "SKYSERVE_SETUP": order.setup or "",
        "SKYSERVE_RUN": order.run,
        **(order.cache.environment(scripts.CACHE) if order.cache else {}),
    }
    if order.num_nodes > 1:
        plain["SKYSERVE_PEERS"] = f"{service_of(order.token)}.{namespace}.svc"
        plain["SKYSERVE_STARTED"] = f"{service_of(order.token, started=True)}.{namespace}.svc"
    found: list[dict[str, Any]] = [{"name": key, "value": _literal(value)} for key, value in plain.items()]
    found += [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": env_name(order), "key": key}}}
        for key in order.secrets
    ]
    address = {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}
    if order.num_nodes == 1:
        found.append({"name": "SKYPILOT_NODE_IPS", "valueFrom": address})
    return found


def _literal(value: str) -> str:
    """The kubelet replaces $(NAME) in commands and values, and takes $$ for $."""
    return value.replace("$", "$$")


def _cache_mounts(order: LaunchOrder) -> list[dict[str, Any]]:
    if order.cache is None:
        return []
    own = {} if order.cache.claim is None else {"subPath": f"{MANAGER}/{order.cache.folder}"}
    return [{"name": CACHE_VOLUME, "mountPath": scripts.CACHE, **own}]


def _volumes(
    order: LaunchOrder, files: PackedFiles, cluster: Cluster, namespace: str
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "work", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if files.pieces:
        sources = [{"secret": {"name": piece_name(order, number)}} for number in range(len(files.pieces))]
        found.append({"name": _FILES, "projected": {"sources": sources}})
    if order.cache is not None and order.cache.claim is not None:
        found.append({"name": CACHE_VOLUME, "persistentVolumeClaim": {"claimName": order.cache.claim}})
    elif order.cache is not None:
        path = f"{cluster.cache_path}/{namespace}/{order.cache.folder}"
        found.append({"name": CACHE_VOLUME, "hostPath": {"path": path, "type": "DirectoryOrCreate"}})
    return found


def _wishes(cluster: Cluster) -> dict[str, Any]:
    wishes = {
        "nodeSelector": dict(cluster.node_selector),
        "serviceAccountName": cluster.service_account,
        "priorityClassName": cluster.priority_class,
        "runtimeClassName": cluster.runtime_class,
    }
    return {key: value for key, value in wishes.items() if value}


def _owned(order: LaunchOrder, pod: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    """Return an object that the cluster deletes together with the Pod."""
    owner = {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": pod["metadata"]["name"],
        "uid": pod["metadata"]["uid"],
        "blockOwnerDeletion": False,
    }
    labels = {MANAGED: MANAGER, OWNER_TAG: order.owner, SERVICE_TAG: order.service, TOKEN_TAG: order.token}
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
    }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
