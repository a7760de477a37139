"""Heads that have been read, remembered.

Clients and engines send the same head again and again, but for a few values: the `Content-Length`, the `X-Request-Id`, the `traceparent`, and
between load balancers `X-SkyServe-Hop` and `X-SkyServe-Credit`. A head that was read once is remembered without them, so the next of its kind
costs some searches and a lookup. What was accepted with one plain value there is accepted with another. At most MAX_REMEMBERED
heads are kept.

Where there are more API keys than that, each head is another one. So a head is also remembered without its key, and the next one of
its kind with another key costs one more search and a copy.

A connection that sends the same head again, but for the `Content-Length`, needs none of this (`lb.http.head_lines.KnownHead`).
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

from lb.http.head_lines import LONGEST_LENGTH
from lb.http.request_head import RequestHead, read_request
from lb.http.response_head import ResponseHead, read_response

MAX_REMEMBERED: Final = 512
_LONGEST_REMEMBERED: Final = 4096
# Each line as nearly everybody spells it, or as another load balancer writes it, and its plain values.
_LENGTH_LINE, _LENGTH = b"\r\nContent-Length: ", re.compile(rb"[0-9]{1,%d}(?=\r\n)" % LONGEST_LENGTH)
_LOWER_LENGTH_LINE: Final = _LENGTH_LINE.lower()  # servers in Python, and clients in Node.js
_ID_LINE, _ID = b"\r\nX-Request-Id: ", re.compile(rb"[\x21-\x7e]{1,128}(?=\r\n)")
_HOP_LINE, _HOP = b"\r\nX-SkyServe-Hop: ", re.compile(rb"[\x21-\x7e]{1,1024}(?=\r\n)")
_TRACE_LINE, _TRACE = b"\r\ntraceparent: ", re.compile(rb"[0-9a-f-]{55}(?=\r\n)")
_CREDIT_LINE, _CREDIT = b"\r\nX-SkyServe-Credit: ", re.compile(rb"[0-9-]{1,40}(?=\r\n)")
_SECRET: Final = re.compile(
    rb"\r\n((?:[Aa]uthorization: Bearer|[Xx]-[Aa][Pp][Ii]-[Kk]ey:|[Aa][Pp][Ii]-[Kk]ey:) )([\x21-\x7e]{1,512})(?=\r\n)"
)
_HAS_LENGTH, _HAS_ID, _HAS_HOP, _HAS_CREDIT, _HAS_TRACE = 1, 2, 4, 8, 16

_Head = TypeVar("_Head", RequestHead, ResponseHead)
_Key = tuple[int, bytes]  # which values are cut out, and the head without them


class Reader:
    """Reads heads, and remembers those it has read."""

    __slots__ = ("_keyless", "_requests", "_responses", "last_response")

    def __init__(self) -> None:
        self._requests: dict[_Key, RequestHead] = {}
        self._responses: dict[_Key, ResponseHead] = {}
        self._keyless: dict[_Key, tuple[RequestHead, bytes]] = {}  # and the line of its key
        self.last_response: ResponseHead | None = None  # engines of one kind respond alike

    def request(self, head: bytes, max_headers: int) -> tuple[RequestHead, int]:
        """Return the head, which is shared and must not be changed, and the length of its body, as far as it is known.

        `head` ends with the empty line. Raises HeadError.
        """
        rest, cut, length, request_id, hop, trace = head, 0, 0, b"", b"", b""
        begin = stop = len(head)
        at = _length_at(head)
        if at >= 0:
            digits = _LENGTH.match(head, at)
            if digits is None or len(head) > _LONGEST_REMEMBERED:
                request = read_request(head, max_headers)
                return request, request.length
            begin, stop = at, digits.end()
            rest, cut, length = head[:begin] + head[stop:], _HAS_LENGTH, int(head[begin:stop])
        at = rest.find(_ID_LINE) + 16
        if at >= 16 and (plain := _ID.match(rest, at)) is not None:
            end = plain.end()
            request_id, rest, cut = rest[at:end], rest[:at] + rest[end:], cut | _HAS_ID
        at = rest.find(_HOP_LINE) + 18
        if at >= 18 and (plain := _HOP.match(rest, at)) is not None:
            end = plain.end()
            hop, rest, cut = rest[at:end], rest[:at] + rest[end:], cut | _HAS_HOP
        at = rest.find(_TRACE_LINE) + 15
        if at >= 15 and (plain := _TRACE.match(rest, at)) is not None:
            end = plain.end()
            trace, rest, cut = rest[at:end], rest[:at] + rest[end:], cut | _HAS_TRACE
        known = self._requests.get((cut, rest))
        if known is None:
            secret = _SECRET.search(rest)
            keyless = None if secret is None else (cut, rest[: secret.start(2)] + rest[secret.end(2) :])
            if (
                secret is not None
                and keyless is not None
                and (found := self._keyless.get(keyless)) is not None
            ):
                known = found[0].with_key(found[1], secret[1] + secret[2])
                _remember(self._requests, (cut, rest), known, head, begin, stop)
        if known is None:
            known = read_request(head, max_headers)
            # The key of a WebSocket is new each time. Of two lines with an id, one would be cut out and the other counts.
            if (
                not known.websocket
                and _is_single(rest, _ID_LINE, request_id)
                and _is_single(rest, _HOP_LINE, hop)
                and _is_single(rest, _TRACE_LINE, trace)
            ):
                _remember(self._requests, (cut, rest), known, head, begin, stop)
                if secret is not None and keyless is not None and known.has_key_line(secret[1] + secret[2]):
                    if len(self._keyless) >= MAX_REMEMBERED:
                        self._keyless.clear()
                    self._keyless[keyless] = known, secret[1] + secret[2]
            return known, known.length
        if request_id or hop or trace:
            known = known.with_values(request_id, hop, trace)
        return known, length if cut & _HAS_LENGTH else known.length

    def response(self, head: bytes, max_headers: int) -> tuple[ResponseHead, int | None]:
        """As `request`; the length is None if the head does not have it."""
        rest, cut, length, credit = head, 0, None, b""
        begin = stop = len(head)
        at = _length_at(head)
        if at >= 0:
            digits = _LENGTH.match(head, at)
            if digits is None or len(head) > _LONGEST_REMEMBERED:
                response = read_response(head, max_headers)
                return response, response.length
            begin, stop = at, digits.end()
            rest, cut, length = head[:begin] + head[stop:], _HAS_LENGTH, int(head[begin:stop])
        at = rest.find(_CREDIT_LINE) + 21
        if at >= 21 and (plain := _CREDIT.match(rest, at)) is not None:
            end = plain.end()
            credit, rest, cut = rest[at:end], rest[:at] + rest[end:], cut | _HAS_CREDIT
        known = self._responses.get((cut, rest))
        if known is None:
            known = read_response(head, max_headers)
            if _is_single(rest, _CREDIT_LINE, credit):
                _remember(self._responses, (cut, rest), known, head, begin, stop)
                self.last_response = known
            return known, known.length
        self.last_response = known
        if credit:
            known = known.with_credit(credit)
        return known, length if cut & _HAS_LENGTH else known.length


def _is_single(rest: bytes, line: bytes, value: bytes) -> bool:
    """Return whether no other line has the name of the one whose value is cut out, if one is."""
    return not value or rest.lower().count(line[:-1].lower()) == 1


def _length_at(head: bytes) -> int:
    """Return where the digits of the `Content-Length` begin; -1 if there is no such line."""
    at = head.find(_LENGTH_LINE)
    if at < 0:
        at = head.find(_LOWER_LENGTH_LINE)
    return at if at < 0 else at + len(_LENGTH_LINE)


def _remember(known: dict[_Key, _Head], key: _Key, head: _Head, raw: bytes, begin: int, stop: int) -> None:
    """Remember a head that was read; its bytes are `raw`, with the digits of its length from `begin` to `stop`."""
    if len(raw) > _LONGEST_REMEMBERED:
        return
    if len(known) >= MAX_REMEMBERED:
        known.clear()
    known[key] = head
    if not key[0] & ~_HAS_LENGTH:
        head.before, head.after = raw[:begin], raw[stop:]
