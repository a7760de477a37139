"""What policies that remember prompts have in common: the tree, fair ties, and how a choice is explained.

Where targets are many, a sample is compared (see `policies.routing.sampling`), and with it those that hold most of
the prompt: a sample alone would hardly ever meet the one that has the conversation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from random import Random
from typing import ClassVar, Final

from policies.routing.base import Choice, RequestView, TargetView
from policies.routing.cached_tree import CachedTree, EngineCaches
from policies.routing.least_load import load
from policies.routing.radix_tree import NO_MATCH, Match, RadixTree, beginning_of
from policies.routing.sampling import ALL, SamplingPolicy
from policies.routing.target_list import finder

# Engines reuse whole blocks (vLLM: 16 tokens, about 64 bytes of English): a shorter match saves nothing.
MIN_MATCH_BYTES: Final = 64

HOLDERS: Final = 3  # of the prompt, compared with the sample
_SEARCHED: Final = 4 * HOLDERS  # for that many: those that are full are not among the targets


# A candidate: its id and cost, then the terms of the cost.
Row = tuple[str, int, int, float, int, int]


class PrefixPolicy(SamplingPolicy):
    """Inserts every prompt for the target it is sent to. Of equals, the target used longest ago is taken."""

    needs_prompt: ClassVar[bool] = True

    def __init__(self, max_tree_bytes: int, rng: Random | None = None) -> None:
        super().__init__(rng)
        self._tree = RadixTree(max_tree_bytes)
        self._cached: CachedTree | None = None  # where engines report what they have cached

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        self.cached(request, target_id, now)
        super().record(request, target_id, now)

    def cached(self, request: RequestView, target_id: str, now: float) -> None:
        if request.prompt:
            self._tree.insert(request.scope, beginning_of(request.prompt), target_id)

    def follow(self, caches: EngineCaches | None) -> None:
        """From now on engines report what they have cached, or (None) none does any longer."""
        if self._cached is not None:
            self._cached.close()
        self._cached = None if caches is None else CachedTree(self._tree, caches)

    def forget(self, target_id: str) -> None:
        self._tree.forget(target_id)
        super().forget(target_id)

    def gauges(self) -> dict[str, float]:
        """Return the size of the tree: its estimated memory in bytes, and its nodes."""
        return {"size_bytes": self._tree.size_bytes, "nodes": self._tree.nodes}

    def _matches(self, request: RequestView) -> tuple[int, Match]:
        """Return how long the prompt is, and how much of it each target has, whether it is offered or not."""
        if not request.prompt:
            return 0, NO_MATCH
        prompt = beginning_of(request.prompt)
        tree = self._tree if self._cached is None else self._cached
        return len(prompt), tree.match(request.scope, prompt)

    def _candidates(self, targets: Sequence[TargetView], matched: Match) -> Sequence[TargetView]:
        """Return all of a few targets; of many a sample, and those with the longest match."""
        sample = self._sample(targets)
        if len(targets) <= ALL:
            return sample
        find, holders, drawn = finder(targets), list[TargetView](), self._drawn()
        for target_id in islice(matched.longest_first(drawn[0] << 8 | drawn[1]), _SEARCHED):
            holder = find(target_id)
            if holder is not None:
                holders.append(holder)
                if len(holders) == HOLDERS:
                    break
        return [*holders, *(target for target in sample if target not in holders)]

    def _rows(self, targets: Sequence[TargetView], matched: Match) -> list[Row]:
        """Return the candidates among the targets, which cost their load."""
        turns, few = self._turns, matched.few
        return [
            (
                name := one.id,
                load(one) if one.trouble else one.in_flight,
                one.in_flight,
                one.trouble,
                matched.get(name, 0) if few is None else few.get(name, 0),
                turns.last(name),
            )
            for one in self._candidates(targets, matched)
        ]

    @staticmethod
    def _least_loaded(rows: list[Row], because: str, among: Collection[str] | None = None) -> Choice:
        """Return the least loaded candidate, or the least loaded of those in `among`, which go before all others."""
        behind = 0
        if among is not None and len(among) < len(rows):
            for row in rows:
                behind = max(behind, row[1] + 1)
        best, scored = rows[0], list[Row]()
        lowest = first = -1
        for row in rows:
            name, cost, in_flight, trouble, matched_bytes, turn = row
            if behind and among is not None and name not in among:
                cost += behind
                row = name, cost, in_flight, trouble, matched_bytes, turn
            scored.append(row)
            if lowest < 0 or cost < lowest or (cost == lowest and turn < first):
                best, lowest, first = row, cost, turn
        return Choice(best[0], because, _TERMS, tuple(scored), best[4])


_TERMS: Final = ("in_flight", "trouble", "matched_bytes", "last_turn")
