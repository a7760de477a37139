"""From the first byte of a response to its end: bytes pass as they come, with back-pressure, until either side stops it.

A write that the client has no room for pauses the target's connection, so a slow client slows its engine and not the agent.
Nothing is copied, parsed or timed per chunk beyond what finds the end of the body.
"""

from __future__ import annotations

from lb.core.failures import Failure
from lb.http.body_framing import (
    LAST_CHUNK,
    BodyDecoder,
    ChunkedDecoder,
    CloseDelimitedDecoder,
    FramingError,
    LengthDecoder,
    chunk,
)
from lb.http.messages import ResponseHead
from lb.proxy.fast_path import Forwarding, ForwardingMode
from lb.proxy.forwarded_relay import TAIL_BYTES, ForwardedRelay
from lb.proxy.ports import RelayHost
from lb.stream.early_stream import KEEP_ALIVE
from lb.stream.token_usage import Tokens, prompt_tokens_in, usage_of

_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_EVENT_ENDS_IN_CHUNKS = (b"\n\n\r\n", b"\r\n\r\n\r\n")


class PlainRelay(ForwardedRelay):
    """A relay that changes nothing in a response. Chunked streams of events go through the fast path where there is one."""

    __slots__ = ("_chunks", "_counts", "_decoder", "_frame", "_prompt_tokens", "_tail")

    def __init__(
        self, request: RelayHost, response: ResponseHead, decoder: BodyDecoder, length: int | None = None
    ) -> None:
        super().__init__(request, ForwardingMode.CHUNKS, TAIL_BYTES)
        self._decoder = decoder
        self._frame = begin_response(request, response, decoder, length)
        # Whether the client gets chunks that this relay frames.
        self._chunks = self._frame and not isinstance(decoder, ChunkedDecoder)
        self._counts = _has_events(response)
        self._prompt_tokens = 0
        self._tail = b""  # of a stream of events

    def data(self, data: bytes) -> None:
        self._has_received = True
        self.chunks += 1
        decoder = self._decoder
        try:
            end = decoder.feed(data)
        except FramingError as error:
            self._request.broke(Failure.MALFORMED, str(error))
            return
        body = data if end < 0 or end == len(data) else data[:end]
        self.sent_bytes += len(body)
        if self._counts:
            self._count(body)
        if self._frame:
            self._write_framed(body)
        else:
            self._write(body)
        if end >= 0:
            if self._chunks:
                self._write(LAST_CHUNK)
            self._request.relayed(rest=end < len(data))
        elif self._may_forward():
            self._expect_forwarding()

    def _count(self, body: bytes) -> None:
        if not self._tail:
            self._prompt_tokens = prompt_tokens_in(body)
        self._counter.add(body)
        self._tail = (self._tail + body)[-TAIL_BYTES:]

    def _may_forward(self) -> bool:
        decoder = self._decoder
        return self._counts and not self._frame and isinstance(decoder, ChunkedDecoder) and decoder.between

    def _take_from(self, forwarding: Forwarding) -> None:
        self._tail = (self._tail + forwarding.take())[-TAIL_BYTES:]

    def _write_framed(self, body: bytes) -> None:
        decoder = self._decoder
        if isinstance(decoder, ChunkedDecoder):
            payloads = decoder.payloads
            assert payloads is not None  # noqa: S101 (for the type checker)
            body = b"".join(payloads)
            payloads.clear()
        if body:
            self._write(chunk(body) if self._chunks else body)

    def keep_alive(self) -> None:
        decoder = self._decoder
        if self._take_over():
            return  # the fast path has just stopped at something: the stream is not silent
        if isinstance(decoder, ChunkedDecoder):
            between = decoder.between and self._tail.endswith(_EVENT_ENDS_IN_CHUNKS)
        else:
            between = self._tail.endswith(_EVENT_ENDS)
        if (
            self._counts
            and (between or not self._tail)
            and (self._frame or not isinstance(decoder, LengthDecoder))
        ):
            chunks = self._chunks or (isinstance(decoder, ChunkedDecoder) and not self._frame)
            self._write(chunk(KEEP_ALIVE) if chunks else KEEP_ALIVE)

    def collected(self, body: bytes) -> None:
        decoder = self._decoder
        if isinstance(decoder, ChunkedDecoder) and not self._frame:
            # It may stand in the middle of a chunk whose size line has been taken away: all is framed again.
            self._frame = self._chunks = True
            decoder.payloads = []
        if body:
            self._write(chunk(body) if self._chunks else body)

    def ended(self) -> bool:
        if not isinstance(self._decoder, CloseDelimitedDecoder):
            return False
        if self._chunks:
            self._write(LAST_CHUNK)
        self._request.relayed(rest=False, reusable=False)
        return True

    def tokens(self) -> Tokens | None:
        self._absorb()
        tokens = usage_of(self._tail)
        return tokens and Tokens(tokens.prompt or self._prompt_tokens, tokens.out)

    def generated(self) -> int:
        tokens = self.tokens()
        return max(self._counter.tokens, tokens.out if tokens is not None else 0)

    def usage_bytes(self) -> bytes:
        self._absorb()
        return self._tail

    def text(self) -> str:
        return ""

    def may_continue(self, *, now_or_later: bool = False) -> bool:
        return False

    def resume(self, why: str) -> bool:
        self._request.cut(why)
        return False

    def fail(self, code: str, message: str) -> None:
        self._request.cut(code)


def _has_events(response: ResponseHead) -> bool:
    """Return whether tokens can be counted in the bytes of this response."""
    kind = response.content_type.partition(b";")[0].strip().lower()
    return not response.encoded and kind in (b"text/event-stream", b"application/x-ndjson")


def begin_response(
    request: RelayHost, response: ResponseHead, decoder: BodyDecoder, length: int | None = None
) -> bool:
    """Send the head, unless one was sent early; True if the body has to be framed again.

    `length` is that of a body that is passed on as it came. A body that ends with its connection is chunked for the client, unless
    that speaks HTTP/1.0.
    """
    client = request.client
    frame = False
    if length is not None and not request.is_early:
        framing = b"Content-Length: %d\r\n" % length
    elif request.head.http_1_0:
        client.closing = True  # the end of the connection is the end of the body
        framing = b""
        if isinstance(decoder, ChunkedDecoder):
            frame = True
            decoder.payloads = []
    else:
        framing = b"Transfer-Encoding: chunked\r\n"
        frame = not isinstance(decoder, ChunkedDecoder)
    if not request.is_early:
        request.status = response.status
        client.transport.write(request.response_head(response, framing + request.connection_line()))
    return frame
