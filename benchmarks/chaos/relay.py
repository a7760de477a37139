"""A TCP relay in front of an engine: what a preemption does to connections, in milliseconds and without a restart.

A `Relay` drops all its connections and refuses new ones (`cut`) until it is healed (`heal`). It can also end the one
connection that carries a certain request, known by its `X-Request-Id`: `Cuts.plan` says after how many events of which
response. The bytes of every leg are kept until they are taken, so that a stream that went wrong can be shown as the
engines sent it.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import cast

_REQUEST_ID = re.compile(rb"\r\nx-request-id: ([^\r\n]+)\r\n", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
_EVENT_END = b"\n\n"
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends RST


@dataclass(frozen=True, slots=True)
class Cut:
    """How one response ends: behind `events` events and `share` of the bytes of the next one, by RST or FIN."""

    events: int
    share: float = 0.0
    reset: bool = True

    def passing(self, passed: int, data: bytes) -> bytes | None:
        """Return what still passes of `data` if the cut is within it, None if it is not; `passed` events came before."""
        at = 0
        while passed < self.events:
            end = data.find(_EVENT_END, at)
            if end < 0:
                return None
            at, passed = end + len(_EVENT_END), passed + 1
        if at == len(data):
            return None
        end = data.find(_EVENT_END, at)
        following = len(data) if end < 0 else end + len(_EVENT_END)
        return data[: at + int(self.share * (following - at))]


@dataclass(slots=True)
class Leg:
    """What one engine was sent of a request and what it sent back, as far as it passed the relay."""

    relay: str
    request: bytearray
    response: bytearray = field(default_factory=bytearray)
    cut: bool = False
    events: int = 0
    due: Cut | None = None


class Cuts:
    """Where requests are to lose their connections, and the legs of all requests. Shared by the relays of a fleet."""

    def __init__(self) -> None:
        self._planned: dict[str, list[Cut]] = {}
        self._legs: dict[str, list[Leg]] = {}

    def plan(self, request_id: str, cuts: Sequence[Cut]) -> None:
        """Cut the first legs of this request, each one once."""
        self._planned[request_id] = list(cuts)

    def begin(self, request_id: str, leg: Leg) -> None:
        self._legs.setdefault(request_id, []).append(leg)
        if planned := self._planned.get(request_id):
            leg.due = planned.pop(0)

    def take(self, request_id: str) -> list[Leg]:
        """Return the legs of a request, and forget it."""
        self._planned.pop(request_id, None)
        return self._legs.pop(request_id, [])


class Relay:
    """A relay to `target_port`. An async context manager: inside, it listens on `port`; all on loopback."""

    def __init__(self, name: str, target_port: int, cuts: Cuts) -> None:
        self.name = name
        self.port = 0
        self.cuts = cuts
        self.target_port = target_port
        self.down = False
        self.connections: set[_Downstream] = set()

    async def __aenter__(self) -> Relay:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Downstream(self), "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()

    def cut(self, *, reset: bool = True) -> None:
        """Drop all connections, and each new one, until `heal`."""
        self.down = True
        for connection in list(self.connections):
            connection.drop(reset=reset)

    def heal(self) -> None:
        self.down = False


class _Downstream(asyncio.Protocol):
    """A connection from the load balancer, and the one to the engine that belongs to it."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._upstream: asyncio.Transport | None = None
        self._early = bytearray()  # received before the connection to the engine stands
        self._head = bytearray()  # of the request, until its end
        self._request_id = ""
        self._leg: Leg | None = None
        self._answered = True  # there are bytes of the response to the present request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        if self._relay.down:
            self._close(transport, reset=True)
            return
        self._relay.connections.add(self)
        self._task = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            upstream, _ = await loop.create_connection(
                lambda: _Upstream(self), "127.0.0.1", self._relay.target_port
            )
        except OSError:
            self.drop(reset=True)
            return
        self._upstream = upstream
        if self._transport.is_closing():
            upstream.abort()
        else:
            upstream.write(bytes(self._early))

    def data_received(self, data: bytes) -> None:
        self._note_request(data)
        if self._upstream is None:
            self._early += data
        else:
            self._upstream.write(data)

    def _note_request(self, data: bytes) -> None:
        """Find the id of the request whose head is in these bytes; what follows up to the response is its body."""
        if self._answered:  # the load balancer does not pipeline: this begins a request
            self._answered, self._leg, self._request_id = False, None, ""
            self._head = bytearray()
        if self._leg is not None:
            self._leg.request += data
            return
        self._head += data
        if _HEAD_END in self._head:
            found = _REQUEST_ID.search(self._head)
            self._request_id = found.group(1).decode("latin-1") if found else ""
            self._leg = Leg(self._relay.name, self._head)
            if self._request_id:
                self._relay.cuts.begin(self._request_id, self._leg)

    def engine_sent(self, data: bytes) -> None:
        self._answered = True
        leg = self._leg
        if leg is None:
            self._transport.write(data)
            return
        passing = leg.due.passing(leg.events, data) if leg.due is not None else None
        leg.response += data if passing is None else passing
        leg.events += data.count(_EVENT_END)
        if passing is None:
            self._transport.write(data)
            return
        assert leg.due is not None
        leg.cut = True
        if passing:
            self._transport.write(passing)
        self.drop(reset=leg.due.reset)

    def drop(self, *, reset: bool) -> None:
        if self._upstream is not None:
            self._upstream.abort()
        self._close(self._transport, reset=reset)

    def connection_lost(self, error: Exception | None) -> None:
        self._relay.connections.discard(self)
        if self._upstream is not None:
            self._upstream.abort()

    @staticmethod
    def _close(transport: asyncio.Transport, *, reset: bool) -> None:
        connection = transport.get_extra_info("socket")
        if reset and connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            transport.abort()
        else:
            transport.close()


class _Upstream(asyncio.Protocol):
    """The connection to the engine."""

    def __init__(self, downstream: _Downstream) -> None:
        self._downstream = downstream

    def data_received(self, data: bytes) -> None:
        self._downstream.engine_sent(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._downstream.drop(reset=error is not None)
