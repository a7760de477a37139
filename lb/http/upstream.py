"""Connections to targets: dialled, pooled per target, handed to one exchange at a time.

No cap on connections: a queue hidden in a pool would be invisible to the policies. An idle connection is kept for
less than the five seconds after which common servers (uvicorn) drop it, so that a pooled connection is seldom closed
under a request; the last one used is used first, so that those no longer needed grow old.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections.abc import Callable
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

from lb.config.schema import Target
from lb.http.tls_transport import tls_to

POOL_KEEPALIVE_S: Final = 4.0
WRITE_HIGH_WATER: Final = 256 * 1024


KEEPALIVE_IDLE_S: Final = 30
KEEPALIVE_PROBES: Final = 4
USER_TIMEOUT_MS: Final = 180_000  # longer than any timeout that the agent keeps itself by default
_KEEPALIVE_OPTIONS: Final = tuple(
    (getattr(socket, name), value)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_IDLE_S // 2),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
    )
    if hasattr(socket, name)  # not on every system
)


class Sink(Protocol):
    """The user of a connection."""

    def target_data(self, data: bytes) -> None: ...
    def target_lost(self, error: Exception | None) -> None: ...
    def target_full(self) -> None: ...
    def target_drained(self) -> None: ...
    def crashed(self, error: Exception) -> None:
        """One of the other methods has raised. Must not raise."""
        ...


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel find out that a peer is gone: probes while nothing is sent, and a limit for sent data.

    On a listening socket all connections that it accepts inherit this.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE_OPTIONS:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class TargetConnection(asyncio.Protocol):
    """One connection. Its user sets `sink`; without one it is idle, and a byte or an end of file closes it."""

    __slots__ = ("idle_since", "pool", "sink", "transport", "unsent", "used")

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.sink: Sink | None = None
        self.unsent = b""  # for `lb.http.write_batch`
        self.used = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # uvloop's stand-in for a socket makes a real one for each option that is set on it.
            real = socket.socket(sock.family, sock.type, sock.proto, fileno=sock.fileno())
            try:
                keep_alive(real)
            finally:
                real.detach()

    def data_received(self, data: bytes) -> None:
        sink = self.sink
        if sink is None or self.unsent:
            self.transport.abort()  # it sends without a request
            return
        try:
            sink.target_data(data)
        except Exception as error:  # noqa: BLE001 (the barrier: see lb.proxy.faults)
            sink.crashed(error)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.pool.forget(self)
        sink, self.sink = self.sink, None
        if sink is not None:
            try:
                sink.target_lost(error)
            except Exception as fault:  # noqa: BLE001
                sink.crashed(fault)

    def pause_writing(self) -> None:
        sink = self.sink
        if sink is not None:
            try:
                sink.target_full()
            except Exception as fault:  # noqa: BLE001
                sink.crashed(fault)

    def resume_writing(self) -> None:
        sink = self.sink
        if sink is not None:
            try:
                sink.target_drained()
            except Exception as fault:  # noqa: BLE001
                sink.crashed(fault)

    def flush(self) -> None:
        unsent, self.unsent = self.unsent, b""
        if unsent and not self.transport.is_closing():
            self.transport.write(unsent)

    def drop(self) -> None:
        """Close at once; the sink, if any, is not called."""
        self.unsent = b""
        self.sink = None
        self.transport.abort()


class Pool:
    """The connections to one target's address."""

    __slots__ = (
        "_idle",
        "_with_idle",
        "address",
        "base_path",
        "closed",
        "host",
        "name",
        "port",
        "tls",
        "tls_name",
    )

    def __init__(
        self, url: str, tls: ssl.SSLContext | None, with_idle: dict[Pool, None], tls_name: str = ""
    ) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.base_path = parts.path.rstrip("/").encode()
        self.tls = tls if parts.scheme == "https" else None
        self.tls_name = tls_name or self.host
        self.address = parts.netloc.rpartition("@")[2].encode()
        # Its own name where TLS is: terminators route on it.
        self.name = self.address if self.tls is not None and not tls_name else b""
        self.closed = False
        self._idle: list[TargetConnection] = []
        self._with_idle = with_idle  # the pools that have any

    def take(self) -> TargetConnection | None:
        """Return an idle connection that is not known to be dead."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    def give(self, connection: TargetConnection, now: float) -> None:
        """The response was read to its end, and the target keeps the connection open."""
        connection.sink = None
        transport = connection.transport
        if self.closed or transport.is_closing() or transport.get_write_buffer_size():
            transport.abort()  # with a request that has not been taken yet, the response came too early
            return
        connection.used = True
        connection.idle_since = now
        self._idle.append(connection)
        self._with_idle[self] = None

    def forget(self, connection: TargetConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    async def dial(self, timeout_s: float) -> TargetConnection:
        """Return a new connection. Raises OSError (ssl.SSLError among them) or asyncio.TimeoutError."""
        return await asyncio.wait_for(self.connect(timeout_s), timeout_s)

    async def connect(self, timeout_s: float) -> TargetConnection:
        """As `dial`, for callers that bound the time themselves; only a TLS handshake is bounded here."""
        loop = asyncio.get_running_loop()
        if self.tls is None:
            _, connection = await loop.create_connection(lambda: TargetConnection(self), self.host, self.port)
        else:
            transport = await tls_to(self.host, self.port, self.tls, self.tls_name, timeout_s)
            connection = TargetConnection(self)
            transport.begin(connection)
        if connection.transport.is_closing():
            raise ConnectionResetError("closed as soon as it was open")
        return connection

    def expire(self, now: float) -> bool:
        """Close what has been idle for too long; the oldest are in front. Returns True if any are left."""
        count = 0
        for connection in self._idle:
            if now - connection.idle_since < POOL_KEEPALIVE_S:
                break
            count += 1
        old, self._idle = self._idle[:count], self._idle[count:]
        for connection in old:
            connection.transport.close()
        return bool(self._idle)

    def close(self) -> None:
        self.closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.transport.close()


class Pools:
    """One pool per address that the table names."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._pools: dict[str, Pool] = {}
        self._with_idle: dict[Pool, None] = {}
        self._ca = ""
        self._own: ssl.SSLContext | None = None  # for targets with a certificate by `_ca`
        self._peers: ssl.SSLContext | None = (
            None  # for agents of other regions, and shows a certificate of ours
        )
        self._peer_urls: frozenset[str] = frozenset()

    def set_authority(self, ca: str) -> None:
        """From now on targets with a `tls_name` are known by this authority (DER in base64). Raises ssl.SSLError, ValueError."""
        if ca == self._ca:
            return
        self._own = trusting_only(ca) if ca else None
        self._ca = ca
        self.retain({url for url, pool in self._pools.items() if pool.tls_name == pool.host})

    def use_peers(self, urls: frozenset[str], tls: ssl.SSLContext | None) -> None:
        """Connect to these addresses by `tls` from now on."""
        if tls is not self._peers:
            self.retain(self._pools.keys() - self._peer_urls)
        self._peers, self._peer_urls = tls, urls

    def of(self, target: Target) -> Pool:
        pool = self._pools.get(target.url)
        if pool is not None and target.tls_name and pool.tls_name != target.tls_name:
            self.retain(self._pools.keys() - {target.url})  # another machine at the same address
            pool = None
        if pool is None and target.tls_name:
            own = self._peers if target.url in self._peer_urls else self._own
            own = own if own is not None else trusting_only("")
            pool = self._pools[target.url] = Pool(target.url, own, self._with_idle, target.tls_name)
        if pool is None:
            if self._tls is None and target.url.startswith("https:"):
                self._tls = ssl.create_default_context()
            pool = self._pools[target.url] = Pool(target.url, self._tls, self._with_idle)
        return pool

    def retain(self, urls: set[str]) -> None:
        """Close the pools of all other addresses."""
        for url in self._pools.keys() - urls:
            pool = self._pools.pop(url)
            self._with_idle.pop(pool, None)
            pool.close()

    def expire(self, now: float) -> None:
        for pool in [pool for pool in self._with_idle if not pool.expire(now)]:
            del self._with_idle[pool]

    def close(self) -> None:
        self.retain(set())


def trusting_only(ca: str) -> ssl.SSLContext:
    """Return a context that trusts that authority (DER in base64), or none for "". Raises ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificates and their names
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca:
        context.load_verify_locations(cadata=base64.b64decode(ca))
    return context


class Dialling:
    """One attempt to connect, which can be called off: a connection that comes too late goes to the pool."""

    __slots__ = ("_abandoned", "_clock", "_pool", "_task")

    def __init__(
        self,
        pool: Pool,
        timeout_s: float,
        clock: Callable[[], float],
        done: Callable[[TargetConnection], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._abandoned = False
        self._task = asyncio.get_running_loop().create_task(pool.dial(timeout_s))

        def settle(task: asyncio.Task[TargetConnection]) -> None:
            if task.cancelled():
                return
            error = task.exception()
            if error is None and task.result().transport.is_closing():
                error = ConnectionResetError("closed as soon as it was open")  # and no sink was notified
            if self._abandoned:
                if error is None:
                    pool.give(task.result(), clock())
            elif error is None:
                done(task.result())
            elif isinstance(error, Exception):
                failed(error)

        self._task.add_done_callback(settle)

    def abandon(self) -> None:
        self._abandoned = True
