"""Own hosts first, then the cheapest offers: where the placers put replicas, as truth tables."""

from __future__ import annotations

from collections import Counter

import pytest

from policies.model import CapacityType, Offer, PlacementGoal, Replica, ReplicaState, Zone
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
    assert "every host of yours is full" in decided.notes[0]
