"""The sweep of timeouts: one timer for all requests, instead of some for each.

At each tick of the agent it compares the time with the earliest deadline of the requests without a first byte, and of those in
the queue; less often it checks running responses, tunnels and uploads. Requests that wait cost nothing until a deadline is over,
and a request that goes well costs no timer at all.
"""

from __future__ import annotations

from lb.core.targets import Booking
from lb.proxy.dispatch import Dispatch

LONGEST_ROUND_S = 1.0  # between two checks of the running responses
_ENTRANCE = "sweep"
_DRAINED = "its target is being drained"


class Sweep:
    """Checks everything that is due by the clock."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._registry = dispatch.registry
        self._table = dispatch.table
        self._round_at = self._kept_at = dispatch.runtime.clock()

    def check(self) -> None:
        """Do what is due now. Called ten times a second."""
        registry = self._registry
        now = self._dispatch.runtime.clock()
        for waiting in registry.overdue(now):
            registry.guard(_ENTRANCE, waiting, lambda one: one.out_of_time(now))
        for ticket in registry.queue.expire(now):
            registry.guard(_ENTRANCE, ticket.item, lambda one: one.expired(now))
        if len(registry.queue):
            registry.let_in()  # an ejection may have run out
        self._hand_over(now)
        limits = self._dispatch.limits
        # A stream that flows must be seen to flow before its target falls under suspicion.
        least = min(limits.idle_timeout_s, limits.stall_timeout_s, 1.5 * limits.suspect_after_s)
        keepalive_s = limits.stream_keepalive_s
        if keepalive_s:
            least = min(least, keepalive_s)
            if now - self._kept_at >= keepalive_s / 4:
                self._kept_at = now
                for one in registry.unanswered():
                    registry.guard(_ENTRANCE, one, lambda request: request.keep_alive(now))
        elapsed = now - self._round_at
        if elapsed >= min(LONGEST_ROUND_S, least / 3):
            self._round_at = now
            self._check_running(now, elapsed)

    def _hand_over(self, now: float) -> None:
        registry, table = self._registry, self._table
        due: list[Booking] = table.handovers(now, table.table.continuation.handover_s)
        if not due:
            return
        relays = {relay.booking: relay for relay in registry.relays}
        tunnels = {tunnel.booking: tunnel for tunnel in registry.tunnels}
        for booking in due:
            if booking in tunnels:
                registry.guard(_ENTRANCE, tunnels[booking], lambda one: one.close_tunnel(_DRAINED))
            elif booking in relays:
                registry.guard(_ENTRANCE, relays[booking], lambda one: one.hand_over())

    def _check_running(self, now: float, elapsed: float) -> None:
        registry = self._registry
        for relay in list(registry.relays):
            registry.guard(_ENTRANCE, relay, lambda one: one.check_relay(now, elapsed))
        for tunnel in list(registry.tunnels):
            registry.guard(_ENTRANCE, tunnel, lambda one: one.check_tunnel(now))
        self._dispatch.runtime.buffers.streams = registry.stream_bytes()
        for client in list(self._dispatch.runtime.uploading):
            client.check_upload(now)
        self._dispatch.pools.expire(now)
        self._table.drop_unused_policies(now)
