"""On which nodes a Pod may be: what labels of nodes say, and the affinity and tolerations that follow. Pure.

Vendors name the same things differently. A term per name, of which one must hold, covers them all: the cluster need not be
known in advance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from policies.model import CapacityType
from provisioners.port.accelerator_names import Vendor, canonical, vendor

ZONE_LABEL = "topology.kubernetes.io/zone"
NAME_LABEL = "kubernetes.io/hostname"
TYPE_LABEL = "node.kubernetes.io/instance-type"
NO_ZONE = "default"  # of nodes without the label

#: Labels of nodes that may be taken away.
SPOT_LABELS = (
    ("cloud.google.com/gke-spot", "true"),
    ("cloud.google.com/gke-preemptible", "true"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("karpenter.sh/capacity-type", "spot"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)

#: Labels that name a node's accelerator: by NVIDIA's and AMD's discovery, by GKE, by Karpenter, by SkyPilot.
ACCELERATOR_LABELS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "skypilot.co/accelerator",
)

_RESOURCES = {
    Vendor.NVIDIA: "nvidia.com/gpu",
    Vendor.AMD: "amd.com/gpu",
    Vendor.AWS: "aws.amazon.com/neuron",
    Vendor.GOOGLE: "google.com/tpu",
    Vendor.INTEL: "habana.ai/gaudi",
}
RESOURCES = tuple(_RESOURCES.values())

#: Taints by which a node announces that it goes, soon and whatever is on it.
NOTICE_TAINTS = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "node.kubernetes.io/out-of-service",
    }
)

_LOST_NODE_S = (
    30  # after which a Pod on a node that does not respond is given up; the cluster's default is 300
)

_GPU_PRODUCT = re.compile(r"^(NVIDIA-|AMD-)?(GeForce-|Tesla-|Instinct-)?", re.IGNORECASE)


def gpu_resource(accelerator: str, configured: str = "") -> str:
    """Return the name under which nodes offer the accelerator."""
    return configured or _RESOURCES[vendor(accelerator)]


def accelerator_of(labels: Mapping[str, str]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the accelerator that labels of a node name, and the labels that do; "" for none."""
    found = tuple((key, labels[key]) for key in ACCELERATOR_LABELS if labels.get(key))
    if not found:
        return "", ()
    return named(found[0][1]), found


def named(value: str) -> str:
    """Return our name of ``NVIDIA-L4``, ``Tesla-T4-SHARED``, ``nvidia-h100-80gb`` or ``a10g``."""
    text = re.sub(r"-SHARED$", "", value.replace("_", "-"))
    known = canonical(text)
    if known != text:
        return known
    short = _GPU_PRODUCT.sub("", text)
    return canonical(short) if short else text


def is_spot(labels: Mapping[str, str]) -> bool:
    return any(labels.get(key) == value for key, value in SPOT_LABELS)


def affinity(
    zone: str,
    capacity_type: CapacityType,
    accelerator_labels: Iterable[tuple[str, str]],
    node_type: str = "",
) -> dict[str, Any]:
    """Return the affinity of a Pod in a zone; `accelerator_labels` are those of nodes that have its accelerator."""
    base = (
        [_is_in(ZONE_LABEL, [zone])] if zone != NO_ZONE else [{"key": ZONE_LABEL, "operator": "DoesNotExist"}]
    )
    if node_type:
        base.append(_is_in(TYPE_LABEL, [node_type]))
    if capacity_type is CapacityType.SPOT:
        markets = [[_is_in(key, [value])] for key, value in SPOT_LABELS]
    else:
        markets = [[{"key": key, "operator": "NotIn", "values": [value]} for key, value in SPOT_LABELS]]
    by_key: dict[str, set[str]] = {}
    for key, value in accelerator_labels:
        by_key.setdefault(key, set()).add(value)
    kinds = [[_is_in(key, sorted(values))] for key, values in sorted(by_key.items())] or [[]]
    terms = [{"matchExpressions": [*base, *market, *kind]} for market in markets for kind in kinds]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def prefer(spec: dict[str, Any], nodes: Sequence[str]) -> None:
    """Add to the specification of a Pod that it prefers these nodes."""
    if nodes:
        term = {"weight": 100, "preference": {"matchExpressions": [_is_in(NAME_LABEL, nodes)]}}
        near = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
        near.setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(term)


def tolerations(
    capacity_type: CapacityType, resource: str, more: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return the taints that a Pod tolerates: those of GPU nodes, of spot nodes, and a lost node for a short while."""
    found: list[dict[str, Any]] = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_NODE_S}
        for key in ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
    ]
    if resource:
        found.append({"key": resource, "operator": "Exists", "effect": "NoSchedule"})
    if capacity_type is CapacityType.SPOT:
        found += [
            {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}
            for key, value in SPOT_LABELS
        ]
    return [*found, *(dict(one) for one in more)]


def tolerates(taint: Mapping[str, Any], accepted: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether one of the tolerations covers the taint."""
    return any(_covers(one, taint) for one in accepted)


def _covers(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key = toleration.get("key")
    if toleration.get("operator", "Equal") == "Exists":
        return key in (None, "", taint.get("key"))
    return key == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")


def _is_in(key: str, values: Sequence[str]) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}
