"""TLS in front of the replica's server: what comes in on the public port goes on, in clear, to the server's port on loopback.

The certificate and its key are in `front.pem`, which the controller brings. There is one connection to the server for each one
that comes in, and it is made first: where the server does not listen the client's connection is reset before the handshake, as
it would be without us. Bytes are passed on as they come, in both directions, and a side that does not read stops the other
one. When either side ends, so does the other, after what was sent has been delivered: TLS has no half-open connections here.

What passes also says whether the replica is of use (`TrafficWatch`), which renews the lease of the machine.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from provisioners.files import write_text
from provisioners.remote.host_agent import lease
from provisioners.remote.host_agent.files import lock, uptime_s
from provisioners.remote.host_agent.front_port import LOCK, PORT_FILE, port_of
from provisioners.remote.host_agent.scripts import claimed_port
from provisioners.remote.host_agent.tls_relay import TlsRelay

if TYPE_CHECKING:  # Python 3.8 cannot evaluate these
    from collections.abc import Callable

CERTIFICATE = "front.pem"

MOST_CONNECTIONS = 4096
HANDSHAKE_S = 10.0
CONNECT_S = 10.0
_HIGH_WATER = 128 * 1024  # bytes that may wait for a slow reader, on each side
_BACKLOG = 1024
_HEAD_BYTES = 4096  # of a request, in which the user agent is looked for
_OUR_AGENTS = (b"\r\nuser-agent: skyserve\r\n", b"\r\nuser-agent: skyserve-lb\r\n")
_FIRST_PORT, _PORTS = (
    31_000,
    1_768,
)  # above those that claims give to replicas, below those of outgoing connections
_KEEP_ALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


def serve(folder: Path) -> None:
    """Until we are killed; nothing if another front is at it."""
    held = lock(folder / LOCK)
    if held is None:
        return
    order = json.loads((folder / "order.json").read_text())
    to, listener = (
        claimed_port(order) or order["front"]["to"],
        _listening(order["front"]["port"], port_of(folder)),
    )
    relay, why = None, ""
    try:
        relay = TlsRelay(folder, folder / CERTIFICATE)
    except OSError as error:
        why = str(error)
    write_text(folder / PORT_FILE, json.dumps({"port": listener.getsockname()[1], "interpreted": why}))
    _raise_descriptor_limit()
    if relay is not None:
        relay.run(listener, to, MOST_CONNECTIONS)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(str(folder / CERTIFICATE))
    context.num_tickets = 0  # load balancers resume no session
    asyncio.run(accept(listener, context, to))


def _listening(wanted: int | None, before: int | None) -> socket.socket:
    """On the port that the firewall has open, the one of before, or the first that is free."""
    free = range(_FIRST_PORT, _FIRST_PORT + _PORTS)
    for port in [wanted] if wanted is not None else [*([] if before is None else [before]), *free]:
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
        else:
            listener.setblocking(False)
            return listener
    raise OSError(f"port {wanted} is in use")


def _raise_descriptor_limit() -> None:
    """Each connection takes two descriptors, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_CONNECTIONS + 64
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def accept(listener: socket.socket, context: ssl.SSLContext, to: int) -> None:
    """Take connections for ever."""
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(MOST_CONNECTIONS)
    pairs = set()
    while True:
        await room.acquire()
        try:
            client, _ = await loop.sock_accept(listener)
        except OSError:  # out of descriptors, or it was gone before it was taken
            room.release()
            await asyncio.sleep(0.05)
            continue
        pair = loop.create_task(_join(client, context, to))
        pairs.add(pair)
        pair.add_done_callback(pairs.discard)
        pair.add_done_callback(lambda _: room.release())


async def _join(client: socket.socket, context: ssl.SSLContext, to: int) -> None:
    """One connection, to its end."""
    loop = asyncio.get_running_loop()
    _keep_alive(client)
    outer, inner = _Side(), _Side()
    outer.other, inner.other = inner, outer
    watch = TrafficWatch()
    outer.seen, inner.seen = watch.request, watch.response
    try:
        await asyncio.wait_for(loop.create_connection(lambda: inner, "127.0.0.1", to), CONNECT_S)
    except (OSError, asyncio.TimeoutError):  # noqa: UP041 (not the same before 3.11)
        with suppress(OSError):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not an end
        client.close()
        return
    try:
        await loop.connect_accepted_socket(
            lambda: outer, client, ssl=context, ssl_handshake_timeout=HANDSHAKE_S
        )
    except (OSError, asyncio.TimeoutError):  # noqa: UP041
        inner.end(at_once=True)
        client.close()
        return
    await asyncio.gather(inner.ended, outer.ended)


class _Side(asyncio.Protocol):
    """One of the two connections of a pair.

    The pair is whole before the first byte comes from the client; what the server says before that waits.
    """

    other: _Side
    seen: Callable[[bytes], None]  # what came, before it is passed on

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiting: list[bytes] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self._transport.write(data)
        if self.other.ended.done():
            self.end()

    def data_received(self, data: bytes) -> None:
        self.seen(data)
        self.other.send(data)

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
        else:
            self._waiting.append(data)

    def eof_received(self) -> bool:
        return False  # which closes this connection, and `connection_lost` the other

    def pause_writing(self) -> None:
        self.other.read(False)

    def resume_writing(self) -> None:
        self.other.read(True)

    def read(self, on: bool) -> None:
        transport: Any = self._transport
        if transport is not None and not transport.is_closing():
            if on:
                transport.resume_reading()
            else:
                transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        self.other.end(at_once=error is not None)

    def end(self, at_once: bool = False) -> None:
        """After what was sent has been delivered, or at once."""
        if self._transport is not None:
            if at_once:
                self._transport.abort()
            else:
                self._transport.close()


class TrafficWatch:
    """Whether one connection is of use, from the first bytes of what passes.

    A request head and a response head come at the beginning of a segment, nearly always. A response is successful with a
    status of 2xx or 3xx, or 101; our own probes and polls, which name us as their user agent, are no traffic, but they show
    that the replica responds. Other protocols count once the server has sent anything.
    """

    noted_at = float("-inf")  # by any connection of this process

    def __init__(
        self,
        traffic: Callable[[], None] = lease.traffic,
        served: Callable[[], None] = lease.served,
        now: Callable[[], float] = uptime_s,
    ) -> None:
        self._traffic = traffic
        self._served = served
        self._now = now
        self._is_ours = False
        self._is_success = True  # of a stream whose beginning was no response head
        self._has_served = False

    def request(self, data: bytes) -> None:
        line, _, fields = data[:_HEAD_BYTES].partition(b"\r\n")
        if line.endswith((b" HTTP/1.1", b" HTTP/1.0")):
            self._is_ours = any(agent in b"\r\n" + fields.lower() for agent in _OUR_AGENTS)

    def response(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1."):
            self._is_success = data[9:10] in (b"2", b"3") or data[9:12] == b"101"
        if not self._is_success:
            return
        now = self._now()
        if self._is_ours:
            if not self._has_served:
                self._has_served = True
                self._served()
        elif now - TrafficWatch.noted_at >= lease.NOTE_EVERY_S:
            TrafficWatch.noted_at = now
            self._traffic()


def _keep_alive(sock: socket.socket) -> None:
    """A peer that is gone without a word is noticed by the kernel, within two minutes."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEP_ALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
