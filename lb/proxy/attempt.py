"""One attempt of a request on one target: get a connection, send, read the beginning of the response.

A response *begins* with the first byte of its body, not with its head: engines send the head at once and think
afterwards. A response that is small, or JSON and not a stream, is read whole before any of it is sent, so a unary
response is never cut.

The attempt owns its booking's connection and is its sink; it reports what it finds out to its request, which decides
(`lb.proxy.request`). It is over when it has reported a failure, has been dropped, or has given its connection back.
"""

from __future__ import annotations

from typing import Final, Protocol

from lb.core.failures import RETRY_STATUSES, Failure, described, is_local
from lb.core.targets import Booking
from lb.http.api_paths import for_model
from lb.http.body_framing import (
    BodyDecoder,
    ChunkedDecoder,
    CloseDelimitedDecoder,
    FramingError,
    LengthDecoder,
    chunk,
)
from lb.http.messages import END, HeadError, ResponseHead, opens_websocket, request_bytes
from lb.http.upstream import Dialling, TargetConnection
from lb.http.write_batch import JOIN_BELOW_BYTES
from lb.proxy.dispatch import Dispatch
from lb.proxy.ending import Arrival
from lb.proxy.ports import Downstream, Relay
from lb.proxy.resumable_relay import is_resumable

WHOLE_UP_TO_BYTES: Final = 256 * 1024
# A reused connection that ends without a byte so soon had gone stale: the target may be well.
STALE_WITHIN_S: Final = 1.0
_MAX_INTERIM_RESPONSES: Final = 16
_WITH_BODY: Final = frozenset({b"POST", b"PUT", b"PATCH"})

# Plain numbers: a member of an Enum is looked up in its class each time it is compared.
DIALLING: Final = 0
HEAD: Final = 1  # waiting for the head of the response
FIRST: Final = 2  # waiting for the first byte of a body that is relayed as it comes
WHOLE = 3  # reading a body that is sent in one piece
RELAY: Final = 4
TUNNEL: Final = 5
OVER: Final = 6


class AttemptHost(Protocol):
    """A request, as its attempt uses it."""

    @property
    def arrival(self) -> Arrival: ...
    @property
    def hop_lines(self) -> bytes:
        """Header lines of a request that is forwarded to another region."""
        ...

    @property
    def relay(self) -> Relay | None:
        """The response that the client has the beginning of."""
        ...

    @property
    def is_early(self) -> bool:
        """True if the client was sent the head of a stream before any target had one for it."""
        ...

    @property
    def client(self) -> Downstream: ...
    @property
    def services(self) -> Dispatch: ...

    def outgoing(self) -> tuple[bytes, bytes] | None:
        """Return path and body for the target of the attempt; None if it cannot serve the request: the attempt is over."""
        ...

    def halt(self) -> None:
        """One of the two connections is about to be closed."""
        ...

    def attempt_failed(self, failure: Failure, why: str) -> None:
        """Before the first byte."""
        ...

    def broke(self, failure: Failure, why: str) -> None:
        """After the first byte."""
        ...

    def responded_whole(self, response: ResponseHead, body: bytes) -> None:
        """All of the response is here."""
        ...

    def begin_relay(self, attempt: Attempt, begin: bytes) -> Relay:
        """The beginning of a body has come that is passed on as it comes."""
        ...

    def open_tunnel(self, response: ResponseHead, rest: bytes) -> None: ...
    def tunnel_data(self, data: bytes) -> None: ...
    def target_closed_tunnel(self) -> None: ...
    def websocket_refused(self) -> None: ...
    def crashed(self, entrance: str, error: Exception) -> None:
        """The code behind an entrance raised: end this request, and nothing else."""
        ...


class Attempt:
    """Sends the request and reads the response, up to the first byte that is passed on as it comes.

    `response` is the head of the response once there is one, `response_length` the length of its body if the head has it.
    """

    __slots__ = (
        "_arrival",
        "_buffer",
        "_dialling",
        "_interims",
        "_parts",
        "_relay",
        "_request",
        "_services",
        "_size",
        "booking",
        "connection",
        "decoder",
        "phase",
        "response",
        "response_length",
        "since",
    )

    def __init__(self, request: AttemptHost, booking: Booking, now: float) -> None:
        self._request = request
        self._services = request.services
        self._arrival = request.arrival
        self.booking = booking
        self.since = now
        self.connection: TargetConnection | None = None
        self.phase = DIALLING
        self.response: ResponseHead
        self.response_length: int | None = None
        self.decoder: BodyDecoder
        self._dialling: Dialling | None = None
        self._buffer = b""
        self._interims = 0
        self._relay: Relay | None = None  # which passes the response on

    # --- sending

    def start(self, fresh: bool) -> None:
        """On an idle connection, unless it has to be `fresh`."""
        services = self._services
        pool = services.pools.of(self.booking.target)
        connection = None if fresh or self._arrival.head.websocket else pool.take()
        if connection is not None:
            self._send(connection)
        else:
            self._dialling = Dialling(
                pool,
                services.limits.connect_timeout_s,
                services.runtime.clock,
                self._dialled,
                self._not_dialled,
            )

    def _dialled(self, connection: TargetConnection) -> None:
        self._dialling = None
        try:
            self._send(connection)
        except Exception as fault:  # noqa: BLE001 (the barrier)
            self._request.crashed("dial", fault)

    def _not_dialled(self, error: Exception) -> None:
        self._dialling = None
        try:
            failure = Failure.LOCAL if is_local(error) else Failure.UNREACHABLE
            self._request.attempt_failed(failure, described(error))
        except Exception as fault:  # noqa: BLE001 (the barrier)
            self._request.crashed("dial", fault)

    def _send(self, connection: TargetConnection) -> None:
        request = self._request
        arrival, client = self._arrival, request.client
        head, span = arrival.head, arrival.span
        pool = connection.pool
        self.connection = connection  # also if nothing is sent: it must not be lost
        asked = request.outgoing()
        if asked is None:
            return
        path, body = asked
        connection.sink = self
        self.phase = HEAD
        if client.body_left:
            if head.chunked:
                framing, body = b"Transfer-Encoding: chunked\r\n", chunk(body) if body else b""
            else:
                framing = b"Content-Length: %d\r\n" % client.length
        elif body or head.method in _WITH_BODY:
            framing = b"Content-Length: %d\r\n" % len(body)
        else:
            framing = b""
        if span:
            framing = b"Traceparent: %b\r\n%b" % (span.encode("latin-1"), framing)
        framing = request.hop_lines + framing
        host = pool.name if head.host else pool.address
        sent = request_bytes(head, client.hop, arrival.request_id, path, pool.base_path, host, framing)
        if client.body_left:
            connection.transport.writelines((sent, body))
            client.resume_reading(2)  # and more comes through `more_body`
        elif len(body) < JOIN_BELOW_BYTES:
            connection.unsent = sent + body
            self._services.runtime.write_batcher.add(connection)
        else:
            connection.transport.writelines((sent, body))

    def more_body(self, part: bytes, last: bool) -> bool:
        """Return the rest of a body that is passed on as it comes; False if there is no connection for it."""
        connection = self.connection
        if connection is None:
            return False
        if self._arrival.head.chunked:
            part = (chunk(part) if part else b"") + (b"0\r\n\r\n" if last else b"")
        if part:
            connection.transport.write(part)
        return True

    # --- the response

    def target_data(self, data: bytes) -> None:
        phase = self.phase
        if phase == RELAY:
            relay = self._relay
            if relay is not None:
                relay.data(data)
        elif phase == HEAD:
            self._take_head(self._buffer + data if self._buffer else data)
        elif phase == WHOLE:
            self._take_whole(data)
        elif phase == FIRST:
            self._begin(data)
        elif phase == TUNNEL:
            self._request.tunnel_data(data)

    def _take_head(self, data: bytes) -> None:
        request, limits, heads = self._request, self._services.limits, self._services.heads
        last = heads.last_response
        end = -1 if last is None else last.end_in(data)
        length: int | None
        if last is not None and 0 <= end <= limits.max_head_bytes:
            response, length = last, last.length_in(data, end) if last.after else last.length
        else:
            end = data.find(END) + 4
            if end < 4 or end > limits.max_head_bytes + 4:
                if len(data) > limits.max_head_bytes:
                    request.attempt_failed(Failure.MALFORMED, "the head of the response is too long")
                else:
                    self._buffer = data
                return
            try:
                response, length = heads.response(data[:end], limits.max_headers)
            except HeadError as error:
                request.attempt_failed(Failure.MALFORMED, str(error))
                return
        rest = data[end:]
        status = response.status
        if status < 200:
            self._take_interim(response, rest)
            return
        self.response, self.response_length = response, length
        # The client has the beginning of a stream already?
        if request.relay is not None and (length == 0 or not is_resumable(response)):
            why = f"HTTP status {status} instead of the rest of a stream"
            request.attempt_failed(Failure.UNFIT, why)
            return
        if self._arrival.head.method == b"HEAD" or status in (204, 304):
            self._finish(b"", rest)
            return
        if request.is_early and not is_resumable(response):
            self._read_for_early(length, response.chunked, rest)
            return
        if length is not None:
            if request.relay is None and length <= WHOLE_UP_TO_BYTES:
                if len(rest) == length:
                    self._finish(rest, b"")
                elif len(rest) > length:
                    self._finish(rest[:length], rest[length:])
                else:
                    self._read_whole(LengthDecoder(length), rest)
                return
            self.decoder = LengthDecoder(length)
        elif response.chunked:
            if status in RETRY_STATUSES or response.content_type.startswith(b"application/json"):
                self._read_whole(None, rest)
                return
            self.decoder = ChunkedDecoder()
        else:
            self.decoder = CloseDelimitedDecoder()
            if status in RETRY_STATUSES:
                self._read_whole(self.decoder, rest)
                return
        self.phase = FIRST
        if rest:
            self._begin(rest)

    def _read_for_early(self, length: int | None, chunked: bool, rest: bytes) -> None:
        """The client was promised a stream of events, and this is another response: it is turned into an event when it is whole."""
        if length is not None and len(rest) >= length:
            self._finish(rest[:length], rest[length:])
        elif length is not None:
            self._read_whole(LengthDecoder(length), rest)
        else:
            self._read_whole(None if chunked else CloseDelimitedDecoder(), rest)

    def _take_interim(self, response: ResponseHead, rest: bytes) -> None:
        """100 Continue and its like are for us; 101 opens a tunnel if one was requested."""
        request = self._request
        if response.status == 101:
            if not self._arrival.head.websocket:
                request.attempt_failed(Failure.MALFORMED, "it switches protocols unasked")
            elif opens_websocket(self._arrival.head, response):
                self.phase = TUNNEL
                request.open_tunnel(response, rest)
            else:
                request.websocket_refused()
            return
        self._interims += 1
        if self._interims > _MAX_INTERIM_RESPONSES:
            request.attempt_failed(Failure.MALFORMED, "too many interim responses")
            return
        self._buffer = b""
        if rest:
            self._take_head(rest)

    def _read_whole(self, decoder: BodyDecoder | None, rest: bytes) -> None:
        """Collect the body; without a decoder it is chunked."""
        self.phase = WHOLE
        self._parts: list[bytes] = []
        self._size = 0
        self.decoder = ChunkedDecoder(self._parts) if decoder is None else decoder
        if rest:
            self._take_whole(rest)

    def _take_whole(self, data: bytes) -> None:
        decoder = self.decoder
        try:
            end = decoder.feed(data)
        except FramingError as error:
            self._request.attempt_failed(Failure.MALFORMED, str(error))
            return
        if not isinstance(decoder, ChunkedDecoder):
            self._parts.append(data if end < 0 else data[:end])
        self._size += len(data)
        if end >= 0:
            self._finish(b"".join(self._parts), data[end:])
        elif self._size > WHOLE_UP_TO_BYTES and self._request.is_early:
            self._request.attempt_failed(Failure.MALFORMED, "a long response instead of a stream of events")
        elif self._size > WHOLE_UP_TO_BYTES:  # too long to be kept until it is whole
            collected = b"".join(self._parts)
            if isinstance(decoder, ChunkedDecoder):
                decoder.payloads = None
            self.phase = RELAY
            self._relay = relay = self._request.begin_relay(self, collected)
            relay.collected(collected)

    def _begin(self, data: bytes) -> None:
        """The first bytes of a body that is passed on as it comes."""
        response = self.response
        if data.startswith(b"0\r\n") and response.chunked and self._must_speak():
            self._request.attempt_failed(Failure.EMPTY, "HTTP status 200 without a body")
            return
        self.phase = RELAY
        self._relay = relay = self._request.begin_relay(self, data)
        relay.data(data)

    def _finish(self, body: bytes, rest: bytes) -> None:
        """The whole response is here; `rest` is what came behind it, and should not have."""
        if not body and self._must_speak():
            self._request.attempt_failed(Failure.EMPTY, "HTTP status 200 without a body")
            return
        self.give_back(reusable=not rest)
        self._request.responded_whole(self.response, body)

    def _must_speak(self) -> bool:
        """Return whether this response has to have a body: a model that sends nothing has not responded."""
        head = self._arrival.head
        return self.response.status == 200 and head.method == b"POST" and for_model(head.path)

    def target_lost(self, error: Exception | None) -> None:
        """The connection is closed; whether that is an end or a failure depends on where we are."""
        request = self._request
        request.halt()
        connection, self.connection = self.connection, None
        why = type(error).__name__ if error else "the connection ended"
        phase = self.phase
        if phase == TUNNEL:
            request.target_closed_tunnel()
        elif phase == RELAY:
            relay = self._relay
            if relay is not None and (error is not None or not relay.ended()):
                request.broke(Failure.DIED, why)
        elif phase in (WHOLE, FIRST) and isinstance(self.decoder, CloseDelimitedDecoder) and error is None:
            self._finish(b"".join(self._parts) if phase == WHOLE else b"", b"")
        elif phase != OVER:
            silent = phase == HEAD and not self._buffer and not self._interims
            stale = silent and connection is not None and connection.used
            young = self._services.runtime.clock() - self.since < STALE_WITHIN_S
            request.attempt_failed(Failure.STALE if stale and young else Failure.DIED, why)

    # --- the end

    @property
    def sent(self) -> bool:
        """True if the target may have read some of the request."""
        return self.phase not in (DIALLING, OVER)

    def finish(self, gracefully: bool = False) -> None:
        """End the attempt, unless it is over. `gracefully` sends what was written first."""
        if self.phase == OVER:
            return
        if gracefully:
            self.close()
        else:
            self.drop()

    def crashed(self, error: Exception) -> None:
        self._request.crashed("target", error)

    def drop(self) -> None:
        """Close the connection at once: nothing waits for it any longer."""
        request = self._request
        request.halt()  # before either socket is closed: its number may be another's a moment later
        self.phase = OVER
        if self._dialling is not None:
            self._dialling.abandon()
            self._dialling = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.drop()
        client = request.client
        if client.body_left:
            client.pause_reading(2)  # until another target takes it
        else:
            client.resume_reading(2)

    def give_back(self, reusable: bool) -> None:
        """The response has been read to its end."""
        connection, self.connection = self.connection, None
        self.phase = OVER
        if connection is None:
            return
        response = self.response
        if response.status == 204 and (self.response_length or response.chunked):
            reusable = False  # has it a body after all?
        if reusable and response.keep_alive and not self._request.client.body_left:
            connection.pool.give(connection, self._services.runtime.clock())
        else:
            connection.drop()

    def close(self) -> None:
        """Send what was written, and close."""
        connection, self.connection = self.connection, None
        self.phase = OVER
        if connection is not None:
            connection.sink = None
            connection.flush()
            connection.transport.close()

    # --- back-pressure

    def pause(self) -> None:
        if self.connection is not None:
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        if self.connection is not None and not self.connection.transport.is_closing():
            self.connection.transport.resume_reading()

    def target_full(self) -> None:
        self._request.client.pause_reading(2)

    def target_drained(self) -> None:
        self._request.client.resume_reading(2)
