"""Sizes: fixed, and by request rate with hysteresis in seconds."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from policies.model import Goal, Load, Observation, ScalingGoal
from policies.registry import policies_for
from policies.scaling.fixed import Fixed
from policies.scaling.request_rate import RequestRate

GOAL = ScalingGoal(
    min_replicas=1, max_replicas=10, target_qps_per_replica=2.0, upscale_delay_s=39.0, downscale_delay_s=100.0
)


@dataclass
class Scaled:
    """A scaler fed second by second, its memory through JSON every time."""

    goal: ScalingGoal = GOAL
    memory: dict[str, Any] = field(default_factory=dict)
    now: float = 1000.0

    def see(self, after_s: float = 0.0, *, qps: float | None = None, queued: int = 0) -> int:
        self.now += after_s
        load = Load() if qps is None else Load(60.0, round(qps * 60.0), queued=queued, known=True)
        observation = Observation(self.now, Goal(1, self.goal), (), (), load)
        target, memory = RequestRate().target(observation, self.memory)
        self.memory = json.loads(json.dumps(memory))
        return target


def test_fixed_is_the_minimum_whatever_the_load() -> None:
    goal = Goal(1, ScalingGoal(min_replicas=3, max_replicas=3))
    assert Fixed().target(Observation(0.0, goal, (), (), Load(60.0, 9999, known=True)), {}) == (3, {})


@pytest.mark.parametrize(("qps", "kind"), [(None, Fixed), (2.0, RequestRate)], ids=["no rate", "a rate"])
def test_the_goal_chooses_the_scaler(qps: float | None, kind: type) -> None:
    goal = Goal(1, ScalingGoal(1, 3, target_qps_per_replica=qps))
    assert isinstance(policies_for(goal).scaler, kind)


@pytest.mark.parametrize(
    ("qps", "settled"),
    [(0.0, 1), (2.0, 1), (2.1, 2), (4.0, 2), (7.9, 4), (20.0, 10), (500.0, 10)],
    ids=str,
)
def test_it_settles_at_as_many_as_the_rate_needs_within_bounds(qps: float, settled: int) -> None:
    scaled = Scaled()
    scaled.see(qps=qps)
    assert scaled.see(1000.0, qps=qps) == settled
    assert scaled.see(1000.0, qps=qps) == settled


def test_up_after_exactly_the_delay() -> None:
    scaled = Scaled()
    assert scaled.see(qps=8.0) == 1
    assert scaled.see(38.9, qps=8.0) == 1
    assert scaled.see(0.1, qps=8.0) == 4


def test_down_after_exactly_the_delay() -> None:
    scaled = Scaled(memory={"target": 4})
    assert scaled.see(qps=1.0) == 4
    assert scaled.see(99.9, qps=1.0) == 4
    assert scaled.see(0.1, qps=1.0) == 1


def test_a_moment_back_at_the_target_starts_the_delay_anew() -> None:
    scaled = Scaled()
    scaled.see(qps=8.0)
    scaled.see(30.0, qps=2.0)
    assert scaled.see(30.0, qps=8.0) == 1
    assert scaled.see(38.0, qps=8.0) == 1
    assert scaled.see(1.0, qps=8.0) == 4


def test_it_moves_to_the_mildest_level_of_the_wait() -> None:
    up = Scaled()
    up.see(qps=20.0)
    up.see(20.0, qps=6.0)
    assert up.see(19.0, qps=20.0) == 3
    down = Scaled(memory={"target": 8})
    down.see(qps=1.0)
    down.see(50.0, qps=9.0)
    assert down.see(50.0, qps=1.0) == 5


def test_without_a_report_it_holds() -> None:
    scaled = Scaled(memory={"target": 6})
    assert [scaled.see(1000.0) for _ in range(3)] == [6, 6, 6]
    assert Scaled().see() == GOAL.min_replicas


def test_a_new_bound_holds_at_once() -> None:
    assert Scaled(ScalingGoal(5, 9, 2.0), memory={"target": 2}).see() == 5
    assert Scaled(ScalingGoal(1, 3, 2.0), memory={"target": 8}).see(qps=16.0) == 3


@pytest.mark.parametrize(
    ("qps", "queued", "target"),
    [
        pytest.param(0.0, 0, 0, id="nobody asks"),
        pytest.param(0.1, 0, 1, id="somebody asked"),
        pytest.param(0.0, 1, 1, id="somebody waits"),
        pytest.param(7.0, 3, 4, id="many ask"),
    ],
)
def test_from_zero_it_jumps(qps: float, queued: int, target: int) -> None:
    goal = ScalingGoal(0, 10, 2.0, upscale_delay_s=300.0)
    scaled = Scaled(goal, memory={"target": 0})
    assert scaled.see(qps=qps, queued=queued) == target


def test_zero_is_reached_again_when_it_is_allowed() -> None:
    scaled = Scaled(ScalingGoal(0, 10, 2.0, downscale_delay_s=100.0), memory={"target": 1})
    scaled.see(qps=0.0)
    assert scaled.see(100.0, qps=0.0) == 0


def test_a_steady_load_leaves_the_memory_alone() -> None:
    scaled = Scaled()
    scaled.see(qps=8.0)
    before = dict(scaled.memory)
    scaled.see(1.0, qps=8.0)
    assert scaled.memory == before
