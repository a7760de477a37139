"""Responding to a request: the response of a target on its way to the client, or a response of our own.

After the first byte a request belongs to the target that has started to respond. If that one fails, a stream of a model is
resumed on another (`lb.proxy.resumable_relay`), and anything else is cut, so that the client sees an error and not a short
success. A WebSocket becomes a tunnel, which is not resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, Protocol

from lb.core.failures import RETRY_STATUSES, Failure
from lb.core.residency import may_have
from lb.core.target_state import SERVER_ERRORS
from lb.core.targets import Booking
from lb.engines.kinds import EngineKind, kind_named
from lb.http import error_responses
from lb.http.body_framing import LAST_CHUNK, BodyDecoder, chunk
from lb.http.messages import ResponseHead, response_bytes
from lb.http.rate_limits import lines_of
from lb.http.upstream import TargetConnection
from lb.http.write_batch import JOIN_BELOW_BYTES
from lb.observe.explain import Explanation
from lb.proxy.account import Account
from lb.proxy.dispatch import Dispatch
from lb.proxy.ending import Arrival, Ending, Outcome
from lb.proxy.ports import Downstream, Relay
from lb.proxy.relay import PlainRelay
from lb.proxy.resumable_relay import BY_ENGINE, ResumableRelay, is_resumable
from lb.proxy.states import RequestEvent, State
from lb.proxy.tunnel import Tunnel
from lb.stream import resources
from lb.stream.dialects import DIALECTS
from lb.stream.early_stream import KEEP_ALIVE, early_head, failure_of, whole
from lb.stream.resume_rules import NotResumable, Reason

RETRY_AFTER_S: Final = 5

_EARLY_HEAD: Final = early_head()


class RespondingAttempt(Protocol):
    """An attempt whose target has started to respond."""

    response: ResponseHead
    response_length: int | None
    decoder: BodyDecoder

    @property
    def booking(self) -> Booking: ...
    @property
    def connection(self) -> TargetConnection | None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def drop(self) -> None: ...
    def give_back(self, reusable: bool) -> None: ...


class RespondedRequest(Protocol):
    """A request, as its responding sees it."""

    @property
    def ending(self) -> Ending: ...
    @property
    def state(self) -> State: ...
    @property
    def attempt(self) -> RespondingAttempt | None: ...
    @property
    def booking(self) -> Booking | None:
        """The booking of the present attempt."""
        ...

    @property
    def tried(self) -> Collection[int]:
        """The epochs of targets that have had the request, or may not have it."""
        ...

    def move(self, event: RequestEvent) -> None:
        """Go on to the next state. Raises TransitionError."""
        ...

    def responded(self, status: int) -> float:
        """The first byte of a response has come that the client gets. Returns now."""
        ...

    def lost(self, booking: Booking, *, failed: bool) -> None:
        """The target is not to be chosen for the rest of the response; `failed` if it is to blame."""
        ...

    def place_rest(self) -> None:
        """Find a target for the rest of the response."""
        ...

    def drop_attempt(self, now: float) -> None:
        """End the attempt, if there is one, and release its booking."""
        ...

    def forget_body(self) -> None:
        """The request is not sent again."""
        ...

    def end(self, outcome: Outcome, body: bytes | None = None) -> None:
        """The client has all it will get. `body` is that of a response that was sent whole."""
        ...

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run the callback in the next turn of the loop, behind the fault barrier."""
        ...

    def crashed(self, entrance: str, error: Exception) -> None:
        """The code behind an entrance raised: end this request, and nothing else."""
        ...


class Responding:
    """What the client of one request is sent. It is the host of the request's relay (`lb.proxy.ports.RelayHost`)."""

    __slots__ = (
        "_account",
        "_arrival",
        "_dispatch",
        "_kept_at",
        "_request",
        "client",
        "continues",
        "fast_path",
        "head",
        "is_early",
        "relay",
        "resume_state",
        "status",
        "tunnel",
    )

    def __init__(
        self,
        request: RespondedRequest,
        dispatch: Dispatch,
        account: Account,
        arrival: Arrival,
        client: Downstream,
    ) -> None:
        self._request = request
        self._dispatch = dispatch
        self._account = account
        self._arrival = arrival
        self.client = client
        self.head = arrival.head
        self.continues = arrival.continues
        self.fast_path = dispatch.fast_path
        self.status = 0  # what the client was sent
        self.is_early = False  # the client was sent a head before any target had one for it
        self._kept_at = arrival.at  # when the client was last sent something to keep its connection
        self.relay: Relay | None = None
        self.tunnel: Tunnel | None = None
        self.resume_state = arrival.resume_state  # of a stream that could be resumed

    # --- for the registry

    @property
    def booking(self) -> Booking | None:
        return self._request.booking

    @property
    def explanation(self) -> Explanation:
        return self._arrival.explanation

    def held_bytes(self) -> int:
        """Return about how many bytes of memory hold what has been sent of its response."""
        return 0 if self.relay is None else self.relay.held_bytes()

    def check_relay(self, now: float, elapsed_s: float) -> None:
        """Find out whether anything has come since the last check, `elapsed_s` ago, and act if nothing has for too long."""
        limits = self._dispatch.limits
        relay, booking = self.relay, self._request.booking
        if relay is None or booking is None:
            return
        table = self._dispatch.registry.table_of(booking)
        if relay.pulse():
            relay.silent_s = 0.0
            table.received_from(booking.key, now, worked=self.status not in SERVER_ERRORS)
            return
        relay.silent_s += elapsed_s
        if 0 < limits.stream_keepalive_s <= relay.silent_s:
            self.keep_alive(now)
        if relay.blocked:
            if relay.silent_s > limits.idle_timeout_s:
                self.client.transport.abort()  # it has stopped reading
        elif relay.silent_s > limits.idle_timeout_s:
            self.broke(Failure.IDLE, "no byte within the idle timeout")
        elif relay.silent_s > limits.stall_timeout_s and relay.may_continue():
            self.broke(Failure.STALLED, "no event within the stall timeout")
        elif (
            relay.silent_s > limits.suspect_after_s
            and table.missing(booking, now)
            and relay.may_continue(now_or_later=True)
        ):
            self.broke(Failure.SILENT, "no byte, and a failed probe of its target")

    def check_tunnel(self, now: float) -> None:
        """Close a tunnel that nothing has passed for too long."""
        if self.tunnel is not None and self.tunnel.idle_s(now) > self._dispatch.limits.idle_timeout_s:
            self.close_tunnel("nothing passed within the idle timeout")

    def crashed(self, entrance: str, error: Exception) -> None:
        self._request.crashed(entrance, error)

    # --- something to read while the client waits (`lb.stream.early_stream`)

    def keep_alive(self, now: float) -> None:
        """The client of a stream has got nothing for a while: send it a comment, and a head before it if there was none."""
        client, relay, arrival = self.client, self.relay, self._arrival
        if not arrival.streams or arrival.hop is not None or client.transport.get_write_buffer_size():
            return
        if now - self._kept_at < self._dispatch.limits.stream_keepalive_s:
            return
        self._kept_at = now
        if relay is not None:
            relay.keep_alive()
            return
        comment = self._framed(KEEP_ALIVE)
        if not self.is_early:
            self.is_early, self.status = True, 200
            if self.head.http_1_0:
                client.closing = True  # the end of the connection is the end of the body
            framing = b"" if self.head.http_1_0 else b"Transfer-Encoding: chunked\r\n"
            comment = self.response_head(_EARLY_HEAD, framing + self.connection_line()) + comment
        client.transport.write(comment)

    def _framed(self, events: bytes) -> bytes:
        return events if self.head.http_1_0 else chunk(events)

    def _end_early(self, events: bytes, outcome: Outcome, body: bytes | None = None) -> None:
        """End a stream whose head was sent early, and of which no target has sent an event."""
        last = b"" if self.head.http_1_0 else LAST_CHUNK
        self.client.transport.write(self._framed(events) + last)
        self._request.ending.bytes_out = len(events)
        self._request.end(outcome, body)

    # --- whole responses

    def response_head(self, response: ResponseHead, framing: bytes) -> bytes:
        """Return the head that the client gets. `framing` are whole lines on length and connection."""
        arrival = self._arrival
        if arrival.hop is not None:
            framing += self._credit(arrival.hop.peer)
        if arrival.lines:
            framing = arrival.lines + framing
        request_id = arrival.request_id if arrival.hop is None else b""
        return response_bytes(response, request_id, framing, arrival.cors)

    def _credit(self, peer_id: str) -> bytes:
        """Return the header line that reports room to a peer in the place of its request, or nothing."""
        dispatch, booking = self._dispatch, self._request.booking
        runtime, forwarding = dispatch.runtime, dispatch.forwarding
        if booking is None or forwarding is None or len(dispatch.registry.queue):
            return b""
        if runtime.closing or runtime.draining:
            return b""
        over = self._request.state is not State.STREAMING  # a response that is sent whole
        return forwarding.credit(peer_id, booking, runtime.clock(), over)

    def connection_line(self) -> bytes:
        """Return the `Connection` header of the response, as a line."""
        client = self.client
        if client.closing or client.body_left or self._dispatch.runtime.closing:
            client.closing = True  # also if the rest of the body comes before the response ends
            return b"Connection: close\r\n"
        return b"Connection: keep-alive\r\n" if self.head.http_1_0 else b""

    def send_whole(self, response: ResponseHead, body: bytes) -> None:
        """End with a response that is here from its first byte to its last."""
        request, report = self._request, body
        if self.resume_state is not None and is_resumable(response):
            body = self.resume_state.shown(body)
        if self.is_early:
            self._send_whole_early(response, body, report)
            return
        if response.status == 204:
            framing = b""
        elif response.status == 304 or self.head.method == b"HEAD":
            attempt = request.attempt
            length = attempt.response_length if attempt is not None else None
            framing = b"Content-Length: %d\r\n" % length if length is not None else b""
        else:
            framing = b"Content-Length: %d\r\n" % len(body)
        head = self.response_head(response, framing + self.connection_line())
        if len(body) < JOIN_BELOW_BYTES:
            self.client.send_soon(head + body)
        else:
            self.client.transport.writelines((head, body))
        self.status = response.status
        if self._arrival.brings_ids and 200 <= response.status < 300:
            self._learn(resources.made(body))
        request.ending.bytes_out = len(body)
        request.end(Outcome.WHOLE, report)

    def _send_whole_early(self, response: ResponseHead, body: bytes, report: bytes) -> None:
        """The client has been promised a stream of events. `report` is the body as the engine wrote it, with its usage."""
        if response.status != 200:
            self._request.ending.error = f"http_status_{response.status}"
            self._end_early(failure_of(self.head.path, response.status, body), Outcome.ERROR_EVENT)
        else:
            self._end_early(body if is_resumable(response) else whole(body), Outcome.WHOLE, report)

    def _learn(self, ids: list[str]) -> None:
        """The target of the present attempt has made resources of these ids, or has them."""
        booking = self._request.booking
        if booking is not None:
            for one in ids:
                self._dispatch.homes.learn(self._arrival, booking.key.id, one)

    def respond(self, status: int, code: str, message: str) -> None:
        """End with an error of our own: as a response, or as an error event where a response has started."""
        request, runtime = self._request, self._dispatch.runtime
        self._arrival.explanation.note(runtime.clock(), "answered_here", why=code)
        request.ending.error = code
        if self.relay is not None:
            self.relay.fail(code, message)
            return
        if self.is_early:
            event = DIALECTS[self.head.path].error_event(code, message, None)
            self._end_early(event, Outcome.ERROR_EVENT)
            return
        self.status = status
        client = self.client
        if self.head.http_1_0 or client.body_left or runtime.closing:
            client.closing = True
        client.transport.write(
            error_responses.raw_error(
                status,
                code,
                message,
                request_id=self._arrival.request_id,
                retry_after_s=RETRY_AFTER_S if status in RETRY_STATUSES or status == 429 else None,
                close=client.closing,
                head_only=self.head.method == b"HEAD",
                more_lines=lines_of(*self._arrival.admission.left()) + (self._arrival.cors or b""),
                path=self.head.path,
            )
        )
        request.end(Outcome.REFUSED)

    def bad_body(self, status: int, code: str, message: str) -> None:
        """The client has sent a body that cannot be passed on."""
        if self.status == 0 or (self.is_early and self.relay is None):
            self.respond(status, code, message)
        else:
            self.cut(code)

    def cut(self, why: str) -> None:
        """Nothing more can be sent: what was sent stays sent, and the client sees a broken connection."""
        self._request.ending.error = why
        self._request.end(Outcome.CUT)

    # --- for the relay

    @property
    def request_id(self) -> bytes:
        return self._arrival.request_id

    @property
    def connection(self) -> TargetConnection | None:
        """The connection of the present attempt."""
        attempt = self._request.attempt
        return attempt.connection if attempt is not None else None

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run the callback in the next turn of the loop, behind the fault barrier."""
        self._request.call_soon(callback)

    def kinds_elsewhere(self, *, now_or_later: bool) -> set[EngineKind]:
        """Return the kinds of engines that could take the request over: those with room, or (`now_or_later`) all healthy ones."""
        dispatch, arrival, booking = self._dispatch, self._arrival, self._request.booking
        if booking is None:
            return set()
        now, table = dispatch.runtime.clock(), dispatch.table
        if now_or_later:
            zones = arrival.zones
            well = (
                target.id
                for target, health, _ in table.rows(now)
                if health.is_good and may_have(target.zones, zones)
            )
            models, model = table.models, arrival.model
            others = {one for one in well if one != booking.key.id and models.serves(one, model) is not False}
        else:
            others = {view.id for view in table.candidates(now, self._request.tried)[1]}
        kinds = {dispatch.kind_of_id(one) for one in others}
        if dispatch.forwarding is not None and arrival.hop is None:
            kinds |= set(map(kind_named, dispatch.forwarding.engines(now, arrival.zones, {booking.epoch})))
        return kinds

    def not_resumed(self, reason: Reason) -> None:
        """Count a stream that cannot be resumed."""
        self._account.metrics.counts.continue_refused[reason.value] += 1

    def resumed_inexactly(self, reason: Reason) -> None:
        """Report a stream that goes on with tokens that an undisturbed engine need not have made."""
        self._account.metrics.counts.continued_inexactly[reason.value] += 1
        self._request.ending.inexact = reason.value
        self._arrival.explanation.note(self._dispatch.runtime.clock(), "inexact", why=reason.value)

    def relayed(self, rest: bool, reusable: bool = True) -> None:
        """The relay has passed the whole response; `rest` if more came on the connection than that."""
        request, relay = self._request, self.relay
        attempt, first_at = request.attempt, request.ending.first_at
        if relay is not None and attempt is not None and first_at is not None:
            tokens = relay.generated()
            if tokens > 1:
                spacing_s = (self._dispatch.runtime.clock() - first_at) / (tokens - 1)
                self._account.counts_of(attempt.booking).inter_token.observe(spacing_s)
        if attempt is not None:
            attempt.give_back(reusable=reusable and not rest)
        request.end(Outcome.WHOLE)

    def ended_early(self) -> None:
        """The target was lost, but the relay has completed the response without it."""
        self._request.end(Outcome.WHOLE)

    def ended_in_error(self, code: str) -> None:
        """The relay has sent the client an error event."""
        self._request.ending.error = code
        self._request.end(Outcome.ERROR_EVENT)

    # --- from the first byte on

    def begin_relay(self, attempt: RespondingAttempt, begin: bytes) -> Relay:
        """The beginning of a body has come that is passed on as it comes."""
        request, counts = self._request, self._account.metrics.counts
        now = request.responded(attempt.response.status)
        request.move(RequestEvent.FIRST_BYTE)
        relay = self.relay
        if request.ending.first_at is None:
            request.ending.first_at = now
            if self._arrival.hop is None:  # else the agent where it entered counts it
                counts.ttft.observe(now - self._arrival.at)
        if relay is None:
            if self._arrival.brings_ids and 200 <= attempt.response.status < 300:
                self._learn(resources.made_at_first(begin))
            if self.resume_state is not None and is_resumable(attempt.response):
                relay = ResumableRelay(self, self.resume_state, attempt.response, attempt.decoder)
            else:
                self.resume_state = None
                relay = PlainRelay(self, attempt.response, attempt.decoder, attempt.response_length)
            self.relay = relay
        elif isinstance(relay, ResumableRelay):
            relay.next_leg(attempt.decoder)
            if relay.blocked:
                attempt.pause()  # for a client that is still not reading
            counts.continued += 1
            request.ending.continued += 1
        if self.resume_state is None and not self.client.body_left:
            request.forget_body()  # a request with a response is not sent again
        self._dispatch.registry.relays[self] = None
        return relay

    def broke(self, failure: Failure, why: str) -> None:
        """The response broke off after its first byte."""
        request, relay = self._request, self.relay
        attempt = request.attempt
        assert attempt is not None and relay is not None  # noqa: S101, PT018 (for the type checker)
        now, booking = self._dispatch.runtime.clock(), attempt.booking
        request.move(RequestEvent.BROKEN)
        self._arrival.explanation.note(now, "broke", booking.key.id, why)
        attempt.drop()
        request.lost(booking, failed=True)
        self._dispatch.failed(booking, failure, why, now)
        if failure is Failure.STALLED:
            self._account.metrics.counts.stalled += 1
        request.drop_attempt(now)
        self._resume(relay, why)

    def hand_over(self) -> bool:
        """Its target will be taken away soon: go on elsewhere if that is possible. Returns False if it is not."""
        request, relay = self._request, self.relay
        booking = request.booking
        if request.state is not State.STREAMING or relay is None or booking is None:
            return False
        if not relay.may_continue():
            return False
        now = self._dispatch.runtime.clock()
        request.move(RequestEvent.BROKEN)
        request.lost(booking, failed=False)
        self._arrival.explanation.note(now, "handed_over", booking.key.id)
        request.drop_attempt(now)
        self._account.metrics.counts.handed_over += 1
        self._resume(relay, "its target is being drained")
        return True

    def _resume(self, relay: Relay, why: str) -> None:
        """Go on with a stream on another target, or end it as an error."""
        if relay.resume(why):
            self._request.place_rest()

    def refuse_to_resume(self, error: NotResumable, *, elsewhere: bool) -> bool:
        """End a stream that a target cannot go on with, unless one of those `elsewhere` may be able to. Returns whether it has ended."""
        if elsewhere and error.reason in BY_ENGINE:
            return False
        relay = self.relay
        assert isinstance(relay, ResumableRelay)  # noqa: S101 (for the type checker)
        relay.refuse(error)
        return True

    def client_full(self) -> None:
        """The client takes no more for now."""
        attempt = self._request.attempt
        if attempt is not None:
            attempt.pause()
        if self.relay is not None:
            self.relay.blocked = True

    def client_drained(self) -> None:
        """The client takes more again."""
        attempt = self._request.attempt
        if self.relay is not None:
            self.relay.blocked = False
        if attempt is not None:
            attempt.resume()

    # --- tunnels

    def open_tunnel(self, response: ResponseHead, rest: bytes) -> None:
        """A WebSocket: from here on bytes pass both ways as they come."""
        request = self._request
        request.ending.first_at = request.responded(response.status)
        request.move(RequestEvent.UPGRADED)
        connection = self.connection
        assert connection is not None  # noqa: S101 (for the type checker)
        head = self.response_head(response, b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
        ahead = self.client.tunnel()
        self.client.transport.write(head)
        self.status = 101
        now = self._dispatch.runtime.clock()
        self.tunnel = Tunnel(self.client.transport, connection.transport, now)
        self._dispatch.registry.tunnels[self] = None
        if rest:
            self.tunnel.from_target(rest)
        if ahead:
            self.tunnel.from_client(ahead)

    def close_tunnel(self, why: str) -> None:
        """Close both ends with a close frame of code 1001 (going away)."""
        if self.tunnel is not None:
            self.tunnel.send_close_frames()
        self._arrival.explanation.note(self._dispatch.runtime.clock(), "closed", why=why)
        self._request.ending.error = why
        self._request.end(Outcome.TUNNEL_CLOSED)

    def websocket_refused(self) -> None:
        """The target has not opened the WebSocket that the client requested."""
        self.respond(502, "websocket_refused", "The target has not opened the WebSocket.")
