"""Names of policies, as they stand in the YAML, and what they stand for."""

from __future__ import annotations

from typing import NamedTuple

from policies.model import Goal
from policies.placement.base import PlacementPolicy
from policies.placement.static import Static
from policies.scaling.base import Scaler
from policies.scaling.fixed import Fixed
from policies.scaling.request_rate import RequestRate


class Policies(NamedTuple):
    """The two decisions of the controller."""

    scaler: Scaler
    placer: PlacementPolicy


def policies_for(goal: Goal) -> Policies:
    """The policies a goal asks for. Policy objects hold no state, so they are made anew whenever needed."""
    scaler: Scaler = Fixed() if goal.scaling.target_qps_per_replica is None else RequestRate()
    return Policies(scaler, Static())
