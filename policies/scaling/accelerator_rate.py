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

from policies.model import Json, Observation
from policies.rollout import COUNTED
from policies.scaling.base import Size
from policies.scaling.hysteresis import Need, settle
from policies.scaling.request_rate import ROUNDING, whole
from policies.throughput import qps_of

_MORE = 0.1  # how much more than remembered a target must carry to be remembered for it


class AcceleratorRate:
    """Memory: that of `hysteresis`, and {"carries": requests per second that the target was set for, or has carried since}."""

    def target(self, observation: Observation, memory: Json) -> Size:
        work, load = observation.goal.scaling.target_qps_by_accelerator, observation.load
        # Old versions count as well: they serve until the new ones do.
        staying = [r for r in observation.replicas if r.state in COUNTED and r.preempt_at is None]
        live = sorted(qps_of(replica.offer, work) for replica in staying)
        slowest = min(entry.qps for entry in work)
        fresh = qps_of(observation.offers[0], work) if observation.offers else slowest
        carries = memory.get("carries", 0.0)
        owed = _count(carries, live[::-1], fresh)
        if not load.known:
            return settle(observation, memory, None, owed)._replace(qps=carries or None)
        rate = load.requests / load.window_s
        need = Need(_count(rate, live[::-1], fresh), _count(rate, live, fresh))
        size = settle(observation, memory, need, owed)
        if size.memory["target"] != memory.get("target"):
            carries = min(rate, _carried(size.wanted, live[::-1], fresh))
        elif rate > (1.0 + _MORE) * carries:
            carries = max(carries, min(rate, _carried(size.wanted, live[::-1], fresh)))
        return size._replace(memory={**size.memory, "carries": carries}, qps=carries)


def _count(rate: float, live: Sequence[float], fresh: float) -> int:
    """Return how many replicas carry `rate`: of the live ones, in this order, and new ones beyond them."""
    for count, qps in enumerate(live):
        if rate <= ROUNDING:
            return count
        rate -= qps
    return len(live) + max(0, whole(rate / fresh))


def _carried(size: int, live: Sequence[float], fresh: float) -> float:
    return sum(live[:size]) + fresh * max(0, size - len(live))
