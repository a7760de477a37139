"""Sizes: fixed, by request rate and by concurrency, with hysteresis in seconds."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.goals import AcceleratorQps, Goal, ScalingGoal
from policies.history import Load
from policies.model import Observation
from policies.registry import scaler_for
from policies.scaling.accelerator_rate import AcceleratorRate
from policies.scaling.base import Size
from policies.scaling.engine_load import LOOK_EVERY_S, EngineLoad
from policies.scaling.fixed import Fixed
from policies.scaling.ongoing import Ongoing
from policies.scaling.request_rate import RequestRate
from tests.clouds.schedules import examples

GOAL = ScalingGoal(
    min_replicas=1, max_replicas=10, target_qps_per_replica=2.0, upscale_delay_s=39.0, downscale_delay_s=100.0
)
SLOW_UP = replace(GOAL, upscale_delay_s=300.0)  # forgives 50 s


@dataclass
class Scaled:
    """A scaler fed second by second, its memory through JSON every time."""

    goal: ScalingGoal = GOAL
    memory: dict[str, Any] = field(default_factory=dict)
    now: float = 1000.0

    def see(
        self, after_s: float = 0.0, *, qps: float | None = None, queued: int = 0, in_flight: int = 0
    ) -> int:
        load = Load()
        if qps is not None:
            load = Load(60.0, round(qps * 60.0), in_flight=in_flight, queued=queued, known=True)
        return self.size(after_s, load).wanted

    def size(self, after_s: float, load: Load) -> Size:
        self.now += after_s
        observation = Observation(self.now, Goal(1, self.goal), (), (), load)
        size = scaler_for(self.goal).target(observation, self.memory)
        self.memory = json.loads(json.dumps(size.memory))
        assert size.wake_at is None or size.wake_at > self.now - 1e-6
        return size

    def plays(self, *steps: tuple[float, float]) -> list[int]:
        """(seconds, requests per second) by (seconds, requests per second), second by second; the targets without
        repetitions."""
        told: list[int] = []
        for seconds, qps in steps:
            for _ in range(round(seconds)):
                target = self.see(1.0, qps=qps)
                if told[-1:] != [target]:
                    told.append(target)
        return told


def test_fixed_is_the_minimum_whatever_the_load() -> None:
    goal = Goal(1, ScalingGoal(min_replicas=3, max_replicas=3))
    assert Fixed().target(Observation(0.0, goal, (), (), Load(60.0, 9999, known=True)), {}) == Size(3, {})


@pytest.mark.parametrize(
    ("goal", "kind"),
    [
        pytest.param(ScalingGoal(1, 3), Fixed, id="no target"),
        pytest.param(ScalingGoal(1, 3, target_qps_per_replica=2.0), RequestRate, id="a rate"),
        pytest.param(
            ScalingGoal(1, 3, 1.0, target_qps_by_accelerator=(AcceleratorQps("L4", None, 1.0),)),
            AcceleratorRate,
            id="rates of accelerators",
        ),
        pytest.param(ScalingGoal(1, 3, target_ongoing_requests_per_replica=8.0), Ongoing, id="a concurrency"),
    ],
)
def test_the_goal_chooses_the_scaler(goal: ScalingGoal, kind: type) -> None:
    assert isinstance(scaler_for(goal), kind)


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


@pytest.mark.parametrize(
    ("ongoing", "settled"), [(0.0, 1), (0.01, 1), (8.0, 1), (8.1, 2), (79.0, 10), (999.0, 10)], ids=str
)
def test_it_settles_at_as_many_as_the_concurrency_needs(ongoing: float, settled: int) -> None:
    scaled = Scaled(ScalingGoal(1, 10, target_ongoing_requests_per_replica=8.0, upscale_delay_s=39.0))
    load = Load(60.0, 0, ongoing=ongoing, known=True)
    scaled.size(0.0, load)
    assert scaled.size(1000.0, load).wanted == settled


ENGINES = ScalingGoal(1, 10, target_kv_cache_usage=0.8, upscale_delay_s=39.0, downscale_delay_s=100.0)
BESIDE = replace(ENGINES, target_queue_length=5.0, target_qps_per_replica=2.0)


@pytest.mark.parametrize(
    ("goal", "load", "settled"),
    [
        pytest.param(ENGINES, Load(engines=4, kv_usage=1.6, known=True), 2, id="caches of four, half used"),
        pytest.param(ENGINES, Load(engines=4, kv_usage=3.21, known=True), 5, id="a little too full"),
        pytest.param(ENGINES, Load(engines=4, kv_usage=4.0, known=True), 5, id="full"),
        pytest.param(ENGINES, Load(engines=4, known=True), 1, id="idle"),
        pytest.param(ENGINES, Load(engines=0, in_flight=3, known=True), 4, id="busy, and no engine reports"),
        pytest.param(ENGINES, Load(engines=4, kv_usage=4.0), 4, id="no load balancer has reported"),
        pytest.param(BESIDE, Load(engines=4, engine_queue=30.0, known=True), 6, id="30 wait"),
        pytest.param(BESIDE, Load(requests=840, engines=4, engine_queue=30.0, known=True), 7, id="the rate needs more"),
        pytest.param(BESIDE, Load(requests=840, engines=4, kv_usage=7.0, known=True), 9, id="the caches need more"),
        pytest.param(BESIDE, Load(requests=120, engines=0, known=True), 1, id="no engine reports: the rate alone"),
    ],
)  # fmt: skip
def test_it_settles_at_as_many_as_the_engines_ask_for(goal: ScalingGoal, load: Load, settled: int) -> None:
    assert isinstance(scaler_for(goal), EngineLoad)
    scaled = Scaled(goal, {"target": 4})
    scaled.size(0.0, load)
    size = scaled.size(100.0, load)
    assert size.wanted == settled
    assert size.wake_at == scaled.now + LOOK_EVERY_S  # what engines report changes without an event


def test_a_service_that_sleeps_wakes_although_no_engine_reports() -> None:
    scaled = Scaled(replace(ENGINES, min_replicas=0), {"target": 0})
    assert scaled.size(0.0, Load(known=True)).wanted == 0
    assert scaled.size(1.0, Load(queued=1, known=True)).wanted == 1
    assert scaled.size(200.0, Load(queued=1, known=True)).wanted == 1  # it starts


# --- waiting ---------------------------------------------------------------------------------------------------


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


def test_it_says_when_it_may_move() -> None:
    scaled = Scaled()
    eight = Load(60.0, 480, known=True)
    assert scaled.size(0.0, eight).wake_at == 1039.0
    assert scaled.size(10.0, eight).wake_at == 1039.0
    assert scaled.size(5.0, Load(60.0, 120, known=True)).wake_at is None, "the wait is paused"
    assert scaled.size(5.0, eight).wake_at == 1044.0
    assert scaled.size(24.0, eight) == Size(4, {"target": 4}, None)


def test_it_moves_to_the_mildest_level_of_the_wait() -> None:
    up = Scaled()
    up.see(qps=20.0)
    up.see(20.0, qps=6.0)
    assert up.see(19.0, qps=20.0) == 3
    down = Scaled(memory={"target": 8})
    down.see(qps=1.0)
    down.see(50.0, qps=9.0)
    assert down.see(50.0, qps=1.0) == 5


@pytest.mark.parametrize(
    ("steps", "targets"),
    [
        pytest.param([(300, 2), (300, 8)], [1], id="not quite as long as the delay"),
        pytest.param([(301, 8)], [1, 4], id="as long as the delay"),
        pytest.param([(200, 8), (1, 2), (100, 8)], [1], id="one jittery sample is not counted"),
        pytest.param([(200, 8), (1, 2), (101, 8)], [1, 4], id="nor does it begin the wait anew"),
        pytest.param([(200, 8), (50, 2), (101, 8)], [1, 4], id="a sixth of the delay is forgiven"),
        pytest.param([(200, 8), (51, 2), (250, 8)], [1], id="more is not"),
        pytest.param([(90, 8), (30, 2), (90, 8), (30, 2), (270, 8)], [1], id="nor more in two pieces"),
        pytest.param([(6, 8), (1, 2)] * 51, [1, 4], id="six seconds in seven are enough"),
        pytest.param([(4, 8), (1, 2)] * 200, [1], id="four in five are not"),
        pytest.param([(4, 8), (1, 6)] * 200, [1, 3], id="but are for what all five have asked for"),
        pytest.param([(200, 8), (1, 500), (101, 8)], [1, 4], id="a spike beyond changes nothing"),
        pytest.param([(60, 4), (60, 6), (60, 8), (301, 10)], [1, 2, 3, 4, 5], id="a rise is followed level by level"),
        pytest.param([(40, 4), (40, 6), (301, 8)], [1, 3, 4], id="but in one move where a sixth of the delay is between"),
        pytest.param([(40, 4), (10, 20), (301, 8)], [1, 4], id="spikes do not come along"),
        pytest.param([(301, 20), (60, 8)], [1, 10], id="what is up stays"),
    ],
)  # fmt: skip
def test_waits_upwards(steps: list[tuple[float, float]], targets: list[int]) -> None:
    assert Scaled(SLOW_UP).plays(*steps) == targets


@pytest.mark.parametrize(
    ("steps", "targets"),
    [
        pytest.param([(100, 8)], [10], id="not quite as long as the delay"),
        pytest.param([(101, 8)], [10, 4], id="as long as the delay"),
        pytest.param([(50, 8), (10, 20), (51, 8)], [10, 4], id="a short burst is forgiven"),
        pytest.param([(50, 8), (20, 20), (90, 8)], [10], id="a longer one is not"),
        pytest.param([(50, 8), (20, 12), (102, 8)], [10, 6, 4], id="it asks for what it needs, and no more"),
        pytest.param([(30, 16), (30, 12), (101, 2)], [10, 8, 6, 1], id="a fall is followed level by level"),
    ],
)  # fmt: skip
def test_waits_downwards(steps: list[tuple[float, float]], targets: list[int]) -> None:
    assert Scaled(memory={"target": 10}).plays(*steps) == targets


def test_each_level_waits_no_longer_than_its_own_delay() -> None:
    """A rise while another is being waited out must not wait for two delays."""
    scaled = Scaled(SLOW_UP)
    scaled.see(qps=4.0)
    scaled.see(60.0, qps=16.0)
    assert scaled.see(240.0, qps=16.0) == 2
    assert scaled.see(59.0, qps=16.0) == 2
    assert scaled.see(1.0, qps=16.0) == 8


@pytest.mark.parametrize(
    ("delays", "target", "steps", "targets"),
    [
        pytest.param(
            {"upscale_delay_s": 30.0, "downscale_delay_s": 600.0}, 4, [(550, 2), (40, 20), (599, 2)], [4, 10],
            id="it rose meanwhile",
        ),
        pytest.param(
            {"upscale_delay_s": 600.0, "downscale_delay_s": 30.0}, 4, [(550, 20), (40, 2), (599, 20)], [4, 1],
            id="it sank meanwhile",
        ),
    ],
)  # fmt: skip
def test_a_move_ends_the_waits_for_its_contrary(
    delays: dict[str, float], target: int, steps: list[tuple[float, float]], targets: list[int]
) -> None:
    """Although the time in between was short enough to be forgiven."""
    assert Scaled(replace(GOAL, **delays), memory={"target": target}).plays(*steps) == targets


def test_a_delay_of_nothing_is_none() -> None:
    scaled = Scaled(replace(GOAL, upscale_delay_s=0.0, downscale_delay_s=0.0))
    assert [scaled.see(1.0, qps=qps) for qps in (2, 8, 20, 3, 20)] == [1, 4, 10, 2, 10]


# --- bounds and ignorance --------------------------------------------------------------------------------------


def test_without_a_report_it_holds() -> None:
    scaled = Scaled(memory={"target": 6})
    assert [scaled.see(1000.0) for _ in range(3)] == [6, 6, 6]
    assert Scaled().see() == GOAL.min_replicas


def test_a_new_bound_holds_at_once() -> None:
    assert Scaled(ScalingGoal(5, 9, 2.0), memory={"target": 2}).see() == 5
    assert Scaled(ScalingGoal(1, 3, 2.0), memory={"target": 8}).see(qps=16.0) == 3


def test_a_minimum_that_is_lifted_lets_the_load_decide_after_the_delay() -> None:
    scaled = Scaled(replace(GOAL, min_replicas=5))
    assert scaled.see(qps=1.0) == 5
    scaled.goal = GOAL
    assert scaled.see(1.0, qps=1.0) == 5
    assert scaled.see(100.0, qps=1.0) == 1


def test_the_memory_of_an_earlier_version_is_understood() -> None:
    scaled = Scaled(memory={"target": 3, "above": [900.0, 5], "below": [900.0, 1]})
    assert scaled.see(qps=6.0) == 3
    assert scaled.memory == {"target": 3}


# --- zero ------------------------------------------------------------------------------------------------------

ASLEEP = ScalingGoal(0, 10, 2.0, upscale_delay_s=300.0, downscale_delay_s=120.0)


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
    scaled = Scaled(ASLEEP, memory={"target": 0})
    assert scaled.see(qps=qps, queued=queued) == target


def test_zero_is_reached_again_when_it_is_allowed() -> None:
    scaled = Scaled(ASLEEP, memory={"target": 1})
    scaled.see(qps=0.0)
    assert scaled.see(119.9, qps=0.0) == 1
    assert scaled.see(0.1, qps=0.0) == 0


@pytest.mark.parametrize("busy", ["queued", "in_flight"])
def test_nobody_sleeps_while_a_request_is_held_or_runs(busy: str) -> None:
    """A held request has long left the window when its replica is ready: a start takes minutes."""
    scaled = Scaled(ASLEEP, memory={"target": 0})
    assert scaled.see(qps=1 / 60, **{busy: 1}) == 1
    assert {scaled.see(10.0, qps=0.0, **{busy: 1}) for _ in range(60)} == {1}
    assert scaled.see(1.0, qps=0.0) == 1
    assert scaled.see(119.0, qps=0.0) == 1
    assert scaled.see(1.0, qps=0.0) == 0


def test_one_request_ends_the_wait_for_zero_but_not_for_the_levels_above() -> None:
    """A second of one request in 120: forgiven where it is no new sign."""
    scaled = Scaled(ASLEEP, memory={"target": 5})
    assert scaled.plays((60, 0.0), (1, 0.1), (60, 0.0)) == [5, 1]
    assert scaled.plays((60, 0.0)) == [1]
    assert scaled.plays((1, 0.0)) == [0]


def test_zero_does_not_come_along_with_the_levels_above() -> None:
    scaled = Scaled(ASLEEP, memory={"target": 5})
    assert scaled.plays((15, 0.1), (106, 0.0)) == [5, 1]
    assert scaled.plays((14, 0.0)) == [1]
    assert scaled.plays((1, 0.0)) == [0]


def test_with_a_minimum_it_never_sleeps() -> None:
    assert Scaled(GOAL).plays((500, 0.0)) == [1]


# --- laws ------------------------------------------------------------------------------------------------------


def test_a_steady_load_leaves_the_memory_alone() -> None:
    scaled = Scaled()
    for qps in (8.0, 2.0):
        scaled.see(1.0, qps=qps)
        before = dict(scaled.memory)
        for _ in range(20):
            scaled.see(1.0, qps=qps)
            assert scaled.memory == before


loads = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 24)), max_size=60)
scales = st.builds(
    ScalingGoal,
    min_replicas=st.integers(0, 2),
    max_replicas=st.integers(2, 9),
    target_qps_per_replica=st.just(2.0),
    upscale_delay_s=st.sampled_from([0.0, 30.0, 300.0]),
    downscale_delay_s=st.sampled_from([0.0, 60.0, 600.0]),
)


@settings(max_examples=examples(200), deadline=None)
@given(scales, loads)
def test_what_holds_of_every_load(goal: ScalingGoal, steps: list[tuple[int, int]]) -> None:
    """No move against the load, none sooner after the other than its delay, no wait beyond 7/6 of its delay, and
    nothing written on a quiet tick."""
    scaled = Scaled(goal)
    target, since_up, since_down = scaled.see(qps=0.0), -1e9, -1e9
    for gap_s, qps in steps:
        asked = min(max(-(-qps // 2), goal.min_replicas), goal.max_replicas)
        after = scaled.see(float(gap_s), qps=float(qps))
        assert goal.min_replicas <= after <= goal.max_replicas
        if after > target:
            assert target < after <= asked
            assert target == 0 or scaled.now - since_down >= goal.upscale_delay_s
            since_up = scaled.now
        if after < target:
            assert asked <= after
            assert scaled.now - since_up >= goal.downscale_delay_s
            since_down = scaled.now
        target = after
        written = json.dumps(scaled.memory)
        assert scaled.see(0.0, qps=float(qps)) == target
        assert json.dumps(scaled.memory) == written
        levels = [wait[0] for wait in (*scaled.memory.get("up", ()), *scaled.memory.get("down", ()))]
        assert len(levels) == len(set(levels)) <= goal.max_replicas


@settings(max_examples=examples(200), deadline=None)
@given(scales, loads)
def test_no_level_that_is_asked_for_without_a_break_waits_longer_than_the_delay(
    goal: ScalingGoal, steps: list[tuple[int, int]]
) -> None:
    scaled = Scaled(goal)
    missing_since: dict[int, float] = {}
    for gap_s, qps in steps:
        asked = min(max(-(-qps // 2), goal.min_replicas), goal.max_replicas)
        target = scaled.see(float(gap_s), qps=float(qps))
        for level in range(1, goal.max_replicas + 1):
            if asked < level or target >= level:
                missing_since.pop(level, None)
                continue
            since = missing_since.setdefault(level, scaled.now)
            assert scaled.now - since < goal.upscale_delay_s
