"""Readiness probes: one small task per replica on the daemon's event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Callable, Sequence

import aiohttp

from policies.model import Event, ProbeFailed, ProbePassed
from skyserve_cli.controller.ports import ProbeOrder

log = logging.getLogger(__name__)

#: A replica that is not serving is asked at least this often: each second of waiting is a second not served.
EAGER_INTERVAL_S = 1.0


class HttpProber:
    """Ready is HTTP 200 within the probe's time-out. Tells the tick only what it does not know yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._orders: dict[tuple[str, int], ProbeOrder] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        # A connection of its own for every probe: a kept one would tell nothing about new clients.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._apply(())
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def watch(self, orders: Sequence[ProbeOrder]) -> None:
        self._loop.call_soon_threadsafe(self._apply, tuple(orders))

    def drain(self) -> list[tuple[str, Event]]:
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def _apply(self, orders: Sequence[ProbeOrder]) -> None:
        self._orders = {(order.service, order.replica_id): order for order in orders}
        for key, task in list(self._tasks.items()):
            if task.done():  # only a bug ends it; the replica must not stay unprobed for it
                log.error("probing %s replica %d ended: %r", *key, task.exception())
                del self._tasks[key]
        for key in self._tasks.keys() - self._orders.keys():
            self._tasks.pop(key).cancel()
        for key in self._orders.keys() - self._tasks.keys():
            self._tasks[key] = self._loop.create_task(self._probe_on(key))

    async def _probe_on(self, key: tuple[str, int]) -> None:
        while True:
            asked = self._orders[key]
            trouble = await self._trouble(asked)
            order = self._orders[key]
            event = _event(order, trouble)
            if event is not None:
                self._events.put((order.service, event))
                self._wake()
            interval_s = order.probe.interval_s
            if trouble is not None or not order.passing:
                interval_s = min(interval_s, EAGER_INTERVAL_S)
            await asyncio.sleep(interval_s)

    async def _trouble(self, order: ProbeOrder) -> str | None:
        """None if the probe passed, else what was wrong, in a few words and without header values."""
        assert self._session is not None  # noqa: S101 - start() comes first
        probe = order.probe
        headers = dict(probe.headers)
        data = None
        if probe.post_data is not None:
            data = probe.post_data.encode()
            headers.setdefault("Content-Type", "application/json")
        timeout = aiohttp.ClientTimeout(total=probe.timeout_s)
        url = order.endpoint.rstrip("/") + probe.path
        try:
            async with self._session.request(
                probe.method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return None if response.status == 200 else f"probe answered {response.status}"
        except TimeoutError:
            return f"probe took longer than {probe.timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"probe failed: {type(error).__name__}"


def _event(order: ProbeOrder, trouble: str | None) -> Event | None:
    if trouble is None:
        return None if order.passing else ProbePassed(order.replica_id)
    return ProbeFailed(order.replica_id, trouble) if order.passing else None
