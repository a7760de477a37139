"""When a version is given up whose replicas become ready and crash, and what is launched until then."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from policies import crashes, rollout
from policies.goals import Goal, PlacementGoal, ScalingGoal
from policies.model import (
    BootstrapFailed,
    CapacityType,
    EndReason,
    Event,
    GaveUp,
    Launch,
    Memory,
    NodeLost,
    Observation,
    Offer,
    Preempted,
    PreemptionNotice,
    ProbePassed,
    Replica,
    ReplicaState,
    RunExited,
    Terminate,
    Zone,
)
from policies.plan import plan
from policies.registry import policies_for

S = ReplicaState
OFFER = Offer(Zone("c", "r", "z"), "m", None, 0.0, CapacityType.ON_DEMAND, 0.3)
V3 = Goal(3, ScalingGoal(3, 3), PlacementGoal(placer="spread"))
WHY = "`run` ended with exit code 137: Killed"
GAP_S = 1000.0


class Life(NamedTuple):
    """A replica that starts for `start_s`, is ready for `served_s` (None: never), and ends with `end`."""

    served_s: float | None
    start_s: float = 20.0
    end: Callable[[int], Event] = lambda number: RunExited(number, WHY)
    state: ReplicaState = S.READY


def crash(served_s: float, start_s: float = 20.0) -> Life:
    return Life(served_s, start_s)


def probes(served_s: float, start_s: float = 20.0) -> Life:
    """Probes fail for three minutes after the replica has served."""
    return Life(served_s, start_s, lambda number: GaveUp(number, EndReason.PROBE_FAILED, "no"), S.NOT_READY)


def errors(served_s: float) -> Life:
    """Clients get nothing but errors."""
    return Life(served_s, end=lambda number: GaveUp(number, EndReason.ONLY_ERRORS, "500"))


SHORT, LONG = crash(5.0), crash(70.0)
NEVER = Life(None, end=lambda number: BootstrapFailed(number, "no disk"))
TIMEOUT = Life(None, end=lambda number: GaveUp(number, EndReason.START_TIMEOUT, "not set up"))
MARKET = Life(5.0, end=lambda number: Preempted(number, message="taken"))
NOTICE = Life(5.0, end=lambda number: PreemptionNotice(number, 1e9))
NODE = Life(5.0, end=lambda number: NodeLost(number, "taken"))
USER = Life(5.0, end=lambda number: RunExited(number, "stopped"), state=S.DRAINING)


def replica(number: int, state: ReplicaState, version: int = 3, *, at: float = 0.0, **fields: Any) -> Replica:
    made = Replica(
        number, version, OFFER, state, since=at, created_at=at, launched_at=at, endpoint="http://h"
    )
    return replace(made, **fields)


def lived(
    lives: Sequence[Life], memory: Any = None, *, goal: Goal = V3, others: Sequence[Replica] = (),
    start: float = 0.0, gap_s: float = GAP_S,
) -> Any:  # fmt: skip
    """Return the memory after these lives, one after the other. Each has waited for its machine, which is none of its start."""
    memory, now = memory or {}, start
    for number, life in enumerate(lives, 100):
        began, ready_at = now, None if life.served_s is None else now + life.start_s
        now += life.start_s + (life.served_s or 0.0)
        one = replica(number, S.STARTING, at=began, created_at=began - 500.0)
        if ready_at is not None:
            before = {number: one, **{r.id: r for r in others}}
            memory = rollout.learn(memory, [ProbePassed(number)], before, goal, ready_at)
        state = life.state if ready_at is not None else S.STARTING
        one = replace(one, state=state, ready_at=ready_at, since=now)
        now += 180.0 if life.state is S.NOT_READY else 0.0
        before = {number: one, **{r.id: r for r in others}}
        memory = rollout.learn(memory, [life.end(number)], before, goal, now)
        memory = json.loads(json.dumps(memory))
        now += gap_s
    return memory


# --- when a version is given up ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lives", "memory", "row", "fails"),
    [
        pytest.param([SHORT] * 4, {}, 4, False, id="four short lives"),
        pytest.param([SHORT] * 5, {}, 5, True, id="five"),
        pytest.param([SHORT] * 5, {"good": 3}, 5, True, id="five, of a version that worked"),
        pytest.param([SHORT] * 4 + [LONG] + [SHORT] * 4, {}, 4, False, id="a long life in between"),
        pytest.param([SHORT] * 4 + [MARKET] * 9, {}, 4, False, id="preemptions are not its fault"),
        pytest.param([MARKET] * 9 + [NOTICE] * 9 + [NODE] * 9, {}, 0, False, id="nor of any other kind"),
        pytest.param([USER] * 9, {}, 0, False, id="what drains may exit"),
        pytest.param([SHORT, NEVER, TIMEOUT, SHORT, NEVER], {}, 5, True, id="never ready, among short lives"),
        pytest.param([NEVER] * 9, {"good": 3}, 0, False, id="never ready, and it worked: only waits grow"),
        pytest.param([crash(59.0)] * 5, {}, 5, True, id="shorter than a minute"),
        pytest.param([crash(61.0)] * 5, {}, 0, False, id="longer than a minute and than the start"),
        pytest.param([crash(500.0, start_s=600.0)] * 5, {}, 5, True, id="shorter than the start took"),
        pytest.param([crash(700.0, start_s=600.0)] * 5, {}, 0, False, id="longer than the start took"),
        pytest.param([probes(5.0)] * 5, {}, 5, True, id="probes fail soon"),
        pytest.param([errors(30.0)] * 5, {}, 5, True, id="nothing but errors soon"),
        pytest.param([errors(70.0)] * 12, {}, 0, False, id="nothing but errors later"),
        pytest.param([probes(70.0)] * 12, {}, 0, False, id="probes fail later"),
    ],
)
def test_a_row_of_short_lives(lives: list[Life], memory: dict[str, Any], row: int, fails: bool) -> None:
    after = lived(lives, memory)
    assert crashes.row(after, 3) == row
    assert rollout.has_failed(V3, after) is fails


@pytest.mark.parametrize(
    ("count", "gap_s", "fails"),
    [
        pytest.param(9, 100.0, False, id="nine"),
        pytest.param(10, 100.0, True, id="ten within an hour"),
        pytest.param(30, 400.0, False, id="thirty, and never ten within an hour"),
    ],
)
def test_crashes_within_an_hour_whatever_the_life(count: int, gap_s: float, fails: bool) -> None:
    after = lived([LONG] * count, {"good": 3}, gap_s=gap_s)
    assert crashes.row(after, 3) == 0
    assert rollout.has_failed(V3, after) is fails


def test_what_ends_together_is_one_crash() -> None:
    """As when something that all of them need is away."""
    fleet = {n: replica(n, S.READY, ready_at=20.0) for n in range(20)}
    after = rollout.learn({"good": 3}, [RunExited(n, WHY) for n in fleet], fleet, V3, 50.0)
    assert crashes.row(after, 3) == 1
    assert not rollout.has_failed(V3, after)
    again = rollout.learn({"good": 3}, [RunExited(n, WHY) for n in fleet], fleet, V3, 9000.0)
    assert crashes.row(again, 3) == 0
    assert not rollout.has_failed(V3, again)


@pytest.mark.parametrize(
    ("ready_at", "fails"),
    [
        pytest.param(-500.0, False, id="one that has lived through all crashes"),
        pytest.param(200.0, True, id="one that became ready in between"),
    ],
)
def test_a_version_that_serves_is_not_given_up(ready_at: float, fails: bool) -> None:
    healthy = replica(1, S.READY, at=-900.0, ready_at=ready_at)
    after = lived([SHORT] * 5, {"good": 3}, others=[healthy], gap_s=100.0)
    assert rollout.has_failed(V3, after) is fails
    waits = rollout.may_launch(V3, after, after["retry_at"] - 1.0)
    assert ("version 3 has failed" in waits[0]) is fails


# --- what is wanted then ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "lives", "wanted", "good"),
    [
        pytest.param({}, [SHORT] * 5, 3, None, id="nothing else ever worked"),
        pytest.param({"good": 2}, [SHORT] * 5, 2, 2, id="the version before"),
        pytest.param({"good": 2}, [NEVER] * 3, 2, 2, id="the version before, if it never was ready"),
        pytest.param({"good": 3, "before": 1}, [SHORT] * 5, 1, 1, id="the one that worked before it"),
        pytest.param({"good": 3}, [SHORT] * 5, 3, None, id="an earlier release did not note the one before"),
        pytest.param(
            {"good": 2, "before": 1, "crashes": {"version": 2, "short": 3, "limit_s": 60.0, "at": [0.0]}},
            [NEVER] * 3, 1, 1, id="not the one before, if its lives were short, too",
        ),
        pytest.param(
            {"good": 2, "crashes": {"version": 2, "short": 3, "limit_s": 60.0, "at": [0.0]}},
            [NEVER] * 3, 2, 2, id="but rather that than nothing",
        ),
        pytest.param(
            {"good": 2, "before": 1, "failed": [1]}, [SHORT] * 5, 2, 2, id="none that was given up",
        ),
    ],
)  # fmt: skip
def test_the_version_instead(
    memory: dict[str, Any], lives: list[Life], wanted: int, good: int | None
) -> None:
    after = lived(lives, memory)
    assert rollout.has_failed(V3, after)
    assert rollout.wanted_version(V3, after) == wanted
    assert after.get("good") == good


def test_versions_with_the_same_replicas_are_no_way_back() -> None:
    goal = replace(V3, same_replicas=frozenset({2}))
    after = lived([SHORT] * 5, {"good": 2, "before": 1}, goal=goal)
    assert rollout.wanted_version(goal, after) == 1


def test_one_that_is_ready_does_not_undo_it() -> None:
    after = lived([SHORT] * 5)
    late = {1: replica(1, S.STARTING, at=5000.0)}
    after = rollout.learn(after, [ProbePassed(1)], late, V3, 5100.0)
    assert rollout.has_failed(V3, after)
    sentence, until = rollout.may_launch(V3, after, 1e9)
    assert (
        sentence
        == f"version 3 has failed: 5 lives in a row shorter than 60 s; the last: {WHY}; update the service"
    )
    assert until is None
    assert rollout.may_launch(replace(V3, version=4), after, 0.0) == ("", None)


# --- the trial ----------------------------------------------------------------------------------------------------


def test_waits_double() -> None:
    waits, memory = [], {"good": 3}
    healthy = replica(1, S.READY, at=-900.0, ready_at=-500.0)
    for count in range(1, 9):
        memory = lived([SHORT] * count, {"good": 3}, others=[healthy])
        waits.append(memory["retry_at"] - memory["crashes"]["at"][-1])
    assert waits == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]


ROW = {
    "good": 3, "failing": 3, "failures": 4, "retry_at": 540.0, "why": WHY,
    "crashes": {"version": 3, "short": 4, "limit_s": 60.0, "at": [100.0, 200.0, 300.0, 500.0]},
}  # fmt: skip
ONE = {**ROW, "crashes": {**ROW["crashes"], "short": 1}}  # type: ignore[dict-item]
NOTE = f"version 3 crashes: 4 lives in a row shorter than 60 s; the last: {WHY}; one replica in trial"


def decided(memory: Any, now: float, *replicas: Replica, goal: Goal = V3) -> Any:
    observed = Observation(now, goal, replicas, (OFFER,))
    made = plan(observed, Memory(500, rollout=memory), policies_for(goal))
    again = plan(replace(observed, replicas=replicas), replace(made.memory), policies_for(goal))
    assert again.memory.rollout == made.memory.rollout
    return made


def healthy(number: int) -> Replica:
    return replica(number, S.READY, at=-900.0, ready_at=-800.0)


@pytest.mark.parametrize(
    ("memory", "now", "replicas", "launches", "ended"),
    [
        pytest.param({}, 600.0, [], 3, [], id="without crashes all at once"),
        pytest.param(ROW, 539.0, [], 0, [], id="not before the wait is over"),
        pytest.param(ROW, 541.0, [], 1, [], id="one"),
        pytest.param(ONE, 541.0, [], 1, [], id="after the first, too"),
        pytest.param(ROW, 541.0, [healthy(1), healthy(2)], 1, [], id="those that are ready stay"),
        pytest.param(ROW, 560.0, [replica(9, S.REQUESTED, at=541.0)], 0, [], id="one is on its way"),
        pytest.param(
            ROW, 590.0, [replica(9, S.READY, at=541.0, ready_at=580.0)], 0, [], id="one is ready, and in trial",
        ),
        pytest.param(
            ROW, 641.0, [replica(9, S.READY, at=541.0, ready_at=580.0)], 2, [], id="it has lived long enough",
        ),
        pytest.param(
            ROW, 541.0, [healthy(1), replica(7, S.PROVISIONING), replica(8, S.STARTING), replica(9, S.REQUESTED)],
            0, [7, 9], id="the most advanced goes on alone",
        ),
        pytest.param(
            ONE, 541.0, [replica(8, S.STARTING), replica(9, S.PROVISIONING)], 0, [], id="not after one life",
        ),
        pytest.param(
            {**ROW, "failed": [3], "good": 2}, 541.0, [], 3, [], id="of the version before as many as are wanted",
        ),
        pytest.param({**ROW, "failing": 2, "crashes": {**ROW["crashes"], "version": 2}}, 541.0, [], 3, [],  # type: ignore[dict-item]
                     id="an update ends it"),
    ],
)  # fmt: skip
def test_one_replica_in_trial(
    memory: dict[str, Any], now: float, replicas: list[Replica], launches: int, ended: list[int]
) -> None:
    made = decided(memory, now, *replicas)
    assert sum(isinstance(action, Launch) for action in made.actions) == launches
    assert [action.replica_id for action in made.actions if isinstance(action, Terminate)] == ended


def test_the_note_comes_first_and_wakes_when_the_trial_ends() -> None:
    waiting = decided(ROW, 530.0)
    assert (waiting.notes, waiting.wake_at) == ((NOTE,), 540.0)
    young = replica(9, S.READY, at=541.0, ready_at=580.0)
    trial = decided(ROW, 590.0, young)
    assert (trial.notes[0], trial.wake_at) == (NOTE, 640.0)
    proven = decided(ROW, 640.0, young)
    assert proven.notes == ()
    assert proven.memory.rollout["crashes"] == {**ROW["crashes"], "short": 0}  # type: ignore[dict-item]
    assert "retry_at" not in proven.memory.rollout


def test_a_message_of_a_host_is_one_line_of_bounded_length() -> None:
    hostile = Life(5.0, end=lambda number: RunExited(number, "a\x1b[2J\r\nb\0" + "x" * 9999))
    (note,) = decided(lived([hostile]), 30.0).notes
    assert note.isprintable()
    assert len(note) < 600


def test_the_memory_of_an_earlier_release_is_understood() -> None:
    memory = {"good": 3, "failing": 3, "failures": 2, "retry_at": 40.0, "serving": 3}
    assert decided(memory, 30.0).notes == ("the last replica failed; waiting before the next launch",)
    assert sum(isinstance(one, Launch) for one in decided(memory, 41.0).actions) == 3
    assert crashes.row(lived([SHORT], memory, start=50.0), 3) == 1
