"""What policies that remember prompts have in common: the tree, fair ties, and how a choice is explained."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import ClassVar

from policies.routing.base import Choice, Policy, RequestView, TargetView, Turns
from policies.routing.least_load import load
from policies.routing.radix_tree import RadixTree

# Longer prompts are told apart by their first part: this much in common decides any choice.
MAX_PROMPT_BYTES = 256 * 1024

# Engines reuse whole blocks (vLLM: 16 tokens, about 64 bytes of English): a shorter match saves nothing.
MIN_MATCH_BYTES = 64


# A candidate: its id and cost, then the terms of the cost.
Row = tuple[str, int, int, float, int, int]


class PrefixPolicy(Policy):
    """Inserts every prompt for the target it is sent to. Of equals, the target used longest ago is taken."""

    needs_prompt: ClassVar[bool] = True

    def __init__(self, max_tree_bytes: int) -> None:
        self._tree = RadixTree(max_tree_bytes)
        self._turns = Turns()

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        if request.prompt:
            self._tree.insert(request.scope, request.prompt[:MAX_PROMPT_BYTES], target_id)
        self._turns.use(target_id)

    def forget(self, target_id: str) -> None:
        self._tree.forget(target_id)
        self._turns.forget(target_id)

    def gauges(self) -> dict[str, float]:
        """The size of the tree: its estimated memory in bytes, and its nodes."""
        return {"size_bytes": self._tree.size_bytes, "nodes": self._tree.nodes}

    def _matches(self, request: RequestView) -> tuple[int, Mapping[str, int]]:
        """How long the prompt is, and how much of it each target has, whether it is offered or not."""
        if not request.prompt:
            return 0, {}
        prompt = request.prompt[:MAX_PROMPT_BYTES]
        return len(prompt), self._tree.matches(request.scope, prompt)

    def _rows(self, targets: Sequence[TargetView], matched: Mapping[str, int]) -> list[Row]:
        """The targets as candidates that cost their load."""
        last, match = self._turns.by_target.get, matched.get
        return [
            (
                name := one.id,
                load(one) if one.trouble else one.in_flight,
                one.in_flight,
                one.trouble,
                match(name, 0),
                last(name, 0),
            )
            for one in targets
        ]

    @staticmethod
    def _least_loaded(rows: list[Row], because: str, among: Collection[str] | None = None) -> Choice:
        """The least loaded candidate, or the least loaded of those in `among`, which go before all others."""
        if among is not None and len(among) < len(rows):
            behind = max([row[1] for row in rows]) + 1
            rows = [row if row[0] in among else (row[0], row[1] + behind, *row[2:]) for row in rows]
        best = min(rows, key=_cost_then_turn)
        return Choice(best[0], because, _TERMS, tuple(rows), best[4])


_TERMS = ("in_flight", "trouble", "matched_bytes", "last_turn")
_cost_then_turn = itemgetter(1, 5)
