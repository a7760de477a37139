"""Least load: the target with the fewest requests in flight; among equals the one used longest ago.

Two known faults of the plain form are closed here.

*The black hole.* A target that refuses or fails at once never has anything in flight, so it looks like the
idlest of all and attracts nearly every request. The load therefore contains the target's recent failures,
fading with time (`TargetView.trouble`, rounded to whole requests): a target that fails is as unattractive as
one that is busy. Targets that cannot even be reached are not offered to a policy in the first place.

*The tie.* With little traffic everybody has zero in flight. A fixed order would send everything to the first
target, and one fresh target would starve another; the order of last use rotates.

Of more than a few targets it is the least loaded of a sample (see `policies.routing.sampling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from policies.routing.base import Choice, RequestView, TargetView
from policies.routing.sampling import SamplingPolicy


class LeastLoad(SamplingPolicy):
    name: ClassVar[str] = "least_load"

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        if not targets:
            return None
        last = self._turns.last
        scored = tuple(
            (target.id, load(target), target.in_flight, target.trouble, last(target.id))
            for target in self._sample(targets)
        )
        best = min(scored, key=_cost_then_turn)
        return Choice(best[0], "fewest requests in flight", _TERMS, scored)


def load(target: TargetView) -> int:
    """Requests in flight, and recent failures as if they were."""
    return target.in_flight + int(target.trouble + 0.5)


_TERMS = ("in_flight", "trouble", "last_turn")


def _cost_then_turn(row: tuple[str, int, int, float, int]) -> tuple[int, int]:
    return row[1], row[4]
