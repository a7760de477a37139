"""RiskHedge and money: trials that pay, what may be spent on them and on growth, and what a week costs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.dearer import setting_of
from policies.goals import ScalingGoal
from policies.model import Zone
from policies.placement import risk_budget, risk_growth, zone_backoff
from policies.placement.risk_budget import LOAN_EVERY_H, LOAN_H, SAVED_H, Means, aim, means
from policies.placement.risk_growth import NO_GROWTH, expected, partly, watched
from policies.placement.risk_hedge import TRIAL
from tests.unit.placement_world import PLENTY, SPOT, World, a_goal, both, of_kind
from tests.unit.test_placement_risk_hedge import (
    A1,
    A1_OD,
    HOUR,
    NOW,
    OFFERS,
    READY,
    decide,
    empty,
    held,
    kinds,
    knowing,
    replicas,
    zones,
)

DAY = 24 * HOUR
STAND_INS = replicas(*[READY] * 4, of=A1_OD, first=50)


def with_saved(usd: float, share: float, memory: dict[str, Any]) -> dict[str, Any]:
    return {**memory, "budget": {**memory["budget"], "saved": [usd, share, 0.0, NOW]}}


# --- trials ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "target", "expected_zones"),
    [
        pytest.param(knowing(), 0.999, {"a1"}, id="nothing is known of the zone"),
        pytest.param(knowing(empty(2.0)), 0.999, set(), id="it has just refused"),
        pytest.param(with_saved(-0.1, 0.0, knowing()), 0.999, set(), id="nothing is left to pay it from"),
        pytest.param(with_saved(0.1, 0.25, knowing()), 0.999, set(), id="too little is left to begin one"),
        pytest.param(knowing({"since": NOW, "lost": 20.0, "due": 0.1}), 0.99999, set(), id="no chance that it pays"),
    ],
)  # fmt: skip
def test_a_trial_beside_the_on_demand_replicas(
    memory: dict[str, Any], target: float, expected_zones: set[str]
) -> None:
    decided = decide(STAND_INS, memory, target=target, offers=(A1, A1_OD))
    tried = [place for place in decided.launches if place.offer.capacity_type is SPOT]
    assert {place.offer.zone.name for place in tried} == expected_zones
    assert all(place.why == TRIAL for place in tried)
    assert kinds(decided)[1] == 0
    assert not decided.ends, "the on-demand replicas stay: nothing is risked"
    assert len([note for note in decided.notes if "shows whether" in note]) == bool(expected_zones)


def test_a_trial_is_kept_while_it_pays_and_ends_when_nothing_is_left() -> None:
    live = (*STAND_INS, *replicas(READY, since=NOW - 300.0))
    memory = knowing(held(3.0))
    kept = decide(live, memory, target=0.999, offers=(A1, A1_OD))
    assert (kept.ends, kinds(kept)) == ([], (0, 0))
    assert "1.00 USD/h" in " ".join(kept.notes)
    broke = decide(live, with_saved(-0.1, 0.0, memory), target=0.999, offers=(A1, A1_OD))
    assert [end.replica_id for end in broke.ends] == [1]


def test_a_service_that_is_short_tries_nothing() -> None:
    assert zones(decide(STAND_INS[:3], knowing(), target=0.999, offers=(A1, A1_OD))) == {}


# --- the budget ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("even", "share"),
    [
        pytest.param([0.0, 0.0], 1.0, id="at first what is allowed"),
        pytest.param([0.0, 3.5 * DAY], 1.5, id="half a week's allowance left: half as much again"),
        pytest.param([0.0, 30 * DAY], risk_budget.MOST_AIM, id="a quiet month: twice"),
        pytest.param([0.01 * 7 * DAY, 3.5 * DAY], 0.5, id="overspent: half"),
        pytest.param([0.01 * DAY, DAY], 1.0, id="as allowed"),
    ],
)
def test_the_aim_makes_even_what_was_spent(even: list[float], share: float) -> None:
    budget = knowing()["budget"]
    assert aim({**budget, "even": [*even, NOW]}, 0.99, NOW) == pytest.approx(0.01 * share)
    assert aim(budget, 0.99, NOW) == pytest.approx(0.01), "a budget of an older release"
    assert aim(None, 0.99, NOW) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("saved", "hours", "expected_means"),
    [
        pytest.param(None, 0.0, Means(10 * LOAN_H, 1.0), id="a service begins with the advance"),
        pytest.param([0.0, 1.0, -5.0, NOW], 1.0, Means(-5.0 + 10 * LOAN_H / LOAN_EVERY_H, 0.0), id="an hour too dear: nothing is left"),
        pytest.param([0.0, 0.0, 5.0, NOW], 1.0, Means(5.0 + 10 * LOAN_H / LOAN_EVERY_H, 1.0), id="an hour that saved: all is hedged again"),
        pytest.param([-1.0, 0.0, 0.0, NOW], 168.0, Means(-1.0 + 10 * LOAN_H, 0.7619), id="a week later the advance is there again"),
        pytest.param([5 * LOAN_H, 0.4, 0.0, NOW], 0.0, Means(5 * LOAN_H, 0.4), id="a small change changes nothing"),
        pytest.param([0.0, 0.0, 100.0, NOW], 100.0, Means(10 * SAVED_H, 1.0), id="no more than that is put by"),
    ],
)  # fmt: skip
def test_trials_and_growth_are_paid_from_what_was_saved(
    saved: list[float] | None, hours: float, expected_means: Means
) -> None:
    budget = {} if saved is None else {"saved": saved}
    assert means(budget, 10.0, NOW + hours * HOUR) == pytest.approx(expected_means, rel=1e-3)


@pytest.mark.parametrize(("loans", "asked"), [(1.0, True), (-0.9, True), (-1.1, False)])
def test_no_spot_is_requested_while_fleets_have_come_to_more_than_the_advance(
    loans: float, asked: bool
) -> None:
    calm = knowing(*[held(90.0)] * 3)
    memory = with_saved(loans * LOAN_H * 4 * A1_OD.price_usd_hour, 0.0, calm)
    assert (kinds(decide(replicas(*[READY] * 2), memory))[0] > 0) == asked


def test_where_no_on_demand_replica_can_be_had_spot_is_requested_whatever_it_has_come_to() -> None:
    spent = with_saved(-2.0 * LOAN_H * 4 * A1_OD.price_usd_hour, 0.0, knowing(*[held(90.0)] * 3))
    live = replicas(*[READY] * 2)
    assert kinds(decide(live, spent))[0] == 0
    assert kinds(decide(live, spent, fallback=False))[0] > 0
    assert kinds(decide(live, spent, offers=tuple(one for one in OFFERS if one.capacity_type is SPOT)))[0] > 0
    refused = [one for one in OFFERS if one.capacity_type is not SPOT]
    blocks = {
        key: {"until": NOW + HOUR, "failures": 1.0} for one in refused for key in zone_backoff._keys(one)[:1]
    }
    assert kinds(decide(live, {**spent, "blocks": blocks}))[0] > 0


def test_growth_is_no_debt_of_losses() -> None:
    live = replicas(*[READY] * 4)
    calm = knowing(*[held(90.0)] * 3)
    first = {**calm, "budget": decide(live, calm).memory["budget"]}
    grown = decide(live, first, wanted=6).memory["budget"]
    lost = decide(live[:3], first).memory["budget"]
    assert (grown["grew"], lost["grew"]) == (True, False)
    aims = [aim(budget, 0.995, NOW + 3600.0) for budget in (grown, lost)]
    assert aims[0] > 0.005 > aims[1]


def test_nothing_is_saved_while_nothing_is_wanted() -> None:
    memory = with_saved(1.0, 1.0, knowing())
    memory["budget"]["saved"][2] = 9.0
    asleep = decide((), memory, wanted=0, now=NOW + HOUR).memory["budget"]
    assert asleep["saved"][2:] == [0.0, NOW + HOUR]


# --- growth ----------------------------------------------------------------------------------------------------------


def sizes(every_h: Callable[[random.Random], float], of: Callable[[int], int], count: int) -> dict[str, Any]:
    rng, at, memory = random.Random(3), 0.0, watched(None, of(0), 0.0)
    for number in range(1, count):
        at += every_h(rng) * HOUR
        memory = watched(memory, of(number), at)
    assert json.loads(json.dumps(memory)) == memory
    return {**memory, "now": at}


RANDOM = random.Random(5)
LEVELS = [RANDOM.randint(2, 6) for _ in range(80)]
IRREGULAR = sizes(lambda rng: rng.expovariate(1 / 5.0), LEVELS.__getitem__, 80)
BY_DAY = sizes(lambda _: 12.0, lambda number: 2 + 2 * (number % 2), 40)


def grows(memory: dict[str, Any], wanted: int, at: float) -> float:
    return 1.0 - expected(memory, wanted, at, 0.06)[0][1]


def test_steps_without_a_period_are_expected_at_any_hour() -> None:
    """A new size every 5 h on average, of 2 to 6: from 2 nearly each is larger, from 6 none."""
    hours = [IRREGULAR["now"] + hour * HOUR for hour in range(24)]
    from_2, from_4 = ([grows(IRREGULAR, size, at) for at in hours] for size in (2, 4))
    assert all(0.005 < p < 0.02 for p in from_2)
    assert max(from_2) < 1.2 * min(from_2)
    assert max(from_4) < min(from_2)
    assert max(grows(IRREGULAR, 6, at) for at in hours) < 0.001
    chances = dict(expected(IRREGULAR, 2, hours[0], 0.06))
    assert sorted(chances) == [0, 1, 2, 3, 4], "steps to three times the size are as likely as they were"
    assert chances[4] > 0.1 * (1.0 - chances[0])


def test_steps_with_a_period_are_expected_at_their_hour() -> None:
    begins = BY_DAY["now"] + DAY
    assert grows(BY_DAY, 2, begins) > 20.0 * grows(BY_DAY, 2, begins + 6 * HOUR)


def test_steps_of_an_older_release_may_lead_anywhere() -> None:
    memory = {"size": 4, "from": NOW - DAY, "steps": [[NOW - 9 * HOUR, 2]]}
    assert [more for more, _ in expected(memory, 4, NOW, 0.06)] == [0, 2]


def test_a_part_of_growth() -> None:
    growth = ((0, 0.9), (2, 0.1))
    assert partly(growth, 1.0) == growth
    assert partly(growth, 0.5) == ((0, 0.95), (2, 0.05))
    assert partly(growth, 0.0) == NO_GROWTH
    assert risk_growth.partly(NO_GROWTH, 0.5) == NO_GROWTH


# --- weeks -----------------------------------------------------------------------------------------------------------

TICK_S = 180.0
DAY_TICKS = round(DAY / TICK_S)


def cost(world: World, ticks: int, size: Callable[[int], int]) -> float:
    """Run a world, and return what it paid relative to the wanted number on demand, at 3 USD/h."""
    paid = plain = 0.0
    for _ in range(ticks):
        wanted = size(world.ticks)
        world.goal = replace(world.goal, scaling=ScalingGoal(wanted, wanted))
        world.tick()
        paid += sum(replica.offer.price_usd_hour for replica in world.fleet.values())
        plain += 3.0 * wanted
    return paid / plain


def a_world(capacity: Callable[[Zone, int], int], target: float = 0.999) -> World:
    goal = a_goal(
        4,
        placer="risk_hedge",
        num_overprovision=4,
        dynamic_ondemand_fallback=True,
        availability_target=target,
    )
    return World(goal, both("c/a/a1", "c/a/a2", "c/a/a3"), capacity, tick_s=TICK_S)


@pytest.mark.long
def test_a_market_that_loses_nothing_is_on_spot_within_two_days() -> None:
    world = a_world(lambda *_: PLENTY)
    assert cost(world, DAY_TICKS, lambda _: 4) < 1.1
    cost(world, DAY_TICKS, lambda _: 4)
    assert cost(world, DAY_TICKS // 2, lambda _: 4) < 0.55
    assert of_kind(world.counted, SPOT)


@pytest.mark.long
@pytest.mark.parametrize("moving", [False, True])
def test_a_market_that_loses_all_every_hour_is_not_dearer_than_on_demand(moving: bool) -> None:
    levels = [random.Random(7 + number // 80).randint(2, 6) for number in range(8 * DAY_TICKS)]
    world = a_world(lambda _, tick: PLENTY if tick % 20 < 17 else 0)
    plain = World(world.goal, world.offers[3:], world.capacity, tick_s=TICK_S)
    paid, on_demand = (
        cost(one, 3 * DAY_TICKS, lambda tick: levels[tick] if moving else 4) for one in (world, plain)
    )
    assert paid < on_demand * (1.0 + 2.0 * LOAN_H / 72.0), "a quarter of 1 % of a week is in advance"


def test_a_seed_is_one_market() -> None:
    (one, job), (same, _) = setting_of(7, 1.0), setting_of(7, 1.0)
    assert (one.trace, one.arrivals, job.seed) == (same.trace, same.arrivals, 7)
    assert len({setting_of(seed, 0.2)[0].arrivals is None for seed in range(9)}) == 2
