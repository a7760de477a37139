"""The data port: the sockets on which clients connect, and the move to another address.

A move opens the new address before it leaves the old one. If the new one cannot be used, nothing has changed. The old
address takes connections for `LEFT_OPEN_S` after the move; then it is closed, and the connections that were made to it
end after their response, or once they have been idle for as long again.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from lb.config.options import Listen
from lb.http.tls_acceptor import TlsAcceptor, waiting_on
from lb.http.upstream import keep_alive
from lb.proxy.ports import ClientPort

LEFT_OPEN_S = 2.0
_BACKLOG = 4096
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux, which `socket` does not name
_NO_SYN = (  # classic BPF: (code, jump if true, jump if false, value)
    (0x30, 0, 0, 13),  # load the flags of the TCP header
    (0x54, 0, 0, 0x02),  # SYN
    (0x15, 0, 1, 0),
    (0x06, 0, 0, 0xFFFFFFFF),  # not set: keep the packet
    (0x06, 0, 0, 0),  # set: drop it
)
_HANDSHAKE_S = 0.2  # the longest round trip to a client
_ANY = ("0.0.0.0", "::")  # noqa: S104 (compared with, not bound to)

_log = logging.getLogger("lb.agent.data_port")


class CannotListenError(OSError):
    """An address cannot be used: taken, forbidden or not of this host."""


@dataclass(slots=True, eq=False)
class _Listener:
    """One listening socket. `server` accepts from it, or with TLS the task of the acceptor."""

    socket: socket.socket
    server: asyncio.AbstractServer | asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.socket.getsockname()[:2]
        return host, port


class DataPort:
    """Where clients connect. `default` is the address for tables that name none; port 0 is that of `first`."""

    def __init__(
        self,
        first: socket.socket,
        default: Listen,
        protocol: Callable[[], asyncio.Protocol],
        clients: Collection[ClientPort],
        acceptor: TlsAcceptor | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """`clients` are the open connections, which `protocol` takes over; with TLS the `acceptor` makes them."""
        self._loop = asyncio.get_running_loop()
        self._current = _Listener(first)
        self._listeners = [self._current]
        self._default = default if default.port else replace(default, port=self.address[1])
        self._protocol = protocol
        self._clients = clients
        self._acceptor = acceptor
        self._shared = shared
        self.moved: Callable[[], None] = lambda: None  # called once another address is in force
        self._moves: set[asyncio.Task[None]] = set()

    @property
    def listening(self) -> socket.socket:
        return self._current.socket

    @property
    def address(self) -> tuple[str, int]:
        return self._current.address

    async def open(self) -> None:
        """Accept connections."""
        await self._accept(self._current)

    @contextmanager
    def moving(self, listen: Listen | None) -> Iterator[None]:
        """Open the address, if it is another one; it is in force if the body raises nothing, else it is closed again.

        Raises CannotListenError before the body.
        """
        opened = self._open(listen or self._default)
        try:
            yield
        except BaseException:
            if opened.server is None:
                opened.socket.close()
            raise
        if opened is self._current:
            return
        left, self._current = self._current, opened
        if opened not in self._listeners:
            self._listeners.append(opened)
        _log.info("listen on %s:%d instead of %s:%d", *opened.address, *left.address)
        move = self._loop.create_task(self._move(opened, left))
        self._moves.add(move)
        move.add_done_callback(self._moves.discard)
        self.moved()

    async def close(self, *, adopt: bool = True) -> None:
        """Accept nothing more. What the kernel has accepted for us is served (`adopt`), unless a successor has the socket."""
        for move in self._moves:
            move.cancel()
        for listener in list(self._listeners):
            await self._close(listener, adopt=adopt or listener is not self._current)

    def _open(self, listen: Listen) -> _Listener:
        """Return a socket that listens there: one of ours, or a new one."""
        try:
            wanted = resolved(listen)
            for one in self._listeners:
                if one.address == wanted[1][:2]:
                    return one
            return _Listener(self._bound(*wanted))
        except OSError as error:
            here = "{}:{}".format(*self.address)
            why = f"cannot listen on {listen.host}:{listen.port}: {error.strerror}; still listening on {here}"
            raise CannotListenError(error.errno, why) from error

    def _bound(self, family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
        # All addresses of a port and one of them may both be listened on only while each socket shares its port.
        ours = [one.socket for one in self._listeners if one.address[1] == address[1]]
        for one in ours:
            _share(one)
        opened = bound(family, address, shared=self._shared or bool(ours))
        try:
            opened.listen(_BACKLOG)
        except OSError:
            opened.close()
            raise
        return opened

    async def _accept(self, listener: _Listener) -> None:
        if listener.server is None:
            keep_alive(listener.socket)  # inherited by every connection that it accepts
            if self._acceptor is not None:
                listener.server = self._acceptor.listen(listener.socket, _BACKLOG)
            else:
                listener.server = await self._loop.create_server(
                    self._protocol, sock=listener.socket, backlog=_BACKLOG
                )

    async def _move(self, opened: _Listener, left: _Listener) -> None:
        await self._accept(opened)
        await asyncio.sleep(LEFT_OPEN_S)
        if (
            left is self._current or left not in self._listeners
        ):  # it is wanted again, or closed by another move
            return
        await self._close(left, adopt=True)
        for client in list(self._clients):
            local = client.transport.get_extra_info("sockname")
            if local and not _covers(self.address, local[:2]):
                client.close_soon(LEFT_OPEN_S)

    async def _close(self, listener: _Listener, *, adopt: bool) -> None:
        self._listeners.remove(listener)
        server = listener.server
        if server is None:
            listener.socket.close()
            return
        with (
            listener.socket.dup() as rest
        ):  # closing the last descriptor would reset what waits to be accepted
            try:
                if adopt:
                    # A handshake under way when the socket is closed would be reset: none begins any more, those that have started
                    # come to their end. Clients repeat the first packet a second later, and find another socket here, or none.
                    _take_no_handshakes(rest)
                    await asyncio.sleep(_HANDSHAKE_S)
            finally:
                if isinstance(server, asyncio.Task):
                    server.cancel()
                    await asyncio.wait({server})  # it must not wait for a descriptor that is closed
                    listener.socket.close()
                else:
                    server.close()
            if adopt:
                await self._adopt(rest)
        if adopt and self._acceptor is not None:
            await self._acceptor.completed()

    async def _adopt(self, rest: socket.socket) -> None:
        """Serve the connections that wait to be accepted."""
        if self._acceptor is not None:
            await self._acceptor.adopt(rest)
            return
        adopted = (
            self._loop.connect_accepted_socket(self._protocol, connection) for connection in waiting_on(rest)
        )
        await asyncio.gather(*adopted, return_exceptions=True)


def resolved(listen: Listen) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return the family and the address to bind to. Raises OSError."""
    family, *_, address = socket.getaddrinfo(
        listen.host or None, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return family, address  # type: ignore[return-value]


def bound(family: socket.AddressFamily, address: tuple[str, int], *, shared: bool = False) -> socket.socket:
    """Return a bound socket whose address a successor may bind at once after we are gone. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            _share(listener)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _take_no_handshakes(listener: socket.socket) -> None:
    """Drop every packet that would begin a connection."""
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _NO_SYN)
    memory = ctypes.create_string_buffer(program)
    with suppress(OSError):  # it only makes a loss less likely
        listener.setsockopt(
            socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", len(_NO_SYN), ctypes.addressof(memory))
        )


def _share(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _covers(listening: tuple[str, int], local: tuple[str, int]) -> bool:
    """Return whether a connection to `local` could have been made to a socket that listens there."""
    return listening[1] == local[1] and listening[0] in (*_ANY, local[0])
