"""Names of policies, as they stand in the YAML, and their classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from policies.goals import Goal, ScalingGoal
from policies.placement.base import PlacementPolicy
from policies.placement.baselines import (
    EvenSpread,
    OnDemand,
    RoundRobin,
    SingleRegion,
    SingleZone,
    auto_scaling_group,
)
from policies.placement.risk_hedge import RiskHedge
from policies.placement.spothedge import SpotHedge, as_printed
from policies.placement.static import Static
from policies.scaling.accelerator_rate import AcceleratorRate
from policies.scaling.base import Scaler
from policies.scaling.fixed import Fixed
from policies.scaling.ongoing import Ongoing
from policies.scaling.request_rate import RequestRate


class Policies(NamedTuple):
    """The two decisions of the controller."""

    scaler: Scaler
    placer: PlacementPolicy


#: What `Goal.placement.placer` may name.
PLACERS: Mapping[str, Callable[[], PlacementPolicy]] = {
    "spread": Static,
    "spothedge": SpotHedge,
    "spothedge_literal": as_printed,
    "even_spread": EvenSpread,
    "round_robin": RoundRobin,
    "single_zone": SingleZone,
    "single_region": SingleRegion,
    "asg": auto_scaling_group,
    "risk_hedge": RiskHedge,
    "on_demand": OnDemand,
}

#: The placers that keep on-demand replicas also if the goal has no fallback.
MIXERS = frozenset({"asg", "on_demand"})


def policies_for(goal: Goal) -> Policies:
    """Return the policies a goal requests. Policy objects hold no state, so they are made again whenever needed."""
    return Policies(scaler_for(goal.scaling), PLACERS[goal.placement.placer]())


def scaler_for(goal: ScalingGoal) -> Scaler:
    """Return the scaler that understands the target which the goal sets."""
    if goal.slo is not None:
        # Imports NumPy, which only services with an SLO need.
        from policies.scaling.predictive import Predictive

        return Predictive()
    if goal.target_ongoing_requests_per_replica is not None:
        return Ongoing()
    if goal.target_qps_by_accelerator:
        return AcceleratorRate()
    return Fixed() if goal.target_qps_per_replica is None else RequestRate()


def reads_load(goal: ScalingGoal) -> bool:
    """Return whether the size depends on the load at all."""
    return not isinstance(scaler_for(goal), Fixed)
