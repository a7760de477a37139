"""The data plane without sockets and without time: real connections, exchanges and pools, between wires.

A `Wire` is a transport whose other end is the test. A `Target` reads what it is sent with h11 and responds in bytes of
its own; a `Client` sends bytes and reads the responses with h11. So each end has a peer that shares no code with ours.
The clock is the loop's, and the loop is never idle: where it would wait it sets its clock forward instead.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import h11

from benchmarks.table_audit import audit
from lb.agent.ticker import Ticker
from lb.config.options import Limits
from lb.config.schema import Table, Target
from lb.core.api_keys import ApiKeyStore
from lb.core.targets import TargetTable
from lb.engines.kinds import EngineKind, Fetched
from lb.http.upstream import Pools, TargetConnection
from lb.observe.explain import Explanations
from lb.observe.metrics import Metrics
from lb.proxy.account import Account
from lb.proxy.dispatch import Dispatch, Engines
from lb.proxy.downstream import ClientConnection
from lb.proxy.home_finder import HomeFinder
from lb.proxy.intake import Intake
from lb.proxy.registry import RequestRegistry
from lb.proxy.runtime import Runtime
from lb.proxy.sweep import Sweep

T = TypeVar("T")
Answer = Iterable[bytes]  # the pieces in which it comes
DIES = b"\0dies"  # as a piece: the connection is reset
ENDS = b"\0ends"  # as a piece: the connection is closed in good order


class _Leap(selectors.DefaultSelector):
    """Never waits: it sets the clock forward by what it was to wait."""

    def __init__(self, leap: Callable[[float], None]) -> None:
        super().__init__()
        self._leap = leap

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout != 0:
            assert timeout is not None, "everybody waits for everybody"
            self._leap(timeout)
        return events


class LeapLoop(asyncio.SelectorEventLoop):
    """A loop in virtual time, from zero. What a callback raises is raised by `run`."""

    def __init__(self) -> None:
        self._now = 0.0
        self.bench: Bench | None = None  # whose targets are at all addresses
        super().__init__(_Leap(self._forward))
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def _forward(self, by_s: float) -> None:
        self._now += by_s

    def time(self) -> float:
        return self._now

    async def create_connection(self, protocol_factory: Callable[[], Any], *address: Any, **_: Any) -> Any:
        assert self.bench is not None, address
        return await self.bench.connect(protocol_factory())


def run(story: Coroutine[Any, Any, T]) -> T:
    """`story` in a loop of its own."""
    loop = LeapLoop()
    try:
        result = loop.run_until_complete(story)
        assert not loop.errors, loop.errors
        return result
    finally:
        loop.run_until_complete(_end())
        loop.close()


async def _end() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def settle() -> None:
    """Until nothing is left to do at this moment (of virtual time)."""
    await asyncio.sleep(0.0001)


class Wire(asyncio.Transport):
    """A transport. `out` is what was written and not yet taken; `feed` is what comes from the other end."""

    def __init__(self, took: Callable[[], None] | None = None, *, takes: bool = True) -> None:
        super().__init__()
        self.out = bytearray()
        self.takes = takes  # whether the other end reads
        self.closed = False
        self.eof_sent = False
        self.paused = False
        self._high = 64 * 1024
        self._full = False
        self._lost = False
        self._took = took
        self._pending: list[bytes] = []
        self.protocol: asyncio.Protocol

    def connect(self, protocol: asyncio.Protocol) -> None:
        self.protocol = protocol
        protocol.connection_made(self)

    # --- the other end

    def feed(self, data: bytes) -> None:
        """Bytes, DIES or ENDS from the other end, now or when reading goes on."""
        if self.closed or self._lost:
            return
        if self.paused:
            self._pending.append(data)
        elif data == DIES:
            self._lose(ConnectionResetError())
        elif data == ENDS:
            if not self.protocol.eof_received():
                self.close()
        elif data:
            self.protocol.data_received(data)

    def take(self) -> bytes:
        """The other end reads all there is."""
        data = bytes(self.out)
        self.out.clear()
        if self._full:
            self._full = False
            if not self._lost:
                self.protocol.resume_writing()
        self._close_if_flushed()
        return data

    # --- the transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert isinstance(data, bytes), type(data)
        if self._lost:
            return
        self.out += data
        if self._took is not None:
            asyncio.get_running_loop().call_soon(self._took)
        if not self.takes and not self._full and len(self.out) > self._high:
            self._full = True
            self.protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._close_if_flushed()

    def _close_if_flushed(self) -> None:
        if self.closed and (self.takes or not self.out):
            asyncio.get_running_loop().call_soon(self._lose, None)

    def abort(self) -> None:
        self.closed = True
        asyncio.get_running_loop().call_soon(self._lose, None)

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = self.closed = True
            self.protocol.connection_lost(error)

    @property
    def gone(self) -> bool:
        """Whether our end has let go of it."""
        return self._lost

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof_sent = True

    def pause_reading(self) -> None:
        assert not self.paused, "paused twice"
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False
        asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        while self._pending and not self.paused:
            self.feed(self._pending.pop(0))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * 1024 if high is None else high

    def get_write_buffer_size(self) -> int:
        return 0 if self.takes else len(self.out)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("192.0.2.1", 1) if name == "peername" else default


@dataclass
class Seen:
    """A request as h11 read it at a target."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


Behaviour = Callable[[Seen], Answer]


def plainly(body: bytes, *lines: bytes, status: bytes = b"200 OK") -> bytes:
    """A response in one piece."""
    head = b"".join(line + b"\r\n" for line in lines)
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n%b\r\n%b" % (status, len(body), head, body)


class Peer:
    """The target's end of one connection."""

    def __init__(self, bench: Bench, wire: Wire) -> None:
        self.wire = wire
        self.bytes_in = b""
        self.closed_by_us = False
        self._bench = bench
        self._http = h11.Connection(h11.SERVER)
        self._seen: Seen | None = None

    def took(self) -> None:
        if not self.wire.takes:
            return
        data = self.wire.take()
        if not data:
            return
        self.bytes_in += data
        self._http.receive_data(data)
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                self._seen = Seen(event.method, event.target, list(event.headers))
                self._bench.on_head(self, self._seen)
            elif isinstance(event, h11.Data):
                assert self._seen is not None
                self._seen.body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert self._seen is not None
                assert self._http.trailing_data == (b"", False), "one request at a time"
                self._http = h11.Connection(h11.SERVER)
                self._bench.on_request(self, self._seen)
                return
            else:
                return

    def say(self, answer: Answer) -> None:
        """The pieces, each in a turn of its own."""
        pieces = iter(answer)

        def next_piece() -> None:
            piece = next(pieces, None)
            if piece is not None:
                self.wire.feed(piece)
                asyncio.get_running_loop().call_soon(next_piece)

        asyncio.get_running_loop().call_soon(next_piece)


@dataclass
class Got:
    """A response as h11 read it at the client."""

    status: int
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    whole: bool = False
    trailers: list[tuple[bytes, bytes]] = field(default_factory=list)

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


class Client:
    """One connection of a client."""

    def __init__(self, bench: Bench, takes: bool) -> None:
        self.wire = Wire(takes=takes)
        self.connection = ClientConnection(bench.intake)
        self.wire.connect(self.connection)

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.wire.feed(piece)

    async def send_slowly(self, *pieces: bytes) -> None:
        """Each piece after all that the one before has led to."""
        for piece in pieces:
            self.wire.feed(piece)
            await settle()

    def answers(self, *methods: bytes) -> list[Got]:
        """What was sent to the client, read as the responses to these requests, in order; nothing else may be there."""
        data = self.wire.take()
        got: list[Got] = []
        for method in methods:
            http = h11.Connection(h11.CLIENT)
            http.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
            http.send(h11.EndOfMessage())
            if data:
                http.receive_data(data)
            if self.wire.closed:
                http.receive_data(b"")
            one: Got | None = None
            while True:
                try:
                    event = http.next_event()
                except h11.RemoteProtocolError:
                    assert self.wire.closed, data
                    if one is not None:
                        got.append(one)  # cut off
                    return got
                if isinstance(event, h11.InformationalResponse):
                    continue
                if isinstance(event, h11.Response):
                    one = Got(event.status_code, list(event.headers))
                elif isinstance(event, h11.Data):
                    assert one is not None
                    one.body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    assert one is not None
                    one.whole, one.trailers = True, list(event.headers)
                    got.append(one)
                    break
                else:
                    assert one is None, (one, event)
                    return got  # no response (yet)
            data = bytes(http.trailing_data[0])
        assert not data, data
        return got


class Bench:
    """A proxy before targets that all handle requests with `behave`. `peers` are the connections to them, in order."""

    def __init__(
        self,
        behave: Behaviour | None = None,
        *,
        targets: int = 1,
        table: Table | None = None,
        kind: EngineKind = EngineKind.UNKNOWN,
        max_clients: int | None = None,
        **limits: Any,
    ) -> None:
        self.behave: Behaviour = behave or (lambda seen: [plainly(seen.body)])
        self.refuses = False
        self.refuses_with: Exception = ConnectionRefusedError()
        self.greeting: Sequence[bytes] = ()
        self.seen: list[Seen] = []
        self.peers: list[Peer] = []
        self.on_head: Callable[[Peer, Seen], None] = lambda peer, seen: None
        loop = asyncio.get_running_loop()
        some = tuple(Target(f"t{number}", f"http://192.0.2.9:{8000 + number}") for number in range(targets))
        table = table or Table("service", "r1", some, policy="round_robin", limits=Limits(**limits))
        self.table = TargetTable(table, loop.time())
        self.runtime = Runtime(loop, loop.time)
        self.registry = RequestRegistry(self.table, None, self.runtime)
        self.account = Account(
            self.table,
            Metrics(table.service, ""),
            Explanations(running=self.registry.explanations),
            ApiKeyStore(table.access, loop.time()),
            loop.time(),
        )
        engines = Engines(lambda key: kind, lambda key: None, lambda: None)
        self.stored: dict[str, set[str]] = {}  # the paths of resources by target
        self.looks: list[tuple[str, str, bytes]] = []
        homes = HomeFinder(self.table, self.look, loop.time)
        self.dispatch = Dispatch(self.registry, Pools(), self.account, engines, random.Random(1), homes)
        self.intake = Intake(self.dispatch, self.account, "id", max_clients=max_clients)
        assert isinstance(loop, LeapLoop)
        loop.bench = self

    async def connect(self, connection: TargetConnection) -> tuple[Wire, TargetConnection]:
        """Connect to the next peer."""
        if self.refuses:
            raise self.refuses_with
        await asyncio.sleep(0)
        peer = Peer(self, Wire())
        peer.wire._took = peer.took
        self.peers.append(peer)
        peer.wire.connect(connection)
        peer.say(self.greeting)
        return peer.wire, connection

    async def look(self, target: Target, path: str, timeout_s: float, lines: bytes) -> Fetched:
        self.looks.append((target.id, path, lines))
        await asyncio.sleep(0.01)
        if target.id not in self.stored:
            raise ConnectionRefusedError
        if path in self.stored[target.id]:
            return Fetched(200, b"")
        return Fetched(404, b'{"error": {"message": "not found"}}')

    def on_request(self, peer: Peer, seen: Seen) -> None:
        self.seen.append(seen)
        peer.say(self.behave(seen))

    def client(self, *, takes: bool = True) -> Client:
        return Client(self, takes)

    def watch(self) -> None:
        """From now on due operations happen."""
        ticker = Ticker(self.runtime.clock, self.runtime.faults.report)
        ticker.add("sweep", Sweep(self.dispatch).check)
        self._patrol = asyncio.get_running_loop().create_task(ticker.run())

    def check(self) -> None:
        """Nothing is left of anything."""
        assert audit(self.table) == []
        assert self.table.in_flight == 0
        assert not self.registry.waiting
        assert not self.registry.relays
        assert not self.registry.queued
