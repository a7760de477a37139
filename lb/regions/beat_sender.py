"""Sends beats to one peer, on a connection of its own that is made again whenever it fails or is half open."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from lb.config.regions import PeerAgent
from lb.core.beats import Beat, encode
from lb.core.link_state import LinkState
from policies.backoff import delay_s

EVERY_S = 0.25  # between two beats of an agent whose room does not change
SOONEST_S = 0.1  # between two beats in any case
CONNECT_S = 3.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0

_log = logging.getLogger("lb.regions.beat_sender")


class BeatSender:
    """`beat` makes the beat to send now. `run` goes on until `close`."""

    def __init__(
        self,
        peer: PeerAgent,
        tls: ssl.SSLContext,
        state: LinkState,
        beat: Callable[[LinkState], Beat],
        clock: Callable[[], float],
    ) -> None:
        self.peer = peer
        self.state = state
        self.trouble = ""
        self.connections = 0  # made so far
        self._tls = tls
        self._beat = beat
        self._clock = clock
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        """Begin to send."""
        self._task = asyncio.get_running_loop().create_task(self.run())

    def close(self) -> None:
        """Send nothing more. Returns at once."""
        self._closed = (
            True  # `asyncio.wait_for` may lose a cancellation that meets the end of what it waits for
        )
        if self._task is not None:
            self._task.cancel()

    async def closed(self) -> None:
        """Wait until nothing is sent any longer."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def stir(self) -> None:
        """There is news: send the next beat as soon as is allowed."""
        self._news.set()

    async def run(self) -> None:
        failures = 0
        while not self._closed:
            try:
                writer = await asyncio.wait_for(self._connect(), CONNECT_S)
            except (TimeoutError, OSError) as error:
                failures += 1
                self._troubled(str(error) or type(error).__name__)
                await asyncio.sleep(delay_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S))
                continue
            failures = 0
            try:
                self._troubled(await self._send(writer))
            finally:
                self.state.disconnected()
                writer.transport.abort()
            await asyncio.sleep(FIRST_PAUSE_S)

    async def _connect(self) -> asyncio.StreamWriter:
        parts = urlsplit(self.peer.url)
        _, writer = await asyncio.open_connection(
            parts.hostname, parts.port, ssl=self._tls, server_hostname=self.peer.tls_name
        )
        return writer

    async def _send(self, writer: asyncio.StreamWriter) -> str:
        """Send beats until the connection is of no use, and return why."""
        self.state.connected(self._clock())
        self.connections += 1
        self.trouble = ""
        while not (self._closed or writer.transport.is_closing()):
            self._news.clear()
            writer.write(encode(self._beat(self.state)))
            await asyncio.sleep(SOONEST_S)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), EVERY_S - SOONEST_S)
            if self.state.unanswered(self._clock()):
                return "no beat is answered"
        return "the connection is closed"

    def _troubled(self, why: str) -> None:
        if why != self.trouble:
            _log.info("link peer=%s why=%r", self.peer.id, why)
        self.trouble = why
