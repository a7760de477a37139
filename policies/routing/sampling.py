"""Comparing a few candidates where there are many: the power of d choices.

Up to ALL candidates every one is compared. Of more, SAMPLE are drawn at random and the best of those is taken, so
that a request costs the same with a thousand targets as with ten. The loss is small: with d random candidates
the longest queue grows as log log n / log d (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing",
IEEE TPDS 12(10), 2001), and several load balancers with the same stale numbers do not all pick the same target.
Envoy's LEAST_REQUEST and SGLang's router draw two; the more that are drawn, the fewer requests go to a target that
is busier than another.

The draw belongs to the attempt and not to the choice: the candidates of the next request are drawn once the last
one is recorded, when they are first needed. Choosing twice gives the same target, and a choice that is not followed costs no
randomness.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from struct import Struct
from typing import Final

from policies.routing.base import Policy, RequestView, TargetView, Turns

ALL: Final = 16
SAMPLE: Final = 5
_NUMBERS: Final = Struct(f"<{SAMPLE}I").unpack


class SamplingPolicy(Policy):
    """What policies that compare candidates have in common: the sample, and the order of last use for ties."""

    def __init__(self, rng: Random | None = None) -> None:
        """Without `rng` the same numbers are drawn in every process."""
        self._rng = rng or Random(0)
        self._turns = Turns()
        self._numbers = b""

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        self._turns.use(target_id)
        self._numbers = b""

    def forget(self, target_id: str) -> None:
        self._turns.forget(target_id)

    def _sample(self, targets: Sequence[TargetView]) -> Sequence[TargetView]:
        """Return the targets to compare: all of a few; of many SAMPLE, or fewer where one is drawn twice."""
        count = len(targets)
        if count <= ALL:
            return targets
        return [targets[at] for at in {number * count >> 32: None for number in _NUMBERS(self._drawn())}]

    def _drawn(self) -> bytes:
        """Return the numbers of this draw, which become positions once it is known how many candidates there are."""
        if not self._numbers:
            self._numbers = self._rng.randbytes(4 * SAMPLE)
        return self._numbers
