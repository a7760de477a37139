"""Static placement: where replicas go, what keeps them away, and for how long."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from policies.model import (
    CapacityType,
    EndReason,
    Event,
    FailureKind,
    GaveUp,
    Goal,
    LaunchFailed,
    Observation,
    Offer,
    Preempted,
    PreemptionNotice,
    ProbeFailed,
    ProbePassed,
    Replica,
    ReplicaState,
    RunExited,
    ScalingGoal,
    Zone,
)
from policies.placement.static import FORGET_AFTER_S, Static, next_opening

S = ReplicaState
SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
GOAL = Goal(1, ScalingGoal())


def offer(zone: str, price: float, capacity_type: CapacityType = SPOT) -> Offer:
    """`zone` is cloud/region/zone."""
    return Offer(Zone(*zone.split("/")), "m", "L4", 1.0, capacity_type, price, 1.0)


A1, A2, B1, X1 = (
    offer("c/a/a1", 0.30),
    offer("c/a/a2", 0.31),
    offer("c/b/b1", 0.40),
    offer("x/u/u1", 0.50),
)
OFFERS = (A1, A2, B1, X1)


def replica(replica_id: int, where: Offer, state: ReplicaState = S.READY, **more: Any) -> Replica:
    return replace(Replica(replica_id, 1, where, state, 0.0, 0.0), **more)


def place(
    count: int,
    memory: Any = None,
    *,
    live: tuple[Replica, ...] = (),
    offers: tuple[Offer, ...] = OFFERS,
    now: float = 0.0,
) -> list[str]:
    places, _ = Static().place(count, Observation(now, GOAL, live, offers), memory or {})
    return [place.offer.zone.name for place in places]


def learn(*events: Event, memory: Any = None, now: float = 0.0, before: Replica | None = None) -> Any:
    replicas = {1: before or replica(1, A1, S.REQUESTED)}
    return json.loads(json.dumps(Static().learn(memory or {}, events, replicas, now)))


NO_ROOM = LaunchFailed(1, FailureKind.CAPACITY)


@pytest.mark.parametrize(
    ("live", "zones"),
    [
        pytest.param(
            (), ["a1", "b1", "u1", "a2"], id="an empty fleet: one zone, then one region, after another"
        ),
        pytest.param((replica(1, A1),), ["b1", "u1", "a2", "b1"], id="a zone that has one comes last"),
        pytest.param((replica(1, A1, S.REQUESTED),), ["b1", "u1", "a2", "b1"], id="one on its way counts"),
        pytest.param(
            (replica(1, A1, S.DRAINING),), ["a1", "b1", "u1", "a2"], id="one on its way out does not"
        ),
        pytest.param((replica(1, A1, S.TERMINATING),), ["a1", "b1", "u1", "a2"], id="nor one that ends"),
    ],
)
def test_spread_over_zones_then_regions_then_by_price(live: tuple[Replica, ...], zones: list[str]) -> None:
    assert place(4, live=live) == zones


def test_ten_replicas_over_four_zones_differ_by_one_at_most() -> None:
    assert sorted(Counter(place(10)).values()) == [2, 2, 3, 3]


def test_the_order_of_offers_is_the_preference() -> None:
    assert place(1, offers=(B1, A1)) == ["b1"]


def test_nothing_is_placed_without_offers_or_without_need() -> None:
    assert place(3, offers=()) == []
    assert place(0) == []


def test_every_place_says_why() -> None:
    places, _ = Static().place(2, Observation(0.0, GOAL, (), (A1,)), {})
    assert places[0].why == "no replica there yet"
    assert "1 there" in places[1].why


@pytest.mark.parametrize(
    ("event", "zones"),
    [
        pytest.param(NO_ROOM, ["a2", "b1", "u1"], id="no room: the zone"),
        pytest.param(Preempted(1), ["a2", "b1", "u1"], id="preempted: the zone"),
        pytest.param(PreemptionNotice(1, 30.0), ["a2", "b1", "u1"], id="a notice: the zone"),
        pytest.param(LaunchFailed(1, FailureKind.QUOTA), ["b1", "u1", "b1"], id="quota: the region"),
        pytest.param(
            GaveUp(1, EndReason.CLOUD_ERROR), ["b1", "u1", "b1"], id="errors to the last try: the region"
        ),
        pytest.param(LaunchFailed(1, FailureKind.AUTH), ["u1", "u1", "u1"], id="no permission: the cloud"),
        pytest.param(LaunchFailed(1, FailureKind.CONFIG), ["a1", "b1", "u1"], id="a wrong order: nothing"),
        pytest.param(RunExited(1), ["a1", "b1", "u1"], id="a program that ended: nothing"),
        pytest.param(ProbeFailed(1), ["a1", "b1", "u1"], id="a failed probe: nothing"),
        pytest.param(GaveUp(1, EndReason.START_TIMEOUT), ["a1", "b1", "u1"], id="a slow start: nothing"),
        pytest.param(
            replace(NO_ROOM, replica_id=99), ["a1", "b1", "u1"], id="of an unknown replica: nothing"
        ),
    ],
)
def test_what_an_event_keeps_new_replicas_away_from(event: Event, zones: list[str]) -> None:
    assert place(3, learn(event)) == zones


def test_a_block_is_for_the_capacity_type_it_was_met_in() -> None:
    offers = (A1, offer("c/a/a1", 1.0, ON_DEMAND))
    places, _ = Static().place(1, Observation(0.0, GOAL, (), offers), learn(NO_ROOM))
    assert [place.offer.capacity_type for place in places] == [ON_DEMAND]


def test_losing_an_on_demand_instance_teaches_nothing() -> None:
    assert learn(Preempted(1, lost=True), before=replica(1, offer("c/a/a1", 1.0, ON_DEMAND))) == {}


def test_a_preemption_that_was_announced_counts_once() -> None:
    memory = learn(PreemptionNotice(1, 30.0), before=replica(1, A1), now=0.0)
    noticed = replica(1, A1, S.DRAINING, preempt_at=30.0)
    assert learn(Preempted(1), memory=memory, before=noticed, now=30.0) == memory


def test_blocks_double_up_to_five_minutes() -> None:
    memory, waits = None, []
    for _ in range(8):
        memory = learn(NO_ROOM, memory=memory, now=1000.0)
        opening = next_opening((A1,), memory, 1000.0)
        assert opening is not None
        waits.append(opening - 1000.0)
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]


def test_a_block_ends_at_its_time() -> None:
    memory = learn(NO_ROOM, now=100.0)
    assert place(1, memory, offers=(A1,), now=109.9) == []
    assert place(1, memory, offers=(A1,), now=110.0) == ["a1"]


def test_a_replica_that_becomes_ready_forgives_its_zone() -> None:
    memory = learn(ProbePassed(1), memory=learn(NO_ROOM, NO_ROOM), before=replica(1, A1, S.STARTING))
    assert memory == {}


def test_a_probe_that_passes_again_forgives_nothing() -> None:
    blocked = learn(NO_ROOM)
    assert learn(ProbePassed(1), memory=blocked, before=replica(1, A1, S.NOT_READY)) == blocked


@pytest.mark.parametrize(
    ("retry_at", "opens_at"), [(None, 400.0), (5000.0, 5000.0)], ids=["by default", "as told"]
)
def test_a_quota_error_says_when_to_come_back(retry_at: float | None, opens_at: float) -> None:
    memory = learn(LaunchFailed(1, FailureKind.QUOTA, retry_at=retry_at), now=100.0)
    assert next_opening((A1, A2), memory, 100.0) == opens_at


def test_a_longer_quota_block_is_not_shortened_by_an_error() -> None:
    memory = learn(LaunchFailed(1, FailureKind.QUOTA, retry_at=5000.0), now=100.0)
    after = learn(GaveUp(1, EndReason.CLOUD_ERROR), memory=memory, now=200.0)
    assert next_opening((A1,), after, 200.0) == 5000.0


def test_losses_of_one_moment_are_one_piece_of_news() -> None:
    lost = {number: replica(number, A1) for number in range(1, 6)}
    after = Static().learn({}, [Preempted(number) for number in lost], lost, 0.0)
    assert [block["failures"] for block in after["blocks"].values()] == [1]


def test_failures_of_long_ago_are_forgotten() -> None:
    memory = learn(NO_ROOM, NO_ROOM, NO_ROOM, now=0.0)  # until 40 s
    late = 40.0 + FORGET_AFTER_S
    again = learn(NO_ROOM, memory=memory, now=late)
    assert next_opening((A1,), again, late) == late + 10.0
    assert learn(RunExited(1), memory=memory, now=late) == {}


@pytest.mark.parametrize(
    ("offers", "opens_at"),
    [
        pytest.param((), None, id="no offer"),
        pytest.param((A1, B1), None, id="one is open"),
        pytest.param((A1,), 10.0, id="the only one is blocked"),
    ],
)
def test_next_opening(offers: tuple[Offer, ...], opens_at: float | None) -> None:
    assert next_opening(offers, learn(NO_ROOM), 0.0) == opens_at
