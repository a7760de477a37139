"""Heads of requests and responses: read strictly by llhttp, rewritten line by line for the next hop.

*Reading.* A head is cut off at the first empty line and given to llhttp, which must find its end exactly there.
Heads refused for that or for any other reason (bare line feeds, folded lines, spaces before colons, two lengths,
a length with a transfer coding, codings other than chunked) never reaches the next hop, so the two hops cannot
disagree on where a message ends: that is what request smuggling needs. What llhttp is generous with is checked here:
the first line, character by character, and that it has seen as many header lines as we have.

*Rewriting.* Lines are passed as they came, in order, but for those of one hop (RFC 9110 §7.6.1), those that
`Connection` names, and those that are ours to set:

- `Host` is preserved: what stands behind is the user's own application, and frameworks compare `Origin` with it. A
  target addressed by https gets its own name, since TLS terminators route on it.
- `X-Forwarded-For`, `-Proto` and `-Host` are set, and `X-Real-IP` and `Forwarded` are dropped, for anyone can write
  them. From a trusted proxy `X-Forwarded-For` is appended to instead, and the others pass. `X-Request-Id` is kept or created. `Via` is not added: engines do not read it, and it costs bytes.
- `Content-Length`, or `Transfer-Encoding: chunked`, is written by us from what has been understood.
- `X-SkyServe-*` is for the load balancer and ends here.
- Of names that mean something here, a spelling with underscores ends here as well: to CGI's successors (WSGI) `Content_Length`
  is `Content-Length`.

*Remembering.* Clients and engines send the same head again and again, but for its `Content-Length`. A head that was read
once is remembered without that line, so the next of its kind costs a search and a lookup. What was accepted with one
plain line of digits there is accepted with another. At most MAX_REMEMBERED are kept; heads with ids or trace
contexts of their own are read again each time.
"""

from __future__ import annotations

import re

from lb.http.head_lines import END, HeadError
from lb.http.request_head import Hop, RequestHead, read_request, request_bytes
from lb.http.response_head import ResponseHead, opens_websocket, read_response, response_bytes

__all__ = [
    "END",
    "MAX_REMEMBERED",
    "HeadError",
    "Hop",
    "Reader",
    "RequestHead",
    "ResponseHead",
    "opens_websocket",
    "read_request",
    "read_response",
    "request_bytes",
    "response_bytes",
]

MAX_REMEMBERED = 512
_LENGTH_LINE = b"\r\nContent-Length: "  # as nearly everybody spells it
_LONGEST_REMEMBERED = 4096
_DIGITS = re.compile(rb"[0-9]{1,15}\r\n")


class Reader:
    """Reads heads, and remembers those it has read."""

    __slots__ = ("_requests", "_responses")

    def __init__(self) -> None:
        self._requests: dict[tuple[bytes, bytes], RequestHead] = {}
        self._responses: dict[tuple[bytes, bytes], ResponseHead] = {}

    def request(self, head: bytes, max_headers: int) -> tuple[RequestHead, int]:
        """Return the head, which is shared and must not be changed, and the length of its body, as far as it is known.

        `head` ends with the empty line. Raises HeadError.
        """
        at = head.find(_LENGTH_LINE)
        if at < 0:
            key, length = (head, b""), 0
        else:
            digits = _DIGITS.match(head, at + 18)
            if digits is None or len(head) > _LONGEST_REMEMBERED:
                request = read_request(head, max_headers)
                return request, request.length
            end = digits.end()
            key, length = (head[:at], head[end:]), int(head[at + 18 : end - 2])
        known = self._requests.get(key)
        if known is None:
            known = read_request(head, max_headers)
            length = known.length
            if len(head) <= _LONGEST_REMEMBERED and not known.websocket:  # whose key is new each time
                if len(self._requests) >= MAX_REMEMBERED:
                    self._requests.clear()
                self._requests[key] = known
        return known, length if at >= 0 else known.length

    def response(self, head: bytes, max_headers: int) -> tuple[ResponseHead, int | None]:
        """As `request`; the length is None if the head does not have it."""
        at = head.find(_LENGTH_LINE)
        if at < 0:
            key: tuple[bytes, bytes] = (head, b"")
            length = None
        else:
            digits = _DIGITS.match(head, at + 18)
            if digits is None or len(head) > _LONGEST_REMEMBERED:
                response = read_response(head, max_headers)
                return response, response.length
            end = digits.end()
            key, length = (head[:at], head[end:]), int(head[at + 18 : end - 2])
        known = self._responses.get(key)
        if known is None:
            known = read_response(head, max_headers)
            if len(head) <= _LONGEST_REMEMBERED:
                if len(self._responses) >= MAX_REMEMBERED:
                    self._responses.clear()
                self._responses[key] = known
        return known, length if at >= 0 else known.length
