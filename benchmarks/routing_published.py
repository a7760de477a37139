"""Policies as they were published, to compare ours with: what ours add is measured, not claimed.

`sglang_router` is the rule of sglang-router and smg with its defaults: of several targets that have the longest match
cached it takes the one used last, so load gathers on one until it is 64 requests ahead. `skywalker` is SkyWalker's
prefix tree: the longest match among those available decides if it is half of the prompt, however busy the holder is.
`longest_prefix` knows no threshold either: the plain idea, which collapses where all prompts begin alike. `preserve` is
PreServe's router (`benchmarks.preserve`). `all_knowing` is no one's: it sees the caches themselves (`benchmarks.routing_all_knowing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from random import Random
from types import MappingProxyType
from typing import ClassVar

from benchmarks.preserve.router import PreServe
from benchmarks.routing_all_knowing import AllKnowing
from policies.routing import registry
from policies.routing.base import Choice, Policy, RequestView, RoutingPolicy, TargetView, Turns
from policies.routing.least_load import load
from policies.routing.prefix_tree import PrefixTree
from policies.routing.radix_tree import RadixTree


class SglangRouter(Policy):
    """Thresholds are the router's defaults: a share of the prompt, a number of requests, a ratio, bytes."""

    name: ClassVar[str] = "sglang_router"
    needs_prompt: ClassVar[bool] = True

    def __init__(
        self,
        cache_threshold: float = 0.3,
        balance_abs: int = 64,
        balance_rel: float = 1.5,
        max_tree_bytes: int = 2**26,
    ) -> None:
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        self._tree = RadixTree(max_tree_bytes)
        self._turns = Turns()

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        if not targets:
            return None
        loads = {target.id: load(target) for target in targets}
        least = min(loads, key=loads.__getitem__)
        most = max(loads.values())
        if most - loads[least] > self._balance_abs and most > self._balance_rel * loads[least]:
            return Choice(least, "the load is out of balance")
        prompt = request.prompt or b""
        matched = self._tree.matches(request.scope, prompt) if prompt else {}
        depths = {target_id: matched.get(target_id, 0) for target_id in loads}
        deepest = max(depths.values())
        if deepest <= self._cache_threshold * len(prompt):
            return Choice(least, "little of the prompt is cached")
        holders = [target_id for target_id, depth in depths.items() if depth == deepest]
        last = max(holders, key=self._turns.last)
        return Choice(last, "was the last to get this prefix", matched_bytes=deepest)

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        if request.prompt:
            self._tree.insert(request.scope, request.prompt, target_id)
        self._turns.use(target_id)

    def forget(self, target_id: str) -> None:
        self._tree.forget(target_id)
        self._turns.forget(target_id)


class SkyWalker(PrefixTree):
    name: ClassVar[str] = "skywalker"


class LongestPrefix(PrefixTree):
    name: ClassVar[str] = "longest_prefix"


PUBLISHED: Mapping[str, Callable[[], RoutingPolicy]] = MappingProxyType(
    {
        SglangRouter.name: SglangRouter,
        PreServe.name: lambda: PreServe(rng=Random(0)),
        SkyWalker.name: SkyWalker.published,
        LongestPrefix.name: lambda: LongestPrefix(
            explore_below=0.0, requests_per_byte=inf, gate_slack=inf, give_up=0.0, min_match_bytes=0
        ),
    }
)


def make_policy(name: str) -> RoutingPolicy:
    """One of these, or one of ours. Raises UnknownPolicyError."""
    if name == AllKnowing.name:
        return AllKnowing()
    published = PUBLISHED.get(name)
    return published() if published is not None else registry.make_policy(name)
