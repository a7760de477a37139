"""By what engines report of themselves: requests that wait in them, and how full their KV caches are.

    waiting requests of all replicas / target_queue_length, rounded up
    sum of the replicas' KV cache usage / target_kv_cache_usage, rounded up

llm-d, KServe and AIBrix scale by these. A queue says when a fleet is too small and never when it is too large, so it stands beside
another target; the most that any of them needs counts (`hysteresis`). The figures are those of the last poll: a burst that
does not last is left to the delays. Replicas whose engines report nothing count for nothing.
"""

from __future__ import annotations

from dataclasses import replace

from policies.goals import ScalingGoal
from policies.history import Load
from policies.model import Json, Observation
from policies.scaling.base import Scaler, Size
from policies.scaling.hysteresis import Need, settle
from policies.scaling.request_rate import whole

LOOK_EVERY_S = 10.0  # engines' figures change without an event


def engine_need(goal: ScalingGoal, load: Load) -> int:
    """Return how many replicas the reports of engines ask for."""
    waiting, usage = goal.target_queue_length, goal.target_kv_cache_usage
    return max(
        0 if waiting is None else whole(load.engine_queue / waiting),
        0 if usage is None else whole(load.kv_usage / usage),
    )


class EngineLoad:
    """`beside` decides by another target; None: the KV cache usage is the only one."""

    def __init__(self, beside: Scaler | None) -> None:
        self._beside = beside

    def target(self, observation: Observation, memory: Json) -> Size:
        load = observation.load
        raised = replace(observation, load=replace(load, asked=engine_need(observation.goal.scaling, load)))
        if self._beside is not None:
            size = self._beside.target(raised, memory)
        else:
            # Engines that report nothing while they have requests are no evidence of an idle fleet.
            is_blind = not load.engines and load.in_flight + load.queued > 0 and memory.get("target", 1) > 0
            size = settle(raised, memory, None if is_blind or not load.known else Need(0, 0))
        look_at = observation.now + LOOK_EVERY_S
        return size._replace(wake_at=look_at if size.wake_at is None else min(size.wake_at, look_at))
