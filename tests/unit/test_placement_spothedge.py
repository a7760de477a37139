"""SpotHedge: how many of which kind, where they go, what it learns, and the story of the paper's figure 7."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from policies.goals import PlacementGoal, UpdateMode
from policies.model import (
    Event,
    FailureKind,
    LaunchFailed,
    Offer,
    Preempted,
    PreemptionNotice,
    ProbePassed,
    Replica,
    ReplicaState,
    Zone,
)
from policies.placement.base import Decision, View
from policies.placement.spothedge import SpotHedge, as_printed
from tests.unit.placement_world import ON_DEMAND, PLENTY, SPOT, S, World, a_goal, an_offer, both, of_kind

NOW = 1000.0
OFFERS = both("c/a/a1", "c/b/b1", "x/u/u1")
A1, B1, U1 = OFFERS[:3]
READY, STARTING, ASKED, NOT_READY = S.READY, S.STARTING, S.REQUESTED, S.NOT_READY


def replicas(
    *states: ReplicaState, of: tuple[Offer, ...] = OFFERS[:3], first: int = 1, since: float = 0.0
) -> tuple[Replica, ...]:
    return tuple(Replica(first + i, 1, of[i % len(of)], state, since, 0.0) for i, state in enumerate(states))


def decide(
    live: tuple[Replica, ...] = (),
    memory: Any = None,
    *,
    wanted: int = 4,
    extra: int = 1,
    base: int = 0,
    fallback: bool = True,
    others: tuple[Replica, ...] = (),
    offers: tuple[Offer, ...] = OFFERS,
    limit: int = 99,
    now: float = NOW,
    policy: SpotHedge | None = None,
) -> Decision:
    goal = PlacementGoal("spothedge", extra, fallback, base)
    view = View(now, wanted, goal, live, others, offers, limit)
    return (policy or SpotHedge()).decide(view, memory or {})


def kinds(decided: Decision) -> tuple[int, int]:
    """Launches: (spot, on-demand)."""
    found = Counter(place.offer.capacity_type for place in decided.launches)
    return found[SPOT], found[ON_DEMAND]


def zones(decided: Decision) -> list[str]:
    return [place.offer.zone.name for place in decided.launches if place.offer.capacity_type is SPOT]


def blocked(*zones: str, until: float = NOW + 60.0, kind: str = "spot") -> dict[str, Any]:
    return {"blocks": {f"{zone}|{kind}|L4:1": {"until": until, "failures": 1} for zone in zones}}


def stand_ins(*states: ReplicaState) -> tuple[Replica, ...]:
    return replicas(*states, of=OFFERS[3:], first=50)


# --- how many: O(t) = min(N_tar, N_tar + N_extra - S_r) -------------------------------------------------------


@pytest.mark.parametrize(
    ("spot", "launches"),
    [
        pytest.param([], (5, 4), id="an empty fleet: all spot, and a stand-in for each wanted one"),
        pytest.param([STARTING] * 5, (0, 4), id="spot that is not ready yet does not serve"),
        pytest.param([READY] * 1 + [STARTING] * 4, (0, 4), id="one ready: N_tar at most"),
        pytest.param([READY] * 3 + [STARTING] * 2, (0, 2), id="three ready: two stand in"),
        pytest.param([READY] * 4 + [STARTING], (0, 1), id="N_tar ready: one still stands in for the buffer"),
        pytest.param([READY] * 5, (0, 0), id="all ready: none"),
        pytest.param([READY] * 4, (1, 1), id="one lost: replaced on spot, and on demand until it is ready"),
        pytest.param([READY] * 4 + [ASKED], (0, 1), id="one asked for is not asked for twice"),
    ],
)
def test_dynamic_fallback(spot: list[ReplicaState], launches: tuple[int, int]) -> None:
    assert kinds(decide(replicas(*spot))) == launches


@pytest.mark.parametrize(
    ("live", "options", "launches"),
    [
        pytest.param((), {"fallback": False}, (5, 0), id="no fallback: spot only"),
        pytest.param((), {"base": 1}, (4, 4), id="a base of one: three may be stood in for"),
        pytest.param((), {"base": 1, "fallback": False}, (4, 1), id="a base without fallback"),
        pytest.param(replicas(*[READY] * 4), {"base": 1}, (0, 1), id="the base is there however well spot does"),
        pytest.param((), {"base": 9}, (1, 4), id="a base beyond the wanted: all of them, and the buffer on spot"),
        pytest.param((), {"wanted": 0}, (0, 0), id="nothing wanted: no buffer either"),
        pytest.param((), {"wanted": 0, "base": 2}, (0, 0), id="nothing wanted: no base either"),
        pytest.param((), {"extra": 0, "wanted": 2}, (2, 2), id="no buffer"),
        pytest.param((), {"limit": 0}, (0, 0), id="no launch allowed"),
        pytest.param((), {"limit": 3}, (0, 3), id="three allowed, nothing serves: on demand first"),
        pytest.param(
            replicas(*[READY] * 2, STARTING), {"wanted": 2, "extra": 2, "limit": 1}, (1, 0),
            id="one allowed, enough serve: spot first",
        ),
        pytest.param(stand_ins(*[STARTING] * 4), {}, (5, 0), id="stand-ins on their way are not bought twice"),
        pytest.param((), {"offers": OFFERS[:3]}, (5, 0), id="nothing on offer on demand"),
        pytest.param((), {"offers": OFFERS[3:]}, (0, 4), id="nothing on offer on spot"),
        pytest.param((), {"offers": ()}, (0, 0), id="nothing on offer"),
    ],
)  # fmt: skip
def test_how_many(live: tuple[Replica, ...], options: dict[str, Any], launches: tuple[int, int]) -> None:
    assert kinds(decide(live, **options)) == launches


@pytest.mark.parametrize(
    ("live", "options", "ended"),
    [
        pytest.param(
            replicas(*[READY] * 5) + stand_ins(READY, STARTING), {}, [50, 51], id="spot is back: no stand-ins"
        ),
        pytest.param(
            replicas(*[READY] * 4, STARTING) + stand_ins(READY, STARTING), {}, [51],
            id="one still missing: the stand-in that serves stays",
        ),
        pytest.param(replicas(*[READY] * 4, STARTING) + stand_ins(READY), {}, [], id="as many as needed"),
        pytest.param(replicas(*[READY] * 5) + stand_ins(READY, READY), {"base": 1}, [5, 51], id="the base stays"),
        pytest.param(replicas(*[READY] * 5, STARTING), {}, [6], id="too many on spot: one that does not serve"),
        pytest.param(replicas(*[READY] * 4) + stand_ins(READY), {"wanted": 0}, [1, 2, 3, 4, 50], id="none wanted"),
        pytest.param(
            replicas(*[READY] * 5) + stand_ins(READY), {"others": replicas(READY, first=90)}, [],
            id="while another version is there, nothing that serves is in the way",
        ),
    ],
)  # fmt: skip
def test_who_is_ended(live: tuple[Replica, ...], options: dict[str, Any], ended: list[int]) -> None:
    assert sorted(end.replica_id for end in decide(live, **options).ends) == ended


def test_one_failed_probe_buys_no_replica_until_its_grace_is_over() -> None:
    live = replicas(*[READY] * 4) + replicas(NOT_READY, first=5, since=NOW - 10.0)
    soon = decide(live)
    assert kinds(soon) == (0, 0)
    assert soon.wake_at == NOW + 20.0
    late = decide(live, now=NOW + 20.0)
    assert kinds(late) == (0, 1)
    assert late.wake_at is None


@pytest.mark.parametrize(
    ("others", "memory", "launches"),
    [
        pytest.param((READY,) * 5, {}, (5, 0), id="the old version serves on spot: nobody need stand in"),
        pytest.param(
            (READY,) * 5, blocked("c/a/a1", "c/b/b1", "x/u/u1"), (0, 4),
            id="a dry market: the new version does not wait for the old one's capacity",
        ),
        pytest.param((STARTING,) * 5, {}, (5, 4), id="an old version that does not serve is no help"),
    ],
)  # fmt: skip
def test_beside_another_version(
    others: tuple[ReplicaState, ...], memory: dict[str, Any], launches: tuple[int, int]
) -> None:
    assert kinds(decide(others=replicas(*others, first=90), memory=memory)) == launches


def test_target_is_what_should_serve() -> None:
    assert decide().target == 5
    assert decide(wanted=0).target == 0


# --- where: SELECT-NEXT-ZONE ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("live", "memory", "chosen"),
    [
        pytest.param((), {}, ["a1", "b1", "u1", "a1", "b1"], id="one zone after another"),
        pytest.param(replicas(READY), {}, ["b1", "u1", "a1", "b1"], id="zones without one first"),
        pytest.param(stand_ins(READY), {}, ["a1", "b1", "u1", "a1", "b1"], id="only spot replicas crowd a zone"),
        pytest.param(replicas(ASKED), {}, ["b1", "u1", "a1", "b1"], id="one asked for counts"),
        pytest.param((), {"preempting": ["c/a/a1 L4:1"]}, ["b1", "u1", "b1", "u1", "b1"], id="not where it preempts"),
        pytest.param((), blocked("c/a/a1"), ["b1", "u1", "b1", "u1", "b1"], id="not where it just refused"),
        pytest.param(
            (), blocked("c/a/a1", until=NOW), ["a1", "b1", "u1", "a1", "b1"], id="but again when the wait is over"
        ),
        pytest.param(
            (), {"preempting": ["c/a/a1 L4:1"], **blocked("c/b/b1", "x/u/u1")}, ["a1"] * 5,
            id="where it preempts, if all others wait",
        ),
        pytest.param((), blocked("c/a/a1", "c/b/b1", "x/u/u1"), [], id="nowhere, if all wait"),
        pytest.param(
            (), {"preempting": ["c/a/a1 L4:1", "c/b/b1 L4:1", "x/u/u1 L4:1"]}, ["a1", "b1", "u1", "a1", "b1"],
            id="no zone left: all are available again",
        ),
        pytest.param(
            (), {"preempting": ["c/a/a1 L4:1", "c/z/gone L4:1"]}, ["b1", "u1", "b1", "u1", "b1"],
            id="a zone no longer on offer is no matter",
        ),
    ],
)  # fmt: skip
def test_where(live: tuple[Replica, ...], memory: dict[str, Any], chosen: list[str]) -> None:
    assert zones(decide(live, memory)) == chosen


@pytest.mark.parametrize(
    ("prices", "chosen"),
    [
        pytest.param((1.0, 1.0, 1.0, 1.0), ["a1", "b1", "a2", "b2", "a1"], id="one price: zones, then regions"),
        pytest.param((1.0, 1.04, 1.04, 1.0), ["a1", "b1", "a2", "b2", "a1"], id="four per cent are the same price"),
        pytest.param((1.2, 1.2, 1.0, 1.1), ["b1", "b2", "a1", "a2", "b1"], id="new zones by price, then the cheapest"),
        pytest.param((3.0, 3.0, 3.0, 1.0), ["b2", "a1", "b2", "b2", "b2"], id="one dear zone, then the cheap one"),
    ],
)  # fmt: skip
def test_min_cost(prices: tuple[float, ...], chosen: list[str]) -> None:
    names = ("c/a/a1", "c/a/a2", "c/b/b1", "c/b/b2")
    offers = tuple(an_offer(name, price) for name, price in zip(names, prices, strict=True))
    assert zones(decide(offers=offers)) == chosen


def test_as_printed_a_cent_is_a_difference_and_regions_are_not_seen() -> None:
    offers = tuple(
        an_offer(name, price) for name, price in [("c/a/a1", 1.01), ("c/a/a2", 1.0), ("c/b/b1", 1.01)]
    )
    assert zones(decide(offers=offers, wanted=4, policy=as_printed())) == ["a2", "a1", "b1", "a2", "a2"]


def test_on_demand_goes_where_it_is_cheapest() -> None:
    dear, cheap, cheap_too = (
        an_offer("c/a/a1", 4.0, ON_DEMAND),
        an_offer("c/b/b1", 3.0, ON_DEMAND),
        an_offer("x/u/u1", 3.1, ON_DEMAND),
    )
    decided = decide(offers=(dear, cheap, cheap_too), wanted=3)
    assert [place.offer for place in decided.launches] == [cheap, cheap_too, cheap]
    none_there = blocked("c/b/b1", "x/u/u1", kind="on_demand")
    assert [p.offer for p in decide(memory=none_there, offers=(dear, cheap), wanted=1).launches] == [dear]


# --- when to look again, and what to say ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "options", "wake_at"),
    [
        pytest.param({}, {}, None, id="everything was placed"),
        pytest.param(blocked("c/a/a1"), {}, None, id="some zone is open"),
        pytest.param(
            blocked("c/a/a1", "c/b/b1", "x/u/u1"), {}, NOW + 60.0, id="all wait: when the first opens"
        ),
        pytest.param(blocked("c/a/a1", "c/b/b1", "x/u/u1"), {"wanted": 0}, None, id="nothing is wanted"),
        pytest.param(
            blocked("c/a/a1", "c/b/b1", "x/u/u1", kind="on_demand"), {}, NOW + 60.0, id="no room on demand"
        ),
        pytest.param({}, {"limit": 0}, None, id="launches are held back by others"),
        pytest.param(
            blocked("c/a/a1", "c/b/b1", "x/u/u1"),
            {"live": replicas(ASKED), "wanted": 1, "extra": 0, "fallback": False},
            None,
            id="all that is missing has been asked for",
        ),
    ],
)
def test_wake_at(memory: dict[str, Any], options: dict[str, Any], wake_at: float | None) -> None:
    assert decide(memory=memory, **options).wake_at == wake_at


@pytest.mark.parametrize(
    ("live", "memory", "notes"),
    [
        pytest.param((), {}, (), id="nothing refused"),
        pytest.param(
            (), blocked("c/a/a1", "c/b/b1", "x/u/u1"),
            ("5 more on spot wanted, but every zone refused when last asked",), id="every zone waits",
        ),
        pytest.param(
            replicas(READY, ASKED), blocked("c/a/a1", "c/b/b1", "x/u/u1", until=NOW - 1.0),
            ("4 more on spot wanted, but every zone refused when last asked",),
            id="while one of them is asked once more, it stands",
        ),
        pytest.param(
            replicas(*[READY] * 4, ASKED), blocked("c/a/a1", "c/b/b1", "x/u/u1", until=NOW - 1.0),
            ("1 more on spot wanted, but every zone refused when last asked",),
            id="and if it is the last one that is missing",
        ),
        pytest.param(replicas(*[READY] * 5), blocked("c/a/a1", "c/b/b1", "x/u/u1"), (), id="nothing is missing"),
    ],
)  # fmt: skip
def test_notes(live: tuple[Replica, ...], memory: dict[str, Any], notes: tuple[str, ...]) -> None:
    assert decide(live, memory).notes == notes


def test_every_action_says_why() -> None:
    decided = decide(replicas(READY, READY))
    assert {place.why for place in decided.launches} == {
        "2 of 5 spot replicas are ready", "no spot replica there yet", "fewest there, of the cheapest",
    }  # fmt: skip
    over = decide(replicas(*[READY] * 6) + stand_ins(READY))
    assert [end.why for end in over.ends] == ["6 spot replicas, 5 wanted", "6 of 5 spot replicas are ready"]


# --- what it learns: HANDLE-PREEMPTION, HANDLE-LAUNCH ---------------------------------------------------------


def learned(*events: Event, state: ReplicaState = READY, memory: Any = None, offer: Offer = A1) -> list[str]:
    """Z_P once the events of one moment, all of replica 1, are learned and decided on."""
    before = {1: Replica(1, 1, offer, state, 0.0, 0.0)}
    after = json.loads(json.dumps(SpotHedge().learn(memory or {}, events, before, NOW)))
    return list(decide(memory=after).memory.get("preempting", []))


@pytest.mark.parametrize(
    ("event", "state", "preempting"),
    [
        pytest.param(Preempted(1), READY, ["c/a/a1 L4:1"], id="a preemption"),
        pytest.param(PreemptionNotice(1, NOW + 30.0), READY, ["c/a/a1 L4:1"], id="its notice"),
        pytest.param(LaunchFailed(1, FailureKind.CAPACITY), ASKED, ["c/a/a1 L4:1"], id="no room"),
        pytest.param(LaunchFailed(1, FailureKind.QUOTA), ASKED, [], id="a quota says nothing about the zone"),
        pytest.param(LaunchFailed(1, FailureKind.AUTH), ASKED, [], id="nor does a permission"),
        pytest.param(ProbePassed(1), STARTING, [], id="a replica that became ready"),
    ],
)
def test_what_moves_a_zone(event: Event, state: ReplicaState, preempting: list[str]) -> None:
    assert learned(event, state=state) == preempting


def test_a_ready_replica_brings_its_zone_back() -> None:
    memory = {"preempting": ["c/a/a1 L4:1", "c/b/b1 L4:1"]}
    assert learned(ProbePassed(1), state=STARTING, memory=memory) == ["c/b/b1 L4:1"]
    assert learned(ProbePassed(1), state=NOT_READY, memory=memory) == ["c/a/a1 L4:1", "c/b/b1 L4:1"]


def test_on_demand_replicas_say_nothing_about_spot() -> None:
    solid = OFFERS[3]
    assert learned(LaunchFailed(1, FailureKind.CAPACITY), state=ASKED, offer=solid) == []
    assert learned(Preempted(1, lost=True), offer=solid) == []
    memory = {"preempting": ["c/a/a1 L4:1"]}
    assert learned(ProbePassed(1), state=STARTING, memory=memory, offer=solid) == ["c/a/a1 L4:1"]


@pytest.mark.parametrize(
    ("policy", "preempting"),
    [
        pytest.param(SpotHedge(), ["c/a/a1 L4:1", "c/b/b1 L4:1"], id="mended: when none is left"),
        pytest.param(as_printed(), [], id="as printed: when one is left"),
    ],
)
def test_when_preempting_zones_are_available_again(policy: SpotHedge, preempting: list[str]) -> None:
    memory = {"preempting": ["c/a/a1 L4:1", "c/b/b1 L4:1"]}
    assert decide(memory=memory, policy=policy).memory.get("preempting", []) == preempting


def test_a_loss_that_nobody_replaces_is_settled_at_once() -> None:
    """Not at some later tick on which nothing happens, which would be a write for nothing."""
    assert decide(memory={"preempting": ["c/a/a1 L4:1"]}, wanted=0, offers=both("c/a/a1")).memory == {}


def test_a_zone_that_fails_as_the_last_one_is_the_first_of_the_next_round() -> None:
    """Z_P is emptied between the two failures of one moment, as if they had come one after the other."""
    memory = {"preempting": ["c/b/b1 L4:1", "x/u/u1 L4:1"]}
    before = {n: Replica(n, 1, A1, ASKED, 0.0, 0.0) for n in (1, 2)}
    failures = [LaunchFailed(n, FailureKind.CAPACITY) for n in before]
    after = SpotHedge().learn(memory, failures, before, NOW)
    assert decide(memory=after).memory["preempting"] == ["c/a/a1 L4:1"]


def test_only_the_mended_one_waits_before_it_asks_again() -> None:
    before = {1: Replica(1, 1, A1, ASKED, 0.0, 0.0)}
    failure = [LaunchFailed(1, FailureKind.CAPACITY)]
    assert "blocks" in SpotHedge().learn({}, failure, before, NOW)
    assert "blocks" not in as_printed().learn({}, failure, before, NOW)
    quota = [LaunchFailed(1, FailureKind.QUOTA)]
    assert list(as_printed().learn({}, quota, before, NOW)["blocks"]) == ["c/a/*|spot|L4"]


# --- over time ------------------------------------------------------------------------------------------------


def test_the_story_of_figure_7() -> None:
    """Four spot replicas over three zones, as zones come and go."""
    room = {"z1": 9, "z2": 0, "z3": 9}
    offers = both("c/r1/z1", "c/r2/z2", "c/r3/z3")
    goal = a_goal(4, placer="spothedge", dynamic_ondemand_fallback=True)
    world = World(goal, offers, lambda zone, _: room[zone.name])

    world.run(3)
    assert len(of_kind(world.counted, ON_DEMAND)) == 4, "on-demand replicas are launched at the same time"
    world.run(9)
    assert world.zones() == {"z1": 2, "z3": 2}, "zone 2 has no room and is a preempting zone"
    assert world.zones(ON_DEMAND) == {}, "the stand-ins are gone once spot replicas serve"
    assert world.memory.placement["preempting"] == ["c/r2/z2 L4:1"]

    room["z3"] = 0
    world.run(12)
    assert world.zones() == {"z1": 4}, "zone 3 became unavailable: its replicas move to zone 1"

    room.update(z1=0, z3=9)
    world.run(30)
    assert world.zones() == {"z3": 4}, "and as zone 1 does, to zone 3"

    room.update(z1=2, z2=2, z3=0)
    world.run(30)
    assert world.zones() == {"z1": 2, "z2": 2}, "zone 3 preempts: zones 1 and 2 are tried again"

    room.update(z1=0, z2=0)
    world.run(30)
    assert len(of_kind(world.counted, ON_DEMAND)) == 4, "nothing anywhere: all on demand"
    assert [r.state for r in of_kind(world.counted, SPOT) if r.state is not ASKED] == []

    room["z2"] = 9
    world.run(40)
    assert (world.zones(), world.zones(ON_DEMAND)) == ({"z2": 4}, {}), "and back"


@pytest.mark.parametrize(
    "room",
    [
        pytest.param({"a1": PLENTY, "b1": PLENTY}, id="there is room"),
        pytest.param({"a1": 3, "b1": 3}, id="there is room for one more"),
        pytest.param({"a1": 3, "b1": 2}, id="there is room for what is there"),
        pytest.param({"a1": 0, "b1": 0}, id="the market is dry"),
    ],
)
@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (0, 1), (3, 0)])
def test_an_update_comes_to_its_end(room: dict[str, int], surge: int, unavailable: int) -> None:
    """Old replicas on spot keep their room until they go; where there is none for new ones, on demand stands in."""
    goal = a_goal(4, placer="spothedge", num_overprovision=1, dynamic_ondemand_fallback=True)
    now = {"a1": PLENTY, "b1": PLENTY}
    world = World(goal, both("c/a/a1", "c/b/b1"), lambda zone, _: now[zone.name]).run(12)
    assert world.zones() == {"a1": 3, "b1": 2}
    now.update(room)
    world.goal = replace(
        goal, version=2, update_mode=UpdateMode.ROLLING, max_surge=surge, max_unavailable=unavailable
    )
    world.run(120)
    assert {replica.version for replica in world.fleet.values()} == {2}
    assert sum(replica.state is READY for replica in world.counted) >= 4
    assert len(of_kind(world.counted, ON_DEMAND)) == (0 if any(room.values()) else 4)


def test_a_new_zone_is_available_by_itself() -> None:
    room = {"a1": 0, "b1": PLENTY}
    goal = a_goal(2, placer="spothedge")
    world = World(goal, both("c/a/a1"), lambda zone, _: room[zone.name]).run(5)
    assert world.zones() in ({}, {"a1": 1}, {"a1": 2})
    world.offers = both("c/a/a1", "c/b/b1")
    assert world.run(5).zones() == {"b1": 2}
    assert Zone("c", "b", "b1") in {replica.zone for replica in world.counted}
