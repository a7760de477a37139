"""Events that we write about Pods, for people who look with kubectl: a notice, a loss, a failure, and our own terminations.

One event for each Pod and reason, so that their number is bounded, a few at each visit. Nothing depends on them: without permission, or
while the API refuses them, there are none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from provisioners.kubernetes.api import ConflictError, Json, KubeApi
from provisioners.kubernetes.pod_cache import PodCache
from provisioners.kubernetes.quantities import rfc3339
from provisioners.kubernetes.translate import MANAGED, MANAGER
from provisioners.port.base import Instance, InstanceState
from provisioners.port.errors import AuthError, ProvisionError

_log = logging.getLogger(__name__)
_S = InstanceState
_AT_ONCE = 5
_CLOSED_S = 600.0  # without permission
_PAUSED_S = 60.0  # after another failure: a call that hangs must not make each listing late
_LONGEST = 900  # of 1024 characters


class Note(NamedTuple):
    """An event to be: its reason, its sentence, and whether something is wrong."""

    reason: str
    message: str
    is_warning: bool = True


class OwnEvents:
    """Of one namespace. `now` in UNIX seconds. Not thread-safe: one thread lists."""

    def __init__(
        self,
        region: str,
        api: KubeApi,
        cache: PodCache,
        steady: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._region = region
        self._api = api
        self._cache = cache
        self._steady = steady
        self._now = now
        self._written: dict[str, dict[str, str]] = {}  # sentences by uid and reason
        self._closed_until = float("-inf")

    def visit(self, owner: str) -> None:
        """Write what is new about the owner's Pods, after a listing. What fails is tried again a minute later at the earliest."""
        if self._steady() < self._closed_until:
            return
        known, due = self._written, []
        self._written = {}
        for one in self._cache.instances(owner):
            pod = None if one.state.is_gone else self._cache.pods(one.token).get(0)
            if pod is None:
                continue
            uid = str(pod["metadata"]["uid"])
            before = known.get(uid)
            note = note_of(one, before or {}, self._now())
            if before:
                self._written[uid] = before
            if note is not None and note.reason not in (before or {}):
                due.append((pod, note))
        for pod, note in due[:_AT_ONCE]:
            if not self._write(owner, pod, note):
                return

    def _write(self, owner: str, pod: Mapping[str, Any], note: Note) -> bool:
        uid = str(pod["metadata"]["uid"])
        try:
            self._api.create("event", event_of(owner, pod, note, self._api.server_s() or self._now()))
        except ConflictError:
            pass  # an earlier process has written it
        except ProvisionError as error:
            refused = isinstance(error, AuthError)
            self._closed_until = self._steady() + (_CLOSED_S if refused else _PAUSED_S)
            if refused:
                _log.warning("no events are written in %s: %s", self._region, error.message)
            return False
        self._written.setdefault(uid, {})[note.reason] = note.message
        return True


def note_of(one: Instance, before: Mapping[str, str], now: float) -> Note | None:
    """Return what there is to say of a replica that exists; None if nothing. `before`: what was said of it, by reason."""
    if one.state is _S.STOPPING:
        why = before.get("Lost") or before.get("Failed") or before.get("PreemptionNotice")
        return Note("Terminated", "by skyserve" + (f", after: {why}" if why else ""), is_warning=False)
    if one.state is _S.BROKEN:
        return Note("Lost", one.message or "its node has lost it")
    if one.state in (_S.SETUP_FAILED, _S.RUN_EXITED):
        return Note("Failed", one.message)
    if one.preempt_at is not None:
        left_s = max(0.0, one.preempt_at - now)
        said = f"it will be gone in {left_s:.0f} s: no new requests are sent to it"
        return Note("PreemptionNotice", said)
    return None


def event_of(owner: str, pod: Mapping[str, Any], note: Note, now: float) -> Json:
    """Return the event. `now` in UNIX seconds of the API server's clock."""
    meta = pod["metadata"]
    about = {key: meta[key] for key in ("namespace", "name", "uid") if key in meta}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{meta['name']}.{note.reason.lower()}.{str(meta['uid'])[:8]}",
            "labels": {MANAGED: MANAGER},
        },
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", **about},
        "reason": note.reason,
        "message": note.message[:_LONGEST],
        "type": "Warning" if note.is_warning else "Normal",
        "source": {"component": MANAGER},
        "reportingComponent": MANAGER,
        "reportingInstance": owner,
        "firstTimestamp": rfc3339(now),
        "lastTimestamp": rfc3339(now),
        "count": 1,
    }
