"""What was last known of the nodes of a cluster, and since when something has been wrong with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from provisioners.kubernetes.node_state import (
    UNKNOWN,
    Node,
    NodeFate,
    facts_of,
    fate_of,
    together,
    unready_since,
)
from provisioners.kubernetes.sightings import Instant, Sightings, followed

Json = dict[str, Any]

_GONE_KEPT_S = 3600.0


class NodeCache:
    """Thread-safe. A node counts as deleted only if it was known before: the Pods of a new one may be known first."""

    def __init__(self, at: Callable[[], Instant]) -> None:
        self._at = at
        self._nodes: dict[str, Json] = {}
        self._seen: dict[str, Sightings] = {}  # of nodes with which something is wrong, or that are gone
        # Nodes that became unready together with many others; None: to be counted again.
        self._together: frozenset[str] | None = None
        self._lock = threading.Lock()

    def replace(self, nodes: Iterable[Mapping[str, Any]]) -> frozenset[str]:
        """Take a list of all nodes. Returns the names of those of which the list shows something new, or that were forgotten."""
        listed = {str(one["metadata"]["name"]): _slim(one) for one in nodes}
        with self._lock:
            missing = self._nodes.keys() - listed.keys()
            self._nodes = listed
            changed = {name for name in (*listed, *missing) if self._update(name)}
            return frozenset(changed | self._drop_old())

    def apply(self, kind: str, node: Mapping[str, Any]) -> frozenset[str]:
        """Take an event of the watch. Returns the name of its node if the event shows something new."""
        name = str(node["metadata"]["name"])
        with self._lock:
            if kind == "DELETED":
                self._nodes.pop(name, None)
            else:
                self._nodes[name] = _slim(node)
            return frozenset([name] if self._update(name) else [])

    def nodes(self) -> list[Node]:
        with self._lock:
            return list(self._nodes.values())

    def fate(self, name: str) -> NodeFate:
        with self._lock:
            if name in self._seen:
                is_believed = name not in self._unready_together()
                return fate_of(self._seen[name], self._at().steady, is_believed=is_believed)
            return NodeFate(is_known=True) if name in self._nodes else UNKNOWN

    # --- inside, with the lock held

    def _update(self, name: str) -> bool:
        """Store what is wrong with the node now. Returns whether that has changed."""
        before, self._together = self._seen.get(name, {}), None
        now = followed(before, facts_of(self._nodes.get(name), name), self._at())
        if now:
            self._seen[name] = now
        else:
            self._seen.pop(name, None)
        return now != before

    def _unready_together(self) -> frozenset[str]:
        if self._together is None:
            times = {name: unready_since(seen) for name, seen in self._seen.items()}
            unready = {name: at for name, at in times.items() if at is not None}
            self._together = together(unready, len(self._nodes))
        return self._together

    def _drop_old(self) -> set[str]:
        """Forget nodes that were deleted long ago. Returns their names."""
        limit = self._at().steady - _GONE_KEPT_S
        old = {
            name
            for name, seen in self._seen.items()
            if name not in self._nodes and all(one.since.steady < limit for one in seen.values())
        }
        for name in old:
            del self._seen[name]
        return old


def _slim(node: Mapping[str, Any]) -> Json:
    """Return the needed parts of a node: most of its size is the list of its images."""
    status = node.get("status") or {}
    return {
        "metadata": {"name": node["metadata"]["name"], "labels": node["metadata"].get("labels") or {}},
        "spec": node.get("spec") or {},
        "status": {key: status[key] for key in ("allocatable", "conditions") if key in status},
    }
