"""The scheduler of the cluster: affinity, taints, and room by what Pods request. It reports why a Pod finds no node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from provisioners.kubernetes.quantities import amount

Json = dict[str, Any]


def place(pod: Json, nodes: Iterable[Json], pods: Iterable[Json]) -> tuple[str | None, str]:
    """Return the node for a Pod, or the reason as a sentence."""
    nodes = sorted(nodes, key=lambda one: (-_preference(pod, one), str(one["metadata"]["name"])))
    taken: dict[str, Counter[str]] = {}
    for other in pods:
        where = other["spec"].get("nodeName")
        if where and other["status"].get("phase") not in ("Succeeded", "Failed"):
            taken.setdefault(where, Counter()).update(requests(other))
    wanted = requests(pod)
    why: Counter[str] = Counter()
    for node in nodes:
        name = node["metadata"]["name"]
        found = _obstacle(pod, node, wanted, taken.get(name, Counter()))
        if found is None:
            return name, ""
        why[found] += 1
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(why.items()))
    return (
        None,
        f"0/{len(nodes)} nodes are available: {reasons}." if nodes else "no nodes available to schedule pods",
    )


def requests(pod: Json) -> Counter[str]:
    found: Counter[str] = Counter({"pods": 1})
    for container in pod["spec"]["containers"]:
        for name, value in (container.get("resources", {}).get("requests") or {}).items():
            found[name] += amount(value)  # type: ignore[assignment]
    return found


def _obstacle(pod: Json, node: Json, wanted: Counter[str], taken: Counter[str]) -> str | None:
    spec = node.get("spec") or {}
    if spec.get("unschedulable"):
        return "node(s) were unschedulable"
    for taint in spec.get("taints") or ():
        if taint["effect"] in ("NoSchedule", "NoExecute") and not _tolerated(
            taint, pod["spec"].get("tolerations") or ()
        ):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    labels = node["metadata"].get("labels") or {}
    selector = pod["spec"].get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in selector.items()) or not _is_near(pod, labels):
        return "node(s) didn't match Pod's node affinity/selector"
    has = node["status"]["allocatable"]
    for name, number in wanted.items():
        if taken[name] + number > amount(has.get(name)):
            return "Too many pods" if name == "pods" else f"Insufficient {name}"
    return None


def _tolerated(taint: Json, tolerations: Iterable[Json]) -> bool:
    for one in tolerations:
        if one.get("effect") not in (None, "", taint["effect"]):
            continue
        if one.get("operator", "Equal") == "Exists" and one.get("key") in (None, taint["key"]):
            return True
        if one.get("key") == taint["key"] and one.get("value", "") == taint.get("value", ""):
            return True
    return False


def _is_near(pod: Json, labels: Json) -> bool:
    rules = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = rules.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")
    return terms is None or any(
        all(_holds(one, labels) for one in term["matchExpressions"]) for term in terms
    )


def _preference(pod: Json, node: Json) -> int:
    rules = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    labels = node["metadata"].get("labels") or {}
    return sum(
        one["weight"]
        for one in rules.get("preferredDuringSchedulingIgnoredDuringExecution", ())
        if all(_holds(each, labels) for each in one["preference"]["matchExpressions"])
    )


def _holds(rule: Json, labels: Json) -> bool:
    value = labels.get(rule["key"])
    match rule["operator"]:
        case "In":
            return value in rule["values"]
        case "NotIn":
            return value not in rule["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise AssertionError(rule)
