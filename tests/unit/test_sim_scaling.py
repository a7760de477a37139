"""Autoscalers over recorded requests: judged by what the traffic needed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from policies.goals import ScalingGoal
from skyserve_cli.sim.arrivals import Arrivals
from skyserve_cli.sim.scaling import Evaluation, ScalingTrial, goal_for, run
from skyserve_cli.sim.slo_queue import drawn

DAY_S = 86400.0
REACTIVE = ScalingGoal(1, 100, 1.6)


def waves(days: int, mean_qps: float = 16.0) -> Arrivals:
    """A rate that doubles and halves every day, in bins of ten minutes."""
    bins = round(days * DAY_S / 600.0)
    counts, total = [0.0], 0.0
    for index in range(bins):
        total += 600.0 * mean_qps * (1.0 + 0.5 * math.sin(index / 144 * 2 * math.pi))
        counts.append(total)
    return Arrivals("waves", tuple(index * 600.0 for index in range(bins + 1)), tuple(counts))


def trial(days: int = 2, known_days: float = 1.0, cold_start_s: float = 300.0) -> ScalingTrial:
    counts = drawn(waves(days), days * DAY_S, 0)
    return ScalingTrial(counts, round(known_days * 1440), 2.0, cold_start_s, 0.995)


def evaluated(name: str, goal: ScalingGoal = REACTIVE, on: ScalingTrial | None = None) -> Evaluation:
    on = on or trial()
    return run(on, name, goal_for(name, goal, on))


def test_an_upscale_delay_of_an_hour_looks_worse_than_one_of_five_minutes() -> None:
    soon = evaluated("reactive")
    late = evaluated("reactive", replace(REACTIVE, upscale_delay_s=3600.0))
    assert late.attainment < soon.attainment - 0.003


def test_more_replicas_than_needed_cost_more_and_serve_more_in_time() -> None:
    lavish, tight = (
        evaluated("reactive", replace(REACTIVE, target_qps_per_replica=1.2)),
        evaluated("reactive"),
    )
    assert lavish.hours_over_ideal > tight.hours_over_ideal + 0.1
    assert lavish.attainment >= tight.attainment


def test_a_target_by_name_is_a_share_of_the_capacity() -> None:
    assert evaluated("reactive:0.8").sizes == evaluated("reactive").sizes  # 0.8 x 2.0 is its target
    assert evaluated("reactive:0.9").hours < evaluated("reactive:0.7").hours


def test_hours_of_a_fleet_that_never_moves_are_those_of_its_replicas() -> None:
    fixed = evaluated("reactive", replace(REACTIVE, min_replicas=20, max_replicas=20))
    assert fixed.hours == pytest.approx(20 * 24.0)
    assert (fixed.moves_per_day, fixed.attainment) == (0.0, 1.0)


def test_the_oracle_meets_the_slo_with_the_fewest_hours() -> None:
    known, reactive = evaluated("oracle"), evaluated("reactive")
    assert known.attainment >= 0.995
    assert 1.0 < known.hours_over_ideal < reactive.hours_over_ideal


def test_the_static_fleet_is_the_smallest_of_one_size_that_meets_the_slo() -> None:
    found = evaluated("static")
    size = round(found.hours / 24.0)
    assert (found.moves_per_day, found.attainment >= 0.995) == (0.0, True)
    one_less = evaluated("reactive", replace(REACTIVE, min_replicas=size - 1, max_replicas=size - 1))
    assert one_less.attainment < 0.995
    assert evaluated("oracle").hours < found.hours
    limited = evaluated("static", replace(REACTIVE, max_replicas=3))
    assert limited.hours == pytest.approx(3 * 24.0), "where no size does, the largest allowed"


def test_the_known_part_is_not_judged() -> None:
    on = trial(known_days=1.5)
    found = evaluated("reactive", on=on)
    assert found.days == pytest.approx(0.5)
    assert found.requests == sum(on.counts[2160 * 3 :])


@pytest.mark.long
@pytest.mark.parametrize("name", ["predictive", "predictive_blind"])
def test_a_predictive_scaler_meets_the_slo_without_a_target(name: str) -> None:
    found, reactive = evaluated(name), evaluated("reactive")
    assert found.attainment >= 0.99
    assert found.hours_over_ideal < reactive.hours_over_ideal


@pytest.mark.long
def test_where_a_replica_takes_long_the_forecast_serves_more_in_time_than_its_absence() -> None:
    slow = trial(days=3, known_days=2.0, cold_start_s=1200.0)
    assert evaluated("predictive", on=slow).attainment > evaluated("predictive_blind", on=slow).attainment


@pytest.mark.long
def test_the_order_of_what_is_asked_is_the_order_of_what_is_reached_and_paid() -> None:
    found = [evaluated("predictive", on=replace(trial(), attainment=asked)) for asked in (0.99, 0.995, 0.999)]
    assert sorted(one.attainment for one in found) == [one.attainment for one in found]
    assert sorted(one.hours for one in found) == [one.hours for one in found]


@pytest.mark.long
def test_the_same_trial_ends_the_same_way() -> None:
    assert evaluated("predictive").sizes == evaluated("predictive").sizes
