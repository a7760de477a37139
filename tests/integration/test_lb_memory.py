"""The memory for bodies, shared between API keys over real sockets: the data plane of an agent with a small budget."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lb.config.options import Access, ApiKey, Limits
from lb.config.schema import Table, Target
from lb.core.api_keys import ApiKeyStore
from lb.core.targets import TargetTable
from lb.engines.kinds import EngineKind, Fetched
from lb.http.upstream import Pools
from lb.observe.explain import Explanations
from lb.observe.metrics import Metrics
from lb.proxy.account import Account
from lb.proxy.dispatch import Dispatch, Engines
from lb.proxy.downstream import ClientConnection
from lb.proxy.home_finder import HomeFinder
from lb.proxy.intake import Intake
from lb.proxy.registry import RequestRegistry
from lb.proxy.runtime import Runtime
from tests.integration.lb_harness import Seen, World, until, world

MIB = 1024 * 1024


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


async def _no_resources(target: Target, path: str, timeout_s: float, lines: bytes) -> Fetched:
    raise ConnectionRefusedError


def a_key(name: str, weight: float = 1.0) -> ApiKey:
    return ApiKey(name, hashlib.sha256(name.encode()).hexdigest(), weight=weight)


class Endpoint:
    """A data port in this process. Bodies may take 4 MiB in all."""

    def __init__(self, target_url: str, *keys: ApiKey) -> None:
        loop = asyncio.get_running_loop()
        targets = (Target("t", target_url),)
        access = Access(keys)
        table = Table("service", "r1", targets, policy="round_robin", limits=Limits(), access=access)
        self.table = TargetTable(table, loop.time())
        self.runtime = Runtime(loop, loop.time, 4 * MIB)
        registry = RequestRegistry(self.table, None, self.runtime)
        self.api_keys = ApiKeyStore(access, loop.time())
        metrics, explanations = Metrics("service", ""), Explanations(running=registry.explanations)
        metrics.use_table(table)
        account = Account(self.table, metrics, explanations, self.api_keys, loop.time())
        engines = Engines(lambda key: EngineKind.UNKNOWN, lambda key: None, lambda: None)
        homes = HomeFinder(self.table, _no_resources, loop.time)
        self._pools = Pools()
        dispatch = Dispatch(registry, self._pools, account, engines, random.Random(1), homes)
        self.intake = Intake(dispatch, account, "id")
        self._server: asyncio.Server

    async def open(self) -> int:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: ClientConnection(self.intake), "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def holds(self, size: float) -> bool:
        """Return whether nearly this much has arrived."""
        return self.runtime.buffers.taken > size - 10

    async def close(self) -> None:
        self._server.close()
        for client in list(self.runtime.clients):
            client.hang_up(abort=True)
        self._pools.close()
        await asyncio.sleep(0.01)  # until the target has noticed


class Sender:
    """A client's connection with one upload, `size` bytes of one letter."""

    def __init__(self, key: str, size: int) -> None:
        self.body = key[:1].encode() * size
        self.head = (
            f"POST /up HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {size}\r\n\r\n"
        )
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def send(self, port: int, share: float = 1.0) -> Sender:
        """Connect, and send the head with this share of the body."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        sent = round(share * len(self.body))
        self.writer.write(self.head.encode() + self.body[:sent])
        self.body = self.body[sent:]
        await self.writer.drain()
        return self

    async def finish(self) -> tuple[int, str, bytes]:
        """Send the rest. Returns the status, the head and the body of the response."""
        self.writer.write(self.body)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length:")[2].split("\r\n")[0])
        body = await self.reader.readexactly(length)
        return int(head.split()[1]), head, body


async def digest(seen: Seen) -> None:
    await seen.answer(hashlib.sha256(seen.body).hexdigest().encode())


async def test_half_uploads_of_one_key_do_not_keep_another_out(w: World) -> None:
    target = await w.target("t", digest)
    endpoint = Endpoint(target.url, a_key("a"), a_key("b"))
    port = await endpoint.open()
    halves = [await Sender("a", MIB).send(port, 0.59) for _ in range(6)]  # all that there is room for
    await until(lambda: endpoint.holds(6 * 0.59 * MIB))

    for _ in range(20):
        status, _, body = await (await Sender("b", MIB).send(port)).finish()
        assert (status, body) == (200, hashlib.sha256(b"b" * MIB).hexdigest().encode())

    refused, head, body = await halves[-1].finish()
    assert (refused, b'"out_of_memory"' in body) == (503, True)
    assert "\r\nRetry-After: " in head
    assert "\r\nConnection: close\r\n" in head
    assert await halves[-1].reader.read() == b""
    for half in halves[:-1]:
        status, _, body = await half.finish()
        assert (status, body) == (200, hashlib.sha256(b"a" * MIB).hexdigest().encode())
    assert (endpoint.runtime.buffers.evicted, endpoint.runtime.buffers.taken) == (1, 0)
    assert all(usage.in_flight == 0 for usage in endpoint.api_keys.usage(0.0))
    assert endpoint.runtime.faults.total == 0
    await endpoint.close()
