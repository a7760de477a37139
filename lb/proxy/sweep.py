"""The sweep of timeouts: one timer for all requests, instead of some for each.

At each tick of the agent it compares the time with the earliest deadline of the requests without a first byte, and of those in
the queue; less often it checks running responses and tunnels. Requests that wait cost nothing until a deadline is over,
and a request that goes well costs no timer at all.
Each request is checked behind the fault barrier: a defect that one of them meets ends that one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from lb.core.failures import Failure
from lb.core.queue import Ticket
from lb.core.targets import Booking, Outlook
from lb.proxy.context import Proxy
from lb.proxy.request import ProxiedRequest

RECONSIDERED = 8  # queued requests that are compared with other regions at each of their reports
LONGEST_ROUND_S = 1.0  # between two checks of the running responses


class Sweep:
    """Checks everything that is due by the clock."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._round_at = proxy.clock()

    def check(self) -> None:
        """Do what is due now. Called ten times a second."""
        proxy = self._proxy
        now = proxy.clock()
        if now >= proxy.waiting_until:
            self._check_waiting(now)
        expired = proxy.queue.expire(now)
        if expired:
            self._end_expired(expired, now)
        if len(proxy.queue):
            proxy.let_in()  # an ejection may have run out
        self._hand_over(now)
        limits = proxy.limits
        # A stream that flows must be seen to flow before its target falls under suspicion.
        least = min(limits.idle_timeout_s, limits.stall_timeout_s, 1.5 * limits.suspect_after_s)
        elapsed = now - self._round_at
        if elapsed >= min(LONGEST_ROUND_S, least / 3):
            self._round_at = now
            self._check_running(now, elapsed)

    def _end_expired(self, expired: list[Ticket[ProxiedRequest]], now: float) -> None:
        for ticket in expired:
            self._guard(ticket.item, lambda one: one.expired(now))

    def _check_running(self, now: float, elapsed: float) -> None:
        proxy = self._proxy
        for request in list(proxy.relays):
            self._guard(request, lambda one: self._check_relay(one, now, elapsed))
        for request in list(proxy.tunnels):
            self._guard(request, lambda one: self._check_tunnel(one, now))
        proxy.pools.expire(now)
        proxy.table.drop_unused_policies(now)

    def _guard(self, request: ProxiedRequest, act: Callable[[ProxiedRequest], None]) -> None:
        try:
            act(request)
        except Exception as error:  # noqa: BLE001 (the barrier)
            request.crashed("sweep", error)

    def _check_waiting(self, now: float) -> None:
        """End the attempts that have waited too long for a first byte."""
        proxy = self._proxy
        proxy.waiting_until = float("inf")
        for request in list(proxy.waiting):
            until = request.waits_until()
            if now >= until:
                self._guard(request, lambda one: one.out_of_time(now))
            else:
                proxy.waiting_until = min(proxy.waiting_until, until)

    def _hand_over(self, now: float) -> None:
        proxy = self._proxy
        due: list[Booking] = proxy.table.handovers(now, proxy.table.table.continuation.handover_s)
        if not due:
            return
        owners = {request.booking: request for request in (*proxy.relays, *proxy.tunnels)}
        for booking in due:
            owner = owners.get(booking)
            if owner is None:
                continue
            if owner.tunnel is not None:
                self._guard(owner, lambda one: one.close_tunnel("its target is being drained"))
            else:
                self._guard(owner, _hand_over)

    def _check_relay(self, request: ProxiedRequest, now: float, elapsed: float) -> None:
        proxy = self._proxy
        limits = proxy.limits
        relay, booking = request.relay, request.booking
        if relay is None or booking is None:
            return
        if relay.pulse():
            relay.silent_s = 0.0
            proxy.table_of(booking).received_from(booking.key, now)
            return
        relay.silent_s += elapsed
        if relay.blocked:
            if relay.silent_s > limits.idle_timeout_s:
                request.client.transport.abort()  # it has stopped reading
        elif relay.silent_s > limits.idle_timeout_s:
            request.broke(Failure.IDLE, "no byte within the idle timeout")
        elif relay.silent_s > limits.stall_timeout_s and relay.may_continue():
            request.broke(Failure.STALLED, "no event within the stall timeout")
        elif (
            relay.silent_s > limits.suspect_after_s
            and proxy.table_of(booking).missing(booking, now)
            and relay.may_continue(now_or_later=True)
        ):
            request.broke(Failure.SILENT, "no byte, and a failed probe of its target")

    def _check_tunnel(self, request: ProxiedRequest, now: float) -> None:
        tunnel, booking = request.tunnel, request.booking
        if tunnel is None or booking is None:
            return
        if tunnel.idle_s(now) > self._proxy.limits.idle_timeout_s:
            request.close_tunnel("nothing passed within the idle timeout")


def _hand_over(request: ProxiedRequest) -> None:
    request.hand_over()


def reconsider(proxy: Proxy, most: int = RECONSIDERED) -> None:
    """A peer has reported: compare the first of the queued requests with the other regions again."""
    now = proxy.clock()
    for ticket in list(islice(proxy.queue.walk(), most)):
        request = ticket.item
        try:
            request.leaves(now)
        except Exception as error:  # noqa: BLE001 (the barrier)
            request.crashed("regions", error)


def move_waiting(proxy: Proxy) -> None:
    """The table has changed: call back attempts that wait in vain, and close tunnels whose target is gone."""
    now = proxy.clock()
    retries = proxy.table.table.retries
    for request in list(proxy.waiting):
        booking = request.booking
        if booking is None:
            continue
        try:
            outlook = proxy.table_of(booking).outlook(booking, now)
            if outlook is Outlook.LOST:
                request.call_back("its target is gone")
            elif outlook is Outlook.DOUBTFUL:
                health, _ = proxy.table.candidates(now, request.tried)
                # A server that does one request at a time looks frozen while it works on this very one: without
                # a bound, the request would be started again and again and keep all of them busy.
                if health.is_good and request.tries.executions < retries.max_total_retries:
                    request.tries.executions += 1
                    request.call_back("its target is in doubt and another is healthy")
        except Exception as error:  # noqa: BLE001 (the barrier)
            request.crashed("changed", error)
    for request in list(proxy.tunnels):
        booking = request.booking
        if booking is None or not booking.entry.departed:
            continue
        try:
            request.close_tunnel("its target is gone")
        except Exception as error:  # noqa: BLE001 (the barrier)
            request.crashed("changed", error)
