"""Cache events over real sockets of ZeroMQ on loopback: published, lost, replayed, refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from lb.cache_events.subscriber import (
    CHECK_EVERY_S,
    EVENTS_PORT,
    REPLAY_PORT,
    REPLAY_TIMEOUT_S,
    TRIES,
    CacheSubscriber,
    endpoints,
)
from lb.config.schema import Target
from policies.routing.block_index import BlockIndex, CacheState
from tests.unit.test_lb_cache_feed import removed, stored

LAST = (2**64 - 1).to_bytes(8, "big")
LOOKS = 3000  # of some milliseconds each, until something has to have come


class Engine:
    """Publishes as vLLM does; `port` is that on which it would serve. `serve` responds to requests for replays."""

    def __init__(self, context: zmq.Context[Any], port: int = 0, replays: bool = True) -> None:
        self.batches: list[bytes] = []
        self._events: zmq.Socket[Any] = context.socket(zmq.PUB)
        self._replay: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        for socket in (self._events, self._replay):
            socket.setsockopt(zmq.LINGER, 0)
        self.port = port or self._bound()
        if port:  # of an engine that has just been closed, whose sockets its threads close in a moment
            rebound(self._events, port + EVENTS_PORT)
            rebound(self._replay, port + REPLAY_PORT)
        if not replays:
            self._replay.close()

    def _bound(self) -> int:
        for _ in range(100):
            port = self._events.bind_to_random_port("tcp://127.0.0.1", 20_000, 60_000)
            try:
                self._replay.bind(f"tcp://127.0.0.1:{port + REPLAY_PORT - EVENTS_PORT}")
            except zmq.ZMQError:
                self._events.unbind(f"tcp://127.0.0.1:{port}")
                continue
            return port - EVENTS_PORT
        raise AssertionError("no two ports are free")

    def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        payload = msgspec.msgpack.encode([float(id(self)), list(events), 0])
        if not lost:
            self._events.send_multipart((b"", len(self.batches).to_bytes(8, "big"), payload))
        self.batches.append(payload)

    def serve(self) -> None:
        while not self._replay.closed and self._replay.poll(0):
            client, _, start = self._replay.recv_multipart()
            for number in range(int.from_bytes(start, "big"), len(self.batches)):
                self._replay.send_multipart(
                    (client, b"", b"", number.to_bytes(8, "big"), self.batches[number])
                )
            self._replay.send_multipart((client, b"", b"", LAST, b""))

    def close(self) -> None:
        self._events.close()
        self._replay.close()


def rebound(socket: zmq.Socket[Any], port: int) -> None:
    for _ in range(LOOKS):
        try:
            socket.bind(f"tcp://127.0.0.1:{port}")
            return
        except zmq.ZMQError:
            socket.poll(2)
    raise AssertionError(f"port {port} is in use")


class Here:
    """A subscriber with a clock of its own, and the engines that it reads."""

    def __init__(self) -> None:
        self.now = 0.0
        self.context: zmq.Context[Any] = zmq.Context()
        self._idle: zmq.Socket[Any] = self.context.socket(zmq.PAIR)
        self.index = BlockIndex()
        self.subscriber = CacheSubscriber(self.index, lambda: self.now)
        self.engines: dict[str, Engine] = {}

    def engine(self, name: str = "a", **more: Any) -> Engine:
        self.engines[name] = Engine(self.context, **more)
        return self.engines[name]

    def subscribe(self) -> None:
        self.subscriber.apply(
            Target(name, f"http://127.0.0.1:{one.port}") for name, one in self.engines.items()
        )

    def cache(self, name: str = "a") -> CacheState:
        cache = self.index.cache(name)
        assert cache is not None
        return cache

    def until(self, done: Callable[[], bool], step_s: float = 0.0) -> None:
        """Tick until it is done; the clock goes on by `step_s` with each tick."""
        for _ in range(LOOKS):
            for engine in self.engines.values():
                engine.serve()
            self.subscriber.tick()
            if done():
                return
            self.now += step_s
            self._idle.poll(2)  # lets the threads of ZeroMQ do their work
        raise AssertionError("it did not come")

    def close(self) -> None:
        self.subscriber.close()
        for engine in self.engines.values():
            engine.close()
        self.context.destroy(linger=0)


@pytest.fixture
def here() -> Iterator[Here]:
    made = Here()
    yield made
    made.close()


def test_what_is_published_before_and_after_is_followed(here: Here) -> None:
    engine = here.engine()
    engine.publish(stored(1, 2))
    here.subscribe()
    here.until(lambda: here.cache().complete)
    assert set(here.cache().blocks) == {1, 2}
    engine.publish(removed(2))
    engine.publish(stored(3, parent=1))
    here.until(
        lambda: set(here.cache().blocks) == {1, 3}, step_s=0.01
    )  # a check, if it was not subscribed yet
    assert here.cache().complete


def test_lost_batches_are_replayed_and_so_is_the_last_one(here: Here) -> None:
    engine = here.engine()
    here.subscribe()
    here.until(lambda: here.cache().complete)
    for at in range(50):
        engine.publish(stored(at), lost=at % 10 == 3 or at == 49)
    here.until(lambda: len(here.cache().blocks) == 50, step_s=0.01)
    (feed,) = here.subscriber.feeds()
    assert (feed.restarts, feed.errors, here.cache().copies) == (0, 0, {})


@pytest.mark.parametrize("published", [0, 1, 7])
def test_a_new_process_on_the_same_port_is_noticed(here: Here, published: int) -> None:
    engine = here.engine()
    here.subscribe()
    here.until(lambda: here.cache().complete)
    for at in range(3):
        engine.publish(stored(at))
    here.until(lambda: len(here.cache().blocks) == 3, step_s=0.01)
    engine.close()
    new = here.engine(port=engine.port)
    for at in range(published):
        new.publish(stored(100 + at))
    wanted = {100 + at for at in range(published)}
    here.until(lambda: here.cache().complete and set(here.cache().blocks) == wanted, step_s=0.01)


def test_an_engine_that_does_not_replay_is_followed_from_now_on(here: Here) -> None:
    engine = here.engine(replays=False)
    engine.publish(stored(1))
    here.subscribe()
    (feed,) = here.subscriber.feeds()
    here.until(lambda: feed.wants_replay_from is None, step_s=0.1)
    assert here.now >= REPLAY_TIMEOUT_S * TRIES
    here.until(lambda: engine.publish(stored(2)) or bool(here.cache().blocks))
    assert (set(here.cache().blocks), here.cache().complete) == ({2}, False)


def test_thousands_of_batches_are_replayed_whatever_the_sockets_drop(here: Here) -> None:
    engine = here.engine()
    for at in range(6000):
        engine.publish(stored(at))
    here.subscribe()
    here.until(lambda: len(here.cache().blocks) == 6000, step_s=0.01)
    assert here.cache().complete


def test_many_targets_share_one_index_and_leave_it(here: Here) -> None:
    for name in "abc":
        here.engine(name).publish(stored(1, 2))
    here.subscribe()
    here.until(lambda: all(here.cache(name).complete for name in "abc"))
    block = here.index.pinned_chain([10, 11, 12, 13, 20, 21, 22, 23])
    assert [(mask.bit_count(), depth) for mask, depth in here.index.levels(block)] == [(3, 2)]
    gone = here.engines.pop("b")
    here.subscribe()
    gone.close()
    assert [(mask.bit_count(), depth) for mask, depth in here.index.levels(block)] == [(2, 2)]
    assert here.index.cache("b") is None


def test_garbage_is_not_followed_and_ends_nothing(here: Here) -> None:
    engine = here.engine()
    here.engine("b").publish(stored(5))
    here.subscribe()
    here.until(lambda: here.cache().complete and here.cache("b").complete)
    for parts in ((b"",), (b"", b"x", b"y"), (b"", bytes(8), b"\xc1"), (b"", bytes(8), b"y" * 3_000_000)):
        engine._events.send_multipart(parts)
    here.until(lambda: here.cache().refused == "unreadable" or not here.cache().complete, step_s=0.01)
    assert set(here.cache("b").blocks) == {5}


@pytest.mark.parametrize(
    ("url", "tls_name", "expected"),
    [
        ("http://10.0.0.1:8000", "", ("tcp://10.0.0.1:9000", "tcp://10.0.0.1:10000")),
        ("http://[::1]:8000", "", ("tcp://[::1]:9000", "tcp://[::1]:10000")),
        ("http://host", "", ("tcp://host:1080", "tcp://host:2080")),
        ("http://10.0.0.1:8000", "replica", "TLS"),
        ("https://10.0.0.1:8000", "", "TLS"),
        ("http://10.0.0.1:63536", "", "63536"),
    ],
)
def test_where_events_are(url: str, tls_name: str, expected: tuple[str, str] | str) -> None:
    found = endpoints(Target("a", url, tls_name=tls_name))
    assert found == expected or (isinstance(found, str) and expected in found)


def test_a_target_with_tls_is_refused_until_it_has_none(here: Here) -> None:
    engine = here.engine()
    url = f"http://127.0.0.1:{engine.port}"
    here.subscriber.apply([Target("a", url, tls_name="name")])
    assert set(here.subscriber.refused()) == {"a"}
    assert here.index.cache("a") is None
    here.subscriber.apply([Target("a", url)])
    assert not here.subscriber.refused()
    here.until(lambda: here.cache().complete)
    assert CHECK_EVERY_S > 0
