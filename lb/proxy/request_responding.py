"""The response of a proxied request on its way: its first byte, its relay or tunnel, and what breaks it. See `request`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lb.core.failures import BLAME, Failure
from lb.core.residency import may_have
from lb.core.targets import Booking
from lb.engines.kinds import EngineKind, kind_named
from lb.http.messages import ResponseHead
from lb.http.upstream import TargetConnection
from lb.proxy.ending import Outcome
from lb.proxy.fast_path import FastPath
from lb.proxy.ports import Relay, Responding
from lb.proxy.relay import PlainRelay
from lb.proxy.request_core import RequestCore
from lb.proxy.resumable_relay import ResumableRelay, is_resumable
from lb.proxy.states import RequestEvent, State, move
from lb.proxy.tunnel import Tunnel
from lb.stream.resume_rules import Reason

_DONE = State.DONE

_log = logging.getLogger("lb.proxy.request")


class RespondingRequest(RequestCore):
    """A request, as its relay and its tunnel use it."""

    __slots__ = ()

    @property
    def connection(self) -> TargetConnection | None:
        return self.attempt.connection if self.attempt is not None else None

    @property
    def fast_path(self) -> FastPath | None:
        return self.proxy.fast_path

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.proxy.loop.call_soon(self._guarded, callback)

    def _guarded(self, callback: Callable[[], None]) -> None:
        if self.state is _DONE:
            return
        try:
            callback()
        except Exception as error:  # noqa: BLE001 (the barrier)
            self.crashed("soon", error)

    def kinds_elsewhere(self, *, now_or_later: bool) -> set[EngineKind]:
        booking, proxy = self.booking, self.proxy
        if booking is None:
            return set()
        now = proxy.clock()
        if now_or_later:
            zones = self.arrival.zones
            well = (
                target.id
                for target, health, _ in proxy.table.rows(now)
                if health.is_good and may_have(target.zones, zones)
            )
            models, model = proxy.table.models, self.arrival.model
            others = {one for one in well if one != booking.key.id and models.serves(one, model) is not False}
        else:
            others = {view.id for view in proxy.table.candidates(now, self.tried)[1]}
        kinds = {proxy.kind_of_id(one) for one in others}
        if proxy.forwarding is not None and self.arrival.hop is None:
            kinds |= set(map(kind_named, proxy.forwarding.engines(now, self.arrival.zones, {booking.epoch})))
        return kinds

    def not_resumed(self, reason: Reason) -> None:
        self.proxy.metrics.counts.continue_refused[reason.value] += 1

    # --- relaying

    def _first_byte(self, status: int) -> float:
        """The target has responded. Returns now."""
        proxy, booking = self.proxy, self.booking
        assert booking is not None  # noqa: S101 (for the type checker)
        now = proxy.clock()
        proxy.waiting.pop(self, None)
        self.tries.executions += 1
        self.tries.deaths = 0
        proxy.counts_of(booking).ttfb.observe(now - self.arrival.at)
        self.arrival.explanation.note(now, "answered", booking.key.id)
        if self.hop_lines:
            self.peer_responded(booking)
        if proxy.table_of(booking).responded(booking, now, 200 <= status < 300):
            _log.info("readmit target=%s why=%r", booking.key.id, "it responded again")
            proxy.changed_soon()
        elif len(proxy.queue):
            proxy.let_in_soon()  # a first byte shows that its engine had room
        return now

    def peer_responded(self, booking: Booking) -> None:
        """A peer has started to respond."""
        raise NotImplementedError

    def begin_relay(self, attempt: Responding) -> Relay:
        now = self._first_byte(attempt.response.status)
        self.state = move(self.state, RequestEvent.FIRST_BYTE)
        proxy, relay = self.proxy, self.relay
        if self.ending.first_at is None:
            self.ending.first_at = now
            if self.arrival.hop is None:  # else the agent where it entered counts it
                proxy.metrics.counts.ttft.observe(now - self.arrival.at)
        if relay is None:
            self.refusal = None
            if (
                self.resume_state is not None
                and attempt.response_length is None
                and is_resumable(attempt.response)
            ):
                relay = ResumableRelay(self, self.resume_state, attempt.response, attempt.decoder)
            else:
                self.resume_state = None
                relay = PlainRelay(self, attempt.response, attempt.decoder, attempt.response_length)
            self.relay = relay
        elif isinstance(relay, ResumableRelay):
            relay.next_leg(attempt.decoder)
            if relay.blocked:
                attempt.pause()  # for a client that is still not reading
            proxy.metrics.counts.continued += 1
            self.ending.continued += 1
        if self.resume_state is None and not self.client.body_left:
            self.proxy.forget_body(self)  # a request with a response is not sent again
        proxy.relays[self] = None
        return relay

    def relayed(self, rest: bool, reusable: bool = True) -> None:
        relay, booking, first_at = self.relay, self.booking, self.ending.first_at
        if relay is not None and booking is not None and first_at is not None:
            tokens = relay.generated()
            if tokens > 1:
                spacing_s = (self.proxy.clock() - first_at) / (tokens - 1)
                self.proxy.counts_of(booking).inter_token.observe(spacing_s)
        if self.attempt is not None:
            self.attempt.give_back(reusable=reusable and not rest)
        self.end(Outcome.WHOLE)

    def broke(self, failure: Failure, why: str) -> None:
        proxy, attempt, relay = self.proxy, self.attempt, self.relay
        assert attempt is not None and relay is not None  # noqa: S101, PT018 (for the type checker)
        now = proxy.clock()
        booking = attempt.booking
        self.state = move(self.state, RequestEvent.BROKEN)
        self.arrival.explanation.note(now, "broke", booking.key.id, why)
        attempt.drop()
        self.tries.failed = True
        self.tries.by_epoch = {booking.epoch: 1}
        self._blame(booking, failure, why, now)
        if failure is Failure.STALLED:
            proxy.metrics.counts.stalled += 1
        self._drop_attempt(now)
        self._resume(relay, why)

    def _blame(self, booking: Booking, failure: Failure, why: str, now: float) -> None:
        proxy = self.proxy
        counts = proxy.counts_of(booking)
        counts.failures[failure.value] += 1
        if proxy.table_of(booking).failed(booking, BLAME[failure], now):
            counts.ejections += 1
            _log.warning("eject target=%s why=%r", booking.key.id, f"{failure.value}: {why}")
            proxy.changed_soon()

    def hand_over(self) -> bool:
        """Its target will be taken away soon: go on elsewhere if that is possible. Returns False if it is not."""
        relay, attempt = self.relay, self.attempt
        if self.state is not State.STREAMING or relay is None or attempt is None or not relay.may_continue():
            return False
        now = self.proxy.clock()
        booking = attempt.booking
        self.state = move(self.state, RequestEvent.BROKEN)
        self.tries.by_epoch = {booking.epoch: 1}
        self.arrival.explanation.note(now, "handed_over", booking.key.id)
        self._drop_attempt(now)
        self.proxy.metrics.counts.handed_over += 1
        self._resume(relay, "its target is being drained")
        return True

    def _resume(self, relay: Relay, why: str) -> None:
        """Go on with a stream on another target, or end it as an error."""
        if relay.resume(why):
            limits = self.proxy.limits
            # A client that has half of a response waits for the rest as long as for an engine that is silent.
            queue_left_s = max(limits.hold_s, limits.idle_timeout_s) if limits.hold_s else 0.0
            self.tries.resume(limits.time_to_first_byte_s, queue_left_s)
            self.place()

    def ended_early(self) -> None:
        self.end(Outcome.WHOLE)

    def ended_in_error(self, code: str) -> None:
        self.ending.error = code
        self.end(Outcome.ERROR_EVENT)

    def client_full(self) -> None:
        if self.attempt is not None:
            self.attempt.pause()
        if self.relay is not None:
            self.relay.blocked = True

    def client_drained(self) -> None:
        if self.relay is not None:
            self.relay.blocked = False
        if self.attempt is not None:
            self.attempt.resume()

    # --- tunnels

    def open_tunnel(self, response: ResponseHead, rest: bytes) -> None:
        """A WebSocket: from here on bytes pass both ways as they come."""
        self.ending.first_at = self._first_byte(response.status)
        self.state = move(self.state, RequestEvent.UPGRADED)
        connection = self.connection
        assert connection is not None  # noqa: S101 (for the type checker)
        head = self.response_head(response, b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
        ahead = self.client.tunnel()
        self.client.transport.write(head)
        self.status = 101
        self.tunnel = Tunnel(self.client.transport, connection.transport, self.proxy.clock())
        self.proxy.tunnels[self] = None
        if rest:
            self.tunnel_data(rest)
        if ahead:
            self.client_data(ahead)

    def client_data(self, data: bytes) -> None:
        if self.tunnel is not None:
            self.tunnel.from_client(data)

    def tunnel_data(self, data: bytes) -> None:
        if self.tunnel is not None:
            self.tunnel.from_target(data)

    def target_closed_tunnel(self) -> None:
        self.end(Outcome.TUNNEL_CLOSED)

    def close_tunnel(self, why: str) -> None:
        """Close both ends with a close frame of code 1001 (going away)."""
        if self.tunnel is not None:
            self.tunnel.send_close_frames()
        self.arrival.explanation.note(self.proxy.clock(), "closed", why=why)
        self.ending.error = why
        self.end(Outcome.TUNNEL_CLOSED)

    def websocket_refused(self) -> None:
        self._respond(502, "websocket_refused", "The target has not opened the WebSocket.")
