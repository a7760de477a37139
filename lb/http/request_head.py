"""Heads of requests: read strictly, and rewritten for a target. See `messages`."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import NamedTuple

import httptools

from lb.http.api_paths import plain_path
from lb.http.head_lines import (
    API_KEY,
    AUTHORITY,
    AUTHORIZATION,
    CODING,
    CONNECTION,
    COOKIE,
    CORS_HEADERS,
    CORS_METHOD,
    EXPECT,
    FORWARDED,
    FORWARDED_FOR,
    FORWARDED_HOST,
    FORWARDED_PROTO,
    HOST,
    IDEMPOTENCY_KEY,
    KEPT,
    LENGTH,
    NEVER_HOP,
    ORIGIN,
    OURS,
    REQUEST_ID,
    REQUEST_LINE,
    SANE_ID,
    SESSION,
    SLO_TPOT,
    SLO_TTFT,
    SUBPROTOCOL,
    TRACEPARENT,
    TYPE,
    UPGRADE,
    WEBSOCKET_KEY,
    WEBSOCKET_VERSION,
    HeaderLines,
    HeadError,
    KnownHead,
    length_of,
    numbers_of,
    tokens_of,
)
from lb.http.key_carriers import (
    QUERY,
    SUBPROTOCOLS,
    keys_in_subprotocols,
    without_keys_in_query,
    without_keys_in_subprotocols,
)


class RequestHead(KnownHead):
    """One request as its head describes it. Header values are bytes, as they came.

    The defaults are the class's: most requests set few of them.
    """

    method = b""
    target = b""  # path and query, as sent, but for the spelling of paths of engines' APIs
    path = b""  # without the query
    method_text = ""
    path_text = ""
    lines = b""  # end-to-end header lines as they came, joined, without what we set ourselves
    length = 0
    chunked = False
    http_1_0 = False
    keep_alive = True
    websocket = False
    websocket_key = b""
    expects = False
    host = b""
    request_id = b""
    forwarded_for = b""
    forwarded = b""  # lines of a proxy before us, each with its CRLF: only a trusted one's are passed on
    has_forwarded_proto = False
    has_forwarded_host = False
    traceparent = b""
    content_type = b""
    cookie = b""
    session = b""
    slo: tuple[bytes, bytes] | None = None  # X-SLO-TTFT-MS and X-SLO-TPOT-MS, empty where there is none
    ours: Mapping[bytes, bytes] | None = None  # X-SkyServe-*, by what follows, in lower case
    idempotent = False  # it has an Idempotency-Key: the server does it once
    # What may be a key: (name of the header in lower case, value), of subprotocols the key alone.
    credentials: tuple[tuple[bytes, bytes], ...] = ()
    origin: bytes | None = None
    cors_method: bytes | None = None  # Access-Control-Request-Method
    cors_headers: bytes | None = None  # Access-Control-Request-Headers
    _keyless: tuple[tuple[bytes, ...], RequestHead] | None = None

    def with_values(self, request_id: bytes, hop: bytes, trace: bytes) -> RequestHead:
        """Return the same with another `X-Request-Id`, `X-SkyServe-Hop` and `traceparent`, if they are not empty."""
        other = self._copy()
        if request_id:
            other.request_id = request_id
        if hop:
            other.ours = {**(self.ours or {}), b"hop": hop}
        if trace:
            lines = b"\r\n%b\r\n" % self.lines
            lines = lines.replace(
                b"\r\ntraceparent: %b\r\n" % self.traceparent, b"\r\ntraceparent: %b\r\n" % trace
            )
            other.traceparent, other.lines = trace, lines[2:-2]
        return other

    def has_key_line(self, line: bytes) -> bool:
        """Return whether `with_key` can replace this header line: the one that has the only API key."""
        name, _, value = line.partition(b": ")
        return self.credentials == ((name.lower(), value),) and self.lines.count(line + b"\r\n") == 1

    def with_key(self, line: bytes, other_line: bytes) -> RequestHead:
        """Return the same with another line of this name in place of `line`, for which `has_key_line` is true."""
        other = self._copy()
        other.credentials = ((self.credentials[0][0], other_line.partition(b": ")[2]),)
        other.lines = self.lines.replace(line + b"\r\n", other_line + b"\r\n")
        known = self._keyless
        if known is not None and known[0] == (self.credentials[0][0],):  # the key is all in which they differ
            other._keyless = known
        return other

    def without(self, name: bytes) -> RequestHead:
        """Return the same without any header line of this name (lower case)."""
        other = self._copy()
        prefix = name + b":"
        size = len(prefix)
        kept = (line for line in self.lines.split(b"\r\n") if line[:size].lower() != prefix)
        other.lines = b"\r\n".join(kept)
        return other

    def without_keys(self, carried_by: tuple[bytes, ...]) -> RequestHead:
        """Return the same without the headers that carried a key, and without the keys in subprotocols or in the query.

        A head that is remembered remembers the last one without keys, too.
        """
        known = self._keyless
        if known is not None and known[0] == carried_by:
            return known[1]
        other = self
        for carrier in carried_by:
            if carrier == SUBPROTOCOLS:
                other = other._copy()
                other.lines = without_keys_in_subprotocols(other.lines)
            elif carrier == QUERY:
                other = other._copy()
                other.target = without_keys_in_query(other.target)
            else:
                other = other.without(carrier)
        if other is not self:
            other.credentials = ()
            self._keyless = carried_by, other
        return other

    def _copy(self) -> RequestHead:
        """Return one with the same fields. Field by field: compiled, it has no `__dict__`."""
        other = RequestHead()
        other.method, other.target = self.method, self.target
        other.path, other.method_text = self.path, self.method_text
        other.path_text, other.lines = self.path_text, self.lines
        other.length, other.chunked = self.length, self.chunked
        other.http_1_0, other.keep_alive = self.http_1_0, self.keep_alive
        other.websocket, other.websocket_key = self.websocket, self.websocket_key
        other.expects, other.host = self.expects, self.host
        other.request_id, other.forwarded_for = self.request_id, self.forwarded_for
        other.forwarded, other.has_forwarded_proto = self.forwarded, self.has_forwarded_proto
        other.has_forwarded_host, other.traceparent = self.has_forwarded_host, self.traceparent
        other.content_type, other.cookie = self.content_type, self.cookie
        other.session, other.ours, other.slo = self.session, self.ours, self.slo
        other.idempotent, other.credentials = self.idempotent, self.credentials
        other.origin, other.cors_method = self.origin, self.cors_method
        other.cors_headers = self.cors_headers
        return other


def read_request(head: bytes, max_headers: int) -> RequestHead:
    """`head` ends with the empty line. Raises HeadError."""
    seen = HeaderLines()
    parser = httptools.HttpRequestParser(seen)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserInvalidMethodError:
        raise HeadError(501, "unknown_method", "The method is not known.") from None
    except httptools.HttpParserError:
        raise HeadError(400, "malformed_request", "The head of the request is malformed.") from None
    lines = head[:-4].split(b"\r\n")
    if not seen.complete or seen.count != len(lines) - 1 or not REQUEST_LINE.fullmatch(lines[0]):
        raise HeadError(400, "malformed_request", "The head of the request is malformed.")
    if seen.count > max_headers:
        raise HeadError(431, "too_many_headers", f"The request has more than {max_headers} header lines.")
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise HeadError(505, "unsupported_version", "HTTP/1.1 and HTTP/1.0 are supported.")
    request = RequestHead()
    request.method = parser.get_method()
    if request.method == b"CONNECT":  # for any target: a 2xx would make a tunnel of the connection
        raise HeadError(400, "bad_request_target", "The request target must be a path.")
    authority, request.target = _origin_form(seen.url)
    path, query, rest = request.target.partition(b"?")
    request.path = plain_path(path)
    if request.path is not path:
        request.target = request.path + query + rest
    request.method_text = request.method.decode("ascii")
    request.path_text = request.path.decode("latin-1")
    request.http_1_0 = version == "1.0"
    request.keep_alive = not request.http_1_0
    drop = _apply_request(request, seen.marked, lines)
    request.host = authority or request.host  # RFC 9112 §3.2.2
    request.lines = b"\r\n".join(line for number, line in enumerate(lines) if number and number not in drop)
    return request


def _apply_request(
    request: RequestHead, marked: list[tuple[int, int, bytes, bytes]], lines: list[bytes]
) -> set[int]:
    """Set the fields of the marked lines. Returns the numbers of the lines that are not passed."""
    drop: set[int] = set()
    hosts = proto = host = 0  # how many, and the numbers of lines
    named: list[bytes] = []
    forwarded: list[int] = []
    handshake: dict[int, bytes] = {}  # of a WebSocket, by kind
    ours: dict[bytes, bytes] = {}
    for kind, number, name, value in marked:
        if kind < KEPT:
            drop.add(number)
        if kind == LENGTH:
            request.length = length_of(value)
        elif kind == HOST:
            hosts += 1
            request.host = value
        elif kind == TYPE:
            request.content_type = value
        elif kind == AUTHORIZATION:
            request.credentials += ((b"authorization", value),)
        elif kind == CONNECTION:
            named += tokens_of(value)
        elif kind == CODING:
            if value.lower() != b"chunked" or request.chunked:
                raise HeadError(501, "transfer_coding", "The only supported transfer coding is chunked.")
            request.chunked = True
        elif kind == REQUEST_ID:
            request.request_id = value if SANE_ID.fullmatch(value) else b""
        elif kind == FORWARDED_FOR:
            before = request.forwarded_for
            request.forwarded_for = before + b", " + value if before else value
        elif kind in (FORWARDED_PROTO, FORWARDED_HOST, FORWARDED):
            forwarded.append(number)
            if kind == FORWARDED_PROTO:
                proto = number
            elif kind == FORWARDED_HOST:
                host = number
        elif kind == SESSION:
            request.session = value
        elif kind == COOKIE:
            request.cookie = value
        elif kind == TRACEPARENT:
            request.traceparent = value
        elif kind in (UPGRADE, WEBSOCKET_KEY, WEBSOCKET_VERSION):
            handshake[kind] = value
        elif kind == OURS:
            ours[name[11:].lower()] = value
        else:
            _apply_seldom(request, kind, name, value)
    if ours:
        request.ours = ours
    _check_sender(request, hosts)
    if named:
        drop |= _apply_connection(request, named, lines)
    request.has_forwarded_proto = proto > 0 and proto not in drop  # `Connection` may have named them
    request.has_forwarded_host = host > 0 and host not in drop
    request.forwarded = b"".join(lines[number] + b"\r\n" for number in forwarded if number not in drop)
    drop.update(forwarded)
    if handshake and b"upgrade" in named:
        _apply_handshake(request, handshake)
    return drop


def _apply_seldom(request: RequestHead, kind: int, name: bytes, value: bytes) -> None:
    """Set the field of a header line that few requests have."""
    if kind == IDEMPOTENCY_KEY:
        request.idempotent = True
    elif kind == API_KEY:
        request.credentials += ((name.lower(), value),)
    elif kind == SUBPROTOCOL:
        request.credentials += tuple((SUBPROTOCOLS, key) for key in keys_in_subprotocols(value))
    elif kind == ORIGIN:
        request.origin = value
    elif kind == CORS_METHOD:
        request.cors_method = value
    elif kind == CORS_HEADERS:
        request.cors_headers = value
    elif kind == SLO_TTFT:
        request.slo = (value, b"" if request.slo is None else request.slo[1])
    elif kind == SLO_TPOT:
        request.slo = (b"" if request.slo is None else request.slo[0], value)
    elif kind == EXPECT:
        request.expects = value.lower() == b"100-continue"


def _check_sender(request: RequestHead, hosts: int) -> None:
    """Check what depends on the version of HTTP; `hosts` is the number of Host headers."""
    if request.http_1_0:
        if request.chunked:  # RFC 9112 §6.1: a sender that old cannot mean it
            raise HeadError(400, "malformed_request", "HTTP/1.0 has no transfer codings.")
        request.expects = False
    elif hosts != 1:
        raise HeadError(400, "malformed_request", "The request must have exactly one Host.")
    if hosts > 1 or not AUTHORITY.fullmatch(request.host):
        raise HeadError(400, "malformed_request", "The request must have exactly one Host.")


def _apply_connection(request: RequestHead, named: list[bytes], lines: list[bytes]) -> set[int]:
    """Set the fields of `Connection`. Returns the numbers of the lines it names, which are not passed."""
    drop: set[int] = set()
    for token in named:
        if token == b"close":
            request.keep_alive = False
        elif token == b"keep-alive":
            request.keep_alive = b"close" not in named
        elif token not in NEVER_HOP:
            drop |= numbers_of(token, lines)
    return drop


def _apply_handshake(request: RequestHead, handshake: dict[int, bytes]) -> None:
    """RFC 6455 §4.1: a handshake that cannot succeed would bother a target in vain."""
    if handshake.get(UPGRADE, b"").lower() != b"websocket" or request.method != b"GET":
        return
    key = handshake.get(WEBSOCKET_KEY, b"")
    try:
        sound = len(base64.b64decode(key, validate=True)) == 16
    except ValueError:
        sound = False
    is_13 = handshake.get(WEBSOCKET_VERSION) == b"13"
    if not sound or not is_13 or request.chunked or request.length or request.http_1_0:
        text = "A WebSocket needs Sec-WebSocket-Version: 13 and a Sec-WebSocket-Key of 16 bytes in base64."
        raise HeadError(400, "malformed_handshake", text)
    request.websocket, request.websocket_key = True, key


def _origin_form(url: bytes) -> tuple[bytes, bytes]:
    """Return the authority, if the request target has one, and path and query."""
    if url.startswith(b"/"):
        return b"", url
    scheme, separator, rest = url.partition(b"://")
    if separator and scheme.lower() in (b"http", b"https"):
        authority = re.split(rb"[/?]", rest, maxsplit=1)[0]
        path = rest[len(authority) :]
        if authority and AUTHORITY.fullmatch(authority):
            return authority, path if path.startswith(b"/") else b"/" + path
    raise HeadError(400, "bad_request_target", "The request target must be a path.")


class Hop(NamedTuple):
    """The parts that all requests of one client connection share.

    Its address, the scheme it used, and whether it is a proxy whose word on its own clients is taken.
    """

    peer: bytes
    scheme: bytes
    trusted: bool = False


def request_bytes(
    request: RequestHead,
    hop: Hop,
    request_id: bytes,
    path: bytes,
    base_path: bytes,
    host: bytes,
    framing: bytes,
) -> bytes:
    """The head a target gets: for `path`, below the `base_path` of its URL.

    `host` is the target's own name or empty (the client's is kept); `framing` is the line, with its line end, that shows how
    long the body is; empty for none.
    """
    trusted = hop.trusted
    forwarded = request.forwarded_for if trusted else b""
    extra = request.forwarded + framing if trusted else framing
    if not (trusted and request.has_forwarded_proto):
        extra = b"X-Forwarded-Proto: %b\r\n%b" % (hop.scheme, extra)
    if request.host and not (trusted and request.has_forwarded_host):
        extra = b"X-Forwarded-Host: %b\r\n%b" % (request.host, extra)
    if request.websocket:
        extra += b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    lines = request.lines
    return b"%b %b%b HTTP/1.1\r\nHost: %b\r\n%b%bX-Forwarded-For: %b\r\nX-Request-Id: %b\r\n%b\r\n" % (
        request.method,
        base_path,
        path,
        host or request.host,
        lines,
        b"\r\n" if lines else b"",
        forwarded + b", " + hop.peer if forwarded else hop.peer,
        request_id,
        extra,
    )
