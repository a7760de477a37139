"""Messages cut, joined, doubled and forged, against the whole data plane (see `lb_wires`).

Whatever comes: bodies arrive as they were sent, each request gets one response, in order, what reaches a target is what
was understood, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import errno
import hashlib
import itertools
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lb.config.options import Access, Limits
from lb.config.schema import Table, Target
from lb.core.retry import MAX_ATTEMPTS_ON_A_REST
from lb.engines.kinds import EngineKind
from tests.clouds.schedules import examples
from tests.integration.lb_wires import DIES, ENDS, Bench, Client, Got, Peer, Seen, plainly, run, settle

HOST = b"Host: x\r\n"


ONCE = b"Idempotency-Key: 1"  # the server does it once, so it may be sent again


MODEL = b"/v1/completions"  # a path whose bodies are parsed, and bounded


def post(body: bytes, *lines: bytes, path: bytes = b"/p") -> bytes:
    head = b"".join(line + b"\r\n" for line in lines)
    return b"POST %b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n%b" % (path, HOST, head, len(body), body)


def chunks(*parts: bytes, last: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + last


def post_chunked(*parts: bytes, last: bytes = b"0\r\n\r\n", path: bytes = b"/p") -> bytes:
    head = b"POST %b HTTP/1.1\r\n" % path + HOST + ONCE + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + chunks(*parts, last=last)


def codes(answer: Got) -> tuple[int, str]:
    return answer.status, json.loads(answer.body)["error"]["code"]


# --- requests, cut anywhere

GET = b"GET /p?q=1 HTTP/1.1\r\nHost: x\r\nX-Mine: 1\r\n\r\n"
EXTENDED = b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n1\r\n!\r\n0\r\nX-Sum: 1\r\n\r\n"

REQUESTS: dict[str, tuple[bytes, list[tuple[bytes, bytes]]]] = {
    "no body": (GET, [(b"GET", b"")]),
    "a length": (post(b"hello"), [(b"POST", b"hello")]),
    "a length of nothing": (post(b""), [(b"POST", b"")]),
    "chunks": (post_chunked(b"hello", b"\r\n0\r\n\r\n"), [(b"POST", b"hello\r\n0\r\n\r\n")]),
    "no chunk": (post_chunked(), [(b"POST", b"")]),
    "extensions and trailers": (EXTENDED, [(b"POST", b"hello!")]),
    "one after the other": (
        GET + post(b"a") + post_chunked(b"b", b"c") + b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n" + post(b"d"),
        [(b"GET", b""), (b"POST", b"a"), (b"POST", b"bc"), (b"HEAD", b""), (b"POST", b"d")],
    ),
    "empty lines between": (GET + b"\r\n" + post(b"a") + b"\r\n\r\n" + GET, [(b"GET", b""), (b"POST", b"a"), (b"GET", b"")]),
    "Expect": (post(b"hello", b"Expect: 100-continue"), [(b"POST", b"hello")]),
    "a request for a body": (post(GET), [(b"POST", GET)]),
    "HTTP/1.0 to be kept": (
        b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + GET, [(b"GET", b""), (b"GET", b"")]
    ),
}  # fmt: skip


async def sends(
    pieces: list[bytes], expected: list[tuple[bytes, bytes]], *, buffer_bytes: int = 1 << 20
) -> None:
    bench = Bench(buffer_bytes=buffer_bytes)
    client = bench.client()
    await client.send_slowly(*pieces)
    got = client.answers(*(method for method, _ in expected))
    assert [(seen.method, seen.body) for seen in bench.seen] == expected
    bodies = [b"" if method == b"HEAD" else body for method, body in expected]
    assert [(one.status, one.body, one.whole) for one in got] == [(200, body, True) for body in bodies]
    assert not client.wire.closed
    bench.check()


@pytest.mark.parametrize(("data", "expected"), REQUESTS.values(), ids=REQUESTS.keys())
def test_a_request_cut_anywhere(data: bytes, expected: list[tuple[bytes, bytes]]) -> None:
    run(sends([data[at : at + 1] for at in range(len(data))], expected))
    for cut in range(len(data)):
        run(sends([data[:cut], data[cut:]], expected))


@pytest.mark.parametrize(
    "data", [post(b"hello"), post_chunked(b"hel", b"lo!"), EXTENDED], ids=["length", "chunks", "trailers"]
)
def test_a_long_body_cut_anywhere_is_passed_on_as_it_comes(data: bytes) -> None:
    """With no room to keep it, which is how bodies beyond `buffer_bytes` go."""

    async def story(pieces: list[bytes]) -> None:
        bench = Bench(buffer_bytes=0)
        client = bench.client()
        await client.send_slowly(*pieces)
        (got,) = client.answers(b"POST")
        (seen,) = bench.seen
        assert got.body == seen.body in (b"hello", b"hello!")
        bench.check()

    run(story([data[at : at + 1] for at in range(len(data))]))
    for cut in range(len(data)):
        run(story([data[:cut], data[cut:]]))


# --- responses, cut anywhere

ANSWERS: dict[str, tuple[bytes, bytes, bytes]] = {
    "a length": (b"GET", plainly(b"hello"), b"hello"),
    "a length of nothing": (b"GET", plainly(b""), b""),
    "chunks": (b"GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"hello", b"\r\n0\r\n\r\n"), b"hello\r\n0\r\n\r\n"),
    "no chunk": (b"GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b""),
    "extensions and trailers": (
        b"GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0;c\r\nX-Sum: 1\r\n\r\n", b"hello",
    ),
    "chunks of JSON": (
        b"GET", b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"{", b"}"), b"{}",
    ),
    "until the connection ends": (b"GET", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello" + ENDS, b"hello"),
    "HTTP/1.0, until the connection ends": (b"GET", b"HTTP/1.0 200 OK\r\n\r\nhello" + ENDS, b"hello"),
    "nothing, until the connection ends": (b"GET", b"HTTP/1.0 200 OK\r\n\r\n" + ENDS, b""),
    "another answer first": (b"GET", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: a\r\n\r\n" + plainly(b"hello"), b"hello"),
    "204": (b"GET", b"HTTP/1.1 204 No Content\r\nX: y\r\n\r\n", b""),
    "304 with a length": (b"GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b""),
    "HEAD with a length": (b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b""),
    "HEAD with chunks": (b"HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b""),
    "events": (
        b"GET", b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"data: 1\n\n", b"data: 2\n\n"),
        b"data: 1\n\ndata: 2\n\n",
    ),
}  # fmt: skip


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """The response in pieces, with the end of the connection in one of its own."""
    ends = data.endswith(ENDS)
    data = data.removesuffix(ENDS)
    edges = [0, *cuts, len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    return [*pieces, ENDS] if ends else pieces


async def responded(method: bytes, pieces: list[bytes], body: bytes, http: bytes = b"1.1") -> Got:
    bench = Bench(lambda seen: pieces)
    client = bench.client()
    client.send(method + b" / HTTP/" + http + b"\r\nHost: x\r\n\r\n")
    await settle()
    (got,) = client.answers(method)
    assert (got.body, got.whole) == (body, True)
    bench.check()
    if http == b"1.1":  # and the next request is as good as the first
        bench.behave = lambda seen: [plainly(b"next")]
        client.send(GET)
        await settle()
        assert [one.body for one in client.answers(b"GET")] == [b"next"]
        bench.check()
    else:
        assert client.wire.gone
    return got


@pytest.mark.parametrize(("method", "data", "body"), ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("http", [b"1.1", b"1.0"], ids=["1.1", "1.0"])
def test_an_answer_cut_anywhere(method: bytes, data: bytes, body: bytes, http: bytes) -> None:
    size = len(data.removesuffix(ENDS))
    run(responded(method, pieces_of(data, list(range(1, size))), body, http))
    for cut in range(size):
        run(responded(method, pieces_of(data, [cut]), body, http))


def test_trailers_of_an_answer_arrive() -> None:
    got = run(responded(b"GET", [ANSWERS["extensions and trailers"][1]], b"hello"))
    assert got.trailers == [(b"x-sum", b"1")]


@pytest.mark.parametrize("cut", [100, 200_000, 262_144, 300_000, 499_990])
@pytest.mark.parametrize("kind", [b"application/json", b"application/octet-stream"])
def test_a_chunk_that_is_too_long_to_be_kept_passes_whole(cut: int, kind: bytes) -> None:
    body = bytes(range(256)) * 2000
    data = (
        b"HTTP/1.1 200 OK\r\nContent-Type: "
        + kind
        + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunks(body, b"end")
    )
    for http in (b"1.1", b"1.0"):
        run(responded(b"GET", [data[:cut], data[cut:]], body + b"end", http))


def test_a_204_has_no_length_and_none_comes_behind_it() -> None:
    async def story() -> None:
        bench = Bench(lambda seen: [b"HTTP/1.1 204 No\r\nContent-Length: 5\r\n\r\n", b"hello"])
        client = bench.client()
        client.send(GET)
        await settle()
        (got,) = client.answers(b"GET")
        assert (got.status, got.values(b"content-length")) == (204, [])
        assert bench.peers[0].wire.gone, "a connection that may have more to say is not used again"
        bench.check()

    run(story())


# --- requests that are refused


async def refused(data: bytes, **limits: int) -> tuple[int, str]:
    """How; nothing may have reached a target."""
    bench = Bench(**limits)
    client = bench.client()
    client.send(data)
    client.send(GET)  # must not be served
    await settle()
    (got,) = client.answers(b"GET")
    assert bench.peers == []
    assert got.values(b"connection") == [b"close"]
    assert client.wire.eof_sent
    await asyncio.sleep(10)
    assert client.wire.gone
    bench.check()
    return codes(got)


HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"

FORGED = {
    "CL.TE": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG",
    "TE.CL": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n5c\r\n"
    + HIDDEN,
    "TE.TE": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n"
    + HIDDEN,
    "TE.0": b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nContent-Length: 5\r\n\r\n" + HIDDEN,
    "a folded coding": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n"
    + HIDDEN,
    "a space before the colon": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length : 5\r\n\r\n" + HIDDEN,
    "bare line feeds": b"GET / HTTP/1.1\nHost: x\n\n" + HIDDEN,
    "a bare carriage return": b"GET / HTTP/1.1\r\nHost: x\r\nX: y\rContent-Length: 5\r\n\r\n" + HIDDEN,
    "NUL": b"GET / HTTP/1.1\r\nHost: x\r\nX: \x00\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "a handshake of TLS": bytes.fromhex("16030102000100"),
    "CONNECT": b"CONNECT target:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT with a path": b"CONNECT / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a chunk with 0x": post_chunked(last=b"0x5\r\nhello\r\n0\r\n\r\n"),
    "a chunk with a sign": post_chunked(last=b"+5\r\nhello\r\n0\r\n\r\n"),
    "a chunk that is longer than its size": post_chunked(last=b"1\r\nhello\r\n0\r\n\r\n"),
    "a chunk's line feed": post_chunked(last=b"5\nhello\n0\n\n\r\n\r\n"),
    "a chunk of 2^64": post_chunked(last=b"10000000000000000\r\n"),
    "a trailer that is none": post_chunked(last=b"0\r\nGET / HTTP/1.1\r\n\r\n"),
}


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED.keys())
def test_what_could_smuggle_is_refused_and_ends_the_connection(data: bytes) -> None:
    status, _ = run(refused(data))
    assert status in (400, 501)


@pytest.mark.parametrize(
    ("data", "limits", "told"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 300, {"max_head_bytes": 256}, (431, "head_too_large")),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 300 + b"\r\n\r\n", {"max_head_bytes": 256}, (431, "head_too_large")),
        (GET, {"max_headers": 1}, (431, "too_many_headers")),
        (post(b"hello", path=MODEL), {"max_body_bytes": 4}, (413, "body_too_large")),
        (post_chunked(b"hel", b"lo", path=MODEL), {"max_body_bytes": 4}, (413, "body_too_large")),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999999999999\r\n\r\n", {}, (413, "body_too_large")),
    ],
    ids=["a head without end", "a long head", "many lines", "a long body", "long chunks", "a length beyond reason"],
)  # fmt: skip
def test_what_is_too_much_is_refused(data: bytes, limits: dict[str, int], told: tuple[int, str]) -> None:
    assert run(refused(data, **limits)) == told


def test_a_head_that_was_accepted_is_refused_once_the_limits_are_lower() -> None:
    async def story() -> None:
        bench = Bench()
        client = bench.client()
        client.send(GET)
        await settle()
        assert [one.status for one in client.answers(b"GET")] == [200]
        table = bench.table.table
        bench.table.apply(dataclasses.replace(table, limits=Limits(max_headers=1)), 0.0)
        bench.intake.applied()
        client.send(GET)
        await settle()
        assert [codes(one) for one in client.answers(b"GET")] == [(431, "too_many_headers")]

    run(story())


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (GET[:10], (408, "head_timeout")),
        (post(b"hello")[:-1], (408, "body_timeout")),
        (post_chunked(b"hello")[:-1], (408, "body_timeout")),
        (b"", None),
        (b"\r\n", None),
    ],
    ids=["half a head", "half a body", "half a chunked body", "nothing", "an empty line"],
)
def test_who_does_not_go_on_is_not_waited_for(part: bytes, told: tuple[int, str] | None) -> None:
    async def story() -> None:
        bench = Bench(head_timeout_s=5, idle_timeout_s=7)
        client = bench.client()
        client.send(part)
        await asyncio.sleep(20)
        answers = client.answers(b"GET")
        assert [codes(one) for one in answers] == ([told] if told else [])
        await settle()
        assert client.wire.gone
        bench.check()

    run(story())


def test_one_byte_now_and_then_does_not_extend_the_time_for_a_head() -> None:
    async def story() -> None:
        bench = Bench(head_timeout_s=5)
        client = bench.client()
        for byte in b"GET / HTTP/1.1\r\nX":
            client.send(bytes([byte]))
            await asyncio.sleep(1)
        assert [codes(one) for one in client.answers(b"GET")] == [(408, "head_timeout")]

    run(story())


def test_a_client_that_waited_long_for_its_response_has_its_deadlines_afterwards() -> None:
    """There is no timer for it while it waits, so it must be set again."""

    class Late(Bench):
        def on_request(self, peer: Peer, seen: Seen) -> None:
            asyncio.get_running_loop().call_later(30, peer.say, [plainly(b"late")])

    async def story() -> None:
        bench = Late(head_timeout_s=5, keepalive_s=20)
        idle, slow = bench.client(), bench.client()
        for client in (idle, slow):
            client.send(GET)
        await asyncio.sleep(31)
        for client in (idle, slow):
            assert [got.body for got in client.answers(b"GET")] == [b"late"]
        slow.send(GET[:10])
        await asyncio.sleep(4)
        assert slow.answers(b"GET") == []
        await asyncio.sleep(2)
        assert [codes(got) for got in slow.answers(b"GET")] == [(408, "head_timeout")]
        assert not idle.wire.gone
        await asyncio.sleep(15)
        assert idle.wire.gone
        bench.check()

    run(story())


def test_each_request_waits_as_long_as_it_may_for_a_first_byte() -> None:
    async def story() -> None:
        bench = Bench(lambda seen: [], targets=4, time_to_first_byte_s=3, hold_s=3)
        bench.watch()
        clients = []
        for _ in range(4):
            clients.append(bench.client())
            clients[-1].send(GET)
            await asyncio.sleep(1)
        await asyncio.sleep(0.2)  # the sweep finds within a tenth of a second what is over
        over = []
        for _ in range(8):
            over.append([len(client.answers(b"GET")) for client in clients])
            await asyncio.sleep(0.5)
        assert over[0] == [1, 1, 0, 0], "4.2 s after the first, 3.2 s after the second"
        assert [sum(row) for row in over] == [2, 0, 1, 0, 1, 0, 0, 0]
        bench.check()

    run(story())


# --- a body beyond the kept part


@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("fault", ["dies before a byte", "ends when it is reused", "refuses the connection"])
@pytest.mark.parametrize("gone", [False, True], ids=["nothing gone yet", "part of it gone"])
def test_a_body_that_is_not_kept_is_never_sent_with_a_hole(framing: str, fault: str, gone: bool) -> None:
    async def story() -> None:
        bench = Bench(targets=2, buffer_bytes=10, hold_s=2)
        bench.watch()
        client = bench.client()
        if fault == "ends when it is reused":
            client.send(GET, GET)  # one for each target
            await settle()
            client.answers(b"GET", b"GET")
            bench.seen.clear()
        body = bytes(range(100))
        data = post(body, ONCE) if framing == "length" else post_chunked(*(bytes([byte]) for byte in body))
        begun = data.index(b"\r\n\r\n") + 4 + 72  # twelve chunks, or as many bytes
        heads: list[Peer] = []
        bench.on_head = lambda peer, seen: heads.append(peer)
        bench.refuses = fault == "refuses the connection"
        await client.send_slowly(data[:begun])
        if gone:
            begun += 12
            await client.send_slowly(data[begun - 12 : begun])
        if heads:
            heads[0].wire.feed(DIES)
        client.send(data[begun : begun + 6])  # what was on its way already
        await settle()
        bench.refuses = False
        await client.send_slowly(data[begun + 6 :])
        await asyncio.sleep(3)
        assert all(seen.body == body for seen in bench.seen)
        (got,) = client.answers(b"POST")
        assert got.whole
        assert got.status == (502 if gone or fault.startswith("refuses") else 200)
        assert len(bench.seen) == (got.status == 200)
        bench.check()

    run(story())


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_body_that_is_not_gone_yet_is_sent_whole_to_another(framing: str) -> None:
    """The target crashes before anything beyond the kept part has been passed on."""

    async def story() -> None:
        bench = Bench(targets=2, buffer_bytes=10)
        client = bench.client()
        first: list[Peer] = []

        def dies_once(peer: Peer, seen: Seen) -> None:
            if not first:
                first.append(peer)
                peer.wire.feed(DIES)

        bench.on_head = dies_once
        body = bytes(range(100))
        data = post(body, ONCE) if framing == "length" else post_chunked(body[:20], body[20:])
        await client.send_slowly(data[:100])
        await asyncio.sleep(1)
        await client.send_slowly(data[100:])
        (got,) = client.answers(b"POST")
        assert (got.status, got.body) == (200, body)
        assert [seen.body for seen in bench.seen] == [body]
        bench.check()

    run(story())


def test_a_body_that_is_partly_gone_stays_with_a_target_that_leaves_the_table() -> None:
    async def story() -> None:
        bench = Bench(buffer_bytes=10)
        client = bench.client()
        body = bytes(range(100))
        data = post(body)
        await client.send_slowly(data[:-50], data[-50:-20])
        table = bench.table.table
        other = (Target("other", "http://192.0.2.9:9"),)
        bench.table.apply(dataclasses.replace(table, targets=other), 0.0)
        bench.intake.applied()
        await client.send_slowly(data[-20:])
        assert [one.body for one in client.answers(b"POST")] == [body]
        assert [seen.body for seen in bench.seen] == [body]
        bench.check()

    run(story())


def test_a_target_that_answers_before_the_body_is_over() -> None:
    async def story() -> None:
        bench = Bench(buffer_bytes=10)
        client = bench.client()
        bench.on_head = lambda peer, seen: peer.say([plainly(b"enough", status=b"403 Forbidden")])
        client.send(post(b"x" * 100)[:-50])
        await settle()
        (got,) = client.answers(b"POST")
        assert (got.status, got.body, got.values(b"connection")) == (403, b"enough", [b"close"])
        client.send(b"x" * 50, GET)
        await settle()
        assert client.answers(b"GET") == []
        assert bench.peers[0].wire.gone
        await asyncio.sleep(5)
        assert client.wire.gone
        bench.check()

    run(story())


def test_a_body_that_ends_while_its_answer_runs_does_not_keep_the_connection_it_was_told_to_lose() -> None:
    async def story() -> None:
        bench = Bench(lambda seen: [], buffer_bytes=10)
        client = bench.client()
        begins = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"a", last=b"")
        bench.on_head = lambda peer, seen: peer.say([begins])
        data = post(b"x" * 100)
        await client.send_slowly(data[:-50], data[-50:])
        bench.peers[0].wire.feed(chunks(b"b"))
        await settle()
        (got,) = client.answers(b"POST")
        assert (got.body, got.values(b"connection")) == (b"ab", [b"close"])
        assert client.wire.gone
        bench.check()

    run(story())


@pytest.mark.parametrize(
    "bad", [b"zz\r\n", b"1\r\nxy", b"ffffff\r\n" + b"x" * 2000], ids=["no size", "too long", "too much"]
)
def test_a_body_that_turns_out_bad_is_told(bad: bytes) -> None:
    async def story() -> None:
        bench = Bench(buffer_bytes=10, max_body_bytes=1000)
        client = bench.client()
        await client.send_slowly(post_chunked(b"x" * 20, last=b"", path=MODEL), bad)
        (got,) = client.answers(b"POST")
        assert codes(got) in ((400, "malformed_body"), (413, "body_too_large"))
        assert bench.seen == []
        assert bench.peers[0].wire.gone
        await asyncio.sleep(5)
        assert client.wire.gone
        bench.check()

    run(story())


# --- targets that misbehave

WRONG: dict[str, list[bytes]] = {
    "two lengths": [b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"],
    "gzip and chunked": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
    "an unknown coding": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: br\r\n\r\n", ENDS],
    "switching protocols unasked": [b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"],
    "a status of 999": [b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n"],
    "a status of 42": [b"HTTP/1.1 042 Odd\r\nContent-Length: 0\r\n\r\n"],
    "a header in a header": [b"HTTP/1.1 200 OK\r\nX: a\rSet-Cookie: b\r\nContent-Length: 0\r\n\r\n"],
    "interim answers without end": [b"HTTP/1.1 102 Processing\r\n\r\n" * 5000],
    "a head without end": [b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000],
    "no HTTP": [b"SSH-2.0-OpenSSH_9.2\r\n\r\n"],
    "half a head": [b"HTTP/1.1 200 OK\r\nContent-", ENDS],
    "half a body": [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", ENDS],
    "half a chunk of JSON": [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", DIES],
    "wrong chunks of JSON": [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloX\r\n"],
    "nothing": [ENDS],
    "a reset": [DIES],
}  # fmt: skip


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_is_not_passed_and_another_target_is_asked(answer: list[bytes]) -> None:
    async def story() -> None:
        bench = Bench(targets=2)
        bench.behave = lambda seen: answer if len(bench.seen) == 1 else [plainly(b"right")]
        client = bench.client()
        client.send(GET)
        await asyncio.sleep(1)
        (got,) = client.answers(b"GET")
        assert (got.status, got.body) == (200, b"right")
        assert bench.peers[0].wire.gone
        bench.check()

    run(story())


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_of_the_only_target_is_a_502(answer: list[bytes]) -> None:
    async def story() -> None:
        bench = Bench(lambda seen: answer, hold_s=0)
        client = bench.client()
        client.send(GET)
        await asyncio.sleep(5)
        (got,) = client.answers(b"GET")
        assert codes(got) == (502, "no_target_answered")
        bench.check()

    run(story())


@pytest.mark.parametrize(
    "greeting",
    [[plainly(b"poison")], [b"x"], [ENDS], [DIES]],
    ids=["an answer", "a byte", "an end", "a reset"],
)
def test_a_target_that_speaks_or_leaves_before_it_is_asked(greeting: list[bytes]) -> None:
    """The connection is open and gone again before the request is written: no one else would say so."""

    async def story() -> None:
        bench = Bench(targets=2, hold_s=0)
        bench.greeting = greeting
        client = bench.client()
        client.send(GET)
        await asyncio.sleep(5)
        (got,) = client.answers(b"GET")
        assert b"poison" not in got.body
        assert got.status in (502, 503)
        assert bench.seen == []
        bench.check()

    run(story())


@pytest.mark.parametrize(
    "pieces",
    [
        [plainly(b"mine") + plainly(b"poison")],
        [plainly(b"mine"), plainly(b"poison")],
        [plainly(b"mine") + b"p", plainly(b"oison")],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"mine") + plainly(b"poison")],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"mine"), plainly(b"poison")],
    ],
    ids=["at once", "behind", "half at once", "behind chunks at once", "behind chunks"],
)
def test_a_second_answer_reaches_nobody(pieces: list[bytes]) -> None:
    async def story() -> None:
        bench = Bench(lambda seen: pieces)
        client, other = bench.client(), bench.client()
        client.send(GET)
        await settle()
        assert [one.body for one in client.answers(b"GET")] == [b"mine"]
        assert bench.peers[0].wire.gone
        bench.behave = lambda seen: [plainly(b"clean")]
        other.send(GET)
        client.send(GET)
        await settle()
        assert [one.body for one in other.answers(b"GET")] == [b"clean"]
        assert [one.body for one in client.answers(b"GET")] == [b"clean"]
        bench.check()

    run(story())


@pytest.mark.parametrize(
    "begun",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 500000\r\n\r\n", b"x" * 1000],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunks(b"x" * 1000, last=b"")],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunks(b"x" * 1000, last=b"5\r\nhel")],
    ],
    ids=["length", "between chunks", "within a chunk"],
)
@pytest.mark.parametrize(
    "fault", [[DIES], [ENDS], [b"zzz\r\n\r\n", b"zzz\r\n\r\n", ENDS]], ids=["reset", "end", "garbage"]
)
def test_an_answer_that_breaks_off_is_never_taken_for_a_whole_one(
    begun: list[bytes], fault: list[bytes]
) -> None:
    async def story() -> None:
        bench = Bench(lambda seen: [*begun, *fault])
        client = bench.client()
        client.send(GET)
        await settle()
        (got,) = client.answers(b"GET")
        assert not got.whole
        assert client.wire.gone
        bench.check()

    run(story())


# --- clients that do not read


def test_who_does_not_read_gets_no_further_answers() -> None:
    async def story() -> None:
        bench = Bench(lambda seen: [plainly(b"x" * 200_000)], idle_timeout_s=30, keepalive_s=20)
        client = bench.client(takes=False)
        client.send(GET * 500)
        await settle()
        assert len(bench.seen) == 1
        assert len(client.wire.out) < 300_000
        assert len(client.answers(b"GET")) == 1
        await settle()
        assert len(bench.seen) == 2, "what it has read makes room"
        await asyncio.sleep(100)
        assert client.wire.gone, "and it is not waited for without end"
        bench.check()

    run(story())


def test_who_reads_slowly_gets_all_of_the_last_answer() -> None:
    """The connection is to be closed, but not before its response is read."""

    async def story() -> None:
        bench = Bench(lambda seen: [plainly(b"x" * 200_000)], head_timeout_s=5, idle_timeout_s=60)
        client = bench.client(takes=False)
        client.send(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await asyncio.sleep(30)
        (got,) = client.answers(b"GET")
        assert (len(got.body), got.whole) == (200_000, True)
        await settle()
        assert client.wire.gone
        never = bench.client(takes=False)
        never.send(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await asyncio.sleep(100)
        assert never.wire.gone
        bench.check()

    run(story())


def test_a_target_that_is_slow_to_take_a_body_does_not_make_its_client_deaf() -> None:
    """It responds without having read all: the client's next request must be read nevertheless."""

    async def story() -> None:
        bench = Bench()
        client = bench.client()
        client.send(GET)
        await settle()
        client.answers(b"GET")
        wire = bench.peers[0].wire
        wire.takes = False
        client.send(post(b"x" * 500_000, ONCE))
        await settle()
        assert client.wire.paused
        wire.feed(plainly(b"no", status=b"413 Too Large"))
        await settle()
        assert [one.status for one in client.answers(b"POST")] == [413]
        assert wire.gone, "a connection with an unread request is not used again"
        client.send(GET)
        await settle()
        assert [one.status for one in client.answers(b"GET")] == [200]
        bench.check()

    run(story())


def test_a_thousand_requests_in_one_packet_do_not_exhaust_the_stack() -> None:
    async def story() -> None:
        bench = Bench()
        client = bench.client()
        client.send(b"GET /-/live HTTP/1.1\r\nHost: x\r\n\r\n" * 5000)
        await settle()
        got = client.answers(*[b"GET"] * 5000)
        assert {one.status for one in got} == {404}
        assert len(got) == 5000
        bench.check()

    run(story())


# --- HTTP/1.0


@pytest.mark.parametrize(
    ("head", "stays"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive, close\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", False),
    ],
    ids=["1.0", "1.0 keep-alive", "1.0 both", "1.1 close"],
)
@pytest.mark.parametrize("here", [False, True], ids=["of a target", "of our own"])
def test_a_client_is_told_whether_its_connection_stays(head: bytes, stays: bool, here: bool) -> None:
    async def story() -> None:
        bench = Bench()
        client = bench.client()
        client.send(head.replace(b" / ", b" /-/x ") if here else head)
        await settle()
        (got,) = client.answers(b"GET")
        said = [value.lower() for value in got.values(b"connection")]
        assert client.wire.gone == (said == [b"close"])
        if not here:
            assert client.wire.gone is not stays
            assert said == ([b"keep-alive"] if stays else [b"close"])
        bench.check()

    run(story())


def test_a_request_without_host_has_one_for_the_target() -> None:
    async def story() -> None:
        bench = Bench()
        client = bench.client()
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        await settle()
        assert bench.seen[0].values(b"host") == [b"192.0.2.9:8000"]
        assert bench.seen[0].values(b"x-forwarded-host") == []

    run(story())


# --- WebSockets

KEY = base64.b64encode(b"0123456789abcdef")
ACCEPT = base64.b64encode(
    hashlib.sha1(KEY + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11", usedforsecurity=False).digest()
)
UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: " + KEY + b"\r\n\r\n"
)
SWITCHES = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
    + ACCEPT
    + b"\r\n\r\n"
)


@pytest.mark.parametrize("ahead", [b"", b"early", b"y" * 200_000], ids=["nothing ahead", "a little", "a lot"])
def test_a_tunnel_carries_every_byte_both_ways(ahead: bytes) -> None:
    async def story(cut: int) -> None:
        bench = Bench(lambda seen: [])
        client = bench.client()
        client.send(UPGRADE + ahead[:1000], ahead[1000:])
        await settle()
        peer = bench.peers[0]
        peer.took = lambda: None  # type: ignore[method-assign]  # from here on it is no HTTP
        peer.wire._took = None
        peer.wire.out.clear()
        opening = SWITCHES + b"\x81\x02hi"
        peer.say([opening[:cut], opening[cut:]])
        await settle()
        assert client.wire.take().endswith(b"\r\n\r\n\x81\x02hi")
        assert peer.wire.take() == ahead
        client.send(b"\x88\x00" * 3)
        peer.wire.feed(b"\x00GET / HTTP/1.1\r\n\r\n")
        await settle()
        assert peer.wire.take() == b"\x88\x00" * 3
        assert client.wire.take() == b"\x00GET / HTTP/1.1\r\n\r\n"
        peer.wire.feed(ENDS)
        await settle()
        assert client.wire.gone
        bench.check()

    for cut in (0, 1, len(SWITCHES) - 1, len(SWITCHES), len(SWITCHES) + 1):
        run(story(cut))


def test_a_tunnel_slows_down_whoever_is_too_fast() -> None:
    async def story() -> None:
        bench = Bench(lambda seen: [])
        client = bench.client(takes=False)
        client.send(UPGRADE)
        await settle()
        peer = bench.peers[0]
        peer.wire._took = None
        peer.wire.takes = False
        peer.wire.feed(SWITCHES)
        for _ in range(100):
            peer.wire.feed(b"\x01" * 10_000)
            client.send(b"\x02" * 10_000)
        await settle()
        assert peer.wire.paused
        assert client.wire.paused
        assert len(client.wire.out) < 200_000
        assert len(peer.wire.out) < 500_000
        down = up = 0
        for _ in range(200):
            down += client.wire.take().count(b"\x01")
            up += peer.wire.take().count(b"\x02")
            await settle()
        assert (down, up) == (1_000_000, 1_000_000)
        client.send(ENDS)
        await settle()
        assert peer.wire.gone
        bench.check()

    run(story())


@pytest.mark.parametrize("length", [b"0", b"5"])
def test_a_handshake_with_a_body_is_refused_also_when_one_like_it_was_not(length: bytes) -> None:
    async def story() -> None:
        bench = Bench(lambda seen: [plainly(b"no", status=b"403 Forbidden")])
        for number, expected in ((b"0", 403), (length, 403 if length == b"0" else 400)):
            client = bench.client()
            client.send(UPGRADE[:-2] + b"Content-Length: " + number + b"\r\n\r\n" + b"x" * int(number))
            await settle()
            assert [one.status for one in client.answers(b"GET")] == [expected]
        bench.check()

    run(story())


# --- bodies for models

DEEP = b"[" * 400 + b"]" * 400
JSONS = {
    "deeply nested messages": b'{"messages":[{"role":"user","content":' + DEEP + b'}],"stream":true}',
    "deeply nested tools": b'{"messages":[],"tools":' + DEEP + b"}",
    "deeper than can be read": b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "an array": b"[1,2]",
    "a number": b"7",
    "no JSON": b"{",
    "odd messages": b'{"messages":[1,null,"a",{"content":null},{"role":7,"content":[{"text":1},2]}],"model":3,"user":[]}',
    "odd numbers": b'{"prompt":[1e999,-0,123456789012345678901234567890],"max_tokens":-5,"max_completion_tokens":1e9}',
    "half a surrogate": b'{"prompt":"\\ud800","stream":true}',
    "no UTF-8": b'{"prompt":"\xff\xfe","stream":true}',
    "NUL": b'{"prompt":"\\u0000","user":"\\u0000"}',
    "nothing": b"",
}
UNREADABLE = {
    "deeper than can be read",
    "an array",
    "a number",
    "no JSON",
    "odd numbers",
    "half a surrogate",
    "no UTF-8",
}


@pytest.mark.parametrize("body", JSONS.values(), ids=JSONS.keys())
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/completions"])
@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
def test_whatever_a_model_is_asked_the_target_is_asked(body: bytes, path: bytes, policy: str) -> None:
    async def story() -> None:
        bench = asked(policy, strict_json=False)
        assert await status_of(bench, post(body, path=path)) == 200
        assert [seen.body for seen in bench.seen] == [body]
        bench.check()

    run(story())


@pytest.mark.parametrize("body", JSONS.values(), ids=JSONS.keys())
def test_what_parsers_read_differently_is_refused(body: bytes) -> None:
    async def story() -> None:
        bench = asked("cache_aware")
        refused = body in [JSONS[name] for name in UNREADABLE]
        assert await status_of(bench, post(body, path=b"/v1/completions")) == (400 if refused else 200)
        assert len(bench.seen) == (not refused)
        bench.check()

    run(story())


def asked(policy: str, *, strict_json: bool = True) -> Bench:
    targets = (Target("t", "http://192.0.2.9:1"),)
    table = Table("service", "r1", targets, policy=policy, access=Access(strict_json=strict_json))
    return Bench(lambda seen: [plainly(b"{}")], table=table)


async def status_of(bench: Bench, request: bytes) -> int:
    client = bench.client()
    client.send(request)
    await settle()
    (response,) = client.answers(b"POST")
    return response.status


# --- made by hypothesis

_PATHS = st.text("abc/?&=%.-~!$'()*+,;:@#[]|", max_size=12).map(lambda text: b"/p" + text.encode())
_TEXT = st.text('abcXYZ019 \t"(),/:;<=>?@[]{}é', max_size=16).map(
    lambda text: text.strip(" \t").encode("latin-1")
)
_LINES = st.lists(
    st.tuples(st.sampled_from([b"X-A", b"x-b", b"Accept", b"User-Agent", b"Cookie", b"Authorization", b"Content-Type"]), _TEXT),
    max_size=4,
)  # fmt: skip
_BODIES = st.one_of(st.binary(max_size=60), st.just(b"\r\n\r\n0\r\n\r\n"), st.just(GET))


@st.composite
def _requests(draw: st.DrawFn) -> tuple[bytes, Seen]:
    method = draw(
        st.sampled_from([b"GET", b"POST", b"PUT", b"PATCH", b"DELETE", b"HEAD", b"OPTIONS", b"PROPFIND"])
    )
    path, lines, body = draw(_PATHS), draw(_LINES), draw(_BODIES)
    framing = draw(st.sampled_from(["length", "chunks", "none"]))
    head = b"%b %b HTTP/1.1\r\nHost: x\r\n" % (method, path)
    head += b"".join(name + b": " + value + b"\r\n" for name, value in lines)
    if framing == "length":
        wire = head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    elif framing == "chunks":
        cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=3)))
        edges = [0, *cuts, len(body)]
        parts = [body[a:b] for a, b in itertools.pairwise(edges) if b > a]
        wire = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks(*parts)
    else:
        body, wire = b"", head + b"\r\n"
    return wire, Seen(method, path, [(name.lower(), value) for name, value in lines], body)


@st.composite
def _answers(draw: st.DrawFn) -> tuple[list[bytes], bytes]:
    body = draw(_BODIES)
    framing = draw(st.sampled_from(["length", "chunks", "close", "json chunks"]))
    status = draw(
        st.sampled_from([b"200 OK", b"201 Created", b"404 Not Found", b"500 Oops", b"429 Slow", b"299"])
    )
    head = b"HTTP/1.1 " + status + b"\r\n"
    if draw(st.booleans()):
        head = b"HTTP/1.1 100 Continue\r\n\r\n" + head
    if framing == "length":
        wire = head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    elif framing == "close":
        wire = head + b"\r\n" + body
    else:
        kind = b"Content-Type: application/json\r\n" if framing == "json chunks" else b""
        wire = head + kind + b"Transfer-Encoding: chunked\r\n\r\n" + (chunks(body) if body else b"0\r\n\r\n")
    pieces = draw(_cut(wire))
    return ([*pieces, ENDS] if framing == "close" else pieces), body


def _cut(wire: bytes) -> st.SearchStrategy[list[bytes]]:
    def pieces(cuts: list[int]) -> list[bytes]:
        edges = [0, *sorted(cuts), len(wire)]
        return [wire[a:b] for a, b in itertools.pairwise(edges)]

    return st.lists(st.integers(0, len(wire)), max_size=6).map(pieces)


@pytest.mark.long
@settings(max_examples=examples(300))
@given(
    st.data(),
    st.lists(_requests(), min_size=1, max_size=5),
    st.sampled_from([0, 20, 1 << 20]),
    st.integers(1, 3),
)
def test_made_requests_and_answers(
    data: st.DataObject, requests: list[tuple[bytes, Seen]], buffer_bytes: int, targets: int
) -> None:
    scripts = [data.draw(_answers()) for _ in requests]
    pieces = data.draw(_cut(b"".join(wire for wire, _ in requests)))
    slowly = data.draw(st.booleans())

    async def story() -> None:
        bench = Bench(targets=targets, buffer_bytes=buffer_bytes)

        def behave(seen: Seen) -> list[bytes]:
            script, _ = scripts[len(bench.seen) - 1]
            if seen.method != b"HEAD":
                return script
            whole = b"".join(piece for piece in script if piece != ENDS)
            heads = whole.partition(b"\r\n\r\n")
            if heads[0].startswith(b"HTTP/1.1 100"):
                heads = heads[2].partition(b"\r\n\r\n")
            return [heads[0] + b"\r\n\r\n"]

        bench.behave = behave
        client = bench.client()
        if slowly:
            await client.send_slowly(*pieces)
        else:
            client.send(*pieces)
        await settle()
        for seen, (_, sent) in zip(bench.seen, requests, strict=True):
            assert (seen.method, seen.target, seen.body) == (sent.method, sent.target, sent.body)
            names = {name for name, _ in sent.headers}
            assert [pair for pair in seen.headers if pair[0] in names] == sent.headers
        got = client.answers(*(sent.method for _, sent in requests))
        assert len(got) == len(requests)
        for one, (_, body), (_, sent) in zip(got, scripts, requests, strict=True):
            assert one.whole
            assert one.body == (b"" if sent.method == b"HEAD" else body)
        bench.check()

    run(story())


_FAULTS = st.sampled_from(["fine", "dies", "ends", "half", "garbage", "503", "empty", "silent"])


@pytest.mark.long
@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(_requests(), st.lists(_FAULTS, max_size=3), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_made_faults_leave_nothing_behind(
    plan: list[tuple[tuple[bytes, Seen], list[str], bool]], targets: int
) -> None:
    """Each client's request meets its faults, and some clients leave: each that stays has exactly one response."""

    async def story() -> None:
        bench = Bench(targets=targets, hold_s=2, time_to_first_byte_s=3, head_timeout_s=1)
        faults = {b"/%d" % number: list(mine) for number, (_, mine, _) in enumerate(plan)}

        def behave(seen: Seen) -> list[bytes]:
            mine = faults[seen.target]
            fault = mine.pop(0) if mine else "fine"
            whole = plainly(seen.target)
            return _SAYS[fault](
                b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n" if seen.method == b"HEAD" else whole
            )

        bench.behave = behave
        bench.watch()
        clients: list[tuple[Client, bytes, bytes, bool]] = []
        for number, ((wire, sent), _, leaves) in enumerate(plan):
            client = bench.client()
            path = b"/%d" % number
            client.send(wire.replace(b" " + sent.target + b" ", b" " + path + b" ", 1))
            clients.append((client, sent.method, path, leaves))
        await settle()
        for client, _, _, leaves in clients:
            if leaves:
                client.send(DIES)
        await asyncio.sleep(30)
        for client, method, path, leaves in clients:
            if not leaves:
                (got,) = client.answers(method)
                assert got.status in (200, 502, 503, 504)
                assert got.whole
                assert got.status != 200 or method == b"HEAD" or got.body == path
        bench.check()

    run(story())


_SAYS: dict[str, Callable[[bytes], list[bytes]]] = {
    "fine": lambda whole: [whole],
    "dies": lambda whole: [DIES],
    "ends": lambda whole: [ENDS],
    "half": lambda whole: [whole[:25], DIES],
    "garbage": lambda whole: [b"\x00\r\n\r\n"],
    "503": lambda whole: [b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"],
    "empty": lambda whole: [b""],
    "silent": lambda whole: [],
}


# --- streams of models that change their target

ASKS = json.dumps(
    {"model": "m", "stream": True, "max_tokens": 900, "messages": [{"role": "user", "content": "hi"}]}
).encode()
STREAM = post(ASKS, b"Content-Type: application/json", path=b"/v1/chat/completions")
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def event(text: str, finish: str | None = None) -> bytes:
    """A chat's, without ids."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return spoken("chat.completion.chunk", choice)


def token(text: str, finish: str | None = None, **more: object) -> bytes:
    """A chat's, of one token with its id, as vLLM says it."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish, "token_ids": [5]}
    return spoken("chat.completion.chunk", choice, **more)


def further(text: str, finish: str | None = None) -> bytes:
    """The same of a completion of ids, by which vLLM continues a chat."""
    choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": [5]}
    return spoken("text_completion", choice)


def spoken(kind: str, choice: dict[str, object], **more: object) -> bytes:
    spoken_chunk = {"id": "c-1", "object": kind, "created": 1, "model": "m", "choices": [choice], **more}
    return b"data: " + json.dumps(spoken_chunk).encode() + b"\n\n"


PROMPT_IDS = [1, 2]
FIRST = token("one ", prompt_token_ids=PROMPT_IDS)
WORDS = [FIRST, token("two "), token("three", "stop"), b"data: [DONE]\n\n"]
REST = [further("two "), further("three", "stop"), b"data: [DONE]\n\n"]
BROKEN = [EVENTS + b"Transfer-Encoding: chunked\r\n\r\n", chunks(WORDS[0], last=b""), DIES]


def with_length(events: list[bytes]) -> bytes:
    return EVENTS + b"Content-Length: %d\r\n\r\n" % len(b"".join(events)) + b"".join(events)


def text_of(body: bytes) -> str:
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    parsed = [json.loads(line) for line in lines]
    return "".join(one["choices"][0]["delta"].get("content", "") for one in parsed if "choices" in one)


async def streamed(answers: list[list[bytes]], most_again: int = 0) -> Got:
    """Return what a client gets from targets that answer in this way: `most_again` more requests as the last one, at most."""
    bench = Bench(
        lambda seen: answers[min(len(bench.seen), len(answers)) - 1],
        targets=2,
        kind=EngineKind.VLLM,
        hold_s=0,
    )
    bench.watch()
    client = bench.client()
    client.send(STREAM)
    await asyncio.sleep(30)
    (got,) = client.answers(b"POST")
    assert len(answers) <= len(bench.seen) <= len(answers) + most_again
    assert (got.status, got.whole) == (200, True)
    assert b"HTTP/1.1" not in got.body
    assert b"token_ids" not in got.body  # the client has not asked for them
    for later, before in zip(bench.seen[1:], answers, strict=False):
        if before is BROKEN:
            asked = json.loads(later.body)
            assert (later.target, asked["prompt"], asked["max_tokens"]) == (
                b"/v1/completions",
                [*PROMPT_IDS, 5],
                899,
            )
    bench.check()
    return got


MANY = [token("", note="x" * 1000) for _ in range(300)]  # more than is read whole
CHUNKED_REST = [EVENTS + b"Transfer-Encoding: chunked\r\n\r\n", chunks(*REST)]
CONTINUED: dict[str, list[list[bytes]]] = {
    "not broken": [[EVENTS + b"Transfer-Encoding: chunked\r\n\r\n", chunks(*WORDS)]],
    "not broken, of known length": [[with_length(WORDS)]],
    "not broken, of known and great length": [[with_length([FIRST, *MANY, *WORDS[1:]])]],
    "continued after a known length": [[with_length([FIRST, *MANY, *WORDS[1:]])[:-400], DIES], CHUNKED_REST],
    "not broken, until the connection ends": [[EVENTS + b"\r\n", *WORDS, ENDS]],
    "continued in chunks": [BROKEN, CHUNKED_REST],
    "continued with a known length": [BROKEN, [with_length(REST)]],
    "continued until the connection ends": [BROKEN, [EVENTS + b"\r\n", *REST, ENDS]],
}


@pytest.mark.parametrize("answers", CONTINUED.values(), ids=CONTINUED.keys())
def test_a_stream_is_one_answer_however_its_legs_are_framed(answers: list[list[bytes]]) -> None:
    got = run(streamed(answers))
    assert text_of(got.body) == "one two three"
    assert got.body.count(b"[DONE]") == 1


@pytest.mark.parametrize(
    "second",
    [
        [plainly(b"busy", status=b"503 Busy")],
        [plainly(b"{}", b"Content-Type: application/json")],
        [EVENTS + b"Content-Length: 0\r\n\r\n"],
        [b"HTTP/1.1 204 No Content\r\n\r\n"],
        [b"no HTTP\r\n\r\n"],
        [ENDS],
    ],
    ids=["503", "JSON", "no events", "204", "garbage", "nothing"],
)
def test_what_is_no_rest_of_a_stream_is_not_sent_behind_its_beginning(second: list[bytes]) -> None:
    got = run(streamed([BROKEN, second], MAX_ATTEMPTS_ON_A_REST - 1))
    assert text_of(got.body) == "one "
    assert b'"error"' in got.body


def test_a_refusal_from_before_a_stream_is_not_sent_into_it() -> None:
    busy = [plainly(b"busy", status=b"503 Busy")]
    got = run(streamed([busy, BROKEN, busy], MAX_ATTEMPTS_ON_A_REST - 1))
    assert text_of(got.body) == "one "
    assert b'"error"' in got.body


def test_a_client_that_does_not_read_is_not_flooded_by_the_next_target() -> None:
    async def story() -> None:
        some = [chunks(token("x" * 10_000), last=b"") for _ in range(8)]
        many = [chunks(further("x" * 10_000), last=b"") for _ in range(100)]
        legs = [
            [EVENTS + b"Transfer-Encoding: chunked\r\n\r\n", chunks(FIRST, last=b""), *some, DIES],
            [EVENTS + b"Transfer-Encoding: chunked\r\n\r\n", *many, chunks(*REST)],
        ]
        bench = Bench(lambda seen: legs[len(bench.seen) - 1], targets=2, kind=EngineKind.VLLM)
        client = bench.client(takes=False)
        client.send(STREAM)
        await settle()
        assert len(bench.seen) == 1
        bench.peers[0].wire.paused = False  # a reset is heard also by who does not read
        bench.peers[0].wire._deliver()
        await settle()
        assert len(bench.seen) == 2
        assert len(client.wire.out) < 300_000
        read = b""
        for _ in range(200):
            read += client.wire.take()
            await settle()
        assert read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        bench.check()

    run(story())


def test_a_tunnel_in_which_nothing_passes_is_closed_on_both_sides() -> None:
    async def story() -> None:
        bench = Bench(lambda seen: [], idle_timeout_s=5)
        bench.watch()
        client = bench.client()
        client.send(UPGRADE)
        await settle()
        peer = bench.peers[0]
        peer.took = lambda: None  # type: ignore[method-assign]  # from here on it is no HTTP
        peer.wire._took = None
        peer.wire.out.clear()
        peer.say([SWITCHES])
        await settle()
        client.wire.take()
        for _ in range(4):  # what passes keeps it open
            await asyncio.sleep(3)
            client.send(b"\x82\x80\0\0\0\0")
        assert not client.wire.gone
        peer.wire.take()
        await asyncio.sleep(10)
        assert client.wire.take() == b"\x88\x02\x03\xe9"
        assert peer.wire.take() == b"\x88\x82\0\0\0\0\x03\xe9"
        await settle()
        assert client.wire.gone
        assert peer.wire.gone
        bench.check()

    run(story())


def test_a_lack_of_descriptors_is_not_the_targets_fault() -> None:
    async def story() -> None:
        bench = Bench(targets=3)
        bench.refuses, bench.refuses_with = True, OSError(errno.EMFILE, "too many open files")
        client = bench.client()
        client.send(GET)
        await asyncio.sleep(1)
        (got,) = client.answers(b"GET")
        assert (got.status, b"out_of_resources" in got.body) == (503, True)
        assert {health.value for _, health, _ in bench.table.rows(0.0)} == {"good"}
        bench.refuses = False
        client.send(GET)
        await settle()
        assert [one.status for one in client.answers(b"GET")] == [200]
        bench.check()

    run(story())


def test_connections_beyond_the_limit_are_refused_and_those_before_go_on() -> None:
    async def story() -> None:
        bench = Bench(max_clients=2)
        first, second, third = bench.client(), bench.client(), bench.client()
        await settle()
        assert b"503" in third.wire.take().split(b"\r\n")[0]
        assert third.wire.gone
        for client in (first, second):
            client.send(GET)
            await settle()
            assert [one.status for one in client.answers(b"GET")] == [200]
        bench.check()

    run(story())
