"""SIGTERM: no request is lost that a client could not know to be too late."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.lb_callers import REQUEST, Callers
from tests.integration.lb_harness import RunningAgent, Seen, World, until, world

pytestmark = pytest.mark.long


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


async def closing(agent: RunningAgent) -> None:
    """Send SIGTERM to the agent, and wait until it does not listen any more."""
    agent.process.send_signal(signal.SIGTERM)

    async def refused() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", agent.port)
        except ConnectionRefusedError:
            return True
        writer.close()
        return False

    await until(refused)


async def head(reader: asyncio.StreamReader) -> bytes:
    return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).lower()


async def test_idle_and_fresh_connections_may_send_one_more_request(w: World) -> None:
    target = await w.target("target")
    agent = await w.agent("--target", target.url)
    used = await asyncio.open_connection("127.0.0.1", agent.port)
    used[1].write(REQUEST)
    assert b"connection: close" not in await head(used[0])
    await used[0].readexactly(len(b"target"))
    fresh = await asyncio.open_connection("127.0.0.1", agent.port)
    await closing(agent)
    for reader, writer in (used, fresh):
        writer.write(REQUEST)
        told = await head(reader)
        assert told.startswith(b"http/1.1 200 ")
        assert b"connection: close" in told
        assert await reader.read() == b"target"
        writer.close()
    assert await asyncio.wait_for(agent.process.wait(), 20) == 0


async def test_a_response_that_did_not_say_it_was_the_last_is_not(w: World) -> None:
    go = asyncio.Event()

    async def behave(seen: Seen) -> None:
        if seen.path == "/":
            return await seen.answer(b"target")
        await seen.begin_stream()
        await seen.chunk(b"data: 1\n\n")
        await go.wait()
        await seen.send(b"0\r\n\r\n")

    target = await w.target("target", behave)
    agent = await w.agent("--target", target.url)
    reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
    writer.write(REQUEST.replace(b" / ", b" /stream "))
    assert b"connection: close" not in await head(reader)
    await closing(agent)
    go.set()
    assert (await reader.readuntil(b"\r\n0\r\n\r\n")).endswith(b"0\r\n\r\n")
    writer.write(REQUEST)
    told = await head(reader)
    assert told.startswith(b"http/1.1 200 ")
    assert b"connection: close" in told
    assert await reader.read() == b"target"
    writer.close()
    assert await asyncio.wait_for(agent.process.wait(), 20) == 0


async def test_idle_connections_that_send_nothing_do_not_keep_it(w: World) -> None:
    agent = await w.agent()
    reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
    await closing(agent)
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()
    assert await asyncio.wait_for(agent.process.wait(), 20) == 0


@pytest.mark.parametrize("keep", [True, False], ids=["kept connections", "a connection per request"])
async def test_of_agents_that_share_a_port_one_stops_under_load(w: World, keep: bool) -> None:
    target = await w.target("target")
    first = await w.agent("--target", target.url, "--reuse-port")
    callers = [Callers(first.port, keep=keep) for _ in range(5)]
    flags = ("--target", target.url, "--reuse-port", "--port", str(first.port))
    for _ in range(2):
        second = await w.agent(*flags)
        await callers[0].many()
        first.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(first.process.wait(), 20) == 0
        first = second
        await callers[0].many()
    for one in callers:
        await one.stop()
        assert (one.refused_early, set(one.statuses)) == (0, {200})
