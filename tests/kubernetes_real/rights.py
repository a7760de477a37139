"""The account of a controller on a real cluster: its rights are the Roles that `serve check --policy kubernetes` prints, no more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import yaml

from provisioners import permissions
from tests.clouds.kubernetes.kube_store import Refused
from tests.kubernetes_real.cluster import until
from tests.kubernetes_real.real_api import Json, RealApi

ACCOUNT = "skyserve"
_KINDS = {
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
}
_LASTS_S = 24 * 3600


def documents(namespace: str) -> Iterator[Json]:
    """Yield what is printed, with the namespace set as the text says."""
    for body in yaml.safe_load_all(permissions.text_of("kubernetes")):
        is_wide = body["kind"].startswith("Cluster")
        if is_wide:
            body["metadata"]["name"] += f"-{namespace}"
        else:
            body["metadata"]["namespace"] = namespace
        if "roleRef" in body and is_wide:
            body["roleRef"]["name"] += f"-{namespace}"
        for one in body.get("subjects", ()):
            one["namespace"] = namespace
        yield body


def make_space(api: RealApi, namespace: str) -> None:
    """Make a namespace with the account and its Roles."""
    api.ensure("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}}
    api.ensure("serviceaccounts", namespace, account)
    for body in documents(namespace):
        apply(api, namespace, body)
    until(lambda: _has_default(api, namespace), "the namespace has no service account of its own")


def apply(api: RealApi, namespace: str, body: Json) -> None:
    """Make a Role or what binds it, or give it these rules."""
    resource = _KINDS[body["kind"]]
    space = "" if body["kind"].startswith("Cluster") else namespace
    api.ensure(resource, space, body)
    if "rules" in body:
        api.patch(resource, space, body["metadata"]["name"], {"rules": body["rules"]})


def without(bodies: Iterable[Json], verb: str, resource: str) -> list[Json]:
    """Return the same Roles without a verb for a resource."""
    found = []
    for body in bodies:
        rules = [
            {**rule, "resources": [one], "verbs": verbs}
            for rule in body.get("rules", ())
            for one in rule["resources"]
            if (verbs := [each for each in rule["verbs"] if (each, one) != (verb, resource)])
        ]
        found.append({**body, "rules": rules} if "rules" in body else body)
    return found


def token(api: RealApi, namespace: str) -> str:
    """Return a token of the account."""
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": _LASTS_S},
    }
    made = api.call("POST", f"api/v1/namespaces/{namespace}/serviceaccounts/{ACCOUNT}/token", body)
    return str(made["status"]["token"])


def _has_default(api: RealApi, namespace: str) -> bool:
    """Pods are refused before there is one. Before 1.24 it needs a Secret, too."""
    try:
        api.get("serviceaccounts", namespace, "default")
    except Refused:
        return False
    return True
