"""By request rate where replicas differ: each carries the rate of its accelerator (SkyPilot calls it instance-aware).

The size is the smallest number whose rates add up to the arrivals: the replicas that live, and new ones at the rate
of the best offer, which is what a launch is most likely to get. With replicas that live to spare, that number
depends on which of them stay, and a scaler does not choose them: zones, markets and versions decide that as well.
So the size rises only if even the fastest would be too few, and sinks only to a number that is enough whichever
stay, the slowest included. Between the two it rests: a size that counted on the fastest would sink, lose one of
them and rise again.

A launch that got a slower accelerator than the best, or a fast replica that was lost, makes the fleet too weak for
a load on which the wait has long been served. That debt ("carries", in requests per second) is paid at once.

SkyPilot's scaler of this kind looks at the first accelerator only and forgets counts; here "L4:2" and "L4" may
differ, and an accelerator without a value of its own counts with the smallest. Case does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.model import Json, Observation, Offer, ScalingGoal
from policies.rollout import COUNTED
from policies.scaling.base import Size
from policies.scaling.hysteresis import Need, settle
from policies.scaling.request_rate import ROUNDING, whole


class AcceleratorRate:
    """Memory: that of `hysteresis`, and {"carries": requests per second that the target was set for}."""

    def target(self, observation: Observation, memory: Json) -> Size:
        goal, load = observation.goal.scaling, observation.load
        # Old versions count as well: they serve until the new ones do.
        live = sorted(qps_of(r.offer, goal) for r in observation.replicas if r.state in COUNTED)
        slowest = min(entry.qps for entry in goal.target_qps_by_accelerator)
        fresh = qps_of(observation.offers[0], goal) if observation.offers else slowest
        carries = memory.get("carries", 0.0)
        owed = _count(carries, live[::-1], fresh)
        if not load.known:
            return settle(observation, memory, None, owed)
        rate = load.requests / load.window_s
        need = Need(_count(rate, live[::-1], fresh), _count(rate, live, fresh))
        size = settle(observation, memory, need, owed)
        if size.memory["target"] != memory.get("target"):
            carries = min(rate, _carried(size.wanted, live[::-1], fresh))
        return size._replace(memory={**size.memory, "carries": carries})


def qps_of(offer: Offer, goal: ScalingGoal) -> float:
    """Requests per second of one replica on this offer. A value for the exact count goes before one for any."""
    name = (offer.accelerator or "").lower()
    fitting = [entry for entry in goal.target_qps_by_accelerator if entry.accelerator.lower() == name]
    for count in (offer.accelerator_count, None):
        for entry in fitting:
            if entry.count == count:
                return entry.qps
    return min(entry.qps for entry in goal.target_qps_by_accelerator)


def _count(rate: float, live: Sequence[float], fresh: float) -> int:
    """How many replicas carry `rate`: of the live ones, in this order, and new ones beyond them."""
    for count, qps in enumerate(live):
        if rate <= ROUNDING:
            return count
        rate -= qps
    return len(live) + max(0, whole(rate / fresh))


def _carried(size: int, live: Sequence[float], fresh: float) -> float:
    return sum(live[:size]) + fresh * max(0, size - len(live))
