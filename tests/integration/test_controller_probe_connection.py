"""What the connection of a readiness probe makes of the bytes that a replica may send."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from skyserve_cli.controller.probe_connection import SMALL_BODY_BYTES, connect, probe_request
from skyserve_cli.spec.model import Probe

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
LONG = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (SMALL_BODY_BYTES + 1)
ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + 20 * (
    b"1000\r\n" + 4096 * b"x" + b"\r\n"
)


@asynccontextmanager
async def replica(pieces: Sequence[bytes], *, hang_up: bool) -> AsyncIterator[str]:
    """Sends the pieces for each request, one after the other."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.005)
                if hang_up:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize(
    ("pieces", "hang_up", "expected", "reusable"),
    [
        ([OK], False, 200, True),
        ([OK[:5], OK[5:30], OK[30:]], False, 200, True),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], False, 200, True),
        ([CHUNKED[:50], CHUNKED[50:]], False, 200, True),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], False, 204, True),
        ([b"HTTP/1.1 503 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"], True, 503, False),
        ([b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"], True, 200, False),
        ([b"HTTP/1.1 200 OK\r\n\r\nuntil the end"], True, 200, False),
        ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"], True, OSError, False),
        ([LONG], False, 200, False),
        ([ENDLESS], False, 200, False),
        ([b""], True, OSError, False),
        ([OK[:30]], True, OSError, False),
        ([b"SSH-2.0-OpenSSH\r\n"], False, OSError, False),
        ([b"HTTP/1.1 200 OK\r\n" + 3000 * (b"X-A: " + 30 * b"a" + b"\r\n")], False, OSError, False),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"], False, OSError, False),
    ],
    ids=[
        "whole", "in pieces", "an interim response first", "chunked", "without a body", "the last of its connection",
        "HTTP/1.0", "a body that the end of the connection ends", "another protocol", "a long body", "an endless body",
        "a connection that ends", "half a head", "another server", "a head that is too long", "a length below zero",
    ],
)  # fmt: skip
async def test_of_a_response_the_status_counts(
    pieces: list[bytes], hang_up: bool, expected: Any, reusable: bool, host: str
) -> None:
    async with replica(pieces, hang_up=hang_up) as url, asyncio.timeout(20):
        request = probe_request(url.replace("127.0.0.1", host), Probe("/health"))
        connection = await connect(request, ssl.create_default_context())
        if expected is OSError:
            with pytest.raises(OSError, match=r"not HTTP|was closed|too long|reset"):
                await connection.status_of(request.data)
        else:
            assert await connection.status_of(request.data) == expected
            if reusable:
                assert await connection.status_of(request.data) == expected
        assert connection.reusable is reusable
        connection.close()


async def test_a_replica_that_speaks_out_of_turn_loses_its_connection() -> None:
    async with replica([OK, OK], hang_up=False) as url, asyncio.timeout(20):
        request = probe_request(url, Probe("/health"))
        connection = await connect(request, ssl.create_default_context())
        assert await connection.status_of(request.data) == 200
        for _ in range(500):
            if not connection.reusable:
                break
            await asyncio.sleep(0.01)
        with pytest.raises(ConnectionResetError):
            await connection.status_of(request.data)


@pytest.mark.parametrize(
    ("endpoint", "probe", "address", "lines"),
    [
        ("http://10.0.0.1:8000", Probe("/health"), ("10.0.0.1", 8000, False), [b"GET /health HTTP/1.1", b"Host: 10.0.0.1:8000"]),
        ("http://10.0.0.1:8000/", Probe("/a b?c=é#d"), ("10.0.0.1", 8000, False), [b"GET /a%20b?c=%C3%A9 HTTP/1.1"]),
        ("https://engine.example/base", Probe("/%20"), ("engine.example", 443, True), [b"GET /base/%20 HTTP/1.1"]),
        ("http://[::1]:80", Probe("/"), ("::1", 80, False), [b"Host: [::1]:80"]),
        ("http://a", Probe("/", headers=(("host", "b"), ("X-Key", "k"))), ("a", 80, False), [b"host: b", b"X-Key: k"]),
        ("http://a", Probe("/", post_data='"é"'), ("a", 80, False), [b"POST / HTTP/1.1", b"Content-Length: 4"]),
    ],
)  # fmt: skip
def test_the_bytes_of_a_probe(
    endpoint: str, probe: Probe, address: tuple[str, int, bool], lines: list[bytes]
) -> None:
    request = probe_request(endpoint, probe)
    assert request[:3] == address
    head, _, body = request.data.partition(b"\r\n\r\n")
    found = head.split(b"\r\n")
    assert set(lines) <= set(found)
    assert sum(line.lower().startswith(b"host:") for line in found) == 1
    assert body == (probe.post_data or "").encode()


@pytest.mark.parametrize("endpoint", ["", "10.0.0.1:8000", "ftp://a", "http://", "http://a:99999"])
def test_an_endpoint_that_cannot_be_probed(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"endpoint|[Pp]ort"):
        probe_request(endpoint, Probe("/"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_long_probe_is_sent_whole(host: str) -> None:
    size = 8_000_000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Content-Length: %d\r\n" % size in head
        await asyncio.sleep(0.05)  # until the buffers of both sockets are full
        await reader.readexactly(size)
        writer.write(OK)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.timeout(20):
        url = f"http://{host}:{server.sockets[0].getsockname()[1]}"
        request = probe_request(url, Probe("/", post_data=size * "x"))
        connection = await connect(request, ssl.create_default_context())
        assert await connection.status_of(request.data) == 200
        connection.close()
