"""The life of a request: be placed, be sent to targets until one answers, be relayed to its end.

Before the first byte a request is ours: whatever happens to a target, it goes to another, never to one that has
failed it. It is called back at once when the table says its target is lost, or when the target falls silent
(`lb.engines.health_checks`) and a better one exists. With no target that may take it, it is held, and counted as demand. After the first
byte it belongs to the target that began to answer; if that one dies, a stream of a model is continued on another
(`lb.proxy.relay`, `lb.stream.resume_request`), anything else is cut so that the client sees an error and not a short success.

An answer *begins* with the first byte of its body, not with its head: engines send the head at once and think
afterwards. An answer that is small, or JSON and not a stream, is read whole before any of it is sent, so a unary
answer is never cut.

No tasks and no futures: an exchange is called by its two connections, by the patrol of `lb.proxy.context` and by the
queue, and each call leaves it in a state of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from lb.core.failures import BLAME, RETRY_STATUSES, Failure
from lb.core.retry import RetryHistory
from lb.core.targets import Booking, Health
from lb.engines.kinds import EngineKind
from lb.http import error_responses
from lb.http.messages import RequestHead, ResponseHead, response_bytes
from lb.http.upstream import TargetConnection
from lb.proxy.attempt import JOIN_BELOW_BYTES, RELAY, TUNNEL, Attempt
from lb.proxy.fast_path import FastPath
from lb.proxy.relay import PlainRelay, Relay
from lb.proxy.resumable_relay import BY_ENGINE, ResumableRelay, ResumeState, is_resumable
from lb.stream.openai_request import ParsedRequest
from lb.stream.resume_request import NotResumable
from lb.stream.resume_rules import Reason
from policies.routing.base import Choice, RequestView

if TYPE_CHECKING:
    from lb.core.queue import Ticket
    from lb.observe.explain import Explanation
    from lb.proxy.context import Proxy
    from lb.proxy.downstream import ClientConnection

RETRY_AFTER_S = 5

_log = logging.getLogger("lb.proxy.request")


class ProxiedRequest:
    """One request on its way. `tried` are the lives (see `lb.core.targets`) that have had it."""

    __slots__ = (
        "_stale",
        "arrived_at",
        "ask",
        "attempt",
        "attempts",
        "body",
        "bytes_out",
        "client",
        "continued",
        "continues",
        "error",
        "executions",
        "failed",
        "first_at",
        "head",
        "hold_left_s",
        "keeper",
        "last_target",
        "longest_s",
        "over",
        "policy",
        "proxy",
        "queued_s",
        "refusal",
        "relay",
        "replayable",
        "request_id",
        "span",
        "status",
        "story",
        "tenant",
        "ticket",
        "tried",
        "view",
        "wait_left_s",
        "was_held",
        "weight",
    )

    def __init__(
        self,
        proxy: Proxy,
        client: ClientConnection,
        head: RequestHead,
        body: bytes,
        request_id: bytes,
        view: RequestView,
        ask: ParsedRequest,
        story: Explanation,
        now: float,
    ) -> None:
        limits = proxy.limits
        self.proxy = proxy
        self.client = client
        self.head = head
        self.body = body
        self.view = view
        self.ask = ask
        self.story = story
        self.request_id = request_id
        self.arrived_at = now
        self.wait_left_s = limits.time_to_first_byte_s
        self.hold_left_s = limits.hold_s
        self.tenant = ""
        self.weight = 1.0
        self.policy: str | None = None
        self.tried: dict[int, int] = {}  # lives, and how many attempts each has had
        self.longest_s = 0.0  # of the attempts that failed
        self.attempts = 0
        self.executions = 0  # attempts that may have begun to run
        self.continued = 0
        self.failed = False
        self.replayable = True
        self.continues = True  # if it breaks, as far as the client is concerned
        self.last_target = ""
        self.span = ""
        self.error = ""
        self.bytes_out = 0
        self.status = 0  # what the client was sent
        self.first_at: float | None = None
        self.queued_s = 0.0
        self.was_held = False
        self.ticket: Ticket[ProxiedRequest] | None = None
        self.attempt: Attempt | None = None
        self.relay: Relay | None = None
        self.keeper: ResumeState | None = None  # of a stream that could be continued
        self.refusal: tuple[ResponseHead, bytes] | None = None  # the last 502, 503 or 504 of a target
        self.over = False
        self._stale = False  # has a reused connection been stale?

    @property
    def booking(self) -> Booking | None:
        """Of the present attempt."""
        return self.attempt.booking if self.attempt is not None else None

    @property
    def senior(self) -> bool:
        """Whether it has been held before, or with a target that may have begun to run it."""
        return self.was_held or self.executions > 0 or self.relay is not None

    # --- being placed

    def place(self) -> None:
        """Go to a target, or wait for one."""
        proxy = self.proxy
        now = proxy.clock()
        choice = proxy.dispatcher.place(self, now)
        if choice is not None:
            self.launch(choice, now)
        elif self.refusal is not None and not proxy.table.anybody(now, self.tried):
            self._send_refusal()
        else:
            self._hold(now)

    def launch(self, choice: Choice, now: float) -> None:
        """An attempt on the chosen target."""
        self.story.note(now, "chose", choice.target_id, choice.because, choice)
        self._try(choice.target_id, now, fresh=False)
        counts = self.proxy.metrics.counts
        if self.view.prompt is not None:
            counts.prompt_bytes += len(self.view.prompt)
            counts.matched_bytes += choice.matched_bytes

    def _try(self, target_id: str, now: float, fresh: bool) -> None:
        proxy = self.proxy
        booking = proxy.table.book(self.view, target_id, now)
        self.tried[booking.life] = self.tried.get(booking.life, 0) + 1
        self.attempts += 1
        self.last_target = target_id
        if self.attempts > 1:
            proxy.metrics.counts.retries += 1
        proxy.counts_of(booking).attempts += 1
        proxy.waiting[self] = None
        self.attempt = Attempt(self, booking, now)
        self.attempt.start(fresh)

    def _hold(self, now: float) -> None:
        proxy = self.proxy
        if not proxy.holding:
            self._turn_away()
            return
        ticket = proxy.dispatcher.hold(self, now)
        if ticket is None:
            self._turn_away(full=len(proxy.queue) >= proxy.limits.max_held > 0)
            return
        self.ticket = ticket
        self.was_held = True
        proxy.metrics.counts.held_total += 1
        why = "no target can take it" if ticket.lane is None else "best off waiting for this target"
        self.story.note(now, "held", ticket.lane or "", why)

    def admitted(self, choice: Choice, now: float) -> None:
        """The queue has let it go."""
        self._left_queue(now)
        self.launch(choice, now)

    def expired(self, now: float) -> None:
        """It has waited for too long."""
        self._left_queue(now)
        self._turn_away()

    def pushed_out(self, now: float) -> None:
        """The room is full, and another tenant has a better right to the place."""
        self._left_queue(now)
        self._turn_away(full=True)

    def _left_queue(self, now: float) -> None:
        assert self.ticket is not None  # noqa: S101 (for the type checker)
        waited = now - self.ticket.joined_at
        self.ticket = None
        self.queued_s += waited
        self.hold_left_s = max(0.0, self.hold_left_s - waited)
        self.proxy.metrics.counts.queue_wait.observe(waited)

    # --- for the relay

    @property
    def connection(self) -> TargetConnection | None:
        return self.attempt.connection if self.attempt is not None else None

    @property
    def fast_path(self) -> FastPath | None:
        return self.proxy.fast_path

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.proxy.loop.call_soon(callback)

    def kinds_elsewhere(self, *, now_or_later: bool) -> set[EngineKind]:
        booking, proxy = self.booking, self.proxy
        if booking is None:
            return set()
        now = proxy.clock()
        if now_or_later:
            well = (target.id for target, health, _ in proxy.table.rows(now) if health is Health.GOOD)
            others = {one for one in well if one != booking.key.id}
        else:
            others = {view.id for view in proxy.table.candidates(now, self.tried)[1]}
        return {proxy.kind_of_id(one) for one in others}

    def not_resumed(self, reason: Reason) -> None:
        self.proxy.metrics.counts.continue_refused[reason.value] += 1

    # --- the attempt

    def outgoing(self) -> tuple[bytes, bytes] | None:
        """Path and body for the present target; None if it cannot do what is wanted, and the attempt is over."""
        keeper, booking = self.keeper, self.booking
        if keeper is None or booking is None:
            return self.head.target, self.body
        try:
            path, body = keeper.outgoing(self.proxy.kind_of(booking.key))
        except NotResumable as error:
            self._cannot_go_on(error)
            return None
        return path or self.head.target, body

    def _cannot_go_on(self, error: NotResumable) -> None:
        """This target cannot continue the stream; perhaps another can."""
        relay = self.relay
        assert isinstance(relay, ResumableRelay)  # noqa: S101 (for the type checker)
        now = self.proxy.clock()
        self._drop_attempt()
        if self.proxy.table.anybody(now, self.tried) and error.reason in BY_ENGINE:
            self.place()
        else:
            relay.refuse(error)

    def more_body(self, part: bytes, last: bool) -> None:
        """The rest of a body that is passed on as it comes."""
        if self.attempt is not None and self.attempt.more_body(part, last):
            self.replayable = False  # from now on part of it is gone
        else:  # between two attempts; there is no more of this, as reading has stopped
            self.body += part

    def bad_body(self, code: str) -> None:
        """The rest of the body cannot be passed on."""
        status = 413 if code == "body_too_large" else 400
        if self.first_at is None:
            self._drop_attempt()
            self._answer(status, code, "The body of the request cannot be passed on.")
        else:
            self._cut("bad_body")

    # --- the answer

    def answered_whole(self, reply: ResponseHead, body: bytes) -> None:
        """All of it is here."""
        if reply.status in RETRY_STATUSES:  # kept, in case nobody has a better one
            self.refusal = reply, body
            self.proxy.waiting.pop(self, None)
            self.executions += 1
            self._judge(Failure.REFUSED, f"HTTP status {reply.status}", self.proxy.clock())
        else:
            self._send_whole(reply, body, self._first_byte())

    def _send_whole(self, answer: ResponseHead, body: bytes, now: float) -> None:
        if answer.status == 204:
            framing = b""
        elif answer.status == 304 or self.head.method == b"HEAD":
            length = self.attempt.reply_length if self.attempt is not None else None
            framing = b"Content-Length: %d\r\n" % length if length is not None else b""
        else:
            framing = b"Content-Length: %d\r\n" % len(body)
        head = response_bytes(answer, self.request_id, framing + self.connection_line())
        if len(body) < JOIN_BELOW_BYTES:
            self.client.send_soon(head + body)
        else:
            self.client.transport.writelines((head, body))
        self.status = answer.status
        self.bytes_out = len(body)
        self._settle(now, body)

    def connection_line(self) -> bytes:
        client = self.client
        if client.closing or client.body_left or self.proxy.closing:
            client.closing = True  # also if the rest of the body comes before the answer ends
            return b"Connection: close\r\n"
        return b"Connection: keep-alive\r\n" if self.head.http_1_0 else b""

    def _first_byte(self) -> float:
        """The target has answered."""
        proxy, booking = self.proxy, self.booking
        assert booking is not None  # noqa: S101 (for the type checker)
        now = proxy.clock()
        proxy.waiting.pop(self, None)
        self.executions += 1
        proxy.counts_of(booking).ttfb.observe(now - self.arrived_at)
        self.story.note(now, "answered", booking.key.id)
        if proxy.table.answered(booking, now):
            _log.info("readmit target=%s why=%r", booking.key.id, "it answered again")
            proxy.changed_soon()
        elif len(proxy.queue):
            proxy.let_in_soon()  # a first byte shows that its engine had room
        return now

    # --- relaying

    def begin_relay(self, attempt: Attempt) -> Relay:
        """The first byte of an answer that is passed on as it comes."""
        now = self._first_byte()
        if self.first_at is None:
            self.first_at = now
            self.proxy.metrics.counts.ttft.observe(now - self.arrived_at)
        relay = self.relay
        if relay is None:
            self.refusal = None
            if self.keeper is not None and attempt.reply_length is None and is_resumable(attempt.reply):
                relay = ResumableRelay(self, self.keeper, attempt.reply, attempt.walker)
            else:
                self.keeper = None
                relay = PlainRelay(self, attempt.reply, attempt.walker, attempt.reply_length)
            self.relay = relay
        elif isinstance(relay, ResumableRelay):
            relay.next_leg(attempt.walker)
            if relay.blocked:
                attempt.pause()  # for a client that is still not reading
            self.proxy.metrics.counts.continued += 1
            self.continued += 1
        self.proxy.relays[self] = None
        return relay

    def halt(self) -> None:
        """One of the two connections is about to be closed."""
        if self.relay is not None:
            self.relay.halt()

    def relayed(self, rest: bool, reusable: bool = True) -> None:
        """The relay has passed the whole answer; `rest` if the connection had more to say than that."""
        self.proxy.relays.pop(self, None)
        now = self.proxy.clock()
        relay, booking = self.relay, self.booking
        if relay is not None and booking is not None and relay.chunks > 1 and self.first_at is not None:
            spacing_s = (now - self.first_at) / (relay.chunks - 1)
            self.proxy.counts_of(booking).inter_token.observe(spacing_s)
        if self.attempt is not None:
            self.attempt.give_back(reusable=reusable and not rest)
        self._settle(now, None)

    def broke(self, failure: Failure, why: str) -> None:
        """The answer broke off after its first byte."""
        proxy, booking, relay = self.proxy, self.booking, self.relay
        assert booking is not None  # noqa: S101 (for the type checker)
        assert relay is not None  # noqa: S101 (for the type checker)
        proxy.relays.pop(self, None)
        now = proxy.clock()
        self._leave()
        self.failed = True
        self.tried = {booking.life: 1}
        self.story.note(now, "cut", booking.key.id, why)
        self._blame(booking, failure, why, now)
        proxy.release(self, booking, now)
        if failure is Failure.STALLED:
            proxy.metrics.counts.stalled += 1
        self._continue(relay, why)

    def ended_early(self) -> None:
        """The target was lost, but nothing was missing that could not be said without it."""
        self._settle(self.proxy.clock(), None)

    def ended_in_error(self, code: str) -> None:
        """The client has been told in the stream itself."""
        self.proxy.metrics.counts.cut += 1
        self.error = code
        if self.booking is not None:
            self._drop_attempt()
        self._settle(self.proxy.clock(), None)

    def hand_over(self) -> bool:
        """Its target will be taken away soon: go on elsewhere if that is possible; False if it is not."""
        relay, booking = self.relay, self.booking
        relaying = self.attempt is not None and self.attempt.phase == RELAY
        if not relaying or relay is None or booking is None or not relay.may_continue():
            return False
        now = self.proxy.clock()
        self.proxy.relays.pop(self, None)
        self._leave()
        self.tried = {booking.life: 1}
        self.story.note(now, "handed_over", booking.key.id)
        self.proxy.release(self, booking, now)
        self.proxy.metrics.counts.handed_over += 1
        self._continue(relay, "its target is being drained")
        return True

    def _continue(self, relay: Relay, why: str) -> None:
        """Go on with a stream on another target, or end it as an error."""
        if relay.resume(why):
            self.executions = 0
            self.longest_s = 0.0
            limits = self.proxy.limits
            self.wait_left_s = limits.time_to_first_byte_s
            # Whoever has half of an answer waits for the rest as long as for an engine that is silent.
            self.hold_left_s = max(limits.hold_s, limits.idle_timeout_s) if limits.hold_s else 0.0
            self.place()

    def cut(self, why: str) -> None:
        """Nothing more can be sent: what was sent stays sent, and the client sees an error."""
        self._cut(why)

    def _cut(self, why: str) -> None:
        self.proxy.metrics.counts.cut += 1
        self.error = why
        if self.booking is not None:
            self._drop_attempt()
        self.over = True
        self.proxy.finished(self, self.proxy.clock(), None)
        # HTTP/1.0 ends a body by closing: only a reset tells failure from success.
        self.client.hang_up(abort=self.head.http_1_0)

    # --- tunnels

    def open_tunnel(self, reply: ResponseHead, rest: bytes) -> None:
        """A WebSocket: from here on bytes pass both ways as they come."""
        self.first_at = self._first_byte()
        head = response_bytes(reply, self.request_id, b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
        ahead = self.client.tunnel()
        self.client.transport.write(head + rest)
        self.status = 101
        if ahead:
            self.client_data(ahead)

    def client_data(self, data: bytes) -> None:
        """Through the tunnel."""
        if self.attempt is not None and self.attempt.connection is not None:
            self.attempt.connection.transport.write(data)

    def websocket_refused(self) -> None:
        self._drop_attempt()
        self._answer(502, "websocket_refused", "The target has not opened the WebSocket.")

    def close_tunnel(self) -> None:
        """The target has closed its end."""
        self._end_tunnel()
        self.client.hang_up()

    def _end_tunnel(self) -> None:
        now = self.proxy.clock()
        self.over = True
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.close()
            self.proxy.release(self, attempt.booking, now)
        self.proxy.finished(self, now, None)

    # --- failing

    def attempt_failed(self, failure: Failure, why: str) -> None:
        """Before the first byte."""
        now = self.proxy.clock()
        if self.attempt is not None:
            self.attempt.drop()
        self.proxy.waiting.pop(self, None)
        if failure is not Failure.UNREACHABLE:
            self.executions += 1
        self._judge(failure, why, now)

    def _judge(self, failure: Failure, why: str, now: float) -> None:
        """Blame whom it concerns, and try again if that is allowed."""
        proxy, attempt = self.proxy, self.attempt
        assert attempt is not None  # noqa: S101 (for the type checker)
        booking = attempt.booking
        self.failed = True
        self.attempt = None
        ran_s = now - attempt.since
        self.wait_left_s -= ran_s
        self.story.note(now, "failed", booking.key.id, why)
        self._blame(booking, failure, why, now)
        proxy.release(self, booking, now)
        if failure is Failure.STALE and not self._stale and self.replayable:
            # Once, on a connection of its own; if the target is dead, that shows at once. Not once for each target: it
            # cannot be known that a request which was sent has not begun to run.
            self._stale = True
            self.executions -= 1
            if proxy.table.standing(booking.key, now) is not Health.CLOSED:
                self.story.note(now, "chose", booking.key.id, "again, on a new connection")
                self._try(booking.key.id, now, fresh=True)
                return
        self.longest_s = max(self.longest_s, ran_s)
        tried = self.tried.get(booking.life, 0)
        told = RetryHistory(
            self.executions,
            tried,
            failure is not Failure.UNREACHABLE,
            self.longest_s,
            failure in (Failure.DIED, Failure.STALE),
        )
        delay = proxy.retry_after(self, told, booking.life, now)
        if failure is Failure.MALFORMED and not proxy.table.anybody(now, self.tried):
            delay = None  # whoever comes later would be like this one
        if delay is None:
            self._give_up()
        elif delay > 0:
            proxy.later(delay, self)
        else:
            self.place()

    def _blame(self, booking: Booking, failure: Failure, why: str, now: float) -> None:
        proxy = self.proxy
        counts = proxy.counts_of(booking)
        counts.failures[failure.value] += 1
        if proxy.table.failed(booking, BLAME[failure], now):
            counts.ejections += 1
            _log.warning("eject target=%s why=%r", booking.key.id, f"{failure.value}: {why}")
            proxy.changed_soon()

    def retry(self) -> None:
        """The pause before another attempt is over."""
        if self.attempt is None and self.ticket is None and not self.over:
            self.place()

    def call_back(self, why: str) -> None:
        """Its attempt waits in vain: on to another target."""
        booking = self.booking
        if booking is None or not self.replayable:
            return
        now = self.proxy.clock()
        self.proxy.metrics.counts.moves += 1
        self.story.note(now, "moved", booking.key.id, why)
        self.wait_left_s -= now - booking.since
        self._drop_attempt()
        self.place()

    def out_of_time(self, now: float) -> None:
        """The time to first byte is used up. Whom the last attempt waited for is to blame only if it had its share and
        stayed silent."""
        proxy, booking = self.proxy, self.booking
        if booking is None:
            return
        self.story.note(now, "timed_out", booking.key.id)
        silent = proxy.table.silent_since(booking) <= booking.since
        if silent and now - booking.since >= proxy.limits.time_to_first_byte_s / 2:
            self._blame(booking, Failure.SILENT, "for the whole time to first byte", now)
        self._drop_attempt()
        self._answer(504, "time_to_first_byte", "No target answered in time.")

    def client_lost(self) -> None:
        """The client has left: whatever is under way ends, and with it the engine's work."""
        now = self.proxy.clock()
        if self.attempt is not None and self.attempt.phase == TUNNEL:
            self._end_tunnel()
            return
        if self.over:
            return
        self.error = "client_gone"
        self.proxy.metrics.counts.client_gone += 1
        self.story.note(now, "client_gone", self.booking.key.id if self.booking else "")
        if self.ticket is not None:
            self.proxy.queue.leave(self.ticket)
            self._left_queue(now)
        if self.booking is not None:
            self._drop_attempt()
        self.over = True
        self.proxy.finished(self, now, None)

    # --- answering ourselves

    def _turn_away(self, full: bool = False) -> None:
        proxy = self.proxy
        if self.refusal is not None:
            self._send_refusal()
        elif self.failed:
            self._give_up()
        else:
            proxy.rejections.add(proxy.clock())
            proxy.metrics.counts.rejected += 1
            if full:
                self._answer(429, "queue_full", "Too many requests are waiting for a replica.")
            elif proxy.table.anybody(proxy.clock()):
                self._answer(503, "queue_timeout", "No replica had room for the request in time.")
            else:
                self._answer(503, "no_target_ready", "No replica is ready to take the request.")

    def _give_up(self) -> None:
        if self.refusal is not None:
            self._send_refusal()
        else:
            self._answer(502, "no_target_answered", "No replica could answer the request.")

    def _send_refusal(self) -> None:
        assert self.refusal is not None  # noqa: S101 (for the type checker)
        self._send_whole(*self.refusal, self.proxy.clock())

    def _answer(self, status: int, code: str, message: str) -> None:
        now = self.proxy.clock()
        self.story.note(now, "answered_here", why=code)
        self.error = code
        if self.relay is not None:  # part of an answer has been sent already
            self.relay.fail(code, message)
            return
        self.status = status
        client = self.client
        if self.head.http_1_0:
            client.closing = True
        client.transport.write(
            error_responses.raw_error(
                status,
                code,
                message,
                request_id=self.request_id,
                retry_after_s=RETRY_AFTER_S if status in RETRY_STATUSES or status == 429 else None,
                close=client.closing or client.body_left or self.proxy.closing,
                head_only=self.head.method == b"HEAD",
            )
        )
        self._settle(now, None)

    # --- ending

    def _settle(self, now: float, body: bytes | None) -> None:
        """The client has all it will get."""
        self.over = True
        tokens = self.proxy.account(self, body)
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            self.proxy.release(self, attempt.booking, now, tokens)
        self.proxy.finished(self, now, tokens)
        self.client.next()

    def _drop_attempt(self) -> None:
        booking = self.booking
        self._leave()
        self.proxy.waiting.pop(self, None)
        self.proxy.relays.pop(self, None)
        if booking is not None:
            self.proxy.release(self, booking, self.proxy.clock())

    def _leave(self) -> None:
        """End the attempt; its booking is the caller's to release."""
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.drop()

    # --- back-pressure

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
