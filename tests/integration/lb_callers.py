"""Clients that send one request after the other, and fail on one that gets no response."""

from __future__ import annotations

import asyncio
import ssl

from tests.integration.lb_harness import until

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Callers:
    """Clients that send one request after the other to an address, until it refuses them; `keep`: on one connection
    as long as it lasts; with `trust`: by TLS."""

    def __init__(self, port: int, *, keep: bool = False, trust: ssl.SSLContext | None = None) -> None:
        self.port = port
        self._trust = trust
        self.statuses: list[int] = []
        self.moved = False  # the agent has reported the move
        self.refused_early = 0
        self._keep = keep
        self._stop = asyncio.Event()
        self._tasks = [asyncio.create_task(self._call()) for _ in range(4)]

    async def _call(self) -> None:
        while not self._stop.is_set():
            before = self.moved
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self._trust)
            except ConnectionRefusedError:
                self.refused_early += not before
                return
            while True:
                writer.write(REQUEST)
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
                self.statuses.append(int(head.split(b" ", 2)[1]))
                await reader.readexactly(len(b"target"))
                if not self._keep or b"connection: close" in head.lower() or self._stop.is_set():
                    break
            writer.close()

    async def many(self, count: int = 40) -> None:
        target = len(self.statuses) + count

        async def enough() -> bool:
            return len(self.statuses) >= target

        await until(enough, tries=1000)

    async def over(self) -> None:
        """Raises what a caller met: a reset, or a connection closed without a response."""
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        self._stop.set()
        await self.over()
