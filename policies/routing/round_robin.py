"""Round robin: the target that was used longest ago.

With a fixed set of targets this is the usual circle. When targets join, leave or are excluded, nobody is
skipped and nobody is served twice in a row, because the circle is the order of last use and not a position in
a list. Load is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import ClassVar

from policies.routing.base import Choice, Policy, RequestView, TargetView, Turns

_COST = itemgetter(1)


class RoundRobin(Policy):
    name: ClassVar[str] = "round_robin"

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        if not targets:
            return None
        last = self._turns.last
        scored = tuple((target.id, last(target.id)) for target in targets)
        best = min(scored, key=_COST)
        return Choice(best[0], "used longest ago", (), scored)

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        self._turns.use(target_id)

    def forget(self, target_id: str) -> None:
        self._turns.forget(target_id)
