"""The controller of Deployments, and what it takes to evict: rolling updates by readiness, foreground deletion, disruption budgets.

It makes Pods itself; ReplicaSets in between are left out."""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.clouds.kubernetes.kube_store import Json, Refused

if TYPE_CHECKING:
    from tests.clouds.kubernetes.kube_world import KubeWorld

HASH = "pod-template-hash"


def is_ready(pod: Json) -> bool:
    """Return whether a Service leads to the Pod."""
    conditions = pod["status"].get("conditions") or ()
    return not pod["metadata"].get("deletionTimestamp") and any(
        one["type"] == "Ready" and one["status"] == "True" for one in conditions
    )


def is_selected(pod: Json, selector: Json) -> bool:
    labels = pod["metadata"].get("labels") or {}
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


class Deployments:
    def __init__(self, world: KubeWorld) -> None:
        self.world = world

    def look(self) -> None:
        """One round, with the store's lock held."""
        for deployment in list(self.world.store.of("deployments")):
            self._tend(deployment)

    def check_budgets(self, pod: Json) -> None:
        """Raise Refused (429) if an eviction of the Pod would violate a PodDisruptionBudget."""
        store = self.world.store
        for budget in store.of("poddisruptionbudgets"):
            selector = budget["spec"]["selector"]["matchLabels"]
            if not is_selected(pod, selector):
                continue
            others = [one for one in store.of("pods") if is_selected(one, selector) and is_ready(one)]
            left = len(others) - is_ready(pod)
            if is_ready(pod) and left < budget["spec"]["minAvailable"]:
                raise Refused(
                    429,
                    "TooManyRequests",
                    "Cannot evict pod as it would violate the pod's disruption budget.",
                    10,
                )

    # --- inside

    def _tend(self, deployment: Json) -> None:
        store, meta, spec = self.world.store, deployment["metadata"], deployment["spec"]
        space = meta["namespace"]
        pods = [
            one
            for one in store.of("pods")
            if any(owner["uid"] == meta["uid"] for owner in one["metadata"].get("ownerReferences") or ())
        ]
        going = [one for one in pods if one["metadata"].get("deletionTimestamp")]
        there = [one for one in pods if one not in going]
        if meta.get("deletionTimestamp"):
            self._remove_parts(meta["uid"])
            for one in there:
                self.world.delete("pods", space, one["metadata"]["name"], {})
            if not pods:
                store.remove("deployments", deployment)
            return
        for one in [pod for pod in there if pod["status"]["phase"] in ("Failed", "Succeeded")]:
            self.world.delete("pods", space, one["metadata"]["name"], {})
            there.remove(one)
        digest = _digest(spec["template"])
        new = [one for one in there if one["metadata"]["labels"].get(HASH) == digest]
        old = [one for one in there if one not in new]
        self._roll(deployment, digest, new, old, is_busy=bool(going))
        ready = sum(map(is_ready, there))
        status = {
            "replicas": len(there),
            "updatedReplicas": len(new),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "observedGeneration": meta["generation"],
        }
        if deployment.get("status") != status:
            store.update("deployments", {**copy.deepcopy(deployment), "status": status})

    def _remove_parts(self, uid: str) -> None:
        """A foreground deletion waits for Pods alone: what else the Deployment owns goes first."""
        store = self.world.store
        for kind in ("secrets", "services", "poddisruptionbudgets"):
            for one in list(store.of(kind)):
                if any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences") or ()):
                    store.remove(kind, one)

    def _roll(
        self, deployment: Json, digest: str, new: list[Json], old: list[Json], *, is_busy: bool
    ) -> None:
        spec, space = deployment["spec"], deployment["metadata"]["namespace"]
        strategy = spec.get("strategy") or {}
        rolling = strategy.get("rollingUpdate") or {"maxSurge": 1, "maxUnavailable": 0}
        wanted = spec.get("replicas", 1)
        surge, missing = rolling["maxSurge"], rolling["maxUnavailable"]
        if strategy.get("type") == "Recreate":
            surge, missing = 0, wanted
            wanted_new = 0 if old or is_busy else wanted
        else:
            wanted_new = min(wanted, wanted + surge - len(old))
        for _ in range(wanted_new - len(new)):
            self._create(deployment, digest)
        ready = sum(map(is_ready, (*new, *old)))
        for one in sorted(old, key=is_ready):
            if is_ready(one) and ready - 1 < wanted - missing:
                break
            ready -= is_ready(one)
            self.world.delete("pods", space, one["metadata"]["name"], {})
        for one in new[wanted:] if len(new) > wanted else ():
            self.world.delete("pods", space, one["metadata"]["name"], {})

    def _create(self, deployment: Json, digest: str) -> None:
        meta, template = deployment["metadata"], copy.deepcopy(deployment["spec"]["template"])
        labels = {**template["metadata"].get("labels", {}), HASH: digest}
        owner = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "name": meta["name"],
            "uid": meta["uid"],
            "controller": True,
        }
        name = f"{meta['name']}-{digest}-{secrets.token_hex(3)[:5]}"
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **template["metadata"],
                "name": name,
                "labels": labels,
                "ownerReferences": [owner],
            },
            "spec": template["spec"],
        }
        with suppress(Refused):  # it is tried again, as a ReplicaSet does
            self.world.create("pods", meta["namespace"], body)


def _digest(template: Json) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]
