"""What was last known of all Pods of one namespace: fed by lists, by the watch, and by the responses to our own calls.

The three overtake each other, so an object is replaced only by one of a higher resource version. Pods that are deleted are
remembered for an hour as what they were, because the API has forgotten them at once. An instance is made when its Pods change
and kept until they change again: with thousands of Pods, what costs is making them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from provisioners.kubernetes.pod_state import Pod, gone_state, instance_of, is_ours, was_placed
from provisioners.kubernetes.settings import Cluster
from provisioners.kubernetes.translate import COMPLETE_NOTE, PARTS_NOTE
from provisioners.multi_node import instance_of_nodes
from provisioners.port.base import Instance, InstanceState
from provisioners.port.vm import NODES_TAG, OWNER_TAG, RANK_TAG, TOKEN_TAG

KEPT_S = 3600.0
_S = InstanceState
_DRAFT = (_S.PENDING, _S.SETUP)
_KEPT_OF_SPEC = ("nodeName", "terminationGracePeriodSeconds")


@dataclass(slots=True)
class _Group:
    """The Pods of one replica by rank, those that are gone as what they were, and the instance that they make."""

    pods: dict[int, Pod] = field(default_factory=dict)
    gone: dict[int, Instance] = field(default_factory=dict)
    ended_at: float | None = None
    shown: Instance | None = None
    is_moving: bool = True  # time alone may change it


class PodCache:
    """Thread-safe. `changed` is called without the lock after something changed that an instance shows."""

    def __init__(self, cluster: Cluster, now: Callable[[], float]) -> None:
        self.cluster = cluster
        self._now = now
        self._groups: dict[str, _Group] = {}
        self._notices: dict[str, float] = {}  # by node
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
                for pod in list(group.pods.values()):
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

    def announce(self, notices: Mapping[str, float]) -> None:
        """Take the nodes that will go, and when."""
        with self._lock:
            touched = {
                node
                for node in notices.keys() | self._notices.keys()
                if notices.get(node) != self._notices.get(node)
            }
            self._notices = dict(notices)
            groups = [
                group
                for group in self._groups.values()
                if any(_node(pod) in touched for pod in group.pods.values())
            ]
            for group in groups:
                group.shown = None
        if groups:
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
        now = self._now()
        with self._lock:
            found = [self._shown(token, group, now) for token, group in self._groups.items()]
        return [one for one in found if one.owner == owner]

    def instance(self, token: str) -> Instance | None:
        with self._lock:
            group = self._groups.get(token)
            return None if group is None else self._shown(token, group, self._now())

    def pods(self, token: str) -> dict[int, Pod]:
        """Return the Pods of a replica that exist, by rank."""
        with self._lock:
            group = self._groups.get(token)
            return {} if group is None else dict(group.pods)

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
        if known is not None and _is_known(known, pod["metadata"]):
            return False
        if known is None and rank in group.gone and group.gone[rank].id == pod["metadata"]["uid"]:
            return False  # an event of before its end
        before = group.shown
        group.pods[rank] = _trimmed(pod)
        group.gone.pop(rank, None)
        group.ended_at, group.shown = None, None
        return before is None or self._shown(token, group, self._now()) != before

    def _delete(self, pod: Mapping[str, Any]) -> bool:
        token, rank = _place(pod)
        group = self._groups.get(token)
        known = None if group is None else group.pods.get(rank)
        if group is None or known is None or known["metadata"]["uid"] != pod["metadata"]["uid"]:
            return False
        del group.pods[rank]
        last = self._node_instance(known)
        final = pod if _is_later(pod, known["metadata"].get("resourceVersion", "")) else known
        if was_placed(known) or is_ours(final):
            state, message = gone_state(final, last)
            group.gone[rank] = replace(
                last, state=state, message=message, endpoint=None, preempt_at=None, refusal=None
            )
        group.shown = None
        if not group.pods:
            group.ended_at = self._now()
            if not group.gone:
                del self._groups[token]
            self._drop_old()
        return True

    def _shown(self, token: str, group: _Group, now: float) -> Instance:
        if group.shown is not None and not group.is_moving:
            return group.shown
        is_ours_launch = token in self._launching
        nodes = []
        some = next(iter(group.pods.values()), None)
        if some is None:
            count, template = 1, next(iter(group.gone.values()))
        else:
            count = int((some["metadata"].get("labels") or {}).get(NODES_TAG, "1"))
            template = self._node_instance(some)
        for rank in range(max(count, max(group.gone, default=0) + 1)):
            pod = group.pods.get(rank)
            if pod is not None:
                nodes.append(self._node_instance(pod))
            elif rank in group.gone:
                nodes.append(group.gone[rank])
            else:
                state = _S.PENDING if is_ours_launch else _S.TERMINATED
                nodes.append(
                    replace(
                        template, id="", state=state, message="", endpoint=None, preempt_at=None, refusal=None
                    )
                )
        made = instance_of_nodes(nodes)
        head = group.pods.get(0)
        if head is not None and made.state in _DRAFT and not is_ours_launch and _is_draft(head):
            made = replace(made, state=_S.UNSUPERVISED)
        group.shown = made
        group.is_moving = made.state is _S.PENDING
        return made

    def _node_instance(self, pod: Pod) -> Instance:
        return instance_of(
            pod,
            self.cluster.region,
            self._now(),
            self.cluster.schedule_wait_s,
            self._notices.get(_node(pod)),
        )

    def _drop_old(self) -> None:
        limit = self._now() - KEPT_S
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
    spec = {key: value for key, value in (pod.get("spec") or {}).items() if key in _KEPT_OF_SPEC}
    return {"metadata": meta, "spec": spec, "status": pod.get("status") or {}}


def _node(pod: Pod) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")


def _ignore() -> None:
    """The callback before one is set."""
