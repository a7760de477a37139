"""Connections from clients: requests in, one at a time, and the bytes of answers out.

Bounded in everything a client can make long: heads (`max_head_bytes`, `max_headers`, `head_timeout_s`), bodies
(`max_body_bytes`, `idle_timeout_s` between two parts), idleness (`keepalive_s`), and what it sends ahead of its answer
(reading stops). Bodies up to `buffer_bytes` are collected, so that they can be sent again; of longer ones only the
first part is, and the rest is passed on as the target takes it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from lb.http import error_responses
from lb.http.body_framing import ChunkedDecoder, FramingError
from lb.http.messages import END, HeadError, Hop, RequestHead

if TYPE_CHECKING:
    from lb.proxy.context import Proxy
    from lb.proxy.request import ProxiedRequest

WRITE_HIGH_WATER = 64 * 1024
MAX_AHEAD_BYTES = 256 * 1024  # what a client may send before its answer is over

_LINGER_S = 2.0


# Plain numbers: a member of an Enum is looked up in its class each time it is compared.
_IDLE = 0  # between two requests
_HEAD = 1  # a head has begun
_BODY = 2  # collecting a body
_ANSWER = 3  # the exchange has the word
_TUNNEL = 4
_OVER = 5


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_ahead",
        "_deadline",
        "_full",
        "_looks_at",
        "_paused_by",
        "_phase",
        "_timer",
        "body_left",
        "closing",
        "exchange",
        "head",
        "hop",
        "kept",
        "length",
        "parts",
        "proxy",
        "size",
        "transport",
        "unsent",
        "walker",
    )

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.exchange: ProxiedRequest | None = None
        self.closing = False  # after the answer under way
        self.head: RequestHead | None = None
        self.walker: ChunkedDecoder | None = None
        self.parts: list[bytes] = []  # where the walker leaves what it finds
        self.kept = bytearray()  # of a body that is being collected; one object, however small its pieces
        self.size = 0  # of the body so far
        self.unsent = b""  # of an answer, for `lb.http.write_batch`
        self.body_left = False  # the exchange has begun before the body was over
        self._ahead = b""
        self._full = False  # it does not take what is written to it
        self._phase = _IDLE
        self._paused_by = 0

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        name = transport.get_extra_info("peername")
        peer = str(name[0]).encode() if name else b"unknown"
        scheme = b"https" if transport.get_extra_info("sslcontext") is not None else b"http"
        self.hop = Hop(b"[%b]" % peer if b":" in peer else peer, scheme)
        self.proxy.clients.add(self)
        self._deadline = self.proxy.clock() + self.proxy.limits.head_timeout_s
        self._look_later()

    def data_received(self, data: bytes) -> None:
        if self.unsent:
            self.flush()  # what comes now may be answered at once
        phase = self._phase
        if phase == _ANSWER:
            self._take_ahead(data)
        elif phase == _BODY:
            self._take_body(data)
        elif phase == _TUNNEL:
            if self.exchange is not None:
                self.exchange.client_data(data)
        elif phase != _OVER:
            self._take_head(self._ahead + data if self._ahead else data)

    def eof_received(self) -> bool:
        # Half a close is a close: whoever shuts down his writing side before the answer has mostly left, and cannot be
        # told from one who has.
        if self.exchange is not None:
            self.exchange.halt()
        self.flush()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self.proxy.clients.discard(self)
        phase, self._phase = self._phase, _OVER
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_lost()
        elif phase == _BODY:
            self.proxy.metrics.counts.client_gone += 1

    def pause_writing(self) -> None:
        self._full = True
        if self.exchange is not None:
            self.exchange.client_full()
        else:
            self.pause_reading(4)

    def resume_writing(self) -> None:
        self._full = False
        self.resume_reading(4)
        if self.exchange is not None:
            self.exchange.client_drained()
        elif self._phase == _ANSWER:
            self.proxy.loop.call_soon(self._next_head)

    # --- requests in

    def _take_head(self, data: bytes) -> None:
        limits = self.proxy.limits
        if self._phase == _IDLE:
            data = data.lstrip(b"\r\n")  # RFC 9112 §2.2: some clients end a body with a line too many
            if not data:
                return
            self._phase = _HEAD
            self._deadline = self.proxy.clock() + limits.head_timeout_s
        end = data.find(END, max(0, len(self._ahead) - 3))
        if end < 0 or end > limits.max_head_bytes:
            if not data[:1].isalpha():  # a handshake of TLS, say, which would wait for an answer
                self._refuse(400, "malformed_request", "The head of the request is malformed.")
                return
            if len(data) > limits.max_head_bytes:
                text = f"The head of the request exceeds {limits.max_head_bytes} bytes."
                self._refuse(431, "head_too_large", text)
                return
            self._ahead = data
            self._look_sooner()
            return
        self._ahead = b""
        try:
            head, length = self.proxy.heads.request(data[: end + 4], limits.max_headers)
        except HeadError as error:
            self._refuse(error.status, error.code, str(error))
            return
        self.proxy.arrived()
        self.closing = not head.keep_alive
        self.head, self.length = head, length
        rest = data[end + 4 :]
        if length > limits.max_body_bytes:
            self._refuse_body()
            return
        if length == len(rest) and length <= limits.buffer_bytes and not head.chunked:
            self._begin(rest)  # as nearly always: all of it is here
            return
        if head.expects and not rest and (length or head.chunked):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._phase = _BODY
        self.size = 0
        self.parts = []
        self.kept = bytearray()
        self.walker = ChunkedDecoder(self.parts) if head.chunked else None
        self._deadline = self.proxy.clock() + limits.idle_timeout_s
        self._take_body(rest)

    def _take_body(self, data: bytes) -> None:
        """More of the body, while it is collected."""
        head = self.head
        assert head is not None  # noqa: S101 (for the type checker)
        limits = self.proxy.limits
        if self.walker is not None:
            try:
                end = self.walker.feed(data)
            except FramingError:
                self._refuse(400, "malformed_body", "The body is not well-formed.")
                return
            for part in self.parts:
                self.kept += part
            self.parts.clear()
        else:
            end = self.length - len(self.kept)
            end = -1 if len(data) < end else end
            self.kept += data if end < 0 else data[:end]
        self.size = len(self.kept)
        if self.size > limits.max_body_bytes:
            self._refuse_body()
            return
        self._deadline = self.proxy.clock() + limits.idle_timeout_s
        if end >= 0:
            self._ahead = data[end:]
            self._begin(self._take_kept())
        elif self.size > limits.buffer_bytes:
            self.body_left = True
            self._begin(self._take_kept())

    def _take_kept(self) -> bytes:
        kept, self.kept = bytes(self.kept), bytearray()
        return kept

    def _begin(self, body: bytes) -> None:
        head = self.head
        assert head is not None  # noqa: S101 (for the type checker)
        self._phase = _ANSWER
        self.proxy.begin(self, head, body)

    def _take_ahead(self, data: bytes) -> None:
        """Something comes while the exchange has the word: the rest of a long body, or the next request."""
        if self.body_left:
            self._pass_body(data)
            return
        self._ahead += data
        if len(self._ahead) > MAX_AHEAD_BYTES:
            self.pause_reading(1)  # until the next request is begun

    def _pass_body(self, data: bytes) -> None:
        """The rest of a body that is too long to be kept."""
        head, exchange, limits = self.head, self.exchange, self.proxy.limits
        assert head is not None  # noqa: S101 (for the type checker)
        if self.walker is not None:
            try:
                end = self.walker.feed(data)
            except FramingError:
                self._abort_body("malformed_body")
                return
            part = b"".join(self.parts)
            self.parts.clear()
        else:
            end = self.length - self.size
            end = -1 if len(data) < end else end
            part = data if end < 0 else data[:end]
        self.size += len(part)
        if self.size > limits.max_body_bytes:
            self._abort_body("body_too_large")
            return
        if end >= 0:
            self.body_left = False
            self._ahead = data[end:]
        if exchange is not None:
            exchange.more_body(part, last=end >= 0)

    def _abort_body(self, code: str) -> None:
        self.closing = True
        if self.exchange is not None:
            self.exchange.bad_body(code)
        else:
            self.transport.close()

    # --- answers out

    def next(self) -> None:
        """The answer is over: on to the next request, or to the end."""
        self.exchange = None
        if self.body_left:  # what is not read to its end would be taken for the next request
            self._linger()
        elif self.closing or self.proxy.closing:
            self._close()
        else:
            self.head = None
            self._deadline = self.proxy.clock() + self.proxy.limits.keepalive_s
            if self._full:
                self.pause_reading(4)  # answers that nobody reads must not pile up
            if self._ahead:
                # In a turn of its own: a thousand requests in one packet must not be a thousand frames on the stack.
                self._phase = _ANSWER
                self.proxy.loop.call_soon(self._next_head)
            else:
                self._phase = _IDLE
                if self._paused_by:
                    self.resume_reading(3)

    def _next_head(self) -> None:
        """Go on with what was sent ahead, unless the client does not even take what it has been answered."""
        if self._phase != _ANSWER or self.exchange is not None or self._full:
            return
        if self.closing or self.proxy.closing:
            self._close()
            return
        self._phase = _IDLE
        ahead, self._ahead = self._ahead, b""
        if self._paused_by:
            self.resume_reading(3)
        self._take_head(ahead)

    def send_soon(self, answer: bytes) -> None:
        """A whole answer, to be sent at the end of this turn."""
        self.unsent = answer
        self.proxy.outbox.add(self)

    def flush(self) -> None:
        unsent, self.unsent = self.unsent, b""
        if unsent and not self.transport.is_closing():
            self.transport.write(unsent)

    def tunnel(self) -> bytes:
        """From now on all bytes go to the exchange as they are; what came ahead is returned."""
        self._phase = _TUNNEL
        ahead, self._ahead = self._ahead, b""
        self.resume_reading(1)
        return ahead

    def hang_up(self, *, abort: bool = False) -> None:
        """No further request, and no end mark for the answer under way."""
        self.exchange = None
        if abort:
            self._phase = _OVER
            self.transport.abort()
        else:
            self._close()

    def close_soon(self, lame_s: float) -> None:
        """The agent closes: others go after their answer, an idle connection once no request has come for `lame_s`: one
        may be on its way, and would be lost if we closed now."""
        self.closing = True
        if self._phase != _IDLE:
            return
        if lame_s <= 0:
            self._close()
        else:
            self._deadline = min(self._deadline, self.proxy.clock() + lame_s)
            self._look_sooner()

    def pause_reading(self, who: int) -> None:
        """`who` is a bit: 1 the bound on what is sent ahead, 2 a target that is slow to take a body, 4 a client that does
        not read."""
        if not self._paused_by and not self.transport.is_closing():
            self.transport.pause_reading()
        self._paused_by |= who

    def resume_reading(self, who: int) -> None:
        if self._paused_by & who:
            self._paused_by &= ~who
            if not self._paused_by and not self.transport.is_closing():
                self.transport.resume_reading()

    def _refuse_body(self) -> None:
        text = f"The body exceeds {self.proxy.limits.max_body_bytes} bytes."
        self._refuse(413, "body_too_large", text)

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer here and now, and hear no more from this connection."""
        self.proxy.refused(status)
        self.transport.write(error_responses.raw_error(status, code, message, close=True))
        self._linger()

    def _linger(self) -> None:
        """Let the client read our answer although it is still sending: closing with unread bytes resets the
        connection, and a reset may overtake the answer."""
        self._phase = _OVER
        self._ahead = b""
        self.flush()
        self.resume_reading(7)  # and drop it
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        self._deadline = self.proxy.clock() + _LINGER_S
        self._look_sooner()

    def _close(self) -> None:
        """Close when the client has taken what was written to it, for which it has the idle timeout."""
        self._phase = _OVER
        self._ahead = b""
        self._deadline = self.proxy.clock() + self.proxy.limits.idle_timeout_s
        self.flush()
        self.transport.close()

    # --- time

    def _look_later(self) -> None:
        # Remembered, because uvloop's handle of a timer that is due at once cannot say when.
        self._looks_at = self._deadline
        self._timer = self.proxy.loop.call_at(self._deadline, self._look)

    def _look_sooner(self) -> None:
        if self._looks_at > self._deadline:
            self._timer.cancel()
            self._look_later()

    def _look(self) -> None:
        """One timer per connection, not one per request: it looks at the deadline in force, and goes on waiting."""
        now = self.proxy.clock()
        phase = self._phase
        if self.exchange is not None:  # which has a clock of its own
            self._looks_at = now + max(1.0, self.proxy.limits.head_timeout_s)
            self._timer = self.proxy.loop.call_at(self._looks_at, self._look)
            return
        if now >= self._deadline:
            if phase == _HEAD:
                self._refuse(408, "head_timeout", "The head of the request did not arrive in time.")
            elif phase == _BODY:
                self._refuse(408, "body_timeout", "The body did not arrive in time.")
            elif phase == _IDLE:
                self._close()
            else:
                self.transport.abort()
                return
        self._look_later()
