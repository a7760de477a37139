"""Follows the caches of a table's targets while the table turns that on: subscriptions, links of prompts, figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lb.cache_events.finished import Over
from lb.cache_events.prompt_linker import Post, PromptLinker, Served
from lb.cache_events.subscriber import CacheSubscriber
from lb.core.targets import Booking, TargetTable
from policies.routing.cached_tree import EngineCaches


class CacheFollower:
    """One table's. Needs a running event loop."""

    def __init__(
        self, table: TargetTable, caches: EngineCaches, post: Post, clock: Callable[[], float]
    ) -> None:
        self.caches = caches
        self._table = table
        self._subscriber = CacheSubscriber(caches.index, clock)
        self._linker = PromptLinker(caches, post, clock, table.table.cache_events.tokenize_per_s)
        self.apply()

    def apply(self) -> None:
        """Another table is in force."""
        self._linker.per_second = self._table.table.cache_events.tokenize_per_s
        self._subscriber.apply(self._table.table.targets)

    def tick(self) -> float | None:
        """Apply what has come, and tokenize what waits. Returns in how many seconds it wants to be called again, if soon."""
        self._linker.tick()
        return self._subscriber.tick()

    def ended(self, request: Over, booking: Booking, prompt_tokens: int, body: bytes | None) -> None:
        """A request has its whole response, `body` if that was sent in one piece. Called before its booking is released."""
        arrival = request.arrival
        self._linker.ended(
            Served(
                arrival.view,
                arrival.head,
                arrival.model,
                request.body,
                booking.target,
                prompt_tokens,
                request.relay,
                body,
            )
        )

    def figures(self) -> Mapping[str, float]:
        """Return what an operator may want to watch, by name as in `CACHE_GAUGES` and `CACHE_COUNTERS` of `lb.observe.families`."""
        caches, linker, feeds = self.caches, self._linker, list(self._subscriber.feeds())
        by_events, by_forwards = caches.by_events, caches.by_forwards
        refused = len(self._subscriber.refused())
        return {
            "cache_followed_targets": sum(1 for one in feeds if not one.cache.refused),
            "cache_complete_targets": sum(1 for one in feeds if one.cache.complete),
            "cache_refused_targets": refused + sum(1 for one in feeds if one.cache.refused),
            "cache_blocks": len(caches.index),
            "cache_links": sum(map(len, caches.trees)),
            "cache_measured_requests": by_events.requests,
            "cache_measured_prompt_tokens": by_events.prompt,
            "cache_hit_tokens": by_events.cached,
            "cache_predicted_tokens_by_events": by_events.predicted,
            "cache_predicted_tokens_by_forwards": by_forwards.predicted,
            "cache_error_by_events": by_events.errors,
            "cache_error_by_forwards": by_forwards.errors,
            "cache_block_events": self._subscriber.counted("blocks"),
            "cache_event_gaps": self._subscriber.counted("gaps"),
            "cache_engine_restarts": self._subscriber.counted("restarts"),
            "cache_unreadable_batches": self._subscriber.counted("errors"),
            "cache_tokenized_prompts": linker.linked,
            "cache_prompts_not_tokenized": linker.failed + linker.left_out,
        }

    def close(self) -> None:
        """Follow none any longer."""
        self._linker.close()
        self._subscriber.close()
