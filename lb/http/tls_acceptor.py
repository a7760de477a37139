"""Accepts connections and completes their TLS handshakes, a bounded number at a time.

A client that has not completed its handshake has sent no request and shown no key, yet it costs a descriptor, memory and, once it has
spoken, CPU. A port therefore has places for handshakes, which are no places of clients: a connection takes one when it is
accepted, and gives it back when its handshake is over, after `HANDSHAKE_S` at the latest.

When another connection arrives while all places are taken, one of them is freed. A connection may keep its place for
some time while its client has sent nothing, and for five times as long once it has (`times_s`); the one whose time has been over
for longest is closed. If there is none, the new connection waits, and those after it wait in the kernel's queue.

So many honest clients that connect at once wait for each other and are served: a client that wants TLS sends its first bytes
as soon as it is connected, and the time of those that have is enough for as many handshakes as there are places. Connections
that only take places are closed as others need them. The fewer places there are, the sooner they are: else a few connections a second would
take all of them.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from lb.http.tls_transport import TlsTransport

HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 1024  # at a time on one port
_SHORTEST_S = 1.0
_HANDSHAKE_CPU_S = 0.005  # of one core, and more than enough
_BACKLOG = 4096
_AGAIN_S = 0.1  # after the system has refused a descriptor, or while there is no place at all
_TCP_INFO_BYTES = 136
_BYTES_RECEIVED_AT = 128  # tcpi_bytes_received of Linux' struct tcp_info

TOO_MANY = "too_many"  # its place was needed for another one
HANDSHAKE = "handshake"  # it failed, or took too long
NO_DESCRIPTOR = "no_descriptor"


class Waiting(Protocol):
    """A connection whose handshake is under way."""

    @property
    def since(self) -> float: ...

    def has_spoken(self) -> bool:
        """Return True once the client has sent something."""
        ...


_W = TypeVar("_W", bound=Waiting)


def times_s(places: int) -> tuple[float, float]:
    """Return for how long a connection may keep one of so many places while its client is silent, and once it has spoken."""
    speaking_s = min(HANDSHAKE_S, max(_SHORTEST_S, _HANDSHAKE_CPU_S * places))
    return speaking_s / 5, speaking_s


def next_to_close(waiting: Iterable[_W], silent_s: float, speaking_s: float) -> tuple[_W, float] | None:
    """Return the connection that is closed next, should its place be needed, and from when on it may be; None without connections.

    `waiting` are all of them, the oldest first.
    """
    speaking: _W | None = None  # the oldest
    for one in waiting:
        if not one.has_spoken():  # and those after it have more time
            if speaking is not None and speaking.since + speaking_s <= one.since + silent_s:
                break
            return one, one.since + silent_s
        if speaking is None:
            speaking = one
    return None if speaking is None else (speaking, speaking.since + speaking_s)


class TlsAcceptor:
    """Accepts connections for one port, on any number of listening sockets.

    `places` returns how many handshakes may run now; `refused` is called with the reason of each connection that is closed before
    its handshake is complete.
    """

    def __init__(
        self,
        tls: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        places: Callable[[], int],
        refused: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._protocol = protocol
        self._places = places
        self._refused = refused
        self._handshakes: dict[asyncio.Task[None], _Handshake] = {}

    def listen(self, listening: socket.socket, backlog: int = _BACKLOG) -> asyncio.Task[None]:
        """Listen on a bound socket. Returns the task that accepts until it is cancelled; the socket remains the caller's."""
        listening.setblocking(False)
        listening.listen(backlog)
        return self._loop.create_task(self._accept(listening))

    async def adopt(self, listening: socket.socket) -> None:
        """Accept what waits on a socket that takes no new connections any more."""
        for arrived in waiting_on(listening):
            await self._take(arrived)

    async def completed(self) -> None:
        """Wait for the handshakes under way, for a second at most."""
        if self._handshakes:
            await asyncio.wait(self._handshakes, timeout=_SHORTEST_S)

    async def close(self) -> None:
        """Break off the handshakes under way."""
        handshakes = list(self._handshakes)
        for task in handshakes:
            task.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            # Without `await` between accepting and `_take`: cancelled in between, a connection would be lost.
            try:
                arrived, _ = listening.accept()
            except BlockingIOError:
                await self._readable(listening)
                continue
            except OSError:
                self._refused(NO_DESCRIPTOR)
                await asyncio.sleep(_AGAIN_S)
                continue
            try:
                await self._take(arrived)
            except asyncio.CancelledError:
                self._begin(arrived)  # the port is closing; this client was accepted before
                raise

    async def _readable(self, listening: socket.socket) -> None:
        """Wait until a connection waits to be accepted."""
        arrival = asyncio.Event()
        self._loop.add_reader(listening, arrival.set)
        try:
            await arrival.wait()
        finally:
            self._loop.remove_reader(listening)

    async def _take(self, arrived: socket.socket) -> None:
        """Begin the handshake of a connection as soon as there is a place for it."""
        while len(self._handshakes) >= (places := self._places()):
            found = next_to_close(self._handshakes.values(), *times_s(places))
            if found is None:
                await asyncio.sleep(_AGAIN_S)
                continue
            oldest, due_at = found
            wait_s = due_at - self._loop.time()
            if wait_s > 0:
                await asyncio.wait(
                    self._handshakes, timeout=min(wait_s, _AGAIN_S), return_when=asyncio.FIRST_COMPLETED
                )
                continue
            oldest.task.cancel()
            await asyncio.wait({oldest.task})
            self._refused(TOO_MANY)
        self._begin(arrived)

    def _begin(self, arrived: socket.socket) -> None:
        handshake = _Handshake(arrived, self._loop.time())
        task = handshake.task = self._loop.create_task(self._secure(handshake))
        self._handshakes[task] = handshake
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._handshakes[task]

    async def _secure(self, handshake: _Handshake) -> None:
        arrived = handshake.socket
        try:
            arrived.setblocking(False)
            arrived.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            transport = TlsTransport(self._loop, arrived, self._tls, server_side=True)
            handshake.socket = transport.get_extra_info("socket")
            await transport.handshake(HANDSHAKE_S)
        except OSError as error:  # ssl.SSLError among them
            arrived.close()
            self._refused(_reason(error))
        except asyncio.CancelledError:
            arrived.close()
            raise
        else:
            transport.begin(self._protocol())


@dataclass(slots=True, eq=False)
class _Handshake:
    socket: socket.socket
    since: float
    task: asyncio.Task[None] = field(init=False)
    _spoken: bool = False

    def has_spoken(self) -> bool:
        """Return True once the kernel has received something, whether or not it has been read. True if that is not known."""
        if not self._spoken:
            try:
                info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                self._spoken = struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)[0] > 0
            except (OSError, struct.error):
                self._spoken = True
        return self._spoken


def waiting_on(listening: socket.socket) -> Iterator[socket.socket]:
    """Accept and yield the connections that wait in the kernel's queue."""
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:  # BlockingIOError if none is left
            return
        yield connection


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "expired" if "expired" in error.verify_message else "not_by_our_authority"
    if isinstance(error, ssl.SSLError) and error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "no_certificate"
    return HANDSHAKE
