"""One proxied request: its state, what it owns, and its one end.

A request is placed (`lb.proxy.placing`), tried on targets until one responds (`lb.proxy.attempt`), and responded to
(`lb.proxy.responding`). It owns one object for each of the three, and each of them sees it through one Protocol.

A response *begins* with the first byte of its body, not with its head: engines send the head at once and think afterwards. A
response that is small, or JSON and not a stream, is read whole before any of it is sent, so a unary response is never cut.

The request is an automaton (`lb.proxy.states`). It has no task and no future: its two connections, the sweep of timeouts and
the queue call it, and each call leaves it in one of its states. However it ends, it ends in `end`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from lb.core.byte_budget import Holding
from lb.core.failures import Failure
from lb.core.retry import Tries
from lb.core.targets import Booking
from lb.http.messages import ResponseHead
from lb.proxy.account import Account
from lb.proxy.attempt import Attempt
from lb.proxy.dispatch import Dispatch
from lb.proxy.ending import Arrival, Ending, Outcome
from lb.proxy.placing import Placing
from lb.proxy.ports import Downstream, Relay
from lb.proxy.responding import Responding
from lb.proxy.states import RequestEvent, State, move
from lb.stream.resume_rules import NotResumable
from lb.stream.resume_state import ResumeState

_DONE: Final = State.DONE
_SMALL_BYTES: Final = 64 * 1024  # with its parsed body; a full queue of those takes next to no room


class ProxiedRequest:
    """A request and what has become of it. `ending` collects the report for its end.

    `placing` and `responding` know their request, so it lets go of them at its end: a request is no cycle that waits to be
    collected, with its prompt and its transcript.
    """

    __slots__ = (
        "_account",
        "_dispatch",
        "_holding",
        "_is_over",
        "_reserved_bytes",
        "arrival",
        "attempt",
        "body",
        "client",
        "ending",
        "placing",
        "responding",
        "state",
    )
    __deletable__ = ("placing", "responding")

    def __init__(
        self,
        dispatch: Dispatch,
        account: Account,
        client: Downstream,
        arrival: Arrival,
        tries: Tries,
        body: bytes,
        reserved_bytes: int = 0,
    ) -> None:
        """`reserved_bytes` were taken from the budget of the runtime for the body."""
        self._dispatch = dispatch
        self._account = account
        self._holding: Holding | None = None  # of the reserved bytes, while they can be refused
        self._is_over = False
        self._reserved_bytes = reserved_bytes
        self.arrival = arrival
        self.client = client
        self.body = body
        self.ending = Ending()
        self.state = State.CHOOSING
        self.attempt: Attempt | None = None
        self.placing = Placing(self, dispatch, account, arrival, tries)
        self.responding = Responding(self, dispatch, account, arrival, client)

    def move(self, event: RequestEvent) -> None:
        """Go on to the next state. Raises TransitionError."""
        self.state = move(self.state, event)

    # --- what the parts and the account see

    @property
    def booking(self) -> Booking | None:
        """The booking of the present attempt."""
        return self.attempt.booking if self.attempt is not None else None

    @property
    def tried(self) -> Collection[int]:
        """The epochs of targets that have had the request, or may not have it."""
        return self.placing.tried

    @property
    def attempts(self) -> int:
        return self.placing.tries.attempts

    @property
    def hop_lines(self) -> bytes:
        return self.placing.hop_lines

    @property
    def relay(self) -> Relay | None:
        return self.responding.relay

    @property
    def status(self) -> int:
        return self.responding.status

    @property
    def resume_state(self) -> ResumeState | None:
        return self.responding.resume_state

    @property
    def services(self) -> Dispatch:
        return self._dispatch

    # --- its client's connection

    def place(self) -> None:
        """Go to a target, or wait for one."""
        self.placing.place()

    def client_data(self, data: bytes) -> None:
        """Bytes for the tunnel."""
        tunnel = self.responding.tunnel
        if tunnel is not None:
            tunnel.from_client(data)

    def client_full(self) -> None:
        self.responding.client_full()

    def client_drained(self) -> None:
        self.responding.client_drained()

    def client_lost(self) -> None:
        """The client has left: stop the running attempt, and with it the engine's work."""
        if self.state is _DONE:
            return
        if self.responding.tunnel is not None:  # either side may close a tunnel when it likes
            self.end(Outcome.TUNNEL_CLOSED)
            return
        booking, now = self.booking, self._dispatch.runtime.clock()
        self.arrival.explanation.note(now, "client_gone", booking.key.id if booking else "")
        self.ending.error = "client_gone"
        self.end(Outcome.CLIENT_GONE)

    def more_body(self, part: bytes, last: bool) -> None:
        """Pass more of a body on that is not kept."""
        if self.attempt is not None and self.attempt.more_body(part, last):
            self.placing.tries.replayable = False  # from now on part of it is gone
        else:  # between two attempts; there is no more of this, as reading has stopped
            self.body += part

    def bad_body(self, status: int, code: str, message: str) -> None:
        self.responding.bad_body(status, code, message)

    # --- its attempt

    @property
    def is_early(self) -> bool:
        return self.responding.is_early

    def begin_attempt(self, booking: Booking, now: float) -> Attempt:
        """Make the attempt on the target of the booking. The caller starts it."""
        self.state = move(self.state, RequestEvent.CHOSEN)
        self.attempt = attempt = Attempt(self, booking, now)
        return attempt

    def outgoing(self) -> tuple[bytes, bytes] | None:
        return self.placing.outgoing()

    def halt(self) -> None:
        """One of the two connections is about to be closed."""
        relay = self.responding.relay
        if relay is not None:
            relay.halt()

    def attempt_failed(self, failure: Failure, why: str) -> None:
        self.placing.attempt_failed(failure, why)

    def responded_whole(self, response: ResponseHead, body: bytes) -> None:
        """All of the response is here."""
        if not self.placing.goes_on(response, body):
            self.responded(response.status)
            self.responding.send_whole(response, body)

    def responded(self, status: int) -> float:
        """The first byte of a response has come that the client gets. Returns now."""
        booking, now = self.booking, self._dispatch.runtime.clock()
        assert booking is not None  # noqa: S101 (for the type checker)
        self.placing.responded(booking, status, now)
        return now

    def begin_relay(self, attempt: Attempt, begin: bytes) -> Relay:
        return self.responding.begin_relay(attempt, begin)

    def broke(self, failure: Failure, why: str) -> None:
        self.responding.broke(failure, why)

    def open_tunnel(self, response: ResponseHead, rest: bytes) -> None:
        self.responding.open_tunnel(response, rest)

    def tunnel_data(self, data: bytes) -> None:
        tunnel = self.responding.tunnel
        if tunnel is not None:
            tunnel.from_target(data)

    def target_closed_tunnel(self) -> None:
        self.end(Outcome.TUNNEL_CLOSED)

    def websocket_refused(self) -> None:
        self.responding.websocket_refused()

    # --- from one part to the other

    def respond(self, status: int, code: str, message: str) -> None:
        """End with an error of our own."""
        self.responding.respond(status, code, message)

    def send_whole(self, response: ResponseHead, body: bytes) -> None:
        """End with a response that is here from its first byte to its last."""
        self.responding.send_whole(response, body)

    def refuse_to_resume(self, error: NotResumable, *, elsewhere: bool) -> bool:
        """End a stream that a target cannot go on with, unless one of those `elsewhere` may be able to. Returns whether it has ended."""
        return self.responding.refuse_to_resume(error, elsewhere=elsewhere)

    def keep_alive(self, now: float) -> None:
        """The client has got nothing for a while."""
        self.responding.keep_alive(now)

    def lost(self, booking: Booking, *, failed: bool) -> None:
        """The target is not to be chosen for the rest of the response; `failed` if it is to blame."""
        self.placing.lost(booking, failed=failed)

    def place_rest(self) -> None:
        """Find a target for the rest of the response."""
        self.placing.place_rest()

    # --- the end

    def end(self, outcome: Outcome, body: bytes | None = None) -> None:
        """The client has all it will get. `body` is that of a response that was sent whole.

        Called exactly once: the automaton has no event after it. It leaves the queue, releases the target, informs policy and
        tenant what was used, counts, and goes on with the client's next request.
        """
        self.state = move(self.state, RequestEvent.ENDED)
        account, responding = self._account, self.responding
        now = self._dispatch.runtime.clock()
        account.left(self.arrival, now)
        self.placing.leave_queue(now)
        attempt, relay = self.attempt, responding.relay
        if attempt is not None:
            attempt.finish(gracefully=outcome is Outcome.TUNNEL_CLOSED)
        spent = account.spent(self, body, now)
        if relay is not None:
            self.ending.bytes_out = relay.sent_bytes
        if attempt is not None and (spent.reported or spent.out):
            account.charged_to_target(attempt.booking, spent)
            if account.caches is not None and spent.reported and outcome is Outcome.WHOLE:
                account.caches.ended(self, attempt.booking, spent.prompt, body)
        self.drop_attempt(now, spent.out or None if outcome is Outcome.WHOLE else None)
        self._dispatch.registry.tunnels.pop(responding, None)
        self.forget_body()
        account.ended(self, outcome, spent, now)
        # A relay and its host hold each other, and a transcript can be megabytes: cycles wait for long until they are collected.
        responding.relay = None
        if outcome is Outcome.CUT:
            # HTTP/1.0 ends a body by closing: only a reset distinguishes failure from success.
            self.client.hang_up(abort=self.arrival.head.http_1_0)
        elif outcome is Outcome.TUNNEL_CLOSED:
            self.client.hang_up()
        elif outcome is not Outcome.CLIENT_GONE:
            self.client.next()
        self._let_go()

    def drop_attempt(self, now: float, tokens: int | None = None) -> None:
        """End the attempt, if there is one, and release its booking."""
        registry, placing, attempt = self._dispatch.registry, self.placing, self.attempt
        registry.waiting.pop(placing, None)
        registry.relays.pop(self.responding, None)
        self.ending.sent_at = None
        if attempt is not None:
            attempt.finish()
            self._dispatch.release(attempt.booking, now, tokens)
            self.attempt = None
            placing.released(attempt.booking)

    def forget_body(self) -> None:
        """Drop a body that is not needed any longer, and give its bytes back to the budget."""
        self.body = b""
        if self._reserved_bytes:
            self.keep_room()
            self._dispatch.runtime.buffers.give_back(self._reserved_bytes, self.arrival.admission.tenant)
            self._reserved_bytes = 0

    def offer_room(self) -> None:
        """No target has read the body: while that is so, a large one may be refused for the room of another tenant."""
        admission, buffers = self.arrival.admission, self._dispatch.runtime.buffers
        if self._reserved_bytes > _SMALL_BYTES:
            self._holding = buffers.offer(
                self._reserved_bytes, self._room_lost, admission.tenant, admission.weight
            )

    def keep_room(self) -> None:
        """From now on a target may read the body."""
        if self._holding is not None:
            self._holding.keep()
            self._holding = None

    def _room_lost(self) -> None:
        """Another tenant has got the memory of the body."""
        self._holding = None
        self._reserved_bytes = 0
        self.guarded(self.placing.room_lost)

    def _let_go(self) -> None:
        """The parts are not needed any longer."""
        self._is_over = True
        del self.placing
        del self.responding

    # --- the fault barrier

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run the callback in the next turn of the loop, behind the fault barrier."""
        self._dispatch.runtime.loop.call_soon(self.guarded, callback)

    def guarded(self, callback: Callable[[], None]) -> None:
        """Run the callback behind the fault barrier, unless the request is over by then."""
        if self.state is _DONE:
            return
        try:
            callback()
        except Exception as error:  # noqa: BLE001 (the barrier)
            self.crashed("soon", error)

    def crashed(self, entrance: str, error: Exception) -> None:
        """The code behind an entrance raised: end this request, and nothing else."""
        faults = self._dispatch.runtime.faults
        faults.report(entrance, error)
        try:
            if self.state is _DONE:
                self._abandon()  # nothing is sure about its connection any longer
            elif self.responding.relay is not None:
                self.responding.relay.fail("internal_error", "The load balancer failed on this request.")
            elif self.responding.status == 0 or self.responding.is_early:
                self.client.closing = True
                self.responding.respond(500, "internal_error", "The load balancer failed on this request.")
            else:
                self.responding.cut("internal_error")
        except Exception as second:  # noqa: BLE001 (the barrier)
            faults.report(entrance, second)
            self._abandon()

    def _abandon(self) -> None:
        """End without anything that might fail again."""
        if not self._is_over:
            self._release_all()
            self._let_go()
        self.client.hang_up(abort=True)

    def _release_all(self) -> None:
        dispatch, account, placing, responding = self._dispatch, self._account, self.placing, self.responding
        registry, now = dispatch.registry, dispatch.runtime.clock()
        if self.state is not _DONE:
            self.state = _DONE
            account.left(self.arrival, now)
        attempt, self.attempt = self.attempt, None
        try:
            placing.leave_queue(now)
        except Exception as error:  # noqa: BLE001 (the barrier)
            dispatch.runtime.faults.report("abandon", error)
        registry.waiting.pop(placing, None)
        registry.relays.pop(responding, None)
        registry.tunnels.pop(responding, None)
        try:
            if attempt is not None:
                if not attempt.booking.released:
                    registry.table_of(attempt.booking).release(attempt.booking, now)
                    placing.released(attempt.booking)
                attempt.drop()
            account.abandoned(self.arrival.admission, now)
            self.forget_body()
        except Exception as error:  # noqa: BLE001 (the barrier)
            dispatch.runtime.faults.report("abandon", error)
        responding.relay = None
