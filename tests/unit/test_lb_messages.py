"""Heads: refused heads, passed heads, and that no server behind us can read them differently (h11 is the witness)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.http import head_lines, messages
from lb.http.messages import (
    END,
    HeadError,
    Hop,
    Reader,
    RequestHead,
    read_request,
    read_response,
    request_bytes,
)

HOP = Hop(b"192.0.2.1", b"http", trusted=True)
START = b"POST /p HTTP/1.1\r\nHost: x\r\n"


def head(*lines: bytes, start: bytes = START) -> bytes:
    return start + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def refusal(data: bytes) -> tuple[int, str]:
    with pytest.raises(HeadError) as caught:
        read_request(data, 128)
    return caught.value.status, caught.value.code


def passed_on(request: RequestHead, framing: bytes = b"", hop: Hop = HOP) -> bytes:
    return request_bytes(request, hop, b"id-1", request.target, b"", request.host and b"", framing)


def instance_poller(data: bytes) -> h11.Request:
    """The head as h11 reads it. Raises h11.RemoteProtocolError."""
    http = h11.Connection(h11.SERVER)
    http.receive_data(data)
    event = http.next_event()
    assert isinstance(event, h11.Request), event
    return event


def values(request: h11.Request, name: bytes) -> list[bytes]:
    return [value for key, value in request.headers if key == name]


MALFORMED = (400, "malformed_request")
CODING = (501, "transfer_coding")
TARGET = (400, "bad_request_target")

SMUGGLING = {
    "two lengths that agree": (b"Content-Length: 5\r\nContent-Length: 5", MALFORMED),
    "two lengths that differ": (b"Content-Length: 5\r\nContent-Length: 6", MALFORMED),
    "two lengths, spelled differently": (b"content-length: 5\r\nContent-Length: 5", MALFORMED),
    "a list of lengths": (b"Content-Length: 5, 5", MALFORMED),
    "a length with a sign": (b"Content-Length: +5", MALFORMED),
    "a negative length": (b"Content-Length: -1", MALFORMED),
    "a hexadecimal length": (b"Content-Length: 0x5", MALFORMED),
    "a length with an underscore": (b"Content-Length: 5_0", MALFORMED),
    "a length of two words": (b"Content-Length: 5 5", MALFORMED),
    "an empty length": (b"Content-Length:", MALFORMED),
    "a length with a vertical tab": (b"Content-Length: 5\x0b", MALFORMED),
    "a length beyond 64 bits": (b"Content-Length: 99999999999999999999999", MALFORMED),
    "a length beyond reason": (b"Content-Length: 9999999999999999999", (413, "body_too_large")),
    "a length, then chunked": (b"Content-Length: 5\r\nTransfer-Encoding: chunked", MALFORMED),
    "chunked, then a length": (b"Transfer-Encoding: chunked\r\nContent-Length: 5", MALFORMED),
    "chunked twice": (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", MALFORMED),
    "chunked, chunked": (b"Transfer-Encoding: chunked, chunked", MALFORMED),
    "chunked, then identity": (b"Transfer-Encoding: chunked, identity", MALFORMED),
    "identity": (b"Transfer-Encoding: identity", MALFORMED),
    "gzip, then chunked": (b"Transfer-Encoding: gzip, chunked", CODING),
    "xchunked": (b"Transfer-Encoding: xchunked", MALFORMED),
    "chunked with a parameter": (b"Transfer-Encoding: chunked;q=1", MALFORMED),
    "chunked in quotes": (b'Transfer-Encoding: "chunked"', MALFORMED),
    "chunked and a comma": (b"Transfer-Encoding: chunked,", MALFORMED),
    "a comma and chunked": (b"Transfer-Encoding: ,chunked", CODING),
    "no coding": (b"Transfer-Encoding:", MALFORMED),
    "a vertical tab before chunked": (b"Transfer-Encoding: \x0bchunked", MALFORMED),
    "a vertical tab after chunked": (b"Transfer-Encoding: chunked\x0b", MALFORMED),
    "a space before the colon": (b"Transfer-Encoding : chunked", MALFORMED),
    "NUL in the name": (b"Transfer-Encoding\x00: chunked", MALFORMED),
    "a folded line": (b"X: a\r\n b", MALFORMED),
    "a folded line with a tab": (b"X: a\r\n\tb", MALFORMED),
    "a space before the first line": (b" X: a", MALFORMED),
    "a bare line feed": (b"X: a\nTransfer-Encoding: chunked", MALFORMED),
    "a bare carriage return": (b"X: a\rTransfer-Encoding: chunked", MALFORMED),
    "two carriage returns": (b"X: a\r\r\nY: b", MALFORMED),
    "a line feed at the end of the head": (b"X: y\r\n\nGET /other HTTP/1.1", MALFORMED),
    "a line feed alone": (b"\nX: y", MALFORMED),
    "a carriage return alone": (b"\rX: y", MALFORMED),
    "NUL in a value": (b"X: a\x00b", MALFORMED),
    "a control character in a value": (b"X: a\x01b", MALFORMED),
    "DEL in a value": (b"X: a\x7fb", MALFORMED),
    "a name with a byte beyond ASCII": (b"X\xff: a", MALFORMED),
    "a name with a parenthesis": (b"X(: a", MALFORMED),
    "no name": (b": a", MALFORMED),
    "no colon": (b"X", MALFORMED),
    "two hosts": (b"Host: y", MALFORMED),
}


@pytest.mark.parametrize(("lines", "told"), SMUGGLING.values(), ids=SMUGGLING.keys())
def test_what_two_readers_could_read_differently_is_refused(lines: bytes, told: tuple[int, str]) -> None:
    assert refusal(head(lines)) == told


FIRST_LINES = {
    "no version": (b"GET /", MALFORMED),
    "HTTP/0.9": (b"GET / HTTP/0.9", (505, "unsupported_version")),
    "HTTP/1.2": (b"GET / HTTP/1.2", MALFORMED),
    "HTTP/1.10": (b"GET / HTTP/1.10", MALFORMED),
    "HTTP/2.0": (b"GET / HTTP/2.0", (505, "unsupported_version")),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0", MALFORMED),
    "http in small letters": (b"GET / http/1.1", MALFORMED),
    "RTSP": (b"DESCRIBE / RTSP/1.0", MALFORMED),
    "ICE": (b"SOURCE / ICE/1.0", MALFORMED),
    "two spaces before the path": (b"GET  / HTTP/1.1", MALFORMED),
    "two spaces behind the path": (b"GET /  HTTP/1.1", MALFORMED),
    "a space at the end": (b"GET / HTTP/1.1 ", MALFORMED),
    "a tab for a space": (b"GET\t/ HTTP/1.1", (501, "unknown_method")),
    "a tab in the path": (b"GET /a\tb HTTP/1.1", MALFORMED),
    "a byte beyond ASCII in the path": (b"GET /\xff HTTP/1.1", MALFORMED),
    "DEL in the path": (b"GET /\x7f HTTP/1.1", MALFORMED),
    "NUL in the path": (b"GET /\x00 HTTP/1.1", MALFORMED),
    "a carriage return in the path": (b"GET /\rX: y HTTP/1.1", MALFORMED),
    "a line feed behind the first line": (b"GET / HTTP/1.1\nX: y", MALFORMED),
    "an empty line first": (b"\r\nGET / HTTP/1.1", MALFORMED),
    "a method in small letters": (b"get / HTTP/1.1", (501, "unknown_method")),
    "a method nobody knows": (b"FROBNICATE / HTTP/1.1", (501, "unknown_method")),
    "CONNECT": (b"CONNECT x:1 HTTP/1.1", TARGET),
    "CONNECT with a path": (b"CONNECT /x HTTP/1.1", TARGET),
    "an asterisk": (b"OPTIONS * HTTP/1.1", TARGET),
    "a relative path": (b"GET a HTTP/1.1", MALFORMED),
    "another scheme": (b"GET ftp://x/a HTTP/1.1", TARGET),
    "a URL without a host": (b"GET http:///a HTTP/1.1", TARGET),
    "a URL with a user": (b"GET http://u:p@x/a HTTP/1.1", TARGET),
    "a URL with two users": (b"GET http://x@y@z/a HTTP/1.1", TARGET),
    "a URL with a fragment for a path": (b"GET http://x#y/a HTTP/1.1", MALFORMED),
}


@pytest.mark.parametrize(("first", "told"), FIRST_LINES.values(), ids=FIRST_LINES.keys())
def test_first_lines_that_are_refused(first: bytes, told: tuple[int, str]) -> None:
    assert refusal(head(b"Host: x", start=first + b"\r\n")) == told


@pytest.mark.parametrize(
    ("first", "lines", "host", "target"),
    [
        (b"GET http://a.example/x?y HTTP/1.1", [b"Host: b"], b"a.example", b"/x?y"),
        (b"GET HTTPS://a.example:81 HTTP/1.1", [b"Host: b"], b"a.example:81", b"/"),
        (b"GET http://[::1]:80?q HTTP/1.1", [b"Host: b"], b"[::1]:80", b"/?q"),
        (b"GET http://a/x HTTP/1.0", [], b"a", b"/x"),
        (b"GET //a/x HTTP/1.1", [b"Host: b"], b"b", b"//a/x"),
        (b"GET / HTTP/1.0", [], b"", b"/"),
        (b"GET / HTTP/1.1", [b"Host:"], b"", b"/"),
    ],
    ids=lambda value: value.decode() if isinstance(value, bytes) else None,
)
def test_an_absolute_url_says_which_host_is_meant(
    first: bytes, lines: list[bytes], host: bytes, target: bytes
) -> None:
    request = read_request(head(*lines, start=first + b"\r\n"), 128)
    assert (request.host, request.target) == (host, target)


@pytest.mark.parametrize("host", [b"a b", b"a/b", b"u@b", b"a,b", b"a\xff", b"a\tb"])
def test_a_host_that_is_none_is_refused(host: bytes) -> None:
    assert refusal(head(b"Host: " + host, start=b"GET / HTTP/1.1\r\n")) == MALFORMED


@pytest.mark.parametrize(
    ("lines", "arrives"),
    [
        ([b"Connection: content-length", b"Content-Length: 5"], {b"content-length": [b"5"]}),
        ([b"Connection: host"], {b"host": [b"x"]}),
        ([b"Connection: transfer-encoding", b"Transfer-Encoding: chunked"], {b"transfer-encoding": []}),
        ([b"Connection: x-forwarded-proto", b"X-Forwarded-Proto: https"], {b"x-forwarded-proto": [b"http"]}),
        ([b"Connection: X-Forwarded-Host", b"X-Forwarded-Host: evil"], {b"x-forwarded-host": [b"x"]}),
        ([b"Connection: x-forwarded-for", b"X-Forwarded-For: 1.1.1.1"], {b"x-forwarded-for": [b"1.1.1.1, 192.0.2.1"]}),
        ([b"Connection: x-request-id", b"X-Request-Id: mine"], {b"x-request-id": [b"id-1"]}),
        ([b"Connection: content-type", b"Content-Type: a/b"], {b"content-type": [b"a/b"]}),
        ([b"Connection: X-A,x-b ,\tx-C", b"X-A: 1", b"X-B: 2", b"x-c: 3", b"X-D: 4"],
         {b"x-a": [], b"x-b": [], b"x-c": [], b"x-d": [b"4"], b"connection": []}),
        ([b"Keep-Alive: 5", b"TE: trailers", b"Proxy-Connection: x", b"Upgrade: h2c", b"HTTP2-Settings: x"],
         {b"keep-alive": [], b"te": [], b"proxy-connection": [], b"upgrade": [], b"http2-settings": []}),
        ([b"Content_Length: 9", b"Transfer_Encoding: chunked", b"X_Forwarded_For: 1.1.1.1", b"X_Mine: 1"],
         {b"content_length": [], b"transfer_encoding": [], b"x_forwarded_for": [], b"x_mine": [b"1"]}),
        ([b"X-SkyServe-Policy: p", b"x_skyserve_policy: q"], {b"x-skyserve-policy": [], b"x_skyserve_policy": []}),
        ([b"Expect: 100-continue"], {b"expect": []}),
        ([b"X-Odd: a \t ", b"X-Empty:", b"X-Tab:\ta\tb"], {b"x-odd": [b"a"], b"x-empty": [b""], b"x-tab": [b"a\tb"]}),
        ([b"X-Twice: 1", b"x-twice: 2"], {b"x-twice": [b"1", b"2"]}),
    ],
    ids=[
        "Connection names the length", "Connection names the host", "Connection names the coding",
        "Connection names the scheme", "Connection names the forwarded host", "Connection names the forwarded client",
        "Connection names the id", "Connection names the type", "Connection names some", "lines of one hop",
        "underscores", "our own", "Expect", "odd values", "twice",
    ],
)  # fmt: skip
def test_which_lines_arrive(lines: list[bytes], arrives: dict[bytes, list[bytes]]) -> None:
    request = read_request(head(*lines), 128)
    framing = b"Content-Length: %d\r\n" % request.length if request.length else b""
    seen = instance_poller(passed_on(request, framing))
    assert {name: values(seen, name) for name in arrives} == arrives
    assert values(seen, b"host") == [b"x"]


@pytest.mark.parametrize("given", [b"a b", b"a" * 129, b"", b"\xff", b"a\tb"])
def test_an_id_that_is_none_is_not_taken(given: bytes) -> None:
    assert read_request(head(b"X-Request-Id: " + given), 128).request_id == b""


SAID_BY_A_PROXY = {
    b"x-forwarded-for": b"203.0.113.7",
    b"x-forwarded-proto": b"https",
    b"x-forwarded-host": b"shop.example",
    b"x-real-ip": b"203.0.113.7",
    b"forwarded": b"for=203.0.113.7",
}


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "not trusted"])
def test_what_a_proxy_says_of_its_client_passes_if_it_is_trusted(trusted: bool) -> None:
    lines = [name + b": " + value for name, value in SAID_BY_A_PROXY.items()]
    request = read_request(head(*lines, b"X_Real_IP: 203.0.113.8", b"X-Mine: 1"), 128)
    seen = instance_poller(passed_on(request, hop=HOP._replace(trusted=trusted)))
    overwritten = {b"x-forwarded-for": b"192.0.2.1", b"x-forwarded-proto": b"http", b"x-forwarded-host": b"x"}
    appended = {**SAID_BY_A_PROXY, b"x-forwarded-for": b"203.0.113.7, 192.0.2.1"}
    expected = appended if trusted else overwritten
    got = {name: values(seen, name) for name in SAID_BY_A_PROXY}
    assert got == {name: [expected[name]] if name in expected else [] for name in SAID_BY_A_PROXY}
    assert values(seen, b"x_real_ip") == []
    assert values(seen, b"x-mine") == [b"1"]


def test_heads_are_bounded_in_lines() -> None:
    lines = [b"X-%d: 1" % number for number in range(9)]
    assert read_request(head(*lines), 10)
    with pytest.raises(HeadError) as caught:
        read_request(head(*lines), 9)
    assert caught.value.status == 431


ANSWERS = {
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5",
    "a list of lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5",
    "a length and chunked": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked",
    "chunked and a length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5",
    "chunked twice": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "gzip and chunked in two lines": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
    "gzip and chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
    "identity": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity",
    "a folded line": b"HTTP/1.1 200 OK\r\nX: a\r\n b",
    "a space before a colon": b"HTTP/1.1 200 OK\r\nX : a",
    "a bare line feed": b"HTTP/1.1 200 OK\nX: a",
    "a bare line feed further on": b"HTTP/1.1 200 OK\r\nX: a\nY: b",
    "a bare carriage return": b"HTTP/1.1 200 OK\r\nX: a\rSet-Cookie: b",
    "NUL": b"HTTP/1.1 200 OK\r\nX: a\x00b",
    "NUL in the reason": b"HTTP/1.1 200 O\x00K",
    "a status of 99": b"HTTP/1.1 099 Low",
    "a status of 0": b"HTTP/1.1 000 Zero",
    "a status of 600": b"HTTP/1.1 600 High",
    "a status of two digits": b"HTTP/1.1 20 Short",
    "a status of four digits": b"HTTP/1.1 2000 Long",
    "no status": b"HTTP/1.1 OK",
    "HTTP/2": b"HTTP/2.0 200 OK",
    "HTTP/0.9": b"HTTP/0.9 200 OK",
    "ICY": b"ICY 200 OK",
    "RTSP": b"RTSP/1.0 200 OK",
    "an empty line first": b"\r\nHTTP/1.1 200 OK",
    "a line feed first": b"\nHTTP/1.1 200 OK",
    "two spaces": b"HTTP/1.1  200 OK",
    "a request": b"GET / HTTP/1.1",
}


@pytest.mark.parametrize("lines", ANSWERS.values(), ids=ANSWERS.keys())
def test_responses_that_are_no_answers(lines: bytes) -> None:
    with pytest.raises(HeadError):
        read_response(lines + END, 128)


@pytest.mark.parametrize(
    ("lines", "lasts"),
    [
        (b"HTTP/1.1 200 OK", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close", False),
        (b"HTTP/1.1 200 OK\r\nConnection: close, keep-alive", False),
        (b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nConnection: Close", False),
        (b"HTTP/1.0 200 OK", False),
        (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive", True),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked", False),
    ],
    ids=[
        "1.1",
        "1.1 close",
        "close wins",
        "close wins over two lines",
        "1.0",
        "1.0 keep-alive",
        "1.0 chunked",
    ],
)
def test_whether_a_target_keeps_its_connection(lines: bytes, lasts: bool) -> None:
    assert read_response(lines + END, 128).keep_alive is lasts


def test_lines_of_an_answer_that_its_connection_names_end_here() -> None:
    answer = read_response(
        b"HTTP/1.1 200 OK\r\nConnection: server, x-request-id, x-a\r\nServer: s\r\nX-Request-Id: i\r\nX-A: a\r\nX-B: b"
        + END,
        128,
    )
    assert answer.lines == b"HTTP/1.1 200 OK\r\nX-B: b\r\nServer: skyserve"
    assert not answer.has_request_id


# --- the witness

_TOKENS = st.text("abcxyzABC019-_!#$%&'*+.^`|~", min_size=1, max_size=12).map(str.encode)
_TEXT = st.binary(max_size=20)
_NAMES = st.one_of(
    st.sampled_from(
        [b"Content-Length", b"content-length", b"Transfer-Encoding", b"Host", b"Connection", b"Upgrade", b"X",
         b"Content-Length ", b" Content-Length", b"Transfer-Encoding\t", b"X-Forwarded-For", b"Expect", b""]
    ),
    _TOKENS, _TEXT,
)  # fmt: skip
_VALUES = st.one_of(
    st.sampled_from(
        [b"5", b"05", b"5 ", b"+5", b"0x5", b"5,5", b"chunked", b"Chunked", b"chunked,", b"gzip, chunked", b"identity",
         b"close", b"keep-alive", b"upgrade", b"content-length", b"x", b"a\r\n b", b"a\nb", b"a\rb", b"100-continue"]
    ),
    _TEXT,
)  # fmt: skip
_FIRST = st.one_of(
    st.builds(
        lambda method, gap, target, version: method + gap + target + b" " + version,
        st.sampled_from([b"GET", b"POST", b"HEAD", b"DELETE", b"CONNECT", b"OPTIONS", b"PRI", b"G T"]),
        st.sampled_from([b" ", b"  ", b"\t"]),
        st.sampled_from(
            [b"/", b"/a?b", b"*", b"http://x/y", b"http://u@x/", b"x:1", b"/\x80", b"/a b", b"//"]
        ),
        st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/1.1 ", b"HTTP/2.0", b"HTTP/1.2", b"RTSP/1.0"]),
    ),
    st.just(b"POST / HTTP/1.1"),
)
_LINE = st.builds(
    lambda name, sep, value: name + sep + value, _NAMES, st.sampled_from([b": ", b":"]), _VALUES
)
_ENDS = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\r\n"])


@st.composite
def _heads(draw: st.DrawFn) -> bytes:
    lines = draw(st.lists(_LINE, max_size=5))
    if draw(st.booleans()):
        lines.insert(0, b"Host: x")
    ended = b"".join(line + draw(_ENDS) for line in lines)
    return draw(_FIRST) + draw(_ENDS) + ended + b"\r\n"


@given(_heads())
def test_whatever_we_accept_h11_accepts_and_reads_alike(data: bytes) -> None:
    end = data.find(END)
    if end < 0:
        return
    data = data[: end + 4]
    try:
        ours = read_request(data, 128)
    except HeadError:
        return
    theirs = instance_poller(data)
    assert ours.method == theirs.method
    assert ours.length == int((values(theirs, b"content-length") or [b"0"])[0])
    assert ours.chunked == bool(values(theirs, b"transfer-encoding"))
    # And the result is one head, with one host, and with no other length than what is written here.
    framing = b"Transfer-Encoding: chunked\r\n" if ours.chunked else b"Content-Length: %d\r\n" % ours.length
    onward = passed_on(ours, framing)
    assert onward.find(END) == len(onward) - 4
    again = instance_poller(onward)
    assert again.target == ours.target
    assert len(values(again, b"host")) == 1
    assert values(again, b"content-length") == ([] if ours.chunked else [b"%d" % ours.length])
    assert values(again, b"transfer-encoding") == ([b"chunked"] if ours.chunked else [])
    mine = {b"host", b"content-length", b"transfer-encoding", b"x-forwarded-for", b"x-request-id"}
    mine |= {b"x-forwarded-proto", b"x-forwarded-host", b"connection", b"upgrade"}
    for name, value in again.headers:
        assert name in mine or (name, value) in theirs.headers


@given(_heads())
def test_an_answer_we_accept_h11_accepts_and_reads_alike(data: bytes) -> None:
    _, _, rest = data.partition(b"\r\n")
    data = b"HTTP/1.1 200 OK\r\n" + rest
    data = data[: data.find(END) + 4]
    try:
        ours = read_response(data, 128)
    except HeadError:
        return
    http = h11.Connection(h11.CLIENT)
    http.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    http.send(h11.EndOfMessage())
    http.receive_data(data)
    theirs = http.next_event()
    assert isinstance(theirs, h11.Response)
    lengths = [int(value) for name, value in theirs.headers if name == b"content-length"]
    assert lengths == ([] if ours.length is None else [ours.length])
    assert ours.chunked == any(name == b"transfer-encoding" for name, _ in theirs.headers)


# --- the cache of heads


def facts(one: object) -> dict[str, object]:
    names = [name for name in dir(type(one)) if name[0] != "_" and name not in ("length", "before", "after")]
    return {name: getattr(one, name) for name in names if not callable(getattr(one, name))}


def outcome(read: Callable[[bytes, int], Any], data: bytes) -> tuple[Any, Any]:
    """The parsed head, with the length; or how it is refused."""
    try:
        got = read(data, 128)
    except HeadError as error:
        return error.status, error.code
    one, length = got if isinstance(got, tuple) else (got, got.length)
    return facts(one), length


_KNOWN_LINES = st.sampled_from(
    [b"Host: x", b"Content-Length: %d", b"Content-Length: %d", b"content-length: %d", b"Content-Length:  %d",
     b"Content-Length: 0%d", b"Content-Length: +%d", b"Content-Length: %d ", b"Transfer-Encoding: chunked", b"X: %d",
     b"Connection: upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13", b"Connection: content-length",
     b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", b"X-SkyServe-Session: s", b"X-Request-Id: %d", b"X-Request-Id: r",
     b"x-request-id: %d", b"X-Request-Id: %d ", b"X-SkyServe-Hop: age=%d", b"x-skyserve-hop: age=%d", b"X-SkyServe-Hop: %d\r\n a",
     b"X-SkyServe-Credit: %d-1", b"x-skyserve-credit: 1-%d", b"X-SkyServe-Credit: %d x", b"Connection: x-request-id",
     b"Authorization: Bearer %d", b"Authorization: Bearer %d", b"authorization: Bearer k%d", b"Authorization: Basic %d", b"x-api-key: %d",
     b"traceparent: 00-%032x-00f067aa0ba902b7-01", b"traceparent: 00-%032x-00f067aa0ba902b7-01", b"Traceparent: 00-%032x-00f067aa0ba902b7-01",
     b"traceparent: %d", b"Connection: traceparent", b"X: traceparent: 00-%032x-00f067aa0ba902b7-01",
     b"X-API-Key: %d", b"api-key: %d", b"X: Authorization: Bearer %d", b"X: x-api-key: %d", b"Connection: x-api-key, authorization"]
)  # fmt: skip
_NUMBERS = st.sampled_from([0, 1, 5, 10**14, 10**15, 10**18, 10**19])


@given(
    st.sampled_from([b"GET / HTTP/1.1", b"POST / HTTP/1.1", b"POST / HTTP/1.0"]),
    st.lists(_KNOWN_LINES, max_size=6),
    st.lists(_NUMBERS, min_size=2, max_size=4),
)
def test_a_remembered_head_is_what_reading_it_anew_would_give(
    first: bytes, lines: list[bytes], numbers: list[int]
) -> None:
    requests, answers, last = Reader(), Reader(), dict[object, Any]()
    for number in numbers:
        text = b"".join(b"\r\n" + (line % number if b"%" in line else line) for line in lines) + END
        for reader, anew, data in (
            (requests.request, read_request, first + text),
            (answers.response, read_response, b"HTTP/1.1 200 OK" + text),
        ):
            expected = outcome(anew, data)
            assert outcome(reader, data) == expected
            known = last.get(anew)
            end = -1 if known is None else known.end_in(data + b"behind it")
            if end >= 0:
                assert end == len(data)
                length = known.length_in(data, end) if known.after else known.length
                assert (facts(known), length) == expected
            if isinstance(expected[0], dict):
                last[anew] = reader(data, 128)[0]


def test_a_head_that_comes_again_on_a_connection_is_compared_only() -> None:
    first, second = (
        head(b"User-Agent: x", b"%b: %d" % (name, 5)) for name in (b"Content-Length", b"content-length")
    )
    for data in (first, second):
        known, _ = Reader().request(data, 128)
        longer = data.replace(b"5", b"1234")
        assert known.end_in(longer + b"...") == len(longer)
        assert known.length_in(longer, len(longer)) == 1234
        for other in (
            data[:-1],
            data.replace(b"5", b""),
            data.replace(b"5", b"5 "),
            data.replace(b"x", b"y"),
            longer.replace(b"1", b"1" * 15),
        ):
            assert known.end_in(other) == -1
    known, _ = Reader().request(head(b"X-Request-Id: 7", b"Content-Length: 5"), 128)
    assert known.end_in(head(b"X-Request-Id: 7", b"Content-Length: 5")) == -1, "its id is not the next one's"


def test_a_head_with_another_key_is_remembered() -> None:
    reader = Reader()
    for number in range(3 * messages.MAX_REMEMBERED):
        for line in (b"Authorization: Bearer k%d", b"x-api-key: k%d"):
            data = head(b"Accept: */*", line % number, b"User-Agent: x")
            assert outcome(reader.request, data) == outcome(read_request, data)
    assert len(reader._keyless) == 2


def test_what_is_remembered_is_bounded() -> None:
    reader = Reader()
    for number in range(3 * messages.MAX_REMEMBERED):
        reader.request(head(b"X-%d: 1" % number), 128)
        reader.response(b"HTTP/1.1 200 OK\r\nX-%d: 1" % number + END, 128)
        reader.request(head(b"X: " + b"x" * 5000, b"Y: %d" % number), 128)
        reader.request(head(b"Z%d%b: 1" % (number, b"x" * 100)), 128)
        reader.request(head(b"Authorization: Bearer %d" % number, b"A-%d: 1" % number), 128)
    assert len(reader._requests) <= messages.MAX_REMEMBERED
    assert len(reader._responses) <= messages.MAX_REMEMBERED
    assert 0 < len(reader._keyless) <= messages.MAX_REMEMBERED
    assert max(len(rest) for _, rest in reader._requests) < 5000
    assert len(head_lines._SEEN) <= head_lines._MAX_SEEN
    assert max(map(len, head_lines._SEEN)) <= head_lines._LONGEST_SEEN


def test_headers_that_may_carry_a_key_are_told_apart_and_passed_on() -> None:
    request = read_request(head(b"X-API-Key: k1", b"Authorization: Bearer k2", b"api-key: k3"), 128)
    assert request.credentials == (
        (b"x-api-key", b"k1"),
        (b"authorization", b"Bearer k2"),
        (b"api-key", b"k3"),
    )
    assert values(instance_poller(passed_on(request)), b"x-api-key") == [b"k1"]
    rest = instance_poller(passed_on(request.without(b"x-api-key")))
    assert (values(rest, b"x-api-key"), values(rest, b"api-key")) == ([], [b"k3"])


def test_a_key_among_subprotocols_is_found_and_the_others_pass() -> None:
    offered = b"Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.k1, openai-beta.realtime-v1"
    request = read_request(head(offered, b"Sec-WebSocket-Protocol: other"), 128)
    assert request.credentials == ((b"sec-websocket-protocol", b"k1"),)
    assert offered in passed_on(request)
    rest = passed_on(request.without_keys((b"sec-websocket-protocol",)))
    assert (
        b"Sec-WebSocket-Protocol: realtime, openai-beta.realtime-v1\r\nSec-WebSocket-Protocol: other\r\n"
        in rest
    )
    assert b"k1" not in rest
    assert b"k1" in passed_on(request), "heads are shared"


def test_heads_that_differ_by_their_key_are_one_without_it() -> None:
    reader = Reader()
    sent = [head(b"Authorization: Bearer %b" % key, b"X-Other: 1") for key in (b"k1", b"k2", b"k1", b"k3")]
    read = [reader.request(one, 128)[0] for one in sent[:1]]
    shared = read[0].without_keys((b"authorization",))
    read += [reader.request(one, 128)[0] for one in sent[1:]]
    assert [one.credentials[0][1] for one in read] == [b"Bearer k1", b"Bearer k2", b"Bearer k1", b"Bearer k3"]
    for one in read:
        found = one.without_keys((b"authorization",))
        assert found is shared
        assert (found.credentials, b"Bearer" in passed_on(found), b"X-Other: 1" in passed_on(found)) == (
            (),
            False,
            True,
        )
    assert b"Bearer" not in passed_on(one.without_keys((b"authorization", b"x-api-key")))


def test_a_key_spelled_with_an_underscore_reaches_no_target() -> None:
    request = read_request(head(b"x_api_key: k1"), 128)
    assert request.credentials == ()
    assert b"k1" not in passed_on(request)
