"""Cache events of simulated engines, as `lb.cache_events` has them from live ones, without sockets and tokenizers.

Batches are those that `serve engine` publishes, and the production code reads them. A prompt is known in tokens once its request is over: for
`tokenize_per_s` requests a second at most, as many more may wait as at a live load balancer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from benchmarks.traffic.workloads import Call
from lb.cache_events.feed import CacheFeed
from lb.cache_events.prompt_linker import QUEUED
from policies.routing.cached_tree import EngineCaches
from skyserve_cli.engine.text import token_bytes


class ReportedCaches:
    """What is known of the caches of these targets, all of which begin with nothing."""

    def __init__(self, caches: EngineCaches, target_ids: Iterable[str], tokenize_per_s: float) -> None:
        self._caches = caches
        self._feeds = {name: CacheFeed(caches.index, name) for name in target_ids}
        for feed in self._feeds.values():
            feed.replay_ended()
        self._batches = dict.fromkeys(self._feeds, 0)
        self._per_s = tokenize_per_s
        self._allowed = tokenize_per_s
        self._counted_at = 0.0
        self._waiting: deque[tuple[Call, str]] = deque()

    def published(self, target_id: str, batch: bytes) -> None:
        """An engine has published a batch."""
        self._feeds[target_id].live(self._batches[target_id], batch)
        self._batches[target_id] += 1

    def ended(self, call: Call, target_id: str, cached_tokens: int, now: float) -> None:
        """A call is over. Called before its booking is released."""
        self._caches.measured(call.id, len(call.prompt.tokens), cached_tokens)
        is_linked = self._caches.is_linked(call.scope, call.prompt.text)
        if not is_linked and len(self._waiting) < QUEUED:
            self._waiting.append((call, target_id))
        self._allowed = min(self._per_s, self._allowed + (now - self._counted_at) * self._per_s)
        self._counted_at = now
        while self._waiting and self._allowed >= 1.0:
            self._allowed -= 1.0
            self._link(*self._waiting.popleft())

    def _link(self, call: Call, target_id: str) -> None:
        whole = call.prompt.text + b"".join(map(token_bytes, call.answer))
        self._caches.link(call.scope, call.prompt.text, list(call.prompt.tokens))
        self._caches.served(call.scope, whole, target_id)
        self._caches.link(call.scope, whole, [*call.prompt.tokens, *call.answer])
