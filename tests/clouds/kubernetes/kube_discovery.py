"""The API discovery of a cluster: the documents from which kubectl finds its way."""

from __future__ import annotations

from tests.clouds.kubernetes.kube_store import CLUSTER_WIDE, KINDS, Json

_GROUPS = {
    "coordination.k8s.io": ("leases",),
    "batch": ("cronjobs",),
    "apps": ("deployments",),
    "policy": ("poddisruptionbudgets",),
    "storage.k8s.io": ("storageclasses",),
    "networking.k8s.io": ("networkpolicies",),
    "rbac.authorization.k8s.io": ("roles", "rolebindings", "clusterroles", "clusterrolebindings"),
}
_SHORT = {"pods": ["po"], "nodes": ["no"], "services": ["svc"], "namespaces": ["ns"], "cronjobs": ["cj"]}


def discovery(path: str, release: str) -> Json | None:
    """Return the document at a path; None if it is none of these."""
    path = path.rstrip("/")
    if path == "/version":
        major, minor = release.removeprefix("v").split(".")[:2]
        return {"major": major, "minor": minor, "gitVersion": release, "platform": "linux/amd64"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        groups = [
            {
                "name": name,
                "versions": [{"groupVersion": f"{name}/v1", "version": "v1"}],
                "preferredVersion": {"groupVersion": f"{name}/v1", "version": "v1"},
            }
            for name in _GROUPS
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/api/v1":
        core = [one for one, (version, _) in KINDS.items() if version == "v1"]
        return _resources("v1", tuple(core)) | {}
    for name, resources in _GROUPS.items():
        if path == f"/apis/{name}/v1":
            return _resources(f"{name}/v1", resources)
    return None


def _resources(version: str, names: tuple[str, ...]) -> Json:
    found = [
        {
            "name": name,
            "singularName": KINDS[name][1].lower(),
            "namespaced": name not in CLUSTER_WIDE,
            "kind": KINDS[name][1],
            "verbs": ["create", "delete", "get", "list", "patch", "watch"],
            "shortNames": _SHORT.get(name, []),
        }
        for name in names
    ]
    if "pods" in names:
        found.append(
            {"name": "pods/log", "singularName": "", "namespaced": True, "kind": "Pod", "verbs": ["get"]}
        )
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}
