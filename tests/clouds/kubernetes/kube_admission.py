"""The admission of a cluster: quotas, limit ranges, pod security, service accounts, classes, webhooks, and who may grant which rights.

The sentences are those of kube-apiserver. Every refusal is `Refused`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from provisioners.kubernetes.quantities import amount
from tests.clouds.kubernetes.kube_store import Json, Refused

_BASELINE_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
_BUILT_IN_CLASSES = {"system-cluster-critical", "system-node-critical"}


@dataclass
class Admission:
    """What the cluster, or its one namespace, admits.

    `limits` is a LimitRange of containers (default, defaultRequest, max, min). `security` is the level that the namespace enforces.
    `webhooks` are called for each Pod, by name: they return why it is denied, or None; one that raises ConnectionError is away.
    """

    quota: tuple[str, Mapping[str, float]] | None = None  # its name, and the most of each resource
    limits: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    security: str = "privileged"
    priority_classes: set[str] = field(default_factory=set)
    runtime_classes: set[str] = field(default_factory=set)
    webhooks: dict[str, Callable[[Json], str | None]] = field(default_factory=dict)

    def admit_pod(self, pod: Json, accounts: Iterable[str], live: Iterable[Json]) -> None:
        """Mutate the Pod as admission does. Raises Refused. `accounts` are the namespace's, `live` its Pods that have not ended."""
        name = pod["metadata"]["name"]
        for why in (self._names(pod, set(accounts)), self._security(pod), self._limits(pod)):
            for sentence in why:
                raise Refused(403, "Forbidden", f'pods "{name}" is forbidden: {sentence}')
        self._webhooks(pod)
        for sentence in self._quota(pod, list(live)):
            raise Refused(403, "Forbidden", f'pods "{name}" is forbidden: {sentence}')

    def _names(self, pod: Json, accounts: set[str]) -> Iterator[str]:
        spec, namespace = pod["spec"], pod["metadata"].get("namespace", "ml")
        account = spec.get("serviceAccountName", "default")
        if account not in accounts | {"default"}:
            yield f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
        wanted = spec.get("priorityClassName")
        if wanted and wanted not in self.priority_classes | _BUILT_IN_CLASSES:
            yield f"no PriorityClass with name {wanted} was found"
        wanted = spec.get("runtimeClassName")
        if wanted and wanted not in self.runtime_classes:
            yield f'pod rejected: RuntimeClass "{wanted}" not found'

    def _security(self, pod: Json) -> Iterator[str]:
        found = "" if self.security == "privileged" else ", ".join(violations(pod["spec"], self.security))
        if found:
            yield f'violates PodSecurity "{self.security}:latest": {found}'

    def _limits(self, pod: Json) -> Iterator[str]:
        for one in containers_of(pod):
            resources = one.setdefault("resources", {})
            limits = {**(self.limits.get("max") or {}), **(self.limits.get("default") or {})}
            requests = {
                **(self.limits.get("min") or {}),
                **limits,
                **(self.limits.get("defaultRequest") or {}),
            }
            for section, defaults in (("limits", limits), ("requests", requests)):
                for key, value in defaults.items():
                    resources.setdefault(section, {}).setdefault(key, value)
            for key, most in (self.limits.get("max") or {}).items():
                has = resources["limits"][key]
                if amount(has) > amount(most):
                    yield f"maximum {key} usage per Container is {most}, but limit is {has}"
            for key, least in (self.limits.get("min") or {}).items():
                has = (resources.get("requests") or {}).get(key)
                if amount(has) < amount(least):
                    yield f"minimum {key} usage per Container is {least}, but request is {has}"

    def _webhooks(self, pod: Json) -> None:
        for name, decide in self.webhooks.items():
            try:
                denied = decide(pod)
            except ConnectionError as error:
                url = "https://hook.hooks.svc:443/validate?timeout=10s"
                raise Refused(
                    500,
                    "InternalError",
                    f'Internal error occurred: failed calling webhook "{name}": failed to call webhook: Post "{url}": {error}',
                ) from None
            if denied is not None:
                raise Refused(403, "Forbidden", f'admission webhook "{name}" denied the request: {denied}')

    def _quota(self, pod: Json, live: list[Json]) -> Iterator[str]:
        if self.quota is None:
            return
        name, hard = self.quota
        missing = [
            f"{key} for: {','.join(lacking)}"
            for key in sorted(hard)
            if (lacking := [one["name"] for one in containers_of(pod) if _lacks(one, key)])
        ]
        if missing:
            yield f"failed quota: {name}: must specify {'; '.join(missing)}"
        for key, most in hard.items():
            used, wanted = sum(map(_use(key), live)), _use(key)(pod)
            if used + wanted > most:
                yield (
                    f"exceeded quota: {name}, requested: {key}={wanted:g}, used: {key}={used:g}, limited: {key}={most:g}"
                )


def containers_of(pod: Json) -> list[Json]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def _place(key: str) -> tuple[str, str]:
    section, _, name = key.partition(".")
    return (section, name) if section in ("limits", "requests") else ("requests", key)


def _lacks(container: Json, key: str) -> bool:
    section, name = _place(key)
    return name in ("cpu", "memory") and name not in ((container.get("resources") or {}).get(section) or {})


def _use(key: str) -> Callable[[Json], float]:
    section, name = _place(key)

    def use(pod: Json) -> float:
        if name == "pods":
            return 1.0
        return sum(
            amount(((one.get("resources") or {}).get(section) or {}).get(name))
            for one in pod["spec"]["containers"]
        )

    return use


def violations(spec: Json, level: str) -> Iterator[str]:
    """Yield how a Pod violates the Pod Security Standard `baseline` or `restricted`."""
    everyone = [*spec.get("initContainers", ()), *spec["containers"]]
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            yield f"host namespaces ({key}=true)"
    for volume in spec.get("volumes") or ():
        if not _BASELINE_VOLUMES & volume.keys() or "hostPath" in volume:
            yield f'{"hostPath volumes" if "hostPath" in volume else "restricted volume types"} (volume "{volume["name"]}")'
    of_pod = spec.get("securityContext") or {}
    for one in everyone:
        name, own = one["name"], one.get("securityContext") or {}
        if own.get("privileged"):
            yield f'privileged (container "{name}" must not set securityContext.privileged=true)'
        added = set((own.get("capabilities") or {}).get("add") or ())
        if level != "restricted":
            continue
        if own.get("allowPrivilegeEscalation") is not False:
            yield (
                f'allowPrivilegeEscalation != false (container "{name}" must set '
                "securityContext.allowPrivilegeEscalation=false)"
            )
        if "ALL" not in ((own.get("capabilities") or {}).get("drop") or ()) or added - {"NET_BIND_SERVICE"}:
            yield f'unrestricted capabilities (container "{name}" must set securityContext.capabilities.drop=["ALL"])'
        if own.get("runAsNonRoot", of_pod.get("runAsNonRoot")) is not True:
            yield f'runAsNonRoot != true (pod or container "{name}" must set securityContext.runAsNonRoot=true)'
        if own.get("runAsUser", of_pod.get("runAsUser")) == 0:
            yield f'runAsUser=0 (container "{name}" must not set runAsUser=0)'
        profile: dict[str, Any] = own.get("seccompProfile") or of_pod.get("seccompProfile") or {}
        if profile.get("type") not in ("RuntimeDefault", "Localhost"):
            yield (
                f'seccompProfile (pod or container "{name}" must set securityContext.seccompProfile.type to '
                '"RuntimeDefault" or "Localhost")'
            )


def check_grant(resource: str, body: Json, may: Callable[[str, str], bool], user: str) -> None:
    """Raise Refused if a Role grants what its author may not do."""
    if resource not in ("roles", "clusterroles"):
        return
    lacking = []
    for rule in body.get("rules") or ():
        for group in rule["apiGroups"]:
            for name in rule["resources"]:
                verbs = [verb for verb in rule["verbs"] if not may(verb, name)]
                if verbs:
                    listed = " ".join(f'"{verb}"' for verb in verbs)
                    lacking.append(f'{{APIGroups:["{group}"], Resources:["{name}"], Verbs:[{listed}]}}')
    if lacking:
        name = body["metadata"]["name"]
        raise Refused(
            403,
            "Forbidden",
            f'{resource}.rbac.authorization.k8s.io "{name}" is forbidden: user "{user}" (groups=["system:authenticated"]) is '
            "attempting to grant RBAC permissions not currently held:\n" + "\n".join(lacking),
        )
