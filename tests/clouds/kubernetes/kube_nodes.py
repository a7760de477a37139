"""Nodes that fall silent, and what the cluster does about them: the node lifecycle controller, the eviction by taints, the garbage
collector of Pods. Nothing removes the Pod of a silent node but its own kubelet, a forced deletion, or the end of the Node object."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from provisioners.kubernetes.quantities import unix_s
from tests.clouds.kubernetes.kube_store import Json
from tests.clouds.kubernetes.kubelet import set_condition

if TYPE_CHECKING:
    from tests.clouds.kubernetes.kube_world import KubeWorld

UNREACHABLE, NOT_READY = "node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"


def ready(status: str, at: str, reason: str) -> Json:
    return {
        "type": "Ready",
        "status": status,
        "reason": reason,
        "message": f"{reason} of this node",
        "lastTransitionTime": at,
        "lastHeartbeatTime": at,
    }


class Nodes:
    """`monitor_grace_s` is how long a kubelet may be silent, `quarantine_s` how long a Pod may be without its Node object."""

    def __init__(self, world: KubeWorld) -> None:
        self.world = world
        self.monitor_grace_s = 40.0
        self.quarantine_s = 40.0
        self._silent: dict[str, float] = {}
        self._without: dict[str, float] = {}  # by uid of a Pod: since when it has no Node object

    def is_silent(self, pod: Json) -> bool:
        return pod["spec"].get("nodeName") in self._silent

    def silence(self, name: str, *, dies: bool = False) -> None:
        """Its kubelet stops; if the node `dies`, the containers too."""
        with self.world.store.lock:
            self._silent[name] = self.world.now
            if self.world.kubelet is not None:
                self.world.kubelet.silent.add(name)
                for pod in self._pods(name) if dies else ():
                    self.world.kubelet.kill(pod)

    def revive(self, name: str) -> None:
        """Its kubelet is back."""
        with self.world.store.lock:
            del self._silent[name]
            if self.world.kubelet is not None:
                self.world.kubelet.silent.discard(name)
            self._set_ready(name, "True", "KubeletReady")

    def report(self, name: str, status: str, reason: str) -> None:
        """Its kubelet reports another state of the node."""
        with self.world.store.lock:
            self._set_ready(name, status, reason)

    def remove(self, name: str) -> None:
        """Someone deletes the Node object."""
        store = self.world.store
        with store.lock:
            store.remove("nodes", store.get("nodes", "", name))

    def look(self) -> None:
        """One round, with the store's lock held."""
        store, now = self.world.store, self.world.now
        for name, since in self._silent.items():
            if now - since >= self.monitor_grace_s and ("nodes", "", name) in store.objects:
                self._set_ready(name, "Unknown", "NodeStatusUnknown")
        nodes = list(store.of("nodes"))
        if any(
            node["status"]["conditions"][0]["status"] != "Unknown" for node in nodes
        ):  # else it hears none
            for node in nodes:
                self._evict(node)
        names = {one["metadata"]["name"] for one in store.of("nodes")}
        for pod in list(store.of("pods")):
            if pod["spec"].get("nodeName", "") not in ("", *names):
                since = self._without.setdefault(pod["metadata"]["uid"], now)
                if now - since >= self.quarantine_s:
                    self.world.lose(pod["metadata"]["name"])

    # --- inside, with the store's lock held

    def _pods(self, node: str) -> list[Json]:
        return [one for one in self.world.store.of("pods") if one["spec"].get("nodeName") == node]

    def _set_ready(self, name: str, status: str, reason: str) -> None:
        store = self.world.store
        node = store.get("nodes", "", name)
        conditions = node["status"]["conditions"]
        if conditions[0]["status"] == status:
            return
        at = store.stamp("control")
        node["status"]["conditions"] = [ready(status, at, reason)]
        taints = [
            one for one in node["spec"].get("taints") or () if one["key"] not in (UNREACHABLE, NOT_READY)
        ]
        if status != "True":
            key = UNREACHABLE if status == "Unknown" else NOT_READY
            taints += [
                {"key": key, "effect": "NoSchedule"},
                {"key": key, "effect": "NoExecute", "timeAdded": at},
            ]
        node["spec"]["taints"] = taints
        store.update("nodes", node)
        for known in self._pods(name) if status != "True" else ():
            pod = copy.deepcopy(known)
            set_condition(pod, "Ready", False, store.clock("control"))
            store.update("pods", pod)

    def _evict(self, node: Json) -> None:
        """Delete the Pods that tolerate a NoExecute taint no more."""
        for taint in node["spec"].get("taints") or ():
            if taint["effect"] != "NoExecute":
                continue
            age_s = self.world.store.clock("control") - (unix_s(taint.get("timeAdded")) or 0.0)
            for pod in self._pods(node["metadata"]["name"]):
                if pod["metadata"].get("deletionTimestamp") or _tolerates(pod, taint, age_s):
                    continue
                name = pod["metadata"]["name"]
                why = f"Taint manager: deleting due to NoExecute taint {taint['key']}"
                self.world.disrupt(name, "DeletionByTaintManager", why)
                self.world.delete("pods", pod["metadata"]["namespace"], name, {})


def _tolerates(pod: Json, taint: Json, age_s: float) -> bool:
    return any(
        one.get("key") in (None, taint["key"]) and age_s < one.get("tolerationSeconds", float("inf"))
        for one in pod["spec"].get("tolerations") or ()
        if one.get("effect") in (None, "", "NoExecute")
    )
