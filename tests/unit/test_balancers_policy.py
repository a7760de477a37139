"""Which load balancer agents should stand where: decisions as truth tables, and that deciding twice decides nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies import balancers
from policies.balancers import FAREWELL_S, FIRST_PAUSE_S, AgentFleetState
from policies.goals import AgentRegion, Goal, ScalingGoal
from policies.lifecycle import apply, request
from policies.model import (
    Action,
    BootstrapFailed,
    CapacityType,
    Drain,
    EndReason,
    Event,
    FailureKind,
    Json,
    Launch,
    LaunchFailed,
    Offer,
    Preempted,
    ProbePassed,
    Replica,
    ReplicaState,
    Role,
    Terminate,
    Zone,
)

S = ReplicaState
EAST, WEST = AgentRegion("aws", "east"), AgentRegion("aws", "west")
ZONES = {name: Zone("aws", "east" if name[0] == "e" else "west", name) for name in ("e1", "e2", "w1", "w2")}
PRICES = {"e1": 0.1, "e2": 0.2, "w1": 0.1, "w2": 0.1}
OFFERS = tuple(
    Offer(zone, "small", None, 0.0, CapacityType.ON_DEMAND, PRICES[name]) for name, zone in ZONES.items()
)
GOAL = Goal(version=3, scaling=ScalingGoal())
NOW = 1000.0


def agent(id: int, zone: str, state: ReplicaState = S.READY) -> Replica:
    offer = next(one for one in OFFERS if one.zone.name == zone)
    return Replica(id, 2, offer, state, NOW - 50, NOW - 50, role=Role.LOAD_BALANCER)


def fleet(
    *agents: Replica, places: tuple[AgentRegion, ...] = (EAST,), count: int = 1, unfit: tuple[int, ...] = ()
) -> AgentFleetState:
    return AgentFleetState(places, count, agents, frozenset(one.id for one in agents) - frozenset(unfit))


def told(actions: tuple[Action, ...]) -> str:
    """``launch e1, drain 2``"""
    words = {Launch: "launch", Drain: "drain", Terminate: "terminate"}
    whom = [one.offer.zone.name if isinstance(one, Launch) else str(one.replica_id) for one in actions]
    return ", ".join(f"{words[type(one)]} {who}" for one, who in zip(actions, whom, strict=True))


def decide(
    wanted: AgentFleetState, goal: Goal = GOAL, memory: Json | None = None, now: float = NOW
) -> balancers.AgentDecision:
    return balancers.decide(wanted, OFFERS, goal, memory or {}, 70, now)


CASES = {
    "nothing is wanted": (fleet(places=()), ""),
    "one in a region, where it is cheapest": (fleet(), "launch e1"),
    "one in each of two regions": (fleet(places=(EAST, WEST)), "launch e1, launch w1"),
    "two in a region stand in two zones": (fleet(count=2), "launch e1, launch e2"),
    "the second one goes where the first is not": (fleet(agent(1, "e1"), count=2), "launch e2"),
    "three in two zones": (fleet(count=3), "launch e1, launch e2, launch e1"),
    "what comes up is not asked for again": (fleet(agent(1, "e2", S.REQUESTED)), ""),
    "one that does not answer is still there": (fleet(agent(1, "e1", S.NOT_READY)), ""),
    "one that drains is replaced": (fleet(agent(1, "e1", S.DRAINING)), "launch e1"),
    "one that ends is replaced": (fleet(agent(1, "e2", S.TERMINATING)), "launch e1"),
    "one too many ends, the younger one": (fleet(agent(1, "e1"), agent(2, "e2")), "drain 2"),
    "the one that serves stays": (fleet(agent(1, "e1", S.STARTING), agent(2, "e2")), "terminate 1"),
    "a region left out ends when the others serve": (
        fleet(agent(1, "e1"), agent(2, "w1"), places=(WEST,)),
        "drain 1",
    ),
    "a region left out serves until then": (
        fleet(agent(1, "e1"), agent(2, "w1", S.STARTING), places=(WEST,)),
        "",
    ),
    "one left out that does not serve ends at once": (
        fleet(agent(1, "e1", S.PROVISIONING), places=(WEST,)),
        "launch w1, terminate 1",
    ),
    "another shape is launched before the old one ends": (fleet(agent(1, "e1"), unfit=(1,)), "launch e2"),
    "and then the old one ends": (fleet(agent(1, "e1"), agent(2, "e2"), unfit=(1,)), "drain 1"),
    "no load balancers any more": (fleet(agent(1, "e1"), places=()), "drain 1"),
}


@pytest.mark.parametrize(("wanted", "actions"), CASES.values(), ids=CASES.keys())
def test_what_is_done(wanted: AgentFleetState, actions: str) -> None:
    assert told(decide(wanted).actions) == actions


@pytest.mark.parametrize("wanted", [case[0] for case in CASES.values()], ids=CASES.keys())
def test_a_decision_on_its_own_outcome_decides_nothing(wanted: AgentFleetState) -> None:
    after = {one.id: one for one in wanted.agents}
    for action in decide(wanted).actions:
        if isinstance(action, Launch):
            after[action.replica_id] = request(action, NOW)
        else:
            after[action.replica_id] = apply(after[action.replica_id], action, NOW, 0.0)
    again = replace(
        wanted,
        agents=tuple(after.values()),
        fitting=wanted.fitting | {number for number in after if number >= 70},
    )
    assert decide(again).actions == ()


def test_a_launch_says_what_it_is() -> None:
    (launch,) = decide(fleet()).actions
    assert isinstance(launch, Launch)
    assert (launch.replica_id, launch.version, launch.role) == (70, 3, Role.LOAD_BALANCER)
    assert request(launch, NOW).role is Role.LOAD_BALANCER


def test_an_agent_that_serves_drains_for_as_long_as_names_last() -> None:
    (drain,) = decide(fleet(agent(1, "e1"), places=())).actions
    assert isinstance(drain, Drain)
    assert (drain.reason, drain.drain_by) == (EndReason.REPLACED, NOW + FAREWELL_S)


DOWN = replace(GOAL, down=True)


@pytest.mark.parametrize(
    ("is_needed", "actions"),
    [
        pytest.param(True, "", id="not while a replica lives"),
        pytest.param(False, "terminate 1, terminate 2, terminate 3", id="last of all"),
    ],
)
def test_when_the_service_goes_down(is_needed: bool, actions: str) -> None:
    agents = [
        agent(1, "e1"),
        agent(2, "w1", S.REQUESTED),
        agent(3, "w2", S.DRAINING),
        agent(4, "e2", S.TERMINATING),
    ]
    wanted = replace(fleet(*agents, places=(EAST, WEST)), is_needed=is_needed)
    assert told(decide(wanted, DOWN).actions) == actions


def test_one_that_is_asked_to_end_by_id_is_followed_by_another() -> None:
    goal = replace(GOAL, killed=frozenset({1}))
    assert told(decide(fleet(agent(1, "e1")), goal).actions) == "drain 1, launch e1"


def learned(
    *events: Event, state: ReplicaState = S.REQUESTED, memory: Json | None = None, now: float = NOW
) -> Json:
    before = {1: agent(1, "e1", state)}
    return balancers.learn(memory or {}, events, before, now)


@pytest.mark.parametrize(
    ("event", "actions", "note"),
    [
        pytest.param(LaunchFailed(1, FailureKind.CAPACITY), "launch e2", "", id="a full zone: the next"),
        pytest.param(LaunchFailed(1, FailureKind.QUOTA), "", "no room when last asked", id="a quota: wait"),
        pytest.param(
            LaunchFailed(1, FailureKind.AUTH), "", "no room when last asked", id="a permission: wait"
        ),
        pytest.param(
            LaunchFailed(1, FailureKind.CONFIG), "", "the last one failed", id="a wrong order: wait"
        ),
        pytest.param(BootstrapFailed(1), "", "the last one failed", id="a setup that fails: wait"),
        pytest.param(Preempted(1, lost=True), "", "the last one failed", id="a machine that is lost: wait"),
    ],
)
def test_what_a_failure_teaches(event: Event, actions: str, note: str) -> None:
    found = decide(fleet(), memory=learned(event))
    assert told(found.actions) == actions
    assert note in "; ".join(found.notes)
    assert bool(found.notes) == bool(note)


def test_failures_in_a_row_are_followed_by_longer_pauses_until_one_is_ready() -> None:
    memory: Json = {}
    for failures in range(4):
        now = NOW + 1000 * failures
        memory = learned(BootstrapFailed(1), memory=memory, now=now)
        pause_s = FIRST_PAUSE_S * 2**failures
        assert decide(fleet(), memory=memory, now=now + pause_s - 1).actions == ()
        assert told(decide(fleet(), memory=memory, now=now + pause_s).actions) == "launch e1"
    assert learned(ProbePassed(1), state=S.STARTING, memory=memory) == {}


def test_time_that_goes_by_changes_no_memory() -> None:
    memory = learned(BootstrapFailed(1))
    assert balancers.learn(memory, (), {}, NOW + 1e6) is memory


def test_a_region_without_any_offer_says_so() -> None:
    found = decide(fleet(places=(AgentRegion("gcp", "moon"),)))
    assert found.actions == ()
    assert found.notes == ("1 load balancer agent missing in gcp/moon: nothing is on offer there",)
