"""Spot replicas cost at most twice the cheapest: what each placer requests, as truth tables."""

from __future__ import annotations

from collections import Counter

import pytest

from policies.goals import PlacementGoal
from policies.model import CapacityType, FailureKind, Json, LaunchFailed, Offer, Replica, Zone
from policies.model import ReplicaState as S
from policies.placement.base import PlacementPolicy, View
from policies.placement.risk_hedge import RiskHedge
from policies.placement.spothedge import SpotHedge
from policies.placement.static import Static

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
NOW = 1000.0


def spot(zone: str, price: float, *, on_demand: float = 9.0, preference: int = 0) -> Offer:
    return Offer(Zone("c", zone[0], zone), "m", "L4", 1.0, SPOT, price, on_demand, preference=preference)


A, B, C, D = spot("a1", 1.0), spot("b1", 2.0), spot("c1", 2.1), spot("d1", 2.5)
DEAR, LESS_WANTED = spot("e1", 9.5), spot("f1", 1.1, preference=1)
RENTED = Offer(Zone("c", "a", "a1"), "m", "L4", 1.0, ON_DEMAND, 9.0, 9.0)
SPREAD, HEDGE, RISK = Static(), SpotHedge(), RiskHedge()


def asked(
    placer: PlacementPolicy, offers: tuple[Offer, ...], *, refused: tuple[Offer, ...] = (), cap: float = 2.0
) -> Counter[str]:
    """Where four spot replicas are launched, after the `refused` zones had no room."""
    tried = {i: Replica(i, 1, offer, S.REQUESTED, NOW, NOW) for i, offer in enumerate(refused, 1)}
    memory: Json = placer.learn({}, [LaunchFailed(i, FailureKind.CAPACITY) for i in tried], tried, NOW)
    goal = PlacementGoal(dynamic_ondemand_fallback=True, spot_price_cap=cap)
    decided = placer.decide(View(NOW, 4, goal, (), (), (*offers, RENTED), 99), memory)
    places = [place.offer for place in decided.launches if place.offer.capacity_type is SPOT]
    return Counter(offer.zone.name for offer in places)


@pytest.mark.parametrize(
    ("placer", "offers", "zones"),
    [
        pytest.param(HEDGE, (A, B, C, D), {"a1", "b1"}, id="SpotHedge: up to twice the cheapest"),
        pytest.param(HEDGE, (A, C, D), {"a1", "c1"}, id="SpotHedge: two zones at least"),
        pytest.param(HEDGE, (A, DEAR), {"a1"}, id="SpotHedge: no zone dearer than on demand"),
        pytest.param(HEDGE, (A, LESS_WANTED), {"a1"}, id="SpotHedge: no zone that the user wants less"),
        pytest.param(SPREAD, (A, B, C, D), {"a1", "b1"}, id="spread: up to twice the cheapest"),
        pytest.param(SPREAD, (A, C, D), {"a1"}, id="spread: the price comes first"),
    ],
)
def test_zones_of_the_first_launch(
    placer: PlacementPolicy, offers: tuple[Offer, ...], zones: set[str]
) -> None:
    assert set(asked(placer, offers)) == zones


@pytest.mark.parametrize("placer", [HEDGE], ids=["SpotHedge"])
@pytest.mark.parametrize(
    ("offers", "refused", "zones"),
    [
        pytest.param((A, B, C), (A,), {"b1"}, id="the other zone within the cap"),
        pytest.param((A, B, C), (A, B), set(), id="no zone beyond the cap: on demand stands in"),
        pytest.param((A, C, D), (A,), {"c1"}, id="the second zone, although beyond the cap"),
        pytest.param((A, C, D), (A, C), set(), id="not the third"),
        pytest.param((A, DEAR), (A,), set(), id="no spot zone dearer than on demand"),
    ],
)
def test_zones_after_refusals(
    placer: PlacementPolicy, offers: tuple[Offer, ...], refused: tuple[Offer, ...], zones: set[str]
) -> None:
    assert set(asked(placer, offers, refused=refused)) == zones


@pytest.mark.parametrize("placer", [SPREAD, HEDGE], ids=["spread", "SpotHedge"])
@pytest.mark.parametrize(("cap", "zones"), [(2.0, 2), (2.1, 3), (2.5, 4)])
def test_the_cap_is_a_knob(placer: PlacementPolicy, cap: float, zones: int) -> None:
    assert len(asked(placer, (A, B, C, D), cap=cap)) == zones


def continent(region: str, price: float) -> Offer:
    return Offer(Zone("gcp", region, f"{region}-a"), "m", "L4", 1.0, SPOT, price, 9.0)


def test_the_second_zone_is_on_the_continent_of_the_first_if_there_is_one() -> None:
    offers = continent("us-east1", 1.0), continent("europe-west1", 2.2), continent("us-west1", 2.5)
    view = View(NOW, 2, PlacementGoal(one_continent=True), (), (), offers, 99)
    regions = {place.offer.zone.region for place in SpotHedge().decide(view, {}).launches}
    assert regions == {"us-east1", "us-west1"}
