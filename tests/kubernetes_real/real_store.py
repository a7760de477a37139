"""What the fake's kubelet takes for its store, and is the real API: watches come in, status and deletions go out."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import urllib3

from tests.clouds.kubernetes.kube_store import Refused, stamp
from tests.kubernetes_real.real_api import STRATEGIC, Json, RealApi

_FOLLOWED = ("pods", "services")
_AGAIN_S = 0.3


class RealStore:
    """`spaces` are the namespaces whose Pods are the kubelet's. The one of the fake is `kube_store.Store`."""

    def __init__(self, api: RealApi, spaces: set[str]) -> None:
        self.api = api
        self.spaces = spaces
        self.lock = threading.RLock()
        self.objects: set[tuple[str, str, str]] = set()  # events that were made
        self.skew_s = 0.0  # how far the clock of the node is ahead whose Pod the kubelet has in hand
        self._known: dict[str, dict[str, Json]] = {one: {} for one in _FOLLOWED}
        self._over = threading.Event()
        self._first = {one: threading.Event() for one in _FOLLOWED}
        for one in _FOLLOWED:
            threading.Thread(target=self._follow, args=(one,), name=f"kubelet-{one}", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def wait(self) -> None:
        """Until the first lists have come."""
        for one in self._first.values():
            assert one.wait(30.0)

    # --- as `Store`

    def now(self) -> float:
        return time.time()

    def clock(self, whose: str) -> float:
        return time.time() + (self.skew_s if whose == "node" else 0.0)

    def stamp(self, whose: str) -> str:
        return stamp(self.clock(whose))

    def of(self, resource: str) -> Iterator[Json]:
        with self.lock:
            found = list(self._known[resource].values())
        return iter([one for one in found if one["metadata"]["namespace"] in self.spaces])

    def get(self, resource: str, namespace: str, name: str) -> Json:
        if resource in self._known:
            with self.lock:
                for one in self._known[resource].values():
                    if (one["metadata"]["namespace"], one["metadata"]["name"]) == (namespace, name):
                        return copy.deepcopy(one)
        return self.api.get(resource, namespace, name)

    def create(self, resource: str, namespace: str, body: Json) -> Json:
        self.objects.add((resource, namespace, body["metadata"]["name"]))
        return self.api.create(resource, namespace, body)

    def update(self, resource: str, item: Json) -> Json:
        """Write what has changed of its status, unless it is gone."""
        meta, known = item["metadata"], self._known[resource].get(item["metadata"]["uid"])
        if known is None:
            return item
        changed = _changes(known.get("status") or {}, item["status"])
        if not changed:
            return item
        body = {"metadata": {"uid": meta["uid"]}, "status": changed}
        try:
            made = self.api.patch_status(resource, meta["namespace"], meta["name"], body, STRATEGIC)
        except Refused as refused:
            if refused.code in (404, 409) or "metadata.uid" in refused.message:
                return item
            raise
        self._take(resource, made)
        return made

    def remove_pod(self, pod: Json) -> None:
        meta = pod["metadata"]
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
        self.api.delete("pods", meta["namespace"], meta["name"], options)
        with self.lock:
            self._known["pods"].pop(meta["uid"], None)

    def knows(self, uid: str) -> bool:
        return uid in self._known["pods"]

    # --- inside

    def _follow(self, resource: str) -> None:
        while not self._over.is_set():
            with suppress(Refused, OSError, ValueError, urllib3.exceptions.HTTPError):
                listed = self.api.call("GET", f"api/v1/{resource}")
                with self.lock:
                    self._known[resource] = {
                        one["metadata"]["uid"]: _whole(resource, one) for one in listed["items"]
                    }
                self._first[resource].set()
                for event in self.api.watch(resource, listed["metadata"]["resourceVersion"]):
                    if self._over.is_set():
                        return
                    self._apply(resource, event)
            self._over.wait(_AGAIN_S)

    def _apply(self, resource: str, event: Json) -> None:
        if event["type"] == "DELETED":
            with self.lock:
                self._known[resource].pop(event["object"]["metadata"]["uid"], None)
        elif event["type"] != "BOOKMARK":
            is_new = event["type"] == "ADDED"
            self._take(resource, event["object"], is_new=is_new)

    def _take(self, resource: str, item: Json, *, is_new: bool = False) -> None:
        """Keep the newer one: responses and events overtake each other. One that was removed stays so."""
        uid, version = item["metadata"]["uid"], int(item["metadata"]["resourceVersion"])
        with self.lock:
            known = self._known[resource].get(uid)
            if is_new if known is None else int(known["metadata"]["resourceVersion"]) < version:
                self._known[resource][uid] = _whole(resource, item)


def _whole(resource: str, item: Json) -> Json:
    """With what an item of a list lacks."""
    if resource == "pods":
        item.setdefault("status", {}).setdefault("conditions", [])
    return item


def _changes(old: Json, new: Json) -> Json:
    """Return what differs. Of the conditions, which others write too, only those that do."""
    found = {key: value for key, value in new.items() if old.get(key) != value and key != "conditions"}
    before = {one["type"]: one for one in old.get("conditions") or ()}
    ours = [one for one in new.get("conditions") or () if before.get(one["type"]) != one]
    return found | ({"conditions": ours} if ours else {})
