"""What a Pod is, as one node of a replica: its state, the notice that stands for it, and why it ended. Pure.

The first line that fits decides; "ours" is a Pod whose end we requested, which its annotation says.

    ours                                          STOPPING
    ended, because someone else deleted it        PREEMPTED
    failed, and the cluster took it               PREEMPTED
    failed, and never started a container         BROKEN, and refused for want of room
    the first container, or `setup`, failed       SETUP_FAILED
    ended                                         RUN_EXITED
    unschedulable for longer than a limit         BROKEN, and refused for want of room
    its image cannot be pulled, or started        SETUP_FAILED, with the kubelet's sentence
    the second container has started              RUNNING once `setup` is done, which its startup probe reports, else SETUP
    on a node                                     SETUP
    otherwise                                     PENDING

A Pod that is being deleted by someone else keeps its state until it is gone, and has a notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.model import CapacityType, FailureKind, Zone
from provisioners.kubernetes import scripts
from provisioners.kubernetes.errors import CLOUD
from provisioners.kubernetes.network import endpoint_of
from provisioners.kubernetes.placement import NO_ZONE
from provisioners.kubernetes.quantities import unix_s
from provisioners.kubernetes.translate import DEFAULT_PORT, END_NOTE, MAIN, PORT_NOTE, ZONE_NOTE
from provisioners.port.base import Instance, InstanceState
from provisioners.port.errors import Refusal
from provisioners.port.vm import CAPACITY_TAG, OWNER_TAG, REPLICA_TAG, SERVICE_TAG, TOKEN_TAG
from provisioners.remote.host_agent.exits import FOREGROUND

Pod = Mapping[str, Any]
_S = InstanceState
_DELETED = "its Pod was deleted, not by this controller"
_NO_ROOM = Refusal(FailureKind.CAPACITY)

#: Why a container waits that will not start by itself.
_CANNOT_START = frozenset(
    {
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
    }
)
_TAKEN = frozenset(
    {"Evicted", "Preempting", "NodeLost", "Shutdown", "NodeShutdown", "Terminated", "NodeAffinity"}
)


def instance_of(pod: Pod, region: str, now: float, wait_s: float, notice_at: float | None = None) -> Instance:
    """Return the Pod as an instance of one node. `notice_at`: when its node will be gone, if that is announced."""
    meta = pod["metadata"]
    labels, notes = meta.get("labels") or {}, meta.get("annotations") or {}
    state, message, refusal = _state(pod, now, wait_s)
    capacity = labels.get(CAPACITY_TAG)
    port = int(notes.get(PORT_NOTE) or DEFAULT_PORT)
    is_running = state is _S.RUNNING
    return Instance(
        id=meta["uid"],
        token=labels.get(TOKEN_TAG, meta["name"]),
        owner=labels.get(OWNER_TAG, ""),
        service=labels.get(SERVICE_TAG, ""),
        replica_id=int(labels.get(REPLICA_TAG, "0")),
        zone=Zone(CLOUD, region, notes.get(ZONE_NOTE, NO_ZONE)),
        capacity_type=CapacityType(capacity) if capacity else CapacityType.ON_DEMAND,
        state=state,
        endpoint=endpoint_of(_status(pod).get("podIP"), port) if is_running else None,
        preempt_at=_preempt_at(pod, notice_at),
        message=message,
        refusal=refusal,
    )


def gone_state(pod: Pod, last: Instance) -> tuple[InstanceState, str]:
    """Return what a Pod was taken for that is deleted."""
    if is_ours(pod) or last.state in (_S.RUN_EXITED, _S.SETUP_FAILED, _S.BROKEN, _S.TERMINATED):
        return _S.TERMINATED, ""
    return _S.PREEMPTED, _disruption(pod) or _DELETED


def is_ours(pod: Pod) -> bool:
    """Return whether we requested its end."""
    return END_NOTE in (pod["metadata"].get("annotations") or {})


def is_over(pod: Pod) -> bool:
    """Return whether none of its containers runs, or ever will."""
    return _status(pod).get("phase") in ("Failed", "Succeeded")


def was_placed(pod: Pod) -> bool:
    return bool((pod.get("spec") or {}).get("nodeName"))


def unschedulable(pod: Pod) -> tuple[float, str] | None:
    """Return since when the Pod finds no node, and the scheduler's sentence; None if it has one, or was not looked at yet."""
    found = _condition(pod, "PodScheduled")
    if was_placed(pod) or found is None or found.get("status") != "False":
        return None
    if found.get("reason") not in ("Unschedulable", "SchedulerError"):
        return None
    since = unix_s(found.get("lastTransitionTime")) or unix_s(pod["metadata"].get("creationTimestamp")) or 0.0
    return since, str(found.get("message") or "no node has room for it")


def _state(pod: Pod, now: float, wait_s: float) -> tuple[InstanceState, str, Refusal | None]:
    if is_ours(pod):
        return _S.STOPPING, "", None
    if is_over(pod):
        if _was_deleted_first(pod):
            return _S.PREEMPTED, _disruption(pod) or _DELETED, None
        return _end(pod)
    waiting = unschedulable(pod)
    if waiting is not None and now - waiting[0] >= wait_s:
        return _S.BROKEN, waiting[1], _NO_ROOM
    for container in (*_containers(pod, "initContainerStatuses"), *_containers(pod, "containerStatuses")):
        held = (container.get("state") or {}).get("waiting") or {}
        if held.get("reason") in _CANNOT_START:
            return _S.SETUP_FAILED, f"{held['reason']}: {held.get('message') or 'no reason was given'}", None
    main = next((one for one in _containers(pod, "containerStatuses") if one.get("name") == MAIN), {})
    if (main.get("state") or {}).get("running"):
        return (_S.RUNNING if main.get("started") else _S.SETUP), "", None
    return (_S.SETUP if was_placed(pod) else _S.PENDING), "", None


def _end(pod: Pod) -> tuple[InstanceState, str, Refusal | None]:
    status = _status(pod)
    reason, sentence = str(status.get("reason") or ""), str(status.get("message") or "")
    if _is_disrupted(pod) or reason in _TAKEN:
        return _S.PREEMPTED, _disruption(pod) or f"{reason}: {sentence}", None
    ends = [
        (one.get("name"), (one.get("state") or {}).get("terminated"))
        for one in (*_containers(pod, "initContainerStatuses"), *_containers(pod, "containerStatuses"))
    ]
    ended = [(name, end) for name, end in ends if end]
    if not ended:
        return _S.BROKEN, f"{reason or 'it failed'}: {sentence or 'the node did not accept it'}", _NO_ROOM
    name, end = next(((name, end) for name, end in ended if end.get("exitCode")), ended[-1])
    why = str(end.get("message") or "").strip()
    code = end.get("exitCode")
    how = "it used more memory than it may (OOMKilled)" if end.get("reason") == "OOMKilled" else ""
    if name != MAIN or why.startswith(scripts.SETUP_FAILED):
        return _S.SETUP_FAILED, f"{why or how or f'{name} exited'} (exit code {code})", None
    if code == 0 and not how:
        how = "; it printed last: ".join(filter(None, (FOREGROUND, why)))
    return _S.RUN_EXITED, f"run exited with code {code}" + (f": {how or why}" if how or why else ""), None


def _was_deleted_first(pod: Pod) -> bool:
    """Return whether its deletion was requested before its containers ended: they ended for it."""
    meta = pod["metadata"]
    deleted_at = unix_s(meta.get("deletionTimestamp"))
    if deleted_at is None:
        return False
    requested_at = deleted_at - float(meta.get("deletionGracePeriodSeconds") or 0)
    ends = [
        unix_s(((one.get("state") or {}).get("terminated") or {}).get("finishedAt"))
        for one in _containers(pod, "containerStatuses")
    ]
    return all(at is None or at >= requested_at for at in ends)


def _preempt_at(pod: Pod, notice_at: float | None) -> float | None:
    """Return when the Pod will be gone, as far as anyone but us wants it to be."""
    if is_ours(pod) or is_over(pod):
        return None
    found = [notice_at] if notice_at is not None else []
    grace_s = float((pod.get("spec") or {}).get("terminationGracePeriodSeconds") or 0)
    deleted_at = unix_s(pod["metadata"].get("deletionTimestamp"))
    if deleted_at is not None:
        found.append(deleted_at)  # the end of the grace period, which the API has added
    elif _is_disrupted(pod):
        since = unix_s((_condition(pod, "DisruptionTarget") or {}).get("lastTransitionTime"))
        if since is not None:
            found.append(since + grace_s)
    return min(found, default=None)


def _is_disrupted(pod: Pod) -> bool:
    return (_condition(pod, "DisruptionTarget") or {}).get("status") == "True"


def _disruption(pod: Pod) -> str:
    if not _is_disrupted(pod):
        return ""
    found = _condition(pod, "DisruptionTarget") or {}
    return f"{found.get('reason') or 'disrupted'}: {found.get('message') or 'the cluster takes its node'}"


def _condition(pod: Pod, kind: str) -> Mapping[str, Any] | None:
    conditions = _status(pod).get("conditions") or ()
    return next((one for one in conditions if one.get("type") == kind), None)


def _containers(pod: Pod, which: str) -> list[Mapping[str, Any]]:
    return list(_status(pod).get(which) or ())


def _status(pod: Pod) -> Mapping[str, Any]:
    return pod.get("status") or {}
