"""TLS transports over loopback, against a peer that decides what comes over the wire, and against asyncio's own TLS."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from lb.core.failures import described
from lb.http.tls_transport import TlsTransport
from lb.proxy.fast_path import open_fast_path
from tests.integration.tls_peer import VERSIONS, Peer, contexts

MIB = 1 << 20


class Recorder(asyncio.Protocol):
    """Notes what its transport reports."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = False
        self.paused = 0
        self.resumed = 0
        self.changed = asyncio.Event()
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.changed.set()

    def eof_received(self) -> bool:
        self.ended = True
        return False

    def pause_writing(self) -> None:
        self.paused += 1

    def resume_writing(self) -> None:
        self.resumed += 1
        self.changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(error)


class Link:
    """A transport with its protocol, and its peer."""

    def __init__(
        self, ours: socket.socket, theirs: socket.socket, folder: Path, version: ssl.TLSVersion
    ) -> None:
        server, client = contexts(folder, version)
        self.peer = Peer(theirs, server, server_side=True)
        loop = asyncio.get_running_loop()
        self.transport = TlsTransport(loop, ours, client, server_hostname="127.0.0.1")
        self.protocol = Recorder()

    async def begin(self) -> None:
        shaking = asyncio.create_task(self.transport.handshake(5.0))
        while not shaking.done():
            self.peer.pull()
            with contextlib.suppress(ssl.SSLWantReadError):
                self.peer.tls.do_handshake()
            self.peer.push()
            await asyncio.sleep(0)
        await shaking
        self.transport.begin(self.protocol)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 (nothing announces it)
                await asyncio.sleep(0)

    async def read(self, size: int) -> bytes:
        """Return what the peer has got, once it is as long."""
        got = bytearray()

        def enough() -> bool:
            got.extend(self.peer.got())
            return len(got) >= size

        await self.until(enough)
        return bytes(got)


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    ours.setblocking(False)
    return ours, theirs


@pytest.fixture(params=VERSIONS, ids=["TLS 1.2", "TLS 1.3"])
async def link(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Link]:
    ours, theirs = connected()
    it = Link(ours, theirs, tmp_path, request.param)
    await it.begin()
    yield it
    it.transport.abort()
    async with asyncio.timeout(5):
        await it.protocol.lost
    theirs.close()


# --- bytes


async def test_records_in_pieces_arrive_whole(link: Link) -> None:
    data = random.Random(1).randbytes(3_000)
    link.peer.seal(data)
    while not link.peer.push(100):  # noqa: ASYNC110 (nothing announces it)
        await asyncio.sleep(0)
    await link.until(lambda: len(link.protocol.data) >= len(data))
    assert bytes(link.protocol.data) == data


async def test_a_slow_reader_pauses_its_writer_and_gets_every_byte(link: Link) -> None:
    link.transport.set_write_buffer_limits(high=MIB)
    data = random.Random(2).randbytes(20 * MIB)
    link.transport.write(data)
    assert link.protocol.paused == 1
    assert link.transport.get_write_buffer_size() > MIB
    assert await link.read(len(data)) == data
    await link.until(lambda: link.protocol.resumed)
    assert link.protocol.paused == link.protocol.resumed == 1
    assert link.transport.get_write_buffer_size() == 0


async def test_lines_are_written_in_order_behind_what_waits(link: Link) -> None:
    rng = random.Random(3)
    sent = bytearray()
    for _ in range(400):
        parts = [rng.randbytes(rng.choice([0, 1, 300, 16_384, 16_385, 40_000])) for _ in range(2)]
        if rng.random() < 0.5:
            link.transport.writelines(parts)
        else:
            for part in parts:
                link.transport.write(bytearray(part))
        sent += b"".join(parts)
    assert await link.read(len(sent)) == bytes(sent)


async def test_nothing_is_read_while_reading_is_paused(link: Link) -> None:
    link.transport.pause_reading()
    link.peer.send(b"early")
    for _ in range(20):
        await asyncio.sleep(0)
    assert not link.protocol.data
    assert not link.transport.is_reading()
    link.transport.resume_reading()
    await link.until(lambda: link.protocol.data == b"early")


async def test_what_openssl_holds_is_read_without_more_from_the_socket(link: Link) -> None:
    """As after a forwarding, which has OpenSSL read ahead."""
    link.transport.pause_reading()
    link.peer.send(b"first")
    tls: ssl.SSLSocket = link.transport.get_extra_info("ssl_object")

    def begun() -> bool:
        try:
            return tls.read(2) == b"fi"
        except ssl.SSLWantReadError:
            return False

    await link.until(begun)
    assert tls.pending() == 3
    assert link.transport.end() is tls
    link.transport.resume_reading()
    assert link.transport.end() is None  # it must be read first
    await link.until(lambda: link.protocol.data == b"rst")
    assert link.transport.end() is tls


async def test_new_keys_change_no_byte(tmp_path: Path) -> None:
    ours, theirs = connected()
    link = Link(ours, theirs, tmp_path, ssl.TLSVersion.TLSv1_3)
    await link.begin()
    for number in range(20):
        link.peer.update_keys(both=number % 2 == 0)
        link.peer.send(b"%d," % number)
        link.transport.write(b"%d," % number)
    expected = b"".join(b"%d," % number for number in range(20))
    await link.until(lambda: link.protocol.data == expected)
    assert await link.read(len(expected)) == expected
    link.transport.abort()
    await link.protocol.lost
    theirs.close()


async def test_the_fast_path_takes_connections_of_which_nothing_waits(link: Link) -> None:
    fast_path = open_fast_path(asyncio.get_running_loop(), 0)
    if fast_path is None or fast_path.without_tls:
        pytest.skip("there is no helper in C for TLS here")
    assert type(fast_path.end_of(link.transport)).__name__ == "_SSLSocket"
    link.transport.write(bytes(20 * MIB))
    assert fast_path.end_of(link.transport) is None
    await link.read(20 * MIB)
    await link.until(lambda: fast_path.end_of(link.transport) is not None)
    link.transport.close()
    assert fast_path.end_of(link.transport) is None
    fast_path.close()


# --- while it is lent


@pytest.mark.parametrize("act", ["write", "close", "abort"])
async def test_a_transport_has_its_connection_back_before_it_acts(link: Link, act: str) -> None:
    seen: list[bool] = []

    def take_back() -> None:
        seen.append(link.transport.is_closing())
        link.transport.returned()

    link.transport.lend(take_back)
    if act == "write":
        link.transport.write(b"now")
        assert await link.read(3) == b"now"
    else:
        getattr(link.transport, act)()
    assert seen == [False]


@pytest.mark.parametrize("paused", [False, True])
async def test_nothing_is_read_while_the_connection_is_lent(link: Link, paused: bool) -> None:
    link.transport.lend(lambda: None)
    link.transport.pause_reading()
    if not paused:
        link.transport.resume_reading()
    link.peer.send(b"later")
    for _ in range(20):
        await asyncio.sleep(0)
    assert not link.protocol.data
    link.transport.returned()
    if paused:
        for _ in range(20):
            await asyncio.sleep(0)
        assert not link.protocol.data
        link.transport.resume_reading()
    await link.until(lambda: link.protocol.data == b"later")


# --- the end


async def test_closing_sends_all_then_close_notify_and_waits_for_the_peers(link: Link) -> None:
    data = random.Random(4).randbytes(8 * MIB)
    link.transport.write(data)
    link.transport.close()
    link.transport.write(b"too late")
    assert link.transport.is_closing()
    got = bytearray()

    def over() -> bool:
        link.peer.pull()
        try:
            while more := link.peer.tls.read(MIB):
                got.extend(more)
        except ssl.SSLWantReadError:
            return False
        return True  # b"": close_notify

    await link.until(over)
    assert bytes(got) == data
    for _ in range(10):
        await asyncio.sleep(0)
    assert not link.protocol.lost.done()
    link.peer.end()
    link.peer.push()
    await link.until(link.protocol.lost.done)
    assert link.protocol.lost.result() is None


async def test_data_that_comes_while_it_closes_is_dropped(link: Link) -> None:
    for _ in range(40):
        link.peer.seal(bytes(16_384))
    link.peer.push()
    link.transport.close()
    await link.until(link.peer.push)
    link.peer.end()
    link.peer.push()
    await link.until(link.protocol.lost.done)
    assert link.protocol.lost.result() is None
    assert not link.protocol.data


async def test_close_notify_ends_both_directions(link: Link) -> None:
    link.peer.seal(b"last words")
    link.peer.end()
    link.peer.push()
    await link.until(link.protocol.lost.done)
    assert (bytes(link.protocol.data), link.protocol.ended) == (b"last words", True)
    assert link.protocol.lost.result() is None


@pytest.mark.parametrize("paused", [False, True], ids=["read", "paused"])
async def test_an_end_without_close_notify_is_no_end_of_file(link: Link, paused: bool) -> None:
    if paused:
        link.transport.pause_reading()
    link.peer.send(b"half a resp")
    link.peer.socket.close()
    for _ in range(20):
        await asyncio.sleep(0)
    link.transport.resume_reading()
    await link.until(link.protocol.lost.done)
    assert (bytes(link.protocol.data), link.protocol.ended) == (b"half a resp", False)
    assert link.protocol.lost.result() is None


async def test_a_reset_is_an_error(link: Link) -> None:
    link.peer.reset()
    await link.until(link.protocol.lost.done)
    assert isinstance(link.protocol.lost.result(), ConnectionResetError)


async def test_a_record_that_was_changed_is_an_error(link: Link) -> None:
    link.peer.socket.send(b"\x17\x03\x03\x00\x20" + bytes(32))
    await link.until(link.protocol.lost.done)
    assert isinstance(link.protocol.lost.result(), ssl.SSLError)
    assert not link.protocol.data


async def test_the_descriptor_is_open_until_the_protocol_knows(link: Link) -> None:
    tls = link.transport.get_extra_info("socket")
    link.transport.abort()
    assert tls.fileno() >= 0
    await link.protocol.lost
    assert tls.fileno() == -1
    assert link.transport.get_extra_info("peername", "gone") == "gone"


# --- handshakes


async def failed(context: ssl.SSLContext, server: ssl.SSLContext | None, name: str = "127.0.0.1") -> OSError:
    """Return the error of a handshake with a server; None: it closes the connection at once."""
    loop = asyncio.get_running_loop()
    ours, theirs = connected()
    transport = TlsTransport(loop, ours, context, server_hostname=name)
    shaking = asyncio.create_task(transport.handshake(5.0))
    if server is None:
        theirs.close()
    else:
        peer = Peer(theirs, server, server_side=True)
        while not shaking.done():
            peer.pull()
            with contextlib.suppress(ssl.SSLError):
                peer.tls.do_handshake()
            peer.push()
            await asyncio.sleep(0)
    error = (await asyncio.gather(shaking, return_exceptions=True))[0]
    theirs.close()
    assert isinstance(error, OSError)
    assert transport.get_extra_info("socket").fileno() == -1
    return error


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_wrong_certificate_is_named(tmp_path: Path, version: ssl.TLSVersion) -> None:
    (tmp_path / "other").mkdir()
    server, client = contexts(tmp_path, version)
    stranger, _ = contexts(tmp_path / "other", version)
    assert described(await failed(client, stranger)) == "wrong certificate (self-signed certificate)"
    error = described(await failed(client, server, name="another.example"))
    assert error == ("wrong certificate (Hostname mismatch, certificate is not valid for 'another.example'.)")


async def test_a_peer_that_leaves_in_the_handshake_is_a_reset(tmp_path: Path) -> None:
    _, client = contexts(tmp_path, ssl.TLSVersion.TLSv1_3)
    assert described(await failed(client, None)).startswith("ConnectionResetError")


async def test_a_handshake_has_its_time(tmp_path: Path) -> None:
    _, client = contexts(tmp_path, ssl.TLSVersion.TLSv1_3)
    ours, theirs = connected()
    transport = TlsTransport(asyncio.get_running_loop(), ours, client, server_hostname="127.0.0.1")
    with pytest.raises(ConnectionAbortedError, match=r"longer than 0\.01 s"):
        await transport.handshake(0.01)
    theirs.setblocking(True)
    while theirs.recv(4096):  # the beginning of a handshake, and the end of the connection
        pass
    theirs.close()


async def test_a_handshake_that_is_cancelled_closes_the_socket(tmp_path: Path) -> None:
    _, client = contexts(tmp_path, ssl.TLSVersion.TLSv1_3)
    ours, theirs = connected()
    transport = TlsTransport(asyncio.get_running_loop(), ours, client, server_hostname="127.0.0.1")
    shaking = asyncio.create_task(transport.handshake(5.0))
    await asyncio.sleep(0)
    shaking.cancel()
    await asyncio.wait({shaking})
    assert shaking.cancelled()
    assert transport.get_extra_info("socket").fileno() == -1
    theirs.close()


# --- against asyncio


@pytest.mark.parametrize("version", VERSIONS, ids=["TLS 1.2", "TLS 1.3"])
async def test_both_sides_speak_with_asyncio_and_show_certificates(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """Ours echoes to a client of asyncio's, which shows a certificate; what is agreed on can be asked for."""
    server, client = contexts(tmp_path, version)
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"
    server.load_verify_locations(certfile)
    server.verify_mode = ssl.CERT_REQUIRED
    server.set_alpn_protocols(["http/1.1"])
    client.load_cert_chain(certfile, keyfile)
    client.load_verify_locations(certfile)
    client.set_alpn_protocols(["http/1.1"])
    loop = asyncio.get_running_loop()
    made: list[TlsTransport] = []

    class Echo(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            made[0].write(data)

        def pause_writing(self) -> None:
            made[0].pause_reading()

        def resume_writing(self) -> None:
            made[0].resume_reading()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        opening = asyncio.create_task(asyncio.open_connection(*listener.getsockname(), ssl=client))
        arrived, _ = await loop.sock_accept(listener)
        made.append(TlsTransport(loop, arrived, server, server_side=True))
        await made[0].handshake(5.0)
        made[0].begin(Echo())
        reader, writer = await opening
    data = random.Random(5).randbytes(6 * MIB)

    async def send() -> None:
        for at in range(0, len(data), 50_000):
            writer.write(data[at : at + 50_000])
            await writer.drain()

    async with asyncio.timeout(20):
        got, _ = await asyncio.gather(reader.readexactly(len(data)), send())
    assert got == data
    of: Callable[[str], Any] = made[0].get_extra_info
    assert dict(of("peercert")["subject"][0]) == {"commonName": "localhost"}
    assert of("ssl_object").selected_alpn_protocol() == "http/1.1"
    assert of("sslcontext") is server
    assert of("cipher")[1] == {"TLSv1_2": "TLSv1.2", "TLSv1_3": "TLSv1.3"}[version.name]
    assert of("peername") == writer.get_extra_info("sockname")
    assert of("sockname") == writer.get_extra_info("peername")
    writer.close()
    async with asyncio.timeout(5):
        while not made[0].is_closing():  # noqa: ASYNC110 (nothing announces it)
            await asyncio.sleep(0)
