"""The state of a service: every one of them is reachable, and this is how."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.goals import Goal, ScalingGoal
from policies.model import CapacityType, Offer, Replica, ReplicaState, Zone
from policies.service_state import CLEANUP_TIMEOUT_S, ServiceState, service_state

S = ReplicaState
NOW = 10_000.0
OFFER = Offer(Zone("c", "r", "z"), "m", None, 0.0, CapacityType.SPOT, 0.3)
UP = Goal(2, ScalingGoal(1, 1))
DOWN = replace(UP, down=True)
FAILED = {"failed": [2]}

CASES = [
    pytest.param(UP, [], 1, {}, ServiceState.REPLICA_INIT, id="wanted, none there"),
    pytest.param(UP, [S.STARTING], 1, {}, ServiceState.REPLICA_INIT, id="one comes up"),
    pytest.param(UP, [S.NOT_READY], 1, {}, ServiceState.REPLICA_INIT, id="one was ready"),
    pytest.param(UP, [S.TERMINATING], 0, {}, ServiceState.REPLICA_INIT, id="to zero, the last one ends"),
    pytest.param(UP, [S.STARTING, S.READY], 2, {}, ServiceState.READY, id="one is ready"),
    pytest.param(UP, [S.READY], 1, FAILED, ServiceState.READY, id="failed, the old one serves"),
    pytest.param(UP, [], 0, {}, ServiceState.NO_REPLICA, id="scaled to zero"),
    pytest.param(UP, [], 1, FAILED, ServiceState.FAILED, id="failed"),
    pytest.param(UP, [S.TERMINATING], 1, FAILED, ServiceState.FAILED, id="failed, the last one ends"),
    pytest.param(UP, [], 1, {"failed": [1]}, ServiceState.REPLICA_INIT, id="an older version failed"),
    pytest.param(DOWN, [S.DRAINING], 0, {}, ServiceState.SHUTTING_DOWN, id="going down"),
    pytest.param(DOWN, [S.READY], 0, FAILED, ServiceState.SHUTTING_DOWN, id="going down, failed or not"),
    pytest.param(DOWN, [], 0, {}, ServiceState.DOWN, id="down"),
]


def state_of(
    goal: Goal, states: list[S], target: int, memory: dict[str, list[int]], age_s: float
) -> ServiceState:
    replicas = [Replica(i, 2, OFFER, state, NOW - age_s, 0.0) for i, state in enumerate(states)]
    return service_state(goal, replicas, target, memory, NOW)


@pytest.mark.parametrize(("goal", "states", "target", "memory", "expected"), CASES)
def test_state(
    goal: Goal, states: list[S], target: int, memory: dict[str, list[int]], expected: ServiceState
) -> None:
    assert state_of(goal, states, target, memory, 1.0) is expected


@pytest.mark.parametrize(
    ("state", "age_s", "expected"),
    [
        pytest.param(S.TERMINATING, CLEANUP_TIMEOUT_S, ServiceState.SHUTTING_DOWN, id="just in time"),
        pytest.param(S.TERMINATING, CLEANUP_TIMEOUT_S + 1, ServiceState.FAILED_CLEANUP, id="stuck"),
        pytest.param(
            S.DRAINING, CLEANUP_TIMEOUT_S + 1, ServiceState.SHUTTING_DOWN, id="a long drain is not stuck"
        ),
    ],
)
def test_an_instance_that_does_not_go_away(state: S, age_s: float, expected: ServiceState) -> None:
    assert state_of(DOWN, [state], 0, {}, age_s) is expected


def test_every_state_is_reachable() -> None:
    reached = {case.values[-1] for case in CASES} | {ServiceState.FAILED_CLEANUP}
    assert reached == set(ServiceState)
