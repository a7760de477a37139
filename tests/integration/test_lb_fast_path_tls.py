"""The helper in C with TLS on either side: what passes, what ends a forwarding, and that no byte is lost, doubled or moved."""

from __future__ import annotations

import random
import select
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from lb.http.body_framing import ChunkedDecoder
from lb.http.tls_transport import RECORD_BYTES
from lb.proxy import fast_path as module
from lb.proxy.fast_path import ForwardingMode, StopReason
from tests.integration.tls_peer import VERSIONS, Peer, contexts
from tests.kit.forwardings import EVENT, LIMIT, chunk

native = pytest.importorskip(
    "lb.proxy._fast_path", reason="the helper is not built: no C compiler at installation"
)


class Loop:
    """As much of an event loop as the fast path needs to be opened."""

    def add_reader(self, descriptor: int, callback: object) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def _with_tls() -> None:
    opened = module.open_fast_path(cast(Any, Loop()), 0)
    assert opened is not None
    if opened.without_tls:
        pytest.skip(opened.without_tls)


def connected(buffer_bytes: int) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for one in (ours, theirs):
        one.setblocking(False)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if buffer_bytes:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    return ours, theirs


class Wires:
    """Engine -> (fast path) -> client, with TLS on both sides."""

    def __init__(
        self, folder: Path, version: ssl.TLSVersion, buffer_bytes: int = 0, threads: int = 0
    ) -> None:
        server, client = contexts(folder, version)
        client.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF  # as the transport has it
        source, engine = connected(buffer_bytes)
        sink, reader = connected(buffer_bytes)
        self.engine = Peer(engine, server, server_side=True)
        self.client = Peer(reader, client, server_side=False)
        self.source = client.wrap_socket(
            source, server_hostname="127.0.0.1", do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
        self.sink = server.wrap_socket(sink, server_side=True, do_handshake_on_connect=False)
        self.engine.shake_hands(self.source)
        self.client.shake_hands(self.sink)
        with pytest.raises(ssl.SSLWantReadError):
            self.source.read()  # takes the tickets of a session
        self.client.got()
        self.fast_path = native.FastPath(threads)

    def forwarding(self, limit: int = LIMIT, mode: ForwardingMode = ForwardingMode.EVENTS) -> Any:
        source, sink = (module._connection_of(one) for one in (self.source, self.sink))
        return self.fast_path.forwarding(source, sink, limit, self, mode)

    def run(self) -> list[tuple[Any, int, bytes]]:
        assert select.select([self.fast_path.fileno()], [], [], 10)[0]
        stopped: list[tuple[Any, int, bytes]] = self.fast_path.run()
        return stopped

    def close(self) -> None:
        for one in (self.engine.socket, self.client.socket, self.source, self.sink):
            one.close()


@pytest.fixture(params=VERSIONS, ids=["TLS 1.2", "TLS 1.3"])
def wires(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wires]:
    one = Wires(tmp_path, request.param)
    yield one
    one.close()


def received(wires: Wires, size: int) -> bytes:
    data = b""
    while len(data) < size:
        assert select.select([wires.client.socket], [], [], 10)[0]
        data += wires.client.got()
    return data


def test_chunks_pass_and_are_counted(wires: Wires) -> None:
    forwarding = wires.forwarding()
    for _ in range(3):
        wires.engine.send(EVENT)
        assert wires.run() == []
        assert received(wires, len(EVENT)) == EVENT
    assert forwarding.counts() == (3, 3 * len(EVENT), 3, 0)
    assert forwarding.take() == 3 * EVENT
    forwarding.stop()


def test_one_side_may_be_plain(wires: Wires) -> None:
    engine, source = socket.socketpair()
    sink, client = socket.socketpair()
    with engine, source, sink, client:
        connections = [module._connection_of(one) for one in (wires.source, wires.sink)]
        to_tls = wires.fast_path.forwarding(source.fileno(), connections[1], LIMIT, 1, ForwardingMode.EVENTS)
        from_tls = wires.fast_path.forwarding(connections[0], sink.fileno(), LIMIT, 2, ForwardingMode.EVENTS)
        engine.sendall(EVENT)
        wires.engine.send(2 * EVENT)
        while True:
            assert wires.run() == []
            if from_tls.counts()[0] and to_tls.take():
                break
        assert client.recv(LIMIT) == 2 * EVENT
        assert received(wires, len(EVENT)) == EVENT
        to_tls.stop()
        from_tls.stop()


def test_an_irregular_event_comes_back_as_it_was_read(wires: Wires) -> None:
    wires.forwarding()
    last = chunk(b"data: [DONE]\n\n")
    wires.engine.send(last)
    assert wires.run() == [(wires, StopReason.IRREGULAR, last)]
    wires.engine.send(EVENT)
    assert select.select([wires.source], [], [], 10)[0]
    assert wires.source.read(LIMIT) == EVENT  # from here on Python reads again


def test_close_notify_behind_a_chunk_ends_the_forwarding_after_the_chunk(wires: Wires) -> None:
    forwarding = wires.forwarding()
    wires.engine.seal(EVENT)
    wires.engine.end()
    assert wires.engine.push()
    assert wires.run() == [(wires, StopReason.ENDED, b"")]
    assert forwarding.take() == EVENT
    assert received(wires, len(EVENT)) == EVENT
    assert wires.source.read(LIMIT) == b""  # although no more comes at the socket


@pytest.mark.parametrize("how", ["closed", "reset", "garbage"])
def test_an_end_without_close_notify_is_left_to_python(wires: Wires, how: str) -> None:
    wires.forwarding()
    if how == "closed":
        wires.engine.socket.close()
    elif how == "reset":
        wires.engine.reset()
    else:
        wires.engine.socket.send(b"\x17\x03\x03\x00\x20" + bytes(32))  # a record with another key
    ((owner, reason, data),) = wires.run()
    assert (owner, reason, data) == (wires, StopReason.ENDED, b"")
    with pytest.raises(OSError):
        wires.source.read(LIMIT)


def test_a_record_in_pieces_passes_when_it_is_whole(wires: Wires) -> None:
    forwarding = wires.forwarding()
    wires.engine.seal(EVENT)
    while not wires.engine.push(7):
        wires.run()
    while not forwarding.counts()[0]:
        assert wires.run() == []
    assert received(wires, len(EVENT)) == EVENT
    wires.engine.seal(EVENT)
    wires.engine.push(20)
    wires.run()
    forwarding.stop()  # within a record, which Python completes
    assert wires.engine.push()
    assert wires.source.read(LIMIT) == EVENT


def test_many_records_at_once_leave_none_in_openssl(wires: Wires) -> None:
    """All of it passes, though it is more than is read at a time and no further byte comes."""
    wires.forwarding(mode=ForwardingMode.CHUNKS)
    data = b"".join(chunk(bytes([65 + number]) * 1_000) for number in range(26)) * 30
    wires.engine.seal(data)
    got = b""
    while len(got) < len(data):
        wires.engine.push()
        if select.select([wires.fast_path.fileno()], [], [], 0.01)[0]:
            for _, reason, rest in wires.fast_path.run():
                # Where a record ends within a chunk: the rest is Python's, and the next forwarding begins behind the chunk.
                assert reason in (StopReason.IRREGULAR, StopReason.UNSENT)
                mine: list[bytes] = []
                passed_on(wires, rest, read=reason == StopReason.IRREGULAR, got=mine)
                got += b"".join(mine)
                wires.forwarding(mode=ForwardingMode.CHUNKS)
        got += wires.client.got()
    assert got == data


def passed_on(wires: Wires, data: bytes, *, read: bool, got: list[bytes]) -> None:
    """Do what the transports and the relay do: send the rest by whole records, and read on until the end of a chunk."""
    decoder = ChunkedDecoder()
    while True:
        if read:
            decoder.feed(data)
        while data:
            try:
                sent = wires.sink.write(data[:RECORD_BYTES])
                data = data[sent:]
            except ssl.SSLWantWriteError:
                got.append(wires.client.got())
        if not read or decoder.between:
            return
        try:
            data = wires.source.read(LIMIT)
        except ssl.SSLWantReadError:
            wires.engine.push()
            got.append(wires.client.got())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("version", VERSIONS, ids=["TLS 1.2", "TLS 1.3"])
@pytest.mark.parametrize("threads", [0, 2])
def test_any_sizes_cuts_and_readers_change_no_byte(
    tmp_path: Path, version: ssl.TLSVersion, seed: int, threads: int
) -> None:
    rng = random.Random(seed)
    wires = Wires(tmp_path, version, buffer_bytes=rng.choice([30_000, 60_000, 0]), threads=threads)
    sizes = [rng.choice([1, 50, 200, 200, 1000, 5000, 20000, 60000]) for _ in range(400)]
    chunks = [chunk(rng.randbytes(rng.randint(1, size))) for size in sizes]
    whole = b"".join(chunks)
    got: list[bytes] = []
    wires.forwarding(mode=ForwardingMode.CHUNKS)
    stops: set[StopReason] = set()
    while sum(map(len, got)) < len(whole):
        if chunks and wires.engine.unsent < 100_000 and rng.random() < 0.5:
            if version is ssl.TLSVersion.TLSv1_3 and rng.random() < 0.1:
                wires.engine.update_keys(both=rng.random() < 0.5)
            for _ in range(rng.randint(1, 4)):
                wires.engine.seal(chunks.pop(0) if chunks else b"")
        wires.engine.push(rng.choice([1, 300, 20000, 1 << 20]))
        wires.engine.got()  # replies to a KeyUpdate
        if not chunks:
            wires.engine.push()
        for _, reason, rest in wires.fast_path.run():
            stops.add(StopReason(reason))
            if reason == StopReason.CLIENT:
                with pytest.raises(ssl.SSLWantReadError):
                    wires.sink.read()
            passed_on(wires, rest, read=reason == StopReason.IRREGULAR, got=got)
            wires.forwarding(mode=ForwardingMode.CHUNKS)
        if rng.random() < 0.3 or not chunks:
            got.append(wires.client.got(rng.choice([3000, 1 << 20])))
        if version is ssl.TLSVersion.TLSv1_3 and rng.random() < 0.02:
            wires.client.update_keys(both=False)
            wires.client.push()
    wires.fast_path.close()
    wires.close()
    assert b"".join(got) == whole
    assert stops <= {StopReason.IRREGULAR, StopReason.UNSENT, StopReason.CLIENT}


def test_a_client_that_sends_something_is_left_to_python(wires: Wires) -> None:
    forwarding = wires.forwarding()
    wires.engine.send(EVENT)
    wires.client.send(b"GET")
    stopped = wires.run()
    while not stopped:
        stopped = wires.run()
    assert stopped == [(wires, StopReason.CLIENT, b"")]
    assert forwarding.take() in (b"", EVENT)  # the target's may have come later
    assert wires.sink.read() == b"GET"


def test_python_without_a_known_form_of_connections_is_left_alone() -> None:
    import _ssl

    ours, theirs = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with theirs, context.wrap_socket(ours, do_handshake_on_connect=False) as sample:
        connection = module._connection_of(sample)
        try:
            assert native.learn_tls(_ssl.__file__, 7, sample, sample.fileno()) != ""
            assert native.learn_tls(_ssl.__file__, connection, theirs, sample.fileno()) != ""
            assert native.learn_tls("/no/such/module.so", connection, sample, sample.fileno()) != ""
            assert native.learn_tls(_ssl.__file__, connection, sample, theirs.fileno()) != ""
            with pytest.raises(TypeError):
                native.FastPath().forwarding(connection, connection, LIMIT, 1, ForwardingMode.CHUNKS)
        finally:
            assert native.learn_tls(_ssl.__file__, connection, sample, sample.fileno()) == ""
