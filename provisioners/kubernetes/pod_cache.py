"""What was last known of all Pods of one namespace: fed by lists, by the watch, and by the responses to our own calls.

The three overtake each other, so an object is replaced only by one of a higher resource version. Pods that are deleted are
remembered for an hour as what they were, because the API has forgotten them at once. An instance is made when its Pods change
and kept until they change again, or time alone may change it: with thousands of Pods, what costs is making them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from provisioners.kubernetes.containers import Pod
from provisioners.kubernetes.node_cache import NodeCache
from provisioners.kubernetes.pod_state import (
    gone_state,
    instance_of,
    is_beyond_reach,
    is_gated,
    is_ours,
    node_of,
    seen_of,
    stuck_since,
    unschedulable,
    verdict_of,
    was_placed,
)
from provisioners.kubernetes.settings import Cluster
from provisioners.kubernetes.sightings import Instant, Sightings
from provisioners.kubernetes.translate import COMPLETE_NOTE, PARTS_NOTE
from provisioners.multi_node import instance_of_nodes
from provisioners.port.base import Instance, InstanceState
from provisioners.port.vm import NODES_TAG, OWNER_TAG, RANK_TAG, SERVICE_TAG, TOKEN_TAG

KEPT_S = 3600.0
_S = InstanceState
_DRAFT = (_S.PENDING, _S.SETUP)
_NOW, _NEVER = float("-inf"), float("inf")
_KEPT_OF_SPEC = ("nodeName", "schedulingGates", "terminationGracePeriodSeconds")


class _Known(NamedTuple):
    """A Pod, since when something holds of it, and the reason and sentence of its last event if that was looked up."""

    pod: Pod
    seen: Sightings
    event: tuple[str, str] | None = None


@dataclass(slots=True)
class _Group:
    """The Pods of one replica by rank, those that are gone as what they were, and the instance that they make."""

    pods: dict[int, _Known] = field(default_factory=dict)
    gone: dict[int, Instance] = field(default_factory=dict)
    ended_at: float | None = None
    shown: Instance | None = None
    changes_at: float = _NOW  # when (steady seconds) time alone may have changed it


class PodCache:
    """Thread-safe. `changed` is called without the lock after something changed that an instance shows."""

    def __init__(self, cluster: Cluster, at: Callable[[], Instant], nodes: NodeCache) -> None:
        self.cluster = cluster
        self._at = at
        self._nodes = nodes
        self._groups: dict[str, _Group] = {}
        self._launching: dict[str, int] = {}
        self._lock = threading.RLock()
        self.changed: Callable[[], None] = _ignore

    # --- what comes in

    def apply(self, kind: str, pod: Mapping[str, Any]) -> None:
        """Take an event of the watch, or the Pod that a call returned (as MODIFIED)."""
        with self._lock:
            is_news = self._delete(pod) if kind == "DELETED" else self._put(pod)
        if is_news:
            self.changed()

    def replace(self, pods: Iterable[Mapping[str, Any]], version: str, owner: str | None = None) -> None:
        """Take a list: of one owner, or of all. What it lacks is gone, unless it was made after the list."""
        listed = list(pods)
        with self._lock:
            is_news = False
            names = {one["metadata"]["uid"] for one in listed}
            for pod in listed:
                is_news |= self._put(pod)
            for group in list(self._groups.values()):
                for pod, *_ in list(group.pods.values()):
                    meta = pod["metadata"]
                    is_theirs = owner is not None and (meta.get("labels") or {}).get(OWNER_TAG) != owner
                    if meta["uid"] not in names and not is_theirs and not _is_later(pod, version):
                        is_news |= self._delete(pod)
            self._drop_old()
        if is_news:
            self.changed()

    def forget(self, token: str) -> None:
        """A launch was refused: it never was."""
        with self._lock:
            self._groups.pop(token, None)

    def nodes_changed(self, names: Collection[str]) -> None:
        """Take it that the fate of these nodes is another one."""
        if not names:
            return
        with self._lock:
            groups = [
                group
                for group in self._groups.values()
                if any(node_of(known.pod) in names for known in group.pods.values())
            ]
            for group in groups:
                group.shown = None
        if groups:
            self.changed()

    def take_event(self, pod: Pod, reason: str, message: str) -> None:
        """Take the last event of a Pod."""
        token, rank = _place(pod)
        with self._lock:
            known = self._find(pod)
            if known is None:
                return
            event = (reason, message)
            seen = seen_of(known.pod, known.seen, self._at(), event)
            self._groups[token].pods[rank] = _Known(known.pod, seen, event)
            self._groups[token].shown = None
        self.changed()

    def launching(self, token: str, by: int) -> None:
        """Count the launches of a replica that are under way in this process."""
        with self._lock:
            count = self._launching.get(token, 0) + by
            if count:
                self._launching[token] = count
            else:
                self._launching.pop(token, None)
            if token in self._groups:
                self._groups[token].shown = None

    # --- what goes out

    def instances(self, owner: str) -> list[Instance]:
        """Return the owner's instances, those that ended within the hour included."""
        now = self._at().steady
        with self._lock:
            found = [self._shown(token, group, now) for token, group in self._groups.items()]
        return [one for one in found if one.owner == owner]

    def instance(self, token: str) -> Instance | None:
        with self._lock:
            group = self._groups.get(token)
            return None if group is None else self._shown(token, group, self._at().steady)

    def pods(self, token: str) -> dict[int, Pod]:
        """Return the Pods of a replica that exist, by rank."""
        with self._lock:
            group = self._groups.get(token)
            return {} if group is None else {rank: known.pod for rank, known in group.pods.items()}

    def of_service(self, owner: str, service: str) -> list[Pod]:
        """Return the Pods of a service that exist."""
        wanted = {OWNER_TAG: owner, SERVICE_TAG: service}
        with self._lock:
            pods = [known.pod for group in self._groups.values() for known in group.pods.values()]
        return [pod for pod in pods if wanted.items() <= (pod["metadata"].get("labels") or {}).items()]

    def waits_s(self, pod: Pod) -> tuple[float, str] | None:
        """Return for how long the Pod has found no node, with the scheduler's sentence; None if it has one, or will be looked at."""
        found = unschedulable(self._seen(pod))
        return None if found is None else (self._at().steady - found.since.steady, found.text)

    def is_gated(self, pod: Pod) -> bool:
        """Return whether something holds the Pod back from the scheduler."""
        return is_gated(self._seen(pod))

    def is_beyond_reach(self, pod: Pod) -> bool:
        """Return whether the Pod is on a lost node, so that nothing there will remove it."""
        return is_beyond_reach(self._seen(pod), self._at().steady, self._nodes.fate(node_of(pod)))

    def stuck(self, for_s: float) -> list[Pod]:
        """Return the Pods that have been on their nodes for so long without a container that has run."""
        limit = self._at().steady - for_s
        with self._lock:
            return [
                known.pod
                for group in self._groups.values()
                for known in group.pods.values()
                if (since := stuck_since(known.seen)) is not None and since <= limit
            ]

    def count(self) -> int:
        with self._lock:
            return sum(len(group.pods) for group in self._groups.values())

    # --- inside, with the lock held

    def _put(self, pod: Mapping[str, Any]) -> bool:
        token, rank = _place(pod)
        if not token:
            return False
        group = self._groups.setdefault(token, _Group())
        known = group.pods.get(rank)
        if known is not None and _is_known(known.pod, pod["metadata"]):
            return False
        if known is None and rank in group.gone and group.gone[rank].id == pod["metadata"]["uid"]:
            return False  # an event of before its end
        before, trimmed = group.shown, _trimmed(pod)
        if known is None or known.pod["metadata"]["uid"] != pod["metadata"]["uid"]:
            group.pods[rank] = _Known(trimmed, seen_of(trimmed, {}, self._at()))
        else:
            seen = seen_of(trimmed, known.seen, self._at(), known.event)
            group.pods[rank] = known._replace(pod=trimmed, seen=seen)
        group.gone.pop(rank, None)
        group.ended_at, group.shown = None, None
        return before is None or self._shown(token, group, self._at().steady) != before

    def _delete(self, pod: Mapping[str, Any]) -> bool:
        token, rank = _place(pod)
        known = self._find(pod)
        if known is None:
            return False
        group, (last, _) = self._groups[token], self._node_instance(known)
        del group.pods[rank]
        final = pod if _is_later(pod, known.pod["metadata"].get("resourceVersion", "")) else known.pod
        if was_placed(known.pod) or is_ours(final):
            state, message = gone_state(final, last)
            group.gone[rank] = replace(
                last, state=state, message=message, endpoint=None, preempt_at=None, refusal=None
            )
        group.shown = None
        if not group.pods:
            group.ended_at = self._at().steady
            if not group.gone:
                del self._groups[token]
            self._drop_old()
        return True

    def _find(self, pod: Pod) -> _Known | None:
        """Return what is known of the Pod, and not of another one of that name."""
        token, rank = _place(pod)
        group = self._groups.get(token)
        known = None if group is None else group.pods.get(rank)
        is_it = known is not None and known.pod["metadata"]["uid"] == pod["metadata"]["uid"]
        return known if is_it else None

    def _seen(self, pod: Pod) -> Sightings:
        with self._lock:
            known = self._find(pod)
            return {} if known is None else known.seen

    def _shown(self, token: str, group: _Group, now: float) -> Instance:
        if group.shown is not None and now < group.changes_at:
            return group.shown
        is_ours_launch = token in self._launching
        made = {rank: self._node_instance(known) for rank, known in group.pods.items()}
        some = next(iter(group.pods), None)
        if some is None:
            count, template = 1, next(iter(group.gone.values()))
        else:
            count = int((group.pods[some].pod["metadata"].get("labels") or {}).get(NODES_TAG, "1"))
            template = made[some][0]
        missing = _S.PENDING if is_ours_launch else _S.TERMINATED
        none = replace(
            template, id="", state=missing, message="", endpoint=None, preempt_at=None, refusal=None
        )
        nodes = [
            made[rank][0] if rank in made else group.gone.get(rank, none)
            for rank in range(max(count, max(group.gone, default=0) + 1))
        ]
        shown = instance_of_nodes(nodes)
        head = group.pods.get(0)
        if head is not None and shown.state in _DRAFT and not is_ours_launch and _is_draft(head.pod):
            shown = replace(shown, state=_S.UNSUPERVISED)
        group.shown = shown
        group.changes_at = min((at for _, at in made.values()), default=_NEVER)
        return shown

    def _node_instance(self, known: _Known) -> tuple[Instance, float]:
        """Return a Pod as an instance, and when (steady seconds) time alone may change it."""
        fate = self._nodes.fate(node_of(known.pod))
        now, wait_s = self._at().steady, self.cluster.schedule_wait_s
        verdict = verdict_of(known.pod, known.seen, now, wait_s, fate)
        made = instance_of(known.pod, self.cluster.region, verdict, known.seen, fate)
        if fate.trouble_at is not None:
            return made, _NOW
        return made, _NEVER if verdict.deadline is None else verdict.deadline

    def _drop_old(self) -> None:
        limit = self._at().steady - KEPT_S
        for token, group in list(self._groups.items()):
            if group.ended_at is not None and group.ended_at < limit:
                del self._groups[token]


def _place(pod: Mapping[str, Any]) -> tuple[str, int]:
    labels = pod["metadata"].get("labels") or {}
    return labels.get(TOKEN_TAG, ""), int(labels.get(RANK_TAG) or 0)


def _is_draft(head: Pod) -> bool:
    """Return whether its launch was interrupted: what it needs beside itself may not exist."""
    notes = head["metadata"].get("annotations") or {}
    return PARTS_NOTE in notes and COMPLETE_NOTE not in notes


def _is_known(known: Pod, meta: Mapping[str, Any]) -> bool:
    """Return whether this version of the Pod, or a later one, is known."""
    version = str(meta.get("resourceVersion", ""))
    return known["metadata"]["uid"] == meta["uid"] and (
        known["metadata"].get("resourceVersion") == version or _is_later(known, version)
    )


def _is_later(pod: Mapping[str, Any], version: str) -> bool:
    """Return whether the Pod is of a later version than that one: they are numbers, though not all servers promise it."""
    own = str(pod["metadata"].get("resourceVersion", ""))
    return own.isdigit() and version.isdigit() and int(own) > int(version)


def _trimmed(pod: Mapping[str, Any]) -> Pod:
    """Return what is needed of it: the specification and the fields' managers are most of its size."""
    meta = {key: value for key, value in pod["metadata"].items() if key != "managedFields"}
    whole = pod.get("spec") or {}
    spec = {key: value for key, value in whole.items() if key in _KEPT_OF_SPEC}
    sidecars = [one for one in whole.get("initContainers") or () if "restartPolicy" in one]
    if sidecars:
        kept = ("name", "restartPolicy")
        spec["initContainers"] = [{key: one[key] for key in kept} for one in sidecars]
    return {"metadata": meta, "spec": spec, "status": pod.get("status") or {}}


def _ignore() -> None:
    """The callback before one is set."""
