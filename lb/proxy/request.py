"""One proxied request: it is placed, tried on targets until one responds, and relayed to its end.

Before the first byte a request whose target fails goes to another one, never to one that has failed it, as far as
it may be repeated (`lb.core.retry`). It moves at once when its target is lost by the table, or when the target falls
silent (`lb.engines.health_checks`) and a better one exists. While no target may take it, it is queued, and counted as
demand. After the first byte it belongs to the target that has started to respond; if that one fails, a stream of a model is
resumed on another (`lb.proxy.resumable_relay`), and anything else is cut, so that the client sees an error and not a short
success.

A response *begins* with the first byte of its body, not with its head: engines send the head at once and think afterwards. A
response that is small, or JSON and not a stream, is read whole before any of it is sent, so a unary response is never cut.

The request is an automaton (`lb.proxy.states`). It has no task and no future: its two connections, the sweep of timeouts and
the queue call it, and each call leaves it in one of its states. However it ends, it ends in `end`.
"""

from __future__ import annotations

from lb.core.failures import RETRY_STATUSES, Failure
from lb.core.retry import RetryVerdict
from lb.core.targets import Booking, Health
from lb.http.messages import ResponseHead
from lb.proxy.attempt import Attempt
from lb.proxy.ending import Outcome
from lb.proxy.request_forwarding import ForwardingRequest
from lb.proxy.resumable_relay import BY_ENGINE, ResumableRelay
from lb.proxy.states import RequestEvent, State, move
from lb.stream.resume_rules import NotResumable
from policies.routing.base import Choice

_DONE = State.DONE


class ProxiedRequest(ForwardingRequest):
    """A request that looks for a target that responds."""

    __slots__ = ()

    # --- being placed

    def place(self) -> None:
        """Go to a target, or wait for one."""
        proxy = self.proxy
        now = proxy.clock()
        if proxy.table.models.missing(self.arrival.model):
            self._no_such_model()
            return
        if proxy.forwarding is None or not self.leaves(now):
            self.place_here(now)

    def place_here(self, now: float) -> None:
        proxy = self.proxy
        choice = proxy.scheduler.place(self, now)
        if choice is not None:
            self._launch(choice, now)
        elif self.refusal is not None and not proxy.table.has_candidate(now, self.tried):
            self._send_refusal()
        elif self.arrival.hop is not None and not proxy.may_wait(self, now):
            self._respond(429, "region_full", "This region has no room for the request.")
        else:
            self._enqueue(now)

    def _launch(self, choice: Choice, now: float) -> None:
        self.arrival.explanation.note(now, "chose", choice.target_id, choice.because, choice)
        for target_id in self.proxy.table.warming:
            if target_id != choice.target_id:
                self.arrival.explanation.note(now, "passed_over", target_id, "its cache is being filled")
        prompt = self.view.prompt
        if prompt is not None:
            counts = self.proxy.metrics.counts
            counts.prompt_bytes += len(prompt)
            counts.matched_bytes += choice.matched_bytes
        self._try(choice.target_id, now, fresh=False)

    def _try(self, target_id: str, now: float, fresh: bool) -> None:
        self.hop_lines = b""
        self.begin_attempt(self.proxy.table.book(self.view, target_id, now), now, fresh)

    def begin_attempt(self, booking: Booking, now: float, fresh: bool) -> None:
        proxy, tries = self.proxy, self.tries
        self.state = move(self.state, RequestEvent.CHOSEN)
        self.attempt = Attempt(self, booking, now)
        tries.begin(booking.epoch)
        self.ending.last_target = booking.key.id
        if tries.attempts > 1:
            proxy.metrics.counts.retries += 1
        proxy.counts_of(booking).attempts += 1
        proxy.waiting[self] = None
        proxy.waiting_until = min(proxy.waiting_until, now + tries.wait_left_s)
        # A connection that has gone stale cannot be distinguished from a target that died; what may not run twice goes on a new one.
        self.attempt.start(fresh or not tries.repeatable)

    def _enqueue(self, now: float) -> None:
        proxy = self.proxy
        ticket = proxy.scheduler.enqueue(self, now) if proxy.queueing else None
        if ticket is None:
            self._turn_away(full=proxy.queueing and len(proxy.queue) >= proxy.limits.max_held > 0)
            return
        self.state = move(self.state, RequestEvent.ENQUEUED)
        self.ticket = ticket
        self.tries.was_queued = True
        proxy.metrics.counts.queued_total += 1
        why = "no target can take it" if ticket.lane is None else "best off waiting for this target"
        self.arrival.explanation.note(now, "held", ticket.lane or "", why)

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

    # --- for the attempt

    def outgoing(self) -> tuple[bytes, bytes] | None:
        resume_state, booking = self.resume_state, self.booking
        if resume_state is None or booking is None:
            return self.head.target, self.body
        try:
            path, body = resume_state.outgoing(self.proxy.kind_of_booking(booking))
        except NotResumable as error:
            self._cannot_resume_here(error)
            return None
        return path or self.head.target, body

    def _cannot_resume_here(self, error: NotResumable) -> None:
        """This target cannot continue the stream; perhaps another can."""
        relay = self.relay
        assert isinstance(relay, ResumableRelay)  # noqa: S101 (for the type checker)
        now = self.proxy.clock()
        self.state = move(self.state, RequestEvent.FAILED)
        self._drop_attempt(now)
        if self.proxy.table.has_candidate(now, self.tried) and error.reason in BY_ENGINE:
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

    def responded_whole(self, response: ResponseHead, body: bytes) -> None:
        if self.hop_lines and self.is_full(response, body):
            self._queue_again()
        elif (
            response.status in RETRY_STATUSES and self.tries.repeatable
        ):  # kept, in case no target has a better one
            self.refusal = response, body
            self.proxy.waiting.pop(self, None)
            self.tries.executions += 1
            self._failed(Failure.REFUSED, f"HTTP status {response.status}", self.proxy.clock())
        elif response.status == 404 and self.proxy.retries.serves_other_models(
            self.booking, self.arrival.model, self.tries, body
        ):
            self.call_back("it does not serve the model")
        else:
            self._first_byte(response.status)
            self._send_whole(response, body)

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
        self.state = move(self.state, RequestEvent.FAILED)
        self.arrival.explanation.note(now, "failed", booking.key.id, why)
        history = tries.after(
            reached=failure not in (Failure.UNREACHABLE, Failure.LOCAL),
            died=failure in (Failure.DIED, Failure.STALE),
            ran_s=ran_s,
            epoch=booking.epoch,
        )
        stale = failure is Failure.STALE and not tries.stale and tries.may_move()
        if stale:
            tries.deaths -= 1
        verdict = proxy.retries.verdict(history, self.tried, tries.replayable, now)
        # Two targets dead of one request: it is the request that is to blame, and not the second target as well.
        innocent = verdict is RetryVerdict.KILLS_TARGETS
        self._blame(booking, Failure.STALE if innocent else failure, why, now)
        self._drop_attempt(now)
        if failure is Failure.LOCAL:
            proxy.local_trouble(why, now)
            if not proxy.table.has_candidate(now, self.tried):
                self._respond(
                    503, "out_of_resources", "The load balancer cannot open another connection now."
                )
                return
        if stale:
            # Once, on a connection of its own; if the target is dead, that shows at once. Not once for each target: it
            # cannot be known that a request which was sent has not started to run.
            tries.stale = True
            tries.executions -= 1
            if not self.hop_lines and proxy.table.health(booking.key, now) is not Health.CLOSED:
                self.arrival.explanation.note(now, "chose", booking.key.id, "again, on a new connection")
                self._try(booking.key.id, now, fresh=True)
                return
        self._go_on(failure, verdict, history.on_target, booking.epoch, now)

    def _go_on(self, failure: Failure, verdict: RetryVerdict, on_target: int, epoch: int, now: float) -> None:
        proxy = self.proxy
        delay: float | None = None
        if verdict.goes_on:
            delay = proxy.retries.delay_s(verdict, self.tries, epoch)
        else:
            self.arrival.explanation.note(now, "no_retry", why=verdict.value)
        if failure is Failure.MALFORMED and not proxy.table.has_candidate(now, self.tried):
            delay = None  # retrying later would meet the same malformed target
        if delay is None:
            if verdict is RetryVerdict.KILLS_TARGETS and self.relay is None:
                self._respond(
                    502,
                    "request_kills_engines",
                    "Two replicas died on this request; it is not tried on a third.",
                )
            else:
                self._give_up()
        elif delay > 0:
            self.state = move(self.state, RequestEvent.BACKED_OFF)
            proxy.loop.call_later(delay, self._guarded, self._retry)
        else:
            self.place()

    def _retry(self) -> None:
        if self.state is State.BACKING_OFF:
            self.state = move(self.state, RequestEvent.RETRIED)
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
        self.state = move(self.state, RequestEvent.FAILED)
        self._drop_attempt(now)
        self.place()

    def out_of_time(self, now: float) -> None:
        """The time to first byte is used up.

        The target of the last attempt is to blame only if it had its share and stayed silent.
        """
        proxy, booking = self.proxy, self.booking
        if booking is None:
            return
        self.arrival.explanation.note(now, "timed_out", booking.key.id)
        silent = proxy.table_of(booking).silent_since(booking) <= booking.since
        if silent and now - booking.since >= proxy.limits.time_to_first_byte_s / 2:
            self._blame(booking, Failure.SILENT, "for the whole time to first byte", now)
        self._respond(504, "time_to_first_byte", "No target responded in time.")

    def client_lost(self) -> None:
        """The client has left: stop the running attempt, and with it the engine's work."""
        if self.state is _DONE:
            return
        if self.tunnel is not None:  # either side may close a tunnel when it likes
            self.end(Outcome.TUNNEL_CLOSED)
            return
        booking = self.booking
        self.arrival.explanation.note(self.proxy.clock(), "client_gone", booking.key.id if booking else "")
        self.ending.error = "client_gone"
        self.end(Outcome.CLIENT_GONE)

    def _turn_away(self, full: bool = False) -> None:
        proxy = self.proxy
        if self.refusal is not None:
            self._send_refusal()
        elif self.tries.failed:
            self._give_up()
        elif self.arrival.zones and not full:
            self._refuse_by_residency()
        elif proxy.table.models.missing(self.arrival.model):
            self._no_such_model()
        else:
            proxy.rejections.add(proxy.clock())
            proxy.metrics.counts.rejected += 1
            if full:
                self._respond(429, "queue_full", "Too many requests are waiting for a replica.")
            elif proxy.table.has_candidate(proxy.clock()):
                self._respond(503, "queue_timeout", "No replica had room for the request in time.")
            else:
                self._respond(503, "no_target_ready", "No replica is ready to take the request.")

    def _refuse_by_residency(self) -> None:
        """No replica that may have the request had room: it is not sent to another one."""
        proxy, zones = self.proxy, sorted(self.arrival.zones)
        proxy.rejections.add(proxy.clock())
        proxy.metrics.counts.rejected += 1
        for zone in zones:
            proxy.metrics.counts.residency_denied[zone] += 1
        self._respond(
            503, "residency", f"No replica of the residency zone {' and '.join(zones)} had room in time."
        )

    def _no_such_model(self) -> None:
        """No target serves the model that the request names."""
        self.proxy.on_missing_model()
        self._respond(404, "model_not_found", f"The model {self.arrival.model!r} does not exist.")

    def _give_up(self) -> None:
        if self.refusal is not None:
            self._send_refusal()
        else:
            self._respond(502, "no_target_answered", "No replica could serve the request.")

    def _send_refusal(self) -> None:
        assert self.refusal is not None  # noqa: S101 (for the type checker)
        self._send_whole(*self.refusal)
