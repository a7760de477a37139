"""What a controller that cannot trust its own probes does to replicas: nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.brake import (
    FRESH_S,
    HELD_FOR_BALANCERS,
    HELD_MANY,
    HELD_OFFLINE,
    PERIOD_S,
    SHORTEST_WATCH_S,
    Evidence,
    TerminationLog,
    confirmed,
)
from policies.goals import Goal, ScalingGoal
from policies.health import FailedProbe
from policies.model import CapacityType, Drained, EndReason, Event, GaveUp, Offer, Replica, ReplicaState, Zone

NOW = 10_000.0
GOAL = Goal(version=1, scaling=ScalingGoal(min_replicas=1), probe_failure_threshold_s=180.0)
OFFER = Offer(Zone("c", "r", "z"), "m", None, 0.0, CapacityType.SPOT, 0.3)
SILENT, REFUSES = FailedProbe(NOW - 1.0, reached=False), FailedProbe(NOW - 1.0, reached=True)


def a_replica(number: int, state: ReplicaState = ReplicaState.NOT_READY, **more: object) -> Replica:
    plain = Replica(number, 1, OFFER, state, NOW - 200.0, NOW - 5000.0, endpoint=f"http://h:{number}")
    return replace(plain, **more)  # type: ignore[arg-type]


def accused(*numbers: int) -> list[Event]:
    return [GaveUp(number, EndReason.PROBE_FAILED, "readiness probe failed for 180 s") for number in numbers]


def decided(
    events: list[Event],
    evidence: Evidence,
    replicas: tuple[Replica, ...] = (),
    terminated: TerminationLog | None = None,
    now: float = NOW,
) -> tuple[list[int], str]:
    given = replicas or (a_replica(1), *(a_replica(n, ReplicaState.READY) for n in range(2, 6)))
    verdict = confirmed(events, given, GOAL, evidence, terminated or TerminationLog(), now)
    return [event.replica_id for event in verdict.events], verdict.note


@pytest.mark.parametrize(
    ("evidence", "stands", "why"),
    [
        pytest.param(Evidence(), True, "", id="probes are not recorded: events count as they come"),
        pytest.param(Evidence(online=False), False, HELD_OFFLINE, id="not recorded, and nothing responds"),
        pytest.param(Evidence(failed={1: SILENT}), True, "", id="silent, and nothing speaks for it"),
        pytest.param(Evidence(failed={1: SILENT}, online=True), True, "", id="others respond"),
        pytest.param(Evidence(failed={}), False, "", id="its last probe passed, or was void"),
        pytest.param(Evidence(failed={1: replace(SILENT, at=NOW - FRESH_S - 1)}), False, "", id="long ago"),
        pytest.param(
            Evidence(NOW - 100.0, failed={1: SILENT}), False, "", id="watched for less than it takes"
        ),
        pytest.param(
            Evidence(NOW - 181.0, failed={1: replace(SILENT, at=NOW - 182.0)}),
            False,
            "",
            id="failed before the gap",
        ),
        pytest.param(
            Evidence(NOW - 181.0, failed={1: SILENT}), True, "", id="watched for as long as it takes"
        ),
        pytest.param(
            Evidence(failed={1: SILENT}, responsive={1}),
            False,
            HELD_FOR_BALANCERS,
            id="a load balancer hears it",
        ),
        pytest.param(
            Evidence(failed={1: SILENT}, responsive={2}), True, "", id="a load balancer hears another"
        ),
        pytest.param(Evidence(failed={1: SILENT}, online=False), False, HELD_OFFLINE, id="nothing responds"),
        pytest.param(
            Evidence(failed={1: REFUSES}, responsive={1}, online=False),
            True,
            "",
            id="it says itself that it is not ready",
        ),
    ],
)
def test_one_replica_of_five_that_fails_its_probes(evidence: Evidence, stands: bool, why: str) -> None:
    events, note = decided(accused(1), evidence)
    assert events == ([1] if stands else [])
    assert (why in note) if why else note == ""


def test_a_start_that_takes_too_long_is_judged_after_a_minute_of_watching_and_not_while_offline() -> None:
    late: list[Event] = [GaveUp(1, EndReason.START_TIMEOUT, "no readiness probe passed")]
    assert decided(late, Evidence(NOW - SHORTEST_WATCH_S, failed={1: SILENT})) == ([1], "")
    assert decided(late, Evidence(NOW - SHORTEST_WATCH_S + 1, failed={1: SILENT})) == ([], "")
    assert decided(late, Evidence(online=False))[0] == []


def test_a_drain_that_is_over_is_over_whatever_the_controller_sees() -> None:
    assert decided([Drained(1)], Evidence(NOW, failed={}, online=False)) == ([1], "")


def test_when_most_fall_silent_at_once_one_is_replaced_and_the_others_wait_for_the_new_one() -> None:
    numbers = range(1, 11)
    fleet = tuple(a_replica(number) for number in numbers)
    evidence = Evidence(failed=dict.fromkeys(numbers, SILENT))
    log = TerminationLog()
    events, note = decided(accused(*numbers), evidence, fleet, log)
    assert events == [1]
    assert HELD_MANY in note
    log.add(NOW)
    assert decided(accused(*numbers[1:]), evidence, fleet[1:], log)[0] == []
    # The replacement becomes ready: the controller can see, so the others are lost. They go a few at a time.
    new = a_replica(11, ReplicaState.READY, ready_at=NOW + 30.0)
    later = Evidence(failed=dict.fromkeys(numbers[1:], replace(SILENT, at=NOW + 59.0)))
    assert decided(accused(*numbers[1:]), later, (*fleet[1:], new), log, NOW + PERIOD_S) == ([2], "")


def test_a_replacement_that_is_not_reached_either_leads_to_no_second_one_for_a_long_time() -> None:
    numbers = range(1, 4)
    fleet = tuple(a_replica(number) for number in numbers)
    log = TerminationLog()
    terminated = 0
    for minute in range(60):
        now = NOW + 60.0 * minute
        evidence = Evidence(failed=dict.fromkeys(numbers, FailedProbe(now - 1.0, reached=False)))
        events, note = decided(accused(*numbers), evidence, fleet, log, now)
        assert HELD_MANY in note
        for _ in events:
            log.add(now)
            terminated += 1
    assert terminated <= 3  # in an hour


def test_replicas_that_say_themselves_that_they_are_not_ready_go_a_few_in_a_minute() -> None:
    numbers = range(1, 31)
    fleet = tuple(a_replica(number) for number in numbers)
    log = TerminationLog()
    events, note = decided(accused(*numbers), Evidence(failed=dict.fromkeys(numbers, REFUSES)), fleet, log)
    assert (events, note) == ([1, 2, 3], "")
    for _ in events:
        log.add(NOW)
    again = Evidence(failed=dict.fromkeys(numbers, replace(REFUSES, at=NOW + PERIOD_S)))
    assert decided(accused(*numbers), again, fleet, log, NOW + PERIOD_S - 1)[0] == []
    assert decided(accused(*numbers), again, fleet, log, NOW + PERIOD_S)[0] == [1, 2, 3]
