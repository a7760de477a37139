"""Busy, ready, hung or failing: what probes and requests together say of a replica."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from policies.brake import KEPT_SERVING, Evidence, TerminationLog, confirmed
from policies.goals import Goal, ScalingGoal
from policies.health import (
    ALONE_EVERY_S,
    IDLE,
    LEAST_ERRORS,
    FailedProbe,
    Verdict,
    Work,
    failing,
    judged,
    loaded,
    sifted,
    with_engines,
)
from policies.history import Load
from policies.lifecycle import apply
from policies.model import (
    CapacityType,
    EndReason,
    GaveUp,
    Observation,
    Offer,
    ProbeFailed,
    ProbePassed,
    Replica,
    ReplicaState,
    Zone,
)
from policies.scaling.request_rate import RequestRate

NOW, THRESHOLD_S = 10_000.0, 180.0
GOAL = Goal(1, ScalingGoal(), probe_failure_threshold_s=THRESHOLD_S)
OFFER = Offer(Zone("c", "r", "z"), "m", None, 0.0, CapacityType.SPOT, 0.3)
SLOW = FailedProbe(NOW - 1.0, reached=True, timed_out=True, first_at=NOW - 10.0)
NO_CONNECTION = replace(SLOW, reached=False)  # its queue of connections is full, or it is gone
REFUSED, WRONG = replace(NO_CONNECTION, timed_out=False), replace(SLOW, timed_out=False)
ROW = Work(NOW - 200.0, LEAST_ERRORS, NOW - 100.0, NOW - 5.0)  # nothing but errors for 95 s


def a_replica(number: int, state: ReplicaState = ReplicaState.READY, **more: object) -> Replica:
    plain = Replica(number, 1, OFFER, state, NOW - 200.0, NOW - 5000.0, endpoint=f"http://h:{number}")
    return replace(plain, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failed", "work", "verdict"),
    [
        pytest.param(None, IDLE, Verdict.READY, id="passes, no requests"),
        pytest.param(None, Work(NOW - 900.0, waiting=3), Verdict.READY, id="passes, requests wait for long"),
        pytest.param(SLOW, IDLE, Verdict.UNREADY, id="times out, no requests"),
        pytest.param(SLOW, Work(NOW - 50.0), Verdict.UNREADY, id="times out, served before it failed only"),
        pytest.param(SLOW, Work(NOW - 5.0), Verdict.LOADED, id="times out, served since"),
        pytest.param(SLOW, Work(NOW - 50.0, waiting=4), Verdict.LOADED, id="times out, requests wait"),
        pytest.param(
            NO_CONNECTION, Work(NOW - 5.0), Verdict.LOADED, id="no connection in time, served since"
        ),
        pytest.param(
            replace(SLOW, first_at=NOW - 500.0),
            Work(NOW - 59.0, waiting=4),
            Verdict.LOADED,
            id="times out for long, serves all the time",
        ),
        pytest.param(
            replace(SLOW, first_at=NOW - 500.0),
            Work(NOW - 60.0, waiting=4),
            Verdict.UNREADY,
            id="nothing came for a third of the threshold",
        ),
        pytest.param(REFUSED, Work(NOW - 1.0, waiting=4), Verdict.UNREADY, id="refused: the port is closed"),
        pytest.param(
            WRONG, Work(NOW - 1.0, waiting=4), Verdict.UNREADY, id="another status: it says so itself"
        ),
        pytest.param(None, ROW, Verdict.FAILING, id="passes, and clients get nothing but errors"),
        pytest.param(SLOW, ROW, Verdict.FAILING, id="times out, and clients get nothing but errors"),
        pytest.param(None, replace(ROW, errors=LEAST_ERRORS - 1), Verdict.READY, id="too few errors"),
        pytest.param(
            None,
            replace(ROW, first_error_at=NOW - 900.0, last_error_at=NOW - THRESHOLD_S),
            Verdict.READY,
            id="errors long ago, and no request since",
        ),
        pytest.param(
            None, replace(ROW, first_error_at=NOW - 94.0), Verdict.READY, id="errors for too short a time"
        ),
    ],
)
def test_the_verdicts(failed: FailedProbe | None, work: Work, verdict: Verdict) -> None:
    assert judged(failed, work, THRESHOLD_S, NOW) is verdict


def test_failed_probes_of_loaded_replicas_are_no_events() -> None:
    events = [
        ProbeFailed(1, "slow"),
        ProbeFailed(2, "slow"),
        ProbeFailed(3, "503"),
        ProbePassed(4),
        ProbeFailed(5),
    ]
    failed = {1: SLOW, 2: replace(SLOW, first_at=NOW - 70.0), 3: WRONG}
    work = {1: Work(NOW - 5.0), 2: Work(NOW - 65.0, waiting=1), 3: Work(NOW - 1.0)}
    # Of 5, whose probe has passed since, nothing is known any more.
    assert sifted(events, failed, work, THRESHOLD_S, NOW) == [
        ProbeFailed(2, "slow", since=NOW - 65.0),
        *events[2:],
    ]


def test_a_replica_that_hangs_has_been_failing_since_its_last_response() -> None:
    ready = a_replica(1, since=NOW - 4000.0)
    after = apply(ready, ProbeFailed(1, "slow", since=NOW - 65.0), NOW, 60.0)
    assert (after.state, after.since) == (ReplicaState.NOT_READY, NOW - 65.0)
    assert apply(ready, ProbeFailed(1, "503"), NOW, 60.0).since == NOW
    assert (
        apply(ready, ProbeFailed(1, "slow", since=NOW + 9.0), NOW, 60.0).since == NOW
    )  # a clock was set back


def test_only_ready_replicas_are_loaded() -> None:
    fleet = [a_replica(1), a_replica(2, ReplicaState.NOT_READY), a_replica(3), a_replica(4)]
    failed = {1: SLOW, 2: SLOW, 3: WRONG}
    work = dict.fromkeys(range(1, 5), Work(NOW - 1.0, waiting=2))
    assert loaded(fleet, failed, work, THRESHOLD_S, NOW) == {1}


# --- what follows


def stands(
    work: dict[int, Work],
    fleet: list[Replica],
    overdue: list[GaveUp],
    log: TerminationLog | None = None,
    failed: FailedProbe = SLOW,
) -> tuple[list[int], str]:
    evidence = Evidence(failed={event.replica_id: failed for event in overdue}, work=work)
    verdict = confirmed(overdue, fleet, GOAL, evidence, log or TerminationLog(), NOW)
    return [event.replica_id for event in verdict.events], verdict.note


@pytest.mark.parametrize(
    "failed", [SLOW, NO_CONNECTION, REFUSED, WRONG], ids=["slow", "full", "refused", "503"]
)
@pytest.mark.parametrize(
    ("served_s", "is_kept"), [(1.0, True), (179.0, True), (181.0, False), (math.inf, False)]
)
def test_whoever_serves_clients_is_kept_however_its_probe_fails(
    failed: FailedProbe, served_s: float, is_kept: bool
) -> None:
    fleet = [a_replica(1, ReplicaState.NOT_READY), *map(a_replica, range(2, 6))]
    accused = [GaveUp(1, EndReason.PROBE_FAILED, "")]
    ended, note = stands({1: Work(NOW - served_s)}, fleet, accused, failed=failed)
    assert ended == ([] if is_kept else [1])
    assert (KEPT_SERVING in note) is is_kept


def test_a_replica_that_fails_clients_is_replaced_while_others_serve_and_one_at_a_time() -> None:
    fleet = [a_replica(number) for number in range(1, 6)]
    works = {1: ROW, 2: ROW, 3: Work(NOW - 1.0)}
    due = failing(fleet, works, THRESHOLD_S, NOW)
    assert [(event.replica_id, event.reason) for event in due] == [
        (1, EndReason.ONLY_ERRORS),
        (2, EndReason.ONLY_ERRORS),
    ]
    assert due[0].message == f"clients got {LEAST_ERRORS} errors (5xx) in 95 s and nothing else"
    log = TerminationLog()
    assert stands(works, fleet, due, log)[0] == [1]
    log.add(NOW - 1.0)
    assert stands(works, fleet, due, log)[0] == []  # another a minute later
    log.at = [NOW - 61.0]
    assert stands(works, fleet, due, log)[0] == [1]


def test_where_no_replica_does_better_one_is_tried_and_the_rest_is_left() -> None:
    """Requests that no replica can serve must not cost a fleet."""
    fleet = [a_replica(number) for number in range(1, 31)]
    works = dict.fromkeys(range(1, 31), ROW)
    due = failing(fleet, works, THRESHOLD_S, NOW)
    log = TerminationLog()
    assert stands(works, fleet, due, log)[0] == [1]
    log.add(NOW - ALONE_EVERY_S + 1.0)
    assert stands(works, fleet, due, log)[0] == []


def test_engines_of_ready_replicas_are_counted() -> None:
    fleet = [a_replica(1), a_replica(2), a_replica(3), a_replica(4, ReplicaState.NOT_READY)]
    full = Work(queued=7, kv_usage=0.9)
    load = with_engines(Load(requests=5), fleet, {1: full, 2: Work(kv_usage=0.3), 3: Work(NOW), 4: full})
    assert load == Load(requests=5, engines=2, engine_queue=7.0, kv_usage=pytest.approx(1.2))


def test_loaded_replicas_scale_up_whatever_the_rate_says() -> None:
    scaling = ScalingGoal(2, 10, target_qps_per_replica=5.0, upscale_delay_s=60.0, downscale_delay_s=60.0)
    load = Load(requests=60, known=True, in_flight=9, loaded=frozenset({1, 2, 3}))
    seen = Observation(NOW, Goal(1, scaling), (), (), load)
    memory = RequestRate().target(seen, {"target": 4}).memory
    assert RequestRate().target(replace(seen, now=NOW + 60.0), memory).wanted == 7
    idle = replace(load, loaded=frozenset())
    calm = RequestRate().target(replace(seen, load=idle), {"target": 4}).memory
    assert RequestRate().target(replace(seen, load=idle, now=NOW + 60.0), calm).wanted == 2
