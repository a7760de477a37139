"""Least load: the target with the fewest requests in flight; among equals the one used longest ago.

Two known faults of the plain form are closed here.

*The black hole.* A target that refuses or fails at once never has anything in flight, so it looks like the
idlest of all and attracts nearly every request. The load therefore contains the target's recent failures,
fading with time (`TargetView.trouble`, rounded to whole requests): a target that fails is as unattractive as
one that is busy. Targets that cannot even be reached are not offered to a policy in the first place.

*The tie.* With little traffic everybody has zero in flight. A fixed order would send everything to the first
target, and one fresh target would starve another; the order of last use rotates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from policies.routing.base import Choice, RequestView, Scored, TargetView, Term, Turns


class LeastLoad:
    name: ClassVar[str] = "least_load"
    needs_prompt: ClassVar[bool] = False

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        if not targets:
            return None
        scored = tuple(self._score(target) for target in targets)
        best = min(scored, key=lambda one: (one.cost, self._turns.last(one.target_id)))
        return Choice(best.target_id, "fewest requests in flight", scored)

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        self._turns.use(target_id)

    def forget(self, target_id: str) -> None:
        self._turns.forget(target_id)

    def _score(self, target: TargetView) -> Scored:
        failures = int(target.trouble + 0.5)
        terms = (
            Term("in_flight", target.in_flight),
            Term("recent_failures", failures),
            Term("last_turn", self._turns.last(target.id)),
        )
        return Scored(target.id, float(target.in_flight + failures), terms)
