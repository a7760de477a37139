"""Own hosts first, then the cheapest offers: where the placers put replicas, as truth tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from policies.goals import PlacementGoal
from policies.model import CapacityType, Offer, Replica, ReplicaState, Zone
from policies.placement.base import View
from policies.placement.baselines import OnDemand
from policies.placement.spothedge import SpotHedge
from policies.placement.static import Static

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND


def offer(zone: str, price: float, kind: CapacityType = ON_DEMAND, places: int | None = None) -> Offer:
    return Offer(Zone(*zone.split("/")), "m", "L4", 1.0, kind, price, price, places=places)


HOST = offer("ssh/box/box", 0.0, places=4)
EAST, WEST, MUMBAI = offer("g/east/e1", 0.70), offer("g/west/w1", 0.80), offer("g/asia/m1", 0.85)
NEAR = offer("g/near/n1", 0.76)
S1, S2, S3 = (offer(f"g/r{i}/z{i}", price, SPOT) for i, price in ((1, 0.2), (2, 0.4), (3, 0.41)))


def zones(
    placer: object, wanted: int, offers: tuple[Offer, ...], live: tuple[Replica, ...] = ()
) -> Counter[str]:
    assert isinstance(placer, Static | OnDemand | SpotHedge)
    goal = PlacementGoal(dynamic_ondemand_fallback=isinstance(placer, SpotHedge))
    decided = placer.decide(View(0.0, wanted, goal, live, (), offers, 99), {})
    return Counter(place.offer.zone.name for place in decided.launches)


@pytest.mark.parametrize(
    "placer", [Static(), OnDemand(), SpotHedge()], ids=["spread", "on_demand", "spothedge"]
)
def test_six_replicas_with_an_own_host_of_four_places(placer: object) -> None:
    assert zones(placer, 6, (HOST, EAST, WEST, MUMBAI)) == {"box": 4, "e1": 2}


@pytest.mark.parametrize(
    "placer", [Static(), OnDemand(), SpotHedge()], ids=["spread", "on_demand", "spothedge"]
)
def test_what_a_preferred_host_cannot_take_goes_to_the_next_preference_at_once(placer: object) -> None:
    offers = (HOST, replace(EAST, preference=1), replace(WEST, preference=2))
    assert zones(placer, 6, offers) == {"box": 4, "e1": 2}
    assert zones(placer, 2, (EAST, replace(HOST, preference=1))) == {"e1": 2}
    annex = replace(offer("ssh/annex/annex", 0.0, places=1), preference=1)
    assert zones(placer, 6, (HOST, annex, replace(EAST, preference=2))) == {"box": 4, "annex": 1, "e1": 1}


@pytest.mark.parametrize(
    ("wanted", "offers", "placed"),
    [
        pytest.param(2, (HOST, EAST), {"box": 2}, id="nothing is rented while a host has room"),
        pytest.param(4, (EAST, NEAR, WEST), {"e1": 2, "n1": 2}, id="on demand: spread within a tenth"),
        pytest.param(4, (WEST, MUMBAI), {"w1": 2, "m1": 2}, id="the band moves with what may be asked"),
        pytest.param(4, (S1, S2, S3), {"z1": 2, "z2": 2}, id="spot: up to twice the cheapest"),
        pytest.param(5, (HOST,), {"box": 4}, id="a full host takes no more"),
    ],
)
def test_spread_within_the_price_band(wanted: int, offers: tuple[Offer, ...], placed: dict[str, int]) -> None:
    assert zones(Static(), wanted, offers) == placed


def test_replicas_that_run_on_a_host_occupy_its_places() -> None:
    live = tuple(Replica(i, 1, HOST, ReplicaState.READY, 0.0, 0.0) for i in range(3))
    assert zones(Static(), 5, (HOST, EAST), live) == {"box": 1, "e1": 1}


@pytest.mark.parametrize("placer", [Static(), OnDemand()], ids=["spread", "on_demand"])
def test_a_full_host_is_named_in_the_notes(placer: Static | OnDemand) -> None:
    live = tuple(Replica(i, 1, HOST, ReplicaState.READY, 0.0, 0.0) for i in range(4))
    decided = placer.decide(View(0.0, 5, PlacementGoal(), live, (), (HOST,), 99), {})
    assert not decided.launches
    assert "every host or reservation of yours is full" in decided.notes[0]


IOWA, BELGIUM = (
    Offer(Zone("gcp", r, f"{r}-a"), "m", "L4", 1.0, ON_DEMAND, 0.70, 0.70)
    for r in ("us-central1", "europe-west1")
)
SHUT = {"blocks": {"gcp/us-central1/us-central1-a|on_demand|L4:1": {"until": 60.0, "failures": 1}}}


@pytest.mark.parametrize("placer", [Static(), OnDemand()], ids=["spread", "on_demand"])
def test_a_price_band_of_zero_is_the_cheapest_only(placer: Static | OnDemand) -> None:
    view = View(0.0, 4, PlacementGoal(price_band=0.0), (), (), (EAST, NEAR), 99)
    assert {place.offer.zone.name for place in placer.decide(view, {}).launches} == {"e1"}


@pytest.mark.parametrize(
    ("one_continent", "memory", "placed"),
    [
        pytest.param(True, {}, {"us-central1": 2}, id="on the continent of the cheapest"),
        pytest.param(True, SHUT, {"europe-west1": 2}, id="elsewhere when that refuses"),
        pytest.param(False, {}, {"us-central1": 1, "europe-west1": 1}, id="anywhere in named regions"),
    ],
)
def test_one_continent(one_continent: bool, memory: dict[str, object], placed: dict[str, int]) -> None:
    view = View(0.0, 2, PlacementGoal(one_continent=one_continent), (), (), (IOWA, BELGIUM), 99)
    decided = Static().decide(view, memory)
    assert Counter(place.offer.zone.region for place in decided.launches) == placed
    assert bool(decided.notes and "North America" in decided.notes[-1]) is bool(memory)


SPOT_HOST = offer("ssh/box/box", 0.0, SPOT, places=1)
FULL_HOST = offer("ssh/box/box", 0.0, places=0)
SHUT_TWICE = {
    "blocks": {
        f"g/r{i}/z{i}|spot|L4:1": {"until": until, "failures": 2}
        for i, until in ((1, 90.0), (2, 200.0), (3, 300.0))
    }
}


@pytest.mark.parametrize(
    ("host", "now", "placed"),
    [
        pytest.param(SPOT_HOST, 100.0, {"box": 1, "z1": 1}, id="one place free, one zone open: one probe"),
        pytest.param(SPOT_HOST, 400.0, {"box": 1, "z1": 1}, id="one place free, all zones open: one probe"),
        pytest.param(SPOT_HOST, 50.0, {"box": 1}, id="one place free, all zones shut"),
        pytest.param(replace(SPOT_HOST, places=4), 100.0, {"box": 4}, id="room for all: no probe"),
        pytest.param(FULL_HOST, 100.0, {"z1": 1}, id="no place free: one probe"),
        pytest.param(replace(FULL_HOST, places=1), 100.0, {"box": 1, "z1": 1}, id="one place, not on spot"),
    ],
)
def test_after_an_outage_one_probe_is_rented_beside_own_hosts(
    host: Offer, now: float, placed: dict[str, int]
) -> None:
    view = View(now, 4, PlacementGoal(), (), (), (host, S1, S2, S3), 99)
    decided = SpotHedge().decide(view, SHUT_TWICE)
    assert Counter(place.offer.zone.name for place in decided.launches) == placed


def test_a_host_takes_no_more_spot_replicas_than_it_has_places() -> None:
    two = replace(SPOT_HOST, places=2)
    assert zones(SpotHedge(), 5, (two, S1, S2)) == {"box": 2, "z1": 2, "z2": 1}
