"""Clients of streams read something while nothing comes, and then the response of the target, or its failure as an event."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from lb.config.options import Limits, Pushing, PushMode
from lb.config.schema import Table, Target
from tests.integration.lb_wires import DIES, Bench, Client, Got, plainly, run
from tests.integration.test_lb_front_doors import head

KEEP_ALIVE = b": keep-alive\n\n"
TARGETS = (Target("a", "http://192.0.2.9:8000"), Target("b", "http://192.0.2.9:8001"))
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Slow(Bench):
    """A target that says what the test lets it say, when the test lets it."""

    def __init__(
        self, keepalive_s: float = 10.0, targets: tuple[Target, ...] = TARGETS[:1], **options: Any
    ) -> None:
        limits = Limits(stream_keepalive_s=keepalive_s, time_to_first_byte_s=100.0, hold_s=60.0)
        super().__init__(lambda seen: [], table=Table("s", "r1", targets, limits=limits, **options))
        self.watch()

    def post(self, path: str = PATHS[0], stream: bool = True, version: str = "1.1") -> Client:
        client = self.client()
        body = orjson.dumps({"model": "m", "stream": stream, "messages": [], "input": "x"})
        start = head("POST", path, f"Content-Length: {len(body)}").replace(
            b"HTTP/1.1", f"HTTP/{version}".encode()
        )
        client.send(start + body)
        return client

    async def say(self, *pieces: bytes, after_s: float = 0.01) -> None:
        await asyncio.sleep(after_s)
        self.peers[-1].say(pieces)
        await asyncio.sleep(0.01)


def got(client: Client) -> Got:
    (one,) = client.answers(b"POST")
    return one


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(
            (SSE + b"Transfer-Encoding: chunked\r\n\r\n", chunk(EVENT), chunk(LAST), b"0\r\n\r\n"),
            id="chunks",
        ),
        pytest.param((SSE + b"Content-Length: %d\r\n\r\n" % len(EVENT + LAST) + EVENT, LAST), id="a length"),
        pytest.param(
            (SSE + b"Content-Length: %d\r\n\r\n" % len(EVENT + LAST) + EVENT + LAST,), id="one piece"
        ),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_a_client_reads_comments_and_then_the_response(path: str, response: tuple[bytes, ...]) -> None:
    async def story() -> None:
        bench = Slow()
        client = bench.post(path)
        await bench.say(*response, after_s=35.0)
        one = got(client)
        assert one.status == 200
        assert one.values(b"content-type") == [b"text/event-stream; charset=utf-8"]
        assert one.values(b"x-request-id")
        assert one.body == 3 * KEEP_ALIVE + EVENT + LAST
        bench.check()

    run(story())


@pytest.mark.parametrize("path", PATHS)
def test_between_two_events_too(path: str) -> None:
    async def story() -> None:
        bench = Slow()
        client = bench.post(path)
        await bench.say(SSE + b"Transfer-Encoding: chunked\r\n\r\n", chunk(EVENT))
        await bench.say(chunk(EVENT), after_s=25.0)
        await bench.say(chunk(LAST), b"0\r\n\r\n", after_s=15.0)
        one = got(client)
        assert one.values(b"content-type") == [b"text/event-stream"]
        assert one.body == EVENT + 2 * KEEP_ALIVE + EVENT + KEEP_ALIVE + LAST
        bench.check()

    run(story())


@pytest.mark.parametrize("path", PATHS[1:])
def test_but_not_within_an_event(path: str) -> None:
    async def story() -> None:
        bench = Slow()
        client = bench.post(path)
        await bench.say(SSE + b"Transfer-Encoding: chunked\r\n\r\n", chunk(EVENT[:20]))
        await bench.say(chunk(EVENT[20:]), chunk(LAST), b"0\r\n\r\n", after_s=25.0)
        assert got(client).body == KEEP_ALIVE * 2 + EVENT + LAST  # which is held until it is whole
        bench.check()

    run(story())


def test_a_stream_of_known_length_is_passed_on_in_chunks_as_it_may_get_longer() -> None:
    async def story() -> None:
        bench = Slow()
        client = bench.post()
        await bench.say(SSE + b"Content-Length: %d\r\n\r\n" % (2**21 + len(EVENT + LAST)), EVENT)
        await bench.say(b":" * (2**21 - 1) + b"\n" + LAST, after_s=25.0)
        response = got(client)
        assert response.values(b"content-length") == []
        assert response.values(b"transfer-encoding") == [b"chunked"]
        assert response.body.count(KEEP_ALIVE) == 2
        assert response.body.endswith(LAST)
        bench.check()

    run(story())


def test_a_client_of_http_1_0_reads_no_chunks() -> None:
    async def story() -> None:
        bench = Slow()
        client = bench.post(version="1.0")
        await bench.say(
            SSE + b"Transfer-Encoding: chunked\r\n\r\n", chunk(EVENT), chunk(LAST), b"0\r\n\r\n", after_s=15.0
        )
        assert got(client).body == KEEP_ALIVE + EVENT + LAST
        assert client.wire.closed
        bench.check()

    run(story())


def test_a_response_that_is_no_stream_and_one_without_the_option_have_none() -> None:
    async def story() -> None:
        for keepalive_s, stream in ((10.0, False), (0.0, True)):
            bench = Slow(keepalive_s)
            client = bench.post(stream=stream)
            await bench.say(plainly(b"{}"), after_s=50.0)
            assert got(client).body == b"{}"
            bench.check()

    run(story())


@pytest.mark.parametrize("path", PATHS)
def test_an_error_of_the_target_is_an_event(path: str) -> None:
    async def story() -> None:
        bench = Slow()
        client = bench.post(path)
        error = b'{"error":{"message":"The prompt is too long.","code":400}}'
        await bench.say(plainly(error, status=b"400 Bad Request"), after_s=15.0)
        one = got(client)
        assert one.status == 200
        comment, _, event = one.body.partition(b"\n\n")
        assert comment == b": keep-alive"
        assert b"The prompt is too long." in event
        assert event.endswith(b"\n\n")
        bench.check()

    run(story())


def test_so_is_a_timeout_here_and_the_loss_of_the_target() -> None:
    async def story() -> None:
        bench = Slow()
        client = bench.post()
        await asyncio.sleep(110.0)
        assert b'"code":"time_to_first_byte"' in got(client).body
        client = bench.post()
        await bench.say(DIES, after_s=15.0)
        await asyncio.sleep(100.0)
        assert b'"code":"no_target_answered"' in got(client).body
        bench.check()

    run(story())


def test_the_queue_is_no_exception() -> None:
    async def story() -> None:
        bench = Slow(pushing=Pushing(PushMode.FIXED_CAP, 1))
        first, second = bench.post(), bench.post()
        await asyncio.sleep(25.0)
        assert bench.registry.queued == 1
        await bench.say(plainly(b"{}"))
        await bench.say(SSE + b"Transfer-Encoding: chunked\r\n\r\n", chunk(LAST), b"0\r\n\r\n")
        assert got(first).body == 2 * KEEP_ALIVE + b"data: {}\n\n"
        assert got(second).body == 2 * KEEP_ALIVE + LAST
        bench.check()

    run(story())


def test_a_request_that_is_tried_again_has_one_head() -> None:
    async def story() -> None:
        bench = Slow(targets=TARGETS)
        client = bench.post()
        await bench.say(DIES, after_s=15.0)
        await asyncio.sleep(2.0)
        await bench.say(SSE + b"Transfer-Encoding: chunked\r\n\r\n", chunk(EVENT), chunk(LAST), b"0\r\n\r\n")
        one = got(client)
        assert one.body == KEEP_ALIVE + EVENT + LAST
        bench.check()

    run(story())
