"""Round robin: the target that was used longest ago.

With a fixed set of targets this is the usual circle. When targets join, leave or are excluded, none is
skipped and none is used twice in a row, because the circle is the order of last use and not a position in
a list. Load is ignored. Of more than a few targets it is the one of a sample that was used longest ago (see
`policies.routing.sampling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from policies.routing.base import Choice, RequestView, TargetView
from policies.routing.sampling import SamplingPolicy


class RoundRobin(SamplingPolicy):
    name: ClassVar[str] = "round_robin"

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        if not targets:
            return None
        best, first = "", -1
        scored: list[tuple[str | float, ...]] = []
        for target in self._sample(targets):
            turn = self._turns.last(target.id)
            scored.append((target.id, turn))
            if first < 0 or turn < first:
                best, first = target.id, turn
        return Choice(best, "used longest ago", (), tuple(scored))
