"""Prefix tree: the best available holder of the longest match, and exploration where little matches.

The rule of SkyWalker (§3.2-3.3): of the targets that are available (a policy is given no others) the one with the
longest match is taken; if less than half of the prompt matches anywhere, the least loaded target is, which spreads
prompts that have nothing to reuse. The oldest records leave the tree first. SkyWalker walks down only while the
node has an available holder, because holders of a child hold its parent too; the tree here returns the match of
every target in one walk, which gives the same result and what the additions below need.

Taking the longest match collapses where all prompts begin alike: the first target that has the beginning gets
everything (on the Mooncake conversation trace, whose requests share their first block, 1 target of 8). Exploring
helps only where the common beginning is less than half of the prompt. Additions here:

*A load gate.* A holder may have more to do than the least loaded target only as far as its match is worth it: a
request for each KiB it has cached (prefilling 250 tokens takes an engine about as long as one more sequence adds
to the decoding of a response). And however long the match, it may be above the mean load by no more than a fifth
and 4 requests. Other holders are passed over; if all are, the least loaded target learns the prompt. So a short
common beginning is soon known to every target and binds no request, an idle target is not left idle, and a long
conversation stays where it is until that is really busy.

*Giving up a little depth.* A holder whose match is shorter by at most a tenth of the prompt goes before the
longest, if it has at most half the load and at least 4 requests less: prefilling a tenth costs less than sharing
the engine with that number of further requests.

*A short match is a miss*: less than a block of an engine's cache saves nothing.

`PrefixTree.published()` has none of these; only its ties rotate instead of being drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from random import Random
from typing import ClassVar

from policies.routing.base import Choice, RequestView, TargetView
from policies.routing.prefix_policy import MIN_MATCH_BYTES, PrefixPolicy

EXPLORE_BELOW = 0.5
REQUESTS_PER_BYTE = 1 / 1024
GATE_RATIO = 1.2
GATE_SLACK = 4
GIVE_UP = 0.1
FREER_RATIO = 0.5
FREER_REQUESTS = 4
MAX_TREE_BYTES = 2**24


class PrefixTree(PrefixPolicy):
    """`explore_below` and `give_up` are shares of the prompt.

    A holder may have `requests_per_byte` of its match more than the lowest load, and `gate_slack` more than `gate_ratio`
    times the mean. `max_tree_bytes` is a limit per target.
    """

    name: ClassVar[str] = "prefix_tree"

    def __init__(
        self,
        explore_below: float = EXPLORE_BELOW,
        requests_per_byte: float = REQUESTS_PER_BYTE,
        gate_ratio: float = GATE_RATIO,
        gate_slack: float = GATE_SLACK,
        give_up: float = GIVE_UP,
        max_tree_bytes: int = MAX_TREE_BYTES,
        min_match_bytes: int = MIN_MATCH_BYTES,
        rng: Random | None = None,
    ) -> None:
        super().__init__(max_tree_bytes, rng)
        self._explore_below = explore_below
        self._requests_per_byte = requests_per_byte
        self._gate_ratio = gate_ratio
        self._gate_slack = gate_slack
        self._give_up = give_up
        self._min_match_bytes = min_match_bytes

    @classmethod
    def published(cls) -> PrefixTree:
        """SkyWalker's rule without the additions."""
        return cls(requests_per_byte=inf, gate_slack=inf, give_up=0.0, min_match_bytes=0)

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        if not targets:
            return None
        prompt_bytes, matched = self._matches(request)
        rows = self._rows(targets, matched)
        loads = {row[0]: row[1] for row in rows}
        enough = max(1.0, self._min_match_bytes, self._explore_below * prompt_bytes)
        depths = {row[0]: row[4] for row in rows if row[4] >= enough}
        if not depths:
            return self._least_loaded(rows, "little of the prompt is cached")
        lowest, worth = min(loads.values()), self._requests_per_byte
        gate = self._gate_ratio * sum(loads.values()) / len(loads) + self._gate_slack
        admitted = [
            name
            for name, depth in depths.items()
            if loads[name] <= gate and loads[name] - lowest <= depth * worth
        ]
        if not admitted:
            return self._least_loaded(rows, "who has it cached has too much to do")
        if len(admitted) > 1:
            admitted = self._best(admitted, loads, depths, self._give_up * prompt_bytes)
        return self._least_loaded(rows, "has most of the prompt cached", admitted)

    def _best(
        self, holders: list[str], loads: Mapping[str, int], matched: Mapping[str, int], give_up_bytes: float
    ) -> list[str]:
        """Return who has the longest match; or who has nearly as much, if some of those are clearly freer."""
        deepest = max([matched[name] for name in holders])
        longest = [name for name in holders if matched[name] == deepest]
        lowest = min([loads[name] for name in longest])
        freer = min(FREER_RATIO * lowest, lowest - FREER_REQUESTS)
        near = [name for name in holders if loads[name] <= freer and matched[name] >= deepest - give_up_bytes]
        return near or longest
