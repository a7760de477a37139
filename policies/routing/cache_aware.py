"""Cache aware: the target with most of the prompt in its cache, as long as the load is level.

The rule of the SGLang router (`cache_aware` of sglang-router and smg; constants are its defaults). If the busiest
target has over 64 requests more than the idlest, and over 1.5 times as many, the load is out of balance and the
least loaded target is taken. Otherwise, if more than 0.3 of the prompt matches, one that holds the match is taken;
if not, the least loaded. However the choice was made, the prompt is inserted, so that load put elsewhere takes
its cache entries with it.

Differences here:

*The least loaded holder*, and of equals the one used longest ago; the original takes the holder that was used
last, even if ten others have the same prefix cached.

*A miss goes to the least loaded target.* Older versions sent it to the target with the smallest tree: a new target
then takes everything, until it fails (sgl-project/sglang#14532).

*A short match is a miss*, however short the prompt: less than a block of an engine's cache saves nothing, and
would tie everybody's "hello" to one target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from policies.routing.base import Choice, RequestView, TargetView
from policies.routing.prefix_policy import MIN_MATCH_BYTES, PrefixPolicy

CACHE_THRESHOLD = 0.3
BALANCE_ABS = 64
BALANCE_REL = 1.5
MAX_TREE_BYTES = 2**26


class CacheAware(PrefixPolicy):
    """The longest match, unless the load is out of balance.

    `cache_threshold` is a share of the prompt, `balance_abs` a number of requests, `balance_rel` a ratio of the highest to the lowest load, `max_tree_bytes` a limit per target.
    """

    name: ClassVar[str] = "cache_aware"

    def __init__(
        self,
        cache_threshold: float = CACHE_THRESHOLD,
        balance_abs: int = BALANCE_ABS,
        balance_rel: float = BALANCE_REL,
        max_tree_bytes: int = MAX_TREE_BYTES,
        min_match_bytes: int = MIN_MATCH_BYTES,
    ) -> None:
        super().__init__(max_tree_bytes)
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        self._min_match_bytes = min_match_bytes

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        if not targets:
            return None
        prompt_bytes, matched = self._matches(request)
        rows = self._rows(targets, matched)
        lowest = highest = rows[0][1]
        deepest = 0
        for row in rows:
            lowest, highest, deepest = min(lowest, row[1]), max(highest, row[1]), max(deepest, row[4])
        if highest - lowest > self._balance_abs and highest > self._balance_rel * lowest:
            return self._least_loaded(rows, "the load is out of balance")
        if deepest < self._min_match_bytes or deepest <= self._cache_threshold * prompt_bytes:
            return self._least_loaded(rows, "little of the prompt is cached")
        holders = [row[0] for row in rows if row[4] == deepest]
        return self._least_loaded(rows, "has most of the prompt cached", holders)
