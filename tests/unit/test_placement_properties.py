"""What holds of every placer in every market. `placement_world.World` checks each tick; see there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.goals import Goal, ScalingGoal
from policies.model import CapacityType, Replica, Zone
from policies.placement.base import Decision, View
from policies.placement.zone_backoff import open_offers
from policies.registry import PLACERS
from tests.clouds.schedules import examples
from tests.unit.placement_world import ON_DEMAND, PLENTY, SPOT, S, World, a_goal, both, of_kind

NAMES = (
    "spread",
    "spothedge",
    "spothedge_literal",
    "even_spread",
    "round_robin",
    "single_zone",
    "single_region",
    "asg",
    "on_demand",
)
HEDGES = ("spothedge", "spothedge_literal")
ZONES = ("c/a/a1", "c/a/a2", "c/b/b1", "x/u/u1", "x/u/u2")

patterns = st.lists(
    st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=len(ZONES), max_size=len(ZONES)
)
goals = st.builds(
    a_goal,
    st.integers(0, 4),
    placer=st.sampled_from(NAMES),
    num_overprovision=st.integers(0, 2),
    dynamic_ondemand_fallback=st.booleans(),
    base_ondemand_fallback_replicas=st.integers(0, 2),
)


@pytest.mark.long
@settings(max_examples=examples(150), deadline=None)
@given(
    goals,
    patterns,
    st.integers(1, len(ZONES)),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([1.0, 30.0]),
)
def test_every_placer_keeps_the_laws_in_every_market(
    goal: Goal, pattern: list[list[int]], n_zones: int, sizes: list[int], tick_s: float
) -> None:
    # `spread` places on whatever is on offer; it is the only one that is never offered both kinds.
    offers = both(*ZONES[:n_zones])[: n_zones if goal.placement.placer == "spread" else None]
    names = [offer.zone for offer in offers]
    world = World(
        goal, offers, lambda zone, tick: pattern[names.index(zone)][tick % len(pattern[names.index(zone)])],
        tick_s=tick_s,
    )  # fmt: skip
    world.run(12)
    for size in sizes:
        world.goal = replace(world.goal, scaling=ScalingGoal(size, size))
        world.run(8)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.integers(2, 5),
    st.integers(0, 4),
    patterns,
    st.integers(1, 4),
    st.integers(0, 2),
    st.booleans(),
)
@example(3, 2, [[0], [0], [9], [0], [0]], 2, 0, True)  # where the printed algorithm tries for ever
def test_spothedge_reaches_its_number_whatever_the_other_zones_do(
    n_zones: int, good: int, pattern: list[list[int]], wanted: int, extra: int, fallback: bool
) -> None:
    """Flapping zones may take replicas and drop them again, but they run out of them: what a zone loses goes on to
    the next, and the good one keeps what it gets."""
    offers = both(*ZONES[:n_zones])
    zones = [offer.zone for offer in offers[:n_zones]]
    haven = zones[good % n_zones]

    def capacity(zone: Zone, tick: int) -> int:
        row = pattern[zones.index(zone)]
        return PLENTY if zone == haven else row[tick % len(row)]

    goal = a_goal(wanted, placer="spothedge", num_overprovision=extra, dynamic_ondemand_fallback=fallback)
    world = World(goal, offers, capacity)
    for _ in range(60):
        world.tick()
        held = [r for r in of_kind(world.counted, SPOT) if r.state is not S.REQUESTED]
        if len(held) == wanted + extra:
            return
    pytest.fail(f"{len(held)} of {wanted + extra} after 60 ticks: {world.zones()}")


@pytest.mark.parametrize("good", range(3), ids=lambda good: f"zone {good} is the good one")
@pytest.mark.parametrize(
    ("placer", "arrives"), [("spothedge_literal", False), ("spothedge", True)], ids=["as printed", "mended"]
)
def test_the_printed_refill_rule_never_asks_the_one_good_zone_of_three_again(
    placer: str, arrives: bool, good: int
) -> None:
    """The defect of Algorithm 1: two replicas wanted, one zone of three with all the room there is. The other two
    fail in turn, Z_P is emptied, and both are "zones without a replica" once more."""
    offers = both(*ZONES[:3])
    goal = a_goal(2, placer=placer, dynamic_ondemand_fallback=True)
    world = World(goal, offers, lambda zone, _: PLENTY if zone == offers[good].zone else 0).run(500)
    ready = [replica for replica in world.counted if replica.state is S.READY]
    assert (len(of_kind(ready, SPOT)) == 2) is arrives
    assert len(ready) == 2, "on-demand replicas stand in for what is missing"


@pytest.mark.parametrize("tick_s", [1.0, 30.0])
def test_a_zone_without_room_is_asked_less_and_less(tick_s: float) -> None:
    """Ten minutes of a dry market: two zones, each asked at 0, 10, 30, 70, 150, 310 s at the earliest."""
    goal = a_goal(2, placer="spothedge", dynamic_ondemand_fallback=True)
    world = World(goal, both(*ZONES[:2]), lambda *_: 0, tick_s=tick_s)
    world.run(int(600 / tick_s))
    assert 2 <= world.failed_launches <= 12
    assert world.zones(ON_DEMAND) == {"a1": 1, "a2": 1}


# --- one decision ----------------------------------------------------------------------------------------------

states = st.sampled_from([S.REQUESTED, S.PROVISIONING, S.STARTING, S.NOT_READY, S.READY])
OFFERS = both(*ZONES)


def a_fleet(first: int, version: int) -> st.SearchStrategy[tuple[Replica, ...]]:
    one = st.tuples(st.sampled_from(OFFERS), states, st.sampled_from([0.0, 90.0]))
    return st.lists(one, max_size=6).map(
        lambda given: tuple(
            Replica(first + i, version, offer, state, since, 0.0)
            for i, (offer, state, since) in enumerate(given)
        )
    )


zone_names = [str(offer.zone) for offer in OFFERS[: len(ZONES)]]
memories = st.fixed_dictionaries(
    {},
    optional={
        "preempting": st.lists(st.sampled_from([f"{zone} L4:1" for zone in zone_names]), unique=True),
        "blocks": st.dictionaries(
            st.sampled_from([*(f"{zone}|spot|L4:1" for zone in zone_names), "c/a/*|spot|L4", "c/*/*", "c/b/*|on_demand|L4", "c/b/*|spot"]),
            st.builds(lambda until: {"until": until, "failures": 1}, st.sampled_from([50.0, 110.0, 400.0])),
        ),
        "last": st.sampled_from(zone_names),
        "failed": st.lists(st.sampled_from(zone_names), unique=True),
    },
)  # fmt: skip
views = st.builds(
    View,
    now=st.just(100.0),
    wanted=st.integers(0, 6),
    goal=goals.map(lambda goal: goal.placement),
    replicas=a_fleet(1, 2),
    others=a_fleet(20, 1),
    offers=st.permutations(OFFERS).flatmap(
        lambda offers: st.integers(0, len(offers)).map(lambda n: tuple(offers[:n]))
    ),
    limit=st.integers(0, 5),
)


def count(decided: Decision, view: View, kind: CapacityType) -> tuple[int, int]:
    kinds = {replica.id: replica.offer.capacity_type for replica in view.replicas}
    launches = sum(place.offer.capacity_type is kind for place in decided.launches)
    return launches, sum(kinds[end.replica_id] is kind for end in decided.ends)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(200), deadline=None)
@given(view=views, memory=memories)
def test_a_decision_is_well_formed(name: str, view: View, memory: dict[str, object]) -> None:
    placer = PLACERS[name]()
    decided = placer.decide(view, memory)
    assert len(decided.launches) <= view.limit
    assert {place.offer for place in decided.launches} <= set(view.offers)
    assert len({end.replica_id for end in decided.ends}) == len(decided.ends)
    assert decided.wake_at is None or decided.wake_at > view.now
    assert all(place.why for place in decided.launches)
    for kind in (SPOT, ON_DEMAND):
        launches, ends = count(decided, view, kind)
        assert not (launches and ends) or name == "spread"
    if view.wanted == 0:
        assert not decided.launches
        assert decided.target == 0
    if not decided.launches:
        assert decided.memory == memory or name in HEDGES
    closed = {key for key, block in memory.get("blocks", {}).items() if block["until"] > view.now}  # type: ignore[attr-defined]
    for place in decided.launches:
        zone, kind = place.offer.zone, place.offer.capacity_type.value
        assert not closed & {f"{zone}|{kind}", f"{zone.cloud}/{zone.region}/*|{kind}", f"{zone.cloud}/*/*"}


@pytest.mark.long
@pytest.mark.parametrize("name", HEDGES)
@settings(max_examples=examples(300), deadline=None)
@given(view=views, memory=memories)
def test_a_hedge_never_buys_more_than_its_goal(name: str, view: View, memory: dict[str, object]) -> None:
    decided = PLACERS[name]().decide(view, memory)
    base = min(view.goal.base_ondemand_fallback_replicas, view.wanted)
    most = view.wanted if view.goal.dynamic_ondemand_fallback else base
    launches, _ = count(decided, view, ON_DEMAND)
    assert not launches or len(of_kind(view.replicas, ON_DEMAND)) + launches <= most
    launches, ends = count(decided, view, SPOT)
    after = len(of_kind(view.replicas, SPOT)) + launches - ends
    assert after <= (view.wanted - base + view.goal.num_overprovision if view.wanted else 0)
    on_demand_ends = count(decided, view, ON_DEMAND)[1]
    assert not (view.others and on_demand_ends), "nobody is taken away while versions change"


@pytest.mark.long
@settings(max_examples=examples(300), deadline=None)
@given(view=views, memory=memories)
def test_spothedge_is_never_idle_while_a_zone_is_open(view: View, memory: dict[str, object]) -> None:
    decided = PLACERS["spothedge"]().decide(view, memory)
    base = min(view.goal.base_ondemand_fallback_replicas, view.wanted)
    spot_wanted = view.wanted - base + view.goal.num_overprovision if view.wanted else 0
    if spot_wanted > len(of_kind(view.replicas, SPOT)) and not decided.launches and view.limit > 0:
        spot_offers = [offer for offer in view.offers if offer.capacity_type is SPOT]
        assert open_offers(spot_offers, memory.get("blocks", {}), view.now) == []  # type: ignore[arg-type]
        assert decided.wake_at is not None or not spot_offers
