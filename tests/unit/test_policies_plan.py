"""The whole decision: what single situations ask for, and what holds of every plan there is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import rollout
from policies.goals import Goal, PlacementGoal, ScalingGoal, UpdateMode
from policies.history import Load
from policies.lifecycle import apply, request
from policies.model import (
    CapacityType,
    Drain,
    EndReason,
    FailureKind,
    Launch,
    LaunchFailed,
    Memory,
    Observation,
    Offer,
    Plan,
    ProbePassed,
    Replica,
    ReplicaState,
    RunExited,
    Terminate,
    Zone,
)
from policies.plan import learn, plan
from policies.registry import policies_for
from tests.clouds.schedules import examples

S = ReplicaState
NOW = 1000.0
OFFERS = tuple(
    Offer(Zone("c", region, f"{region}{n}"), "m", "L4", 1.0, CapacityType.SPOT, 0.3 + n / 10)
    for region in "ab"
    for n in (1, 2)
)


def a_replica(replica_id: int, state: ReplicaState = S.READY, version: int = 1, **more: object) -> Replica:
    base = Replica(replica_id, version, OFFERS[replica_id % 4], state, 900.0, 800.0, drain_by=1100.0)
    return replace(base, **more)  # type: ignore[arg-type]


def a_goal(size: int = 3, version: int = 1, **more: object) -> Goal:
    return replace(Goal(version, ScalingGoal(size, size)), **more)  # type: ignore[arg-type]


def a_plan(
    goal: Goal,
    replicas: tuple[Replica, ...] = (),
    memory: Memory | None = None,
    *,
    offers: tuple[Offer, ...] = OFFERS,
) -> Plan:
    observation = Observation(NOW, goal, replicas, offers)
    return plan(observation, memory or Memory(next_replica_id=50), policies_for(goal))


def after(replicas: tuple[Replica, ...], decided: Plan, goal: Goal) -> tuple[Replica, ...]:
    """The live replicas once the plan has been carried out."""
    fleet = {replica.id: replica for replica in replicas}
    for action in decided.actions:
        if isinstance(action, Launch):
            fleet[action.replica_id] = request(action, NOW)
        else:
            fleet[action.replica_id] = apply(fleet[action.replica_id], action, NOW, goal.drain_timeout_s)
    return tuple(fleet.values())


def told(decided: Plan) -> list[str]:
    """The actions, one word each: launch 50, drain 1, terminate 2."""
    return [f"{type(action).__name__.lower()} {action.replica_id}" for action in decided.actions]


# --- single situations ------------------------------------------------------------------------------------------


def test_from_nothing_to_the_size_with_ids_that_go_on() -> None:
    decided = a_plan(a_goal(3))
    assert told(decided) == ["launch 50", "launch 51", "launch 52"]
    assert decided.memory.next_replica_id == 53
    assert decided.target == 3
    assert all(action.why for action in decided.actions)


def test_over_provisioning_comes_on_top_but_not_of_nothing() -> None:
    assert a_plan(a_goal(2, placement=PlacementGoal(num_overprovision=2))).target == 4
    assert a_plan(a_goal(0, placement=PlacementGoal(num_overprovision=2))).target == 0


def test_what_is_missing_is_placed() -> None:
    replicas = (a_replica(1), a_replica(2, S.STARTING), a_replica(3, S.TERMINATING), a_replica(4, S.DRAINING))
    assert told(a_plan(a_goal(3), replicas)) == ["launch 50"]


@pytest.mark.parametrize(
    ("states", "ended"),
    [
        pytest.param([S.READY, S.READY, S.READY], "drain 3", id="the youngest"),
        pytest.param([S.READY, S.STARTING, S.READY], "terminate 2", id="one that does not serve yet"),
        pytest.param([S.REQUESTED, S.STARTING, S.READY], "terminate 1", id="the least far"),
        pytest.param([S.READY, S.READY, S.NOT_READY], "drain 3", id="one that is not ready"),
    ],
)
def test_the_surplus_is_ended(states: list[ReplicaState], ended: str) -> None:
    replicas = tuple(a_replica(i, state) for i, state in enumerate(states, 1))
    decided = a_plan(a_goal(2), replicas)
    assert told(decided) == [ended]
    (action,) = decided.actions
    assert not isinstance(action, Launch)
    assert action.reason is EndReason.SCALED_DOWN


def test_a_drain_has_the_time_the_goal_gives_it() -> None:
    (action,) = a_plan(a_goal(0, drain_timeout_s=77.0), (a_replica(1),)).actions
    assert action == Drain(1, EndReason.SCALED_DOWN, "1 replicas, 0 wanted", NOW + 77.0)


def test_killed_replicas_end_and_are_replaced() -> None:
    replicas = (a_replica(1), a_replica(2), a_replica(3, S.STARTING))
    decided = a_plan(a_goal(3, killed=frozenset({2, 3, 99})), replicas)
    assert told(decided) == ["drain 2", "terminate 3", "launch 50", "launch 51"]
    assert [a.reason for a in decided.actions if not isinstance(a, Launch)] == [EndReason.USER] * 2


def test_down_ends_everything_and_launches_nothing() -> None:
    replicas = tuple(a_replica(i, state) for i, state in enumerate([s for s in S if s is not S.GONE], 1))
    decided = a_plan(a_goal(9, down=True), replicas)
    assert decided.target == 0
    assert told(decided) == ["terminate 1", "terminate 2", "terminate 3", "drain 4", "drain 5"]


def test_down_without_patience_cuts_running_drains_short() -> None:
    replicas = (a_replica(1), a_replica(2, S.DRAINING), a_replica(3, S.DRAINING, drain_by=NOW))
    decided = a_plan(a_goal(down=True, drain_timeout_s=0.0), replicas)
    assert told(decided) == ["drain 1", "terminate 2"]


@pytest.mark.parametrize(
    ("memory", "offers", "note"),
    [
        pytest.param(Memory(), (), "no offer fits version 1", id="no offer"),
        pytest.param(Memory(rollout={"failed": [1]}), OFFERS, "version 1 has failed", id="failed"),
        pytest.param(
            Memory(rollout={"failing": 1, "failures": 1, "retry_at": NOW + 1}),
            OFFERS,
            "waiting",
            id="just failed",
        ),
        pytest.param(
            Memory(placement={"blocks": {"c/*/*": {"until": NOW + 1, "failures": 1}}}),
            OFFERS,
            "1 more wanted, but every zone refused when last asked",
            id="everything is blocked",
        ),
    ],
)
def test_a_plan_that_cannot_launch_says_why(memory: Memory, offers: tuple[Offer, ...], note: str) -> None:
    decided = a_plan(a_goal(1), (), memory, offers=offers)
    assert decided.actions == ()
    assert note in " ".join(decided.notes)


def test_a_version_that_failed_is_replaced_by_the_last_that_worked() -> None:
    memory = Memory(7, rollout={"good": 1, "failed": [2]})
    decided = a_plan(a_goal(2, version=2), (a_replica(1), a_replica(2, S.STARTING, 2)), memory)
    assert told(decided) == ["terminate 2", "launch 7"]
    assert [action.version for action in decided.actions if isinstance(action, Launch)] == [1]


def test_the_note_names_the_version_that_is_launched() -> None:
    memory = Memory(rollout={"good": 1, "failed": [2]})
    assert a_plan(a_goal(1, version=2), (), memory, offers=()).notes == ("no offer fits version 1",)


def test_a_version_is_given_up_when_every_offer_refused_it_and_not_before() -> None:
    goal, memory = a_goal(1), Memory()
    for number, offer in enumerate(OFFERS):
        assert not rollout.has_failed(goal, memory.rollout)
        asked = a_replica(1 + number, ReplicaState.REQUESTED, offer=offer)
        event = LaunchFailed(asked.id, FailureKind.REFUSED, "not sold there")
        seen = Observation(float(number), goal, (), OFFERS, events=(event,))
        memory = learn(seen, {asked.id: asked}, memory, policies_for(goal))
        decided = plan(seen, memory, policies_for(goal))
        memory = decided.memory
        launched = [action.offer for action in decided.actions if isinstance(action, Launch)]
        assert all(one not in OFFERS[: number + 1] for one in launched)
        assert bool(launched) == (number < len(OFFERS) - 1)
    assert decided.notes == ("version 1 has failed: every machine on offer was refused; update the service",)
    again = plan(replace(seen, events=()), memory, policies_for(goal))
    assert (again.actions, again.notes, again.memory) == ((), decided.notes, memory)
    update = plan(replace(seen, events=(), goal=a_goal(1, version=2)), memory, policies_for(goal))
    assert [action.version for action in update.actions if isinstance(action, Launch)] == [2]


def test_a_version_that_works_is_not_given_up_when_every_offer_refuses() -> None:
    goal, memory = a_goal(1), Memory(rollout={"good": 1})
    for number, offer in enumerate(OFFERS):
        asked = a_replica(1 + number, ReplicaState.REQUESTED, offer=offer)
        event = LaunchFailed(asked.id, FailureKind.REFUSED, "not sold there")
        seen = Observation(0.0, goal, (), OFFERS, events=(event,))
        memory = learn(seen, {asked.id: asked}, memory, policies_for(goal))
    decided = plan(seen, memory, policies_for(goal))
    assert not rollout.has_failed(goal, decided.memory.rollout)
    assert decided.wake_at == 3600.0


def test_learning_needs_events() -> None:
    memory = Memory(rollout={"good": 1})
    assert learn(Observation(NOW, a_goal(), (), ()), {}, memory, policies_for(a_goal())) is memory


def test_events_teach_both_where_and_what() -> None:
    before = {1: a_replica(1, S.REQUESTED), 2: a_replica(2, S.STARTING), 3: a_replica(3)}
    events = (LaunchFailed(1, FailureKind.CAPACITY), ProbePassed(2), RunExited(3))
    observation = Observation(NOW, a_goal(), (), (), events=events)
    memory = learn(observation, before, Memory(), policies_for(a_goal()))
    assert set(memory.placement["blocks"]) == {"c/a/a2|spot|L4:1"}
    assert (memory.rollout["good"], memory.rollout["failures"]) == (1, 1)


# --- a whole update, step by step ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(UpdateMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (2, 0), (0, 1), (1, 1), (9, 9)])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_an_update_arrives_within_its_bounds(
    mode: UpdateMode, surge: int, unavailable: int, size: int
) -> None:
    """Each step one replica moves on: one starts, or becomes ready, or is empty. No replica is lost meanwhile."""
    goal = a_goal(size, 2, update_mode=mode, max_surge=surge, max_unavailable=unavailable)
    fleet: tuple[Replica, ...] = tuple(a_replica(i, endpoint="http://h") for i in range(1, size + 1))
    memory = Memory(50, rollout={"good": 1})
    for _ in range(20 * size):
        decided = a_plan(goal, fleet, memory)
        fleet, memory = after(fleet, decided, goal), decided.memory
        counted = [r for r in fleet if r.state in rollout.COUNTED]
        ready = [r for r in rollout.serving(fleet, goal, memory.rollout) if r.state is S.READY]
        if mode is UpdateMode.ROLLING:
            assert len(counted) <= size + surge
            assert len(ready) >= size - unavailable
        else:
            assert len(ready) >= size
            assert len({r.version for r in ready}) == 1
        moving = next((r for r in fleet if r.state in (S.REQUESTED, S.DRAINING)), None)
        if moving is None:
            break
        moved = (replace(moving, state=S.READY, endpoint="http://h"),) if moving.state is S.REQUESTED else ()
        fleet = (*(r for r in fleet if r is not moving), *moved)
    assert sorted((r.version, r.state) for r in fleet) == [(2, S.READY)] * size


# --- what holds of every plan ----------------------------------------------------------------------------------

states = st.sampled_from([s for s in S if s is not S.GONE])
fleets = st.lists(st.tuples(states, st.integers(1, 3), st.integers(-50, 150)), max_size=9).map(
    lambda given: tuple(
        a_replica(i, state, version, drain_by=NOW + drain_s)
        for i, (state, version, drain_s) in enumerate(given, 1)
    )
)
sizes = st.integers(0, 6).flatmap(lambda low: st.tuples(st.just(low), st.integers(low, 9)))
goals = st.builds(
    lambda bounds, qps, over, **rest: Goal(
        scaling=ScalingGoal(*bounds, target_qps_per_replica=qps, upscale_delay_s=0.0),
        placement=PlacementGoal(num_overprovision=over),
        **rest,
    ),
    bounds=sizes,
    qps=st.sampled_from([None, 1.0]),
    over=st.integers(0, 2),
    version=st.integers(1, 3),
    same_replicas=st.frozensets(st.integers(1, 3)),
    update_mode=st.sampled_from(UpdateMode),
    max_surge=st.integers(0, 3),
    max_unavailable=st.integers(0, 3),
    drain_timeout_s=st.sampled_from([0.0, 60.0]),
    down=st.booleans(),
    killed=st.frozensets(st.integers(1, 9), max_size=3),
)
memories = st.builds(
    Memory,
    next_replica_id=st.just(50),
    rollout=st.fixed_dictionaries(
        {},
        optional={
            "good": st.integers(1, 3),
            "failed": st.lists(st.integers(1, 3), max_size=2),
            "retry_at": st.just(NOW + 5),
            "failing": st.integers(1, 3),
        },
    ),
    placement=st.sampled_from([{}, {"blocks": {"c/a/*|spot|L4": {"until": NOW + 9, "failures": 1}}}]),
)
loads = st.builds(
    Load, requests=st.integers(0, 600), queued=st.integers(0, 3), known=st.booleans(), window_s=st.just(60.0)
)
situations = st.builds(
    Observation,
    now=st.just(NOW),
    goal=goals,
    replicas=fleets,
    offers=st.sampled_from([(), OFFERS, OFFERS[:1]]),
    load=loads,
)


@pytest.mark.long
@settings(max_examples=examples(300), deadline=None)
@given(situations, memories)
def test_a_plan_is_a_fixed_point(situation: Observation, memory: Memory) -> None:
    policies = policies_for(situation.goal)
    first = plan(situation, memory, policies)
    then = replace(situation, replicas=after(situation.replicas, first, situation.goal))
    second = plan(then, first.memory, policies)
    assert second.actions == ()
    assert second.target == first.target
    assert plan(then, second.memory, policies) == second


@settings(max_examples=examples(300), deadline=None)
@given(situations, memories)
def test_a_plan_is_well_formed(situation: Observation, memory: Memory) -> None:
    goal, replicas = situation.goal, {r.id: r for r in situation.replicas}
    decided = plan(situation, memory, policies_for(goal))
    named = [action.replica_id for action in decided.actions]
    launches = [action for action in decided.actions if isinstance(action, Launch)]
    assert len(named) == len(set(named))
    assert [a.replica_id for a in launches] == list(range(50, 50 + len(launches)))
    assert decided.memory.next_replica_id == 50 + len(launches)
    assert {a.replica_id for a in decided.actions} - {a.replica_id for a in launches} <= replicas.keys()
    assert {a.offer for a in launches} <= set(situation.offers)
    live = {r.id for r in situation.replicas if r.state in rollout.COUNTED}
    ended = {a.replica_id for a in decided.actions if isinstance(a, (Drain, Terminate))}
    assert goal.killed & live <= ended
    if goal.down:
        assert live <= ended
        assert not launches
    else:
        kept = len(live - ended) + len(launches)
        assert not launches or kept <= decided.target + max(goal.max_surge, len(live))
    for action in decided.actions:
        assert action.why
        if isinstance(action, Terminate):
            assert replicas[action.replica_id].state not in (S.READY, S.NOT_READY)


@settings(max_examples=examples(300), deadline=None)
@given(situations, memories)
def test_no_update_takes_ready_replicas_below_what_the_goal_allows(
    situation: Observation, memory: Memory
) -> None:
    """Where enough are ready, a rolling plan leaves at least target - max_unavailable of them; where no more can be
    had now, at least those that carry the load."""
    goal = replace(situation.goal, down=False, killed=frozenset(), update_mode=UpdateMode.ROLLING)
    situation = replace(situation, goal=goal)
    decided = plan(situation, memory, policies_for(goal))
    ready = {r.id for r in situation.replicas if r.state is S.READY}
    left = ready - {action.replica_id for action in decided.actions}
    launches = any(isinstance(action, Launch) for action in decided.actions)
    least = decided.target - goal.max_unavailable if launches else decided.wanted - goal.max_unavailable
    assert len(left) >= min(len(ready), least)
