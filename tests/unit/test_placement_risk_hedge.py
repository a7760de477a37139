"""RiskHedge: what it buys for which risk, what it learns of a zone, the error budget, and the laws of a placer."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.goals import PlacementGoal, ScalingGoal
from policies.model import (
    Drained,
    Event,
    FailureKind,
    Launched,
    LaunchFailed,
    NodeLost,
    Observation,
    Offer,
    Plan,
    Preempted,
    PreemptionNotice,
    ProbePassed,
    Replica,
    ReplicaState,
    Terminated,
    Zone,
)
from policies.placement import risk_market, risk_odds, risk_search, zone_backoff
from policies.placement.base import Decision, View
from policies.placement.risk_budget import MOST_OVERDRAWN, STEER_S
from policies.placement.risk_hedge import LOOK_AGAIN_S, MOST_EXTRA, RiskHedge
from policies.placement.risk_market import (
    FIRST_RETRY_S,
    FIRST_SIGHT_H,
    FLOOR_PER_HOUR,
    HELD_PATIENCE,
    LONGEST_RETRY_S,
    MarketModel,
)
from policies.placement.risk_odds import Odds, Terms, best_hedge
from policies.placement.risk_search import Site
from tests.clouds.schedules import examples
from tests.unit.placement_world import ON_DEMAND, PLENTY, SPOT, S, World, a_goal, both, of_kind

HOUR = 3600.0
NOW = 300 * HOUR
ZONES = ("c/a/a1", "c/b/b1", "x/u/u1")
OFFERS = both(*ZONES)
A1, B1, U1, A1_OD = OFFERS[:4]
MARKETS = [zone_backoff.market(offer) for offer in OFFERS[:3]]
MARKET_A1 = MARKETS[0]
READY, STARTING, ASKED, ACCEPTED = S.READY, S.STARTING, S.REQUESTED, S.PROVISIONING
POLICY = RiskHedge()


def replicas(
    *states: ReplicaState, of: Offer | Sequence[Offer] = A1, first: int = 1, since: float = NOW - 600.0
) -> tuple[Replica, ...]:
    offers = (of,) if isinstance(of, Offer) else of
    return tuple(
        Replica(first + i, 1, offers[i % len(offers)], state, since, since, launched_at=since)
        for i, state in enumerate(states)
    )


def held(age_h: float, **more: float) -> dict[str, float]:
    """The record of a zone in which replicas are held since its last loss."""
    since = NOW - age_h * HOUR
    return {"since": since, "held_from": since, "lost": 0.0, "due": 0.0, **more}


def empty(for_h: float, asked_h_ago: float = 0.0) -> dict[str, float]:
    since = NOW - for_h * HOUR
    return {"since": since, "empty_from": since, "empty_at": NOW - asked_h_ago * HOUR}


KEPT: Any = {"began": NOW - 90 * HOUR, "down": 0.0, "days": [], "outages": 0, "window": 213.0}


def knowing(*records: dict[str, float] | None, **more: Any) -> dict[str, Any]:
    """A memory of a service that has been complete before, with its budget even."""
    budget = {
        "spent": 0.0,
        "at": NOW,
        "rate": 0.0,
        "short": 0.0,
        "due": 0.0,
        "seen": [False, 0.005, 4],
        **KEPT,
    }
    zones = {market: record for market, record in zip(MARKETS, records, strict=False) if record is not None}
    return {"zones": zones, "budget": budget, **more}


def decide(
    live: tuple[Replica, ...],
    memory: dict[str, Any],
    *,
    wanted: int = 4,
    target: float | None = 0.995,
    fallback: bool = True,
    base: int = 0,
    others: tuple[Replica, ...] = (),
    offers: tuple[Offer, ...] = OFFERS,
    limit: int = 99,
    now: float = NOW,
) -> Decision:
    goal = PlacementGoal("risk_hedge", 0, fallback, base, target)
    return POLICY.decide(View(now, wanted, goal, live, others, offers, limit), memory)


def kinds(decided: Decision) -> tuple[int, int]:
    """Launches: (spot, on-demand)."""
    found = Counter(place.offer.capacity_type for place in decided.launches)
    return found[SPOT], found[ON_DEMAND]


def zones(decided: Decision) -> dict[str, int]:
    return dict(Counter(p.offer.zone.name for p in decided.launches if p.offer.capacity_type is SPOT))


DRY = knowing(empty(2.0), empty(3.0), empty(1.0))
EIGHT_HOURS_DRY = knowing(*[empty(8.0)] * 3)


# --- on demand -------------------------------------------------------------------------------------------------


def hazard(market: MarketModel, offers: Sequence[Offer]) -> risk_market.Hazard:
    """That of the first of these offers' markets."""
    markets = [zone_backoff.market(offer) for offer in offers]
    return market.hazards(markets, [risk_market.group_of(offer) for offer in offers], 0.05, 2.0)[0]


@pytest.mark.parametrize(
    ("live", "memory", "options", "expected"),
    [
        pytest.param(replicas(*[READY] * 4), knowing(held(0.1), empty(9), empty(9)), {}, 4, id="a zone that has just lost some: all of it is hedged"),
        pytest.param(replicas(*[READY] * 4), knowing(held(1.0), empty(9), empty(9)), {"target": 0.9}, 0, id="the same for an easy target: none"),
        pytest.param(replicas(*[READY] * 4), knowing(held(60.0), empty(9), empty(9)), {}, 0, id="a zone that has held for days: none"),
        pytest.param(replicas(*[READY] * 4), knowing(held(60.0), empty(9), empty(9)), {"target": 0.9999}, 4, id="the same for a hard target: hedged all the same"),
        pytest.param((), DRY, {}, 4, id="a dry market: the wanted number"),
        pytest.param((), DRY, {"target": 0.5}, 4, id="a dry market: being down is not cheaper, whatever the target"),
        pytest.param((), DRY, {"fallback": False}, 0, id="a dry market without fallback: nothing"),
        pytest.param((), DRY, {"base": 2, "fallback": False}, 2, id="a base without fallback"),
        pytest.param(replicas(*[READY] * 4), knowing(held(60.0)), {"base": 2}, 2, id="the base is there however old the zones"),
        pytest.param((), DRY, {"offers": OFFERS[:3]}, 0, id="nothing on offer on demand"),
        pytest.param((), {}, {"offers": OFFERS[3:]}, 4, id="nothing on offer on spot"),
        pytest.param(replicas(*[ACCEPTED] * 4, since=NOW), knowing(held(60.0)), {}, 0, id="accepted spot replicas start as fast as on-demand ones"),
        pytest.param(replicas(*[ASKED] * 4, since=NOW), knowing(held(60.0)), {}, 4, id="while the service is short, what was only asked for does not count"),
        pytest.param(replicas(*[ASKED] * 4, since=NOW), {}, {}, 0, id="while it comes up for the first time, it does"),
    ],
)  # fmt: skip
def test_on_demand_replicas(
    live: tuple[Replica, ...], memory: dict[str, Any], options: dict[str, Any], expected: int
) -> None:
    assert kinds(decide(live, memory, limit=99, **options))[1] == expected


def test_on_demand_is_let_go_when_the_spot_replicas_are_old_enough() -> None:
    live = replicas(*[READY] * 4) + replicas(*[READY] * 4, of=A1_OD, first=50)
    young, old = (decide(live, knowing(held(age_h), empty(9), empty(9))) for age_h in (0.1, 60.0))
    assert not young.ends
    assert {end.replica_id for end in old.ends} == {50, 51, 52, 53}


@pytest.mark.parametrize(
    ("started_s_ago", "ends"),
    [
        pytest.param(60.0, set(), id="on demand is ready first: it bridges the gap"),
        pytest.param(0.0, {50, 51, 52, 53}, id="on demand would be ready no sooner than spot"),
    ],
)
def test_an_on_demand_replica_that_starts_is_kept_if_it_is_ready_before_its_better(
    started_s_ago: float, ends: set[int]
) -> None:
    spot = replicas(*[ACCEPTED] * 4, since=NOW)
    bridge = replicas(*[ACCEPTED] * 4, of=A1_OD, first=50, since=NOW - started_s_ago)
    decided = decide(spot + bridge, knowing(held(60.0), empty(9), empty(9)))
    assert {end.replica_id for end in decided.ends} == ends


def test_a_service_that_is_short_gets_no_shorter() -> None:
    """It has grown to four, three serve on demand, two spot replicas start: nothing could make it complete."""
    live = replicas(ACCEPTED, ACCEPTED, since=NOW) + replicas(*[READY] * 3, of=A1_OD, first=50)
    assert not decide(live, knowing(held(90.0), empty(9), empty(9)), wanted=5).ends


# --- on spot ---------------------------------------------------------------------------------------------------


def test_a_new_service_spreads_over_zones_and_takes_no_more_than_it_may() -> None:
    decided = decide((), {})
    assert sum(zones(decided).values()) >= 4
    assert len(zones(decided)) >= 2
    assert kinds(decided)[0] <= 4 + MOST_EXTRA


def test_a_zone_that_was_empty_gets_one_replica_on_trial_and_the_rest_when_it_took_that() -> None:
    stand_ins = replicas(*[READY] * 4, of=A1_OD, first=50)
    memory = knowing(*[empty(2.0, asked_h_ago=1.1)] * 3)
    first = decide(stand_ins, memory, offers=(A1, A1_OD), target=0.99)
    assert zones(first) == {"a1": 1}
    trial = replicas(ASKED, since=NOW)
    assert kinds(decide(stand_ins + trial, memory, offers=(A1, A1_OD), target=0.99)) == (0, 0), (
        "its answer is waited for"
    )
    accepted = POLICY.learn(memory, [Launched(1, "i")], {1: trial[0]}, NOW)
    then = decide(stand_ins + replicas(ACCEPTED, since=NOW), dict(accepted), offers=(A1, A1_OD), target=0.99)
    assert zones(then) == {"a1": 3}


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        pytest.param(
            knowing(empty(8.0), empty(8.0), empty(8.0)), {}, id="all have just refused: none is asked"
        ),
        pytest.param(
            knowing(empty(8.0, 0.5), empty(8.0, 4.1), empty(8.0)), {"b1": 1}, id="four hours later one is"
        ),
    ],
)
def test_zones_without_room_are_left_alone_for_a_while(
    memory: dict[str, Any], expected: dict[str, int]
) -> None:
    assert zones(decide(replicas(*[READY] * 4, of=A1_OD, first=50), memory)) == expected


def test_a_fleet_in_old_zones_is_left_as_it_is() -> None:
    decided = decide(replicas(*[READY] * 4), knowing(held(90.0), held(1.0), None))
    assert not decided.launches
    assert not decided.ends


def test_replicas_beyond_what_is_worth_its_price_end_and_none_that_is_needed_does() -> None:
    live = replicas(*[READY] * 8, of=(A1, B1))
    decided = decide(live, knowing(held(90.0), held(90.0)))
    assert 1 <= len(decided.ends) <= 4
    assert not decided.launches
    left = tuple(r for r in live if r.id not in {end.replica_id for end in decided.ends})
    again = decide(left, knowing(held(90.0), held(90.0)))
    assert not again.ends
    assert not again.launches


@pytest.mark.parametrize(
    ("refused_s_ago", "target", "ended"),
    [
        pytest.param(0.0, 0.995, 1, id="its zone takes no second one, and it alone replaces none on demand"),
        pytest.param(0.0, 0.9, 0, id="for an easy target it does replace one"),
        pytest.param(HELD_PATIENCE * FIRST_RETRY_S - 60.0, 0.995, 0, id="in a minute its zone may take more"),
    ],
)
def test_a_replica_on_trial_does_not_finish_its_start_for_nothing(
    refused_s_ago: float, target: float, ended: int
) -> None:
    refused = NOW - refused_s_ago
    alone = {**held(0.1), "empty_from": refused, "empty_at": refused}
    live = replicas(*[READY] * 4, of=A1_OD, first=50) + replicas(STARTING, since=NOW - 90.0)
    memory = knowing(alone, empty(1.0), empty(1.0))
    memory["budget"]["saved"] = [-1.0, 0.0, 0.0, NOW]  # nothing to pay a trial for knowledge from
    decided = decide(live, memory, target=target)
    assert len([end for end in decided.ends if end.replica_id == 1]) == ended


def test_a_cheaper_zone_wins_among_equals() -> None:
    offers = (replace(A1, price_usd_hour=1.0), replace(B1, price_usd_hour=0.5), A1_OD)
    memory = knowing(held(50.0), held(50.0))
    live = replicas(*[READY] * 2, of=offers[:2])
    assert zones(decide(live, memory, offers=offers, wanted=3, target=0.95)) == {"b1": 1}


def test_an_empty_neighbour_makes_a_zone_riskier() -> None:
    """a1 and a2 are of one region. The same zone at the same age is hedged when a2 is known to be empty."""
    neighbours = [A1, replace(A1, zone=Zone("c", "a", "a2"))]
    rates = []
    for a2 in (held(5.0), empty(5.0)):
        market = MarketModel(
            {"zones": dict(zip(map(zone_backoff.market, neighbours), (held(5.0), a2), strict=True))}, NOW
        )
        rates.append(hazard(market, neighbours).now)
    assert rates[1] > 1.5 * rates[0]


# --- scaling, rollout --------------------------------------------------------------------------------------------


def test_nothing_wanted_ends_everything() -> None:
    live = replicas(*[READY] * 3, STARTING) + replicas(READY, of=A1_OD, first=50)
    decided = decide(live, knowing(held(5.0)), wanted=0)
    assert {end.replica_id for end in decided.ends} == {1, 2, 3, 4, 50}
    assert not decided.launches
    assert decided.target == 0
    assert decided.wake_at is None


def test_a_service_that_shrinks_lets_the_surplus_go() -> None:
    decided = decide(replicas(*[READY] * 12, of=(A1, B1, U1)), knowing(*[held(50.0)] * 3), wanted=2)
    assert len(decided.ends) >= 12 - 2 - MOST_EXTRA


def test_while_a_version_takes_over_nothing_on_demand_ends_and_the_old_ones_serve() -> None:
    old = replicas(*[READY] * 4, first=80)
    new = replicas(READY, of=A1_OD, first=50)
    decided = decide(new, knowing(held(60.0), held(60.0), held(60.0)), others=old, limit=1)
    assert not decided.ends
    assert kinds(decided) == (1, 0)


# --- learning ----------------------------------------------------------------------------------------------------


def by_id(*some: Replica) -> dict[int, Replica]:
    return {replica.id: replica for replica in some}


def learned(
    memory: dict[str, Any], *events: Event, live: Sequence[Replica], now: float = NOW
) -> dict[str, Any]:
    after = POLICY.learn(memory, events, by_id(*live), now)
    assert json.loads(json.dumps(after)) == after
    return dict(after)


@pytest.mark.parametrize(
    "event",
    [Preempted(1), Preempted(1, lost=True), PreemptionNotice(1, NOW + 120.0), NodeLost(1)],
    ids=["preempted", "lost", "noticed", "a node lost"],
)
def test_a_loss_makes_the_zone_young_and_counts_once(event: Event) -> None:
    live = replicas(READY, READY)
    record = learned(knowing(held(40.0)), event, live=live)["zones"][MARKET_A1]
    assert record["since"] == record["held_from"] == record["empty_at"] == NOW
    assert record["lost"] == 1.0
    assert record["due"] == pytest.approx(math.log(40.7 / 0.7) + 40 * FLOOR_PER_HOUR)


def test_several_losses_of_one_moment_are_one() -> None:
    live = replicas(*[READY] * 4)
    events = [Preempted(1), Preempted(2), Preempted(3), Preempted(4)]
    after = learned(knowing(held(40.0)), *events, live=live)
    assert after["zones"][MARKET_A1]["lost"] == 1.0
    assert "held_from" not in after["zones"][MARKET_A1]
    assert after["whole"][0] > after["whole"][1]
    some = learned(knowing(held(40.0)), *events[:2], live=live)
    assert some["whole"][0] < some["whole"][1]


def test_a_noticed_replica_is_not_lost_twice() -> None:
    noticed, beside = replicas(S.DRAINING, READY)
    live = [replace(noticed, preempt_at=NOW + 60.0), beside]
    assert learned(knowing(held(1.0)), Preempted(1), live=live)["zones"] == knowing(held(1.0))["zones"]


def test_a_refusal_is_no_loss() -> None:
    after = learned(knowing(held(5.0)), LaunchFailed(9, FailureKind.CAPACITY), live=replicas(ASKED, first=9))
    record = after["zones"][MARKET_A1]
    assert record["lost"] == 0.0
    assert record["since"] == NOW - 5 * HOUR
    assert record["empty_from"] == record["empty_at"] == NOW


def test_quota_closes_a_region_and_teaches_nothing_about_its_capacity() -> None:
    event = LaunchFailed(9, FailureKind.QUOTA, retry_at=NOW + 900.0)
    after = learned(knowing(held(5.0)), event, live=replicas(ASKED, first=9))
    assert after["zones"] == knowing(held(5.0))["zones"]
    assert "a1" not in zones(decide((), after))


def test_a_zone_is_as_old_as_it_can_be_when_it_is_entered() -> None:
    asked = replicas(ASKED)
    ages = [
        (NOW - learned(knowing(record), Launched(1, "i"), live=asked)["zones"][MARKET_A1]["since"]) / HOUR
        for record in (None, empty(9.0, asked_h_ago=0.1), empty(9.0, asked_h_ago=90.0))
    ]
    assert ages == pytest.approx([FIRST_SIGHT_H, 0.05, FIRST_SIGHT_H])


def test_leaving_a_zone_closes_its_account_and_says_nothing_against_it() -> None:
    leaving = [replace(r, state=S.TERMINATING) for r in replicas(READY)]
    record = learned(knowing(held(5.0)), Terminated(1), live=leaving)["zones"][MARKET_A1]
    assert "held_from" not in record
    assert "empty_at" not in record
    assert record["due"] > 0.0
    again = learned(
        {"zones": {MARKET_A1: record}}, Launched(2, "i"), live=replicas(ASKED, first=2), now=NOW + HOUR
    )
    assert again["zones"][MARKET_A1]["since"] == NOW - 4 * HOUR, "as old as it was known to be"


@pytest.mark.parametrize(
    ("record", "wait_s"),
    [
        pytest.param(held(5.0), None, id="it had room: it may be asked at once"),
        pytest.param(
            held(5.0, empty_from=NOW - 60.0, empty_at=NOW - 60.0), FIRST_RETRY_S - 60.0, id="it was full"
        ),
        pytest.param(
            held(5.0, empty_from=NOW - 2 * HOUR, empty_at=NOW), 2 * HOUR, id="it had been full for long"
        ),
    ],
)
def test_a_zone_that_is_left_has_no_more_room_than_it_had(
    record: dict[str, float], wait_s: float | None
) -> None:
    leaving = [replace(r, state=S.DRAINING) for r in replicas(READY)]
    after = learned(knowing(record), Drained(1), live=leaving)
    retry_at = MarketModel(after, NOW).retry_at(MARKET_A1)
    assert retry_at == (None if wait_s is None else NOW + wait_s)


def test_the_start_time_is_learned_for_each_kind_and_for_on_demand() -> None:
    spot, on_demand = replicas(STARTING, since=NOW - 400.0), replicas(STARTING, of=A1_OD, since=NOW - 90.0)
    a100 = replace(A1, accelerator="A100")
    once = learned({}, ProbePassed(1), live=spot)
    assert [MarketModel(once, NOW).start_s(offer) for offer in (A1, A1_OD, a100)] == [400.0] * 3, (
        "nothing else is known"
    )
    both_known = learned(once, ProbePassed(1), live=on_demand)
    assert [MarketModel(both_known, NOW).start_s(offer) for offer in (A1, A1_OD, a100)] == [
        400.0,
        90.0,
        400.0,
    ]
    again = learned(both_known, ProbePassed(1), live=replicas(STARTING, since=NOW - 200.0))
    assert 200.0 < MarketModel(again, NOW).start_s(A1) < 400.0


@pytest.mark.parametrize(
    ("lasted_s", "is_held", "wait_s"),
    [
        (0.0, False, FIRST_RETRY_S),
        (1200.0, False, 1200.0),
        (90 * HOUR, False, LONGEST_RETRY_S),
        (0.0, True, HELD_PATIENCE * FIRST_RETRY_S),
        (90 * HOUR, True, HELD_PATIENCE * LONGEST_RETRY_S),
    ],
)
def test_the_longer_a_zone_had_no_room_the_later_it_is_asked(
    lasted_s: float, is_held: bool, wait_s: float
) -> None:
    record = {"empty_from": NOW - lasted_s, "empty_at": NOW, **({"held_from": NOW - HOUR} if is_held else {})}
    assert MarketModel({"zones": {MARKET_A1: record}}, NOW).retry_at(MARKET_A1) == NOW + wait_s


def test_a_zone_that_fails_more_than_the_law_says_is_trusted_less() -> None:
    rates = []
    for lost, due in ((0.0, 15.0), (0.0, 0.0), (15.0, 0.0)):
        market = MarketModel({"zones": {MARKET_A1: held(5.0, lost=lost, due=due)}}, NOW)
        rates.append(hazard(market, [A1]).now)
    assert rates[0] < rates[1] < rates[2]


def test_the_rate_of_loss_falls_with_age_and_never_to_nothing() -> None:
    rates = [
        hazard(MarketModel({"zones": {MARKET_A1: held(age_h)}}, NOW), [A1]).now
        for age_h in (0.0, 1.0, 10.0, 100.0)
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 0.0


# --- the error budget --------------------------------------------------------------------------------------------

CALM = knowing(held(90.0), held(90.0), held(90.0))


def budget_after(
    memory: dict[str, Any], live: tuple[Replica, ...], now: float = NOW, **more: Any
) -> dict[str, Any]:
    return dict(decide(live, memory, now=now, **more).memory["budget"])


def test_the_budget_begins_when_the_service_is_first_complete() -> None:
    assert "budget" not in decide(replicas(*[READY] * 3), {}).memory
    begun = budget_after({}, replicas(*[READY] * 4))
    assert (begun["spent"], begun["at"], begun["short"], begun["due"]) == (0.0, NOW, 0.0, 0.0)


@pytest.mark.parametrize(
    ("age_h", "target", "rises"),
    [
        pytest.param(0.05, 0.999, True, id="a risk that is too high: the budget is spent"),
        pytest.param(500.0, 0.9, False, id="a risk that is lower than need be: it is saved"),
    ],
)
def test_the_budget_follows_the_predicted_shortfall(age_h: float, target: float, rises: bool) -> None:
    """Without fallback nothing can be bought on demand, so the prediction stands."""
    live = replicas(*[READY] * 4)
    memory = {**knowing(held(age_h), empty(9), empty(9)), "budget": None}
    rate = budget_after({k: v for k, v in memory.items() if v}, live, target=target, fallback=False)["rate"]
    assert (rate > 0.0) == rises
    assert rate >= -1.0 / STEER_S


def test_the_budget_is_written_when_the_fleet_changes_and_hourly() -> None:
    live = replicas(*[READY] * 4, of=(A1, B1))
    first = {**CALM, "budget": budget_after(CALM, live)}
    for later_s, same in ((0.0, True), (3599.0, True), (3600.0, False)):
        assert (budget_after(first, live, NOW + later_s) == first["budget"]) == same
    assert budget_after(first, live[:3], NOW + 60.0)["seen"][0] is True, "one is lost"


def test_what_was_predicted_is_corrected_by_what_came_true() -> None:
    live = replicas(*[READY] * 4, of=(A1, B1))
    rates = []
    for short_s in (0.0, 3600.0, 36_000.0):
        budget = {
            "spent": 0.0,
            "at": NOW - 7200.0,
            "rate": 0.0,
            **KEPT,
            "short": short_s,
            "due": 3600.0,
            "seen": [False, 0.0],
        }
        rates.append(budget_after({**CALM, "budget": budget}, live)["rate"])
    assert rates[0] < rates[1] < rates[2]


def test_time_that_a_service_is_short_is_counted_growth_included() -> None:
    live = replicas(*[READY] * 4)
    first = {**CALM, "budget": budget_after(CALM, live)}
    grown = {**CALM, "budget": budget_after(first, live, wanted=6)}
    assert budget_after(grown, replicas(*[READY] * 6), NOW + 200.0, wanted=6)["short"] == pytest.approx(
        200.0, rel=1e-3
    )


def test_an_hour_of_nothing_wanted_is_no_hour_of_the_budget() -> None:
    begun = {**CALM, "budget": budget_after(CALM, replicas(*[READY] * 4))}
    asleep = decide((), begun, wanted=0).memory
    assert decide((), dict(asleep), wanted=0, now=NOW + 9 * HOUR).memory == asleep
    awake = budget_after(dict(asleep), replicas(*[READY] * 4), NOW + 9 * HOUR)
    assert (awake["spent"], awake["due"]) == (
        asleep["budget"]["spent"],
        pytest.approx(asleep["budget"]["due"], rel=0.01),
    )


def test_a_memory_of_an_older_release_is_of_use() -> None:
    old = {
        "zones": {"c/a/a1": held(90.0), "c/b/b1": empty(9), "x/u/u1": empty(9)},
        "budget": {"spent": 2.0, "at": NOW, "rate": -1e-6, "met": 4},
        "start_s": 231.0,
    }
    live = replicas(*[READY] * 4)
    decided = decide(live, old)
    assert not decided.launches, "the age of the zone is known still"
    assert decided.memory["budget"]["spent"] == 0.0
    assert learned(old, Preempted(1), live=live)["zones"][MARKET_A1]["due"] > 4.0


def test_an_overdrawn_budget_buys_more_and_a_saved_one_less() -> None:
    live = replicas(*[READY] * 4)
    bought = []
    for spent in (-MOST_OVERDRAWN, 0.0, MOST_OVERDRAWN):
        memory = knowing(held(6.0), empty(9), empty(9))
        memory["budget"] |= {"spent": spent}
        bought.append(kinds(decide(live, memory))[1])
    assert bought[0] < bought[2]
    assert bought == sorted(bought)


# --- odds and search ---------------------------------------------------------------------------------------------


def drawn(counts: Sequence[int], losses: Sequence[float], whole: float) -> list[float]:
    """The distribution of survivors of zones in different regions, case by case: with and without a common cause."""
    common = risk_odds.ACROSS * min(losses) if len(counts) > 1 else 0.0
    apart = drawn_apart(counts, [1 - (1 - loss) / (1 - common) for loss in losses], whole)
    struck = drawn_apart(counts, [1.0] * len(losses), whole)
    return [(1 - common) * p + common * q for p, q in zip(apart, struck, strict=True)]


def drawn_apart(counts: Sequence[int], losses: Sequence[float], whole: float) -> list[float]:
    cases = []
    for count, loss in zip(counts, losses, strict=True):
        parts = [(left, loss * (1 - whole) / (count - 1)) for left in range(1, count)]
        cases.append([(count, 1 - loss), (0, loss * (whole if count > 1 else 1.0)), *parts])
    found = [0.0] * (sum(counts) + 1)
    for case in product(*cases):
        found[sum(left for left, _ in case)] += math.prod(p for _, p in case)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.floats(0.001, 0.5)), min_size=1, max_size=4),
    st.floats(0.0, 1.0),
    st.integers(1, 5),
)
def test_the_odds_are_exact_for_zones_of_different_regions(
    fleet: list[tuple[int, float]], whole: float, wanted: int
) -> None:
    counts, losses = tuple(count for count, _ in fleet), [loss for _, loss in fleet]
    odds = Odds(range(len(fleet)), losses, whole, Terms(wanted, 1.0, 1.0, 0, 0))
    expected = drawn(counts, losses, whole)
    assert odds.hedge(counts).shortfall == pytest.approx(sum(expected[:wanted]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.floats(0.001, 0.5), st.integers(0, 1)), min_size=1, max_size=5),
    st.floats(0.0, 1.0),
)
def test_survivors_are_a_distribution_and_a_common_region_makes_the_worst_case_likelier(
    fleet: list[tuple[int, float, int]], whole: float
) -> None:
    counts, losses = tuple(count for count, _, _ in fleet), [loss for _, loss, _ in fleet]
    total = sum(counts)
    terms = Terms(max(1, total), 1.0, 1.0, 0, 0)
    apart = Odds(range(len(fleet)), losses, whole, terms).survivors(counts)
    shared = Odds([region for _, _, region in fleet], losses, whole, terms).survivors(counts)
    for one in (apart, shared):
        assert sum(one) == pytest.approx(1.0)
        assert min(one) >= -1e-12
    mean = [sum(i * p for i, p in enumerate(one)) for one in (apart, shared)]
    assert mean[0] == pytest.approx(mean[1]), "each zone by itself is as safe as before"
    assert shared[0] >= apart[0] - 1e-9


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 4)] * 4), min_size=1, max_size=8),
    st.lists(st.floats(0.001, 0.5), min_size=4, max_size=4),
    st.integers(1, 6),
)
def test_what_fleets_have_in_common_is_added_up_once_and_changes_nothing(
    fleets: list[tuple[int, ...]], losses: list[float], wanted: int
) -> None:
    terms = Terms(wanted, 100.0, 3.0, 0, wanted)
    shared = Odds([0, 0, 1, 2], losses, 0.5, terms)
    for fleet in fleets:
        alone = Odds([0, 0, 1, 2], losses, 0.5, terms)
        assert shared.survivors(fleet) == alone.survivors(fleet)
        assert shared.hedge(fleet) == alone.hedge(fleet)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=7),
    st.integers(1, 6),
    st.floats(0.0, 500.0),
    st.integers(0, 2),
)
def test_the_best_hedge_is_the_best(weights: list[float], wanted: int, mu: float, least: int) -> None:
    total = sum(weights) or 1.0
    survivors = [weight / total for weight in weights]
    terms = Terms(wanted, mu, 3.0, min(least, wanted), wanted)
    costs = {
        number: 3.0 * number + mu * sum(survivors[: max(0, wanted - number)])
        for number in range(terms.least, wanted + 1)
    }
    best = best_hedge(survivors, terms)
    assert best.usd_hour == pytest.approx(min(costs.values()), abs=1e-6)
    assert costs[best.on_demand] == pytest.approx(best.usd_hour, abs=1e-6)


def test_the_search_looks_beyond_a_step_that_gains_nothing() -> None:
    """Four in a zone that loses all at once: one more elsewhere is of no use, four are."""
    odds = Odds([0, 1], [0.05, 0.01], 1.0, Terms(4, 150.0, 3.0, 0, 0))
    sites = [Site(1.0, True), Site(1.0, True)]
    one_more = odds.hedge((4, 1)).usd_hour + 1.0
    assert one_more > odds.hedge((4, 0)).usd_hour
    assert risk_search.grown(odds, (4, 0), sites, 4, 0.1) == (4, 4)
    assert risk_search.grown(odds, (4, 0), sites, 3, 0.1) is None


@pytest.mark.parametrize(
    ("asking_usd_hour", "expected"),
    [
        pytest.param((0.0, 0.0), (2, 1), id="of two sure zones the safer one"),
        pytest.param((0.0, 0.9), (2, 1), id="the sure zone before a doubtful one"),
        pytest.param((0.9, 0.0), (1, 2), id="a riskier one that is sure before a safer one that is not"),
        pytest.param((9.0, 9.0), None, id="none where no gain is worth so many refusals"),
    ],
)
def test_the_search_weighs_what_a_zone_saves_against_its_refusals(
    asking_usd_hour: tuple[float, float], expected: tuple[int, int] | None
) -> None:
    """Both are held, and one replica more is worth about twice its price."""
    odds = Odds([0, 1], [0.020, 0.021], 0.5, Terms(2, 100.0, 3.0, 0, 2))
    sites = [Site(1.0, True, asking) for asking in asking_usd_hour]
    assert risk_search.grown(odds, (1, 1), sites, 1, 0.1) == expected


def test_a_zone_is_charged_once_for_its_answer_however_many_go_there() -> None:
    odds = Odds([0], [0.001], 0.5, Terms(4, 100.0, 3.0, 0, 4))
    for asking_usd_hour, expected in ((7.0, (4,)), (9.0, None)):  # four replicas save 4 * (3 - 1) = 8 USD/h
        assert risk_search.grown(odds, (0,), [Site(1.0, True, asking_usd_hour)], 4, 0.1) == expected


@pytest.mark.parametrize(
    ("record", "least", "most"),
    [
        pytest.param(held(5.0), 0.0, 0.0, id="we are in it: none"),
        pytest.param(held(5.0, empty_from=NOW - 600.0, empty_at=NOW - 600.0), 3.0, 9.0, id="full of us"),
        pytest.param(None, 0.6, 0.7, id="never asked"),
        pytest.param(empty(3.0, asked_h_ago=0.1), 30.0, 90.0, id="empty for long: hopeless for a while"),
        pytest.param(empty(9.0, asked_h_ago=9.0), 0.6, 1.0, id="who knows after so long"),
        pytest.param({"since": NOW - 9 * HOUR, "left_at": NOW - 60.0}, 0.0, 0.01, id="just left"),
        pytest.param({"since": NOW - 9 * HOUR, "left_at": NOW - 8 * HOUR}, 0.4, 0.6, id="left long ago"),
    ],
)
def test_refusals_are_expected_from_what_was_last_seen(
    record: dict[str, float] | None, least: float, most: float
) -> None:
    assert least <= MarketModel(knowing(record), NOW).refusals(MARKET_A1) <= most


def test_the_search_moves_replicas_to_an_older_zone() -> None:
    odds = Odds([0, 1], [0.05, 0.001], 1.0, Terms(1, 20.0, 3.0, 0, 1))
    sites = [Site(1.0, True), Site(1.0, True)]
    assert risk_search.moved(odds, (1, 0), sites, 4, 0.2) == (0, 1)
    assert risk_search.moved(odds, (0, 1), sites, 4, 0.2) is None


# --- the laws of a placer ------------------------------------------------------------------------------------------

MARKET = ("c/a/a1", "c/a/a2", "c/b/b1", "x/u/u1", "x/u/u2")
patterns = st.lists(
    st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=len(MARKET), max_size=len(MARKET)
)
goals = st.builds(
    a_goal,
    st.integers(0, 4),
    placer=st.just("risk_hedge"),
    num_overprovision=st.just(MOST_EXTRA),  # what `World` lets a placer hold beyond the wanted number
    dynamic_ondemand_fallback=st.booleans(),
    base_ondemand_fallback_replicas=st.integers(0, 2),
    availability_target=st.sampled_from([None, 0.9, 0.99, 0.999, 1.0]),
)


class Sized(World):
    """A world in which another size is news, and may be written down."""

    _resized = False

    def resize(self, size: int) -> None:
        self.goal = replace(self.goal, scaling=ScalingGoal(size, size))
        self._resized = True

    def _check(self, seen: Observation, decided: Plan) -> None:
        resized, self._resized = self._resized, False
        super()._check(replace(seen, events=(Launched(0, "news"),)) if resized else seen, decided)


@pytest.mark.long
@settings(max_examples=examples(150), deadline=None)
@given(
    goals,
    patterns,
    st.integers(1, len(MARKET)),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([1.0, 30.0, 600.0]),
)
@example(
    a_goal(
        0,
        placer="risk_hedge",
        num_overprovision=MOST_EXTRA,
        dynamic_ondemand_fallback=True,
        availability_target=1.0,
    ),
    [[0], [1], [0], [0], [0]],
    2,
    [1, 4, 2],
    1.0,
)
def test_the_laws_hold_in_every_market(
    goal: Any, pattern: list[list[int]], n_zones: int, sizes: list[int], tick_s: float
) -> None:
    """`World` checks each tick: no more than wanted on demand, nothing more to do at a second look, nothing written
    on a quiet tick, and a memory that is JSON."""
    offers = both(*MARKET[:n_zones])
    rows = {offer.zone: row for offer, row in zip(offers[:n_zones], pattern, strict=False)}
    world = Sized(goal, offers, lambda zone, tick: rows[zone][tick % len(rows[zone])], tick_s=tick_s)
    world.run(12)
    for size in sizes:
        world.resize(size)
        world.run(8)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 5), st.integers(0, 4), patterns, st.integers(1, 4), st.booleans())
def test_it_finds_the_one_good_zone_whatever_the_others_do(
    n_zones: int, good: int, pattern: list[list[int]], wanted: int, fallback: bool
) -> None:
    offers = both(*MARKET[:n_zones])
    spot_zones = [offer.zone for offer in offers[:n_zones]]
    haven = spot_zones[good % n_zones]

    def capacity(zone: Zone, tick: int) -> int:
        row = pattern[spot_zones.index(zone)]
        return PLENTY if zone == haven else row[tick % len(row)]

    goal = a_goal(
        wanted, placer="risk_hedge", num_overprovision=MOST_EXTRA, dynamic_ondemand_fallback=fallback
    )
    world = World(goal, offers, capacity)
    for _ in range(40):
        world.tick()
        if len([r for r in of_kind(world.counted, SPOT) if r.state is not ASKED]) >= wanted:
            return
    pytest.fail(f"{world.zones()} of {wanted} after 40 ticks")


@pytest.mark.long
def test_a_dry_market_is_carried_on_demand_and_left_when_a_zone_is_back() -> None:
    goal = a_goal(3, placer="risk_hedge", num_overprovision=MOST_EXTRA, dynamic_ondemand_fallback=True)
    back_at = 30  # an hour
    world = World(
        goal,
        both(*ZONES),
        lambda zone, tick: PLENTY if zone.name == "b1" and tick > back_at else 0,
        tick_s=120.0,
    )
    world.run(back_at)
    assert sum(world.zones(ON_DEMAND).values()) == 3
    assert not world.zones(SPOT)
    assert world.failed_launches <= 40, "three zones, asked at 0, 2, 4, 6, 9, 13 min and so on"
    world.run(1000)
    assert world.zones(SPOT) == {"b1": 3}
    assert not world.zones(ON_DEMAND)


def test_between_two_looks_only_events_change_the_decision() -> None:
    """So `wake_at` can be trusted: a simulator that sleeps till then sees what one sees that does not."""
    live = replicas(*[READY] * 4, of=(A1, A1, B1, B1)) + replicas(READY, of=A1_OD, first=50)
    memory = knowing(held(0.4), held(1.2), empty(3.0, asked_h_ago=0.2))
    mark = NOW // LOOK_AGAIN_S * LOOK_AGAIN_S
    first = decide(live, memory, now=mark + 1.0)
    assert first.wake_at is not None
    seconds = range(2, int(first.wake_at - mark))
    for later in (decide(live, memory, now=mark + second) for second in seconds):
        assert (later.launches, later.ends, later.wake_at) == (first.launches, first.ends, first.wake_at)


def test_the_same_view_gives_the_same_decision() -> None:
    view = replicas(*[READY] * 2, STARTING, of=(A1, B1))
    memory = knowing(held(0.5), held(3.0), empty(1.0, asked_h_ago=1.0))
    assert decide(view, memory) == decide(view, json.loads(json.dumps(memory)))


def test_a_large_service_is_decided_in_few_steps() -> None:
    """Larger services grow in larger steps, so the search stays as short."""
    odds_asked = []

    class Counting(Odds):
        def survivors(self, fleet: tuple[int, ...]) -> list[float]:
            odds_asked.append(fleet)
            return super().survivors(fleet)

    odds = Counting([0, 0, 1, 1, 2, 2], [0.02] * 6, 0.5, Terms(64, 8000.0, 3.0, 0, 64))
    plan = risk_search.grown(odds, (0,) * 6, [Site(1.0, True)] * 6, 68, 0.1)
    assert plan is not None
    assert 64 <= sum(plan) <= 68
    assert len(odds_asked) <= 80


def test_memory_survives_a_round_trip_through_the_store() -> None:
    live = replicas(*[READY] * 3, STARTING)
    memory = learned(EIGHT_HOURS_DRY, Preempted(1), ProbePassed(4), live=live)
    assert risk_market.learn(memory, [], {}, NOW)["zones"] == memory["zones"]
    assert json.loads(json.dumps(memory)) == memory


@pytest.mark.parametrize(
    ("empty_s", "accepted_s", "expected"),
    [
        pytest.param(3600.0, 10.0, {"b1", "u1"}, id="after an outage the others are asked first"),
        pytest.param(300.0, 70.0, {"a1"}, id="until the patience ends"),
        pytest.param(5.0, 10.0, {"a1"}, id="zones that were asked together show no outage"),
    ],
)
def test_after_an_outage_the_first_zone_does_not_take_all(
    empty_s: float, accepted_s: float, expected: set[str]
) -> None:
    others = empty(empty_s / HOUR)
    record = {**others, "empty_at": others["empty_from"]}  # each has refused once
    memory = knowing(held(100.0), record, record)
    decided = decide(replicas(READY, since=NOW - accepted_s), memory)
    assert set(zones(decided)) == expected
