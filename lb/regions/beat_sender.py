"""Keeps a connection to one peer, on which beats go out; it is made again whenever it fails or is half open."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from lb.config.regions import PeerAgent
from lb.core.link_state import LinkState
from lb.regions.identity import Validity, validity_of
from policies.backoff import delay_s

CONNECT_S = 3.0
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0

_log = logging.getLogger("lb.regions.beat_sender")


class BeatSender:
    """The connection. `connected` is called with it each time that it is made."""

    def __init__(
        self,
        peer: PeerAgent,
        tls: ssl.SSLContext,
        state: LinkState,
        clock: Callable[[], float],
        connected: Callable[[BeatSender], None],
    ) -> None:
        self.peer = peer
        self.state = state
        self.trouble = ""
        self.connections = 0  # made so far
        self.validity: Validity | None = None  # of the peer's certificate; None before the first one
        self._tls = tls
        self._clock = clock
        self._connected = connected
        self._connection: _Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.get_running_loop().create_task(self.run())

    def close(self) -> None:
        """Send nothing more. Returns at once."""
        self._closed = True  # a cancellation may get lost that meets the end of what is awaited
        if self._task is not None:
            self._task.cancel()

    async def closed(self) -> None:
        """Wait until nothing is sent any longer."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def send(self, data: bytes, now: float) -> None:
        """Send beats, if there is a connection. One on which beats have no echo is given up."""
        connection = self._connection
        if connection is None:
            return
        connection.transport.write(data)
        if self.state.is_half_open(now):
            connection.ends("no beat is echoed")

    async def run(self) -> None:
        failures = 0
        while not self._closed:
            try:
                why = await self._connect()
            except (asyncio.TimeoutError, OSError) as error:  # noqa: UP041 (not the same in 3.10)
                failures += 1
                self._troubled(str(error) or type(error).__name__)
                await asyncio.sleep(delay_s(failures, MIN_BACKOFF_S, MAX_BACKOFF_S))
            else:
                failures = 0
                self._troubled(why)
                await asyncio.sleep(MIN_BACKOFF_S)

    async def _connect(self) -> str:
        """Make a connection, and return why it ended. Raises asyncio.TimeoutError or OSError if there is none."""
        loop = asyncio.get_running_loop()
        parts = urlsplit(self.peer.url)
        making = loop.create_connection(
            lambda: _Connection(loop),
            parts.hostname or "",
            parts.port or 443,
            ssl=self._tls,
            server_hostname=self.peer.tls_name,
        )
        transport, connection = await asyncio.wait_for(making, CONNECT_S)
        try:
            self._connection = connection
            self.validity = validity_of(transport.get_extra_info("ssl_object"))
            self.state.connected()
            self.connections += 1
            self.trouble = ""
            self._connected(self)
            return await connection.lost
        finally:
            self._connection = None
            transport.abort()

    def _troubled(self, why: str) -> None:
        if why != self.trouble:
            _log.info("link peer=%s why=%r", self.peer.id, why)
        self.trouble = why


class _Connection(asyncio.Protocol):
    """One connection; nothing comes on it. `lost` is why it is of no use any longer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lost: asyncio.Future[str] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.ends("the connection is closed")

    def ends(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)
