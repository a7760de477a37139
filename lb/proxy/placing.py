"""Placing a request: on a target here, at a peer or in the queue, again and again until one of them responds.

Before the first byte a request whose target fails goes to another one, never to one that has failed it, as far as it may be
repeated (`lb.core.retry`). It moves at once when its target is lost by the table, or when the target falls silent
(`lb.engines.health_checks`) and a better one exists. While no target may take it, it is queued, and counted as demand.

*Pinned requests.* A request that names a resource, such as the response that it follows, goes to the target that has it and to no
other (`lb.proxy.home_finder`): also if that is full, for which it waits, or drains. When the target is gone, the request ends
with the API's error for an id that it does not know.

*Other regions* (`lb.core.forwarding`). A request is compared with the peers when it is placed, and while it is queued with
each of their reports. A peer that has no room responds with `full` before the first byte; the request then has its old place
in the queue. A stream that a peer has started and loses is resumed here, or at another peer whose engines can continue it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, Protocol

from lb.core.failures import RETRY_STATUSES, Failure
from lb.core.forwarding import explained
from lb.core.homes import Absence, Found
from lb.core.hop import FULL, RequestHop, hop_lines
from lb.core.queue import Ticket
from lb.core.residency import may_have
from lb.core.retry import RetryVerdict, Tries
from lb.core.targets import Booking, Health
from lb.engines.kinds import kind_named
from lb.http.messages import ResponseHead
from lb.observe.explain import Explanation
from lb.proxy.account import SHED, Account
from lb.proxy.dispatch import Dispatch
from lb.proxy.ending import Arrival, Ending
from lb.proxy.ports import Downstream, Relay
from lb.proxy.registry import Waiting
from lb.proxy.states import RequestEvent, State
from lb.stream.resume_rules import NotResumable
from lb.stream.resume_state import ResumeState
from policies.routing.base import Choice
from policies.routing.deadlines import Late

_IN_DOUBT: Final = (Health.EJECTED, Health.UNHEALTHY)


class PlacedAttempt(Protocol):
    """An attempt, as placing uses it."""

    response: ResponseHead

    @property
    def booking(self) -> Booking: ...
    @property
    def since(self) -> float: ...
    @property
    def sent(self) -> bool:
        """True if the target may have read some of the request."""
        ...

    def start(self, fresh: bool) -> None:
        """On an idle connection, unless it has to be `fresh`."""
        ...

    def drop(self) -> None:
        """Close its connection at once."""
        ...


class PlacedRequest(Protocol):
    """A request, as its placing sees it."""

    @property
    def arrival(self) -> Arrival: ...
    @property
    def client(self) -> Downstream: ...
    @property
    def ending(self) -> Ending: ...
    @property
    def state(self) -> State: ...
    @property
    def attempt(self) -> PlacedAttempt | None: ...
    @property
    def booking(self) -> Booking | None:
        """The booking of the present attempt."""
        ...

    @property
    def relay(self) -> Relay | None:
        """The response that the client has the beginning of."""
        ...

    @property
    def resume_state(self) -> ResumeState | None:
        """The state of a stream that could be resumed."""
        ...

    @property
    def body(self) -> bytes: ...

    def move(self, event: RequestEvent) -> None:
        """Go on to the next state. Raises TransitionError."""
        ...

    def begin_attempt(self, booking: Booking, now: float) -> PlacedAttempt:
        """Make the attempt on the target of the booking. The caller starts it."""
        ...

    def drop_attempt(self, now: float) -> None:
        """End the attempt, if there is one, and release its booking."""
        ...

    def respond(self, status: int, code: str, message: str) -> None:
        """End with an error of our own."""
        ...

    def send_whole(self, response: ResponseHead, body: bytes) -> None:
        """End with a response that is here from its first byte to its last."""
        ...

    def refuse_to_resume(self, error: NotResumable, *, elsewhere: bool) -> bool:
        """End a stream that a target cannot go on with, unless one of those `elsewhere` may be able to. Returns whether it has ended."""
        ...

    def keep_alive(self, now: float) -> None:
        """The client has got nothing for a while."""
        ...

    def guarded(self, callback: Callable[[], None]) -> None:
        """Run the callback behind the fault barrier, unless the request is over by then."""
        ...

    def offer_room(self) -> None:
        """No target has read the body: while that is so, a large one may be refused for the room of another tenant."""
        ...

    def keep_room(self) -> None:
        """From now on a target may read the body."""
        ...

    def crashed(self, entrance: str, error: Exception) -> None:
        """The code behind an entrance raised: end this request, and nothing else."""
        ...


class Placing:
    """The way of one request to a target that responds. It is what the queue holds (`lb.core.scheduler.Waiter`)."""

    __slots__ = (
        "_account",
        "_arrival",
        "_at_peer",
        "_dispatch",
        "_refusal",
        "_request",
        "_searched",
        "_ticket",
        "hop_lines",
        "pin",
        "policy",
        "tenant",
        "tries",
        "view",
        "weight",
    )

    def __init__(
        self, request: PlacedRequest, dispatch: Dispatch, account: Account, arrival: Arrival, tries: Tries
    ) -> None:
        self._request = request
        self._dispatch = dispatch
        self._account = account
        self._arrival = arrival
        self._ticket: Ticket[Waiting] | None = None
        self._refusal: tuple[ResponseHead, bytes] | None = None  # the last 502, 503 or 504 of a target
        self.tries = tries
        self.hop_lines = b""  # header lines for a peer, while the request is forwarded to one
        self.view = arrival.view
        self.tenant = arrival.admission.tenant
        self.weight = arrival.admission.weight
        self.policy = arrival.policy
        self._searched = False  # all targets have been asked for its resource
        self._at_peer = False  # its resource is in another region
        self.pin = ""  # the target that alone can serve it; empty: any can

    # --- for the queue and the registry

    @property
    def tried(self) -> Collection[int]:
        """The epochs of targets (see `lb.core.target_state`) that have had the request, or may not have it."""
        epochs, table, zones = self.tries.epochs, self._dispatch.table, self._arrival.zones
        barred = table.models.barred(self._arrival.model)
        if zones:
            barred = barred | table.residency.barred(zones)
        return barred.union(epochs) if barred else epochs

    @property
    def has_priority(self) -> bool:
        """True if it was queued before, or was with a target that may have started to run it."""
        tries = self.tries
        return tries.was_queued or tries.executions > 0 or self._request.relay is not None

    @property
    def started(self) -> bool:
        """True if an engine may have worked on it."""
        return self.tries.executions > 0 or self._request.relay is not None

    @property
    def is_pinned(self) -> bool:
        """True if what it names is known to be in one place, which alone can serve it."""
        return bool(self.pin) or self._at_peer

    @property
    def queue_left_s(self) -> float:
        return self.tries.queue_left_s

    @property
    def booking(self) -> Booking | None:
        return self._request.booking

    @property
    def explanation(self) -> Explanation:
        return self._arrival.explanation

    def keep_alive(self, now: float) -> None:
        self._request.keep_alive(now)

    def waits_until(self) -> float:
        """Return when the attempt under way has waited too long for its first byte."""
        booking = self._request.booking
        return float("inf") if booking is None else booking.since + self.tries.wait_left_s

    def crashed(self, entrance: str, error: Exception) -> None:
        self._request.crashed(entrance, error)

    # --- to a target, or into the queue

    def place(self) -> None:
        """Go to a target, or wait for one."""
        dispatch = self._dispatch
        now = dispatch.runtime.clock()
        if dispatch.forwarding is not None:
            dispatch.forwarding.meets(self.view, now)
        if dispatch.table.models.missing(self._arrival.model):
            self._no_such_model()
        elif self._arrival.resource is not None and not self._find_home(now):
            return
        elif self.pin or dispatch.forwarding is None or not self.leaves(now):
            self._place_here(now)

    def place_rest(self) -> None:
        """Find a target for the rest of a stream, whose client has waited for nothing yet."""
        limits = self._dispatch.limits
        # A client that has half of a response waits for the rest as long as for an engine that is silent.
        queue_left_s = max(limits.hold_s, limits.idle_timeout_s) if limits.hold_s else 0.0
        self.tries.resume(limits.time_to_first_byte_s, queue_left_s)
        self.place()

    def _place_here(self, now: float) -> None:
        """Go to a target of this region, or wait for one."""
        dispatch, hop = self._dispatch, self._arrival.hop
        if self.view.due_at and self._is_shed(now):
            return
        choice = dispatch.registry.scheduler.place(self, now)
        if choice is not None:
            self._launch(choice, now)
        elif self._refusal is not None and not dispatch.table.has_candidate(now, self.tried):
            self._send_refusal()
        elif hop is not None and not self.pin and not dispatch.may_wait(self, hop, now):
            self._request.respond(429, "region_full", "This region has no room for the request.")
        else:
            self._enqueue(now)

    def _is_shed(self, now: float) -> bool:
        """Refuse the request if its deadline cannot be kept and such requests are shed. Returns whether it has ended."""
        sheds = self._dispatch.table.table.slo.late is Late.SHED
        if not sheds or self.started or self.pin or self._arrival.head.websocket:
            return False
        late_s = self._dispatch.registry.scheduler.expected_late_s(self, now)
        if late_s is not None:
            self.shed(now)
        return late_s is not None

    def shed(self, now: float) -> None:
        """Refuse the request, since its deadline cannot be kept."""
        self.leave_queue(now)
        if self._arrival.hop is not None:
            self._request.respond(429, "region_full", "This region cannot keep the request's deadline.")
            return
        self._account.turned_away(now)
        text = (
            "No replica can keep the request's deadline (X-SLO-TTFT-MS, X-SLO-TPOT-MS, or the service's SLO)."
        )
        self._request.respond(429, SHED, text)

    # --- to the target that has what it names (`lb.proxy.home_finder`)

    def _find_home(self, now: float) -> bool:
        """Find the target that has the resource of the request. Returns False if that takes a while, or has ended the request."""
        dispatch, table = self._dispatch, self._dispatch.table
        home = dispatch.homes.known(self._arrival)
        key = None if home is None else table.key(home)
        if home is not None and key is None:
            return self._to_peer(home, now)
        in_doubt = key is None or table.health(key, now) in _IN_DOUBT
        if in_doubt and not self._searched and dispatch.homes.search(self._arrival, self._found):
            self._request.move(RequestEvent.BACKED_OFF)
            return False
        if home is not None and not self._may_have(home):
            self._is_gone()
            return False
        self.pin = home or ""
        return True

    def _to_peer(self, home: str, now: float) -> bool:
        """The resource is not here: it is in the region of a peer, or its target has left. Returns False."""
        forwarding = self._dispatch.forwarding
        if forwarding is None or self._arrival.hop is not None or forwarding.peer_table.key(home) is None:
            self._is_gone()
        else:
            self._at_peer = True
            self._forward(home, self.tries.wait_left_s, now)
        return False

    def _may_have(self, target_id: str) -> bool:
        """Return whether the target may have the request by its residency."""
        zones, targets = self._arrival.zones, self._dispatch.table.table.targets
        return not zones or any(one.id == target_id and may_have(one.zones, zones) for one in targets)

    def _found(self, found: Found) -> None:
        """The targets have been asked which of them has the resource."""
        self._request.guarded(lambda: self._go_home(found))

    def _go_home(self, found: Found) -> None:
        if self._request.state is not State.BACKING_OFF:
            return
        self._searched = True
        self._request.move(RequestEvent.RETRIED)
        if found is Absence.GONE:
            self._is_gone()
        elif found is Absence.SILENT:
            text = "A replica that may have what the request names does not respond."
            self._request.respond(503, "replica_not_responding", text)
        else:
            self.place()

    def stranded(self, now: float) -> None:
        """The target that alone can serve it has left the table."""
        self.leave_queue(now)
        self._is_gone()

    def _is_gone(self) -> None:
        """End with what the API responds to an id that it does not know."""
        resource = self._arrival.resource
        assert resource is not None  # noqa: S101 (for the type checker)
        self._request.respond(404, "not_found", f"{resource.noun} with id '{resource.id}' not found.")

    def _launch(self, choice: Choice, now: float) -> None:
        dispatch, explanation = self._dispatch, self._arrival.explanation
        explanation.note(now, "chose", choice.target_id, choice.because, choice)
        for target_id in dispatch.table.warming:
            if target_id != choice.target_id:
                explanation.note(now, "passed_over", target_id, "its cache is being filled")
        prompt = self.view.prompt
        if prompt is not None:
            counts = self._account.metrics.counts
            counts.prompt_bytes += len(prompt)
            counts.matched_bytes += choice.matched_bytes
            if dispatch.forwarding is not None:
                dispatch.forwarding.sent(self.view, choice.target_id, self._arrival.zones, now)
        self._try(choice.target_id, now, fresh=False)

    def _try(self, target_id: str, now: float, fresh: bool) -> None:
        self.hop_lines = b""
        self._begin_attempt(self._dispatch.table.book(self.view, target_id, now), now, fresh)

    def _begin_attempt(self, booking: Booking, now: float, fresh: bool) -> None:
        """Send the request to the target of the booking."""
        account, request, tries = self._account, self._request, self.tries
        attempt = request.begin_attempt(booking, now)
        tries.begin(booking.epoch)
        request.ending.last_target = booking.key.id
        if tries.attempts > 1:
            account.metrics.counts.retries += 1
        account.counts_of(booking).attempts += 1
        self._dispatch.registry.wait(self, now + tries.wait_left_s)
        # A connection that has gone stale cannot be distinguished from a target that died; what may not run twice goes on a new one.
        attempt.start(fresh or not tries.repeatable)

    def _enqueue(self, now: float) -> None:
        dispatch, registry = self._dispatch, self._dispatch.registry
        ticket = registry.scheduler.enqueue(self, now) if registry.queueing else None
        if ticket is None:
            self._turn_away(full=registry.queueing and len(registry.queue) >= dispatch.limits.max_held > 0)
            return
        self._request.move(RequestEvent.ENQUEUED)
        self._ticket = ticket
        self.tries.was_queued = True
        self._account.metrics.counts.queued_total += 1
        why = "no target can take it" if ticket.lane is None else "best off waiting for this target"
        self._arrival.explanation.note(now, "held", ticket.lane or "", why)
        if not self.tries.executions:
            self._request.offer_room()

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

    def room_lost(self) -> None:
        """Another tenant has got the memory of the body while the request was queued."""
        self.leave_queue(self._dispatch.runtime.clock())
        self._request.respond(
            503, "out_of_memory", "The memory of the body went to another key's; try again."
        )

    def leave_queue(self, now: float) -> None:
        """Give up waiting in the queue, if it is there."""
        if self._ticket is not None:
            self._dispatch.registry.queue.leave(self._ticket)
            self._left_queue(now)

    def _left_queue(self, now: float) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        self._request.keep_room()
        waited = now - ticket.joined_at
        self._request.ending.queued_s += waited
        self.tries.queue_left_s = max(0.0, self.tries.queue_left_s - waited)
        self._account.metrics.counts.queue_wait.observe(waited)

    # --- to a peer

    def leaves(self, now: float) -> bool:
        """Forward the request if it is better off in another region. Returns whether it is on its way there."""
        forwarding, arrival, request, tries = (
            self._dispatch.forwarding,
            self._arrival,
            self._request,
            self.tries,
        )
        if forwarding is None or arrival.hop is not None or self.pin:
            return False
        if not tries.may_move() or request.client.body_left or arrival.head.websocket:
            return False
        left_s = min(tries.wait_left_s, max(1.0, tries.queue_left_s))
        due_s = self.view.due_at - now if self.view.due_at else left_s
        found = forwarding.elsewhere(
            self.view,
            len(self._dispatch.registry.queue),
            min(left_s, due_s) if due_s > 0.0 else left_s,
            now,
            self.tried,
            self.policy,
            arrival.zones,
            None if request.relay is None else self._engines(now),
        )
        if found is None:
            return False
        choice = explained(found)
        if not found.region:
            if request.state is not State.QUEUED:
                arrival.explanation.note(now, "stays", "", found.because, choice)
            return False
        arrival.explanation.note(now, "forwards", found.region, found.because, choice)
        self._forward(found.region, left_s, now)
        return True

    def _forward(self, region: str, left_s: float, now: float) -> None:
        """Send the request to the peer of that region, which has so long to respond."""
        forwarding, arrival, request = self._dispatch.forwarding, self._arrival, self._request
        assert forwarding is not None  # noqa: S101 (for the type checker)
        counts = self._account.metrics.peers.of(region)
        counts.forwards[self._reason()] += 1
        counts.sent_bytes += self.view.body_bytes
        self.leave_queue(now)
        resume_state = request.resume_state
        hop = RequestHop(
            now - arrival.at,
            left_s,
            self.weight,
            self.tenant,
            arrival.zones,
            None if resume_state is None else resume_state.breaks_left,
        )
        self.hop_lines = hop_lines(hop, dict(arrival.head.ours or {}))
        self._begin_attempt(forwarding.book(self.view, region, now), now, fresh=False)

    def _reason(self) -> str:
        if self._request.relay is not None:
            return "continuation"
        return "arrival" if self._ticket is None else "queue"

    def _engines(self, now: float) -> set[str]:
        """Return the kinds of peers' engines that could continue the stream."""
        forwarding, resume_state = self._dispatch.forwarding, self._request.resume_state
        if forwarding is None or resume_state is None or resume_state.progress is None:
            return set()
        progress = resume_state.progress
        known = forwarding.engines(now, self._arrival.zones, self.tried)
        return {name for name in known if resume_state.can_go_on(progress, kind_named(name))}

    def _is_full(self, response: ResponseHead, body: bytes) -> bool:
        """Return whether the response is a peer's refusal for want of room."""
        booking, forwarding = self._request.booking, self._dispatch.forwarding
        is_peer = forwarding is not None and booking is not None and forwarding.owns(booking)
        return is_peer and response.status == 429 and FULL in body

    def _queue_again(self) -> None:
        """A peer had no room: wait here, at the old place."""
        dispatch, request = self._dispatch, self._request
        booking = request.booking
        assert booking is not None  # noqa: S101 (for the type checker)
        now = dispatch.runtime.clock()
        if dispatch.forwarding is not None:
            dispatch.forwarding.returned(booking)
        self._account.metrics.peers.of(booking.key.id).returned += 1
        self._arrival.explanation.note(now, "came_back", booking.key.id, "the peer has no room")
        self.tries.forgive(booking.epoch)
        self.tries.was_queued = True
        self.tries.wait_left_s -= now - booking.since
        request.move(RequestEvent.FAILED)
        request.drop_attempt(now)
        self._place_here(now)

    def _peer_responded(self, booking: Booking) -> None:
        """The first byte of a peer's response has come, which may say that there is room for another request."""
        forwarding, attempt = self._dispatch.forwarding, self._request.attempt
        if forwarding is None or attempt is None or not forwarding.owns(booking):
            return
        if forwarding.responded(booking, attempt.response.credit):
            self._dispatch.registry.credit_came()

    # --- for the attempt

    def outgoing(self) -> tuple[bytes, bytes] | None:
        """Return path and body for the target of the attempt; None if it cannot serve the request: the attempt is over."""
        request = self._request
        resume_state, booking, target = request.resume_state, request.booking, self._arrival.head.target
        request.ending.sent_at = self._dispatch.runtime.clock()
        if resume_state is None or booking is None:
            return target, request.body
        try:
            path, body = resume_state.outgoing(self._dispatch.kind_of_booking(booking))
        except NotResumable as error:
            self._cannot_resume_here(error)
            return None
        return path or target, body

    def _cannot_resume_here(self, error: NotResumable) -> None:
        """This target cannot continue the stream; perhaps another can."""
        dispatch, request = self._dispatch, self._request
        now = dispatch.runtime.clock()
        request.move(RequestEvent.FAILED)
        request.drop_attempt(now)
        if not request.refuse_to_resume(error, elsewhere=dispatch.table.has_candidate(now, self.tried)):
            self.place()

    def goes_on(self, response: ResponseHead, body: bytes) -> bool:
        """Return whether the request looks for another target after this whole response. If so, it is on its way there."""
        dispatch, status = self._dispatch, response.status
        if self.hop_lines and self._is_full(response, body):
            self._queue_again()
        elif self.is_pinned:
            return False
        elif status in RETRY_STATUSES and self.tries.repeatable:
            self._refusal = response, body  # kept, in case no target has a better one
            dispatch.registry.waiting.pop(self, None)
            self.tries.executions += 1
            self._failed(Failure.REFUSED, f"HTTP status {status}", dispatch.runtime.clock())
        elif status == 404 and dispatch.retries.serves_other_models(
            self._request.booking, self._arrival.model, self.tries, body
        ):
            self.call_back("it does not serve the model")
        else:
            return False
        return True

    def responded(self, booking: Booking, status: int, now: float) -> None:
        """The first byte of a response has come that the client gets."""
        dispatch, tries = self._dispatch, self.tries
        dispatch.registry.waiting.pop(self, None)
        tries.executions += 1
        tries.deaths = 0
        self._refusal = None
        self._account.counts_of(booking).ttfb.observe(now - self._arrival.at)
        self._arrival.explanation.note(now, "answered", booking.key.id)
        if self.hop_lines:
            self._peer_responded(booking)
        dispatch.responded(booking, now, status)

    def released(self, booking: Booking) -> None:
        """A booking has been released: if it was on a peer, another request may have its credit."""
        forwarding = self._dispatch.forwarding
        if (
            self.hop_lines
            and forwarding is not None
            and forwarding.ended(booking, self._request.ending.bytes_out)
        ):
            self._dispatch.registry.credit_came()

    def lost(self, booking: Booking, *, failed: bool) -> None:
        """The target is gone that had started to respond, and is not chosen for the rest; `failed` if it is to blame."""
        if failed:
            self.tries.failed = True
        self.tries.epochs = (booking.epoch,)

    # --- failing

    def attempt_failed(self, failure: Failure, why: str) -> None:
        """The attempt failed before the first byte."""
        dispatch, attempt = self._dispatch, self._request.attempt
        now = dispatch.runtime.clock()
        if attempt is not None:
            attempt.drop()
        dispatch.registry.waiting.pop(self, None)
        if failure not in (Failure.UNREACHABLE, Failure.LOCAL):
            self.tries.executions += 1
        self._failed(failure, why, now)

    def _failed(self, failure: Failure, why: str, now: float) -> None:
        """Blame whom it concerns, and try again if that is allowed."""
        dispatch, request, tries = self._dispatch, self._request, self.tries
        attempt = request.attempt
        assert attempt is not None  # noqa: S101 (for the type checker)
        booking = attempt.booking
        ran_s = now - attempt.since
        tries.wait_left_s -= ran_s
        request.move(RequestEvent.FAILED)
        self._arrival.explanation.note(now, "failed", booking.key.id, why)
        history = tries.after(
            reached=failure not in (Failure.UNREACHABLE, Failure.LOCAL),
            died=failure in (Failure.DIED, Failure.STALE),
            ran_s=ran_s,
            epoch=booking.epoch,
        )
        stale = failure is Failure.STALE and not tries.stale and tries.may_move()
        if stale:
            tries.deaths -= 1
        verdict = dispatch.retries.verdict(history, self.tried, tries.replayable, now)
        # Two targets dead of one request: it is the request that is to blame, and not the second target as well.
        innocent = verdict is RetryVerdict.KILLS_TARGETS
        dispatch.failed(booking, Failure.STALE if innocent else failure, why, now)
        request.drop_attempt(now)
        if failure is Failure.LOCAL:
            dispatch.local_trouble(why, now)
            if not dispatch.table.has_candidate(now, self.tried):
                text = "The load balancer cannot open another connection now."
                request.respond(503, "out_of_resources", text)
                return
        if stale:
            # Once, on a connection of its own; if the target is dead, that shows at once. Not once for each target: it
            # cannot be known that a request which was sent has not started to run.
            tries.stale = True
            tries.executions -= 1
            if not self.hop_lines and dispatch.table.health(booking.key, now) is not Health.CLOSED:
                self._arrival.explanation.note(now, "chose", booking.key.id, "again, on a new connection")
                self._try(booking.key.id, now, fresh=True)
                return
        self._go_on(failure, verdict, booking.epoch, now)

    def _go_on(self, failure: Failure, verdict: RetryVerdict, epoch: int, now: float) -> None:
        dispatch, request = self._dispatch, self._request
        delay: float | None = None
        if verdict.goes_on:
            delay = dispatch.retries.delay_s(verdict, self.tries, epoch)
        else:
            self._arrival.explanation.note(now, "no_retry", why=verdict.value)
        if self.is_pinned:
            self._not_served_at_home(failure)
            return
        if failure is Failure.MALFORMED and not dispatch.table.has_candidate(now, self.tried):
            delay = None  # retrying later would meet the same malformed target
        if delay is None:
            if verdict is RetryVerdict.KILLS_TARGETS and request.relay is None:
                text = "Two replicas died on this request; it is not tried on a third."
                request.respond(502, "request_kills_engines", text)
            else:
                self._give_up()
        elif delay > 0:
            request.move(RequestEvent.BACKED_OFF)
            dispatch.runtime.loop.call_later(delay, request.guarded, self._retry)
        else:
            self.place()

    def _not_served_at_home(self, failure: Failure) -> None:
        """Only one place could serve it: it is not tried elsewhere."""
        if failure is Failure.UNREACHABLE and self.pin:
            self._is_gone()
        else:
            self._give_up()

    def _retry(self) -> None:
        if self._request.state is State.BACKING_OFF:
            self._request.move(RequestEvent.RETRIED)
            self.place()

    def call_back(self, why: str) -> None:
        """Its attempt waits in vain: on to another target."""
        request = self._request
        attempt = request.attempt
        if attempt is None or not (self.tries.replayable and (self.tries.repeatable or not attempt.sent)):
            return
        now = self._dispatch.runtime.clock()
        self._account.metrics.counts.moves += 1
        self._arrival.explanation.note(now, "moved", attempt.booking.key.id, why)
        self.tries.wait_left_s -= now - attempt.since
        request.move(RequestEvent.FAILED)
        request.drop_attempt(now)
        self.place()

    def leave_doubtful(self, most: int) -> None:
        """Its target is in doubt and another is healthy: on to that, unless it has been started `most` times.

        A server that does one request at a time looks frozen while it works on this very one: without a bound, the request
        would be started again and again and keep all of them busy.
        """
        if self.tries.executions < most:
            self.tries.executions += 1
            self.call_back("its target is in doubt and another is healthy")

    def out_of_time(self, now: float) -> None:
        """The time to first byte is used up.

        The target of the last attempt is to blame only if it had its share and stayed silent.
        """
        dispatch, booking = self._dispatch, self._request.booking
        if booking is None:
            return
        self._arrival.explanation.note(now, "timed_out", booking.key.id)
        silent = dispatch.registry.table_of(booking).silent_since(booking) <= booking.since
        if silent and now - booking.since >= dispatch.limits.time_to_first_byte_s / 2:
            dispatch.failed(booking, Failure.SILENT, "for the whole time to first byte", now)
        self._request.respond(504, "time_to_first_byte", "No target responded in time.")

    # --- no target

    def _turn_away(self, full: bool = False) -> None:
        dispatch = self._dispatch
        if self._refusal is not None:
            self._send_refusal()
        elif self.tries.failed:
            self._give_up()
        elif self._arrival.zones and not full:
            self._refuse_by_residency()
        elif dispatch.table.models.missing(self._arrival.model):
            self._no_such_model()
        else:
            now, respond = dispatch.runtime.clock(), self._request.respond
            self._account.turned_away(now)
            if full:
                respond(429, "queue_full", "Too many requests are waiting for a replica.")
            elif dispatch.table.has_candidate(now):
                respond(503, "queue_timeout", "No replica had room for the request in time.")
            else:
                respond(503, "no_target_ready", "No replica is ready to take the request.")

    def _refuse_by_residency(self) -> None:
        """No replica that may have the request had room: it is not sent to another one."""
        zones = sorted(self._arrival.zones)
        self._account.turned_away(self._dispatch.runtime.clock())
        for zone in zones:
            self._account.metrics.counts.residency_denied[zone] += 1
        text = f"No replica of the residency zone {' and '.join(zones)} had room in time."
        self._request.respond(503, "residency", text)

    def _no_such_model(self) -> None:
        """No target serves the model that the request names."""
        self._dispatch.missing_model()
        text = f"The model {self._arrival.model!r} does not exist."
        self._request.respond(404, "model_not_found", text)

    def _give_up(self) -> None:
        if self._refusal is not None:
            self._send_refusal()
        else:
            self._request.respond(502, "no_target_answered", "No replica could serve the request.")

    def _send_refusal(self) -> None:
        assert self._refusal is not None  # noqa: S101 (for the type checker)
        self._request.send_whole(*self._refusal)
