"""One attempt of a request on one target: get a connection, send, read the beginning of the answer.

An answer *begins* with the first byte of its body, not with its head: engines send the head at once and think
afterwards. An answer that is small, or JSON and not a stream, is read whole before any of it is sent, so a unary
answer is never cut.

The attempt owns its booking's connection and is its sink; what it finds out it tells its exchange, which decides
(`lb.proxy.request`). It is over when it has told of a failure, has been dropped, or has given its connection back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lb.core.failures import RETRY_STATUSES, Failure
from lb.core.targets import Booking
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
from lb.proxy.resumable_relay import is_resumable
from lb.stream.openai_request import for_model

if TYPE_CHECKING:
    from lb.proxy.request import ProxiedRequest

WHOLE_UP_TO_BYTES = 256 * 1024
# A reused connection that ends without a byte so soon had gone stale: the target may be well.
STALE_WITHIN_S = 1.0
JOIN_BELOW_BYTES = 64 * 1024
_MAX_INTERIM_ANSWERS = 16
_WITH_BODY = frozenset({b"POST", b"PUT", b"PATCH"})

# Plain numbers: a member of an Enum is looked up in its class each time it is compared.
_DIALLING = 0
_HEAD = 1  # waiting for the head of the answer
_FIRST = 2  # waiting for the first byte of a body that is relayed as it comes
_WHOLE = 3  # reading a body that is sent in one piece
RELAY = 4
TUNNEL = 5
_OVER = 6


class Attempt:
    """`reply` is the head of the answer once there is one, `reply_length` the length of its body if it was told."""

    __slots__ = (
        "_buffer",
        "_dialling",
        "_exchange",
        "_interims",
        "_parts",
        "_size",
        "booking",
        "connection",
        "phase",
        "reply",
        "reply_length",
        "since",
        "walker",
    )

    def __init__(self, exchange: ProxiedRequest, booking: Booking, now: float) -> None:
        self._exchange = exchange
        self.booking = booking
        self.since = now
        self.connection: TargetConnection | None = None
        self.phase = _DIALLING
        self.reply: ResponseHead
        self.reply_length: int | None = None
        self.walker: BodyDecoder
        self._dialling: Dialling | None = None
        self._buffer = b""
        self._interims = 0

    # --- sending

    def start(self, fresh: bool) -> None:
        """On an idle connection, unless it has to be `fresh`."""
        proxy = self._exchange.proxy
        pool = proxy.pools.of(self.booking.target)
        connection = None if fresh or self._exchange.head.websocket else pool.take()
        if connection is not None:
            self._send(connection)
        else:
            self._dialling = Dialling(
                pool, proxy.limits.connect_timeout_s, proxy.clock, self._dialled, self._not_dialled
            )

    def _dialled(self, connection: TargetConnection) -> None:
        self._dialling = None
        self._send(connection)

    def _not_dialled(self, error: Exception) -> None:
        self._dialling = None
        self._exchange.attempt_failed(Failure.UNREACHABLE, type(error).__name__)

    def _send(self, connection: TargetConnection) -> None:
        exchange = self._exchange
        head, client = exchange.head, exchange.client
        pool = connection.pool
        self.connection = connection  # also if nothing is sent: it must not be lost
        asked = exchange.outgoing()
        if asked is None:
            return
        path, body = asked
        connection.sink = self
        self.phase = _HEAD
        if client.body_left:
            if head.chunked:
                framing, body = b"Transfer-Encoding: chunked\r\n", chunk(body) if body else b""
            else:
                framing = b"Content-Length: %d\r\n" % client.length
        elif body or head.method in _WITH_BODY:
            framing = b"Content-Length: %d\r\n" % len(body)
        else:
            framing = b""
        if exchange.span:
            framing = b"Traceparent: %b\r\n%b" % (exchange.span.encode("latin-1"), framing)
        host = pool.name if head.host else pool.address
        sent = request_bytes(head, client.hop, exchange.request_id, path, pool.base_path, host, framing)
        if client.body_left:
            connection.transport.writelines((sent, body))
            client.resume_reading(2)  # and more comes through `more_body`
        elif len(body) < JOIN_BELOW_BYTES:
            connection.unsent = sent + body
            exchange.proxy.outbox.add(connection)
        else:
            connection.transport.writelines((sent, body))

    def more_body(self, part: bytes, last: bool) -> bool:
        """The rest of a body that is passed on as it comes; False if there is no connection for it."""
        connection = self.connection
        if connection is None:
            return False
        if self._exchange.head.chunked:
            part = (chunk(part) if part else b"") + (b"0\r\n\r\n" if last else b"")
        if part:
            connection.transport.write(part)
        return True

    # --- the answer

    def target_data(self, data: bytes) -> None:
        phase = self.phase
        if phase == RELAY:
            relay = self._exchange.relay
            if relay is not None:
                relay.data(data)
        elif phase == _HEAD:
            self._take_head(self._buffer + data if self._buffer else data)
        elif phase == _WHOLE:
            self._take_whole(data)
        elif phase == _FIRST:
            self._begin(data)
        elif phase == TUNNEL:
            self._exchange.client.transport.write(data)

    def _take_head(self, data: bytes) -> None:
        exchange = self._exchange
        proxy = exchange.proxy
        end = data.find(END)
        if end < 0 or end > proxy.limits.max_head_bytes:
            if len(data) > proxy.limits.max_head_bytes:
                exchange.attempt_failed(Failure.MALFORMED, "the head of the answer is too long")
            else:
                self._buffer = data
            return
        try:
            reply, length = proxy.heads.answer(data[: end + 4], proxy.limits.max_headers)
        except HeadError as error:
            exchange.attempt_failed(Failure.MALFORMED, str(error))
            return
        rest = data[end + 4 :]
        status = reply.status
        if status < 200:
            self._take_interim(reply, rest)
            return
        self.reply, self.reply_length = reply, length
        # The client has the beginning of a stream already?
        if exchange.relay is not None and (length == 0 or not is_resumable(reply)):
            why = f"HTTP status {status} instead of the rest of a stream"
            exchange.attempt_failed(Failure.UNFIT, why)
            return
        if exchange.head.method == b"HEAD" or status in (204, 304):
            self._finish(b"", rest)
            return
        if length is not None:
            if exchange.relay is None and length <= WHOLE_UP_TO_BYTES:
                if len(rest) >= length:
                    self._finish(rest[:length], rest[length:])
                else:
                    self._read_whole(LengthDecoder(length), rest)
                return
            self.walker = LengthDecoder(length)
        elif reply.chunked:
            if status in RETRY_STATUSES or reply.content_type.startswith(b"application/json"):
                self._read_whole(None, rest)
                return
            self.walker = ChunkedDecoder()
        else:
            self.walker = CloseDelimitedDecoder()
            if status in RETRY_STATUSES:
                self._read_whole(self.walker, rest)
                return
        self.phase = _FIRST
        if rest:
            self._begin(rest)

    def _take_interim(self, reply: ResponseHead, rest: bytes) -> None:
        """100 Continue and its like are for us; 101 opens a tunnel if one was asked for."""
        exchange = self._exchange
        if reply.status == 101:
            if not exchange.head.websocket:
                exchange.attempt_failed(Failure.MALFORMED, "it switches protocols unasked")
            elif opens_websocket(exchange.head, reply):
                self.phase = TUNNEL
                exchange.open_tunnel(reply, rest)
            else:
                exchange.websocket_refused()
            return
        self._interims += 1
        if self._interims > _MAX_INTERIM_ANSWERS:
            exchange.attempt_failed(Failure.MALFORMED, "too many interim answers")
            return
        self._buffer = b""
        if rest:
            self._take_head(rest)

    def _read_whole(self, walker: BodyDecoder | None, rest: bytes) -> None:
        """Collect the body; without a walker it is chunked."""
        self.phase = _WHOLE
        self._parts: list[bytes] = []
        self._size = 0
        self.walker = ChunkedDecoder(self._parts) if walker is None else walker
        if rest:
            self._take_whole(rest)

    def _take_whole(self, data: bytes) -> None:
        walker = self.walker
        try:
            end = walker.feed(data)
        except FramingError as error:
            self._exchange.attempt_failed(Failure.MALFORMED, str(error))
            return
        if not isinstance(walker, ChunkedDecoder):
            self._parts.append(data if end < 0 else data[:end])
        self._size += len(data)
        if end >= 0:
            self._finish(b"".join(self._parts), data[end:])
        elif self._size > WHOLE_UP_TO_BYTES:  # too long to be kept until it is whole
            collected = b"".join(self._parts)
            if isinstance(walker, ChunkedDecoder):
                walker.payloads = None
            self.phase = RELAY
            self._exchange.begin_relay(self).collected(collected)

    def _begin(self, data: bytes) -> None:
        """The first bytes of a body that is passed on as it comes."""
        reply = self.reply
        if data.startswith(b"0\r\n") and reply.chunked and self._must_speak():
            self._exchange.attempt_failed(Failure.EMPTY, "HTTP status 200 without a body")
            return
        self.phase = RELAY
        self._exchange.begin_relay(self).data(data)

    def _finish(self, body: bytes, rest: bytes) -> None:
        """The whole answer is here; `rest` is what came behind it, and should not have."""
        if not body and self._must_speak():
            self._exchange.attempt_failed(Failure.EMPTY, "HTTP status 200 without a body")
            return
        self.give_back(reusable=not rest)
        self._exchange.answered_whole(self.reply, body)

    def _must_speak(self) -> bool:
        """Whether this answer has to have a body: a model that says nothing has not answered."""
        head = self._exchange.head
        return self.reply.status == 200 and head.method == b"POST" and for_model(head.path)

    def target_lost(self, error: Exception | None) -> None:
        """The connection has ended; whether that is an end or a failure depends on where we are."""
        exchange = self._exchange
        exchange.halt()
        connection, self.connection = self.connection, None
        why = type(error).__name__ if error else "the connection ended"
        phase = self.phase
        if phase == TUNNEL:
            exchange.close_tunnel()
        elif phase == RELAY:
            relay = exchange.relay
            if relay is not None and (error is not None or not relay.ended()):
                exchange.broke(Failure.DIED, why)
        elif phase in (_WHOLE, _FIRST) and isinstance(self.walker, CloseDelimitedDecoder) and error is None:
            self._finish(b"".join(self._parts) if phase == _WHOLE else b"", b"")
        elif phase != _OVER:
            silent = phase == _HEAD and not self._buffer and not self._interims
            stale = silent and connection is not None and connection.used
            young = exchange.proxy.clock() - self.since < STALE_WITHIN_S
            exchange.attempt_failed(Failure.STALE if stale and young else Failure.DIED, why)

    # --- the end

    def drop(self) -> None:
        """Nobody waits for it any more."""
        exchange = self._exchange
        exchange.halt()  # before either socket is closed: its number may be another's a moment later
        self.phase = _OVER
        if self._dialling is not None:
            self._dialling.abandon()
            self._dialling = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.drop()
        client = exchange.client
        if client.body_left:
            client.pause_reading(2)  # until another target takes it
        else:
            client.resume_reading(2)

    def give_back(self, reusable: bool) -> None:
        """The answer has been read to its end."""
        connection, self.connection = self.connection, None
        self.phase = _OVER
        if connection is None:
            return
        reply = self.reply
        if reply.status == 204 and (self.reply_length or reply.chunked):
            reusable = False  # has it a body after all?
        if reusable and reply.keep_alive and not self._exchange.client.body_left:
            connection.pool.give(connection, self._exchange.proxy.clock())
        else:
            connection.drop()

    def close(self) -> None:
        """Send what was written, and close."""
        connection, self.connection = self.connection, None
        self.phase = _OVER
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
        self._exchange.client.pause_reading(2)

    def target_drained(self) -> None:
        self._exchange.client.resume_reading(2)
