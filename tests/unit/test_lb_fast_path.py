"""The helper in C over socket pairs: what passes, what stops a forwarding, and that nothing is lost in between."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from lb.proxy.fast_path import ForwardingMode, StopReason
from tests.kit.forwardings import EVENT, LIMIT, chunk

native = pytest.importorskip(
    "lb.proxy._fast_path", reason="the helper is not built: no C compiler at installation"
)


class Wires:
    """Engine -> (fast path) -> client."""

    def __init__(self) -> None:
        self.engine, self.source = socket.socketpair()
        self.sink, self.client = socket.socketpair()
        for one in (self.engine, self.source, self.sink, self.client):
            one.setblocking(False)
        self.fast_path: Any = native.FastPath()

    def forwarding(self, limit: int = LIMIT, mode: ForwardingMode = ForwardingMode.EVENTS) -> Any:
        return self.fast_path.forwarding(self.source.fileno(), self.sink.fileno(), limit, self, mode)

    def got(self) -> bytes:
        try:
            return self.client.recv(1 << 20)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        for one in (self.engine, self.source, self.sink, self.client):
            one.close()


@pytest.fixture
def wires() -> Iterator[Wires]:
    one = Wires()
    yield one
    one.close()


@pytest.mark.parametrize(
    ("data", "heard", "chunks", "events"),
    [
        pytest.param(EVENT, True, 1, 1, id="an event"),
        pytest.param(EVENT * 3, True, 3, 3, id="three in one read"),
        pytest.param(chunk(b": still here\n\n"), False, 1, 0, id="a comment is no sign of life"),
        pytest.param(chunk(b": hm\n\n" + b"data: x\n\n"), True, 1, 0, id="two events in one chunk"),
        pytest.param(b"00000A\r\ndata: xy\n\n\r\n", True, 1, 0, id="leading zeros and upper case"),
    ],
)
@pytest.mark.parametrize(
    "mode", [ForwardingMode.EVENTS, ForwardingMode.WITHOUT_IDS, ForwardingMode.WITHOUT_USAGE]
)
def test_regular_chunks_pass(
    wires: Wires, mode: ForwardingMode, data: bytes, heard: bool, chunks: int, events: int
) -> None:
    forwarding = wires.forwarding(mode=mode)
    wires.engine.send(data)
    assert wires.fast_path.run() == []
    assert wires.got() == data
    assert (forwarding.pulse(), forwarding.pulse()) == (heard, False)
    assert forwarding.counts() == (chunks, len(data), events, 0)
    assert forwarding.counts() == (0, 0, 0, 0)
    assert (forwarding.take(), forwarding.take()) == (data, b"")
    forwarding.stop()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"0\r\n\r\n", id="the last chunk"),
        pytest.param(EVENT + b"0\r\n\r\n", id="an event and the last chunk"),
        pytest.param(chunk(b"data: [DONE]\n\n"), id="the end mark"),
        pytest.param(chunk(b"data: half an ev"), id="half an event"),
        pytest.param(EVENT[:-1], id="half a chunk"),
        pytest.param(EVENT[:1], id="half a size"),
        pytest.param(EVENT + b"5", id="an event and half a size"),
        pytest.param(chunk(b'data: {"error":{"message":"x"}}\n\n'), id="an error"),
        pytest.param(
            chunk(b'data: {"choices":[{"finish_reason":"abort"}]}\n\n'), id="an engine that gives up"
        ),
        pytest.param(chunk(b'event: error\ndata: {"type":"error"}\n\n'), id="a typed error"),
        pytest.param(
            chunk(b'event: response.failed\ndata: {"type":"response.failed"}\n\n'), id="a failed response"
        ),
        pytest.param(b"8;x=y\r\ndata: \n\n\r\n", id="an extension"),
        pytest.param(b"+8\r\ndata: \n\n\r\n", id="a sign"),
        pytest.param(b" 8\r\ndata: \n\n\r\n", id="a blank"),
        pytest.param(b"8\ndata: \n\n\r\n", id="a bare line feed"),
        pytest.param(b"8\r\ndata: \n\nXX", id="a longer chunk"),
        pytest.param(b"ffffffffffffffff8\r\ndata: \n\n\r\n", id="a size that overflows"),
        pytest.param(b"\r\n", id="no size"),
    ],
)
def test_anything_else_comes_back_unsent_and_stops_the_forwarding(wires: Wires, data: bytes) -> None:
    forwarding = wires.forwarding()
    wires.engine.send(data)
    assert wires.fast_path.run() == [(wires, StopReason.IRREGULAR, data)]
    assert wires.got() == b""
    assert forwarding.take() == b""
    wires.engine.send(EVENT)
    assert wires.fast_path.run() == []  # stopped: what comes now is the event loop's
    assert wires.source.recv(1000) == EVENT


def test_the_end_of_a_connection_is_reported(wires: Wires) -> None:
    wires.forwarding()
    wires.engine.close()
    assert wires.fast_path.run() == [(wires, StopReason.ENDED, b"")]


def test_what_a_slow_client_does_not_take_comes_back_and_is_kept_once(wires: Wires) -> None:
    wires.sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    forwarding = wires.forwarding()
    sent, unsent = b"", b""
    for _ in range(2000):
        wires.engine.send(EVENT)
        sent += EVENT
        stopped = wires.fast_path.run()
        if stopped:
            ((owner, reason, unsent),) = stopped
            assert (owner, reason) == (wires, StopReason.UNSENT)
            break
    assert unsent
    received = b""
    while part := wires.got():
        received += part
    assert received + unsent == sent == forwarding.take()


def test_a_forwarding_that_keeps_enough_comes_back(wires: Wires) -> None:
    forwarding = wires.forwarding(limit=len(EVENT))
    wires.engine.send(EVENT)
    assert wires.fast_path.run() == []
    wires.engine.send(EVENT)
    assert wires.fast_path.run() == [(wires, StopReason.FULL, b"")]
    assert wires.got() == forwarding.take() == EVENT * 2


def test_a_forwarding_can_be_stopped_twice_and_opened_again(wires: Wires) -> None:
    first = wires.forwarding()
    first.stop()
    first.stop()
    second = wires.forwarding()
    wires.engine.send(EVENT)
    assert wires.fast_path.run() == []
    assert (first.take(), second.take()) == (b"", EVENT)
    second.stop()


def test_many_forwardings_at_once(wires: Wires) -> None:
    others = [Wires() for _ in range(300)]
    forwardings = [
        wires.fast_path.forwarding(one.source.fileno(), one.sink.fileno(), LIMIT, one, ForwardingMode.EVENTS)
        for one in others
    ]
    try:
        for one in others:
            one.engine.send(EVENT)
        for _ in range(10):
            assert wires.fast_path.run() == []
        assert all(one.got() == EVENT for one in others)
    finally:
        for forwarding in forwardings:
            forwarding.stop()
        for one in others:
            one.close()


def test_reads_of_a_batch_share_the_buffers_and_stay_apart() -> None:
    """More than the buffers hold at once: whole reads, one that is changed, one that comes back, one that ends."""
    fast_path: Any = native.FastPath()
    ids = b'data: {"choices":[{"delta":{"content":"b"},"token_ids":[7],"finish_reason":null}]}\n\n'
    sent: dict[int, bytes] = {}
    pairs = []
    for number in range(24):
        engine, source = socket.socketpair()
        sink, client = socket.socketpair()
        for one in (engine, sink):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        for one in (engine, source, sink, client):
            one.setblocking(False)
        text = b"%d" % number * 40_000
        data = chunk(b'data: {"choices":[{"delta":{"content":"' + text + b'"},"finish_reason":null}]}\n\n')
        if number % 6 == 1:
            data = chunk(ids)
        elif number % 6 == 2:
            data = chunk(b"data: half " + text)
        mode = ForwardingMode.WITHOUT_IDS
        forwarding = fast_path.forwarding(source.fileno(), sink.fileno(), LIMIT, number, mode)
        assert engine.send(data) == len(data)
        if number % 6 == 3:
            engine.close()  # the end is another read
        sent[number] = data
        pairs.append((engine, source, sink, client, forwarding))
    stopped: list[tuple[int, int, bytes]] = []
    for _ in range(4):
        stopped += fast_path.run()
    expected = {(number, StopReason.IRREGULAR, sent[number]) for number in range(24) if number % 6 == 2}
    expected |= {(number, StopReason.ENDED, b"") for number in range(24) if number % 6 == 3}
    assert {(number, StopReason(reason), data) for number, reason, data in stopped} == expected
    for number, (*sockets, forwarding) in enumerate(pairs):
        got = b""
        while number % 6 != 2 and (more := _read(sockets[3])):
            got += more
        want = {1: chunk(ids.replace(b',"token_ids":[7]', b"")), 2: b""}.get(number % 6, sent[number])
        assert got == want
        assert forwarding.take() == (b"" if number % 6 == 2 else sent[number])
        forwarding.stop()
        for one in sockets:
            one.close()


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 20)
    except BlockingIOError:
        return b""


def test_a_read_that_fills_its_room_is_not_the_last(wires: Wires) -> None:
    """The helper is woken by edges, and none comes for what was there before."""
    for one in (wires.engine, wires.sink):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    room = 256 * 1024  # of one read
    filling = b'data: {"choices":[{"delta":{"content":"' + b"a" * (room - 200)
    filling = chunk(filling + b"b" * (room - len(chunk(filling + b'"}}]}\n\n'))) + b'"}}]}\n\n')
    assert len(filling) == room
    forwarding = wires.forwarding()
    wires.engine.send(filling + EVENT)
    received = b""
    while len(received) < room + len(EVENT):
        assert select.select([wires.fast_path.fileno()], [], [], 10)[0]
        assert wires.fast_path.run() == []
        received += wires.got()
    assert received == filling + EVENT == forwarding.take()


def test_the_end_that_comes_with_the_last_chunk_is_not_overlooked(wires: Wires) -> None:
    wires.forwarding()
    wires.engine.send(EVENT)
    wires.engine.shutdown(socket.SHUT_WR)
    stopped: list[tuple[object, int, bytes]] = []
    while not stopped:
        assert select.select([wires.fast_path.fileno()], [], [], 10)[0]
        stopped += wires.fast_path.run()
    assert [(reason, data) for _, reason, data in stopped] == [(StopReason.ENDED, b"")]
    assert wires.got() == EVENT


def test_a_closed_socket_is_refused(wires: Wires) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        wires.fast_path.forwarding(1_000_000, wires.sink.fileno(), LIMIT, wires, ForwardingMode.EVENTS)


def test_chunks_that_come_close_together_are_moved_by_the_clock_and_none_is_left_behind(wires: Wires) -> None:
    forwarding = wires.forwarding()
    received = b""
    for count in range(1, 51):
        wires.engine.send(EVENT)
        while len(received) < count * len(EVENT):  # a timer may wake the loop before there is something
            assert select.select([wires.fast_path.fileno()], [], [], 10)[0]
            assert wires.fast_path.run() == []
            received += wires.got()
    assert received == EVENT * 50 == forwarding.take()


def test_nothing_wakes_the_loop_when_the_streams_are_silent(wires: Wires) -> None:
    wires.forwarding()
    for _ in range(50):
        wires.engine.send(EVENT)
        assert wires.fast_path.run() == []
    for _ in range(100):
        if not select.select([wires.fast_path.fileno()], [], [], 0.01)[0]:
            break
        assert wires.fast_path.run() == []
    else:
        pytest.fail("the loop is woken again and again")
    assert wires.got() == EVENT * 50
