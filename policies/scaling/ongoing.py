"""By concurrency: as many replicas as the requests that go on at a time need.

    mean of (in flight + queued) over the window / target_ongoing_requests_per_replica, rounded up

A rate is no evidence about how long requests take; this does (Little's law: the mean number of ongoing requests is
their rate times their duration), so it follows load whose requests vary in length, as chats and summaries do. What
is held while no replica is ready counts in full. The mean comes from the load balancers, which see every request
come and go: a count at the moment of a tick would miss what is shorter than a tick. When the number becomes
the target is the business of `hysteresis`.
"""

from __future__ import annotations

from policies.model import Json, Observation
from policies.scaling.base import Size
from policies.scaling.hysteresis import Need, settle
from policies.scaling.request_rate import whole


class Ongoing:
    """Every replica carries the same."""

    def target(self, observation: Observation, memory: Json) -> Size:
        goal, load = observation.goal.scaling, observation.load
        assert goal.target_ongoing_requests_per_replica is not None  # noqa: S101 - the registry chose this scaler by it
        if not load.known:
            return settle(observation, memory, None)
        needed = whole(load.ongoing / goal.target_ongoing_requests_per_replica)
        return settle(observation, memory, Need(needed, needed))
