"""Listening sockets with TLS move to another address and to a successor, and no handshake is lost."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.lb_callers import Callers
from tests.integration.lb_harness import World, self_signed, world
from tests.integration.test_lb_move import free_port, put, refused

pytestmark = pytest.mark.long


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


def tls(folder: Path) -> tuple[tuple[str, ...], ssl.SSLContext]:
    certfile, keyfile = self_signed(folder)
    trust = ssl.create_default_context(cafile=str(certfile))
    return ("--tls-certfile", str(certfile), "--tls-keyfile", str(keyfile)), trust


async def test_no_handshake_is_lost_while_the_port_changes(w: World, tmp_path: Path) -> None:
    flags, trust = tls(tmp_path)
    target = await w.target("target")
    agent = await w.agent("--target", target.url, *flags)
    old = Callers(agent.port, trust=trust)
    await old.many()
    port = free_port()
    assert await put(agent, {"host": "127.0.0.1", "port": port}, target.json) == (200, {"revision": "r2"})
    new = Callers(port, trust=trust)
    old.moved = True
    await old.over()
    assert await refused(agent.port)
    await new.many()
    await new.stop()
    assert old.refused_early == new.refused_early == 0
    assert set(old.statuses + new.statuses) == {200}


async def test_no_handshake_is_lost_while_agents_follow_each_other(w: World, tmp_path: Path) -> None:
    flags, trust = tls(tmp_path)
    target = await w.target("target")
    flags = ("--target", target.url, "--handover-socket", str(tmp_path / "handover"), *flags)
    agents = [await w.agent(*flags)]
    callers = Callers(agents[0].port, trust=trust)
    for _ in range(2):
        await callers.many()
        agents.append(await w.agent(*flags))
    await callers.many()
    await callers.stop()
    assert len({agent.port for agent in agents}) == 1
    for predecessor in agents[:-1]:
        assert await asyncio.wait_for(predecessor.process.wait(), 20) == 0
    assert callers.refused_early == 0
    assert set(callers.statuses) == {200}
