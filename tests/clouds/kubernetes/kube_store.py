"""The objects of a cluster as kube-apiserver keeps them: resource versions, watches that can expire, uids, graceful deletion,
owners, and no object that the published schemas do not allow. Time is given."""

from __future__ import annotations

import copy
import re
import threading
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from provisioners.kubernetes.quantities import amount
from tests.clouds.kubernetes.kube_schemas import Invalid, check
from tests.kit.own_number import own_number

Json = dict[str, Any]
KINDS = {
    "pods": ("v1", "Pod"),
    "secrets": ("v1", "Secret"),
    "services": ("v1", "Service"),
    "nodes": ("v1", "Node"),
    "namespaces": ("v1", "Namespace"),
    "events": ("v1", "Event"),
    "resourcequotas": ("v1", "ResourceQuota"),
    "leases": ("coordination.k8s.io/v1", "Lease"),
    "cronjobs": ("batch/v1", "CronJob"),
    "deployments": ("apps/v1", "Deployment"),
    "poddisruptionbudgets": ("policy/v1", "PodDisruptionBudget"),
    "configmaps": ("v1", "ConfigMap"),
    "persistentvolumeclaims": ("v1", "PersistentVolumeClaim"),
    "serviceaccounts": ("v1", "ServiceAccount"),
    "roles": ("rbac.authorization.k8s.io/v1", "Role"),
    "rolebindings": ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    "clusterroles": ("rbac.authorization.k8s.io/v1", "ClusterRole"),
    "clusterrolebindings": ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding"),
    "storageclasses": ("storage.k8s.io/v1", "StorageClass"),
    "networkpolicies": ("networking.k8s.io/v1", "NetworkPolicy"),
}
CLUSTER_WIDE = ("nodes", "namespaces", "clusterroles", "clusterrolebindings", "storageclasses")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_SERVICE = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(
    r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
)
_SECRET_BYTES = 1024 * 1024


class Refused(Exception):
    """A response that is a `Status`."""

    def __init__(self, code: int, reason: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.retry_after = code, reason, message, retry_after

    def body(self) -> Json:
        details = {} if self.retry_after is None else {"details": {"retryAfterSeconds": self.retry_after}}
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
            **details,
        }


def not_found(resource: str, name: str) -> Refused:
    return Refused(404, "NotFound", f'{resource} "{name}" not found')


#: Where Pods and Services of this process are on the loopback interface: clusters of two processes must not share addresses.
_NUMBER = own_number(80)
POD_NET = f"127.{20 + _NUMBER}"
SERVICE_NET = f"127.{120 + _NUMBER}"


def stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Change:
    version: int
    resource: str
    kind: str
    item: Json


@dataclass
class Store:
    """`now` is the time. `strict`: every object that comes in or goes out is held against the schemas.

    `skews` are how far the clocks are ahead by which the API server, the controllers of the cluster and the nodes stamp what they write.
    """

    now: Callable[[], float]
    strict: bool = True
    skews: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("api", "control", "node"), 0.0))
    version: int = 1000
    objects: dict[tuple[str, str, str], Json] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    oldest: int = 1000  # the version before which no watch can begin
    lock: threading.RLock = field(default_factory=threading.RLock)

    #: Called for a Pod whose owner is gone; None: it goes at once.
    orphaned: Callable[[Json], object] | None = None

    def __post_init__(self) -> None:
        self.moved = threading.Condition(self.lock)
        self._orphans: list[tuple[str, Json]] = []

    def clock(self, whose: str) -> float:
        """Return what the clock of that machine shows."""
        return self.now() + self.skews[whose]

    def stamp(self, whose: str) -> str:
        return stamp(self.clock(whose))

    def get(self, resource: str, namespace: str, name: str) -> Json:
        with self.lock:
            found = self.objects.get((resource, namespace, name))
            if found is None:
                raise not_found(resource, name)
            return copy.deepcopy(found)

    def of(self, resource: str) -> Iterator[Json]:
        """Yield the objects themselves; the caller has the lock."""
        return (one for (kind, _, _), one in list(self.objects.items()) if kind == resource)

    def list(self, resource: str, namespace: str | None) -> list[Json]:
        with self.lock:
            return [
                one
                for (kind, space, _), one in sorted(self.objects.items())
                if kind == resource and namespace in (None, space)
            ]

    def create(self, resource: str, namespace: str, body: Json, *, is_dry: bool = False) -> Json:
        with self.lock:
            self.validate(resource, namespace, body)
            name = body["metadata"]["name"]
            if (resource, namespace, name) in self.objects:
                raise Refused(409, "AlreadyExists", f'{resource} "{name}" already exists')
            item = copy.deepcopy(body)
            item["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.stamp("api")}
            if resource not in CLUSTER_WIDE:
                item["metadata"]["namespace"] = namespace
            if resource == "deployments":
                item["metadata"]["generation"] = 1
            if not is_dry:
                self._write(resource, item, "ADDED")
            return copy.deepcopy(item)

    def update(self, resource: str, item: Json) -> Json:
        """Write a changed object; nothing is written if it did not change."""
        with self.lock:
            meta = item["metadata"]
            key = (resource, meta.get("namespace", ""), meta["name"])
            known = self.objects.get(key)
            if known is None or known["metadata"]["uid"] != meta["uid"]:
                raise not_found(resource, meta["name"])
            if known != item:
                item = copy.deepcopy(item)
                if resource == "deployments" and known["spec"] != item["spec"]:
                    item["metadata"]["generation"] = known["metadata"].get("generation", 1) + 1
                self._write(resource, item, "MODIFIED")
            return copy.deepcopy(self.objects[key])

    def patch(self, resource: str, namespace: str, name: str, body: Json) -> Json:
        with self.lock:
            item = self.get(resource, namespace, name)
            uid = (body.get("metadata") or {}).get("uid")
            if uid is not None and uid != item["metadata"]["uid"]:
                raise Refused(
                    422,
                    "Invalid",
                    f'{KINDS[resource][1]} "{name}" is invalid: metadata.uid: Invalid value: "{uid}": field is immutable',
                )
            if resource == "pods" and body.get("spec"):
                raise Refused(
                    422,
                    "Invalid",
                    f'Pod "{name}" is invalid: spec: Forbidden: pod updates may not change fields',
                )
            merged = _merge(item, body)
            self.validate(resource, namespace, merged)
            return self.update(resource, merged)

    def put(self, resource: str, namespace: str, name: str, body: Json) -> Json:
        """Replace an object, if it is still of the version that the body has. Its status is not changed by that."""
        with self.lock:
            known = self.get(resource, namespace, name)
            version = body["metadata"].get("resourceVersion")
            if version not in (None, known["metadata"]["resourceVersion"]):
                raise Refused(
                    409,
                    "Conflict",
                    f'Operation cannot be fulfilled on {resource} "{name}": the object has been modified; please apply your changes '
                    "to the latest version and try again",
                )
            self.validate(resource, namespace, body)
            if resource == "persistentvolumeclaims" and body["spec"] != known["spec"]:
                raise Refused(
                    422,
                    "Invalid",
                    f'PersistentVolumeClaim "{name}" is invalid: spec: Forbidden: is immutable',
                )
            if resource == "deployments" and body["spec"]["selector"] != known["spec"]["selector"]:
                raise Refused(
                    422, "Invalid", f'Deployment "{name}" is invalid: spec.selector: field is immutable'
                )
            item = copy.deepcopy(body)
            for key in ("uid", "creationTimestamp", "namespace", "deletionTimestamp", "generation"):
                if key in known["metadata"]:
                    item["metadata"][key] = known["metadata"][key]
            if "status" in known:
                item["status"] = known["status"]
            return self.update(resource, item)

    def remove(self, resource: str, item: Json) -> None:
        """The object is gone. What it owns goes when the garbage collector comes by (`collect`)."""
        with self.lock:
            meta = item["metadata"]
            found = self.objects.pop((resource, meta.get("namespace", ""), meta["name"]), None)
            if found is None:
                return
            self.version += 1
            last = copy.deepcopy(found)
            last["metadata"]["resourceVersion"] = str(self.version)
            self._record(resource, "DELETED", last)
            uid = found["metadata"]["uid"]
            for (kind, _, _), one in list(self.objects.items()):
                owners = one["metadata"].get("ownerReferences") or []
                if owners and all(owner["uid"] == uid for owner in owners):
                    self._orphans.append((kind, one))

    def remove_pod(self, pod: Json) -> None:
        """As a deletion without a grace period does: the API writes that first, and removes the Pod then."""
        with self.lock:
            last = copy.deepcopy(pod)
            last["metadata"].setdefault("deletionTimestamp", self.stamp("api"))
            last["metadata"]["deletionGracePeriodSeconds"] = 0
            self.remove("pods", self.update("pods", last))

    def collect(self) -> None:
        """Remove what has no owner any more."""
        with self.lock:
            orphans, self._orphans = self._orphans, []
            for kind, one in orphans:
                meta = one["metadata"]
                there = self.objects.get((kind, meta.get("namespace", ""), meta["name"]))
                if there is None or there["metadata"]["uid"] != meta["uid"]:
                    continue
                if kind == "pods" and self.orphaned is not None:
                    self.orphaned(one)
                else:
                    self.remove(kind, one)

    def expire(self) -> None:
        """Forget all changes, as the compaction of etcd does every few minutes."""
        with self.lock:
            self.changes.clear()
            self.oldest = self.version

    def since(self, version: int, resource: str) -> list[Change]:
        """Return the changes after a version. Raises Refused (410)."""
        with self.lock:
            if version < self.oldest:
                raise Refused(410, "Expired", f"too old resource version: {version} ({self.oldest})")
            first = bisect_right(self.changes, version, key=lambda one: one.version)
            return [one for one in self.changes[first:] if one.resource == resource]

    # --- inside

    def _write(self, resource: str, item: Json, kind: str) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        if self.strict:  # the specification was checked when it came
            check({key: value for key, value in item.items() if key != "spec" or resource != "pods"})
        self.objects[resource, item["metadata"].get("namespace", ""), item["metadata"]["name"]] = item
        self._record(resource, kind, copy.deepcopy(item))

    def _record(self, resource: str, kind: str, item: Json) -> None:
        self.changes.append(Change(self.version, resource, kind, item))
        if len(self.changes) > 100_000:
            self.oldest = self.changes[50_000].version
            del self.changes[:50_001]
        self.moved.notify_all()

    def validate(self, resource: str, namespace: str, body: Json) -> None:
        """As validation and its admission do."""
        version, kind = KINDS[resource]
        if body.get("kind") != kind or body.get("apiVersion") != version:
            raise Refused(
                400,
                "BadRequest",
                f"{body.get('kind')} in version {body.get('apiVersion')} cannot be handled as a {kind}",
            )
        if self.strict:
            try:
                check(body)
            except Invalid as error:
                raise Refused(400, "BadRequest", f"{kind} cannot be decoded: {error}") from error
        if resource not in CLUSTER_WIDE and ("namespaces", "", namespace) not in self.objects:
            raise not_found("namespaces", namespace)
        meta = body["metadata"]
        pattern = _SERVICE if resource == "services" else _NAME
        wrong = (
            []
            if pattern.fullmatch(meta.get("name") or "")
            else [f"metadata.name: Invalid value: {meta.get('name')!r}"]
        )
        for key, value in (meta.get("labels") or {}).items():
            if not _LABEL_KEY.fullmatch(key) or not _LABEL.fullmatch(value):
                wrong.append(f"metadata.labels: Invalid value: {key}={value}")
        wrong += [
            f"metadata.annotations: Invalid value: {key}"
            for key in meta.get("annotations") or {}
            if not _LABEL_KEY.fullmatch(key)
        ]
        if (
            resource == "secrets"
            and sum(map(len, (body.get("data") or {}).values())) * 3 // 4 > _SECRET_BYTES
        ):
            wrong.append(f"data: Too long: may not be more than {_SECRET_BYTES} bytes")
        if resource == "pods":
            wrong += _wrong_pod(body["spec"])
        if wrong:
            raise Refused(422, "Invalid", f'{kind} "{meta.get("name")}" is invalid: {"; ".join(wrong)}')


def _wrong_pod(spec: Json) -> Iterator[str]:
    names = {one["name"] for one in spec.get("volumes") or ()}
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        for mount in container.get("volumeMounts") or ():
            if mount["name"] not in names:
                yield f'spec.containers.volumeMounts.name: Not found: "{mount["name"]}"'
        has = container.get("resources") or {}
        for name, limit in (has.get("limits") or {}).items():
            request = (has.get("requests") or {}).get(name, limit)
            if "/" in name and str(request) != str(limit):
                yield f"spec.containers.resources.requests: must be equal to {name} limit"
            elif amount(request) > amount(limit):
                yield f'spec.containers[0].resources.requests: Invalid value: "{request}": must be less than or equal to {name} limit'
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", spec.get("hostname", "x")):
        yield "spec.hostname: Invalid value"


def _merge(item: Any, patch: Any) -> Any:
    if not isinstance(patch, dict) or not isinstance(item, dict):
        return copy.deepcopy(patch)
    merged = dict(item)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key, {}), value)
    return merged
