"""Spreading again a fleet that has gathered in one zone: when, where and how often, as truth tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.goals import PlacementGoal
from policies.model import Json, Launch, Replica
from policies.placement.base import Decision, View
from policies.placement.static import Static
from tests.unit.placement_world import ON_DEMAND, SPOT, S, World, a_goal, an_offer

NOW, AFTER_S = 10_000.0, 1800.0
A, B, C = an_offer("c/r/a"), an_offer("c/r/b"), an_offer("c/s/c")
DEAR = an_offer("c/s/c", 2.1)
HOST = replace(an_offer("ssh/box/box", 0.0), places=9)
SHUT = {"blocks": {"c/r/b|spot|L4:1": {"until": NOW + 60.0, "failures": 1}}}


def fleet(zones: str, *, state: S = S.READY, since: float = 0.0) -> tuple[Replica, ...]:
    """Replicas in the zones named by letters; `state` and `since` are those of the last."""
    by_name = {"a": A, "b": B, "c": C, "d": replace(A, capacity_type=ON_DEMAND), "h": HOST}
    live = [Replica(i, 1, by_name[zone], S.READY, 0.0, 0.0) for i, zone in enumerate(zones, 1)]
    live[-1] = replace(live[-1], state=state, since=since, created_at=since)
    return tuple(live)


def decide(
    live: tuple[Replica, ...],
    *,
    wanted: int = 3,
    offers: tuple[object, ...] = (A, B),
    memory: Json | None = None,
    others: tuple[Replica, ...] = (),
    after_s: float = AFTER_S,
    limit: int = 99,
) -> Decision:
    goal = PlacementGoal(spread_again_after_s=after_s)
    return Static().decide(View(NOW, wanted, goal, live, others, offers, limit), memory or {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("decided", "zones"),
    [
        pytest.param(decide(fleet("aaa")), ["b"], id="all in one zone: one more elsewhere"),
        pytest.param(decide(fleet("aaaa"), wanted=4), ["b"], id="one at a time"),
        pytest.param(decide(fleet("aaab"), wanted=4), ["b"], id="more than half in one zone"),
        pytest.param(decide(fleet("aab")), [], id="spread as well as it goes over two zones"),
        pytest.param(decide(fleet("a"), wanted=1), [], id="a single replica"),
        pytest.param(decide(fleet("aaa"), offers=(A,)), [], id="no other zone"),
        pytest.param(decide(fleet("aaa"), offers=(A, DEAR)), [], id="only a zone that is too dear"),
        pytest.param(decide(fleet("aaa"), memory=SHUT), [], id="the other zone refused a moment ago"),
        pytest.param(decide(fleet("aaa", since=NOW - 60.0)), [], id="not before it has lasted"),
        pytest.param(
            decide(fleet("aaa"), memory={"spread_again_at": NOW - 60.0}), [], id="not twice in a row"
        ),
        pytest.param(decide(fleet("aaa"), memory={"spread_again_at": 0.0}), ["b"], id="but later again"),
        pytest.param(decide(fleet("aaa", state=S.NOT_READY)), [], id="not while one is not ready"),
        pytest.param(decide(fleet("aaa"), others=fleet("a")), [], id="not during a rolling update"),
        pytest.param(decide(fleet("aaa"), limit=0), [], id="not while launches are held back"),
        pytest.param(decide(fleet("aaa"), after_s=0.0), [], id="not if it is turned off"),
        pytest.param(decide(fleet("ddd")), [], id="on-demand replicas stay"),
    ],
)
def test_when_one_more_is_launched_elsewhere(decided: Decision, zones: list[str]) -> None:
    assert [place.offer.zone.name for place in decided.launches] == zones
    assert not decided.ends, "nothing ends before the new replica is ready"
    assert (decided.memory.get("spread_again_at") == NOW) == bool(zones)


@pytest.mark.parametrize(
    ("state", "ended"),
    [(S.REQUESTED, []), (S.PROVISIONING, []), (S.STARTING, []), (S.READY, [3])],
    ids=lambda value: value.value if isinstance(value, S) else "",
)
def test_one_in_the_crowded_zone_ends_when_the_new_one_is_ready(state: S, ended: list[int]) -> None:
    decided = decide(fleet("aaab", state=state, since=NOW), memory={"spread_again_at": NOW})
    assert [end.replica_id for end in decided.ends] == ended
    assert not decided.launches


def test_another_replica_too_many_ends_at_once() -> None:
    decided = decide(fleet("aaab", state=S.STARTING, since=NOW), memory={})
    assert [end.replica_id for end in decided.ends] == [4]


def test_it_wakes_up_for_the_attempt() -> None:
    assert decide(fleet("aaa", since=NOW - 60.0)).wake_at == NOW - 60.0 + AFTER_S


def test_a_fleet_of_six_is_spread_and_then_left_alone() -> None:
    open_at = 20
    world = World(
        a_goal(6, placer="spread"),
        (A, B, C),
        lambda zone, tick: 9 if zone == A.zone or tick >= open_at else 0,
    )
    world.run(10)
    assert world.zones() == {"a": 6}
    for _ in range(400):
        decided = world.tick()
        launches = [each for each in decided.actions if isinstance(each, Launch)]
        assert len(launches) <= 1
        assert len([each for each in world.counted if each.state is S.READY]) >= 6
    assert world.zones() == {"a": 3, "b": 1, "c": 2}
    numbers = {each.id for each in world.counted}
    world.run(400)
    assert {each.id for each in world.counted} == numbers, "no replica is moved back"
    assert all(each.offer.capacity_type is SPOT for each in world.counted)
