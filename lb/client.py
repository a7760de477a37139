"""Connections from clients: requests in, one at a time, and the bytes of answers out.

Bounded in everything a client can make long: heads (`max_head_bytes`, `max_headers`, `head_timeout_s`), bodies
(`max_body_bytes`, `idle_timeout_s` between two parts), idleness (`keepalive_s`), and what it sends ahead of its answer
(reading stops). Bodies up to `buffer_bytes` are collected, so that they can be sent again; of longer ones only the
first part is, and the rest is passed on as the target takes it.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, cast

from lb import answers
from lb.framing import ChunkWalker, FramingError
from lb.heads import END, HeadError, Hop, RequestHead

if TYPE_CHECKING:
    from lb.exchange import Exchange
    from lb.proxy import Proxy

WRITE_HIGH_WATER = 64 * 1024
MAX_AHEAD_BYTES = 256 * 1024  # what a client may send before its answer is over

_LINGER_S = 2.0


class _Phase(Enum):
    IDLE = "idle"  # between two requests
    HEAD = "head"  # a head has begun
    BODY = "body"  # collecting a body
    ANSWER = "answer"  # the exchange has the word
    TUNNEL = "tunnel"
    OVER = "over"


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_ahead",
        "_deadline",
        "_paused_by",
        "_phase",
        "_timer",
        "body",
        "body_left",
        "closing",
        "exchange",
        "head",
        "hop",
        "length",
        "parts",
        "proxy",
        "size",
        "transport",
        "walker",
    )

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.exchange: Exchange | None = None
        self.closing = False  # after the answer under way
        self.head: RequestHead | None = None
        self.walker: ChunkWalker | None = None
        self.parts: list[bytes] = []
        self.size = 0  # of the body so far
        self.body_left = False  # the exchange has begun before the body was over
        self._ahead = b""
        self._phase = _Phase.IDLE
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
        self._timer = self.proxy.loop.call_at(self._deadline, self._look)

    def data_received(self, data: bytes) -> None:
        phase = self._phase
        if phase is _Phase.ANSWER:
            self._take_ahead(data)
        elif phase is _Phase.BODY:
            self._take_body(data)
        elif phase is _Phase.TUNNEL:
            if self.exchange is not None:
                self.exchange.client_data(data)
        elif phase is not _Phase.OVER:
            self._take_head(self._ahead + data if self._ahead else data)

    def eof_received(self) -> bool:
        # Half a close is a close: whoever shuts down his writing side before the answer has mostly left, and cannot be
        # told from one who has.
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self.proxy.clients.discard(self)
        phase, self._phase = self._phase, _Phase.OVER
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_lost()
        elif phase is _Phase.BODY:
            self.proxy.metrics.counts.client_gone += 1

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.client_full()

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.client_drained()

    # --- requests in

    def _take_head(self, data: bytes) -> None:
        limits = self.proxy.limits
        if self._phase is _Phase.IDLE:
            data = data.lstrip(b"\r\n")  # RFC 9112 §2.2: some clients end a body with a line too many
            if not data:
                return
            self._phase = _Phase.HEAD
            self._deadline = self.proxy.clock() + limits.head_timeout_s
        end = data.find(END, max(0, len(self._ahead) - 3))
        if end < 0 or end > limits.max_head_bytes:
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
        self._phase = _Phase.BODY
        self.size = 0
        self.parts = []
        self.walker = ChunkWalker(self.parts) if head.chunked else None
        self._deadline = self.proxy.clock() + limits.idle_timeout_s
        self._take_body(rest)

    def _take_body(self, data: bytes) -> None:
        """More of the body, while it is collected."""
        head = self.head
        assert head is not None  # noqa: S101 (for the type checker)
        limits = self.proxy.limits
        parts = self.parts
        if self.walker is not None:
            before = len(parts)
            try:
                end = self.walker.feed(data)
            except FramingError:
                self._refuse(400, "malformed_body", "The body is not well-formed.")
                return
            self.size += sum(map(len, parts[before:]))
        else:
            end = self.length - self.size
            if len(data) < end:
                end = -1
                parts.append(data)
                self.size += len(data)
            else:
                parts.append(data[:end])
                self.size += end
        if self.size > limits.max_body_bytes:
            self._refuse_body()
            return
        self._deadline = self.proxy.clock() + limits.idle_timeout_s
        if end >= 0:
            self._ahead = data[end:]
            self.parts = []
            self._begin(b"".join(parts))
        elif self.size > limits.buffer_bytes:
            self.parts = []
            if self.walker is not None:
                self.walker.payloads = self.parts
            self.body_left = True
            self._begin(b"".join(parts))

    def _begin(self, body: bytes) -> None:
        head = self.head
        assert head is not None  # noqa: S101 (for the type checker)
        self._phase = _Phase.ANSWER
        self.proxy.begin(self, head, body)

    def _take_ahead(self, data: bytes) -> None:
        """Something comes while the exchange has the word: the rest of a long body, or the next request."""
        if self.body_left:
            self._pass_body(data)
            return
        self._ahead += data
        if len(self._ahead) > MAX_AHEAD_BYTES:
            self.pause_reading(1)

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
        self.body_left = False
        self.closing = True
        if self.exchange is not None:
            self.exchange.bad_body(code)
        else:
            self.transport.close()

    # --- answers out

    def next(self) -> None:
        """The answer is over: on to the next request, or to the end."""
        self.exchange = None
        if self.closing or self.body_left or self.proxy.closing:
            # A body that was not read to its end would be taken for the next request.
            self._phase = _Phase.OVER
            if self.body_left:
                self._linger()
            else:
                self.transport.close()
            return
        self.head = None
        self._phase = _Phase.IDLE
        self._deadline = self.proxy.clock() + self.proxy.limits.keepalive_s
        if self._paused_by & 1:
            self.resume_reading(1)
        if self._ahead:
            ahead, self._ahead = self._ahead, b""
            self._take_head(ahead)

    def tunnel(self) -> bytes:
        """From now on all bytes go to the exchange as they are; what came ahead is returned."""
        self._phase = _Phase.TUNNEL
        ahead, self._ahead = self._ahead, b""
        return ahead

    def hang_up(self, *, abort: bool = False) -> None:
        """No further request, and no end mark for the answer under way."""
        self.exchange = None
        self._phase = _Phase.OVER
        if abort:
            self.transport.abort()
        else:
            self.transport.close()

    def close_soon(self) -> None:
        """The agent closes: an idle connection goes now, others after their answer."""
        self.closing = True
        if self._phase is _Phase.IDLE:
            self._phase = _Phase.OVER
            self.transport.close()

    def pause_reading(self, who: int) -> None:
        """`who` is a bit: 1 the bound on what is sent ahead, 2 a target that is slow to take a body."""
        if not self._paused_by:
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
        self.transport.write(answers.raw_error(status, code, message, close=True))
        self._phase = _Phase.OVER
        self._ahead = b""
        self._linger()

    def _linger(self) -> None:
        """Let the client read our answer although it is still sending: closing with unread bytes resets the
        connection, and a reset may overtake the answer."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.proxy.clock() + _LINGER_S
        self._look_sooner()

    # --- time

    def _look_sooner(self) -> None:
        if self._timer.when() > self._deadline:
            self._timer.cancel()
            self._timer = self.proxy.loop.call_at(self._deadline, self._look)

    def _look(self) -> None:
        """One timer per connection, not one per request: it looks at the deadline in force, and goes on waiting."""
        now = self.proxy.clock()
        phase = self._phase
        if phase in (_Phase.ANSWER, _Phase.TUNNEL):
            self._timer = self.proxy.loop.call_later(max(1.0, self.proxy.limits.head_timeout_s), self._look)
            return
        if now < self._deadline:
            self._timer = self.proxy.loop.call_at(self._deadline, self._look)
        elif phase is _Phase.HEAD:
            self._refuse(408, "head_timeout", "The head of the request did not arrive in time.")
        elif phase is _Phase.BODY:
            self._refuse(408, "body_timeout", "The body did not arrive in time.")
        elif phase is _Phase.IDLE:
            self._phase = _Phase.OVER
            self.transport.close()
        else:
            self.transport.abort()
