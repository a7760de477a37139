"""Heads of responses: read strictly, and rewritten for a client. See `messages`."""

from __future__ import annotations

import base64
import hashlib
from typing import Final

import httptools

from lb.http.head_lines import (
    ACCEPT,
    CODING,
    CONNECTION,
    CORS,
    ENCODING,
    HOP,
    LENGTH,
    NEVER_HOP,
    OURS,
    REQUEST_ID,
    SERVER,
    STATUS_LINE,
    TYPE,
    UPGRADE,
    WEBSOCKET_GUID,
    HeaderLines,
    HeadError,
    KnownHead,
    length_of,
    numbers_of,
    tokens_of,
)
from lb.http.request_head import RequestHead

_CREDIT: Final = b"x-skyserve-credit"  # see `lb.core.hop`


class ResponseHead(KnownHead):
    """One response as its head describes it. `length` is None unless the head has it."""

    status = 0
    lines_without_cors: bytes | None = None  # as `lines`, where those have headers of CORS
    lines = b""  # the status line, and the end-to-end header lines as they came
    length: int | None = None
    chunked = False
    keep_alive = True
    content_type = b""
    encoded = False
    has_request_id = False
    has_server = False
    upgrade = b""
    accept = b""  # of a WebSocket
    credit = b""  # of an agent of another region (see `lb.core.hop`)

    def with_credit(self, credit: bytes) -> ResponseHead:
        """Return the same with another `X-SkyServe-Credit`. Field by field: compiled, it has no `__dict__`."""
        other = ResponseHead()
        other.status = self.status
        other.lines_without_cors = self.lines_without_cors
        other.lines = self.lines
        other.length = self.length
        other.chunked = self.chunked
        other.keep_alive = self.keep_alive
        other.content_type = self.content_type
        other.encoded = self.encoded
        other.has_request_id = self.has_request_id
        other.has_server = self.has_server
        other.upgrade = self.upgrade
        other.accept = self.accept
        other.credit = credit
        return other


def read_response(head: bytes, max_headers: int) -> ResponseHead:
    """`head` ends with the empty line. Raises HeadError; its status is of no use here."""
    seen, lines, status = _parsed(head, max_headers)
    response = ResponseHead()
    response.status = status
    http_1_1 = lines[0][7:8] == b"1"
    lines[0] = b"HTTP/1.1 " + lines[0][9:]
    named: list[bytes] = []
    server = request_id = 0  # the numbers of their lines
    drop: set[int] | None = None
    cors: set[int] = set()
    for kind, number, name, value in seen.marked:
        if kind == TYPE:
            response.content_type = value
        elif kind == SERVER:
            server = number
        elif kind == REQUEST_ID:
            request_id = number
        elif kind == ENCODING:
            response.encoded = value.lower() != b"identity"
        elif kind == ACCEPT:
            response.accept = value
        elif kind == CORS:
            cors.add(number)
        elif kind == LENGTH:
            response.length = length_of(value)
            drop = drop or set()
            drop.add(number)
        elif kind in (CODING, CONNECTION, HOP, UPGRADE, OURS):
            drop = drop or set()
            drop.add(number)
            if kind == UPGRADE:
                response.upgrade = value.lower()
            elif kind == OURS:
                if name.lower() == _CREDIT:
                    response.credit = value
            elif kind == CODING:
                if value.lower() != b"chunked" or response.chunked:
                    raise HeadError(
                        502, "malformed_response", "the response has a transfer coding but chunked"
                    )
                response.chunked = True
            elif kind == CONNECTION:
                named += tokens_of(value)
    for token in named:
        if token not in NEVER_HOP:
            drop = (drop or set()) | numbers_of(token, lines)
    # RFC 9112 §6.1: what an HTTP/1.0 server means by chunked is in doubt once its body is over.
    lasting = b"keep-alive" in named and not response.chunked
    response.keep_alive = b"close" not in named and (http_1_1 or lasting)
    response.has_server = server > 0 and not (drop and server in drop)
    response.has_request_id = request_id > 0 and not (drop and request_id in drop)
    if not response.has_server:
        lines.append(b"Server: skyserve")
    response.lines = b"\r\n".join(line for number, line in enumerate(lines) if not drop or number not in drop)
    if cors:
        without = cors | (drop or set())
        response.lines_without_cors = b"\r\n".join(
            line for number, line in enumerate(lines) if number not in without
        )
    return response


def _parsed(head: bytes, max_headers: int) -> tuple[HeaderLines, list[bytes], int]:
    """Return the marked lines, all lines and the status. Raises HeadError."""
    seen = HeaderLines()
    parser = httptools.HttpResponseParser(seen)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise HeadError(
            502, "malformed_response", f"the head of the response is malformed: {error}"
        ) from None
    lines = head[:-4].split(b"\r\n")
    if not seen.complete or seen.count != len(lines) - 1 or not STATUS_LINE.fullmatch(lines[0]):
        raise HeadError(502, "malformed_response", "the head of the response is malformed")
    if seen.count > max_headers:
        raise HeadError(502, "malformed_response", "the head of the response has too many lines")
    return seen, lines, parser.get_status_code()


def opens_websocket(request: RequestHead, response: ResponseHead) -> bool:
    """Return whether the target's 101 completes the handshake (RFC 6455 §4.1)."""
    digest = hashlib.sha1(request.websocket_key + WEBSOCKET_GUID, usedforsecurity=False).digest()
    return response.upgrade == b"websocket" and response.accept == base64.b64encode(digest)


def response_bytes(
    response: ResponseHead, request_id: bytes, framing: bytes, cors: bytes | None = None
) -> bytes:
    """The head a client gets.

    `framing` are the lines, each with its line end, on length and connection. `cors` are lines in place of the target's own
    for CORS; None keeps those. Without an id there is no line for it: to another load balancer, which has written it.
    """
    lines = response.lines
    if cors is not None:
        framing = cors + framing
        if response.lines_without_cors is not None:
            lines = response.lines_without_cors
    if response.has_request_id or not request_id:
        return b"%b\r\n%b\r\n" % (lines, framing)
    return b"%b\r\nX-Request-Id: %b\r\n%b\r\n" % (lines, request_id, framing)
