"""From a begun response to the client: bytes pass as they come, with back-pressure, until either side ends it.

A write that the client has no room for pauses the target's connection, so a slow client slows its engine and not the agent.
Nothing is copied, parsed or timed per chunk beyond what finds the end of the body.
"""

from __future__ import annotations

from typing import Protocol

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
from lb.http.messages import ResponseHead, response_bytes
from lb.proxy.ports import RelayHost
from lb.stream.token_usage import Tokens


class Relay(Protocol):
    """What an request and the patrol know of the way a response goes. The first byte has been there when it is made."""

    blocked: bool  # the client has no room
    silent_s: float  # for how long nothing has come, as far as the patrol knows
    chunks: int
    sent_bytes: int  # of the body

    def tokens(self) -> Tokens | None:
        """How long prompt and response were, if the response told."""
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
        """The beginning of the body, without framing: the decoder has walked over it already."""
        ...

    def ended(self) -> bool:
        """The target's connection has ended; False if the body had not."""
        ...

    def may_continue(self, *, now_or_later: bool = False) -> bool:
        """Whether the response could go on without its target: from another that has room, or (`now_or_later`) from any that
        is well."""
        ...

    def resume(self, why: str) -> bool:
        """Prepare the request for going on elsewhere; False if the response is over instead, one way or another."""
        ...

    def fail(self, code: str, message: str) -> None:
        """End the response as an error."""
        ...


class PlainRelay:
    """Any response, as it is."""

    __slots__ = (
        "_chunks",
        "_decoder",
        "_frame",
        "_heard",
        "_request",
        "_write",
        "blocked",
        "chunks",
        "sent_bytes",
        "silent_s",
    )

    def __init__(
        self, request: RelayHost, response: ResponseHead, decoder: BodyDecoder, length: int | None = None
    ) -> None:
        self._request = request
        self._decoder = decoder
        self._heard = True
        self.blocked = False
        self.silent_s = 0.0
        self.chunks = 0
        self.sent_bytes = 0
        self._frame = begin_response(request, response, decoder, length)
        self._chunks = self._frame and not isinstance(
            decoder, ChunkedDecoder
        )  # the client gets chunks of ours
        self._write = request.client.transport.write

    def data(self, data: bytes) -> None:
        self._heard = True
        self.chunks += 1
        decoder = self._decoder
        try:
            end = decoder.feed(data)
        except FramingError as error:
            self._request.broke(Failure.MALFORMED, str(error))
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
            self._request.relayed(rest=end < len(data))

    def _write_framed(self, body: bytes) -> None:
        decoder = self._decoder
        if isinstance(decoder, ChunkedDecoder):
            payloads = decoder.payloads
            assert payloads is not None  # noqa: S101 (for the type checker)
            body = b"".join(payloads)
            payloads.clear()
        if body:
            self._write(chunk(body) if self._chunks else body)

    def collected(self, body: bytes) -> None:
        decoder = self._decoder
        if isinstance(decoder, ChunkedDecoder) and not self._frame:
            # It may stand in the midst of a chunk whose size line has been taken away: all is framed anew.
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
        return None

    def pulse(self) -> bool:
        heard, self._heard = self._heard, False
        return heard

    def halt(self) -> None: ...

    def may_continue(self, *, now_or_later: bool = False) -> bool:
        return False

    def resume(self, why: str) -> bool:
        self._request.cut(why)
        return False

    def fail(self, code: str, message: str) -> None:
        self._request.cut(code)


def begin_response(
    request: RelayHost, response: ResponseHead, decoder: BodyDecoder, length: int | None = None
) -> bool:
    """Send the head; True if the body has to be framed anew: chunked for a body that ends with its connection, not
    chunked for a client of HTTP/1.0."""
    client = request.client
    frame = False
    if isinstance(decoder, LengthDecoder):
        framing = b"Content-Length: %d\r\n" % (length or 0)
    elif request.head.http_1_0:
        client.closing = True  # the end of the connection is the end of the body
        framing = b""
        if isinstance(decoder, ChunkedDecoder):
            frame = True
            decoder.payloads = []
    else:
        framing = b"Transfer-Encoding: chunked\r\n"
        frame = isinstance(decoder, CloseDelimitedDecoder)
    head = response_bytes(response, request.request_id, framing + request.connection_line())
    request.status = response.status
    client.transport.write(head)
    return frame
