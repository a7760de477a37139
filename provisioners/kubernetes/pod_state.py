"""What a Pod is, as one node of a replica: its state, the notice that stands for it, and why it ended. Pure.

The first line that fits decides; "ours" is a Pod whose end we requested, which its annotation says. The cluster's reasons are an
eviction, a node that shuts down or was lost, and a container that the node does not find again.

    ours                                              STOPPING
    our container, one before it, or the Pod has ended:
        because someone else deleted the Pod          PREEMPTED, and BROKEN if its node is lost
        because the cluster disrupted it              PREEMPTED
        for another of the cluster's reasons          BROKEN: its Pod stays until we delete it
        by more disk than it may use                  RUN_EXITED
        no container has ever started                 BROKEN, and refused for want of room
        before `run`                                  SETUP_FAILED
        otherwise                                     RUN_EXITED
    its node is lost                                  BROKEN
    it should be gone, as it was deleted              BROKEN
    unschedulable for longer than a limit             BROKEN, and refused for want of room
    our container runs                                RUNNING once `setup` is done, which its startup probe reports, else SETUP
    something keeps it from starting                  SETUP with that sentence; when the time of `containers` for it is over,
                                                      SETUP_FAILED, or BROKEN and refused if it is the node's fault
    on a node                                         SETUP
    held back by a scheduling gate, or unschedulable  PENDING with that sentence
    otherwise                                         PENDING

A Pod that is being deleted by someone else keeps its state for its grace period, and has a notice; so has one whose node will go or is
silent (`node_state`). Our Pods have no identity that anything depends on: a successor has another name, no volume is attached to one
of them alone, and nothing counts them. So the Pod of a lost node is deleted without waiting for its kubelet (`is_beyond_reach`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from policies.model import CapacityType, FailureKind, Zone
from provisioners.kubernetes import containers
from provisioners.kubernetes.containers import Pod
from provisioners.kubernetes.errors import CLOUD
from provisioners.kubernetes.network import endpoint_of
from provisioners.kubernetes.node_state import LOST_S, UNKNOWN, NodeFate
from provisioners.kubernetes.placement import NO_ZONE
from provisioners.kubernetes.sightings import Instant, Sighting, Sightings, followed
from provisioners.kubernetes.translate import DEFAULT_PORT, END_NOTE, PORT_NOTE, ZONE_NOTE
from provisioners.port.base import Instance, InstanceState
from provisioners.port.errors import Refusal
from provisioners.port.vm import CAPACITY_TAG, OWNER_TAG, REPLICA_TAG, SERVICE_TAG, TOKEN_TAG

_S = InstanceState
_DELETED_BY_OTHERS = "its Pod was deleted, not by this controller"
_NO_ROOM = Refusal(FailureKind.CAPACITY)
_REMOVAL_S = 15.0  # that a kubelet which works takes to remove a Pod after its grace period
_UNKNOWN_S = 30.0  # the same where its node is not known

_TAKEN = frozenset(
    {
        "DeadlineExceeded",
        "Evicted",
        "NodeAffinity",
        "NodeLost",
        "NodeShutdown",
        "Preempting",
        "Shutdown",
        "Terminated",
    }
)
_TOO_MUCH_DISK = re.compile(r"exceed(s|ed) (its|the) (local|total|limit)|usage exceeds the (total )?limit")

# Facts of a Pod whose first sighting matters.
_UNSCHEDULABLE, _GATED, _DISRUPTED, _SILENT = "unschedulable", "gated", "disrupted", "silent"
_ENDED_FIRST = "ended before it was deleted"
_STUCK = "nothing runs on its node"
_DELETED = "deleted: "


class Verdict(NamedTuple):
    """The state of a Pod. `deadline`: when (steady seconds) it will be another one if nothing happens before."""

    state: InstanceState
    message: str = ""
    refusal: Refusal | None = None
    deadline: float | None = None


def seen_of(pod: Pod, before: Sightings, at: Instant, event: tuple[str, str] | None = None) -> Sightings:
    """Return what holds of the Pod and since when, given what was seen `before`.

    `event` is the reason and the sentence of its last event, as far as it was read.
    """
    facts: dict[str, str] = {}
    meta, held = pod["metadata"], dict(containers.holds_of(pod, before, event))
    deleted = (
        f"{_DELETED}{meta.get('deletionGracePeriodSeconds') or 0}" if meta.get("deletionTimestamp") else ""
    )
    if deleted:
        facts[deleted] = ""
    # The API deletes a Pod that has ended without a grace period; a finalizer may keep it. A kubelet that has ended a Pod in its
    # grace period deletes it without one, too.
    was_deleted = any(name.startswith(_DELETED) for name in before)
    was_over = not deleted or (float(deleted.removeprefix(_DELETED)) == 0.0 and not was_deleted)
    if _has_ended(pod) and (_ENDED_FIRST in before or was_over):
        facts[_ENDED_FIRST] = ""
    if _is_disrupted(pod):
        facts[_DISRUPTED] = ""
    if _status(pod).get("phase") == "Unknown" or _status(pod).get("reason") == "NodeLost":
        facts[_SILENT] = str(_status(pod).get("message") or "its node does not respond")
    scheduled = _condition(pod, "PodScheduled") or {}
    if not was_placed(pod) and scheduled.get("status") == "False":
        if scheduled.get("reason") in ("Unschedulable", "SchedulerError"):
            facts[_UNSCHEDULABLE] = str(scheduled.get("message") or "no node has room for it")
        elif scheduled.get("reason") == "SchedulingGated":
            facts[_GATED] = _gates(pod)
    if was_placed(pod) and not is_over(pod) and not containers.has_started_any(pod):
        facts[_STUCK] = ""
    return followed(before, facts | held, at)


def instance_of(
    pod: Pod, region: str, verdict: Verdict, seen: Sightings, node: NodeFate = UNKNOWN
) -> Instance:
    """Return the Pod as an instance of one node."""
    meta = pod["metadata"]
    labels, notes = meta.get("labels") or {}, meta.get("annotations") or {}
    capacity = labels.get(CAPACITY_TAG)
    port = int(notes.get(PORT_NOTE) or DEFAULT_PORT)
    is_running = verdict.state is _S.RUNNING
    return Instance(
        id=meta["uid"],
        token=labels.get(TOKEN_TAG, meta["name"]),
        owner=labels.get(OWNER_TAG, ""),
        service=labels.get(SERVICE_TAG, ""),
        replica_id=int(labels.get(REPLICA_TAG, "0")),
        zone=Zone(CLOUD, region, notes.get(ZONE_NOTE, NO_ZONE)),
        capacity_type=CapacityType(capacity) if capacity else CapacityType.ON_DEMAND,
        state=verdict.state,
        endpoint=endpoint_of(_status(pod).get("podIP"), port) if is_running else None,
        preempt_at=_preempt_at(pod, seen, node) if verdict.state in _ALIVE else None,
        message=verdict.message,
        refusal=verdict.refusal,
    )


_ALIVE = (_S.PENDING, _S.SETUP, _S.RUNNING)


def verdict_of(pod: Pod, seen: Sightings, now: float, wait_s: float, node: NodeFate = UNKNOWN) -> Verdict:
    """Return the state. `now` in steady seconds; `wait_s` is how long a Pod may be unschedulable."""
    if is_ours(pod):
        return Verdict(_S.STOPPING)
    if _has_ended(pod):
        return _end(pod, seen, now, node)
    lost_at = _lost_at(pod, seen, node)
    if lost_at is not None and now >= lost_at[0]:
        return Verdict(_S.BROKEN, lost_at[1])
    found = _waits_or_runs(pod, seen, now, wait_s)
    times = [at for at in (found.deadline, None if lost_at is None else lost_at[0]) if at is not None]
    return found._replace(deadline=min(times, default=None))


def is_beyond_reach(seen: Sightings, now: float, node: NodeFate) -> bool:
    """Return whether its kubelet will not remove the Pod, although it should be gone: its node is lost.

    `now` in steady seconds.
    """
    trouble_at = _trouble_at(seen, node)
    if trouble_at is not None and node.is_believed and now - trouble_at >= LOST_S:
        return True
    deleted = _deletion(seen)
    if deleted is None:
        return False
    late_s = now - deleted[0].since.steady - deleted[1]
    return (trouble_at is not None and late_s >= 0.0) or (not node.is_known and late_s >= _UNKNOWN_S)


def gone_state(pod: Pod, last: Instance) -> tuple[InstanceState, str]:
    """Return what a Pod was taken for that is deleted."""
    if is_ours(pod) or last.state in (_S.RUN_EXITED, _S.SETUP_FAILED, _S.BROKEN, _S.TERMINATED):
        return _S.TERMINATED, ""
    return _S.PREEMPTED, _disruption(pod) or _DELETED_BY_OTHERS


def is_ours(pod: Pod) -> bool:
    """Return whether we requested its end."""
    return END_NOTE in (pod["metadata"].get("annotations") or {})


def is_over(pod: Pod) -> bool:
    """Return whether none of its containers runs, or ever will."""
    return _status(pod).get("phase") in ("Failed", "Succeeded")


def was_placed(pod: Pod) -> bool:
    return bool((pod.get("spec") or {}).get("nodeName"))


def node_of(pod: Pod) -> str:
    """Return the name of its node; "" while it has none."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def unschedulable(seen: Sightings) -> Sighting | None:
    """Return since when the Pod finds no node, with the scheduler's sentence; None if it has one, or was not looked at yet."""
    return seen.get(_UNSCHEDULABLE)


def is_gated(seen: Sightings) -> bool:
    """Return whether something holds it back from the scheduler, as a queue does."""
    return _GATED in seen


def stuck_since(seen: Sightings) -> float | None:
    """Return since when (steady seconds) it has been on its node without a container that has run."""
    found = seen.get(_STUCK)
    return None if found is None else found.since.steady


def _has_ended(pod: Pod) -> bool:
    return (
        is_over(pod)
        or containers.end_of(containers.main_of(pod)) is not None
        or containers.failed_init(pod) is not None
    )


def _waits_or_runs(pod: Pod, seen: Sightings, now: float, wait_s: float) -> Verdict:
    waiting = unschedulable(seen)
    if waiting is not None:
        deadline = waiting.since.steady + wait_s
        if now >= deadline:
            return Verdict(_S.BROKEN, waiting.text, _NO_ROOM)
        return Verdict(_S.PENDING, waiting.text, deadline=deadline)
    main = containers.main_of(pod)
    if containers.is_running(main):
        return Verdict(_S.RUNNING if main.get("started") else _S.SETUP)
    for name, sighting in seen.items():
        hold = containers.hold_named(name)
        if hold is None:
            continue
        if hold.fails_after_s is None:
            return Verdict(_S.SETUP, sighting.text)
        deadline = sighting.since.steady + hold.fails_after_s
        if now < deadline:
            return Verdict(_S.SETUP, sighting.text, deadline=deadline)
        if hold.is_the_nodes:
            return Verdict(_S.BROKEN, sighting.text, _NO_ROOM)
        return Verdict(_S.SETUP_FAILED, sighting.text)
    if was_placed(pod):
        return Verdict(_S.SETUP)
    return Verdict(_S.PENDING, seen[_GATED].text if _GATED in seen else "")


def _end(pod: Pod, seen: Sightings, now: float, node: NodeFate) -> Verdict:
    status, main = _status(pod), containers.main_of(pod)
    reason, sentence = str(status.get("reason") or ""), str(status.get("message") or "")
    if _deletion(seen) is not None and _ENDED_FIRST not in seen:
        is_lost = is_beyond_reach(seen, now, node)
        state = _S.BROKEN if is_lost else _S.PREEMPTED
        return Verdict(state, _disruption(pod) or _DELETED_BY_OTHERS)
    if _is_disrupted(pod) and reason not in _TAKEN and not _is_by_kubelet(pod):
        return Verdict(_S.PREEMPTED, _disruption(pod))
    if reason == "Evicted" and _TOO_MUCH_DISK.search(sentence):
        return Verdict(_S.RUN_EXITED, f"run was ended: {sentence}")
    if _is_disrupted(pod) or reason in _TAKEN:
        return Verdict(_S.BROKEN, ": ".join(filter(None, (reason, sentence or _disruption(pod)))))
    failed = main if containers.end_of(main) is not None else containers.failed_init(pod)
    if failed is None:
        said = f"{reason or 'it failed'}: {sentence or 'the node did not accept it'}"
        return Verdict(_S.BROKEN, said, None if containers.has_started_any(pod) else _NO_ROOM)
    if containers.is_lost_by_node(failed):
        return Verdict(_S.BROKEN, f"the node {node_of(pod)} has lost the container (ContainerStatusUnknown)")
    state = _S.SETUP_FAILED if containers.is_setups(failed) else _S.RUN_EXITED
    return Verdict(state, containers.sentence_of(failed))


def _lost_at(pod: Pod, seen: Sightings, node: NodeFate) -> tuple[float, str] | None:
    """Return from when (steady seconds) on the Pod counts as lost unless that changes, and why."""
    found = []
    trouble_at = _trouble_at(seen, node)
    if trouble_at is not None and node.is_believed:
        found.append((trouble_at + LOST_S, node.why or seen[_SILENT].text))
    deleted = _deletion(seen)
    if deleted is not None:
        late_s = 0.0 if trouble_at is not None else _REMOVAL_S if node.is_known else _UNKNOWN_S
        said = f"{_disruption(pod) or _DELETED_BY_OTHERS}, and its node {node_of(pod)} has not removed it"
        found.append((deleted[0].since.steady + deleted[1] + late_s, said))
    return min(found, key=lambda one: one[0], default=None)


def _trouble_at(seen: Sightings, node: NodeFate) -> float | None:
    """Return since when (steady seconds) its node has not been ready, by the node or by the Pod."""
    times = [node.trouble_at] if node.trouble_at is not None else []
    if _SILENT in seen:
        times.append(seen[_SILENT].since.steady)
    return min(times, default=None)


def _deletion(seen: Sightings) -> tuple[Sighting, float] | None:
    """Return when its deletion was seen, and its grace period."""
    return next(
        (
            (sighting, float(name.removeprefix(_DELETED)))
            for name, sighting in seen.items()
            if name.startswith(_DELETED)
        ),
        None,
    )


def _preempt_at(pod: Pod, seen: Sightings, node: NodeFate) -> float | None:
    """Return when (UNIX seconds) the Pod will be gone, as far as anyone but us wants it to be."""
    found = [node.notice_at] if node.notice_at is not None else []
    grace_s = float((pod.get("spec") or {}).get("terminationGracePeriodSeconds") or 0)
    deleted = _deletion(seen)
    if deleted is not None:
        found.append(deleted[0].since.unix + deleted[1])
    elif _DISRUPTED in seen:
        found.append(seen[_DISRUPTED].since.unix + grace_s)
    if _SILENT in seen:
        found.append(seen[_SILENT].since.unix + LOST_S)
    return min(found, default=None)


def _gates(pod: Pod) -> str:
    gates = [str(one.get("name")) for one in (pod.get("spec") or {}).get("schedulingGates") or ()]
    queue = (pod["metadata"].get("labels") or {}).get("kueue.x-k8s.io/queue-name")
    where = f", until Kueue admits it to the queue {queue}" if queue else ""
    return f"held back by the scheduling gate {', '.join(gates) or 'of another controller'}{where}"


def _is_by_kubelet(pod: Pod) -> bool:
    """Return whether its kubelet ended it, which then leaves the Pod as it is."""
    return (_condition(pod, "DisruptionTarget") or {}).get("reason") == "TerminationByKubelet"


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


def _status(pod: Pod) -> Mapping[str, Any]:
    return pod.get("status") or {}
