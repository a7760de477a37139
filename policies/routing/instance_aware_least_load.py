"""Instance-aware least load: the target that will be loaded least, for its size, once it has the request.

The cost is (load + 1) / capacity, where load is what `least_load` counts and capacity is the target's size
relative to the others. Among equals the one used longest ago. For targets of one size it is `least_load`.

Source: SkyPilot, `instance_aware_least_load`, where the capacity is the service's target QPS for the
accelerator and the cost is load / capacity. Without the one, idle targets of all sizes tie, and half of a
light traffic over an H100 and an L4 goes to the L4. With it the rule is the shortest expected delay of
queueing theory: a small target gets its first request when the large one is as busy, for its size, as that
request will make it. Of more than a few targets a sample is compared (see `policies.routing.sampling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import ClassVar

from policies.routing.base import Choice, RequestView, TargetView
from policies.routing.least_load import load
from policies.routing.sampling import SamplingPolicy

_TERMS = ("in_flight", "trouble", "capacity", "last_turn")
_COST_THEN_TURN = itemgetter(1, 5)


class InstanceAwareLeastLoad(SamplingPolicy):
    name: ClassVar[str] = "instance_aware_least_load"

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        if not targets:
            return None
        last = self._turns.last
        scored = tuple(
            (
                target.id,
                (load(target) + 1) / target.capacity,
                target.in_flight,
                target.trouble,
                target.capacity,
                last(target.id),
            )
            for target in self._sample(targets)
        )
        best = min(scored, key=_COST_THEN_TURN)
        return Choice(best[0], "least load for its size", _TERMS, scored)
