"""Placement where replicas may run on different accelerators: each has its own room in a zone, and its own work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.goals import AcceleratorQps, PlacementGoal
from policies.model import (
    CapacityType,
    Event,
    FailureKind,
    LaunchFailed,
    Offer,
    Preempted,
    Replica,
    ReplicaState,
    Zone,
)
from policies.placement import fleet, zone_backoff
from policies.placement.base import View
from policies.placement.spothedge import SpotHedge
from policies.placement.static import Static
from policies.throughput import qps_of, usd_of_work

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
NOW = 1000.0


def an_offer(accelerator: str | None, price: float, zone: str = "a", **facts: object) -> Offer:
    plain = Offer(Zone("c", "r", zone), f"m-{accelerator}", accelerator, 1.0, SPOT, price)
    return replace(plain, **facts)  # type: ignore[arg-type]


L4, A100 = an_offer("L4", 0.3), an_offer("A100", 1.2)
WORK = (AcceleratorQps("L4", None, 1.0), AcceleratorQps("A100", None, 5.0), AcceleratorQps("A100", 8.0, 50.0))


@pytest.mark.parametrize(
    ("offer", "qps"),
    [
        pytest.param(L4, 1.0, id="its own value"),
        pytest.param(an_offer("a100", 1.0), 5.0, id="case does not matter"),
        pytest.param(an_offer("A100", 1.0, accelerator_count=8.0), 50.0, id="the exact count first"),
        pytest.param(an_offer("A100", 1.0, accelerator_count=4.0), 5.0, id="else any count"),
        pytest.param(an_offer("H100", 1.0), 1.0, id="the smallest for what has no value"),
        pytest.param(an_offer(None, 1.0), 1.0, id="or no accelerator"),
    ],
)
def test_what_a_replica_answers(offer: Offer, qps: float) -> None:
    assert qps_of(offer, WORK) == qps
    assert usd_of_work(offer, WORK) == offer.price_usd_hour / qps
    assert usd_of_work(offer, ()) == offer.price_usd_hour


@pytest.mark.parametrize(
    ("offers", "work", "found"),
    [
        pytest.param([L4, A100], (), ["L4"], id="by price where nothing is known of the work"),
        pytest.param([L4, A100], WORK, ["A100"], id="five times the work for four times the price"),
        pytest.param([L4, an_offer("A100", 1.6)], WORK, ["L4"], id="too dear for it"),
        pytest.param(
            [L4, an_offer("A100", 1.55)], WORK, ["L4", "A100"], id="within the margin they cost the same"
        ),
        pytest.param([], WORK, [], id="nothing on offer"),
    ],
)
def test_the_cheapest_is_so_for_its_work(
    offers: list[Offer], work: tuple[AcceleratorQps, ...], found: list[str]
) -> None:
    assert [offer.accelerator for offer in fleet.cheapest(offers, work)] == found


def learned(event: Event, offer: Offer = L4) -> dict[str, dict[str, float]]:
    replica = Replica(1, 1, offer, ReplicaState.REQUESTED, 0.0, 0.0)
    return zone_backoff.learn({}, [event], {1: replica}, NOW)


MORE = an_offer("L4", 1.1, accelerator_count=4.0)
ELSEWHERE, SOLID = an_offer("L4", 0.3, "b"), an_offer("L4", 1.0, capacity_type=ON_DEMAND)
ALL = [L4, A100, MORE, ELSEWHERE, SOLID, an_offer(None, 0.1)]


@pytest.mark.parametrize(
    ("event", "closed"),
    [
        pytest.param(
            LaunchFailed(1, FailureKind.CAPACITY), [L4], id="no room: this kind of machine in this zone"
        ),
        pytest.param(
            LaunchFailed(1, FailureKind.QUOTA),
            [L4, MORE, ELSEWHERE],
            id="a quota: the accelerator in the region",
        ),
        pytest.param(LaunchFailed(1, FailureKind.AUTH), ALL, id="a permission: the cloud"),
        pytest.param(LaunchFailed(1, FailureKind.CONFIG), [], id="a wrong order: nothing"),
    ],
)
def test_an_error_blocks_as_little_as_it_says(event: Event, closed: list[Offer]) -> None:
    opened = zone_backoff.open_offers(ALL, learned(event), NOW)
    assert [offer for offer in ALL if offer not in opened] == closed


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(LaunchFailed(1, FailureKind.CAPACITY), id="a refusal"),
        pytest.param(Preempted(1), id="a preemption"),
    ],
)
def test_spothedge_turns_to_another_accelerator_of_the_same_zone(event: Event) -> None:
    policy, goal = SpotHedge(), PlacementGoal("spothedge")
    replica = Replica(1, 1, L4, ReplicaState.PROVISIONING, 0.0, 0.0)
    memory = policy.learn({}, [event], {1: replica}, NOW)
    for after_s in (0.0, 600.0):  # while it is left alone, and when it may be asked again
        view = View(NOW + after_s, 1, goal, (), (), (L4, A100), 1)
        (place,) = policy.decide(view, memory).launches
        assert place.offer == A100


@pytest.mark.parametrize("policy", [SpotHedge(), Static()], ids=["spothedge", "spread"])
def test_an_order_goes_before_prices_and_spreading(policy: SpotHedge | Static) -> None:
    first = an_offer("H100", 9.0)
    offers = (first, *(an_offer("L4", 0.3, zone, preference=1) for zone in "abc"))
    goal = PlacementGoal("spothedge")
    wish = View(NOW, 3, goal, (), (), offers, 3)
    assert [place.offer for place in policy.decide(wish, {}).launches] == [first] * 3
    refused = Replica(1, 1, first, ReplicaState.REQUESTED, 0.0, 0.0)
    memory = policy.learn({}, [LaunchFailed(1, FailureKind.CAPACITY)], {1: refused}, NOW)
    assert {place.offer.accelerator for place in policy.decide(wish, memory).launches} == {"L4"}
