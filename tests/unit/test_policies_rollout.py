"""Which version is wanted, when one has failed, and how one replaces another."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from policies import rollout
from policies.goals import Goal, ScalingGoal, UpdateMode
from policies.model import (
    BootstrapFailed,
    CapacityType,
    EndReason,
    Event,
    FailureKind,
    GaveUp,
    LaunchFailed,
    Offer,
    Preempted,
    ProbePassed,
    Replica,
    ReplicaState,
    RunExited,
    Zone,
)

S = ReplicaState
OFFER = Offer(Zone("c", "r", "z"), "m", None, 0.0, CapacityType.SPOT, 0.3)
V2 = Goal(2, ScalingGoal(3, 3))
BLUE_GREEN = replace(V2, update_mode=UpdateMode.BLUE_GREEN)
V1_WORKS = {"good": 1}


def replica(replica_id: int, version: int, state: ReplicaState = S.READY) -> Replica:
    return Replica(replica_id, version, OFFER, state, 0.0, 0.0, endpoint=f"http://h:{replica_id}")


def fleet(**versions: str) -> list[Replica]:
    """fleet(v1="RRN", v2="S"): R ready, N not ready, S starting, P provisioning, Q requested, D draining."""
    states = {
        "R": S.READY, "N": S.NOT_READY, "S": S.STARTING, "P": S.PROVISIONING, "Q": S.REQUESTED, "D": S.DRAINING,
    }  # fmt: skip
    marks = [(int(version[1:]), mark) for version, marks in versions.items() for mark in marks]
    return [replica(number, version, states[mark]) for number, (version, mark) in enumerate(marks, 1)]


def learn(
    *events: Event, goal: Goal = V2, memory: Any = None, version: int = 2, state: ReplicaState = S.STARTING,
    now: float = 0.0,
) -> Any:  # fmt: skip
    before = {1: replica(1, version, state)}
    return json.loads(json.dumps(rollout.learn(memory or {}, events, before, goal, now)))


FAILURE = BootstrapFailed(1, "exit 1")
REFUSED = LaunchFailed(1, FailureKind.REFUSED, "not sold there")
LOST = Preempted(1, lost=True, message="Client error on launch")
HOPELESS = LaunchFailed(1, FailureKind.CONFIG, "no such image")


# --- the wanted version -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "wanted", "failed"),
    [
        pytest.param({}, 2, False, id="nothing is known"),
        pytest.param({"good": 1}, 2, False, id="the old one works"),
        pytest.param({"good": 1, "failed": [2]}, 1, True, id="the new one failed"),
        pytest.param({"failed": [2]}, 2, True, id="the new one failed and none ever worked"),
        pytest.param({"good": 1, "failed": [1]}, 2, False, id="another one failed"),
    ],
)
def test_the_wanted_version(memory: dict[str, Any], wanted: int, failed: bool) -> None:
    assert rollout.wanted_version(V2, memory) == wanted
    assert rollout.has_failed(V2, memory) is failed


@pytest.mark.parametrize(
    ("events", "memory", "fails"),
    [
        pytest.param([FAILURE], {}, False, id="one failure"),
        pytest.param([FAILURE] * 2, {}, False, id="two failures"),
        pytest.param([FAILURE] * 3, {}, True, id="three failures"),
        pytest.param([FAILURE, RunExited(1), GaveUp(1, EndReason.START_TIMEOUT)], {}, True, id="of any kind"),
        pytest.param([FAILURE] * 3, V1_WORKS, True, id="three, and the old one works"),
        pytest.param([FAILURE] * 9, {"good": 2}, False, id="many, but it has worked before"),
        pytest.param([HOPELESS], {}, True, id="the cloud calls the order wrong"),
        pytest.param([REFUSED] * 9, {}, False, id="refused in some places"),
        pytest.param([LOST] * 2, {}, False, id="lost twice before it was ready"),
        pytest.param([LOST] * 3, {}, True, id="lost three times before it was ready"),
        pytest.param([Preempted(1)] * 9, {}, False, id="taken by the spot market"),
        pytest.param([HOPELESS], {"good": 2}, False, id="wrong, though it has worked before"),
        pytest.param([FAILURE, FAILURE, ProbePassed(1), FAILURE], {}, False, id="ready in between"),
        pytest.param([LaunchFailed(1, FailureKind.CAPACITY)] * 9, {}, False, id="no room"),
        pytest.param([LaunchFailed(1, FailureKind.QUOTA)] * 9, {}, False, id="no quota"),
        pytest.param([Preempted(1)] * 9, {}, False, id="preemptions"),
        pytest.param([GaveUp(1, EndReason.CLOUD_ERROR)] * 9, {}, False, id="errors of the cloud"),
        pytest.param([GaveUp(1, EndReason.PROBE_FAILED)] * 9, {}, False, id="probes that failed later"),
    ],
)
def test_when_a_version_fails(events: list[Event], memory: dict[str, Any], fails: bool) -> None:
    assert rollout.has_failed(V2, learn(*events, memory=memory)) is fails


def test_failures_of_the_old_fleet_do_not_reset_or_add_to_those_of_the_new() -> None:
    before = {1: replica(1, 2, S.STARTING), 9: replica(9, 1, S.READY)}
    events = [FAILURE, RunExited(9), FAILURE, RunExited(9), RunExited(9)]
    memory = rollout.learn(V1_WORKS, events, before, V2, 0.0)
    assert (memory["failing"], memory["failures"]) == (2, 2)
    assert rollout.has_failed(V2, rollout.learn(memory, [FAILURE], before, V2, 0.0))


@pytest.mark.parametrize("state", [S.DRAINING, S.TERMINATING], ids=lambda s: s.value)
def test_a_replica_on_its_way_out_may_exit_as_it_likes(state: ReplicaState) -> None:
    assert learn(RunExited(1), state=state) == {}


def test_a_failed_version_that_works_after_all_has_not_failed() -> None:
    memory = learn(ProbePassed(1), memory=learn(*[FAILURE] * 3))
    assert not rollout.has_failed(V2, memory)
    assert memory["good"] == 2
    assert rollout.may_launch(V2, memory, 0.0) == ("", None)


def test_a_version_with_identical_replicas_works_because_they_do() -> None:
    goal = replace(V2, same_replicas=frozenset({1}))
    memory = learn(ProbePassed(1), goal=goal, version=1, state=S.NOT_READY)
    assert not rollout.has_failed(goal, learn(*[FAILURE] * 5, goal=goal, memory=memory))


def test_waits_double_and_end_with_a_ready_replica_or_an_update() -> None:
    memory, waits = {"good": 2}, []
    for _ in range(10):
        memory = learn(FAILURE, memory=memory, now=100.0)
        waits.append(memory["retry_at"] - 100.0)
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0]
    assert rollout.may_launch(V2, memory, 399.9)[1] == 400.0
    assert rollout.may_launch(V2, memory, 400.0) == ("", None)
    assert rollout.may_launch(replace(V2, version=3), memory, 100.0) == ("", None)
    assert learn(ProbePassed(1), memory=memory, now=100.0) == {"good": 2}


def test_nothing_is_launched_when_nothing_ever_worked() -> None:
    memory = learn(HOPELESS)
    assert "version 2 has failed" in rollout.may_launch(V2, memory, 1e9)[0]
    assert rollout.may_launch(replace(V2, version=3), memory, 0.0) == ("", None)


# --- how one replaces another ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "memory", "new", "old"),
    [
        pytest.param(V2, {}, [2], [1], id="by version"),
        pytest.param(replace(V2, same_replicas=frozenset({1})), {}, [1, 2], [], id="the same replicas"),
        pytest.param(V2, {"good": 1, "failed": [2]}, [1], [2], id="back to the one that works"),
    ],
)
def test_split(goal: Goal, memory: dict[str, Any], new: list[int], old: list[int]) -> None:
    replicas = [*fleet(v1="R", v2="S"), replica(8, 1, S.DRAINING), replica(9, 2, S.TERMINATING)]
    wanted, rest = rollout.split(replicas, goal, memory)
    assert [r.version for r in wanted] == new
    assert [r.version for r in rest] == old


@pytest.mark.parametrize(
    ("goal", "new", "old", "allowed"),
    [
        pytest.param(V2, "", "", rollout.NO_LIMIT, id="nothing old: all that are missing"),
        pytest.param(V2, "", "RRR", 1, id="rolling: one more than the target"),
        pytest.param(V2, "S", "RRR", 0, id="rolling: the surge is used up"),
        pytest.param(V2, "R", "RR", 1, id="rolling: the next one"),
        pytest.param(V2, "", "R", 3, id="rolling: an old fleet that has shrunk leaves room"),
        pytest.param(V2, "RR", "RRRR", 0, id="rolling: an old fleet above its size, as in a fallback"),
        pytest.param(replace(V2, max_surge=3), "", "RRR", 3, id="rolling: as the surge allows"),
        pytest.param(replace(V2, max_surge=0, max_unavailable=1), "", "RR", 1, id="no surge: in the gap"),
        pytest.param(
            BLUE_GREEN, "", "RRR", rollout.NO_LIMIT, id="blue-green: the whole fleet beside the old"
        ),
    ],
)
def test_launch_limit(goal: Goal, new: str, old: str, allowed: int) -> None:
    assert rollout.launch_limit(3, fleet(v2=new), fleet(v1=old), goal) == allowed


@pytest.mark.parametrize(
    ("goal", "target", "new", "old", "kept"),
    [
        pytest.param(V2, 3, "", "RRR", "RRR", id="rolling: nothing new is ready"),
        pytest.param(V2, 3, "S", "RRR", "RRR", id="rolling: starting is not ready"),
        pytest.param(V2, 3, "R", "RRR", "RR", id="rolling: one for one"),
        pytest.param(V2, 3, "R", "RNR", "RR", id="rolling: the one that is not ready first"),
        pytest.param(V2, 3, "RRR", "R", "", id="rolling: the last"),
        pytest.param(V2, 3, "", "RSPQ", "R", id="rolling: those that do not serve at once"),
        pytest.param(V2, 1, "", "RRR", "R", id="rolling: to a smaller target"),
        pytest.param(replace(V2, max_unavailable=1), 3, "", "RRR", "RR", id="rolling: one may be missing"),
        pytest.param(replace(V2, max_unavailable=9), 3, "", "RRR", "", id="rolling: all may be missing"),
        pytest.param(V2, 0, "", "RR", "", id="rolling: to nothing"),
        pytest.param(BLUE_GREEN, 3, "RR", "RRR", "RRR", id="blue-green: not before the last one"),
        pytest.param(BLUE_GREEN, 3, "RRR", "RRR", "", id="blue-green: all at once"),
        pytest.param(BLUE_GREEN, 3, "", "RPR", "RR", id="blue-green: those that do not serve at once"),
    ],
)
def test_old_replicas_that_stay(goal: Goal, target: int, new: str, old: str, kept: str) -> None:
    before = fleet(v1=old)
    retired = rollout.to_retire(target, fleet(v2=new), before, goal, {})
    marks = {S.READY: "R", S.NOT_READY: "N"}
    assert "".join(marks[r.state] for r in before if r not in retired) == kept


@pytest.mark.parametrize(
    ("goal", "v1", "v2", "served"),
    [
        pytest.param(V2, "RNDS", "RP", "1R 1N 1D 2R", id="rolling: whoever can answer"),
        pytest.param(BLUE_GREEN, "RND", "RR", "1R 1N 1D", id="blue-green: the old fleet while it is ready"),
        pytest.param(BLUE_GREEN, "DDD", "RRR", "1D 1D 1D 2R 2R 2R", id="blue-green: switched"),
        pytest.param(BLUE_GREEN, "N", "R", "1N 2R", id="blue-green: the old fleet is not ready any more"),
        pytest.param(BLUE_GREEN, "R", "D", "1R 2D", id="blue-green: what drains is listed"),
    ],
)
def test_who_is_in_the_load_balancers_table(goal: Goal, v1: str, v2: str, served: str) -> None:
    marks = {S.READY: "R", S.NOT_READY: "N", S.DRAINING: "D"}
    listed = rollout.serving(fleet(v1=v1, v2=v2), goal, V1_WORKS)
    assert " ".join(f"{r.version}{marks[r.state]}" for r in listed) == served


V3 = replace(BLUE_GREEN, version=3)


def test_a_blue_green_fleet_that_is_overtaken_never_serves_and_goes_at_once() -> None:
    memory = {"good": 2, "serving": 1}
    everyone = fleet(v1="RR", v2="RN", v3="R")
    v1, v2, v3 = everyone[:2], everyone[2:4], everyone[4:]
    assert rollout.serving(everyone, V3, memory) == v1
    assert rollout.to_retire(2, v3, [*v1, *v2], V3, memory) == v2


@pytest.mark.parametrize(
    ("goal", "new", "old", "serving"),
    [
        pytest.param(V2, "", "RR", 2, id="rolling: from the first moment"),
        pytest.param(BLUE_GREEN, "RP", "RR", 1, id="blue-green: not before the last one is ready"),
        pytest.param(BLUE_GREEN, "RR", "RR", 2, id="blue-green: when it is"),
        pytest.param(BLUE_GREEN, "RP", "NN", 2, id="blue-green: when nothing else is left"),
    ],
)
def test_the_version_that_serves(goal: Goal, new: str, old: str, serving: int) -> None:
    complete = rollout.is_complete(2, fleet(v2=new))
    after = rollout.settle(complete, fleet(v1=old), goal, {"serving": 1})
    assert after == {"serving": serving}


def test_a_replica_without_an_endpoint_is_in_no_table() -> None:
    assert rollout.serving([replace(replica(1, 2), endpoint=None)], V2, {}) == []


@pytest.mark.parametrize(
    ("new", "complete", "enough"),
    [
        pytest.param("RRS", False, False, id="the load is carried, but one more is on its way"),
        pytest.param("RR", False, True, id="the load is carried and no more is on its way"),
        pytest.param("RRR", True, True, id="complete"),
        pytest.param("R", False, False, id="not enough"),
    ],
)
def test_when_a_new_fleet_can_do_without_the_old(new: str, complete: bool, enough: bool) -> None:
    """Two are wanted, and one more kept for preemptions."""
    assert (rollout.is_complete(3, fleet(v2=new)), rollout.is_enough(2, fleet(v2=new))) == (complete, enough)
