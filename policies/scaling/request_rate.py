"""By request rate (SkyServe paper §4): as many replicas as the arrivals of the last window need.

    requests / window_s / target_qps_per_replica, rounded up

When that becomes the target is the business of `hysteresis`.
"""

from __future__ import annotations

import math

from policies.model import Json, Observation
from policies.scaling.base import Size
from policies.scaling.hysteresis import Need, settle

#: A rate that is a whole number of replicas must not need one more because of how floats divide.
ROUNDING = 1e-9


def whole(replicas: float) -> int:
    """Rounded up, but for an error of arithmetic."""
    return math.ceil(replicas - ROUNDING)


class RequestRate:
    """Every replica carries the same."""

    def target(self, observation: Observation, memory: Json) -> Size:
        goal, load = observation.goal.scaling, observation.load
        assert goal.target_qps_per_replica is not None  # noqa: S101 - the registry chose this scaler by it
        if not load.known:
            return settle(observation, memory, None)
        needed = whole(load.requests / load.window_s / goal.target_qps_per_replica)
        return settle(observation, memory, Need(needed, needed))
