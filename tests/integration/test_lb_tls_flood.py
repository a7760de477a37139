"""Floods of connections without a handshake, at an agent that has few file descriptors."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import ssl
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from tests.integration.lb_harness import ROOT, TOKEN, ToyTarget, self_signed
from tests.integration.region_links import identity

DESCRIPTORS = 128
OPEN = 300  # connections of the flood at a time
ROUNDS = 3


class Agent:
    """`python -m lb` with TLS on its data port, and its ports."""

    def __init__(self, ports: dict[str, int], trust: ssl.SSLContext, http: aiohttp.ClientSession) -> None:
        self.port, self.admin_port = ports["port"], ports["admin_port"]
        self.peers_port = ports["peers_port"]
        self.trust = trust
        self._http = http

    async def status(self) -> int:
        """The status of a request on a new connection."""
        headers = {"Connection": "close"}
        url = f"https://127.0.0.1:{self.port}/"
        async with self._http.get(url, ssl=self.trust, headers=headers) as response:
            await response.read()
            return response.status

    async def admin(self, path: str) -> str:
        headers = {"Authorization": f"Bearer {TOKEN}", "Connection": "close"}
        async with self._http.get(f"http://127.0.0.1:{self.admin_port}{path}", headers=headers) as response:
            assert response.status == 200
            return await response.text()


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


@asynccontextmanager
async def agent(folder: Path, target: ToyTarget) -> AsyncIterator[Agent]:
    certfile, keyfile = self_signed(folder)
    peers = identity(folder / "us", "us")
    arguments = ["--port", "0", "--target", target.url, "--health-path", "/health", "--region", "cloud/us"]
    arguments += ["--tls-certfile", str(certfile), "--tls-keyfile", str(keyfile)]
    arguments += ["--peers-certfile", str(peers.own), "--peers-cafile", str(peers.authority)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lb", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SKYSERVE_LB_TOKEN": TOKEN},
        preexec_fn=few_descriptors,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    line = await asyncio.wait_for(process.stdout.readline(), 20)
    assert line, (await process.stderr.read()).decode()
    timeout = aiohttp.ClientTimeout(total=4)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        try:
            yield Agent(json.loads(line), ssl.create_default_context(cafile=str(certfile)), http)
        finally:
            process.send_signal(signal.SIGTERM)
            log = (await process.communicate())[1].decode()
    assert process.returncode == 0, log
    assert "Traceback" not in log, log
    assert len(log.splitlines()) < 30, log


@asynccontextmanager
async def flood(port: int, first: bytes) -> AsyncIterator[None]:
    """Keep connections open that send `first` and nothing else: those which the agent closes are replaced."""
    connections: deque[socket.socket] = deque()

    def connect(count: int) -> None:
        for _ in range(count):
            one = socket.socket()
            one.setblocking(False)
            with suppress(BlockingIOError):
                one.connect(("127.0.0.1", port))
            connections.append(one)
            if len(connections) > OPEN:
                connections.popleft().close()

    def speak() -> None:
        for one in connections:
            with suppress(OSError):
                one.send(first)

    async def go_on() -> None:
        while True:
            connect(20)
            await asyncio.sleep(0.05)
            if first:
                speak()
            await asyncio.sleep(0.35)

    connect(OPEN)
    flooding = asyncio.create_task(go_on())
    await asyncio.sleep(1.5)
    try:
        yield
    finally:
        flooding.cancel()
        for one in connections:
            one.close()


@pytest.mark.parametrize("first", [b"", b"\x16"], ids=["silent", "a byte each"])
@pytest.mark.parametrize("which", ["clients", "peers"])
async def test_clients_and_the_admin_port_are_served_under_a_flood(
    tmp_path: Path, which: str, first: bytes
) -> None:
    target = ToyTarget("target")
    await target.start()
    async with agent(tmp_path, target) as it:
        assert await it.status() == 200
        async with flood(it.port if which == "clients" else it.peers_port, first):
            for _ in range(ROUNDS):
                assert await it.status() == 200
                assert json.loads(await it.admin("/-/live")) == {"live": True}
        metrics = await it.admin("/-/metrics")
        ejected = [line for line in metrics.splitlines() if line.startswith("skyserve_lb_ejections_total{")]
        assert all(line.endswith(" 0.0") for line in ejected)
    await target.stop()


async def test_connections_beyond_the_limit_of_clients_get_503_after_their_handshake(tmp_path: Path) -> None:
    target = ToyTarget("target")
    await target.start()
    async with agent(tmp_path, target) as it:

        async def idle() -> asyncio.StreamWriter:
            return (await asyncio.open_connection("127.0.0.1", it.port, ssl=it.trust))[1]

        held = [await idle() for _ in range(60)]  # more than it may have
        try:
            assert await it.status() == 503
            assert json.loads(await it.admin("/-/live")) == {"live": True}
            assert await it.status() == 503
        finally:
            for writer in held:
                writer.transport.abort()
        async with asyncio.timeout(10):
            while await it.status() != 200:  # noqa: ASYNC110 (the agent announces nothing)
                await asyncio.sleep(0.05)
    await target.stop()
