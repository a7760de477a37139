"""On which nodes replicas of a service have been, so that a successor is put where weights are.

It is a preference: a node that is full, cordoned or gone stands in no Pod's way. A node on which a replica of the service stays is not
preferred, as two on one node are lost together. Known is what this process has seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from provisioners.kubernetes.containers import Pod
from provisioners.kubernetes.pod_state import is_over, node_of
from provisioners.port.vm import OWNER_TAG, SERVICE_TAG

MOST = 16  # nodes of a service, the last ones


class WarmNodes:
    """Of one namespace. Thread-safe."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, str], dict[str, None]] = {}  # by owner and service, the last one last
        self._lock = threading.Lock()

    def note(self, pods: Iterable[Pod]) -> None:
        """Remember the nodes of these Pods."""
        with self._lock:
            for pod in pods:
                labels, node = pod["metadata"].get("labels") or {}, node_of(pod)
                if node:
                    nodes = self._nodes.setdefault(
                        (labels.get(OWNER_TAG, ""), labels.get(SERVICE_TAG, "")), {}
                    )
                    nodes.pop(node, None)
                    nodes[node] = None
                    for old in list(nodes)[:-MOST]:
                        del nodes[old]

    def free(self, owner: str, service: str, pods: Sequence[Pod]) -> list[str]:
        """Return the nodes that replicas of the service have left; `pods` are all of it that exist."""
        self.note(pods)
        staying = {
            node_of(pod) for pod in pods if not is_over(pod) and not pod["metadata"].get("deletionTimestamp")
        }
        with self._lock:
            return [node for node in self._nodes.get((owner, service), ()) if node not in staying]
