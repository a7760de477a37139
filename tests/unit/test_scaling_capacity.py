"""Learning from a service's own minutes: the capacity of a replica, and how long one takes to start."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.forecast.capacity import MOST_KINDS, UNKNOWN_QPS, capacity, kind_of, learn, prior
from policies.goals import Goal, ScalingGoal
from policies.model import (
    CapacityType,
    Event,
    FailureKind,
    LaunchFailed,
    Offer,
    ProbePassed,
    Replica,
    ReplicaState,
    Zone,
)
from policies.scaling import cold_start
from skyserve_cli.sim.slo_queue import SloQueue

OFFER = Offer(Zone("sky", "r", "a"), "m", "L4", 1.0, CapacityType.SPOT, 0.3)
KIND = "L4:1@1"


def lived(true_qps: float, start: float, minutes: int, attainment: float = 0.99) -> dict[str, Any]:
    """The memory of a fleet that is sized by what it has learned, minute by minute, with the queue of `serve simulate`."""
    rng = np.random.RandomState(1)
    queue, memory = SloQueue(true_qps), dict[str, Any]()
    for minute in range(minutes):
        rate = 12.0 * (1.2 + np.sin(minute / 200.0))
        found = capacity(memory, KIND, start, attainment).qps
        replicas = max(1, int(np.ceil(1.05 * rate / found)))
        steps = [float(rng.poisson(rng.gamma(rate * 20.0))) for _ in range(3)]
        met = sum(queue.step(count, replicas) for count in steps)
        asked = sum(steps)
        late = 1.0 - met / asked if asked else 0.0
        memory = learn(memory, [(KIND, start)] * replicas, asked / 60.0, late, attainment)
    return memory


@pytest.mark.parametrize("start", [0.5, 2.0, 6.0])
def test_the_capacity_is_found_from_too_low_and_from_too_high(start: float) -> None:
    found = capacity(lived(2.0, start, 4000), KIND, start, 0.99)
    assert 0.7 * 2.0 <= found.qps <= 1.15 * 2.0
    assert found.high is not None
    assert found.low <= found.qps <= found.high


def test_memory_stays_small_and_is_json() -> None:
    memory = lived(2.0, 0.5, 1500)
    for version in range(2, 9):
        memory = learn(memory, [(f"L4:1@{version}", 1.0)], 3.0, 0.0, 0.99)
    assert len(memory) == MOST_KINDS
    assert len(json.dumps(memory)) < 3000
    assert json.loads(json.dumps(memory)) == memory


def test_a_new_version_starts_from_the_old_and_another_accelerator_does_not() -> None:
    memory = lived(2.0, 0.5, 3000)
    old = capacity(memory, KIND, 0.5, 0.99).qps
    assert capacity(memory, "L4:1@2", 0.5, 0.99).qps == old
    assert capacity(memory, "H100:1@2", 3.4, 0.99).qps == 3.4


def test_a_mixed_fleet_teaches_each_of_its_kinds_its_share() -> None:
    memory: dict[str, Any] = {}
    for _ in range(200):
        memory = learn(memory, [("L4:1@1", 0.5), ("L4:1@1", 0.5), ("H100:1@1", 3.0)], 4.0, 0.0, 0.99)
    assert capacity(memory, "L4:1@1", 0.5, 0.99).qps == pytest.approx(0.55, rel=0.15)
    assert capacity(memory, "H100:1@1", 3.0, 0.99).qps == pytest.approx(3.3, rel=0.15)


def test_a_capacity_is_known_by_accelerator_and_by_versions_with_equal_replicas() -> None:
    goal = Goal(5, ScalingGoal(), same_replicas=frozenset({3, 4}))
    assert [kind_of(OFFER, version, goal) for version in (2, 3, 5)] == ["L4:1@2", "L4:1@3", "L4:1@3"]
    assert prior(replace(OFFER, accelerator=None)) == UNKNOWN_QPS
    assert prior(replace(OFFER, accelerator_count=2.0)) == 2 * prior(OFFER)


# --- cold starts


def replica(number: int, kind: CapacityType = CapacityType.SPOT, created_at: float = 0.0) -> Replica:
    offer = replace(OFFER, capacity_type=kind)
    return Replica(number, 1, offer, ReplicaState.STARTING, created_at, created_at)


def started(memory: Any, one: Replica, now: float, event: Event | None = None) -> Any:
    return cold_start.learn(memory, [event or ProbePassed(one.id)], {one.id: one}, now)


def test_a_start_is_from_the_launch_to_the_first_probe_that_passes() -> None:
    memory: Any = {}
    for number in range(30):
        memory = started(memory, replica(number, created_at=1000.0), 1000.0 + 10.0 * (number + 1))
    assert memory["spot"] == [10 * number for number in range(11, 31)]
    assert cold_start.p90(memory, ["spot"]) == 280
    assert cold_start.p90(memory, ["on_demand"]) is None
    again = replace(replica(1), state=ReplicaState.NOT_READY)
    assert started(memory, again, 9999.0) is memory


def test_a_refused_launch_counts_with_the_one_that_took_its_place() -> None:
    refused = LaunchFailed(1, FailureKind.CAPACITY)
    memory = started({}, replica(1, created_at=100.0), 130.0, refused)
    memory = started(memory, replica(2, created_at=130.0), 160.0, LaunchFailed(2, FailureKind.CAPACITY))
    memory = started(memory, replica(3, created_at=160.0), 460.0)
    assert memory == {"spot": [360], "refused": {}}
    memory = started(memory, replica(4, created_at=500.0), 530.0, LaunchFailed(4, FailureKind.CAPACITY))
    memory = started(memory, replica(5, created_at=9000.0), 9300.0)
    assert memory["spot"] == [360, 300]


def test_the_slowest_capacity_type_that_is_offered_counts() -> None:
    memory = started({}, replica(1), 100.0)
    memory = started(memory, replica(2, CapacityType.ON_DEMAND), 300.0)
    assert cold_start.p90(memory, ["spot", "on_demand"]) == 300
