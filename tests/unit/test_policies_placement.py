"""Plain spreading, and the memory of refusals all placers share: where replicas go, what keeps them away, how long."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from policies.goals import PlacementGoal
from policies.model import (
    CapacityType,
    EndReason,
    Event,
    FailureKind,
    GaveUp,
    Launched,
    LaunchFailed,
    NodeLost,
    Offer,
    Preempted,
    PreemptionNotice,
    ProbeFailed,
    ProbePassed,
    Replica,
    ReplicaState,
    RunExited,
    Scope,
    Zone,
)
from policies.placement import fleet, zone_backoff
from policies.placement.base import Decision, View
from policies.placement.static import Static
from policies.placement.zone_backoff import FORGET_AFTER_S

S = ReplicaState
SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND


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


def decide(
    wanted: int,
    memory: Any = None,
    *,
    live: tuple[Replica, ...] = (),
    others: tuple[Replica, ...] = (),
    offers: tuple[Offer, ...] = OFFERS,
    now: float = 0.0,
    extra: int = 0,
    limit: int = 99,
) -> Decision:
    goal = PlacementGoal(num_overprovision=extra)
    return Static().decide(View(now, wanted, goal, live, others, offers, limit), memory or {})


def place(more: int, memory: Any = None, *, live: tuple[Replica, ...] = (), **view: Any) -> list[str]:
    """Where that many more than the live ones would go."""
    return [place.offer.zone.name for place in decide(len(live) + more, memory, live=live, **view).launches]


def next_opening(offers: tuple[Offer, ...], memory: Any, now: float) -> float | None:
    return zone_backoff.next_opening(offers, memory.get("blocks", {}), now)


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
    ],
)
def test_spread_over_zones_then_regions_then_by_price(live: tuple[Replica, ...], zones: list[str]) -> None:
    assert place(4, live=live) == zones


DENIED = LaunchFailed(1, FailureKind.AUTH)


@pytest.mark.parametrize(
    ("events", "until"),
    [
        pytest.param([(100.0, DENIED)], 115.0, id="once: somebody may be mending it"),
        pytest.param([(100.0, DENIED), (100.5, DENIED)], 115.0, id="two of one moment are one"),
        pytest.param(
            [(100.0, DENIED), (115.0, DENIED), (150.0, DENIED)], 210.0, id="again and again: doubled"
        ),
        pytest.param(
            [(1000.0 * n, DENIED) for n in range(1, 12)], 11900.0, id="for ever: a quarter of an hour"
        ),
        pytest.param([(100.0, DENIED), (115.0, Launched(1, "i-1"))], None, id="mended"),
    ],
)
def test_how_long_a_cloud_that_denies_us_is_left_alone(
    events: list[tuple[float, Event]], until: float | None
) -> None:
    memory: Any = {}
    for at, event in events:
        memory = learn(event, memory=memory, now=at)
    now = events[-1][0]
    assert next_opening(OFFERS, memory, now) == until
    assert (set(place(3, memory, now=now)) == {"u1"}) is (until is not None)


def test_ten_replicas_over_four_zones_differ_by_one_at_most() -> None:
    assert sorted(Counter(place(10)).values()) == [2, 2, 3, 3]


def test_replicas_of_another_version_occupy_their_zones() -> None:
    assert place(4, others=(replica(1, A1),)) == ["b1", "u1", "a2", "b1"]


@pytest.mark.parametrize(
    ("wanted", "extra", "limit", "launches", "target"),
    [
        pytest.param(3, 0, 99, 3, 3, id="as many as wanted"),
        pytest.param(3, 2, 99, 5, 5, id="and some more"),
        pytest.param(0, 2, 99, 0, 0, id="but none beside nothing"),
        pytest.param(3, 0, 2, 2, 3, id="as many as allowed"),
        pytest.param(3, 0, 0, 0, 3, id="none allowed"),
    ],
)
def test_how_many(wanted: int, extra: int, limit: int, launches: int, target: int) -> None:
    decided = decide(wanted, extra=extra, limit=limit)
    assert (len(decided.launches), decided.target) == (launches, target)


def test_the_surplus_ends() -> None:
    live = (replica(1, A1), replica(2, B1), replica(3, B1, S.STARTING), replica(4, B1))
    assert [end.replica_id for end in decide(2, live=live).ends] == [3, 4]


def test_the_order_of_offers_is_the_preference() -> None:
    assert place(1, offers=(B1, A1)) == ["b1"]


def test_nothing_is_placed_without_offers_or_without_need() -> None:
    assert place(3, offers=()) == []
    assert place(0) == []


def test_every_place_says_why() -> None:
    first, second = decide(2, offers=(A1,)).launches
    assert first.why == "no replica there yet"
    assert "1 there" in second.why


@pytest.mark.parametrize(
    ("event", "zones"),
    [
        pytest.param(NO_ROOM, ["a2", "b1", "u1"], id="no room: the zone"),
        pytest.param(Preempted(1), ["a2", "b1", "u1"], id="preempted: the zone"),
        pytest.param(PreemptionNotice(1, 30.0), ["a2", "b1", "u1"], id="a notice: the zone"),
        pytest.param(NodeLost(1), ["a2", "b1", "u1"], id="one node of several: the zone"),
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
    assert [p.offer.capacity_type for p in decide(1, learn(NO_ROOM), offers=offers).launches] == [ON_DEMAND]


def test_losing_an_on_demand_instance_that_was_ready_teaches_nothing() -> None:
    ready = replica(1, offer("c/a/a1", 1.0, ON_DEMAND), ready_at=1.0)
    assert learn(Preempted(1, lost=True), before=ready) == {}


@pytest.mark.parametrize(
    "event", [Preempted(1, lost=True), NodeLost(1)], ids=["a machine", "a node of several"]
)
def test_losing_an_on_demand_instance_before_it_was_ready_blocks_as_a_refusal_does(event: Event) -> None:
    where = offer("c/a/a1", 1.0, ON_DEMAND)
    lost = learn(event, before=replica(1, where, S.PROVISIONING))
    assert lost == learn(NO_ROOM, before=replica(1, where, S.REQUESTED))


@pytest.mark.parametrize(
    ("scope", "still_open"),
    [
        (None, ["a1-big", "a1-spot", "a2", "b1"]),
        (Scope.OFFER, ["a1-big", "a1-spot", "a2", "b1"]),
        (Scope.TYPE, ["a1-big", "b1"]),
        (Scope.ZONE, ["a2", "b1"]),
        (Scope.REGION, ["b1"]),
        (Scope.CLOUD, []),
    ],
)
def test_a_refusal_closes_what_it_is_about_for_an_hour(scope: Scope | None, still_open: list[str]) -> None:
    a1 = offer("c/a/a1", 1.0, ON_DEMAND)
    offers = {
        "a1": a1,
        "a1-big": replace(a1, instance_type="big"),
        "a1-spot": replace(a1, capacity_type=CapacityType.SPOT),
        "a2": offer("c/a/a2", 1.0, ON_DEMAND),
        "b1": offer("c/b/b1", 1.0, ON_DEMAND),
    }
    memory = learn(LaunchFailed(1, FailureKind.REFUSED, scope=scope), before=replica(1, a1), now=0.0)
    closed = memory["blocks"]

    def open_at(now: float) -> list[str]:
        found = zone_backoff.open_offers(list(offers.values()), closed, now)
        return [name for name, one in offers.items() if one in found]

    assert open_at(3599.0) == still_open
    assert open_at(3600.0) == list(offers)
    again = learn(
        LaunchFailed(1, FailureKind.REFUSED, scope=scope), memory=memory, before=replica(1, a1), now=3600.0
    )
    assert zone_backoff.next_opening((a1,), again["blocks"], 3600.0) == 3600.0 + 7200.0
    arrived = learn(ProbePassed(1), memory=again, before=replica(1, a1, S.STARTING), now=4000.0)
    assert arrived == {}


def test_a_denied_region_leaves_the_others_open() -> None:
    a1, b1 = offer("c/a/a1", 1.0), offer("c/b/b1", 1.0)
    memory = learn(LaunchFailed(1, FailureKind.AUTH, scope=Scope.REGION), before=replica(1, a1), now=0.0)
    assert zone_backoff.open_offers((a1, b1), memory["blocks"], 0.0) == [b1]
    assert learn(Launched(1, "i-1"), memory=memory, before=replica(1, a1), now=1.0) == {}


def test_a_quota_of_the_cloud_closes_all_its_regions() -> None:
    a1, b1 = offer("c/a/a1", 1.0), offer("c/b/b1", 1.0)
    memory = learn(
        LaunchFailed(1, FailureKind.QUOTA, retry_at=90.0, scope=Scope.CLOUD), before=replica(1, a1)
    )
    assert zone_backoff.open_offers((a1, b1), memory["blocks"], 89.0) == []


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
        pytest.param((B1,), None, id="none is blocked"),
        pytest.param((A1, B1), 10.0, id="of those that are blocked, the first"),
        pytest.param((A1,), 10.0, id="the only one is blocked"),
    ],
)
def test_next_opening(offers: tuple[Offer, ...], opens_at: float | None) -> None:
    assert next_opening(offers, learn(NO_ROOM), 0.0) == opens_at


# --- when to look again, and what to say ----------------------------------------------------------------------

A1_BLOCKED = learn(NO_ROOM)


@pytest.mark.parametrize(
    ("wanted", "offers", "now", "wake_at"),
    [
        pytest.param(1, (A1,), 0.0, 10.0, id="something is missing and all is blocked"),
        pytest.param(1, (A1, B1), 0.0, None, id="it could be placed"),
        pytest.param(0, (A1,), 0.0, None, id="nothing is missing"),
        pytest.param(1, (A1,), 10.0, None, id="the wait is over"),
    ],
)
def test_it_wakes_when_a_zone_opens(
    wanted: int, offers: tuple[Offer, ...], now: float, wake_at: float | None
) -> None:
    assert decide(wanted, A1_BLOCKED, offers=offers, now=now).wake_at == wake_at


@pytest.mark.parametrize(
    ("live", "offers", "now", "said"),
    [
        pytest.param((), (A1,), 0.0, True, id="all zones wait"),
        pytest.param(
            (replica(1, A1, S.REQUESTED),), (A1,), 20.0, True, id="still true while one is asked again"
        ),
        pytest.param((), (A1, B1), 0.0, False, id="one has not refused"),
        pytest.param((replica(1, A1),), (A1,), 0.0, False, id="nothing is missing"),
    ],
)
def test_the_note_stands_while_no_zone_has_room(
    live: tuple[Replica, ...], offers: tuple[Offer, ...], now: float, said: bool
) -> None:
    """A note that comes and goes with every attempt would fill the story."""
    assert bool(decide(1, A1_BLOCKED, live=live, offers=offers, now=now).notes) is said


# --- what placers count ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "since", "counts", "grace_ends_at"),
    [
        pytest.param(S.READY, 0.0, 1, None, id="ready"),
        pytest.param(S.NOT_READY, 90.0, 1, 120.0, id="just not ready"),
        pytest.param(S.NOT_READY, 70.0, 0, None, id="not ready for long"),
        pytest.param(S.STARTING, 90.0, 0, None, id="starting"),
    ],
)
def test_who_serves(state: S, since: float, counts: int, grace_ends_at: float | None) -> None:
    one = (replica(1, A1, state, since=since),)
    assert fleet.ready(one, 100.0) == counts
    assert fleet.grace_ends_at(one, 100.0) == grace_ends_at


@pytest.mark.parametrize(
    ("live", "keep", "ended"),
    [
        pytest.param([(A1, S.READY), (B1, S.READY)], 2, [], id="nobody"),
        pytest.param(
            [(A1, S.READY), (B1, S.STARTING), (X1, S.REQUESTED)], 1, [3, 2], id="the least far first"
        ),
        pytest.param([(A1, S.READY), (A1, S.READY), (B1, S.READY)], 2, [2], id="from the fullest zone"),
        pytest.param([(A1, S.READY), (B1, S.READY)], 1, [2], id="the youngest"),
        pytest.param([(A1, S.READY)], -1, [1], id="never more than there are"),
    ],
)
def test_who_is_let_go(live: list[tuple[Offer, S]], keep: int, ended: list[int]) -> None:
    replicas = [replica(i, where, state) for i, (where, state) in enumerate(live, 1)]
    assert [end.replica_id for end in fleet.ends(replicas, keep, "why")] == ended


def test_a_replica_that_is_lost_twice_in_one_moment_is_one_loss() -> None:
    events = [PreemptionNotice(1, 30.0), Preempted(1), NodeLost(1)]
    assert [lost.id for lost in zone_backoff.losses(events, {1: replica(1, A1)})] == [1]
