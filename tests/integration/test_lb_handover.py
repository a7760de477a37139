"""A successor takes the ports over: no one is refused, and started requests are finished."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lb.agent import socket_handover
from lb.config import file as config_file
from lb.config.schema import Table
from tests.integration.lb_harness import TOKEN, RunningAgent, Seen, World, until, world


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


@pytest.mark.long
async def test_no_connection_is_refused_and_no_stream_cut_while_agents_follow_each_other(
    w: World, tmp_path: Path
) -> None:
    go = asyncio.Event()

    async def behave(seen: Seen) -> None:
        if seen.path != "/slow":
            return await seen.answer(b"ok")
        await seen.begin_stream()
        await seen.chunk(b"data: 1\n\n")
        await go.wait()
        await seen.chunk(b"data: 2\n\n")
        await seen.send(b"0\r\n\r\n")

    target = await w.target("target", behave)
    socket = str(tmp_path / "handover")
    # A stream may take longer than what an agent that receives a stop gives it.
    flags = ("--target", target.url, "--handover-socket", socket, "--shutdown-grace", "0")
    first = await w.agent(*flags)
    over = asyncio.Event()
    answers: list[int] = []

    async def ask() -> None:
        """One new connection after the other; a refused one would raise."""
        while not over.is_set():
            reader, writer = await asyncio.open_connection("127.0.0.1", first.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answers.append(int((await reader.read()).split(b" ", 2)[1]))
            writer.close()

    async with first.http.post(first.url + "/slow") as stream:
        assert await stream.content.readexactly(9) == b"data: 1\n\n"
        asking = [asyncio.create_task(ask()) for _ in range(4)]
        predecessor = first
        for _ in range(3):
            successor = await w.agent(*flags)
            assert successor.port == first.port
            assert (await successor.stats())["requests"] >= 0  # the admin port is its own by now, or soon
            if predecessor is not first:
                assert await asyncio.wait_for(predecessor.process.wait(), 20) == 0
            predecessor = successor
        count = len(answers)

        async def many_more() -> bool:
            return len(answers) > count + 20

        await until(many_more)
        over.set()
        await asyncio.gather(*asking)
        assert first.process.returncode is None  # it still has the stream
        go.set()
        assert await stream.content.read() == b"data: 2\n\n"
    assert await asyncio.wait_for(first.process.wait(), 20) == 0
    assert set(answers) == {200}


@pytest.mark.long
async def test_connections_without_a_request_under_way_may_send_one_to_the_predecessor(
    w: World, tmp_path: Path
) -> None:
    target = await w.target("target")
    flags = ("--target", target.url, "--handover-socket", str(tmp_path / "handover"))
    first = await w.agent(*flags)
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    fresh = await asyncio.open_connection("127.0.0.1", first.port)
    used = await asyncio.open_connection("127.0.0.1", first.port)
    used[1].write(request)
    assert b"keep-alive" not in (await used[0].readuntil(b"\r\n\r\n")).lower()
    await used[0].readexactly(len(b"target"))
    assert (await first.stats())["requests"] >= 1

    await w.agent(*flags)
    for _, writer in (fresh, used):
        writer.write(request)
    for reader, writer in (fresh, used):
        # A client that is served before the predecessor knows of its successor may send one more, and is hung up on later.
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert answer.startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert await asyncio.wait_for(first.process.wait(), 20) == 0


@pytest.mark.long
async def test_a_connection_without_a_first_request_is_waited_for_longer_than_an_idle_one(
    w: World, tmp_path: Path
) -> None:
    target = await w.target("target")
    flags = ("--target", target.url, "--handover-socket", str(tmp_path / "handover"))
    first = await w.agent(*flags)
    await first.push(
        target.json, limits={"head_timeout_s": 600.0}
    )  # more than any machine takes for this test
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    fresh = await asyncio.open_connection("127.0.0.1", first.port)
    used = await asyncio.open_connection("127.0.0.1", first.port)
    used[1].write(request)
    await used[0].readuntil(b"target")
    await w.agent(*flags)
    assert await asyncio.wait_for(used[0].read(), 20) == b""
    fresh[1].write(request)
    answer = await asyncio.wait_for(fresh[0].read(), 20)
    assert answer.startswith(b"HTTP/1.1 200 ")
    for _, writer in (fresh, used):
        writer.close()
    assert await asyncio.wait_for(first.process.wait(), 20) == 0


async def one_held(agent: RunningAgent) -> asyncio.Task[tuple[int, str]]:
    """A request that waits in the agent."""
    asking = asyncio.create_task(agent.text())

    async def held() -> bool:
        return (await agent.stats())["queued"] == 1

    await until(held)
    return asking


@pytest.mark.long
async def test_who_is_held_gets_a_target_that_only_the_successor_is_told_of(w: World, tmp_path: Path) -> None:
    target = await w.target("late")
    flags = ("--handover-socket", str(tmp_path / "handover"), "--table-file", str(tmp_path / "table.json"))
    first = await w.agent(*flags)
    await first.push()
    asking = await one_held(first)
    successor = await w.agent(*flags)
    assert not asking.done()
    await successor.push(target.json, revision="r2")
    assert await asyncio.wait_for(asking, 20) == (200, "late")
    assert await asyncio.wait_for(first.process.wait(), 20) == 0


async def test_a_retired_agent_that_is_told_to_stop_turns_the_held_away(w: World, tmp_path: Path) -> None:
    flags = ("--handover-socket", str(tmp_path / "handover"), "--table-file", str(tmp_path / "table.json"))
    first = await w.agent(*flags)
    await first.push()
    asking = await one_held(first)
    await w.agent(*flags)
    (tmp_path / "table.json").write_text("{")  # what cannot be read changes nothing

    async def told_so() -> bool:
        return "cannot follow" in first.log.read_text()

    await until(told_so)
    assert not asking.done()
    first.process.send_signal(signal.SIGTERM)
    status, text = await asyncio.wait_for(asking, 20)
    assert (status, "no_target_ready" in text) == (503, True)
    assert await asyncio.wait_for(first.process.wait(), 20) == 0


async def test_a_successor_that_dies_before_it_serves_changes_nothing(w: World, tmp_path: Path) -> None:
    target = await w.target("target")
    path = tmp_path / "handover"
    agent = await w.agent("--target", target.url, "--handover-socket", str(path))
    _, writer = await asyncio.open_unix_connection(path)
    writer.close()
    assert await agent.text() == (200, "target")
    agent.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(agent.process.wait(), 20) == 0
    assert not path.exists()


@pytest.mark.long
async def test_a_table_that_comes_while_the_ports_are_handed_over_is_left_to_the_successor(
    w: World, tmp_path: Path
) -> None:
    path = tmp_path / "handover"
    agent = await w.agent("--handover-socket", str(path))
    assert agent.admin_port is not None
    body = json.dumps({"service": "default", "revision": "r2", "targets": []}).encode()
    head = f"PUT /-/targets HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", agent.admin_port)
    writer.write(head.encode() + body[:-1])
    await agent.stats()  # by now it reads the body
    successor = socket_handover.take(path)
    assert successor is not None
    with ExitStack() as ports:
        for one in successor.sockets:
            ports.enter_context(one)
        await successor.serving()
        writer.write(body[-1:])
        response = await asyncio.wait_for(reader.read(), 20)
    # Or it hung up before the rest had come; the client sends the table again in both cases.
    assert not response or (response.startswith(b"HTTP/1.1 503 ") and b'"code":"retired"' in response), (
        response
    )
    writer.close()
    assert await asyncio.wait_for(agent.process.wait(), 20) == 0


async def test_a_successor_finds_the_table_that_its_predecessor_took_last(w: World, tmp_path: Path) -> None:
    table_file, path = tmp_path / "table.json", tmp_path / "handover"
    config_file.save(table_file, Table("default", revision="r1"))
    heard = asyncio.Event()

    async def predecessor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = writer.get_extra_info("socket")
        fds = [one.fileno() for one in ports]
        socket.send_fds(socket.socket(fileno=os.dup(line.fileno())), [socket_handover.GREETING], fds)
        assert await reader.readexactly(len(socket_handover.SERVING)) == socket_handover.SERVING
        config_file.save(table_file, Table("default", revision="r2"))
        writer.close()
        heard.set()

    with ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        await asyncio.start_unix_server(predecessor, path)
        agent = await w.agent("--handover-socket", str(path), "--table-file", str(table_file))
        await asyncio.wait_for(heard.wait(), 20)

    async def caught_up() -> bool:
        return (await agent.stats())["revision"] == "r2"

    await until(caught_up)
