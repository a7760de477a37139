"""Names of policies, as they stand in the YAML, and their classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import NamedTuple

from policies.goals import Goal, ScalingGoal
from policies.placement.base import PlacementPolicy
from policies.scaling.base import Scaler
from policies.scaling.fixed import Fixed
from policies.scaling.ongoing import Ongoing
from policies.scaling.request_rate import RequestRate


class Policies(NamedTuple):
    """The two decisions of the controller."""

    scaler: Scaler
    placer: PlacementPolicy


def _on_first_use(module: str, name: str) -> Callable[[], PlacementPolicy]:
    @cache
    def make() -> PlacementPolicy:
        made: PlacementPolicy = getattr(import_module(f"policies.placement.{module}"), name)()
        return made

    return make


#: What `Goal.placement.placer` may name. A placer's module is imported when a service first uses it.
PLACERS: Mapping[str, Callable[[], PlacementPolicy]] = {
    "spread": _on_first_use("static", "Static"),
    "spothedge": _on_first_use("spothedge", "SpotHedge"),
    "spothedge_literal": _on_first_use("spothedge", "as_printed"),
    "even_spread": _on_first_use("baselines", "EvenSpread"),
    "round_robin": _on_first_use("baselines", "RoundRobin"),
    "single_zone": _on_first_use("baselines", "SingleZone"),
    "single_region": _on_first_use("baselines", "SingleRegion"),
    "asg": _on_first_use("baselines", "auto_scaling_group"),
    "risk_hedge": _on_first_use("risk_hedge", "RiskHedge"),
    "on_demand": _on_first_use("baselines", "OnDemand"),
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
    by_requests = _by_requests(goal)
    if goal.target_queue_length is None and goal.target_kv_cache_usage is None:
        return by_requests or Fixed()
    from policies.scaling.engine_load import EngineLoad  # as few services need it, like the next one

    return EngineLoad(by_requests)


def _by_requests(goal: ScalingGoal) -> Scaler | None:
    if goal.target_ongoing_requests_per_replica is not None:
        return Ongoing()
    if goal.target_qps_by_accelerator:
        from policies.scaling.accelerator_rate import AcceleratorRate

        return AcceleratorRate()
    return None if goal.target_qps_per_replica is None else RequestRate()


def reads_load(goal: ScalingGoal) -> bool:
    """Return whether the size depends on the load at all."""
    return not isinstance(scaler_for(goal), Fixed)
