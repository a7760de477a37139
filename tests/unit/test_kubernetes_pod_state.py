"""The state of a replica from what its Pod and its node were seen to be, one after the other."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import pytest

from policies.model import FailureKind
from provisioners.kubernetes.node_state import UNKNOWN, NodeFate
from provisioners.kubernetes.pod_events import newest
from provisioners.kubernetes.pod_state import (
    gone_state,
    instance_of,
    is_beyond_reach,
    seen_of,
    stuck_since,
    verdict_of,
)
from provisioners.kubernetes.sightings import Instant, Sightings
from provisioners.kubernetes.translate import END_NOTE, PORT_NOTE, ZONE_NOTE
from provisioners.port.base import Instance, InstanceState

S = InstanceState
NOW = 1_800_000_000.0
CREATED = "2027-01-15T08:00:00Z"  # NOW
WAIT_S = 10.0
READY = NodeFate(is_known=True)
Step = tuple[float, Mapping[str, Any]]


def pod(
    phase: str = "Pending", *, ours: bool = False, deleted: int | None = None, node: str = "n1", **status: Any
) -> dict[str, Any]:
    """`deleted` is the grace period of its deletion. `natives` are the names of its restarted init containers."""
    spec = {"terminationGracePeriodSeconds": 30} | ({"nodeName": node} if node else {})
    spec |= {key: status.pop(key) for key in ("schedulingGates",) if key in status}
    natives = status.pop("natives", ())
    if natives:
        spec["initContainers"] = [{"name": one, "restartPolicy": "Always"} for one in natives]
    notes = {ZONE_NOTE: "zone-a", PORT_NOTE: "8000"} | ({END_NOTE: "x"} if ours else {})
    meta = {"name": "chat-1", "uid": "u1", "creationTimestamp": CREATED, "annotations": notes}
    if deleted is not None:
        meta |= {"deletionTimestamp": "2027-01-15T08:00:30Z", "deletionGracePeriodSeconds": deleted}
    meta["labels"] = {"skyserve-token": "chat-1", "skyserve-owner": "me", "skyserve-capacity": "spot"}
    meta["labels"] |= status.pop("labels", {})
    return {"metadata": meta, "spec": spec, "status": {"phase": phase, "podIP": "10.0.0.1", **status}}


def condition(kind: str, status: str, reason: str = "", message: str = "") -> dict[str, str]:
    made = {"type": kind, "status": status, "reason": reason, "message": message}
    return made | {"lastTransitionTime": CREATED}


def one(name: str = "main", *, started: bool = False, **state: Any) -> dict[str, Any]:
    return {"name": name, "started": started, "image": "team/engine:1", "state": state}


def ended(code: int, reason: str = "Error", message: str = "", name: str = "main") -> dict[str, Any]:
    end = {"exitCode": code, "reason": reason, "message": message, "finishedAt": CREATED}
    return one(name, terminated=end)


def waiting(reason: str, message: str = "", name: str = "main") -> dict[str, Any]:
    return one(name, waiting={"reason": reason, "message": message})


def running(name: str = "main", *, started: bool = True) -> dict[str, Any]:
    return one(name, started=started, running={"startedAt": CREATED})


def seen(*steps: Step, event: tuple[str, str] | None = None) -> Sightings:
    found: Sightings = {}
    for at_s, each in steps:
        found = seen_of(each, found, Instant(at_s, NOW + at_s), event)
    return found


def shown(
    *steps: Step, after_s: float = 0.0, node: NodeFate = READY, event: tuple[str, str] | None = None
) -> Instance:
    """Return what the last Pod of the steps is, `after_s` after it was seen."""
    sightings, (last_s, last) = seen(*steps, event=event), steps[-1]
    verdict = verdict_of(last, sightings, last_s + after_s, WAIT_S, node)
    return instance_of(last, "prod", verdict, sightings, node)


UNSCHEDULABLE = [condition("PodScheduled", "False", "Unschedulable", "0/3 nodes are available")]
GATED = [condition("PodScheduled", "False", "SchedulingGated", "Scheduling is blocked")]
TAKEN = [condition("DisruptionTarget", "True", "DeletionByTaintManager", "node is gone")]
BY_KUBELET = [condition("DisruptionTarget", "True", "TerminationByKubelet", "low on memory")]
PULL = 'failed to pull and unpack image "docker.io/team/engine:1": '
MISSING = waiting("CreateContainerConfigError", 'secret "x" not found')
ROOT = waiting("CreateContainerConfigError", "container has runAsNonRoot and image will run as root")


@pytest.mark.parametrize(
    ("found", "after_s", "state", "message"),
    [
        pytest.param(pod(node=""), 0, S.PENDING, "", id="just created"),
        pytest.param(
            pod(node="", conditions=UNSCHEDULABLE), 9, S.PENDING, "0/3 nodes", id="no room for a moment"
        ),
        pytest.param(
            pod(node="", conditions=UNSCHEDULABLE), 10, S.BROKEN, "0/3 nodes", id="no room for long"
        ),
        pytest.param(
            pod(node="", conditions=GATED, schedulingGates=[{"name": "kueue.x-k8s.io/admission"}]),
            3600,
            S.PENDING,
            "held back by the scheduling gate kueue.x-k8s.io/admission",
            id="gated",
        ),
        pytest.param(
            pod(node="", conditions=GATED, labels={"kueue.x-k8s.io/queue-name": "team-a"}),
            3600,
            S.PENDING,
            "until Kueue admits it to the queue team-a",
            id="in a queue",
        ),
        pytest.param(pod(), 0, S.SETUP, "", id="on a node"),
        pytest.param(
            pod("Running", containerStatuses=[running(started=False)]), 0, S.SETUP, "", id="setup runs"
        ),
        pytest.param(pod("Running", containerStatuses=[running()]), 0, S.RUNNING, "", id="run runs"),
        pytest.param(
            pod("Failed", containerStatuses=[ended(7, message="setup failed: it exited")]),
            0,
            S.SETUP_FAILED,
            "setup failed: it exited (exit code 7)",
            id="setup failed",
        ),
        pytest.param(
            pod("Failed", containerStatuses=[ended(128, "StartError", "exec: /bin/sh: no such file")]),
            0,
            S.SETUP_FAILED,
            "StartError: exec: /bin/sh: no such file (exit code 128)",
            id="an image without a shell",
        ),
        pytest.param(
            pod("Failed", containerStatuses=[ended(137, "OOMKilled")]),
            0,
            S.RUN_EXITED,
            "run exited with code 137: it used more memory than it may (OOMKilled)",
            id="out of memory",
        ),
        pytest.param(
            pod("Succeeded", containerStatuses=[ended(0)]),
            0,
            S.RUN_EXITED,
            "run exited with code 0: it must run for as long as the replica is to serve",
            id="run exited",
        ),
        pytest.param(
            pod(
                "Failed",
                initContainerStatuses=[ended(1, name="istio-init")],
                containerStatuses=[waiting("PodInitializing")],
            ),
            0,
            S.SETUP_FAILED,
            "istio-init exited (exit code 1)",
            id="an init container failed",
        ),
        pytest.param(
            pod("Failed", reason="OutOfcpu", message="no"), 0, S.BROKEN, "OutOfcpu: no", id="not accepted"
        ),
        pytest.param(
            pod("Failed", reason="UnexpectedAdmissionError", message="no healthy devices"),
            0,
            S.BROKEN,
            "UnexpectedAdmissionError: no healthy devices",
            id="no device",
        ),
        pytest.param(pod("Running", ours=True), 0, S.STOPPING, "", id="ours to end"),
        pytest.param(
            pod("Failed", conditions=TAKEN, containerStatuses=[ended(137)]),
            0,
            S.PREEMPTED,
            "DeletionByTaintManager",
            id="taken",
        ),
        pytest.param(
            pod(
                "Failed",
                reason="Evicted",
                message="The node was low on resource: memory.",
                containerStatuses=[ended(137)],
            ),
            0,
            S.BROKEN,
            "Evicted: The node was low on resource: memory.",
            id="evicted for memory",
        ),
        pytest.param(
            pod(
                "Failed",
                reason="Evicted",
                message="The node was low on resource: ephemeral-storage.",
                conditions=BY_KUBELET,
            ),
            0,
            S.BROKEN,
            "Evicted: The node was low on resource: ephemeral-storage.",
            id="evicted for disk",
        ),
        pytest.param(
            pod(
                "Failed", reason="Evicted", message='Usage of EmptyDir volume "work" exceeds the limit "1Gi".'
            ),
            0,
            S.RUN_EXITED,
            'run was ended: Usage of EmptyDir volume "work" exceeds the limit',
            id="evicted for its own use of the disk",
        ),
        pytest.param(
            pod(
                "Failed",
                reason="Terminated",
                message="imminent node shutdown",
                containerStatuses=[ended(143)],
            ),
            0,
            S.BROKEN,
            "Terminated: imminent node shutdown",
            id="its node shut down",
        ),
        pytest.param(
            pod("Failed", reason="NodeLost", containerStatuses=[running()]),
            0,
            S.BROKEN,
            "NodeLost",
            id="node lost",
        ),
        pytest.param(
            pod("Failed", containerStatuses=[ended(137, "ContainerStatusUnknown", "could not be located")]),
            0,
            S.BROKEN,
            "the node n1 has lost the container (ContainerStatusUnknown)",
            id="its node was started again",
        ),
    ],
)
def test_the_state_of_a_pod(
    found: dict[str, Any], after_s: float, state: InstanceState, message: str
) -> None:
    instance = shown((0, found), after_s=after_s)
    assert instance.state is state
    assert message in instance.message
    assert (instance.message == "") == (message == "")


def test_only_what_never_started_is_a_lack_of_room() -> None:
    refused = shown((0, pod("Failed", reason="OutOfcpu"))).refusal
    assert refused is not None
    assert refused.kind is FailureKind.CAPACITY
    assert shown((0, pod("Failed", reason="Evicted", containerStatuses=[ended(137)]))).refusal is None


# --- what keeps a container from starting -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "fails_after_s", "state"),
    [
        pytest.param(waiting("ErrImagePull", f"{PULL}429 Too Many Requests"), None, None, id="rate limit"),
        pytest.param(
            waiting("ImagePullBackOff", "toomanyrequests: pull rate limit"),
            None,
            None,
            id="rate limit of a hub",
        ),
        pytest.param(waiting("ErrImagePull", f"{PULL}dial tcp: i/o timeout"), None, None, id="timeout"),
        pytest.param(waiting("ErrImagePull", f"{PULL}lookup r.io: no such host"), None, None, id="no name"),
        pytest.param(waiting("ErrImagePull", f"{PULL}unexpected status 503"), None, None, id="registry away"),
        pytest.param(
            waiting("ErrImagePull", f"{PULL}no space left on device"), 180, S.BROKEN, id="disk full"
        ),
        pytest.param(waiting("ErrImagePull", f"{PULL}not found"), 15, S.SETUP_FAILED, id="not found"),
        pytest.param(waiting("ErrImagePull", "manifest unknown"), 15, S.SETUP_FAILED, id="no manifest"),
        pytest.param(
            waiting("ErrImagePull", f"{PULL}401 Unauthorized"), 15, S.SETUP_FAILED, id="not logged in"
        ),
        pytest.param(waiting("ErrImagePull", "pull access denied"), 15, S.SETUP_FAILED, id="denied"),
        pytest.param(
            waiting("ErrImagePull", "something else"), 600, S.SETUP_FAILED, id="another failure of a pull"
        ),
        pytest.param(
            waiting("InvalidImageName", "couldn't parse"), 0, S.SETUP_FAILED, id="no name of an image"
        ),
        pytest.param(waiting("ErrImageNeverPull"), 0, S.SETUP_FAILED, id="may not be pulled"),
        pytest.param(MISSING, 180, S.SETUP_FAILED, id="a Secret that may come"),
        pytest.param(ROOT, 0, S.SETUP_FAILED, id="runs as root"),
        pytest.param(
            waiting("CreateContainerError", "context deadline exceeded"), 180, S.SETUP_FAILED, id="runtime"
        ),
        pytest.param(waiting("RunContainerError"), 180, S.SETUP_FAILED, id="cannot run"),
        pytest.param(
            waiting("CrashLoopBackOff", name="istio-proxy"), 180, S.SETUP_FAILED, id="a sidecar before ours"
        ),
    ],
)
def test_what_keeps_a_container_from_starting(
    held: dict[str, Any], fails_after_s: float | None, state: InstanceState | None
) -> None:
    is_sidecar = held["name"] != "main"
    which = "initContainerStatuses" if is_sidecar else "containerStatuses"
    found = pod(**{which: [held]}, natives=["istio-proxy"] if is_sidecar else [])
    for after_s in (0.0, 1.0, 14.0, 100.0, 179.0, 599.0, 100_000.0):
        instance = shown((0, found), after_s=after_s)
        is_over = fails_after_s is not None and after_s >= fails_after_s
        assert instance.state is (state if is_over else S.SETUP)
        reason = held["state"]["waiting"]["reason"].replace("ErrImagePull", "ImagePullBackOff")
        assert instance.message.startswith(f"istio-proxy: {reason}" if is_sidecar else f"{reason}: ")
        assert (instance.refusal is not None) == (instance.state is S.BROKEN)


def test_the_name_of_an_image_is_no_cause() -> None:
    found = waiting("ErrImagePull", 'pulling image "r/not-found:429": something else') | {
        "image": "r/not-found:429"
    }
    assert shown((0, pod(containerStatuses=[found])), after_s=16).state is S.SETUP


def test_between_two_pulls_the_cause_is_that_of_the_last_one() -> None:
    pull = pod(containerStatuses=[waiting("ErrImagePull", "not found")])
    wait = pod(containerStatuses=[waiting("ImagePullBackOff", 'Back-off pulling image "team/engine:1"')])
    first = shown((0, pull), (1, wait))
    assert (first.state, first.message) == (S.SETUP, "ImagePullBackOff: not found")
    assert shown((0, pull), (1, wait), (12, pull), (13, wait), after_s=2).state is S.SETUP_FAILED
    passed = pod("Running", containerStatuses=[running()])
    assert shown((0, pull), (1, wait), (12, passed), after_s=100).state is S.RUNNING


@pytest.mark.parametrize(
    ("reason", "fails_after_s", "state"),
    [
        ("FailedMount", 600, S.SETUP_FAILED),
        ("FailedAttachVolume", 600, S.SETUP_FAILED),
        ("FailedCreatePodSandBox", 180, S.BROKEN),
        ("Pulling", None, None),
    ],
)
def test_what_only_an_event_says(
    reason: str, fails_after_s: float | None, state: InstanceState | None
) -> None:
    found = pod(containerStatuses=[waiting("ContainerCreating")])
    assert stuck_since(seen((5, found))) == 5
    for after_s in (0.0, 179.0, 599.0, 100_000.0):
        instance = shown((0, found), after_s=after_s, event=(reason, "why"))
        is_over = fails_after_s is not None and after_s >= fails_after_s
        assert (instance.state, instance.message) == (state if is_over else S.SETUP, f"{reason}: why")
    assert shown((0, found), event=("Scheduled", "n1")).message == ""
    started = pod("Running", containerStatuses=[running()])
    assert shown((0, started), event=(reason, "why"), after_s=9999).state is S.RUNNING
    assert stuck_since(seen((5, found), (6, started))) is None


def test_the_event_that_was_written_last_counts() -> None:
    def event(version: str, reason: str) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": version}, "reason": reason, "message": "a\n b"}

    assert newest([event("99", "FailedMount"), event("100", "Pulling")]) == ("Pulling", "a b")
    assert newest([]) is None


# --- sidecars ---------------------------------------------------------------------------------------------------

CODES = (0, 1, 137)


def with_sidecar(*, native: bool, main: dict[str, Any], sidecar: dict[str, Any]) -> dict[str, Any]:
    """Return the Pod as a kubelet reports it."""
    both = [main] if native else [sidecar, main]
    ends = [each["state"].get("terminated") for each in both]
    is_over = all(ends) and "terminated" in sidecar["state"]
    failed = any(end["exitCode"] for end in ends if end)
    phase = "Running" if not is_over else "Failed" if failed else "Succeeded"
    if not native:
        return pod(phase, containerStatuses=both)
    return pod(phase, natives=["istio-proxy"], initContainerStatuses=[sidecar], containerStatuses=both)


@pytest.mark.parametrize(
    ("native", "main_code", "sidecar_code", "is_main_first"),
    list(itertools.product((False, True), CODES, CODES, (False, True))),
)
def test_the_sidecar_matrix(native: bool, main_code: int, sidecar_code: int, is_main_first: bool) -> None:
    """Our container alone decides, at once, whatever the sidecar does before or after."""
    lives, dies = running("istio-proxy"), ended(sidecar_code, name="istio-proxy")
    up, down = running(), ended(main_code)
    steps = [(up, lives), (down, lives) if is_main_first else (up, dies), (down, dies)]
    pods = [with_sidecar(native=native, main=main, sidecar=sidecar) for main, sidecar in steps]
    steps_of = [(float(number), each) for number, each in enumerate(pods)]
    states = [shown(*steps_of[: number + 1]) for number in range(3)]
    assert states[0].state is S.RUNNING
    assert states[1].state is (S.RUN_EXITED if is_main_first else S.RUNNING)
    assert states[2].state is S.RUN_EXITED
    for instance in states[1 if is_main_first else 2 :]:
        assert instance.message.startswith(f"run exited with code {main_code}")
        assert "istio" not in instance.message


@pytest.mark.parametrize("native", [False, True])
def test_a_sidecar_that_ends_before_ours_has_started_is_not_ours(native: bool) -> None:
    main, sidecar = waiting("PodInitializing"), ended(1, name="istio-proxy")
    assert shown((0, with_sidecar(native=native, main=main, sidecar=sidecar))).state is S.SETUP


@pytest.mark.parametrize("code", CODES)
def test_a_sidecar_that_runs_on_while_the_pod_is_deleted(code: int) -> None:
    up = with_sidecar(native=False, main=running(), sidecar=running("istio-proxy"))
    down = with_sidecar(native=False, main=ended(code), sidecar=running("istio-proxy"))
    deleted = {"deletionTimestamp": CREATED, "deletionGracePeriodSeconds": 30}
    up_deleted = {**up, "metadata": {**up["metadata"], **deleted}}
    down_deleted = {**down, "metadata": {**down["metadata"], **deleted}}
    assert shown((0, up), (1, up_deleted), (2, down_deleted)).state is S.PREEMPTED
    assert shown((0, up), (1, down), (2, down_deleted)).state is S.RUN_EXITED


@pytest.mark.parametrize("grace_s", [30, 5])
def test_a_kubelet_that_removes_a_deleted_pod_deletes_it_without_grace(grace_s: int) -> None:
    """As a real API server shows it: the grace period becomes 0 before the Pod is gone."""
    last = pod("Failed", deleted=0, containerStatuses=[ended(143)])
    steps: list[Step] = [(0, pod("Running", containerStatuses=[running()]))]
    steps += [(1, pod("Running", deleted=grace_s, containerStatuses=[running()]))]
    assert shown(*steps, (2, last)).state is S.PREEMPTED
    assert shown(*steps, (2, pod("Failed", deleted=grace_s)), (3, last)).state is S.PREEMPTED
    assert shown(steps[0], (3, last)).state is S.RUN_EXITED


# --- deletions, notices, nodes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "node", "at"),
    [
        (pod("Running"), READY, None),
        (pod("Running", deleted=30), READY, NOW + 30),
        (pod("Running", deleted=5), READY, NOW + 5),
        (pod("Running", deleted=30, ours=True), READY, None),
        (pod("Running", conditions=TAKEN), READY, NOW + 30),
        (pod("Running"), NodeFate(True, NOW + 5), NOW + 5),
        (pod("Running", deleted=30), NodeFate(True, NOW + 90), NOW + 30),
        (pod("Unknown", containerStatuses=[running()]), UNKNOWN, NOW + 30),
        (pod("Failed", deleted=30), READY, None),
    ],
)
def test_a_notice_stands_from_when_it_was_seen_until_its_deadline(
    found: dict[str, Any], node: NodeFate, at: float | None
) -> None:
    assert shown((0, found), after_s=1, node=node).preempt_at == at


UP, GOING = (
    pod("Running", containerStatuses=[running()]),
    pod("Running", deleted=30, containerStatuses=[running()]),
)


@pytest.mark.parametrize(
    ("steps", "after_s", "node", "state", "beyond_reach"),
    [
        pytest.param([(0, UP)], 9999, READY, S.RUNNING, False, id="well"),
        pytest.param([(0, UP)], 9999, UNKNOWN, S.RUNNING, False, id="well, nodes not known"),
        pytest.param([(0, UP)], 29, NodeFate(True, NOW, 0.0, "silent"), S.RUNNING, False, id="silent"),
        pytest.param([(0, UP)], 30, NodeFate(True, NOW, 0.0, "silent"), S.BROKEN, True, id="silent for 30 s"),
        pytest.param([(0, UP)], 9999, NodeFate(True, NOW + 30), S.RUNNING, False, id="a taint alone"),
        pytest.param(
            [(0, UP)], 9999, NodeFate(True, None, 0.0, "silent", False), S.RUNNING, False, id="all are silent"
        ),
        pytest.param(
            [(0, UP), (5, GOING)],
            30,
            NodeFate(True, None, 0.0, "silent", False),
            S.BROKEN,
            True,
            id="and it is deleted",
        ),
        pytest.param([(0, UP), (5, GOING)], 29, READY, S.RUNNING, False, id="deleted"),
        pytest.param(
            [(0, UP), (5, GOING)], 44, READY, S.RUNNING, False, id="the grace is over, its kubelet works"
        ),
        pytest.param([(0, UP), (5, GOING)], 45, READY, S.BROKEN, False, id="its kubelet cannot remove it"),
        pytest.param(
            [(0, UP), (5, GOING)],
            30,
            NodeFate(True, NOW, 20.0, "silent"),
            S.BROKEN,
            True,
            id="silent, grace over",
        ),
        pytest.param(
            [(0, UP), (5, GOING)],
            29,
            NodeFate(True, NOW, 20.0, "silent"),
            S.RUNNING,
            False,
            id="silent, grace runs",
        ),
        pytest.param([(0, UP), (5, GOING)], 59, UNKNOWN, S.RUNNING, False, id="deleted, nodes not known"),
        pytest.param(
            [(0, UP), (5, GOING)], 60, UNKNOWN, S.BROKEN, True, id="deleted for long, nodes not known"
        ),
        pytest.param(
            [(0, pod("Unknown", containerStatuses=[running()]))],
            30,
            UNKNOWN,
            S.BROKEN,
            True,
            id="phase Unknown",
        ),
        pytest.param([(0, pod("Running", deleted=30, ours=True))], 29, UNKNOWN, S.STOPPING, False, id="ours"),
        pytest.param(
            [(0, pod("Running", deleted=30, ours=True))], 60, UNKNOWN, S.STOPPING, True, id="ours, for long"
        ),
        pytest.param(
            [(0, pod("Running", deleted=30, ours=True))],
            30,
            NodeFate(True, NOW, 20.0, "silent"),
            S.STOPPING,
            True,
            id="ours on a silent node",
        ),
    ],
)
def test_a_pod_that_should_be_gone(
    steps: list[Step], after_s: float, node: NodeFate, state: InstanceState, beyond_reach: bool
) -> None:
    instance = shown(*steps, after_s=after_s, node=node)
    assert instance.state is state
    assert (instance.endpoint is not None) == (state is S.RUNNING)
    assert is_beyond_reach(seen(*steps), steps[-1][0] + after_s, node) == beyond_reach


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        pytest.param(
            [(0, GOING), (1, pod("Failed", deleted=30, containerStatuses=[ended(143)]))],
            S.PREEMPTED,
            id="deleted",
        ),
        pytest.param(
            [(0, pod("Failed", deleted=30, containerStatuses=[ended(1)]))], S.PREEMPTED, id="both at once"
        ),
        pytest.param(
            [
                (0, pod("Failed", containerStatuses=[ended(1)])),
                (1, pod("Failed", deleted=30, containerStatuses=[ended(1)])),
            ],
            S.RUN_EXITED,
            id="ended, then deleted",
        ),
        pytest.param(
            [(0, pod("Failed", deleted=0, containerStatuses=[ended(1)]))],
            S.RUN_EXITED,
            id="without a grace period",
        ),
        pytest.param(
            [
                (0, pod("Running", deleted=0, containerStatuses=[running()])),
                (1, pod("Failed", deleted=0, containerStatuses=[ended(137)])),
            ],
            S.PREEMPTED,
            id="forced",
        ),
    ],
)
def test_whether_it_ended_because_it_was_deleted(steps: list[Step], state: InstanceState) -> None:
    assert shown(*steps).state is state


@pytest.mark.parametrize(
    ("last", "state"),
    [
        (pod("Running"), S.PREEMPTED),
        (pod("Running", conditions=TAKEN), S.PREEMPTED),
        (pod("Running", ours=True), S.TERMINATED),
        (pod("Succeeded", containerStatuses=[ended(0)]), S.TERMINATED),
    ],
)
def test_what_a_deleted_pod_was(last: dict[str, Any], state: InstanceState) -> None:
    assert gone_state(last, shown((0, last)))[0] is state


# --- clocks -----------------------------------------------------------------------------------------------------

STAMP = re.compile(r"^\d{4}-\d\d-\d\dT")


def stamped(item: Any, stamp: str) -> Any:
    """Return the object with every timestamp in it replaced."""
    if isinstance(item, dict):
        return {key: stamped(value, stamp) for key, value in item.items()}
    if isinstance(item, list):
        return [stamped(value, stamp) for value in item]
    return stamp if isinstance(item, str) and STAMP.match(item) else item


@pytest.mark.parametrize("stamp", ["2027-01-15T07:59:00Z", "2027-01-15T08:01:00Z", "1970-01-01T00:00:00Z"])
def test_no_timestamp_of_another_machine_decides(stamp: str) -> None:
    """Whatever the clocks of nodes, controllers and the API server show, the decisions are the same."""
    lives: list[list[Step]] = [
        [(0, pod(node="", conditions=UNSCHEDULABLE))],
        [(0, UP), (5, GOING), (7, pod("Failed", deleted=30, containerStatuses=[ended(1)]))],
        [(0, UP), (5, GOING)],
        [(0, UP), (5, pod("Running", conditions=TAKEN, containerStatuses=[running()]))],
        [(0, pod(containerStatuses=[MISSING]))],
        [
            (0, UP),
            (3, pod("Failed", containerStatuses=[ended(1)])),
            (4, pod("Failed", deleted=30, containerStatuses=[ended(1)])),
        ],
    ]
    for life in lives:
        other: list[Step] = [(at_s, stamped(each, stamp)) for at_s, each in life]
        for after_s in (0.0, 9.0, 10.0, 30.0, 45.0, 180.0):
            assert shown(*other, after_s=after_s) == shown(*life, after_s=after_s)
