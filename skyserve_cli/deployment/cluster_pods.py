"""How far a Deployment of controllers has come, and what keeps a Pod from running. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]

#: Reasons of a container that waits and does not stop to without help.
_HOPELESS = frozenset(
    {"ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "ErrImageNeverPull"}
)
_MOST_RESTARTS = 3
_CONFIG_NOTE = "checksum/config"


def is_rolled_out(deployment: Json) -> bool:
    """Return whether all Pods are of the newest template and ready, and no other is left."""
    status, wanted = _status(deployment), deployment["spec"]["replicas"]
    counts = (status.get(key, 0) for key in ("replicas", "updatedReplicas", "availableReplicas"))
    return all(count == wanted for count in counts)


def progress(deployment: Json, pods: Sequence[Json]) -> str:
    """Return a sentence about Pods that are not ready yet."""
    status = _status(deployment)
    ready = min(status.get("availableReplicas", 0), status.get("updatedReplicas", 0))
    sentence = f"{ready} of {deployment['spec']['replicas']} controllers are ready"
    reasons = sorted({reason for pod in pods for reason in _reasons(pod)})
    return f"{sentence} ({'; '.join(reasons)})" if reasons else sentence


def obstacle(deployment: Json, pods: Sequence[Json]) -> tuple[str, str] | None:
    """Return a Pod of the newest template that does not start without help, and why; None if there is none."""
    for pod in pods:
        if not _is_newest(deployment, pod):
            continue
        name = str(pod["metadata"]["name"])
        for one in _containers(pod):
            waiting = (one.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") in _HOPELESS:
                return name, _sentence(waiting)
            restarts = 0 if one.get("ready") else one.get("restartCount", 0)
            if waiting.get("reason") == "CrashLoopBackOff" or restarts >= _MOST_RESTARTS:
                return name, "the controller exits again and again"
    return None


def _status(deployment: Json) -> Json:
    """Return the status; an empty one as long as it is that of an earlier template."""
    status: Json = deployment.get("status") or {}
    is_old = status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0)
    return {} if is_old else status


def _is_newest(deployment: Json, pod: Json) -> bool:
    """Return whether a Pod has the image and the configuration that the Deployment has now."""
    template = deployment["spec"]["template"]
    wanted = (template["metadata"].get("annotations") or {}).get(_CONFIG_NOTE)
    found = (pod["metadata"].get("annotations") or {}).get(_CONFIG_NOTE)
    images = [one["spec"]["containers"][0]["image"] for one in (template, pod)]
    return not pod["metadata"].get("deletionTimestamp") and wanted == found and images[0] == images[1]


def _reasons(pod: Json) -> Iterator[str]:
    if pod["metadata"].get("deletionTimestamp"):
        return
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            yield f"Pod {pod['metadata']['name']}: {condition.get('message') or condition.get('reason')}"
    for one in _containers(pod):
        waiting = (one.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason") != "PodInitializing":
            yield f"Pod {pod['metadata']['name']}: {_sentence(waiting)}"


def _containers(pod: Json) -> list[Json]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _sentence(waiting: Json) -> str:
    return ": ".join(str(waiting[key]) for key in ("reason", "message") if waiting.get(key))
