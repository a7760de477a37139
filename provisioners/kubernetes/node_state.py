"""What a node's condition means for the Pods on it: a notice, or their loss. Pure.

    what the node shows                     notice                      its Pods are lost
    a taint that announces its end          at once, for 30 s           never: it still works
    Ready is Unknown: its kubelet is silent after 6 s, for 24 s         after 30 s
    Ready is False                          after 10 s, for 20 s        after 30 s
    its Node object is gone                 after 10 s, for 20 s        after 30 s
    not ready, together with many others    none                        when the cluster deletes them

The cluster has waited 40 s (since 1.32: 50 s) for a kubelet before it says Unknown. Ready is False for a moment when a kubelet or its
runtime is started again, and an object that was deleted may be registered again. The 30 s are also the toleration of our Pods, after
which the cluster deletes them, and the usual warning of a spot node. All of them count from when we first saw it: taints that forbid
new Pods have no time of their own.

Where many nodes fall silent together, the cluster more likely does not hear them, or their network's agent fails, than that they are
dead; it then evicts few Pods or none, and all replicas would be drained although they serve. Many are a quarter of all nodes and more than
two within 20 s, or all there are. Kubelets report every 10 s and the cluster looks every 5 s, so 6 s show most of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

from provisioners.kubernetes import placement
from provisioners.kubernetes.settings import GRACE_S
from provisioners.kubernetes.sightings import Sightings

Node = Mapping[str, Any]

LOST_S = 30.0
_DOUBT_S = 10.0
_TAINT = "taint "
_SILENT, _NOT_READY, _GONE = "silent", "not ready", "gone"
_SHORT_DOUBT_S = 6.0
_MANY, _FEW, _TOGETHER_S = 0.25, 2, 20.0
_DOUBTS = {_SILENT: _SHORT_DOUBT_S, _NOT_READY: _DOUBT_S, _GONE: _DOUBT_S}


class NodeFate(NamedTuple):
    """What becomes of a node. `is_known` is false where nodes cannot be listed, or this one never was.

    `notice_at`: when (UNIX seconds) its Pods will be gone, if that is to be believed yet. `trouble_at`: since when (steady
    seconds) it has not been ready, and `is_believed` whether that says anything about its Pods. `why` is a sentence.
    """

    is_known: bool = False
    notice_at: float | None = None
    trouble_at: float | None = None
    why: str = ""
    is_believed: bool = True


UNKNOWN = NodeFate()


def is_ready(node: Node) -> bool:
    """Return whether its kubelet reports that it is. A node without conditions was just made, or is none of a real cluster."""
    return _trouble(node) is None


def is_announced(node: Node) -> bool:
    """Return whether the node announces that it goes."""
    return any(True for _ in _notices(node))


def facts_of(node: Node | None, name: str) -> dict[str, str]:
    """Return what is announced or wrong, as facts whose first sighting matters. None is a node that was deleted."""
    if node is None:
        return {_GONE: f"its node {name} was deleted"}
    facts = {
        f"{_TAINT}{taint}": f"its node {name} announces that it goes: {taint}" for taint in _notices(node)
    }
    trouble = _trouble(node)
    return facts if trouble is None else facts | {trouble[0]: f"its node {name} {trouble[1]}"}


def unready_since(seen: Sightings) -> float | None:
    """Return since when (steady seconds) the node has been there and not ready; None if it is ready, or was deleted."""
    return min((seen[fact].since.steady for fact in (_SILENT, _NOT_READY) if fact in seen), default=None)


def together(unready: Mapping[str, float], count: int) -> frozenset[str]:
    """Return those that became unready together with many others.

    `unready` is since when (steady seconds), by node, `count` how many nodes there are.
    """
    if len(unready) == count:
        return frozenset(unready)
    times = sorted(unready.values())
    return frozenset(
        name
        for name, at in unready.items()
        if (many := bisect_right(times, at + _TOGETHER_S) - bisect_left(times, at - _TOGETHER_S)) > _FEW
        and many >= _MANY * count
    )


def fate_of(seen: Sightings, now: float, *, is_believed: bool = True) -> NodeFate:
    """Return what becomes of a node of which that was seen. `now` in steady seconds; `is_believed`: it is not one of many."""
    notices, troubles = [], []
    for fact, sighting in seen.items():
        if fact.startswith(_TAINT):
            notices.append((sighting.since.unix + GRACE_S, sighting.text))
            continue
        troubles.append((sighting.since.steady, sighting.text))
        if is_believed and now - sighting.since.steady >= _DOUBTS[fact]:
            notices.append((sighting.since.unix + LOST_S, sighting.text))
    notice = min(notices, default=(None, ""))
    trouble = min(troubles, default=(None, ""))
    return NodeFate(True, notice[0], trouble[0], trouble[1] or notice[1], is_believed)


def _trouble(node: Node) -> tuple[str, str] | None:
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = next((one for one in conditions if one.get("type") == "Ready"), None)
    if ready is None or ready.get("status") == "True":
        return None
    if ready.get("status") == "Unknown":
        return _SILENT, "has stopped responding"
    said = ": ".join(filter(None, (ready.get("reason"), ready.get("message"))))
    return _NOT_READY, f"is not ready: {said or 'its kubelet says so'}"


def _notices(node: Node) -> list[str]:
    taints = (node.get("spec") or {}).get("taints") or ()
    return [str(one["key"]) for one in taints if one.get("key") in placement.NOTICE_TAINTS]
