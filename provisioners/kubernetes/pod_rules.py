"""What a patch over the Pod may say: that it is a part of a Pod, that it leaves what the product needs, and which privileges it has. Pure.

config.yaml, service files and the controller's API are checked by `problems`; the limits of teams by `privileges` and `images`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from provisioners.kubernetes.pod_schema import DIRECTIVE, Path, PodProblem, dotted, misfits
from provisioners.kubernetes.scripts import CACHE, FILES, ROOT

_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(
    r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
)
_OUR_KEY = re.compile(r"app\.kubernetes\.io/managed-by|skyserve[-.].*")
_OUR_VARIABLE = re.compile(r"(SKYSERVE|SKYPILOT)_.*")
_MOST_DEPTH = 40
_GPUS = re.compile(r".*/(gpu|tpu|gaudi|neuron.*)")

#: What of a Pod is set elsewhere, or needed as it is.
_OF_POD: Mapping[str, str] = {
    "restartPolicy": "the controller replaces replicas, and needs Never",
    "hostname": "nodes of a replica find each other by it",
    "subdomain": "nodes of a replica find each other by it",
    "setHostnameAsFQDN": "nodes of a replica find each other by their short names",
    "terminationGracePeriodSeconds": "preemption notices count on 30 seconds",
    "nodeName": "the scheduler chooses the node; use nodeSelector or affinity",
    "ephemeralContainers": "no Pod can be created with any",
    "serviceAccount": "use serviceAccountName",
}
_OF_MAIN: Mapping[str, str] = {
    "image": "set resources.image_id in the service file",
    "command": "set run in the service file",
    "args": "set run in the service file",
    "restartPolicy": "the controller replaces replicas",
    "startupProbe": "it is how the controller sees that setup is done; set service.readiness_probe",
    "terminationMessagePath": "the controller reads the reason of a failed setup there",
    "terminationMessagePolicy": "the controller reads the reason of a failed setup there",
}
_OF_AGENT: Mapping[str, str] = {
    **dict.fromkeys(
        ("command", "args", "ports", "lifecycle", "readinessProbe", "livenessProbe", "restartPolicy"),
        "it belongs to the load balancer",
    ),
    "image": "set clouds.kubernetes.agent_image",
}
#: What has parts of ours, so that it cannot be removed or replaced as a whole.
_WHOLE = frozenset(
    {
        ("metadata",),
        ("metadata", "labels"),
        ("metadata", "annotations"),
        ("spec",),
        ("spec", "containers"),
        ("spec", "initContainers"),
        ("spec", "volumes"),
        ("spec", "imagePullSecrets"),
        ("spec", "tolerations"),
        ("spec", "affinity"),
        ("spec", "affinity", "nodeAffinity"),
        ("spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"),
        (
            "spec",
            "affinity",
            "nodeAffinity",
            "requiredDuringSchedulingIgnoredDuringExecution",
            "nodeSelectorTerms",
        ),
    }
)
_WHOLE_OF_CONTAINER = frozenset({"env", "ports", "volumeMounts", "resources"})


class Own(NamedTuple):
    """What is the product's in a Pod: its container, what of that is set elsewhere, its volumes and the paths of its mounts."""

    container: str
    keys: Mapping[str, str]
    volumes: frozenset[str]
    mounts: frozenset[str]


REPLICA = Own("main", _OF_MAIN, frozenset({"files", "skyserve-cache"}), frozenset({ROOT, FILES, CACHE}))
AGENT = Own(
    "agent",
    _OF_AGENT,
    frozenset({"admin", "state", "keys", "files"}),
    frozenset({"/run/skyserve/admin", "/run/skyserve/files", "/run/skyserve/api-keys", "/var/lib/skyserve"}),
)


def problems(patch: Any, own: Own = REPLICA) -> list[PodProblem]:
    """Return what is wrong with a patch over the Pod of a replica, or of a load balancer."""
    if _depth(patch) > _MOST_DEPTH:
        return [PodProblem((), "is nested too deeply")]
    found = list(misfits(patch))
    if found or not isinstance(patch, Mapping):
        return found
    return [*_removals(patch, ()), *_object(patch), *_spec(patch.get("spec") or {}, own)]


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level and depth <= _MOST_DEPTH:
        depth += 1
        level = [
            inner
            for one in level
            if isinstance(one, Mapping | list)
            for inner in (one.values() if isinstance(one, Mapping) else one)
        ]
    return depth


def _removals(value: Any, at: Path) -> Iterator[PodProblem]:
    if at in _WHOLE and _is_removal(value):
        yield PodProblem(at, "parts of it are the product's: it cannot be removed or replaced as a whole")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _removals(inner, (*at, str(key)))


def _is_removal(value: Any) -> bool:
    if isinstance(value, list):
        return {DIRECTIVE: "replace"} in value
    return value is None or (isinstance(value, Mapping) and DIRECTIVE in value)


def _object(patch: Mapping[str, Any]) -> Iterator[PodProblem]:
    for key, only in (("apiVersion", "v1"), ("kind", "Pod")):
        if patch.get(key, only) != only:
            yield PodProblem((key,), f"must be {only}, if it is given")
    for section in ("labels", "annotations"):
        for key, value in ((patch.get("metadata") or {}).get(section) or {}).items():
            at = ("metadata", section, key)
            if _OUR_KEY.fullmatch(key):
                yield PodProblem(at, "the product finds its Pods by it: it cannot be set")
            elif not _LABEL_KEY.fullmatch(key) or (section == "labels" and not _LABEL.fullmatch(value or "")):
                yield PodProblem(at, f"Kubernetes has no such {section.removesuffix('s')}")


def _spec(spec: Mapping[str, Any], own: Own) -> Iterator[PodProblem]:
    for key in spec:
        if key in _OF_POD:
            yield PodProblem(("spec", key), f"it cannot be set: {_OF_POD[key]}")
    for index, one in enumerate(spec.get("containers") or ()):
        at: Path = ("spec", "containers", index)
        if one.get("name") == own.container:
            yield from _container(one, own, at)
        elif "image" not in one and DIRECTIVE not in one:
            yield PodProblem((*at, "image"), f"is missing: only {own.container} is there already")
    for index, one in enumerate(spec.get("initContainers") or ()):
        if one.get("name") == "files":
            yield PodProblem(("spec", "initContainers", index), _FOLLOWS)
    for index, one in enumerate(spec.get("volumes") or ()):
        if one.get("name") in own.volumes:
            yield PodProblem(("spec", "volumes", index), f"{one['name']} belongs to the product")
        elif one.get("name") == "work" and not {"emptyDir", "ephemeral"} & one.keys():
            yield PodProblem(
                ("spec", "volumes", index), "work must be empty for each Pod: emptyDir or ephemeral"
            )


_FOLLOWS = "files belongs to the product: its resources and securityContext are those of main"


def _container(one: Mapping[str, Any], own: Own, at: Path) -> Iterator[PodProblem]:
    if DIRECTIVE in one:
        yield PodProblem(at, f"{own.container} cannot be removed or replaced")
    for key, value in one.items():
        if key in own.keys:
            yield PodProblem((*at, key), f"it cannot be set: {own.keys[key]}")
        elif key in _WHOLE_OF_CONTAINER and _is_removal(value):
            yield PodProblem(
                (*at, key), "parts of it are the product's: it cannot be removed or replaced as a whole"
            )
    for index, each in enumerate(one.get("env") or ()):
        if _OUR_VARIABLE.fullmatch(each.get("name", "")):
            yield PodProblem((*at, "env", index), f"{each['name']} is set by the product")
    for index, each in enumerate(one.get("ports") or ()):
        if DIRECTIVE in each:
            yield PodProblem((*at, "ports", index), "set resources.ports in the service file")
    for index, each in enumerate(one.get("volumeMounts") or ()):
        if each.get("mountPath", "").rstrip("/") in own.mounts:
            yield PodProblem((*at, "volumeMounts", index), f"{each['mountPath']} belongs to the product")
    for section in ("limits", "requests"):
        for key in (one.get("resources") or {}).get(section) or {}:
            if _GPUS.fullmatch(key):
                why = "set resources.accelerators in the service file"
                yield PodProblem((*at, "resources", section, key), f"it cannot be set: {why}")


# --- what reaches beyond the Pod ------------------------------------------------------------------------------

#: What a patch uses, and where it does.
Uses = list[tuple[str, Path]]

#: What operators of a team may set only where `teams.NAME.pod` names it.
PRIVILEGES = (
    *("hostPath", "privileged", "hostNetwork", "hostPID", "hostIPC", "serviceAccountName", "secrets"),
    "cache",  # not of a patch: `cache: node` in a service file
)
_SECURITY: Mapping[str, tuple[Any, ...]] = {
    "privileged": (None, False),
    "allowPrivilegeEscalation": (False,),
    "procMount": (None, "Default"),
    "windowsOptions": (None,),
    "seLinuxOptions": (None,),
    "sysctls": (None, []),
}
_REMOTE = frozenset(
    {"persistentVolumeClaim", "emptyDir", "ephemeral", "configMap", "downwardAPI", "image", "name", DIRECTIVE}
)


def privileges(patch: Mapping[str, Any]) -> Uses:
    """Return which privileges the patch uses, each with where it does."""
    spec = patch.get("spec") or {}
    found: Uses = [(key, ("spec", key)) for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    found += [
        ("serviceAccountName", ("spec", key))
        for key in ("serviceAccountName", "automountServiceAccountToken")
        if spec.get(key)
    ]
    found += _of_security(spec.get("securityContext") or {}, ("spec", "securityContext"))
    for index, volume in enumerate(spec.get("volumes") or ()):
        found += _of_volume(volume, ("spec", "volumes", index))
    for section in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(section) or ()):
            found += _of_container(container, ("spec", section, index))
    notes = (patch.get("metadata") or {}).get("annotations") or {}
    found += [
        ("privileged", ("metadata", "annotations", key))
        for key in notes
        if key.startswith(
            ("container.apparmor.security.", "container.seccomp.security.", "seccomp.security.")
        )
    ]
    return found


def images(patch: Mapping[str, Any]) -> Uses:
    """Return the images of the containers that the patch adds, and where."""
    spec = patch.get("spec") or {}
    found: Uses = [
        (str(one["image"]), ("spec", section, index, "image"))
        for section in ("containers", "initContainers")
        for index, one in enumerate(spec.get(section) or ())
        if one.get("image")
    ]
    volumes = enumerate(spec.get("volumes") or ())
    return found + [
        (str(one["image"].get("reference")), ("spec", "volumes", index, "image"))
        for index, one in volumes
        if one.get("image")
    ]


def _of_security(context: Mapping[str, Any], at: Path) -> Uses:
    found: Uses = [
        ("privileged", (*at, key))
        for key, harmless in _SECURITY.items()
        if key in context and context[key] not in harmless
    ]
    if (context.get("capabilities") or {}).get("add"):
        found.append(("privileged", (*at, "capabilities", "add")))
    profiles = ("seccompProfile", "appArmorProfile")
    return found + [
        ("privileged", (*at, key))
        for key in profiles
        if key in context and (context[key] or {}).get("type") != "RuntimeDefault"
    ]


def _of_volume(volume: Mapping[str, Any], at: Path) -> Uses:
    if "secret" in volume:
        return [("secrets", (*at, "secret"))]
    if volume.get("projected"):
        sources = volume["projected"].get("sources")
        listed = sources if isinstance(sources, list) else ()
        kinds = {key for one in listed if isinstance(one, Mapping) for key in one}
        wanted = {"secret": "secrets", "serviceAccountToken": "serviceAccountName"}
        return [(name, (*at, "projected")) for key, name in wanted.items() if key in kinds]
    return [("hostPath", (*at, key)) for key in volume if key not in _REMOTE]


def _of_container(container: Mapping[str, Any], at: Path) -> Uses:
    found = _of_security(container.get("securityContext") or {}, (*at, "securityContext"))
    for index, one in enumerate(container.get("env") or ()):
        if "secretKeyRef" in (one.get("valueFrom") or {}):
            found.append(("secrets", (*at, "env", index)))
    for index, one in enumerate(container.get("envFrom") or ()):
        if "secretRef" in one:
            found.append(("secrets", (*at, "envFrom", index)))
    for index, one in enumerate(container.get("ports") or ()):
        if one.get("hostPort"):
            found.append(("hostNetwork", (*at, "ports", index, "hostPort")))
    return found


def beyond(patch: Mapping[str, Any], allowed: Collection[str], prefix: str) -> Iterator[str]:
    """Yield a sentence for each privilege that is used and not allowed; `prefix` is the path of the patch."""
    for name, at in privileges(patch):
        if name not in allowed:
            yield f"{prefix}.{dotted(at)}: operators may not set {name}"


def other_images(patch: Mapping[str, Any], allowed: Collection[str] | None, prefix: str) -> Iterator[str]:
    """Yield a sentence for each image that no pattern of `allowed` covers; these begin with `docker:`. None: any."""
    for image, at in images(patch) if allowed is not None else ():
        if not any(fnmatchcase(f"docker:{image}", one) for one in allowed or ()):
            yield f"{prefix}.{dotted(at)}: {image}: operators may use {', '.join(allowed or ()) or 'none'}"
