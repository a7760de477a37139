"""Why Pods wait on their nodes, from their events: a volume that cannot be mounted, a sandbox that cannot be made.

Nothing of that is in the Pod. So the events of a Pod are listed, by its uid, when it has been on its node for half a minute and none of its
containers has run, and once a minute from then on; of many such Pods a few at a time. The newest event counts, by its resource version:
the timestamps are those of several machines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from provisioners.kubernetes.api import KubeApi
from provisioners.kubernetes.pod_cache import PodCache
from provisioners.kubernetes.translate import MANAGER
from provisioners.port.errors import AuthError, ProvisionError

_log = logging.getLogger(__name__)
STUCK_S = 30.0
_AGAIN_S = 60.0
_AT_ONCE = 5
_CLOSED_S = 600.0  # without permission


class PodEvents:
    """Of one namespace. Not thread-safe: one thread lists."""

    def __init__(self, region: str, api: KubeApi, cache: PodCache, steady: Callable[[], float]) -> None:
        self._region = region
        self._api = api
        self._cache = cache
        self._steady = steady
        self._read_at: dict[str, float] = {}  # by uid
        self._closed_until = float("-inf")

    def visit(self) -> None:
        """Read the events of Pods that are stuck. What fails is tried again at a later visit."""
        now = self._steady()
        if now < self._closed_until:
            return
        stuck = self._cache.stuck(STUCK_S)
        names = {pod["metadata"]["uid"] for pod in stuck}
        self._read_at = {uid: at for uid, at in self._read_at.items() if uid in names}
        due = [
            pod for pod in stuck if now - self._read_at.get(pod["metadata"]["uid"], float("-inf")) >= _AGAIN_S
        ]
        for pod in due[:_AT_ONCE]:
            uid = pod["metadata"]["uid"]
            try:
                found = newest(self._api.list_events(uid).items)
            except ProvisionError as error:
                _log.warning("the events of Pods in %s cannot be read: %s", self._region, error.message)
                if isinstance(error, AuthError):
                    self._closed_until = now + _CLOSED_S
                return
            self._read_at[uid] = now
            if found is not None:
                self._cache.take_event(pod, *found)


def newest(events: Iterable[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return the reason and the sentence of the event that was written last, by others."""
    theirs = (one for one in events if (one.get("source") or {}).get("component") != MANAGER)
    last = max(theirs, key=lambda one: int(one["metadata"].get("resourceVersion") or 0), default=None)
    if last is None:
        return None
    return str(last.get("reason") or ""), " ".join(str(last.get("message") or "").split())[:500]
