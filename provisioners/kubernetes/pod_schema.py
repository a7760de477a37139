"""The parts of a Pod that a patch may name: their keys and the kinds of their values. Pure.

The table has the keys of a Pod down to those of containers, volumes and security contexts, as of Kubernetes 1.33 (`core/v1`). What is
deeper is any mapping here, and the API server's to check. A server drops keys that it does not know without an error, so a slip in a
key must be found before it is sent.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Path = tuple[str | int, ...]

#: By kind, its keys. A value is a `string`, `integer` or `boolean`, an `any` mapping, `strings` or `amounts` by name, or another kind;
#: `[KIND]` is a list. A `*` after a key: an item of a list must have it.
_TABLE: Mapping[str, str] = {
    "Pod": "apiVersion:string kind:string metadata:ObjectMeta spec:PodSpec",
    "ObjectMeta": "annotations:strings labels:strings",
    "PodSpec": "activeDeadlineSeconds:integer affinity:Affinity automountServiceAccountToken:boolean containers:[Container] "
    "dnsConfig:any dnsPolicy:string enableServiceLinks:boolean ephemeralContainers:[any] hostAliases:[HostAlias] hostIPC:boolean "
    "hostNetwork:boolean hostPID:boolean hostUsers:boolean hostname:string imagePullSecrets:[LocalObjectReference] "
    "initContainers:[Container] nodeName:string nodeSelector:strings os:any overhead:amounts preemptionPolicy:string "
    "priority:integer priorityClassName:string readinessGates:[any] resourceClaims:[PodResourceClaim] "
    "resources:ResourceRequirements restartPolicy:string runtimeClassName:string schedulerName:string "
    "schedulingGates:[PodSchedulingGate] securityContext:PodSecurityContext serviceAccount:string serviceAccountName:string "
    "setHostnameAsFQDN:boolean shareProcessNamespace:boolean subdomain:string terminationGracePeriodSeconds:integer "
    "tolerations:[Toleration] topologySpreadConstraints:[TopologySpreadConstraint] volumes:[Volume]",
    "Container": "args:[string] command:[string] env:[EnvVar] envFrom:[EnvFromSource] image:string imagePullPolicy:string "
    "lifecycle:any livenessProbe:any name*:string ports:[ContainerPort] readinessProbe:any resizePolicy:[any] "
    "resources:ResourceRequirements restartPolicy:string securityContext:SecurityContext startupProbe:any stdin:boolean "
    "stdinOnce:boolean terminationMessagePath:string terminationMessagePolicy:string tty:boolean volumeDevices:[VolumeDevice] "
    "volumeMounts:[VolumeMount] workingDir:string",
    "Affinity": "nodeAffinity:NodeAffinity podAffinity:any podAntiAffinity:any",
    "NodeAffinity": "preferredDuringSchedulingIgnoredDuringExecution:[any] "
    "requiredDuringSchedulingIgnoredDuringExecution:NodeSelector",
    "NodeSelector": "nodeSelectorTerms:[NodeSelectorTerm]",
    "NodeSelectorTerm": "matchExpressions:[any] matchFields:[any]",
    "PodSecurityContext": "appArmorProfile:AppArmorProfile fsGroup:integer fsGroupChangePolicy:string runAsGroup:integer "
    "runAsNonRoot:boolean runAsUser:integer seLinuxChangePolicy:string seLinuxOptions:any seccompProfile:SeccompProfile "
    "supplementalGroups:[integer] supplementalGroupsPolicy:string sysctls:[any] windowsOptions:any",
    "SecurityContext": "allowPrivilegeEscalation:boolean appArmorProfile:AppArmorProfile capabilities:Capabilities "
    "privileged:boolean procMount:string readOnlyRootFilesystem:boolean runAsGroup:integer runAsNonRoot:boolean "
    "runAsUser:integer seLinuxOptions:any seccompProfile:SeccompProfile windowsOptions:any",
    "AppArmorProfile": "localhostProfile:string type:string",
    "SeccompProfile": "localhostProfile:string type:string",
    "Capabilities": "add:[string] drop:[string]",
    "ResourceRequirements": "claims:[any] limits:amounts requests:amounts",
    "EnvVar": "name*:string value:string valueFrom:EnvVarSource",
    "EnvVarSource": "configMapKeyRef:any fieldRef:any resourceFieldRef:any secretKeyRef:any",
    "EnvFromSource": "configMapRef:any prefix:string secretRef:any",
    "ContainerPort": "containerPort*:integer hostIP:string hostPort:integer name:string protocol:string",
    "VolumeMount": "mountPath*:string mountPropagation:string name:string readOnly:boolean recursiveReadOnly:string "
    "subPath:string subPathExpr:string",
    "VolumeDevice": "devicePath*:string name:string",
    "Volume": "awsElasticBlockStore:any azureDisk:any azureFile:any cephfs:any cinder:any configMap:any csi:any downwardAPI:any "
    "emptyDir:any ephemeral:any fc:any flexVolume:any flocker:any gcePersistentDisk:any gitRepo:any glusterfs:any hostPath:any "
    "image:any iscsi:any name*:string nfs:any persistentVolumeClaim:any photonPersistentDisk:any portworxVolume:any projected:any "
    "quobyte:any rbd:any scaleIO:any secret:any storageos:any vsphereVolume:any",
    "Toleration": "effect:string key:string operator:string tolerationSeconds:integer value:string",
    "HostAlias": "hostnames:[string] ip*:string",
    "LocalObjectReference": "name*:string",
    "PodResourceClaim": "name*:string resourceClaimName:string resourceClaimTemplateName:string",
    "PodSchedulingGate": "name*:string",
    "TopologySpreadConstraint": "labelSelector:any matchLabelKeys:[string] maxSkew:integer minDomains:integer "
    "nodeAffinityPolicy:string nodeTaintsPolicy:string topologyKey*:string whenUnsatisfiable:string",
}
_PLAIN = {"string": str, "integer": int, "boolean": bool}
_SHOWN = {"string": "text", "integer": "a whole number", "boolean": "true or false"}
_QUANTITY = re.compile(r"\d+(\.\d+)?([eE]-?\d+|m|k|[KMGTPE]i?)?")
DIRECTIVE = "$patch"


class PodProblem(NamedTuple):
    """What is wrong with a patch: where in it, as a path of keys and indices, and the sentence."""

    at: Path
    message: str

    def __str__(self) -> str:
        return f"{dotted(self.at)}: {self.message}" if self.at else self.message


def dotted(path: Path) -> str:
    """Return ``("spec", "containers", 0)`` as ``spec.containers[0]``."""
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in path).removeprefix(".")


def keys_of(kind: str) -> dict[str, str]:
    """Return the keys of a kind, each with the kind of its value."""
    pairs = (one.rsplit(":", 1) for one in _TABLE[kind].split())
    return {key.removesuffix("*"): value for key, value in pairs}


def merge_key(kind: str) -> str:
    """Return the key that every item of a list of that kind has; "" if there is none."""
    found = re.search(r"(\w+)\*:", _TABLE.get(kind, ""))
    return found[1] if found else ""


def misfits(value: Any, kind: str = "Pod", at: Path = ()) -> Iterator[PodProblem]:
    """Yield where a patch is no part of a Pod. A null removes what is there, so it fits everywhere but in a list."""
    if kind.startswith("["):
        if not isinstance(value, list):
            yield PodProblem(at, "must be a list")
            return
        for index, item in enumerate(value):
            yield from _item(item, kind[1:-1], (*at, index))
    elif kind in _PLAIN:
        if not isinstance(value, _PLAIN[kind]) or (kind == "integer" and isinstance(value, bool)):
            yield PodProblem(at, f"must be {_SHOWN[kind]}")
    elif not isinstance(value, Mapping):
        yield PodProblem(at, "must be a mapping")
    elif kind in ("strings", "amounts"):
        yield from _named(value, kind, at)
    elif kind != "any":
        known = keys_of(kind)
        for key, inner in value.items():
            if key == DIRECTIVE:
                yield from _directive(inner, (*at, key))
            elif key not in known:
                yield PodProblem((*at, key), unknown(str(key), known))
            elif inner is not None:
                yield from misfits(inner, known[key], (*at, key))


def unknown(key: str, known: Mapping[str, str]) -> str:
    if key.startswith("$"):
        return "only $patch is understood, with replace or delete"
    near = difflib.get_close_matches(key, known, 1)
    return f"a Pod has no such key; did you mean {near[0]}?" if near else "a Pod has no such key"


def _item(item: Any, kind: str, at: Path) -> Iterator[PodProblem]:
    if item is None:
        yield PodProblem(at, "must not be empty")
        return
    yield from misfits(item, kind, at)
    name = merge_key(kind)
    if name and isinstance(item, Mapping) and name not in item and item != {DIRECTIVE: "replace"}:
        yield PodProblem(at, f"must have {name}, by which it is found in the Pod")


def _named(value: Mapping[Any, Any], kind: str, at: Path) -> Iterator[PodProblem]:
    for key, inner in value.items():
        if key == DIRECTIVE:
            yield from _directive(inner, (*at, key))
        elif not isinstance(key, str):
            yield PodProblem((*at, str(key)), "a name must be text")
        elif inner is None:
            continue
        elif kind == "strings" and not isinstance(inner, str):
            yield PodProblem((*at, key), 'must be text: put it in quotes, such as "true"')
        elif kind == "amounts" and not _is_amount(inner):
            yield PodProblem((*at, key), "must be an amount, such as 2, 500m or 16Gi")


def _is_amount(value: Any) -> bool:
    return not isinstance(value, bool) and _QUANTITY.fullmatch(str(value)) is not None


def _directive(value: Any, at: Path) -> Iterator[PodProblem]:
    if value not in ("replace", "delete"):
        yield PodProblem(at, "must be replace or delete")
