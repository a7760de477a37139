"""The relay of the chaos benchmarks: it passes bytes on, and ends connections as a lost machine does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from benchmarks.chaos.relay import Cut, Cuts, Relay

EVENT = b"data: 0123456789\n\n"


@asynccontextmanager
async def engine() -> AsyncIterator[int]:
    """A server that responds to each head with three events, on connections that it keeps."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                for _ in range(3):
                    writer.write(EVENT)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def ask(
    relay: Relay, name: str, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
) -> bytes:
    """What comes of a request until three events are there or the connection has ended."""
    reader, writer = streams or await asyncio.open_connection("127.0.0.1", relay.port)
    writer.write(f"GET / HTTP/1.1\r\nX-Request-Id: {name}\r\nX: y\r\n\r\n".encode())
    got = b""
    while got.count(EVENT) < 3 and (data := await reader.read(4096)):
        got += data
    if streams is None:
        writer.close()
    return got


async def test_bytes_pass_and_are_kept() -> None:
    async with engine() as port, Relay("one", port, Cuts()) as relay:
        streams = await asyncio.open_connection("127.0.0.1", relay.port)
        for name in ("a", "b"):
            assert await ask(relay, name, streams) == 3 * EVENT
        (leg,) = relay.cuts.take("b")
        assert leg.response == 3 * EVENT
        assert b"X-Request-Id: b" in leg.request
        assert not leg.cut
        streams[1].close()


async def test_a_planned_cut_ends_one_connection_where_it_is_to() -> None:
    async with engine() as port, Relay("one", port, Cuts()) as relay:
        relay.cuts.plan("a", [Cut(1, share=0.5, reset=False)])
        assert await ask(relay, "b") == 3 * EVENT
        assert await ask(relay, "a") == EVENT + EVENT[: len(EVENT) // 2]
        assert await ask(relay, "a") == 3 * EVENT  # its next leg


async def test_a_reset_is_a_reset() -> None:
    async with engine() as port, Relay("one", port, Cuts()) as relay:
        relay.cuts.plan("a", [Cut(0, reset=True)])
        with pytest.raises(ConnectionResetError):
            await ask(relay, "a")


async def test_a_relay_that_is_cut_refuses_until_it_is_healed() -> None:
    async with engine() as port, Relay("one", port, Cuts()) as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        assert await ask(relay, "a", (reader, writer)) == 3 * EVENT
        relay.cut()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        with pytest.raises(ConnectionResetError):
            await ask(relay, "b")
        relay.heal()
        assert await ask(relay, "c") == 3 * EVENT
