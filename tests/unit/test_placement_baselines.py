"""The baselines: where each puts missing replicas, what it remembers, and what it does not do."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from policies.goals import PlacementGoal
from policies.model import Event, FailureKind, Launched, LaunchFailed, Offer, Preempted, Replica, ReplicaState
from policies.placement.base import Decision, View
from policies.registry import PLACERS
from tests.unit.placement_world import ON_DEMAND, PLENTY, SPOT, S, World, a_goal, an_offer, both, of_kind

NOW = 1000.0
OFFERS = both("c/a/a1", "c/a/a2", "c/b/b1")
A1, A2, B1 = OFFERS[:3]
SOLID = OFFERS[3]
POOLS = ("even_spread", "round_robin", "single_zone", "single_region", "asg")


def fleet(*where: Offer, state: ReplicaState = S.READY, first: int = 1) -> tuple[Replica, ...]:
    return tuple(Replica(first + i, 1, offer, state, 0.0, 0.0) for i, offer in enumerate(where))


def decide(
    name: str,
    live: tuple[Replica, ...] = (),
    memory: Any = None,
    *,
    wanted: int = 4,
    extra: int = 0,
    offers: tuple[Offer, ...] = OFFERS,
    limit: int = 99,
) -> Decision:
    view = View(NOW, wanted, PlacementGoal(name, extra), live, (), offers, limit)
    return PLACERS[name]().decide(view, memory or {})


def zones(decided: Decision) -> list[str]:
    return [place.offer.zone.name for place in decided.launches]


def learn(name: str, *events: Event, memory: Any = None, at: Offer = A1) -> Any:
    """What the events of replicas 1 to 3, all at one place, leave in the memory."""
    before = {n: Replica(n, 1, at, S.REQUESTED, 0.0, 0.0) for n in (1, 2, 3)}
    return json.loads(json.dumps(PLACERS[name]().learn(memory or {}, events, before, NOW)))


def blocked(key: str) -> dict[str, Any]:
    return {"blocks": {key: {"until": NOW + 60.0, "failures": 1}}}


# --- where ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("live", "options", "chosen"),
    [
        pytest.param((), {}, ["a1", "a1", "a2", "b1"], id="the remainder to the first zone"),
        pytest.param((), {"extra": 1}, ["a1", "a1", "a2", "a2", "b1"], id="the remainder to the first two"),
        pytest.param((), {"wanted": 2}, ["a1", "a2"], id="fewer than zones: the first ones only"),
        pytest.param(fleet(A1, A1, A2), {}, ["b1"], id="what a zone lacks is asked for there"),
        pytest.param(fleet(A1, A2, B1), {}, ["a1"], id="however it answered before"),
        pytest.param(
            fleet(A2, A2, B1), {}, ["a1"], id="one that has too many keeps them, one that lacks waits"
        ),
        pytest.param(fleet(A2, A2, B1, B1), {}, [], id="nobody is moved"),
        pytest.param(
            (), {"memory": blocked("c/a/*|spot|L4")}, ["b1"], id="a quota reached: no move elsewhere"
        ),
    ],
)
def test_even_spread(live: tuple[Replica, ...], options: dict[str, Any], chosen: list[str]) -> None:
    assert zones(decide("even_spread", live, **options)) == chosen


@pytest.mark.parametrize(
    ("live", "memory", "chosen", "last"),
    [
        pytest.param((), {}, ["a1", "a2", "b1", "a1"], "c/a/a1", id="from the first zone, round and round"),
        pytest.param((), {"last": "c/a/a1"}, ["a2", "b1", "a1", "a2"], "c/a/a2", id="on from the last attempt"),
        pytest.param(fleet(A1, A2, B1), {"last": "c/b/b1"}, ["a1"], "c/a/a1", id="whatever is where"),
        pytest.param((), {"last": "c/z/gone"}, ["a1", "a2", "b1", "a1"], "c/a/a1", id="the last zone is gone"),
        pytest.param(fleet(A1, A1, A1, A1), {"last": "c/a/a1"}, [], "c/a/a1", id="no launch, no step"),
        pytest.param((), blocked("c/a/*|spot|L4"), ["b1", "b1", "b1", "b1"], "c/b/b1", id="past those out of quota"),
    ],
)  # fmt: skip
def test_round_robin(live: tuple[Replica, ...], memory: dict[str, Any], chosen: list[str], last: str) -> None:
    decided = decide("round_robin", live, memory)
    assert zones(decided) == chosen
    assert decided.memory["last"] == last


def test_round_robin_steps_once_per_launch_that_is_allowed() -> None:
    decided = decide("round_robin", limit=2)
    assert (zones(decided), decided.memory) == (["a1", "a2"], {"last": "c/a/a2"})


@pytest.mark.parametrize(
    ("name", "chosen", "home"),
    [
        pytest.param("single_zone", ["a1"] * 4, "c/a/a1", id="a zone"),
        pytest.param("single_region", ["a1", "a2", "a1", "a2"], "c/a", id="a region"),
    ],
)
def test_one_place_stays_the_place(name: str, chosen: list[str], home: str) -> None:
    decided = decide(name)
    assert (zones(decided), decided.memory) == (chosen, {"home": home})
    turned = (B1, A2, A1)
    assert sorted(zones(decide(name, memory=decided.memory, offers=turned))) == sorted(chosen)
    assert set(zones(decide(name, offers=turned))) == {"b1"}, "another order, another first place"
    assert set(zones(decide(name, memory=decided.memory, offers=(B1,)))) == {"b1"}, "the place is gone"


@pytest.mark.parametrize(
    ("live", "memory", "chosen"),
    [
        pytest.param(fleet(A1, A1, A2), {"home": "c/a"}, ["a2"], id="the zone with the fewest"),
        pytest.param(
            (), {"home": "c/a", "failed": ["c/a/a1"]}, ["a2"] * 4, id="not the one that just failed"
        ),
        pytest.param(
            (), {"home": "c/a", "failed": ["c/a/a1", "c/a/a2"]}, ["a1", "a2"] * 2, id="all failed: all again"
        ),
        pytest.param((), {"home": "c/a", **blocked("c/a/*|spot|L4")}, [], id="no quota: not elsewhere"),
    ],
)
def test_single_region(live: tuple[Replica, ...], memory: dict[str, Any], chosen: list[str]) -> None:
    assert zones(decide("single_region", live, memory)) == chosen


@pytest.mark.parametrize(
    ("event", "failed"),
    [
        pytest.param(LaunchFailed(1, FailureKind.CAPACITY), ["c/a/a1", "c/a/a2"], id="no room"),
        pytest.param(Preempted(1), ["c/a/a1", "c/a/a2"], id="a preemption"),
        pytest.param(LaunchFailed(1, FailureKind.QUOTA), ["c/a/a2"], id="a quota"),
        pytest.param(Launched(1, "i"), ["c/a/a2"], id="a launch"),
    ],
)
def test_what_counts_as_a_failed_attempt(event: Event, failed: list[str]) -> None:
    assert learn("single_region", event, memory={"failed": ["c/a/a2"]})["failed"] == failed


def test_a_launch_that_succeeds_brings_its_zone_back() -> None:
    memory = {"home": "c/a", "failed": ["c/a/a1", "c/a/a2"]}
    assert learn("single_region", Launched(1, "i"), memory=memory) == {"home": "c/a", "failed": ["c/a/a2"]}


@pytest.mark.parametrize(
    ("wanted", "extra", "pool"),
    [(1, 0, 1), (4, 0, 1), (4, 1, 1), (10, 0, 1), (10, 1, 2), (30, 0, 3), (0, 1, 0)],
)
def test_asg_keeps_a_tenth_on_demand_rounded_up(wanted: int, extra: int, pool: int) -> None:
    kinds = Counter(p.offer.capacity_type for p in decide("asg", wanted=wanted, extra=extra).launches)
    assert kinds[ON_DEMAND] == pool
    assert kinds[SPOT] == (wanted + extra if wanted else 0) - pool


def test_on_demand_is_cheapest_first_and_knows_no_buffer() -> None:
    dear, cheap = an_offer("c/a/a1", 4.0, ON_DEMAND), an_offer("c/b/b1", 3.0, ON_DEMAND)
    decided = decide("on_demand", wanted=2, extra=2, offers=(A1, dear, cheap))
    assert [place.offer for place in decided.launches] == [cheap, cheap]
    assert decided.target == 2


# --- what they have in common ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POOLS)
def test_a_surplus_ends_and_nothing_is_launched_beside_it(name: str) -> None:
    live = fleet(A1, A1, A2, A2, B1)
    decided = decide(name, live, wanted=3)
    assert len([end for end in decided.ends if end.replica_id <= 5]) == (3 if name == "asg" else 2)
    assert SPOT not in {place.offer.capacity_type for place in decided.launches}


@pytest.mark.parametrize("name", [*POOLS, "on_demand"])
def test_nothing_wanted_nothing_kept(name: str) -> None:
    decided = decide(name, fleet(A1, SOLID), wanted=0, extra=2)
    assert sorted(end.replica_id for end in decided.ends) == [1, 2]
    assert (decided.target, list(decided.launches)) == (0, [])


@pytest.mark.parametrize("name", POOLS)
def test_they_ask_again_at_every_tick(name: str) -> None:
    world = World(a_goal(3, placer=name), OFFERS, lambda *_: 0).run(50)
    spot_missing = 2 if name == "asg" else 3
    assert world.failed_launches == 50 * spot_missing
    assert "blocks" not in world.memory.placement


@pytest.mark.parametrize("name", POOLS)
def test_a_quota_is_respected_until_its_time(name: str) -> None:
    memory = learn(name, LaunchFailed(1, FailureKind.QUOTA, retry_at=NOW + 60.0))
    only_a = (A1, A2, *OFFERS[3:])
    decided = decide(name, memory=memory, offers=only_a)
    assert SPOT not in {place.offer.capacity_type for place in decided.launches}
    assert decided.wake_at == NOW + 60.0
    assert decided.notes


@pytest.mark.parametrize("name", ["even_spread", "single_zone"])
def test_who_waits_for_one_zone_wakes_when_it_opens(name: str) -> None:
    """Other zones are open, but they are not for this policy."""
    memory = {"home": "c/a/a1", **blocked("c/a/*|spot|L4")}
    decided = decide(name, fleet(B1), memory, wanted=3)
    assert list(decided.launches) == []
    assert decided.wake_at == NOW + 60.0


@pytest.mark.parametrize(
    ("name", "live", "ended"),
    [
        pytest.param("round_robin", fleet(A1, A2, SOLID, SOLID), [4], id="a stand-in for each spot replica that serves"),
        pytest.param(
            "round_robin", fleet(A1, A2, state=S.STARTING) + fleet(SOLID, SOLID, SOLID, first=3), [],
            id="none before",
        ),
        pytest.param("on_demand", fleet(A1, A2, B1, SOLID), [3], id="spot, as on-demand replicas come to serve"),
        pytest.param("on_demand", fleet(SOLID, SOLID, SOLID, A1), [4], id="all of it in the end"),
    ],
)  # fmt: skip
def test_what_another_placer_left_goes_when_it_is_replaced(
    name: str, live: tuple[Replica, ...], ended: list[int]
) -> None:
    assert [end.replica_id for end in decide(name, live, wanted=3).ends] == ended


@pytest.mark.parametrize(("before", "after"), [("spothedge", "on_demand"), ("on_demand", "round_robin")])
def test_from_one_placer_to_another_without_a_gap(before: str, after: str) -> None:
    world = World(a_goal(3, placer=before), OFFERS, lambda *_: PLENTY).run(10)
    world.goal = replace(world.goal, placement=replace(world.goal.placement, placer=after))
    for _ in range(12):
        world.tick()
        assert sum(replica.state is S.READY for replica in world.fleet.values()) >= 3
    kind = ON_DEMAND if after == "on_demand" else SPOT
    assert len(of_kind(world.counted, kind)) == len(world.counted) == 3
