"""Request-rate autoscaling (SkyServe paper §4): as many replicas as the arrival rate needs.

    candidate = clip(ceil(requests / window / target_qps_per_replica), min_replicas, max_replicas)

The candidate becomes the target once it has stayed above (below) the target for `upscale_delay_s`
(`downscale_delay_s`). Delays are measured in seconds of the clock, not in ticks as SkyPilot does, so a delay
of 39 s is 39 s. When it moves, the target moves to the mildest candidate seen during the delay: a spike at the
end of the wait is not taken for the level of the whole wait.

Two deviations. Nothing to serve and somebody asking is not a trend to be confirmed: from 0 the target jumps at
once. And without a report from any load balancer the target stays as it is, so that a controller that has just
started does not take its own ignorance for silence.
"""

from __future__ import annotations

import math

from policies.model import Json, Observation


class RequestRate:
    """Scales by requests per second; memory is {"target", "above": [since, mildest], "below": [since, mildest]}."""

    def target(self, observation: Observation, memory: Json) -> tuple[int, Json]:
        goal, load, now = observation.goal.scaling, observation.load, observation.now
        assert goal.target_qps_per_replica is not None  # noqa: S101 - the registry chose this scaler by it
        held = memory.get("target", goal.min_replicas)
        current = min(max(held, goal.min_replicas), goal.max_replicas)
        if not load.known:
            return current, {**memory, "target": current}

        rate = load.requests / load.window_s
        wanted = math.ceil(rate / goal.target_qps_per_replica - 1e-9)
        wanted = min(max(wanted, goal.min_replicas), goal.max_replicas)
        asked = wanted > 0 or load.queued > 0
        if current == 0 and asked and goal.max_replicas > 0:
            return max(wanted, 1), {"target": max(wanted, 1)}
        if wanted > current:
            since, mildest = memory.get("above", (now, wanted))
            mildest = min(mildest, wanted)
            if now - since >= goal.upscale_delay_s:
                return mildest, {"target": mildest}
            return current, {"target": current, "above": [since, mildest]}
        if wanted < current:
            since, mildest = memory.get("below", (now, wanted))
            mildest = max(mildest, wanted)
            if now - since >= goal.downscale_delay_s:
                return mildest, {"target": mildest}
            return current, {"target": current, "below": [since, mildest]}
        return current, {"target": current}
