"""Preemption notices: a replica serves on until shortly before its end, and placers count it as lost at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies import balancers
from policies.goals import Goal, ScalingGoal
from policies.lifecycle import NOTICE_MARGIN_S
from policies.model import Drain, EndReason, PreemptionNotice, Role
from policies.placement.risk_hedge import MOST_EXTRA
from tests.unit.placement_world import PLENTY, S, World, a_goal, both
from tests.unit.test_policies_rollout import replica

ZONES = ("g/a/a1", "g/b/b1", "x/u/u1")
TICK_S = 30.0  # a cold start is three of them in `World`


def world(placer: str, **facts: object) -> World:
    extra = MOST_EXTRA if placer == "risk_hedge" else 0
    goal = a_goal(3, placer=placer, num_overprovision=extra, dynamic_ondemand_fallback=placer != "spread")
    return World(replace(goal, **facts), both(*ZONES), lambda zone, tick: PLENTY, tick_s=TICK_S).run(12)  # type: ignore[arg-type]


def ready(made: World) -> int:
    return sum(one.state is S.READY for one in made.fleet.values())


def notify(made: World, number: int, left_s: float) -> float:
    at = made.ticks * made.tick_s + left_s
    made._events.append(PreemptionNotice(number, at))
    return at


PLACERS = pytest.mark.parametrize("placer", ["spread", "spothedge", "risk_hedge"])


@PLACERS
def test_a_replica_serves_while_its_replacement_starts(placer: str) -> None:
    made = world(placer)
    size, old = ready(made), min(made.fleet)
    at = notify(made, old, 150.0)
    first = made.tick()
    assert made.fleet[old].state is S.READY
    if size == 3:  # without one in reserve
        assert first.actions, "its replacement is launched at the notice"
    while made.fleet[old].state is S.READY:
        assert ready(made) >= 3
        made.tick()
    assert made.fleet[old].state is S.DRAINING
    assert made.fleet[old].since == at - 30.0
    assert made.fleet[old].drain_by == at - NOTICE_MARGIN_S
    assert made.fleet[old].end_reason is EndReason.PREEMPTED
    assert ready(made) >= 3, "the replacement is ready"


@PLACERS
@pytest.mark.parametrize(
    ("left_s", "notice_drain_s", "serves_s"),
    [
        pytest.param(30.0, 30.0, 0.0, id="a notice of 30 s: it drains at once"),
        pytest.param(120.0, 30.0, 90.0, id="two minutes"),
        pytest.param(120.0, 120.0, 0.0, id="the field says how long"),
        pytest.param(120.0, 0.0, 120.0, id="to the end"),
    ],
)
def test_it_takes_requests_until_the_time_that_the_field_says(
    placer: str, left_s: float, notice_drain_s: float, serves_s: float
) -> None:
    made = world(placer, notice_drain_s=notice_drain_s)
    old = min(made.fleet)
    notify(made, old, left_s)
    served_s = 0.0
    made.tick()
    while made.fleet[old].state is S.READY:
        served_s += TICK_S
        made.tick()
    assert served_s == serves_s


def test_all_noticed_at_once_are_replaced_once() -> None:
    made = world("spothedge")
    old = list(made.fleet)
    for number in old:
        notify(made, number, 150.0)
    made.run(12)
    assert not set(old) & set(made.fleet)
    assert ready(made) == 3


@pytest.mark.parametrize(("left_s", "by"), [(20.0, 20.0 - NOTICE_MARGIN_S), (120.0, balancers.FAREWELL_S)])
def test_a_load_balancer_agent_says_goodbye_at_once(left_s: float, by: float) -> None:
    """Clients know its address, and have to learn another one before it goes."""
    agent = replace(replica(1, 1), role=Role.LOAD_BALANCER, preempt_at=left_s, message="preemption notice")
    place = balancers.place_of(agent)
    fleet = balancers.AgentFleetState((place,), 1, (agent,), frozenset({1}))
    decided = balancers.decide(fleet, (), Goal(1, ScalingGoal()), {}, 2, 0.0)
    assert decided.actions == (Drain(1, EndReason.PREEMPTED, "preemption notice", by),)
