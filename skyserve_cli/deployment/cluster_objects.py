"""The objects of a controller in Kubernetes: the packaged manifests with the values of a command line. Pure but for reading them.

The manifests are the Helm chart with its own values (`python -m scripts.manifests`); what differs here are the values that a user of
the chart would set.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

Json = dict[str, Any]

DEPLOYMENT = "skyserve-controller"
CONFIG_MAP = "skyserve-config"
VOLUME = "skyserve-home"
KEYS, TLS = "skyserve-keys", "skyserve-api-tls"
DATABASE_VARIABLE = "SKYSERVE_DB"
_OWN_CONFIG = ("controller", "load_balancer")
_CLUSTER_WIDE = ("ClusterRole", "ClusterRoleBinding")


class ClusterValues(NamedTuple):
    """What the objects differ in. With `database_secret` there are two controllers, which share a PostgreSQL.

    `config` is what the user adds to config.yaml. Without `has_events` the controller writes no events about its Pods.
    """

    namespace: str
    image: str
    config: Mapping[str, Any]
    storage_class: str = ""
    database_secret: str = ""
    has_cluster_role: bool = True
    has_events: bool = True


class Right(NamedTuple):
    """What the caller must be allowed to do; `resource` has its subresource, and `is_cluster_wide` those in no namespace."""

    verb: str
    group: str
    resource: str
    is_cluster_wide: bool = False

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


def kind_of(body: Mapping[str, Any]) -> str:
    """Return the kind as the client's methods have it: `config_map`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(body["kind"])).lower()


def objects(values: ClusterValues) -> list[Json]:
    """Return the objects, in an order in which they can be created."""
    variant = "two-controllers" if values.database_secret else "one-controller"
    text = (files(__package__) / "manifests" / f"{variant}.yaml").read_text(encoding="utf-8")
    found = [one for one in yaml.safe_load_all(text) if one]
    if not values.has_cluster_role:
        found = [one for one in found if one["kind"] not in _CLUSTER_WIDE]
    config = ""
    for body in found:
        _move(body, values.namespace)
        if body["kind"] == "ConfigMap":
            config = _configured(body["data"]["config.yaml"], values.config)
            body["data"]["config.yaml"] = config
        for rule in () if values.has_events else body.get("rules") or ():
            if rule["resources"] == ["events"]:
                rule["verbs"] = ["list"]
        if body["kind"] == "PersistentVolumeClaim" and values.storage_class:
            body["spec"]["storageClassName"] = values.storage_class
    for body in found:
        if body["kind"] == "Deployment":
            _fill(body["spec"]["template"], values, config)
    return sorted(found, key=lambda one: one["kind"] == "Deployment")


def rights(wanted: list[Json]) -> Iterator[Right]:
    """Yield what a deployment needs: its objects, its Secrets, and a look at the Pods and into them."""
    seen = set()
    for body in wanted:
        group = body["apiVersion"].rpartition("/")[0]
        resource = re.sub(r"ys$", "ies", f"{body['kind'].lower()}s")
        for verb in ("get", "create", "patch"):
            seen.add(Right(verb, group, resource, body["kind"] in _CLUSTER_WIDE))
    seen |= {Right("get", "", "secrets"), Right("create", "", "secrets")}
    seen |= {Right("list", "", "pods"), Right("get", "", "pods/log")}
    seen |= {Right("get", "", "pods/exec"), Right("create", "", "pods/exec")}
    yield from sorted(seen, key=lambda one: (one.is_cluster_wide, one.resource, one.verb))


def _move(body: Json, namespace: str) -> None:
    """Put an object of the manifests into another namespace."""
    if body["kind"] in _CLUSTER_WIDE:
        before = body["metadata"]["name"]
        body["metadata"]["name"] = before.replace("skyserve", namespace, 1)
        if "roleRef" in body:
            body["roleRef"]["name"] = body["metadata"]["name"]
    else:
        body["metadata"]["namespace"] = namespace
    for subject in body.get("subjects") or ():
        subject["namespace"] = namespace


def _configured(text: str, added: Mapping[str, Any]) -> str:
    own = yaml.safe_load(text)
    merged = {**own, **added}
    for section in _OWN_CONFIG:
        merged[section] = {**own[section], **(added.get(section) or {})}
    return yaml.safe_dump(merged)


def _fill(template: Json, values: ClusterValues, config: str) -> None:
    digest = hashlib.sha256(config.encode()).hexdigest()[:16]
    template["metadata"]["annotations"]["checksum/config"] = digest
    spec = template["spec"]
    for container in (*spec["initContainers"], *spec["containers"]):
        container["image"] = values.image
        for variable in container.get("env") or ():
            if variable["name"] == DATABASE_VARIABLE:
                variable["valueFrom"]["secretKeyRef"]["name"] = values.database_secret
