"""Heads of requests and answers: read strictly by llhttp, rewritten line by line for the next hop.

*Reading.* A head is cut off at the first empty line and given to llhttp, which must find its end exactly there.
What is refused for that or for any other reason (bare line feeds, folded lines, spaces before colons, two lengths,
a length with a transfer coding, codings other than chunked) never reaches the next hop, so the two hops cannot
disagree on where a message ends: that is what request smuggling needs. What llhttp is generous with is checked here:
the first line, character by character, and that it has seen as many header lines as we have.

*Rewriting.* Lines are passed as they came, in order, but for those of one hop (RFC 9110 §7.6.1), those that
`Connection` names, and those that are ours to set:

- `Host` is preserved: what stands behind is the user's own application, and frameworks compare `Origin` with it. A
  target addressed by https gets its own name, since TLS terminators route on it.
- `X-Forwarded-For` is appended to, `X-Forwarded-Proto` and `X-Forwarded-Host` are set where a proxy before us has
  not set them. `X-Request-Id` is kept or created. `Via` is not added: engines do not read it, and it costs bytes.
- `Content-Length`, or `Transfer-Encoding: chunked`, is written by us from what has been understood.
- `X-SkyServe-*` is for the load balancer and ends here.
- Of names that mean something here, a spelling with underscores ends here as well: to CGI's heirs (WSGI) `Content_Length`
  is `Content-Length`.

*Remembering.* Clients and engines send the same head again and again, but for its `Content-Length`. A head that was read
once is remembered without that line, so the next of its kind costs a search and a lookup. What was accepted with one
plain line of digits there is accepted with another. At most MAX_REMEMBERED are kept; heads with ids or trace
contexts of their own are read anew each time.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import httptools

END = b"\r\n\r\n"


class HeadError(Exception):
    """The head cannot be accepted; `status` is what a client is told."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


# What a header line is to us. Plain numbers: they are compared for each line of each request.
_PASS, _HOP, _CONNECTION, _LENGTH, _CODING, _HOST, _REQUEST_ID, _FORWARDED_FOR = range(8)
_EXPECT, _UPGRADE, _OURS = range(8, 11)
_KEPT = 11  # from here on lines are passed as they are
_FORWARDED_PROTO, _FORWARDED_HOST, _AUTHORIZATION, _TYPE, _SERVER = range(11, 16)
_WEBSOCKET_KEY, _WEBSOCKET_VERSION, _COOKIE, _SESSION, _ENCODING, _TRACEPARENT, _ACCEPT = range(16, 23)

_KINDS = {
    b"connection": _CONNECTION,
    b"keep-alive": _HOP,
    b"proxy-authenticate": _HOP,
    b"proxy-authorization": _HOP,
    b"proxy-connection": _HOP,
    b"te": _HOP,
    b"http2-settings": _HOP,
    b"content-length": _LENGTH,
    b"transfer-encoding": _CODING,
    b"host": _HOST,
    b"x-request-id": _REQUEST_ID,
    b"x-forwarded-for": _FORWARDED_FOR,
    b"x-forwarded-proto": _FORWARDED_PROTO,
    b"x-forwarded-host": _FORWARDED_HOST,
    b"authorization": _AUTHORIZATION,
    b"expect": _EXPECT,
    b"upgrade": _UPGRADE,
    b"content-type": _TYPE,
    b"server": _SERVER,
    b"sec-websocket-key": _WEBSOCKET_KEY,
    b"sec-websocket-version": _WEBSOCKET_VERSION,
    b"cookie": _COOKIE,
    b"x-session-id": _SESSION,
    b"content-encoding": _ENCODING,
    b"traceparent": _TRACEPARENT,
    b"sec-websocket-accept": _ACCEPT,
}
_SEEN: dict[bytes, int] = {}  # by spelling: saves lowering each name each time
_MAX_SEEN = 2048
_LONGEST_SEEN = 64
MAX_REMEMBERED = 512
_LENGTH_LINE = b"\r\nContent-Length: "  # as nearly everybody spells it
_LONGEST_REMEMBERED = 4096
_DIGITS = re.compile(rb"[0-9]{1,15}\r\n")
_WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_REQUEST_LINE = re.compile(rb"[A-Z-]+ [\x21-\x7e]+ HTTP/[0-9]\.[0-9]")
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] [1-5][0-9]{2}(?: [\t\x20-\x7e\x80-\xff]*)?")
_AUTHORITY = re.compile(rb"[A-Za-z0-9._~%!$&'()*+;=:\[\]-]*")  # of a URL, without user information


def _kind(name: bytes) -> int:
    lowered = name.lower()
    kind = _OURS if lowered.startswith(b"x-skyserve-") else _KINDS.get(lowered, _PASS)
    if kind == _PASS and b"_" in lowered:
        dashed = lowered.replace(b"_", b"-")
        if dashed in _KINDS or dashed.startswith(b"x-skyserve-"):
            kind = _HOP
    if len(_SEEN) < _MAX_SEEN and len(name) <= _LONGEST_SEEN:
        _SEEN[name] = kind
    return kind


class _Lines:
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


class RequestHead:
    """One request as its head tells it. Header values are bytes, as they came.

    The defaults are the class's: most requests set few of them.
    """

    method = b""
    target = b""  # path and query, as sent
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
    has_forwarded_proto = False
    has_forwarded_host = False
    authorization: bytes | None = None
    traceparent = b""
    content_type = b""
    cookie = b""
    session = b""
    ours: Mapping[bytes, bytes] | None = None  # X-SkyServe-*, by what follows, in lower case

    def without(self, name: bytes) -> RequestHead:
        """The same without any header line of this name (lower case)."""
        other = RequestHead()
        other.__dict__.update(self.__dict__)
        prefix = name + b":"
        size = len(prefix)
        kept = (line for line in self.lines.split(b"\r\n") if line[:size].lower() != prefix)
        other.lines = b"\r\n".join(kept)
        return other


class Reader:
    """Reads heads, and remembers those it has read."""

    __slots__ = ("_answers", "_requests")

    def __init__(self) -> None:
        self._requests: dict[tuple[bytes, bytes], RequestHead] = {}
        self._answers: dict[tuple[bytes, bytes], ResponseHead] = {}

    def request(self, head: bytes, max_headers: int) -> tuple[RequestHead, int]:
        """The head, which is shared and must not be changed, and the length of its body, as far as it is told. `head`
        ends with the empty line. Raises HeadError."""
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

    def answer(self, head: bytes, max_headers: int) -> tuple[ResponseHead, int | None]:
        """As `request`; the length is None if the head does not tell it."""
        at = head.find(_LENGTH_LINE)
        if at < 0:
            key: tuple[bytes, bytes] = (head, b"")
            length = None
        else:
            digits = _DIGITS.match(head, at + 18)
            if digits is None or len(head) > _LONGEST_REMEMBERED:
                answer = read_response(head, max_headers)
                return answer, answer.length
            end = digits.end()
            key, length = (head[:at], head[end:]), int(head[at + 18 : end - 2])
        known = self._answers.get(key)
        if known is None:
            known = read_response(head, max_headers)
            if len(head) <= _LONGEST_REMEMBERED:
                if len(self._answers) >= MAX_REMEMBERED:
                    self._answers.clear()
                self._answers[key] = known
        return known, length if at >= 0 else known.length


def read_request(head: bytes, max_headers: int) -> RequestHead:
    """`head` ends with the empty line. Raises HeadError."""
    seen = _Lines()
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
    if not seen.complete or seen.count != len(lines) - 1 or not _REQUEST_LINE.fullmatch(lines[0]):
        raise HeadError(400, "malformed_request", "The head of the request is malformed.")
    if seen.count > max_headers:
        raise HeadError(431, "too_many_headers", f"The request has more than {max_headers} header lines.")
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise HeadError(505, "unsupported_version", "HTTP/1.1 and HTTP/1.0 are spoken here.")
    request = RequestHead()
    request.method = parser.get_method()
    if request.method == b"CONNECT":  # whatever its target: a 2xx would make a tunnel of the connection
        raise HeadError(400, "bad_request_target", "The request target must be a path.")
    authority, request.target = _origin_form(seen.url)
    request.path = request.target.partition(b"?")[0]
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
    """Set what the marked lines say; the numbers of the lines that are not passed."""
    drop: set[int] = set()
    hosts = 0
    named: list[bytes] = []
    proto = host = 0  # the numbers of their lines
    upgrade = key = version = b""
    ours: dict[bytes, bytes] = {}
    for kind, number, name, value in marked:
        if kind < _KEPT:
            drop.add(number)
        if kind == _LENGTH:
            request.length = _length(value)
        elif kind == _HOST:
            hosts += 1
            request.host = value
        elif kind == _TYPE:
            request.content_type = value
        elif kind == _AUTHORIZATION:
            request.authorization = value
        elif kind == _CONNECTION:
            named += _tokens(value)
        elif kind == _CODING:
            if value.lower() != b"chunked" or request.chunked:
                raise HeadError(501, "transfer_coding", "The only transfer coding spoken here is chunked.")
            request.chunked = True
        elif kind == _REQUEST_ID:
            request.request_id = value if _SANE_ID.fullmatch(value) else b""
        elif kind == _FORWARDED_FOR:
            before = request.forwarded_for
            request.forwarded_for = before + b", " + value if before else value
        elif kind == _FORWARDED_PROTO:
            proto = number
        elif kind == _FORWARDED_HOST:
            host = number
        elif kind == _SESSION:
            request.session = value
        elif kind == _COOKIE:
            request.cookie = value
        elif kind == _TRACEPARENT:
            request.traceparent = value
        elif kind == _EXPECT:
            request.expects = value.lower() == b"100-continue"
        elif kind == _UPGRADE:
            upgrade = value.lower()
        elif kind == _WEBSOCKET_KEY:
            key = value
        elif kind == _WEBSOCKET_VERSION:
            version = value
        elif kind == _OURS:
            ours[name[11:].lower()] = value
    if ours:
        request.ours = ours
    if request.http_1_0:
        if request.chunked:  # RFC 9112 §6.1: a sender that old cannot mean it
            raise HeadError(400, "malformed_request", "HTTP/1.0 has no transfer codings.")
        request.expects = False
    elif hosts != 1:
        raise HeadError(400, "malformed_request", "The request must have exactly one Host.")
    if hosts > 1 or not _AUTHORITY.fullmatch(request.host):
        raise HeadError(400, "malformed_request", "The request must have exactly one Host.")
    for token in named:
        if token == b"close":
            request.keep_alive = False
        elif token == b"keep-alive":
            request.keep_alive = b"close" not in named
        elif token not in _NEVER_HOP:
            drop |= _numbers_of(token, lines)
    request.has_forwarded_proto = proto > 0 and proto not in drop  # `Connection` may have named them
    request.has_forwarded_host = host > 0 and host not in drop
    if upgrade == b"websocket" and b"upgrade" in named and request.method == b"GET":
        _check_handshake(request, key, version)
        request.websocket, request.websocket_key = True, key
    return drop


_NEVER_HOP = frozenset(
    {b"", b"close", b"keep-alive", b"upgrade", b"host", b"content-length", b"content-type"}
)


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip(b" \t").lower() for token in value.split(b",")]


def _numbers_of(token: bytes, lines: list[bytes]) -> set[int]:
    prefix = token + b":"
    size = len(prefix)
    return {number for number, line in enumerate(lines) if number and line[:size].lower() == prefix}


def _check_handshake(request: RequestHead, key: bytes, version: bytes) -> None:
    """RFC 6455 §4.1: a handshake that cannot succeed would bother a target in vain."""
    try:
        sound = len(base64.b64decode(key, validate=True)) == 16
    except ValueError:
        sound = False
    if not sound or version != b"13" or request.chunked or request.length or request.http_1_0:
        text = "A WebSocket needs Sec-WebSocket-Version: 13 and a Sec-WebSocket-Key of 16 bytes in base64."
        raise HeadError(400, "malformed_handshake", text)


def _origin_form(url: bytes) -> tuple[bytes, bytes]:
    """The authority, if the request target tells it, and path and query."""
    if url.startswith(b"/"):
        return b"", url
    scheme, separator, rest = url.partition(b"://")
    if separator and scheme.lower() in (b"http", b"https"):
        authority = re.split(rb"[/?]", rest, maxsplit=1)[0]
        path = rest[len(authority) :]
        if authority and _AUTHORITY.fullmatch(authority):
            return authority, path if path.startswith(b"/") else b"/" + path
    raise HeadError(400, "bad_request_target", "The request target must be a path.")


def _length(value: bytes) -> int:
    if len(value) > 18:  # llhttp has seen to it that these are digits
        raise HeadError(413, "body_too_large", "The body is too large.")
    return int(value)


class Hop(NamedTuple):
    """What is the same for all requests of one client connection: its address and the scheme it used."""

    peer: bytes
    scheme: bytes


def request_bytes(
    request: RequestHead,
    hop: Hop,
    request_id: bytes,
    path: bytes,
    base_path: bytes,
    host: bytes,
    framing: bytes,
) -> bytes:
    """The head a target gets: for `path`, below the `base_path` of its URL. `host` is the target's own name or empty (the client's is kept); `framing` is the
    line, with its line end, that says how long the body is; empty for none."""
    forwarded = request.forwarded_for
    extra = framing
    if not request.has_forwarded_proto:
        extra = b"X-Forwarded-Proto: %b\r\n%b" % (hop.scheme, extra)
    if not request.has_forwarded_host and request.host:
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


class ResponseHead:
    """One answer as its head tells it. `length` is None unless the head says it."""

    status = 0
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


def read_response(head: bytes, max_headers: int) -> ResponseHead:
    """`head` ends with the empty line. Raises HeadError; its status is of no use here."""
    seen = _Lines()
    parser = httptools.HttpResponseParser(seen)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise HeadError(502, "malformed_answer", f"the head of the answer is malformed: {error}") from None
    lines = head[:-4].split(b"\r\n")
    if not seen.complete or seen.count != len(lines) - 1 or not _STATUS_LINE.fullmatch(lines[0]):
        raise HeadError(502, "malformed_answer", "the head of the answer is malformed")
    if seen.count > max_headers:
        raise HeadError(502, "malformed_answer", "the head of the answer has too many lines")
    answer = ResponseHead()
    answer.status = parser.get_status_code()
    http_1_1 = lines[0][7:8] == b"1"
    lines[0] = b"HTTP/1.1 " + lines[0][9:]
    named: list[bytes] = []
    server = request_id = 0  # the numbers of their lines
    drop: set[int] | None = None
    for kind, number, _name, value in seen.marked:
        if kind == _TYPE:
            answer.content_type = value
        elif kind == _SERVER:
            server = number
        elif kind == _REQUEST_ID:
            request_id = number
        elif kind == _ENCODING:
            answer.encoded = value.lower() != b"identity"
        elif kind == _ACCEPT:
            answer.accept = value
        elif kind == _LENGTH:
            answer.length = _length(value)
            drop = drop or set()
            drop.add(number)
        elif kind in (_CODING, _CONNECTION, _HOP, _UPGRADE, _OURS):
            drop = drop or set()
            drop.add(number)
            if kind == _UPGRADE:
                answer.upgrade = value.lower()
            elif kind == _CODING:
                if value.lower() != b"chunked" or answer.chunked:
                    raise HeadError(502, "malformed_answer", "the answer has a transfer coding but chunked")
                answer.chunked = True
            elif kind == _CONNECTION:
                named += _tokens(value)
    for token in named:
        if token not in _NEVER_HOP:
            drop = (drop or set()) | _numbers_of(token, lines)
    # RFC 9112 §6.1: what an HTTP/1.0 server means by chunked is in doubt once its body is over.
    lasting = b"keep-alive" in named and not answer.chunked
    answer.keep_alive = b"close" not in named and (http_1_1 or lasting)
    answer.has_server = server > 0 and not (drop and server in drop)
    answer.has_request_id = request_id > 0 and not (drop and request_id in drop)
    if not answer.has_server:
        lines.append(b"Server: skyserve")
    answer.lines = b"\r\n".join(line for number, line in enumerate(lines) if not drop or number not in drop)
    return answer


def opens_websocket(request: RequestHead, answer: ResponseHead) -> bool:
    """Whether the target's 101 completes the handshake (RFC 6455 §4.1)."""
    digest = hashlib.sha1(request.websocket_key + _WEBSOCKET_GUID, usedforsecurity=False).digest()
    return answer.upgrade == b"websocket" and answer.accept == base64.b64encode(digest)


def response_bytes(answer: ResponseHead, request_id: bytes, framing: bytes) -> bytes:
    """The head a client gets. `framing` are the lines, each with its line end, on length and connection."""
    if answer.has_request_id:
        return b"%b\r\n%b\r\n" % (answer.lines, framing)
    return b"%b\r\nX-Request-Id: %b\r\n%b\r\n" % (answer.lines, request_id, framing)
