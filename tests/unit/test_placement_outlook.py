"""What placers make of a forecast: stand-ins only for what lasts, no alarm for replicas that are only wanted later."""

from __future__ import annotations

from typing import Any

import pytest

from policies.goals import PlacementGoal
from policies.model import CapacityType, Offer, Replica, ReplicaState
from policies.placement.base import Decision, PlacementPolicy, View
from policies.placement.risk_hedge import RiskHedge
from policies.placement.spothedge import SpotHedge
from tests.unit.placement_world import both

NOW = 360_000.0
OFFERS = both("c/a/a1", "c/b/b1", "x/u/u1")
SPOT_OFFERS, ON_DEMAND_OFFERS = OFFERS[:3], OFFERS[3:]
READY = ReplicaState.READY


def fleet(spot: int, on_demand: int = 0) -> tuple[Replica, ...]:
    """Replicas that have been ready for long."""
    offers = [SPOT_OFFERS[i % 3] for i in range(spot)] + [ON_DEMAND_OFFERS[i % 3] for i in range(on_demand)]
    return tuple(
        Replica(i + 1, 1, offer, READY, 0.0, 0.0, launched_at=0.0, ready_at=0.0)
        for i, offer in enumerate(offers)
    )


def decide(
    policy: PlacementPolicy,
    live: tuple[Replica, ...],
    offers: tuple[Offer, ...] = OFFERS,
    memory: Any = None,
    *,
    wanted: int = 4,
    **outlook: Any,
) -> Decision:
    name = "spothedge" if isinstance(policy, SpotHedge) else "risk_hedge"
    goal = PlacementGoal(name, 0, True, 0)
    return policy.decide(View(NOW, wanted, goal, live, (), offers, 99, **outlook), memory or {})


def bought(decided: Decision) -> int:
    return sum(one.offer.capacity_type is CapacityType.ON_DEMAND for one in decided.launches)


@pytest.mark.parametrize(
    ("spot", "on_demand", "wanted_then", "stand_ins", "ends"),
    [
        pytest.param(4, 0, None, 0, 0, id="complete"),
        pytest.param(2, 0, None, 2, 0, id="two are missing, no forecast"),
        pytest.param(2, 0, 4, 2, 0, id="two are missing, all last"),
        pytest.param(2, 0, 3, 1, 0, id="one of the missing lasts"),
        pytest.param(2, 0, 2, 0, 0, id="none of the missing lasts"),
        pytest.param(2, 0, 1, 0, 0, id="even fewer are wanted then"),
        pytest.param(2, 2, 2, 0, 0, id="what stands in goes on serving"),
        pytest.param(2, 1, 2, 0, 0, id="half of what is missing stands in"),
        pytest.param(4, 1, 2, 0, 1, id="what stands in for nothing goes"),
    ],
)
def test_spothedge_launches_no_stand_in_that_would_be_ready_when_it_is_not_wanted(
    spot: int, on_demand: int, wanted_then: int | None, stand_ins: int, ends: int
) -> None:
    decided = decide(SpotHedge(), fleet(spot, on_demand), wanted_then=wanted_then)
    assert (bought(decided), len(decided.ends)) == (stand_ins, ends)


@pytest.mark.parametrize("wanted_then", [None, 4, 3, 2, 1, 0])
def test_riskhedge_launches_no_stand_in_that_would_be_ready_when_it_is_not_wanted(
    wanted_then: int | None,
) -> None:
    """In a dry market: no spot is on offer, and two of four replicas are lost."""
    decided = decide(RiskHedge(), fleet(0, 2), ON_DEMAND_OFFERS, wanted_then=wanted_then)
    lasting = 4 if wanted_then is None else wanted_then
    assert bought(decided) == max(0, lasting - 2)
    assert not decided.ends


def a_budget(live: tuple[Replica, ...], **outlook: Any) -> Any:
    return decide(RiskHedge(), live, **outlook).memory.get("budget")


@pytest.mark.parametrize(
    ("needed_now", "complete"),
    [
        pytest.param(None, False, id="no forecast"),
        pytest.param(4, False, id="all are needed now"),
        pytest.param(3, False, id="one of the missing is needed now"),
        pytest.param(2, True, id="both of the missing are wanted ahead"),
    ],
)
def test_riskhedge_misses_only_what_is_needed_now(needed_now: int | None, complete: bool) -> None:
    """Its budget begins once the service is complete, and counts the time in which it is not."""
    assert (a_budget(fleet(2), needed_now=needed_now) is not None) == complete


def test_riskhedge_hedges_demand_that_is_likely_to_come() -> None:
    live = fleet(4)
    calm = decide(RiskHedge(), live, wanted_later=(1.0,))
    rising = decide(RiskHedge(), live, wanted_later=(0.2, 0.0, 0.8))
    assert len(rising.launches) > len(calm.launches)
