"""Header lines as both kinds of heads read them: llhttp's callbacks, and what a line means here. See `messages`."""

from __future__ import annotations

import re
from typing import Final

from lb.http.digits import end_of_digits, number_in

END: Final = b"\r\n\r\n"


class HeadError(Exception):
    """The head cannot be accepted; `status` is that of the response to the client."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


# What a header line is to us. Plain numbers: they are compared for each line of each request.
_PASS, HOP, CONNECTION, LENGTH, CODING, HOST, REQUEST_ID, FORWARDED_FOR = range(8)
EXPECT, UPGRADE, OURS = range(8, 11)
KEPT: Final = 11  # from here on lines are passed as they are
FORWARDED_PROTO, FORWARDED_HOST, AUTHORIZATION, TYPE, SERVER = range(11, 16)
WEBSOCKET_KEY, WEBSOCKET_VERSION, COOKIE, SESSION, ENCODING, TRACEPARENT, ACCEPT = range(16, 23)
IDEMPOTENCY_KEY, API_KEY, ORIGIN, CORS_METHOD, CORS_HEADERS, CORS, FORWARDED, SUBPROTOCOL = range(23, 31)
SLO_TTFT, SLO_TPOT = range(31, 33)

_KINDS: Final = {
    b"connection": CONNECTION,
    b"keep-alive": HOP,
    b"proxy-authenticate": HOP,
    b"proxy-authorization": HOP,
    b"proxy-connection": HOP,
    b"te": HOP,
    b"http2-settings": HOP,
    b"content-length": LENGTH,
    b"transfer-encoding": CODING,
    b"host": HOST,
    b"x-request-id": REQUEST_ID,
    b"x-forwarded-for": FORWARDED_FOR,
    b"x-forwarded-proto": FORWARDED_PROTO,
    b"x-forwarded-host": FORWARDED_HOST,
    b"x-real-ip": FORWARDED,
    b"forwarded": FORWARDED,
    b"authorization": AUTHORIZATION,
    b"expect": EXPECT,
    b"upgrade": UPGRADE,
    b"content-type": TYPE,
    b"server": SERVER,
    b"sec-websocket-key": WEBSOCKET_KEY,
    b"sec-websocket-version": WEBSOCKET_VERSION,
    b"cookie": COOKIE,
    b"x-session-id": SESSION,
    b"content-encoding": ENCODING,
    b"traceparent": TRACEPARENT,
    b"sec-websocket-accept": ACCEPT,
    b"sec-websocket-protocol": SUBPROTOCOL,
    b"idempotency-key": IDEMPOTENCY_KEY,
    b"x-api-key": API_KEY,
    b"api-key": API_KEY,
    b"x-slo-ttft-ms": SLO_TTFT,
    b"x-slo-tpot-ms": SLO_TPOT,
    b"origin": ORIGIN,
    b"access-control-request-method": CORS_METHOD,
    b"access-control-request-headers": CORS_HEADERS,
    b"access-control-allow-origin": CORS,
    b"access-control-allow-methods": CORS,
    b"access-control-allow-headers": CORS,
    b"access-control-allow-credentials": CORS,
    b"access-control-expose-headers": CORS,
    b"access-control-max-age": CORS,
}
_SEEN: Final[dict[bytes, int]] = {}  # by spelling: saves lowering each name each time
_MAX_SEEN: Final = 2048
_LONGEST_SEEN: Final = 64
WEBSOCKET_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
SANE_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
REQUEST_LINE: Final = re.compile(rb"[A-Z-]+ [\x21-\x7e]+ HTTP/[0-9]\.[0-9]")
STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] [1-5][0-9]{2}(?: [\t\x20-\x7e\x80-\xff]*)?")
LONGEST_LENGTH: Final = 15  # digits, of what is compared or remembered without them
AUTHORITY: Final = re.compile(rb"[A-Za-z0-9._~%!$&'()*+;=:\[\]-]*")  # of a URL, without user information


def _kind(name: bytes) -> int:
    lowered = name.lower()
    kind = OURS if lowered.startswith(b"x-skyserve-") else _KINDS.get(lowered, _PASS)
    if kind == _PASS and b"_" in lowered:
        dashed = lowered.replace(b"_", b"-")
        if dashed in _KINDS or dashed.startswith(b"x-skyserve-"):
            kind = HOP
    if len(_SEEN) < _MAX_SEEN and len(name) <= _LONGEST_SEEN:
        _SEEN[name] = kind
    return kind


class KnownHead:
    """A head that was read. The next one of a connection is mostly the same, but for how long its body is.

    `before` and `after` are its bytes around the digits of its `Content-Length`; without that line `before` is all of it. Both are
    empty if it cannot be compared.
    """

    before = b""
    after = b""

    def end_in(self, data: bytes) -> int:
        """Return where the head ends that `data` begins with, if it is the same; else -1."""
        before, after = self.before, self.after
        if not before or not data.startswith(before):
            return -1
        if not after:
            return len(before)
        at = len(before)
        stop = end_of_digits(data, at, LONGEST_LENGTH)
        end = stop + len(after)
        return end if stop > at and data[stop:end] == after else -1

    def length_in(self, data: bytes, end: int) -> int:
        """Return the `Content-Length` of the head that ends there by `end_in`. Only if `after` is not empty."""
        return number_in(data, len(self.before), end - len(self.after))


class HeaderLines:
    """What llhttp calls back: counts lines and picks out those that mean something to us."""

    __slots__ = ("complete", "count", "marked", "url")

    def __init__(self) -> None:
        self.url = b""
        self.count = 0
        self.marked: list[tuple[int, int, bytes, bytes]] = []  # (kind, number of the line, name, value)
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.count += 1
        kind = _SEEN.get(name)
        if kind is None:
            kind = _kind(name)
        if kind:
            self.marked.append((kind, self.count, name, value))

    def on_headers_complete(self) -> None:
        self.complete = True


NEVER_HOP: Final = frozenset(
    {b"", b"close", b"keep-alive", b"upgrade", b"host", b"content-length", b"content-type"}
)


def tokens_of(value: bytes) -> list[bytes]:
    return [token.strip(b" \t").lower() for token in value.split(b",")]


def numbers_of(token: bytes, lines: list[bytes]) -> set[int]:
    prefix = token + b":"
    size = len(prefix)
    return {number for number, line in enumerate(lines) if number and line[:size].lower() == prefix}


def length_of(value: bytes) -> int:
    if len(value) > 18:  # llhttp has seen to it that these are digits
        raise HeadError(413, "body_too_large", "The body is too large.")
    return int(value)
