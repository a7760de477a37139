"""Handshakes of TLS within bounds: silent clients, slow ones, and many honest ones at once. Real TLS over loopback."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from lb.http.tls_acceptor import HANDSHAKE, TOO_MANY, TlsAcceptor
from tests.integration.lb_harness import self_signed


class Greeter(asyncio.Protocol):
    def __init__(self, port: Port) -> None:
        self._port = port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast(asyncio.Transport, transport)
        self._port.transports.append(made)
        made.write(b"hello")


class Port:
    """A listening socket with an acceptor, and what became of its connections."""

    def __init__(self, folder: Path, places: int) -> None:
        certfile, keyfile = self_signed(folder)
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certfile, keyfile)
        self.trust = ssl.create_default_context(cafile=str(certfile))
        self.trust.check_hostname = False
        self.refused: Counter[str] = Counter()
        self.transports: list[asyncio.Transport] = []
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.places = places
        self.most = 0
        self.acceptor = TlsAcceptor(tls, lambda: Greeter(self), lambda: self.places, self._refuse)
        self.task = self.acceptor.listen(self.socket)

    def _refuse(self, why: str) -> None:
        self.refused[why] += 1

    def bare(self, count: int) -> list[socket.socket]:
        """Connect without TLS."""
        return [socket.create_connection(self.socket.getsockname(), timeout=5) for _ in range(count)]

    async def greeting(self) -> bytes:
        reader, writer = await asyncio.open_connection(*self.socket.getsockname(), ssl=self.trust)
        try:
            return await reader.readexactly(5)
        finally:
            writer.transport.abort()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        await self.acceptor.close()
        self.socket.close()
        for transport in self.transports:
            transport.abort()


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    it = Port(tmp_path, places=4)
    yield it
    await it.close()


async def test_connections_that_never_speak_give_way(port: Port) -> None:
    silent = port.bare(40)
    async with asyncio.timeout(4):  # less than a handshake may take
        assert [await port.greeting() for _ in range(5)] == [b"hello"] * 5
    assert port.refused[TOO_MANY] >= 36
    assert set(port.refused) == {TOO_MANY}
    for one in silent:
        one.close()


async def test_connections_that_only_begin_a_handshake_have_their_time_and_give_way(port: Port) -> None:
    slow = port.bare(8)
    for one in slow:
        one.sendall(b"\x16\x03\x01")  # the beginning of a ClientHello
    async with asyncio.timeout(4):
        assert await port.greeting() == b"hello"
    assert port.refused[TOO_MANY] >= 4
    for one in slow:
        one.close()


async def test_many_honest_clients_at_once_wait_for_each_other_and_are_all_served(port: Port) -> None:
    async with asyncio.timeout(20):
        assert await asyncio.gather(*(port.greeting() for _ in range(60))) == [b"hello"] * 60
    assert port.refused == {}


async def test_what_is_not_tls_is_refused(port: Port) -> None:
    (one,) = port.bare(1)
    one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(4):
        while not port.refused:  # noqa: ASYNC110 (the condition is not ours to announce)
            await asyncio.sleep(0.01)
    assert port.refused == {HANDSHAKE: 1}
    one.settimeout(2)
    with suppress(ConnectionError):
        while one.recv(100):  # an alert of TLS, perhaps
            pass
    one.close()


async def test_without_a_place_nothing_is_accepted_until_there_is_one(port: Port) -> None:
    port.places = 0
    waiting = asyncio.create_task(port.greeting())
    await asyncio.sleep(0.05)
    assert not port.transports
    port.places = 1
    async with asyncio.timeout(4):
        assert await waiting == b"hello"


async def test_a_connection_that_was_accepted_is_served_though_the_port_closes(port: Port) -> None:
    port.places = 0
    waiting = asyncio.create_task(port.greeting())
    await asyncio.sleep(0.05)
    port.places = 1
    port.task.cancel()
    await asyncio.wait({port.task})
    async with asyncio.timeout(4):
        assert await waiting == b"hello"


async def test_what_waits_in_the_kernel_is_adopted(port: Port) -> None:
    port.task.cancel()
    await asyncio.wait({port.task})
    waiting: list[Any] = [asyncio.create_task(port.greeting()) for _ in range(10)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(4):
        await port.acceptor.adopt(port.socket)
        await port.acceptor.completed()
        assert await asyncio.gather(*waiting) == [b"hello"] * 10
