"""Budgets: permitted launches, messages, and that nothing is terminated for them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from policies.budget import Budget, affordable
from policies.goals import Goal, PlacementGoal, ScalingGoal
from policies.model import CapacityType, Launch, Memory, Observation, Offer, Replica, ReplicaState, Zone
from policies.placement.base import PlannedLaunch
from policies.plan import plan
from policies.registry import policies_for


def offer(usd_hour: float, zone: str = "a") -> Offer:
    return Offer(
        zone=Zone("sim", "r", zone),
        instance_type="g6.xlarge",
        accelerator="L4",
        accelerator_count=1.0,
        capacity_type=CapacityType.ON_DEMAND,
        price_usd_hour=usd_hour,
        on_demand_usd_hour=usd_hour,
    )


@pytest.mark.parametrize(
    ("prices", "most", "spent", "room", "kept", "sentence"),
    [
        ([1.0, 1.0], None, 9.0, math.inf, [1.0, 1.0], ""),
        ([1.0, 1.0], 10.0, 4.0, math.inf, [1.0, 1.0], ""),
        (
            [1.0, 1.0],
            10.0,
            7.0,
            math.inf,
            [1.0, 1.0],
            "more than 80% of max_usd_hour (10 USD per hour) is in use",
        ),
        (
            [1.0, 1.0],
            10.0,
            8.5,
            math.inf,
            [1.0],
            "1 replica is not launched for the budget (replica_policy.max_usd_hour, 10)",
        ),
        ([3.0, 1.0], 10.0, 8.5, math.inf, [1.0], "on-demand g6.xlarge at 3 USD per hour"),
        ([1.0, 1.0], 10.0, 12.0, math.inf, [], "2 replicas are not launched for the budget"),
        ([1.0, 1.0], 10.0, 4.0, 1.5, [1.0], "(controller.max_usd_hour in config.yaml)"),
        ([1.0], None, 4.0, -3.0, [], "(controller.max_usd_hour in config.yaml)"),
        ([], 10.0, 2.0, math.inf, [], ""),
    ],
)
def test_what_fits(
    prices: list[float], most: float | None, spent: float, room: float, kept: list[float], sentence: str
) -> None:
    places, said = affordable(
        [PlannedLaunch(offer(price), "why") for price in prices], Budget(most, spent, room)
    )
    assert [place.offer.price_usd_hour for place in places] == kept
    assert sentence in said
    assert bool(said) == bool(sentence)


def observed(most: float | None, live: int, *, room: float = math.inf, wanted: int = 4) -> Observation:
    goal = Goal(1, ScalingGoal(wanted, wanted), PlacementGoal(), max_usd_hour=most)
    replicas = tuple(
        replace(
            Replica(
                id=number, version=1, state=ReplicaState.READY, offer=offer(1.0), created_at=0.0, since=0.0
            ),
            endpoint="http://x",
        )
        for number in range(1, live + 1)
    )
    return Observation(1000.0, goal, replicas, (offer(1.0),), room_usd_hour=room)


@pytest.mark.parametrize(
    ("most", "live", "room", "launches"),
    [
        (None, 0, math.inf, 4),
        (2.5, 0, math.inf, 2),
        (2.5, 2, math.inf, 0),
        (None, 1, 2.0, 2),
        (9.0, 1, 0.0, 0),
    ],
)
def test_a_plan_launches_what_the_budget_allows(
    most: float | None, live: int, room: float, launches: int
) -> None:
    seen = observed(most, live, room=room)
    made = plan(seen, Memory(next_replica_id=live + 1), policies_for(seen.goal))
    assert [type(action) for action in made.actions] == [Launch] * launches
    assert made.memory.next_replica_id == live + 1 + launches
    is_short = live + launches < 4
    assert any("for the budget" in note for note in made.notes) == is_short
    if is_short:
        assert made.wake_at == 1060.0


def test_nothing_is_terminated_for_a_budget() -> None:
    seen = observed(0.5, 4)
    assert plan(seen, Memory(next_replica_id=5), policies_for(seen.goal)).actions == ()
