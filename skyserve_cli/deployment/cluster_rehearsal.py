"""What a cluster would refuse of a deployment, before anything of it is changed: every object is sent as a dry run.

Admission decides on it as on the real one: quotas, LimitRanges, PodSecurity, webhooks, and whether the caller may grant the rights of
the Roles. A Deployment's Pods are admitted later and by others, so one is sent as well. In a namespace that does not exist yet nothing can be
asked; there the rights are reviewed one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from provisioners.port.errors import AuthError, ProvisionError
from skyserve_cli.deployment import cluster_objects as manifests
from skyserve_cli.deployment.cluster_objects import Json, Right

if TYPE_CHECKING:
    from provisioners.kubernetes.api import KubeApi

_ROLES = ("Role", "ClusterRole")


def refusals(api: KubeApi, wanted: Sequence[Json], *, has_namespace: bool) -> Iterator[str]:
    """Yield a sentence for each object that the cluster would refuse."""
    for body in wanted:
        if not has_namespace and "namespace" in body["metadata"]:
            continue
        kind, name = manifests.kind_of(body), body["metadata"]["name"]
        if kind == "persistent_volume_claim" and api.find(kind, name) is not None:
            continue  # it is left as it is
        if kind == "persistent_volume_claim":
            yield from _of_storage(api, body)
        try:
            api.apply(kind, body, is_dry=True)
        except ProvisionError as error:
            # A binding may name a Role that is made in the same deployment; the dry run of that Role has decided.
            if not (kind.endswith("role_binding") and error.code == "NotFound"):
                yield f"{body['kind']} {name}: {_said(error)}"
    if has_namespace:
        yield from _of_pods(api, wanted)
    else:
        missing = [right for right in grants(wanted) if not may(api, right)]
        if missing:
            yield f"you do not hold what its Roles grant: {', '.join(map(str, missing))}"


def _of_storage(api: KubeApi, claim: Mapping[str, Any]) -> Iterator[str]:
    """A claim of a class that does not exist is accepted, and waits for ever."""
    wanted = claim["spec"].get("storageClassName")
    try:
        known = [str(one["metadata"]["name"]) for one in api.list_storage_classes().items] if wanted else []
    except ProvisionError:
        return  # who may not list them learns it from the Pod that waits
    if wanted and wanted not in known:
        listed = ", ".join(known) or "none"
        yield f"PersistentVolumeClaim {claim['metadata']['name']}: there is no storage class {wanted} (there is: {listed})"


def grants(wanted: Sequence[Json]) -> list[Right]:
    """Return the rights that the Roles among the objects grant."""
    return [
        Right(verb, group, resource, body["kind"] == "ClusterRole")
        for body in wanted
        if body["kind"] in _ROLES
        for rule in body["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


def may(api: KubeApi, right: Right) -> bool:
    """Return whether the caller has the right."""
    resource, _, sub = right.resource.partition("/")
    attributes = {"verb": right.verb, "group": right.group, "resource": resource}
    if sub:
        attributes["subresource"] = sub
    if right.is_cluster_wide:
        attributes["namespace"] = ""
    return api.may(attributes)[0]


def _of_pods(api: KubeApi, wanted: Sequence[Json]) -> Iterator[str]:
    if not may(api, Right("create", "", "pods")):
        return  # who may not create Pods may not ask about them
    for body in wanted:
        if body["kind"] != "Deployment":
            continue
        pod = _pod_of(body)
        if api.find("service_account", pod["spec"]["serviceAccountName"]) is None:
            del pod["spec"]["serviceAccountName"]  # it is made in the same deployment
        try:
            api.create("pod", pod, is_dry=True)
        except ProvisionError as error:
            yield f"the Pods of Deployment {body['metadata']['name']}: {_said(error)}"


def _said(error: ProvisionError) -> str:
    """Return the server's sentence in one line; advice about a missing right is kept."""
    from provisioners.kubernetes.errors import said_by_server  # an extra

    message = error.message if isinstance(error, AuthError) else said_by_server(error.message)
    return " ".join(message.split())


def _pod_of(deployment: Mapping[str, Any]) -> Json:
    template = copy.deepcopy(deployment["spec"]["template"])
    meta = {**template["metadata"], "name": f"{deployment['metadata']['name']}-check"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}
