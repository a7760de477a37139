"""What the passing of time brings about, and not a moment earlier."""

from __future__ import annotations

import pytest

from policies.deadlines import due
from policies.goals import Goal, ScalingGoal
from policies.history import Load
from policies.model import CapacityType, Drained, EndReason, Event, GaveUp, Offer, Replica, ReplicaState, Zone

S = ReplicaState
SINCE = 1000.0
OFFER = Offer(Zone("c", "r", "z"), "m", None, 0.0, CapacityType.SPOT, 0.3)
GOAL = Goal(1, ScalingGoal(), provision_timeout_s=100.0, initial_delay_s=50.0, probe_failure_threshold_s=20.0)


def events(
    state: ReplicaState, waited_s: float, *, drain_in_s: float | None = None, empty: bool = False
) -> list[Event]:
    drain_by = None if drain_in_s is None else SINCE + drain_in_s
    replica = Replica(5, 1, OFFER, state, SINCE, SINCE, drain_by=drain_by)
    return list(due([replica], GOAL, Load(empty=frozenset({5} if empty else ())), SINCE + waited_s))


@pytest.mark.parametrize(
    ("state", "limit_s", "reason"),
    [
        (S.PROVISIONING, 100.0, EndReason.START_TIMEOUT),
        (S.STARTING, 50.0, EndReason.START_TIMEOUT),
        (S.NOT_READY, 20.0, EndReason.PROBE_FAILED),
    ],
    ids=lambda value: getattr(value, "value", value),
)
def test_a_replica_is_given_up_at_its_limit(state: ReplicaState, limit_s: float, reason: EndReason) -> None:
    assert events(state, limit_s - 0.001) == []
    (event,) = events(state, limit_s)
    assert isinstance(event, GaveUp)
    assert (event.replica_id, event.reason) == (5, reason)
    assert f"{limit_s:g} s" in event.message


@pytest.mark.parametrize("state", [S.REQUESTED, S.READY, S.TERMINATING], ids=lambda s: s.value)
def test_other_states_may_last(state: ReplicaState) -> None:
    assert events(state, 1e9, empty=True) == []


@pytest.mark.parametrize(
    ("waited_s", "empty", "message"),
    [
        pytest.param(1.0, True, "nothing in flight", id="empty before its time"),
        pytest.param(30.0, False, "time to drain is over", id="busy at its time"),
        pytest.param(31.0, True, "nothing in flight", id="empty after its time"),
    ],
)
def test_a_drain_ends_empty_or_at_its_time(waited_s: float, empty: bool, message: str) -> None:
    assert events(S.DRAINING, waited_s, drain_in_s=30.0, empty=empty) == [Drained(5, message)]


def test_a_busy_drain_goes_on_until_its_time() -> None:
    assert events(S.DRAINING, 29.999, drain_in_s=30.0) == []
