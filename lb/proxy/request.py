"""One proxied request: it is placed, tried on targets until one responds, and relayed to its end.

Before the first byte whatever happens to a target, the request goes to another, never to one that has failed it, as far as
it may be repeated (`lb.core.retry`). It moves at once when the table says that its target is lost, or when the target falls
silent (`lb.engines.health_checks`) and a better one exists. While no target may take it, it is queued, and counted as
demand. After the first byte it belongs to the target that has begun to respond; if that one dies, a stream of a model is
resumed on another (`lb.proxy.resumable_relay`), and anything else is cut, so that the client sees an error and not a short
success.

A response *begins* with the first byte of its body, not with its head: engines send the head at once and think afterwards. A
response that is small, or JSON and not a stream, is read whole before any of it is sent, so a unary response is never cut.

The request is an automaton (`lb.proxy.states`). It has no task and no future: its two connections, the sweep of timeouts and
the queue call it, and each call leaves it in one of its states. However it ends, it ends in `end`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from lb.core.failures import BLAME, RETRY_STATUSES, Failure
from lb.core.queue import Ticket
from lb.core.retry import Tries, Verdict
from lb.core.targets import Booking, Health
from lb.engines.kinds import EngineKind
from lb.http import error_responses
from lb.http.messages import ResponseHead, response_bytes
from lb.http.upstream import TargetConnection
from lb.proxy.attempt import JOIN_BELOW_BYTES, Attempt
from lb.proxy.ending import Arrival, Ending, Outcome
from lb.proxy.fast_path import FastPath
from lb.proxy.ports import AttemptServices, Downstream, Relay, Responding
from lb.proxy.relay import PlainRelay
from lb.proxy.resumable_relay import BY_ENGINE, ResumableRelay, ResumeState, is_resumable
from lb.proxy.services import Services
from lb.proxy.states import Event, State, move
from lb.proxy.tunnel import Tunnel
from lb.stream.resume_request import NotResumable
from lb.stream.resume_rules import Reason
from policies.routing.base import Choice, RequestView

RETRY_AFTER_S = 5

_DONE = State.DONE

_log = logging.getLogger("lb.proxy.request")


class ProxiedRequest:
    """A request and what has become of it. `ending` collects what is reported once it is over."""

    __slots__ = (
        "arrival",
        "attempt",
        "body",
        "buffered",
        "client",
        "continues",
        "ending",
        "head",
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
        self.request_id = arrival.request_id
        self.view: RequestView = arrival.view
        self.tenant = arrival.admitted.tenant
        self.weight = arrival.admitted.weight
        self.policy = arrival.policy
        self.span = arrival.span
        self.continues = arrival.continues
        self.tries = tries
        self.ending = Ending()
        self.state = State.CHOOSING
        self.status = 0  # what the client was sent
        self.ticket: Ticket[ProxiedRequest] | None = None
        self.attempt: Attempt | None = None
        self.relay: Relay | None = None
        self.tunnel: Tunnel | None = None
        self.resume_state: ResumeState | None = arrival.resume_state  # of a stream that could be resumed
        self.refusal: tuple[ResponseHead, bytes] | None = None  # the last 502, 503 or 504 of a target

    # --- what the scheduler and the sweep ask

    @property
    def booking(self) -> Booking | None:
        """Of the present attempt."""
        return self.attempt.booking if self.attempt is not None else None

    @property
    def tried(self) -> Collection[int]:
        """The lives of targets (see `lb.core.target_state`) that have had the request."""
        return self.tries.by_life

    @property
    def senior(self) -> bool:
        """True if it was queued before, or was with a target that may have begun to run it."""
        tries = self.tries
        return tries.was_queued or tries.executions > 0 or self.relay is not None

    @property
    def hold_left_s(self) -> float:
        return self.tries.queue_left_s

    @property
    def attempts(self) -> int:
        return self.tries.attempts

    @property
    def executions(self) -> int:
        return self.tries.executions

    # --- being placed

    def place(self) -> None:
        """Go to a target, or wait for one."""
        proxy = self.proxy
        now = proxy.clock()
        choice = proxy.scheduler.place(self, now)
        if choice is not None:
            self._launch(choice, now)
        elif self.refusal is not None and not proxy.table.anybody(now, self.tries.by_life):
            self._send_refusal()
        else:
            self._enqueue(now)

    def _launch(self, choice: Choice, now: float) -> None:
        self.arrival.explanation.note(now, "chose", choice.target_id, choice.because, choice)
        prompt = self.view.prompt
        if prompt is not None:
            counts = self.proxy.metrics.counts
            counts.prompt_bytes += len(prompt)
            counts.matched_bytes += choice.matched_bytes
        self._try(choice.target_id, now, fresh=False)

    def _try(self, target_id: str, now: float, fresh: bool) -> None:
        proxy, tries = self.proxy, self.tries
        booking = proxy.table.book(self.view, target_id, now)
        self.state = move(self.state, Event.CHOSEN)
        self.attempt = Attempt(self, booking, now)
        tries.begin(booking.life)
        self.ending.last_target = target_id
        if tries.attempts > 1:
            proxy.metrics.counts.retries += 1
        proxy.counts_of(booking).attempts += 1
        proxy.waiting[self] = None
        # A connection that has gone stale cannot be told from a target that died; what may not run twice goes on a new one.
        self.attempt.start(fresh or not tries.repeatable)

    def _enqueue(self, now: float) -> None:
        proxy = self.proxy
        ticket = proxy.scheduler.hold(self, now) if proxy.queueing else None
        if ticket is None:
            self._turn_away(full=proxy.queueing and len(proxy.queue) >= proxy.limits.max_held > 0)
            return
        self.state = move(self.state, Event.ENQUEUED)
        self.ticket = ticket
        self.tries.was_queued = True
        proxy.metrics.counts.held_total += 1
        self.arrival.explanation.note(now, "held", why="no target can take it")

    def admitted(self, choice: Choice, now: float) -> None:
        """The queue has let it go."""
        self._left_queue(now)
        self._launch(choice, now)

    def expired(self, now: float) -> None:
        """It has waited in the queue for too long."""
        self._left_queue(now)
        self._turn_away()

    def evicted(self, now: float) -> None:
        """The queue is full, and another tenant has a better right to the place."""
        self._left_queue(now)
        self._turn_away(full=True)

    def _left_queue(self, now: float) -> None:
        ticket, self.ticket = self.ticket, None
        if ticket is None:
            return
        waited = now - ticket.joined_at
        self.ending.queued_s += waited
        self.tries.queue_left_s = max(0.0, self.tries.queue_left_s - waited)
        self.proxy.metrics.counts.queue_wait.observe(waited)

    # --- for the attempt

    @property
    def services(self) -> AttemptServices:
        return self.proxy

    def outgoing(self) -> tuple[bytes, bytes] | None:
        resume_state, booking = self.resume_state, self.booking
        if resume_state is None or booking is None:
            return self.head.target, self.body
        try:
            path, body = resume_state.outgoing(self.proxy.kind_of(booking.key))
        except NotResumable as error:
            self._cannot_resume_here(error)
            return None
        return path or self.head.target, body

    def _cannot_resume_here(self, error: NotResumable) -> None:
        """This target cannot continue the stream; perhaps another can."""
        relay = self.relay
        assert isinstance(relay, ResumableRelay)  # noqa: S101 (for the type checker)
        now = self.proxy.clock()
        self.state = move(self.state, Event.FAILED)
        self._drop_attempt(now)
        if self.proxy.table.anybody(now, self.tries.by_life) and error.reason in BY_ENGINE:
            self.place()
        else:
            relay.refuse(error)

    def more_body(self, part: bytes, last: bool) -> None:
        if self.attempt is not None and self.attempt.more_body(part, last):
            self.tries.replayable = False  # from now on part of it is gone
        else:  # between two attempts; there is no more of this, as reading has stopped
            self.body += part

    def bad_body(self, status: int, code: str, message: str) -> None:
        if self.status == 0:
            self._respond(status, code, message)
        else:
            self.cut(code)

    def responded_whole(self, reply: ResponseHead, body: bytes) -> None:
        if (
            reply.status in RETRY_STATUSES and self.tries.repeatable
        ):  # kept, in case no target has a better one
            self.refusal = reply, body
            self.proxy.waiting.pop(self, None)
            self.tries.executions += 1
            self._failed(Failure.REFUSED, f"HTTP status {reply.status}", self.proxy.clock())
        else:
            self._first_byte()
            self._send_whole(reply, body)

    def _send_whole(self, reply: ResponseHead, body: bytes) -> None:
        if reply.status == 204:
            framing = b""
        elif reply.status == 304 or self.head.method == b"HEAD":
            length = self.attempt.reply_length if self.attempt is not None else None
            framing = b"Content-Length: %d\r\n" % length if length is not None else b""
        else:
            framing = b"Content-Length: %d\r\n" % len(body)
        head = self.response_head(reply, framing + self.connection_line())
        if len(body) < JOIN_BELOW_BYTES:
            self.client.send_soon(head + body)
        else:
            self.client.transport.writelines((head, body))
        self.status = reply.status
        self.ending.bytes_out = len(body)
        self.end(Outcome.WHOLE, body)

    def connection_line(self) -> bytes:
        client = self.client
        if client.closing or client.body_left or self.proxy.closing:
            client.closing = True  # also if the rest of the body comes before the response ends
            return b"Connection: close\r\n"
        return b"Connection: keep-alive\r\n" if self.head.http_1_0 else b""

    def response_head(self, response: ResponseHead, framing: bytes) -> bytes:
        arrival = self.arrival
        if arrival.set_cookie:
            framing = arrival.set_cookie + framing
        return response_bytes(response, self.request_id, framing, arrival.cors)

    def _first_byte(self) -> float:
        """The target has responded. Returns now."""
        proxy, booking = self.proxy, self.booking
        assert booking is not None  # noqa: S101 (for the type checker)
        now = proxy.clock()
        proxy.waiting.pop(self, None)
        self.tries.executions += 1
        self.tries.deaths = 0
        proxy.counts_of(booking).ttfb.observe(now - self.arrival.at)
        self.arrival.explanation.note(now, "answered", booking.key.id)
        if proxy.table.answered(booking, now):
            _log.info("readmit target=%s why=%r", booking.key.id, "it responded again")
            proxy.changed_soon()
        elif len(proxy.queue):
            proxy.let_in_soon()  # a first byte shows that its engine had room
        return now

    # --- relaying

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
            well = (target.id for target, health, _ in proxy.table.rows(now) if health is Health.GOOD)
            others = {one for one in well if one != booking.key.id}
        else:
            others = {view.id for view in proxy.table.candidates(now, self.tries.by_life)[1]}
        return {proxy.kind_of_id(one) for one in others}

    def not_resumed(self, reason: Reason) -> None:
        self.proxy.metrics.counts.continue_refused[reason.value] += 1

    def begin_relay(self, attempt: Responding) -> Relay:
        now = self._first_byte()
        self.state = move(self.state, Event.FIRST_BYTE)
        proxy, relay = self.proxy, self.relay
        if self.ending.first_at is None:
            self.ending.first_at = now
            proxy.metrics.counts.ttft.observe(now - self.arrival.at)
        if relay is None:
            self.refusal = None
            if self.resume_state is not None and attempt.reply_length is None and is_resumable(attempt.reply):
                relay = ResumableRelay(self, self.resume_state, attempt.reply, attempt.decoder)
            else:
                self.resume_state = None
                relay = PlainRelay(self, attempt.reply, attempt.decoder, attempt.reply_length)
            self.relay = relay
        elif isinstance(relay, ResumableRelay):
            relay.next_leg(attempt.decoder)
            if relay.blocked:
                attempt.pause()  # for a client that is still not reading
            proxy.metrics.counts.continued += 1
            self.ending.continued += 1
        if self.resume_state is None and not self.client.body_left:
            self.proxy.forget_body(self)  # what has begun to be answered is not sent again
        proxy.relays[self] = None
        return relay

    def halt(self) -> None:
        if self.relay is not None:
            self.relay.halt()

    def relayed(self, rest: bool, reusable: bool = True) -> None:
        if self.attempt is not None:
            self.attempt.give_back(reusable=reusable and not rest)
        self.end(Outcome.WHOLE)

    def broke(self, failure: Failure, why: str) -> None:
        proxy, attempt, relay = self.proxy, self.attempt, self.relay
        assert attempt is not None and relay is not None  # noqa: S101, PT018 (for the type checker)
        now = proxy.clock()
        booking = attempt.booking
        self.state = move(self.state, Event.BROKEN)
        self.arrival.explanation.note(now, "broke", booking.key.id, why)
        attempt.drop()
        self.tries.failed = True
        self.tries.by_life = {booking.life: 1}
        self._blame(booking, failure, why, now)
        if failure is Failure.STALLED:
            proxy.metrics.counts.stalled += 1
        self._drop_attempt(now)
        self._resume(relay, why)

    def hand_over(self) -> bool:
        """Its target will be taken away soon: go on elsewhere if that is possible. Returns False if it is not."""
        relay, attempt = self.relay, self.attempt
        if self.state is not State.STREAMING or relay is None or attempt is None or not relay.may_continue():
            return False
        now = self.proxy.clock()
        booking = attempt.booking
        self.state = move(self.state, Event.BROKEN)
        self.tries.by_life = {booking.life: 1}
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

    def cut(self, why: str) -> None:
        self.ending.error = why
        self.end(Outcome.CUT)

    # --- tunnels

    def open_tunnel(self, reply: ResponseHead, rest: bytes) -> None:
        """A WebSocket: from here on bytes pass both ways as they come."""
        self.ending.first_at = self._first_byte()
        self.state = move(self.state, Event.UPGRADED)
        connection = self.connection
        assert connection is not None  # noqa: S101 (for the type checker)
        head = self.response_head(reply, b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
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
        """Close both ends with a close frame that says that the server goes away."""
        if self.tunnel is not None:
            self.tunnel.say_goodbye()
        self.arrival.explanation.note(self.proxy.clock(), "closed", why=why)
        self.ending.error = why
        self.end(Outcome.TUNNEL_CLOSED)

    def websocket_refused(self) -> None:
        self._respond(502, "websocket_refused", "The target has not opened the WebSocket.")

    # --- failing

    def attempt_failed(self, failure: Failure, why: str) -> None:
        now = self.proxy.clock()
        if self.attempt is not None:
            self.attempt.drop()
        self.proxy.waiting.pop(self, None)
        if failure not in (Failure.UNREACHABLE, Failure.LOCAL):
            self.tries.executions += 1
        self._failed(failure, why, now)

    def _failed(self, failure: Failure, why: str, now: float) -> None:
        """Blame whom it concerns, and try again if that is allowed."""
        proxy, tries, attempt = self.proxy, self.tries, self.attempt
        assert attempt is not None  # noqa: S101 (for the type checker)
        booking = attempt.booking
        ran_s = now - attempt.since
        tries.wait_left_s -= ran_s
        self.state = move(self.state, Event.FAILED)
        self.arrival.explanation.note(now, "failed", booking.key.id, why)
        history = tries.after(
            reached=failure not in (Failure.UNREACHABLE, Failure.LOCAL),
            died=failure in (Failure.DIED, Failure.STALE),
            ran_s=ran_s,
            life=booking.life,
        )
        stale = failure is Failure.STALE and not tries.stale and tries.may_move()
        if stale:
            tries.deaths -= 1
        verdict = proxy.verdict(self, history, now)
        # Two targets dead of one request: it is the request that is to blame, and not the second target as well.
        innocent = verdict is Verdict.KILLS_TARGETS
        self._blame(booking, Failure.STALE if innocent else failure, why, now)
        self._drop_attempt(now)
        if failure is Failure.LOCAL:
            proxy.local_trouble(why, now)
            if not proxy.table.anybody(now, tries.by_life):
                self._respond(
                    503, "out_of_resources", "The load balancer cannot open another connection now."
                )
                return
        if stale:
            # Once, on a connection of its own; if the target is dead, that shows at once. Not once for each target: it
            # cannot be known that a request which was sent has not begun to run.
            tries.stale = True
            tries.executions -= 1
            if proxy.table.standing(booking.key, now) is not Health.CLOSED:
                self.arrival.explanation.note(now, "chose", booking.key.id, "again, on a new connection")
                self._try(booking.key.id, now, fresh=True)
                return
        self._go_on(failure, verdict, history.on_target, booking.life, now)

    def _go_on(self, failure: Failure, verdict: Verdict, on_target: int, life: int, now: float) -> None:
        proxy, tries = self.proxy, self.tries
        delay = proxy.delay_before(self, verdict, life, now)
        if failure is Failure.MALFORMED and not proxy.table.anybody(now, tries.by_life):
            delay = None  # retrying later would meet the same malformed target
        if delay is None:
            if verdict is Verdict.KILLS_TARGETS and self.relay is None:
                self._respond(
                    502,
                    "request_kills_engines",
                    "Two replicas died on this request; it is not tried on a third.",
                )
            else:
                self._give_up()
        elif delay > 0:
            self.state = move(self.state, Event.BACKED_OFF)
            proxy.loop.call_later(delay, self._guarded, self._retry)
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

    def _retry(self) -> None:
        if self.state is State.BACKING_OFF:
            self.state = move(self.state, Event.RETRIED)
            self.place()

    def call_back(self, why: str) -> None:
        """Its attempt waits in vain: on to another target."""
        attempt = self.attempt
        if attempt is None or not (self.tries.replayable and (self.tries.repeatable or not attempt.sent)):
            return
        now = self.proxy.clock()
        self.proxy.metrics.counts.moves += 1
        self.arrival.explanation.note(now, "moved", attempt.booking.key.id, why)
        self.tries.wait_left_s -= now - attempt.since
        self.state = move(self.state, Event.FAILED)
        self._drop_attempt(now)
        self.place()

    def out_of_time(self, now: float) -> None:
        """The time to first byte is used up. The target of the last attempt is to blame only if it had its share and stayed
        silent."""
        proxy, booking = self.proxy, self.booking
        if booking is None:
            return
        self.arrival.explanation.note(now, "timed_out", booking.key.id)
        silent = proxy.table.silent_since(booking) <= booking.since
        if silent and now - booking.since >= proxy.limits.time_to_first_byte_s / 2:
            self._blame(booking, Failure.SILENT, "for the whole time to first byte", now)
        self._respond(504, "time_to_first_byte", "No target answered in time.")

    def client_lost(self) -> None:
        """The client has left: whatever is under way ends, and with it the engine's work."""
        if self.state is _DONE:
            return
        booking = self.booking
        self.arrival.explanation.note(self.proxy.clock(), "client_gone", booking.key.id if booking else "")
        self.ending.error = "client_gone"
        self.end(Outcome.CLIENT_GONE if self.tunnel is None else Outcome.TUNNEL_CLOSED)

    # --- error responses of our own

    def _turn_away(self, full: bool = False) -> None:
        proxy = self.proxy
        if self.refusal is not None:
            self._send_refusal()
        elif self.tries.failed:
            self._give_up()
        else:
            proxy.rejections.add(proxy.clock())
            proxy.metrics.counts.rejected += 1
            if full:
                self._respond(429, "queue_full", "Too many requests are waiting for a replica.")
            elif proxy.table.anybody(proxy.clock()):
                self._respond(503, "queue_timeout", "No replica had room for the request in time.")
            else:
                self._respond(503, "no_target_ready", "No replica is ready to take the request.")

    def _give_up(self) -> None:
        if self.refusal is not None:
            self._send_refusal()
        else:
            self._respond(502, "no_target_answered", "No replica could answer the request.")

    def _send_refusal(self) -> None:
        assert self.refusal is not None  # noqa: S101 (for the type checker)
        self._send_whole(*self.refusal)

    def _respond(self, status: int, code: str, message: str) -> None:
        """End with an error of our own: as a response, or as an error event where a response has begun."""
        now = self.proxy.clock()
        self.arrival.explanation.note(now, "answered_here", why=code)
        self.ending.error = code
        if self.relay is not None:
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
                more_lines=self.arrival.cors or b"",
            )
        )
        self.end(Outcome.REFUSED)

    # --- ending

    def end(self, outcome: Outcome, body: bytes | None = None) -> None:
        """The client has all it will get. `body` is that of a response that was sent whole.

        Called exactly once: the automaton has no event after it. It leaves the queue, releases the target, tells policy and
        tenant what was used, counts, and goes on with the client's next request.
        """
        self.state = move(self.state, Event.ENDED)
        proxy = self.proxy
        now = proxy.clock()
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
        self._drop_attempt(now, spent.out if outcome is Outcome.WHOLE and spent.reported else None)
        proxy.tunnels.pop(self, None)
        proxy.forget_body(self)
        proxy.endings.ended(self, outcome, spent, now)
        # The two hold each other, and a transcript can be megabytes: cycles wait for long until they are collected.
        self.relay = None
        if outcome is Outcome.CUT:
            # HTTP/1.0 ends a body by closing: only a reset tells failure from success.
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
                    self.proxy.table.release(attempt.booking, now)
                attempt.drop()
        except Exception as error:  # noqa: BLE001 (the barrier)
            self.proxy.faults.report("abandon", error)
        self.client.hang_up(abort=True)

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
