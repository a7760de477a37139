"""The data port moves to another address: the new one is open before the old one is closed."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.lb_callers import REQUEST, Callers
from tests.integration.lb_harness import TOKEN, RunningAgent, Seen, World, until, world

pytestmark = pytest.mark.long


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


async def status_at(port: int, host: str = "127.0.0.1") -> int:
    """The status of a request on a new connection. Raises ConnectionRefusedError where no one listens."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(REQUEST)
        line = await asyncio.wait_for(reader.readline(), 20)
        assert line, "the connection was closed without a response"
        return int(line.split(b" ")[1])
    finally:
        writer.close()


async def refused(port: int, host: str = "127.0.0.1") -> bool:
    try:
        await status_at(port, host)
    except ConnectionRefusedError:
        return True
    return False


async def put(
    agent: RunningAgent, listen: dict[str, Any] | None, *targets: dict[str, Any]
) -> tuple[int, Any]:
    table = {"service": "default", "revision": "r2", "targets": list(targets), "listen": listen}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with agent.http.put(agent.admin + "/-/targets", json=table, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("keep", [False, True], ids=["a connection per request", "kept connections"])
async def test_no_request_is_lost_while_the_port_changes(w: World, keep: bool) -> None:
    go = asyncio.Event()

    async def behave(seen: Seen) -> None:
        if seen.path == "/slow":
            await go.wait()
        await seen.answer(b"target")

    target = await w.target("target", behave)
    agent = await w.agent("--target", target.url)
    slow = asyncio.create_task(agent.text("/slow"))
    async with asyncio.timeout(20):
        await target.arrived.wait()
    old = Callers(agent.port, keep=keep)
    await old.many()
    port = free_port()
    assert await put(agent, {"host": "127.0.0.1", "port": port}, target.json) == (200, {"revision": "r2"})
    new = Callers(port, keep=keep)  # it is open once the push has its response
    old.moved = True
    await old.over()
    assert await refused(agent.port)
    assert not slow.done()
    go.set()
    assert await slow == (200, "target")
    await new.many()
    await new.stop()
    assert old.refused_early == new.refused_early == 0
    assert set(old.statuses + new.statuses) == {200}


@pytest.mark.parametrize("taken_by", ["another process", "nobody: not an address of this host"])
async def test_an_address_that_cannot_be_had_leaves_the_old_one_serving(
    w: World, tmp_path: Path, taken_by: str
) -> None:
    target = await w.target("target")
    file = tmp_path / "table.json"
    agent = await w.agent("--target", target.url, "--table-file", str(file))
    await agent.push(target.json)
    stored = file.read_text()
    callers = Callers(agent.port)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        host, why = ("127.0.0.1", "Address already in use")
        if taken_by != "another process":
            host, why = ("192.0.2.1", "Cannot assign requested address")
        status, body = await put(agent, {"host": host, "port": port})
    assert (status, body["error"]["code"]) == (409, "cannot_listen")
    here = f"127.0.0.1:{agent.port}"
    assert body["error"]["message"] == f"cannot listen on {host}:{port}: {why}; still listening on {here}"
    assert file.read_text() == stored
    assert (await agent.request("GET", "/-/targets"))["revision"] == "r1"
    await callers.many()
    await callers.stop()
    assert (callers.refused_early, set(callers.statuses)) == (0, {200})


async def test_a_reload_moves_the_port_and_a_restart_finds_it(w: World, tmp_path: Path) -> None:
    target = await w.target("target")
    file, ready = tmp_path / "table.json", tmp_path / "ready.json"
    flags = ("--table-file", str(file), "--ready-file", str(ready))
    agent = await w.agent(*flags)
    await agent.push(target.json)
    ports = [free_port(), free_port()]
    table = json.loads(file.read_text())

    async def reload(port: int) -> None:
        file.write_text(
            json.dumps({**table, "revision": str(port), "listen": {"host": "127.0.0.1", "port": port}})
        )
        agent.process.send_signal(signal.SIGHUP)

    async def moved() -> bool:
        return not await refused(ports[0])

    await reload(ports[0])
    await until(moved)
    assert await status_at(ports[0]) == 200
    assert json.loads(ready.read_text())["port"] == ports[0]
    with socket.create_server(("127.0.0.1", ports[1])):
        await reload(ports[1])

        async def reported() -> bool:
            return f"cannot listen on 127.0.0.1:{ports[1]}: Address already in use" in agent.log.read_text()

        await until(reported)
        assert await status_at(ports[0]) == 200
    again = await w.agent(*flags)
    assert again.port == ports[1]
    assert await status_at(ports[1]) == 200


@pytest.mark.parametrize(
    ("before", "after"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0")], ids=["narrower", "wider"]
)
async def test_all_addresses_and_one_of_them_follow_each_other_on_one_port(
    w: World, before: str, after: str
) -> None:
    target = await w.target("target")
    agent = await w.agent("--target", target.url, "--host", before)
    callers = Callers(agent.port)
    await callers.many()
    assert (await put(agent, {"host": after, "port": agent.port}, target.json))[0] == 200
    callers.moved = True
    narrow = after == "127.0.0.1"

    async def left() -> bool:
        return await refused(agent.port, "127.0.0.2") == narrow

    await until(left)
    await callers.many()
    await callers.stop()
    assert (callers.refused_early, set(callers.statuses)) == (0, {200})
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((after, agent.port))


async def test_there_and_back_again_at_once(w: World) -> None:
    target = await w.target("target")
    agent = await w.agent("--target", target.url)
    callers = Callers(agent.port)
    other = free_port()
    for port in (other, agent.port, other, agent.port):
        assert (await put(agent, {"host": "127.0.0.1", "port": port}, target.json))[0] == 200

    async def left() -> bool:
        return await refused(other)

    await until(left)
    await callers.many()
    await callers.stop()
    assert (callers.refused_early, set(callers.statuses)) == (0, {200})


async def test_a_successor_with_another_port_opens_it_before_the_old_one_is_closed(
    w: World, tmp_path: Path
) -> None:
    target = await w.target("target")
    flags = ("--target", target.url, "--handover-socket", str(tmp_path / "handover"))
    first = await w.agent(*flags)
    old = Callers(first.port)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        with pytest.raises(AssertionError, match="Address already in use"):
            await w.agent(*flags, "--port", str(taken))
    await old.many()
    port = free_port()
    successor = await w.agent(*flags, "--port", str(port))
    assert successor.port == port
    new = Callers(port)
    old.moved = True
    await old.over()
    await new.many()
    await new.stop()
    assert await asyncio.wait_for(first.process.wait(), 20) == 0
    assert old.refused_early == new.refused_early == 0
    assert set(old.statuses + new.statuses) == {200}
