"""RiskHedge where a service may run on several kinds of GPU: each kind in a zone is a market of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from policies.goals import AcceleratorQps, PlacementGoal
from policies.model import FailureKind, LaunchFailed, Offer, Preempted, Replica
from policies.placement import risk_market, zone_backoff
from policies.placement.base import Decision, View
from policies.placement.risk_hedge import RiskHedge
from policies.placement.risk_market import MarketModel
from tests.unit.placement_world import ON_DEMAND, SPOT, S, an_offer

HOUR = 3600.0
NOW = 300 * HOUR
ZONES = ("c/a/a1", "c/b/b1", "x/u/u1")
WORK = (AcceleratorQps("L4", None, 2.0), AcceleratorQps("A100", None, 9.0))
POLICY = RiskHedge()


def offers(accelerator: str, spot: float, on_demand: float) -> tuple[Offer, ...]:
    kinds = ((spot, SPOT), (on_demand, ON_DEMAND))
    return tuple(
        replace(
            an_offer(zone, usd, kind),
            accelerator=accelerator,
            accelerator_count=1.0,
            instance_type=accelerator,
        )
        for usd, kind in kinds
        for zone in ZONES
    )


L4, A100 = offers("L4", 0.25, 0.80), offers("A100", 1.40, 4.10)


def decide(
    memory: dict[str, Any],
    live: Sequence[Replica] = (),
    *,
    offered: tuple[Offer, ...] = (*L4, *A100),
    wanted: int = 4,
    target: float = 0.995,
) -> Decision:
    goal = PlacementGoal("risk_hedge", 0, True, 0, target, work=WORK)
    return POLICY.decide(View(NOW, wanted, goal, tuple(live), (), offered, 99), memory)


def replica(number: int, offer: Offer, state: S = S.READY, since: float = NOW - 600.0) -> Replica:
    return Replica(number, 1, offer, state, since, since, launched_at=since)


def l4_refused() -> dict[str, Any]:
    asked = {n: replica(n, offer, S.REQUESTED, NOW - 30.0) for n, offer in enumerate(L4[:3], 1)}
    events = [LaunchFailed(n, FailureKind.CAPACITY, "no room") for n in asked]
    return dict(POLICY.learn({}, events, asked, NOW))


def asked(decision: Decision) -> set[tuple[str | None, Any]]:
    return {(place.offer.accelerator, place.offer.capacity_type) for place in decision.launches}


def test_where_the_small_kind_is_refused_the_large_one_is_requested_on_spot() -> None:
    assert asked(decide({}, target=0.999)) == {("L4", SPOT)}, "0.125 USD for 1 qps, against 0.156"
    refused = decide(l4_refused())
    assert asked(refused) == {("A100", SPOT)}, "0.156, against 0.40 on demand"
    assert 9 * len(refused.launches) >= 8, "what four L4 can do"


def test_a_kind_that_the_user_prefers_is_requested_first() -> None:
    second = tuple(replace(offer, preference=1) for offer in A100)
    assert asked(decide({}, offered=(*L4, *second))) == {("L4", SPOT)}
    last = tuple(replace(offer, preference=1) for offer in L4)
    assert asked(decide({}, offered=(*A100, *last))) == {("A100", SPOT)}


def test_a_loss_of_one_kind_does_not_make_the_other_younger() -> None:
    live = {1: replica(1, L4[0], since=NOW - 40 * HOUR), 2: replica(2, A100[0], since=NOW - 40 * HOUR)}
    memory = POLICY.learn({}, [], live, NOW - 39 * HOUR)
    market, group = [zone_backoff.market(L4[0])], [risk_market.group_of(L4[0])]
    before = MarketModel(memory, NOW).hazards(market, group, 0.05, 2.0)
    after = POLICY.learn(memory, [Preempted(2)], live, NOW)
    assert MarketModel(after, NOW).hazards(market, group, 0.05, 2.0) == before
    assert zone_backoff.market(A100[0]) in after["zones"]


def test_of_a_hundred_zones_and_twenty_kinds_the_cheaper_are_requested() -> None:
    zones, kinds = [f"c/r{n // 4}/z{n}" for n in range(100)], [f"K{n}" for n in range(20)]
    many = tuple(
        replace(an_offer(zone, usd * (1 + k / 20), capacity), accelerator=kind, accelerator_count=1.0)
        for usd, capacity in ((1.0, SPOT), (3.0, ON_DEMAND))
        for k, kind in enumerate(kinds)
        for zone in zones
    )
    launches = decide({}, offered=many, wanted=16).launches
    assert len(launches) >= 16
    assert {place.offer.accelerator for place in launches} <= set(kinds[:10]), "the cheaper ones"
