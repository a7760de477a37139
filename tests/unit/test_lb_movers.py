"""Threads that move chunks while Python opens, reads and stops forwardings: nothing is lost, sent twice or out of order."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lb.proxy.fast_path import ForwardingMode, StopReason
from tests.kit.forwardings import EVENT, LIMIT, chunk

native = pytest.importorskip(
    "lb.proxy._fast_path", reason="the helper is not built: no C compiler at installation"
)


class Stream:
    """Engine -> a forwarding of some mover, or this test -> client. Does what a relay does."""

    def __init__(self, movers: Any, rng: random.Random, events: int) -> None:
        self.movers, self.rng = movers, rng
        self.engine, self.source = socket.socketpair()
        self.sink, self.client = socket.socketpair()
        for one in (self.engine, self.source, self.sink, self.client):
            one.setblocking(False)
        self.sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, rng.choice([2048, 1 << 20]))
        self.unsent = b"".join(self._event(number) for number in range(events))
        self.said = self.unsent
        self.kept = self.got = b""
        self.stops: set[StopReason] = set()
        self.open()

    def _event(self, number: int) -> bytes:
        text = b'data: {"choices":[{"delta":{"content":"%d %s"}}]}\n\n' % (
            number,
            b"x" * self.rng.randrange(400),
        )
        return chunk(text)

    def open(self) -> None:
        limit = self.rng.choice([500, 4000, LIMIT])
        self.forwarding = self.movers.forwarding(
            self.source.fileno(), self.sink.fileno(), limit, self, ForwardingMode.EVENTS
        )

    def say(self) -> None:
        """Send some whole chunks, sometimes less."""
        end = 0
        for _ in range(self.rng.randint(1, 3)):
            end = self.unsent.find(b"\n\n\r\n", end) + 4 if self.unsent else 0
        if (
            self.rng.random() < 0.2
        ):  # often enough that a busy machine, whose threads come late, meets one, too
            end = self.rng.randint(1, 50)
        with contextlib.suppress(BlockingIOError):
            self.unsent = self.unsent[self.engine.send(self.unsent[:end]) :]

    def hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.got += self.client.recv(self.rng.choice([100, 1 << 16]))

    def stopped(self, reason: int, data: bytes) -> None:
        """Of what has come back: what is read has no end within a chunk that the next forwarding could begin with."""
        self.kept += self.forwarding.take()
        self.stops.add(StopReason(reason))
        if reason == StopReason.IRREGULAR:
            self.kept += data
            while not _is_whole(self.kept):
                self.say()
                if select.select([self.source], [], [], 0)[0]:
                    more = self.source.recv(1 << 16)
                    data, self.kept = data + more, self.kept + more
        while data:
            try:
                data = data[self.sink.send(data) :]
            except BlockingIOError:
                self.hear()
        self.open()

    def interfere(self) -> None:
        """Do as a relay that is asked how far it is, or that has to speak for itself."""
        if self.rng.random() < 0.5:
            self.kept += self.forwarding.take()
            self.forwarding.pulse()
            self.forwarding.counts()
            return
        pending = self.forwarding.stop()
        if pending is None:
            self.kept += self.forwarding.take()
            self.open()
        else:
            self.stopped(*pending)

    def close(self) -> None:
        self.forwarding.stop()
        for one in (self.engine, self.source, self.sink, self.client):
            one.close()


def _is_whole(said: bytes) -> bool:
    at = 0
    while at < len(said):
        end = said.find(b"\r\n", at)
        if end < 0:
            return False
        at = end + 2 + int(said[at:end], 16) + 2
    return at == len(said)


@pytest.fixture
def movers() -> Iterator[Any]:
    made = native.FastPath(3)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(4))
def test_every_byte_arrives_once_and_in_order(movers: Any, seed: int) -> None:
    rng = random.Random(seed)
    streams = [Stream(movers, rng, events=120) for _ in range(24)]
    deadline = time.monotonic() + 60
    while any(one.got != one.said for one in streams):
        assert time.monotonic() < deadline, [(len(one.got), len(one.said)) for one in streams]
        for one in rng.sample(streams, 8):
            one.say()
            if rng.random() < 0.2 or not one.unsent:
                one.hear()
        if rng.random() < 0.2:
            rng.choice(streams).interfere()
        for stream, reason, data in movers.run():
            stream.stopped(reason, data)
    for one in streams:
        one.kept += one.forwarding.take()
        assert one.kept == one.said
        one.close()
    assert set().union(*(one.stops for one in streams)) == {
        StopReason.IRREGULAR,
        StopReason.UNSENT,
        StopReason.FULL,
    }


def test_what_stopped_by_itself_is_told_to_whom_stops_it_and_to_no_other(movers: Any) -> None:
    stream = Stream(movers, random.Random(0), events=0)
    stream.engine.send(chunk(b"data: [DONE]\n\n"))
    assert select.select([movers.fileno()], [], [], 10)[0]
    assert stream.forwarding.stop() == (StopReason.IRREGULAR, chunk(b"data: [DONE]\n\n"))
    assert stream.forwarding.stop() is None
    assert movers.run() == []
    stream.close()


def test_chunks_move_without_python(movers: Any) -> None:
    streams = [Stream(movers, random.Random(number), events=0) for number in range(9)]
    for one in streams:
        assert one.engine.send(EVENT) == len(EVENT)
        assert select.select([one.client], [], [], 10)[0]
        assert one.client.recv(1 << 16) == EVENT
        one.close()


@pytest.mark.parametrize("threads", [-1, 65])
def test_no_such_number_of_threads(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        native.FastPath(threads)


def test_threads_end_with_the_fast_path_also_under_load() -> None:
    movers = native.FastPath(2)
    stream = Stream(movers, random.Random(1), events=2000)
    for _ in range(200):
        stream.say()
        stream.hear()
    movers.close()
    movers.close()
    stream.close()


def test_threads_end_with_an_object_that_nobody_closes() -> None:
    before = len(list(Path("/proc/self/task").iterdir()))
    native.FastPath(4)
    assert len(list(Path("/proc/self/task").iterdir())) == before
