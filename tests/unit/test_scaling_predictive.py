"""The predictive scaler: ahead of demand, never below what the present needs, with headroom from an error budget."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.forecast.demand import DAY_MIN, Floats
from policies.goals import Goal, ScalingGoal, SloGoal
from policies.history import History, Load
from policies.model import CapacityType, Json, Observation, Offer, Zone
from policies.registry import reads_load, scaler_for
from policies.scaling.base import Outlook, Size
from policies.scaling.predictive import HEADROOM, LEAST_HEADROOM, Predictive, headroom_of
from tests.kit.histories import history_of

SLO = SloGoal(attainment=0.995, capacity_qps=2.0, cold_start_s=300.0)
GOAL = ScalingGoal(1, 100, slo=SLO)
KNOWN = Load(60.0, 0, known=True)


def history(requests: Floats, within: Floats | None = None, first: int = 0) -> History:
    return history_of(first, requests.tolist(), (requests if within is None else within).tolist())


def decide(
    told: History | None, memory: Json | None = None, goal: ScalingGoal = GOAL, load: Load = KNOWN
) -> Size:
    now = 60.0 * (told.end if told else 0)
    return Predictive().target(Observation(now, Goal(1, goal), (), (), load, history=told), memory or {})


def steady(minutes: int, qps: float = 16.0) -> Floats:
    return np.random.RandomState(0).poisson(60 * qps, minutes).astype(float)


# --- how many -----------------------------------------------------------------------------------------------


def test_a_goal_with_an_slo_gets_this_scaler_and_reads_the_load() -> None:
    assert isinstance(scaler_for(GOAL), Predictive)
    assert reads_load(GOAL)


def test_a_steady_load_gets_its_replicas_and_headroom() -> None:
    assert decide(history(steady(3 * DAY_MIN))).wanted in (9, 10)  # 8 carry the mean


def test_replicas_are_wanted_before_a_rise_that_comes_every_day() -> None:
    minutes = np.arange(3 * DAY_MIN)
    rate = 480.0 * np.interp(minutes % DAY_MIN, (0, 60, 480, 540, 1439), (4, 1, 1, 4, 4))
    series = np.random.RandomState(0).poisson(rate).astype(float)
    rising = 2 * DAY_MIN + 480
    assert decide(history(series[: rising - 60])).wanted <= 5  # 4 carry what comes
    assert decide(history(series[: rising + 2]), {"target": 5}).wanted >= 6
    blind = replace(GOAL, slo=replace(SLO, forecast=False))
    assert decide(history(series[: rising + 2]), {"target": 5}, blind).wanted == 5


@example([5e-324], 0)
@given(
    st.lists(st.one_of(st.just(math.nan), st.floats(0.0, 1e5)), min_size=1, max_size=400),
    st.integers(0, 120),
)
@settings(max_examples=60, deadline=None)
def test_the_present_demand_always_gets_its_replicas_and_the_limits_hold(
    series: list[float], target: int
) -> None:
    found = decide(history_of(0, series, series), {"target": target})
    assert 1 <= found.wanted <= 100
    if not math.isnan(series[-1]):
        assert found.wanted >= min(100, math.ceil(series[-1] / 120.0 - 1e-6))


def test_what_waits_gets_replicas_beside_what_comes() -> None:
    told = history(steady(300))
    plain, crowded = decide(told), decide(told, load=replace(KNOWN, queued=3000))
    assert crowded.wanted == plain.wanted + 5  # 3000 requests in 300 s


# --- ignorance ----------------------------------------------------------------------------------------------


def test_without_a_history_the_size_stays() -> None:
    assert decide(None, {"target": 7}).wanted == 7


def test_between_two_minutes_nothing_changes() -> None:
    told = history(steady(300))
    first = decide(told)
    again = decide(told, first.memory)
    assert (again.wanted, again.memory) == (first.wanted, first.memory)


def test_an_hour_without_reports_is_not_silence() -> None:
    series = steady(2 * DAY_MIN)
    size = decide(history(series))
    holed = np.concatenate((series, np.full(60, math.nan)))
    for end in range(2 * DAY_MIN + 1, 2 * DAY_MIN + 61):
        size = decide(history(holed).until(end), size.memory)
        assert size.wanted >= 9


def test_a_request_in_flight_wakes_a_service_that_sleeps() -> None:
    goal = replace(GOAL, min_replicas=0)
    silent = history(np.zeros(300))
    assert decide(silent, goal=goal).wanted == 0
    assert decide(silent, goal=goal, load=replace(KNOWN, in_flight=1)).wanted == 1


# --- tokens -------------------------------------------------------------------------------------------------


def lengths(requests: Floats, factor: Floats | float, within: Floats | None = None) -> History:
    """Requests with `factor` times 500 tokens of prompt and 200 of response."""
    met = requests if within is None else within
    tokens = (500.0 * requests * factor).tolist(), (200.0 * requests * factor).tolist()
    return history_of(0, requests.tolist(), met.tolist(), None, tokens)


def test_longer_requests_need_more_replicas_though_as_many_come() -> None:
    series = steady(3 * DAY_MIN)
    factor = np.where(np.arange(3 * DAY_MIN) < 3 * DAY_MIN - 30, 1.0, 1.5)
    usual, longer = decide(lengths(series, 1.0)), decide(lengths(series, factor))
    assert usual.wanted == decide(history(series)).wanted
    assert longer.wanted == pytest.approx(1.5 * usual.wanted, abs=1)
    assert longer.memory["seen"]["size"] == pytest.approx(1.5, rel=0.05)
    assert "of the usual size (each was 1.4" in longer.why
    assert "size" not in decide(history(series)).memory["seen"]


def test_what_waits_counts_by_its_work() -> None:
    told = lengths(steady(3 * DAY_MIN), np.repeat([1.0, 2.0], [3 * DAY_MIN - 60, 60]))
    plain, crowded = decide(told), decide(told, load=replace(KNOWN, queued=3000))
    assert crowded.wanted == pytest.approx(plain.wanted + 10, abs=1)  # twice 3000 requests in 300 s


def test_late_requests_spend_the_budget_by_their_work() -> None:
    series = np.full(600, 1000.0)
    late = np.where(np.arange(600) % 2, 990.0, 1000.0)
    heavy, light = (np.where(np.arange(600) // 5 % 2 == half, 1.8, 0.2) for half in (1, 0))
    late_in_heavy = np.where(np.arange(600) // 5 % 2, late, 1000.0)
    before = {"target": 8, "minute": 0, "spent": 0.0}
    spent = [
        decide(lengths(series, factor, late_in_heavy), before).memory["spent"] for factor in (heavy, light)
    ]
    assert spent[0] > spent[1]


def test_learned_weights_are_in_the_memory_and_stay_until_a_forecast_is_fitted() -> None:
    rng = np.random.RandomState(2)
    requests = np.full(2 * DAY_MIN, 1000.0)
    prompt, response = rng.uniform(200, 800, (2, 2 * DAY_MIN))
    told = history_of(0, requests, requests, None, ((requests * prompt), (requests * response)))
    memory: Json = {}
    seen: list[list[float]] = []
    for end in range(2 * DAY_MIN - 300, 2 * DAY_MIN + 1):
        running = 1e-4 * requests[end - 1] * (prompt[end - 1] + 3.0 * response[end - 1])
        size = decide(told.until(end), memory, load=replace(KNOWN, ongoing=running))
        memory = json.loads(json.dumps(size.memory))
        seen.append(memory["work"]["weights"])
    changes = [index for index, (one, other) in enumerate(pairwise(seen), 1) if one != other]
    assert changes
    assert not [index for index in changes if index % 60]
    assert seen[-1][2] / seen[-1][1] == pytest.approx(3.0, rel=0.15)


# --- a replica that was just launched ---------------------------------------------------------------------------


def test_what_was_launched_is_kept_until_it_could_serve() -> None:
    series = np.full(300, 600.0)
    series[270] = 1500.0  # a minute's luck
    slow = replace(GOAL, slo=replace(SLO, cold_start_s=1200.0, forecast=False, computes_forecast=False))
    sizes, memory = [], {"target": 6}
    for end in range(270, 300):
        size = decide(history(series).until(end), memory, slow)
        sizes.append(size.wanted)
        memory = dict(size.memory)
    assert sizes == [6, *[14] * 20, *[6] * 9]
    set_back = decide(history(series).until(288), {"target": 14, "launched": 900}, slow)
    assert set_back.wanted == 6, "a launch of the future is none"


# --- the error budget ---------------------------------------------------------------------------------------


def spent(late_share: float, minutes: int = 600) -> float:
    series = steady(minutes)
    told = history(series, series * (1.0 - late_share))
    return float(decide(told, {"target": 8, "minute": 0, "spent": 0.0}).memory["spent"])


def test_late_requests_raise_the_headroom_and_good_minutes_lower_it() -> None:
    assert headroom_of(spent(0.05)) > HEADROOM > headroom_of(spent(0.0)) >= LEAST_HEADROOM


def test_a_service_that_meets_its_slo_exactly_keeps_its_headroom() -> None:
    assert spent(0.005) == pytest.approx(0.0, abs=1e-6)


def test_a_disaster_costs_no_more_than_the_bound() -> None:
    assert headroom_of(spent(1.0)) == pytest.approx(HEADROOM + 0.27)


def test_minutes_of_unknown_quality_are_not_counted() -> None:
    series = steady(300)
    told = history(series, np.full(300, math.nan))
    assert decide(told, {"target": 8, "minute": 0, "spent": 0.5}).memory["spent"] == 0.5


def test_a_strict_slo_spends_its_budget_faster() -> None:
    series = steady(600)
    told, before = history(series, 0.99 * series), {"target": 8, "minute": 0, "spent": 0.0}
    strict = replace(GOAL, slo=replace(SLO, attainment=0.999))
    assert decide(told, before, strict).memory["spent"] > decide(told, before).memory["spent"]


# --- what placers receive ----------------------------------------------------------------------------------


def outlook(series: Floats, memory: Json | None = None, goal: ScalingGoal = GOAL) -> Outlook:
    found = decide(history(series), memory, goal).outlook
    assert found is not None
    return found


def test_a_steady_load_needs_all_then_and_hardly_more() -> None:
    size = decide(history(steady(3 * DAY_MIN)))
    assert size.outlook is not None
    assert size.outlook.then >= size.wanted - 1
    assert size.outlook.now in (8, 9)
    assert sum(size.outlook.later) == pytest.approx(1.0)
    assert size.outlook.later[0] > 0.9


def test_what_falls_every_evening_is_not_wanted_then() -> None:
    minutes = np.arange(3 * DAY_MIN)
    series = np.where(minutes % DAY_MIN < 1080, 1920.0, 240.0)  # 16 replicas, and 2 from 18 h on
    falling = series[: 2 * DAY_MIN + 1078]
    assert outlook(falling, {"target": 18}).then < outlook(series[: 2 * DAY_MIN + 900], {"target": 18}).then


def test_a_jump_that_headroom_does_not_carry_is_likely_when_it_came_before() -> None:
    minutes = np.arange(3 * DAY_MIN)
    series = np.where(minutes % DAY_MIN < 480, 480.0, 600.0)
    small = replace(GOAL, max_replicas=4)
    found = outlook(series[: 2 * DAY_MIN + 478], {"target": 4}, small)
    assert found.later == (1.0,)  # more are not allowed, so more are not wanted
    assert (found.now, found.then) == (4, 4)


@pytest.mark.parametrize(
    ("late_s", "goal", "expected"),
    [
        pytest.param(0.0, GOAL, True, id="the same minute again"),
        pytest.param(0.0, replace(GOAL, max_replicas=3), False, id="for another size"),
        pytest.param(241.0, GOAL, True, id="four minutes without a report"),
        pytest.param(300.0, GOAL, False, id="five minutes without a report"),
    ],
)
def test_an_outlook_is_remembered_until_it_is_stale(late_s: float, goal: ScalingGoal, expected: bool) -> None:
    told = history(steady(300))
    memory = decide(told).memory
    now = 60.0 * told.end + late_s
    found = Predictive().target(Observation(now, Goal(1, goal), (), (), KNOWN, history=told), memory)
    assert (found.outlook is not None) == expected
    assert found.wake_at == (60.0 * told.end + 300.0 if expected else None)


def test_a_minute_that_was_not_reported_has_no_outlook() -> None:
    series = steady(300)
    before = decide(history(series)).memory
    found = decide(history(np.append(series, math.nan)), before)
    assert found.outlook is None
    assert "outlook" not in found.memory


def test_only_a_forecast_that_acts_is_told() -> None:
    for slo in (replace(SLO, forecast=False), replace(SLO, forecast=False, computes_forecast=True)):
        assert decide(history(steady(300)), goal=replace(GOAL, slo=slo)).outlook is None


def test_spot_replicas_wanted_back_within_two_cold_starts_are_kept() -> None:
    minutes = np.arange(3 * DAY_MIN)
    series = np.where(minutes % 240 < 40, 240.0, 1920.0)  # 40 minutes of calm every 4 hours
    goal = replace(GOAL, slo=replace(SLO, cold_start_s=1500.0))
    calm = history(series[: 2 * DAY_MIN + 3])  # 37 minutes before it is over; two cold starts are 50
    at = 60.0 * calm.end
    kept = []
    for kind in CapacityType:
        offers = (Offer(Zone("c", "a", "a1"), "m", "L4", 1.0, kind, 1.0),)
        seen = Observation(at, Goal(1, goal), (), offers, KNOWN, history=calm)
        kept.append(Predictive().target(seen, {"target": 17}).wanted)
    assert kept[0] > kept[1]


def test_a_service_that_sleeps_wakes_one_cold_start_before_demand_begins() -> None:
    minutes = np.arange(2 * DAY_MIN)
    series = np.where((minutes % DAY_MIN >= 480) & (minutes % DAY_MIN < 1080), 300.0, 0.0)
    found = sizes(series[: DAY_MIN + 480], DAY_MIN + 440, replace(GOAL, min_replicas=0))
    asleep = [size for size in found if size == 0]
    assert len(asleep) == 34  # until 07:53
    assert found[34:] == [3] * 7  # in the 7 minutes before 8 h: a cold start and the two that are planned for


# --- movement -----------------------------------------------------------------------------------------------


def sizes(series: Floats, start: int, goal: ScalingGoal = GOAL) -> list[int]:
    whole = history(series)
    memory: Json = {}
    found: list[int] = []
    for end in range(start, len(series) + 1):
        size = decide(whole.until(end), memory, goal)
        memory = size.memory
        found.append(size.wanted)
    return found


@pytest.mark.parametrize(
    "factor", [pytest.param(2.0, id="doubles"), pytest.param(0.0, id="stops"), pytest.param(0.5, id="halves")]
)
def test_a_change_of_demand_is_followed_without_flapping(factor: float) -> None:
    start = DAY_MIN
    series = np.concatenate((steady(start), factor * steady(180)))
    found = sizes(series, start)
    moves = [after - before for before, after in pairwise(found) if after != before]
    turns = sum(a * b < 0 for a, b in pairwise(moves))
    assert turns <= 2 * 180 / 5  # two for each cold start
    assert found[-1] == pytest.approx(max(1, 9.5 * factor), abs=1.6)


# --- what it costs ------------------------------------------------------------------------------------------


def test_memory_is_small_and_json() -> None:
    memory = decide(history(steady(3000))).memory
    assert json.loads(json.dumps(memory)) == memory
    assert len(json.dumps(memory)) < 4096


def test_the_plan_is_a_function_of_the_history() -> None:
    """A controller that has just started decides like one that runs, from the same rows and memory."""
    told = history(steady(3000))
    memory = {"target": 8, "minute": 2990, "spent": 0.25}
    first = decide(told, memory)
    from policies.forecast import past

    past._fitted.cache_clear()
    assert decide(told, memory) == first


def test_a_minute_with_14_days_of_history_takes_a_few_milliseconds() -> None:
    told = history(steady(14 * DAY_MIN))
    decide(told)  # fits, once in six hours
    began = time.process_time()
    for _ in range(20):
        decide(told)
    assert (time.process_time() - began) / 20 < 0.02
