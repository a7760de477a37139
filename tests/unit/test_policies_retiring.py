"""Replicas whose machines are announced to go: replaced first, drained after, a few at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from policies.goals import Goal, UpdateMode
from policies.lifecycle import ANNOUNCED, REPLACED_FIRST, apply
from policies.model import EndReason, ReplicaState, RetireNotice, Role
from policies.placement.risk_hedge import MOST_EXTRA
from policies.retiring import MARGIN_S, drains_at, launch_limit, to_drain
from tests.unit.placement_world import ON_DEMAND, PLENTY, World, a_goal, an_offer, both
from tests.unit.test_policies_rollout import replica

S = ReplicaState
ZONES = ("g/a/a1", "g/a/a2", "g/b/b1")
HOUR = 3600.0


def world(wanted: int, placer: str, **facts: object) -> World:
    offers = both(*ZONES)
    if placer == "on_demand":
        offers = tuple(an_offer(zone, 3.0, ON_DEMAND) for zone in ZONES)
    extra = MOST_EXTRA if placer == "risk_hedge" else 0
    stands_in = placer in ("risk_hedge", "spothedge")
    goal = a_goal(wanted, placer=placer, num_overprovision=extra, dynamic_ondemand_fallback=stands_in)
    return World(replace(goal, **facts), offers, lambda zone, tick: PLENTY).run(12)  # type: ignore[arg-type]


def ready(made: World) -> int:
    return sum(one.state is S.READY for one in made.fleet.values())


def announce(made: World, number: int, at: float | None) -> None:
    made._events.append(RetireNotice(number, at))


PLACERS = pytest.mark.parametrize("placer", ["spread", "on_demand", "spothedge"])


@PLACERS
@pytest.mark.parametrize("mode", list(UpdateMode))
def test_the_replacement_is_ready_before_the_drain(placer: str, mode: UpdateMode) -> None:
    made = world(3, placer, update_mode=mode)
    size, old = ready(made), min(made.fleet)
    announce(made, old, made.ticks * made.tick_s + HOUR)
    first = made.tick()
    assert len(first.actions) == 1  # one launch
    assert made.fleet[old].message == REPLACED_FIRST
    while made.fleet[old].state is S.READY:
        assert ready(made) >= size
        assert len(made.fleet) == size + 1
        made.tick()
    assert ready(made) >= size
    assert made.fleet[old].end_reason is EndReason.REPLACED
    made.run(5)
    assert old not in made.fleet
    assert (ready(made), len(made.fleet)) == (size, size)


@PLACERS
@pytest.mark.parametrize("seed", range(6))
def test_notices_never_cost_a_ready_replica_nor_more_than_the_surge(placer: str, seed: int) -> None:
    """All at once, one by one, some taken back; each that stands is replaced once."""
    rng, made = Random(seed), world(4, placer, max_surge=1 + seed % 2)
    size, launched, stood = ready(made), max(made.fleet), set[int]()
    for tick in range(60):
        here = [
            number for number, one in made.fleet.items() if one.state is S.READY and one.retire_at is None
        ]
        if tick == 0 and seed % 3 == 0:
            for number in here:
                announce(made, number, made.ticks * made.tick_s + 4 * HOUR)
                stood.add(number)
        elif here and tick < 30 and rng.random() < 0.2:
            number = rng.choice(here)
            announce(made, number, made.ticks * made.tick_s + rng.uniform(2, 4) * HOUR)
            stood.add(number)
        made.tick()
        assert ready(made) >= size
        live = [one for one in made.fleet.values() if one.state not in (S.DRAINING, S.TERMINATING)]
        assert len(live) <= size + made.goal.max_surge
    assert not stood & set(made.fleet)
    assert max(made.fleet) - launched == len(stood)
    assert (ready(made), len(made.fleet)) == (size, size)


@PLACERS
def test_a_notice_that_is_taken_back_leaves_the_fleet_as_large_as_it_was(placer: str) -> None:
    made = world(3, placer)
    size, old = ready(made), min(made.fleet)
    announce(made, old, made.ticks * made.tick_s + HOUR)
    made.tick()
    announce(made, old, None)
    made.run(12)
    assert made.fleet.get(old) is None or made.fleet[old].retire_at is None
    assert (ready(made), len(made.fleet)) == (size, size)


@pytest.mark.parametrize("seed", range(4))
def test_a_placer_that_keeps_replicas_in_reserve_may_use_them_meanwhile(seed: int) -> None:
    rng, made = Random(seed), world(3, "risk_hedge")
    most, stood = 3 + MOST_EXTRA + made.goal.max_surge, set[int]()
    for tick in range(200):
        here = [
            number for number, one in made.fleet.items() if one.state is S.READY and one.retire_at is None
        ]
        if here and tick < 30 and rng.random() < 0.3:
            number = rng.choice(here)
            announce(made, number, made.ticks * made.tick_s + rng.uniform(2, 4) * HOUR)
            stood.add(number)
        made.tick()
        assert ready(made) >= 3
        assert sum(one.state not in (S.DRAINING, S.TERMINATING) for one in made.fleet.values()) <= most
    assert not stood & set(made.fleet)


def test_what_cannot_be_replaced_in_time_is_drained_all_the_same() -> None:
    made = world(2, "on_demand")
    made.offers = ()
    old = min(made.fleet)
    at = made.ticks * made.tick_s + HOUR
    announce(made, old, at)
    plan = made.tick()
    assert plan.wake_at is not None
    latest = at - made.goal.drain_timeout_s - MARGIN_S
    assert plan.wake_at <= latest
    while made.fleet[old].state is S.READY:
        made.tick()
    assert latest <= made.ticks * made.tick_s <= latest + 3 * made.tick_s


GOAL = Goal(1, a_goal(3).scaling, drain_timeout_s=60.0)


@pytest.mark.parametrize(
    ("states", "staying_ready", "drained"),
    [
        pytest.param([S.READY, S.READY], 1, [], id="nobody is there yet"),
        pytest.param([S.READY, S.READY], 2, [1], id="one is replaced: the first to go is drained"),
        pytest.param([S.READY, S.STARTING], 2, [2], id="what is not ready shields nobody"),
        pytest.param([S.READY, S.READY], 3, [1, 2], id="all are replaced"),
    ],
)
def test_who_is_drained(states: list[ReplicaState], staying_ready: int, drained: list[int]) -> None:
    leaving = [
        replace(replica(number, 1, state), retire_at=9000.0 + number)
        for number, state in enumerate(states, 1)
    ]
    staying = [replica(10 + number, 1) for number in range(staying_ready)]
    assert [one.id for one in to_drain(3, staying, leaving, GOAL, 0.0)] == drained
    assert len(to_drain(3, [], leaving, GOAL, drains_at(leaving[1], GOAL))) == 2  # their time is over


def test_the_surge_is_bounded_and_never_none() -> None:
    staying, leaving = [replica(n, 1) for n in (1, 2)], [replica(n, 1) for n in (3, 4)]
    bounds = {surge: launch_limit(4, staying, leaving, replace(GOAL, max_surge=surge)) for surge in (0, 1, 3)}
    assert Counter(bounds) == {0: 1, 1: 1, 3: 3}


def test_the_message_promises_no_replacement_of_a_load_balancer() -> None:
    agent = replace(replica(1, 1), role=Role.LOAD_BALANCER)
    assert apply(agent, RetireNotice(1, 9000.0), 0.0, 60.0).message == ANNOUNCED
    assert apply(replica(1, 1), RetireNotice(1, 9000.0), 0.0, 60.0).message == REPLACED_FIRST
