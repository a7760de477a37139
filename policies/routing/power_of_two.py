"""Power of two choices: of two targets drawn at random the less loaded; of equals the one used longest ago.

If both engines report their load, their running and pending requests count, and between equals the fuller KV
cache loses; if one is silent, both are judged by what this load balancer has on them. An engine's word
includes the traffic of other load balancers, so it is never compared with our own count of another target.

Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (IEEE TPDS 12(10), 2001): the
longest queue grows as log log n instead of log n / log log n. Its use is where loads are old news: several
agents that all pick the minimum of the same stale numbers send a herd to one target, two random candidates
break it up. SGLang's router compares KV usage where we compare requests: what a newcomer waits for is its
turn in a batch, and usage shows that only where all conversations are of one length.

The draw belongs to the attempt and not to the choice: the two candidates of the next request are drawn when
the last one is recorded. Choosing twice gives the same result, and a choice that is not followed costs no
randomness.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from random import Random
from typing import ClassVar

from policies.routing.base import Choice, Policy, RequestView, TargetView, Turns
from policies.routing.least_load import load

_ENGINE_TERMS = ("kv_usage", "last_turn", "running", "pending", "trouble")
_OWN_TERMS = ("kv_usage", "last_turn", "in_flight", "trouble")
_COST_THEN_CACHE_THEN_TURN = itemgetter(1, 2, 3)


class PowerOfTwo(Policy):
    name: ClassVar[str] = "power_of_two"

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._turns = Turns()
        self._draw()

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        if not targets:
            return None
        if len(targets) == 1:
            return Choice(targets[0].id, "the only target", (), ((targets[0].id, load(targets[0])),))
        one, other = self._pair(targets)
        last = self._turns.last
        terms: tuple[str, ...]
        scored: tuple[tuple[str | float, ...], ...]
        if one.running is None or one.pending is None or other.running is None or other.pending is None:
            because, terms = "fewer requests in flight of two drawn at random", _OWN_TERMS
            scored = tuple(
                (target.id, load(target), 0.0, last(target.id), target.in_flight, target.trouble)
                for target in (one, other)
            )
        else:
            because, terms = "less loaded engine of two drawn at random", _ENGINE_TERMS
            both_tell = one.kv_usage is not None and other.kv_usage is not None
            scored = tuple(
                (
                    target.id,
                    running + pending + int(target.trouble + 0.5),
                    target.kv_usage if both_tell and target.kv_usage is not None else 0.0,
                    last(target.id),
                    running,
                    pending,
                    target.trouble,
                )
                for target, running, pending in (
                    (one, one.running, one.pending),
                    (other, other.running, other.pending),
                )
            )
        best = min(scored, key=_COST_THEN_CACHE_THEN_TURN)
        return Choice(str(best[0]), because, terms, scored)

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        self._turns.use(target_id)
        self._draw()

    def forget(self, target_id: str) -> None:
        self._turns.forget(target_id)

    def _draw(self) -> None:
        """Two numbers in [0, 1), which become two targets once it is known how many there are."""
        self._first = self._rng.random()
        self._second = self._rng.random()

    def _pair(self, targets: Sequence[TargetView]) -> tuple[TargetView, TargetView]:
        """Return two different targets, every pair equally likely."""
        first = int(self._first * len(targets))
        second = int(self._second * (len(targets) - 1))
        return targets[first], targets[second + (second >= first)]
