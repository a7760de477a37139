"""The fields of a proxied request, its end, and the responses that the load balancer writes itself. See `request`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lb.core.failures import RETRY_STATUSES
from lb.core.queue import Ticket
from lb.core.retry import Tries
from lb.core.targets import Booking
from lb.http import error_responses
from lb.http.messages import ResponseHead, response_bytes
from lb.proxy.attempt import JOIN_BELOW_BYTES, Attempt
from lb.proxy.ending import Arrival, Ending, Outcome
from lb.proxy.ports import AttemptServices, Downstream, Relay
from lb.proxy.services import Services
from lb.proxy.states import RequestEvent, State, move
from lb.proxy.tunnel import Tunnel
from lb.stream.resume_state import ResumeState
from policies.routing.base import RequestView

RETRY_AFTER_S = 5

_DONE = State.DONE


class RequestCore:
    """A request and what has become of it. `ending` collects the report for its end."""

    __slots__ = (
        "arrival",
        "attempt",
        "body",
        "buffered",
        "client",
        "continues",
        "ending",
        "head",
        "hop_lines",
        "policy",
        "proxy",
        "refusal",
        "relay",
        "request_id",
        "resume_state",
        "span",
        "state",
        "status",
        "tenant",
        "ticket",
        "tries",
        "tunnel",
        "view",
        "weight",
    )

    def __init__(
        self, proxy: Services, client: Downstream, body: bytes, arrival: Arrival, tries: Tries
    ) -> None:
        self.proxy = proxy
        self.client = client
        self.body = body
        self.buffered = 0  # bytes taken from the agent's budget
        self.arrival = arrival
        self.head = arrival.head
        self.hop_lines = b""  # header lines for a peer, while it is forwarded to one
        self.request_id = arrival.request_id
        self.view: RequestView = arrival.view
        self.tenant = arrival.admission.tenant
        self.weight = arrival.admission.weight
        self.policy = arrival.policy
        self.span = arrival.span
        self.continues = arrival.continues
        self.tries = tries
        self.ending = Ending()
        self.state = State.CHOOSING
        self.status = 0  # what the client was sent
        self.ticket: Ticket[Any] | None = None
        self.attempt: Attempt | None = None
        self.relay: Relay | None = None
        self.tunnel: Tunnel | None = None
        self.resume_state: ResumeState | None = arrival.resume_state  # of a stream that could be resumed
        self.refusal: tuple[ResponseHead, bytes] | None = None  # the last 502, 503 or 504 of a target

    @property
    def booking(self) -> Booking | None:
        """Of the present attempt."""
        return self.attempt.booking if self.attempt is not None else None

    @property
    def tried(self) -> Collection[int]:
        """The epochs of targets (see `lb.core.target_state`) that have had the request, or may not have it."""
        by_epoch, table, zones = self.tries.by_epoch, self.proxy.table, self.arrival.zones
        barred = table.models.barred(self.arrival.model)
        if zones:
            barred = barred | table.residency.barred(zones)
        return barred.union(by_epoch) if barred else by_epoch

    @property
    def has_priority(self) -> bool:
        """True if it was queued before, or was with a target that may have started to run it."""
        tries = self.tries
        return tries.was_queued or tries.executions > 0 or self.relay is not None

    @property
    def queue_left_s(self) -> float:
        return self.tries.queue_left_s

    @property
    def attempts(self) -> int:
        return self.tries.attempts

    @property
    def executions(self) -> int:
        return self.tries.executions

    @property
    def services(self) -> AttemptServices:
        return self.proxy

    def place(self) -> None:
        """Go to a target, or wait for one."""
        raise NotImplementedError

    # --- what the client is sent

    def response_head(self, response: ResponseHead, framing: bytes) -> bytes:
        arrival = self.arrival
        if arrival.set_cookie:
            framing = arrival.set_cookie + framing
        request_id = self.request_id if arrival.hop is None else b""
        return response_bytes(response, request_id, framing, arrival.cors)

    def connection_line(self) -> bytes:
        client = self.client
        if client.closing or client.body_left or self.proxy.closing:
            client.closing = True  # also if the rest of the body comes before the response ends
            return b"Connection: close\r\n"
        return b"Connection: keep-alive\r\n" if self.head.http_1_0 else b""

    def _send_whole(self, response: ResponseHead, body: bytes) -> None:
        if response.status == 204:
            framing = b""
        elif response.status == 304 or self.head.method == b"HEAD":
            length = self.attempt.response_length if self.attempt is not None else None
            framing = b"Content-Length: %d\r\n" % length if length is not None else b""
        else:
            framing = b"Content-Length: %d\r\n" % len(body)
        head = self.response_head(response, framing + self.connection_line())
        if len(body) < JOIN_BELOW_BYTES:
            self.client.send_soon(head + body)
        else:
            self.client.transport.writelines((head, body))
        self.status = response.status
        self.ending.bytes_out = len(body)
        self.end(Outcome.WHOLE, body)

    def _respond(self, status: int, code: str, message: str) -> None:
        """End with an error of our own: as a response, or as an error event where a response has started."""
        now = self.proxy.clock()
        self.arrival.explanation.note(now, "answered_here", why=code)
        self.ending.error = code
        if self.relay is not None:
            self.relay.fail(code, message)
            return
        self.status = status
        client = self.client
        if self.head.http_1_0 or client.body_left or self.proxy.closing:
            client.closing = True
        client.transport.write(
            error_responses.raw_error(
                status,
                code,
                message,
                request_id=self.request_id,
                retry_after_s=RETRY_AFTER_S if status in RETRY_STATUSES or status == 429 else None,
                close=client.closing,
                head_only=self.head.method == b"HEAD",
                more_lines=self.arrival.cors or b"",
            )
        )
        self.end(Outcome.REFUSED)

    # --- the end

    def cut(self, why: str) -> None:
        self.ending.error = why
        self.end(Outcome.CUT)

    def end(self, outcome: Outcome, body: bytes | None = None) -> None:
        """The client has all it will get. `body` is that of a response that was sent whole.

        Called exactly once: the automaton has no event after it. It leaves the queue, releases the target, informs policy and
        tenant what was used, counts, and goes on with the client's next request.
        """
        self.state = move(self.state, RequestEvent.ENDED)
        proxy = self.proxy
        now = proxy.clock()
        if self.arrival.hop is None:
            proxy.ongoing.step(now, -1)
        if self.ticket is not None:
            proxy.queue.leave(self.ticket)
            self._left_queue(now)
        attempt, relay = self.attempt, self.relay
        if attempt is not None:
            attempt.finish(gracefully=outcome is Outcome.TUNNEL_CLOSED)
        spent = proxy.endings.spent(self, body)
        if relay is not None:
            self.ending.bytes_out = relay.sent_bytes
        if attempt is not None and (spent.reported or spent.out):
            proxy.endings.charged_to_target(attempt.booking, spent)
        self._drop_attempt(now, spent.out or None if outcome is Outcome.WHOLE else None)
        proxy.tunnels.pop(self, None)
        proxy.forget_body(self)
        proxy.endings.ended(self, outcome, spent, now)
        # The two hold each other, and a transcript can be megabytes: cycles wait for long until they are collected.
        self.relay = None
        if outcome is Outcome.CUT:
            # HTTP/1.0 ends a body by closing: only a reset distinguishes failure from success.
            self.client.hang_up(abort=self.head.http_1_0)
        elif outcome is Outcome.TUNNEL_CLOSED:
            self.client.hang_up()
        elif outcome is not Outcome.CLIENT_GONE:
            self.client.next()

    def _drop_attempt(self, now: float, tokens: int | None = None) -> None:
        """End the attempt, if there is one, and release its booking."""
        self.proxy.waiting.pop(self, None)
        self.proxy.relays.pop(self, None)
        attempt = self.attempt
        if attempt is not None:
            attempt.finish()
            self.proxy.release(attempt.booking, now, tokens)
            self.attempt = None
            if self.hop_lines:
                self.left_peer(attempt.booking)

    def left_peer(self, booking: Booking) -> None:
        """A booking has been released: if it was on a peer, another request may have its credit."""
        raise NotImplementedError

    def _left_queue(self, now: float) -> None:
        ticket, self.ticket = self.ticket, None
        if ticket is None:
            return
        waited = now - ticket.joined_at
        self.ending.queued_s += waited
        self.tries.queue_left_s = max(0.0, self.tries.queue_left_s - waited)
        self.proxy.metrics.counts.queue_wait.observe(waited)

    def waits_until(self) -> float:
        """Return when the attempt under way has waited too long for its first byte."""
        booking = self.booking
        return float("inf") if booking is None else booking.since + self.tries.wait_left_s

    def halt(self) -> None:
        if self.relay is not None:
            self.relay.halt()

    def crashed(self, entrance: str, error: Exception) -> None:
        self.proxy.faults.report(entrance, error)
        try:
            if self.state is _DONE:
                self._abandon()  # nothing is sure about its connection any longer
            elif self.status == 0 and self.relay is None:
                self.client.closing = True
                self._respond(500, "internal_error", "The load balancer failed on this request.")
            elif self.relay is not None:
                self.relay.fail("internal_error", "The load balancer failed on this request.")
            else:
                self.cut("internal_error")
        except Exception as second:  # noqa: BLE001 (the barrier)
            self.proxy.faults.report(entrance, second)
            self._abandon()

    def _abandon(self) -> None:
        """End without anything that might fail again."""
        now = self.proxy.clock()
        if self.state is not _DONE:
            self.state = _DONE
            if self.arrival.hop is None:
                self.proxy.ongoing.step(now, -1)
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            self.proxy.queue.leave(ticket)
        for registry in (self.proxy.waiting, self.proxy.relays, self.proxy.tunnels):
            registry.pop(self, None)
        attempt, self.attempt = self.attempt, None
        try:
            if attempt is not None:
                if not attempt.booking.released:
                    self.proxy.table_of(attempt.booking).release(attempt.booking, now)
                    self.left_peer(attempt.booking)
                attempt.drop()
            self.proxy.endings.settled(self, now)
            self.proxy.forget_body(self)
        except Exception as error:  # noqa: BLE001 (the barrier)
            self.proxy.faults.report("abandon", error)
        self.client.hang_up(abort=True)
