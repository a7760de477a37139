"""From a begun answer to the client: bytes pass as they come, with back-pressure, until either side ends it.

A write that the client has no room for pauses the target's connection, so a slow client slows its engine and not the agent.
Nothing is copied, parsed or timed per chunk beyond what finds the end of the body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lb.http.body_framing import (
    LAST_CHUNK,
    BodyDecoder,
    ChunkedDecoder,
    CloseDelimitedDecoder,
    FramingError,
    LengthDecoder,
    chunk,
)
from lb.http.messages import ResponseHead, response_bytes
from lb.stream.token_usage import Tokens

if TYPE_CHECKING:
    from lb.proxy.request import ProxiedRequest


class Relay(Protocol):
    """What an exchange and the patrol know of the way an answer goes. The first byte has been there when it is made."""

    blocked: bool  # the client has no room
    silent_s: float  # for how long nothing has come, as far as the patrol knows
    chunks: int
    sent_bytes: int  # of the body

    def tokens(self) -> Tokens | None:
        """How long prompt and answer were, if the answer told."""
        ...

    def data(self, data: bytes) -> None:
        """Bytes of the target's connection."""
        ...

    def pulse(self) -> bool:
        """Whether something has come since this was last asked."""
        ...

    def halt(self) -> None:
        """The target's connection is about to be closed, or taken away."""
        ...

    def collected(self, body: bytes) -> None:
        """The beginning of the body, without framing: the walker has walked over it already."""
        ...

    def ended(self) -> bool:
        """The target's connection has ended; False if the body had not."""
        ...

    def may_continue(self, *, now_or_later: bool = False) -> bool:
        """Whether the answer could go on without its target: from another that has room, or (`now_or_later`) from any that
        is well."""
        ...

    def resume(self, why: str) -> bool:
        """Prepare the exchange for going on elsewhere; False if the answer is over instead, one way or another."""
        ...

    def fail(self, code: str, message: str) -> None:
        """End the answer as an error."""
        ...


class PlainRelay:
    """Any answer, as it is."""

    __slots__ = (
        "_chunks",
        "_exchange",
        "_frame",
        "_heard",
        "_walker",
        "_write",
        "blocked",
        "chunks",
        "sent_bytes",
        "silent_s",
    )

    def __init__(
        self, exchange: ProxiedRequest, answer: ResponseHead, walker: BodyDecoder, length: int | None = None
    ) -> None:
        self._exchange = exchange
        self._walker = walker
        self._heard = True
        self.blocked = False
        self.silent_s = 0.0
        self.chunks = 0
        self.sent_bytes = 0
        self._frame = begin_answer(exchange, answer, walker, length)
        self._chunks = self._frame and not isinstance(
            walker, ChunkedDecoder
        )  # the client gets chunks of ours
        self._write = exchange.client.transport.write

    def data(self, data: bytes) -> None:
        self._heard = True
        self.chunks += 1
        walker = self._walker
        try:
            end = walker.feed(data)
        except FramingError as error:
            self._exchange.broke_framing(str(error))
            return
        body = data if end < 0 or end == len(data) else data[:end]
        self.sent_bytes += len(body)
        if self._frame:
            self._write_framed(body)
        else:
            self._write(body)
        if end >= 0:
            if self._chunks:
                self._write(LAST_CHUNK)
            self._exchange.relayed(rest=end < len(data))

    def _write_framed(self, body: bytes) -> None:
        walker = self._walker
        if isinstance(walker, ChunkedDecoder):
            payloads = walker.payloads
            assert payloads is not None  # noqa: S101 (for the type checker)
            body = b"".join(payloads)
            payloads.clear()
        if body:
            self._write(chunk(body) if self._chunks else body)

    def collected(self, body: bytes) -> None:
        walker = self._walker
        if isinstance(walker, ChunkedDecoder) and not self._frame:
            # It may stand in the midst of a chunk whose size line has been taken away: all is framed anew.
            self._frame = self._chunks = True
            walker.payloads = []
        if body:
            self._write(chunk(body) if self._chunks else body)

    def ended(self) -> bool:
        if not isinstance(self._walker, CloseDelimitedDecoder):
            return False
        if self._chunks:
            self._write(LAST_CHUNK)
        self._exchange.relayed(rest=False, reusable=False)
        return True

    def tokens(self) -> Tokens | None:
        return None

    def pulse(self) -> bool:
        heard, self._heard = self._heard, False
        return heard

    def halt(self) -> None: ...

    def may_continue(self, *, now_or_later: bool = False) -> bool:
        return False

    def resume(self, why: str) -> bool:
        self._exchange.cut(why)
        return False

    def fail(self, code: str, message: str) -> None:
        self._exchange.cut(code)


def begin_answer(
    exchange: ProxiedRequest, answer: ResponseHead, walker: BodyDecoder, length: int | None = None
) -> bool:
    """Send the head; True if the body has to be framed anew: chunked for a body that ends with its connection, not
    chunked for a client of HTTP/1.0."""
    client = exchange.client
    frame = False
    if isinstance(walker, LengthDecoder):
        framing = b"Content-Length: %d\r\n" % (length or 0)
    elif exchange.head.http_1_0:
        client.closing = True  # the end of the connection is the end of the body
        framing = b""
        if isinstance(walker, ChunkedDecoder):
            frame = True
            walker.payloads = []
    else:
        framing = b"Transfer-Encoding: chunked\r\n"
        frame = isinstance(walker, CloseDelimitedDecoder)
    head = response_bytes(answer, exchange.request_id, framing + exchange.connection_line())
    exchange.status = answer.status
    client.transport.write(head)
    return frame
