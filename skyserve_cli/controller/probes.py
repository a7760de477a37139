"""Readiness probes: one small task per replica on the daemon's event loop.

A probe that failed while this process had no CPU is void (`attention`). Replicas that pass are probed over connections that
are kept, every tenth time over a new one, because a kept one says nothing about new clients; all others over new ones.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

from policies.brake import FailedProbe
from policies.model import Event, ProbeFailed, ProbePassed
from skyserve_cli.controller.attention import Attention
from skyserve_cli.controller.clock import SystemClock
from skyserve_cli.controller.ports import ProbeOrder

log = logging.getLogger(__name__)

#: A replica that is not serving is probed at least this often: each second of waiting is a second not served.
EAGER_INTERVAL_S = 1.0
MAX_IN_FLIGHT = 256
NEW_CONNECTION_EVERY = 10
SMALL_BODY_BYTES = 64 * 1024
_GOLDEN = 0.6180339887498949  # its multiples spread evenly over an interval, however many there are

Key = tuple[str, int]


class _Outcome(NamedTuple):
    """Of one probe. `trouble` is None if it passed; `reached` is true if there was a connection."""

    trouble: str | None
    reached: bool


class HttpProber:
    """Ready is HTTP 200 within the probe's time-out. Reports to the tick only what it does not know yet."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None], attention: Attention | None = None
    ) -> None:
        self._loop = loop
        self._wake = wake
        self._attention = Attention(loop, SystemClock()) if attention is None else attention
        self._orders: dict[Key, ProbeOrder] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._failed: dict[str, dict[int, FailedProbe]] = {}
        self._remote: set[Key] = set()  # replicas on other machines
        self._reached_at = float("-inf")
        self._events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
        self._in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._sessions = AsyncExitStack()
        self._new: aiohttp.ClientSession
        self._kept: aiohttp.ClientSession

    async def start(self) -> None:
        for name, force_close in (("_new", True), ("_kept", False)):
            connector = aiohttp.TCPConnector(limit=0, force_close=force_close)
            session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
            setattr(self, name, await self._sessions.enter_async_context(session))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._apply(())
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sessions.aclose()

    def watch(self, orders: Sequence[ProbeOrder]) -> None:
        self._loop.call_soon_threadsafe(self._apply, tuple(orders))

    def drain(self) -> list[tuple[str, Event]]:
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def failed(self, service: str) -> Mapping[int, FailedProbe]:
        """The replicas of the service whose last valid probe failed. Safe from any thread."""
        failed = self._failed.get(service)
        return {} if failed is None else failed.copy()

    def reached_at(self) -> float | None:
        """When a replica on another machine last responded; None if there are none."""
        return self._reached_at if self._remote else None

    def _apply(self, orders: Sequence[ProbeOrder]) -> None:
        self._orders = {(order.service, order.replica_id): order for order in orders}
        for key, task in list(self._tasks.items()):
            if task.done():  # only a bug ends it; the replica must not stay unprobed for it
                log.error("probing %s replica %d ended: %r", *key, task.exception())
                del self._tasks[key]
        for key in self._tasks.keys() - self._orders.keys():
            self._tasks.pop(key).cancel()
            self._forget(key)
            self._remote.discard(key)
        for key in self._orders.keys() - self._tasks.keys():
            if not _is_loopback(self._orders[key].endpoint):
                self._remote.add(key)
            self._tasks[key] = self._loop.create_task(self._probe_on(key))

    async def _probe_on(self, key: Key) -> None:
        order, count = self._orders[key], 0
        if order.passing:  # a controller that has just started does not probe a whole fleet in one moment
            await asyncio.sleep(order.probe.interval_s * (order.replica_id * _GOLDEN % 1.0))
        while True:
            async with self._in_flight:
                begun = self._loop.time()
                asked = self._orders[key]
                is_new = not asked.passing or count % NEW_CONNECTION_EVERY == 0
                outcome = await self._probe(asked, self._new if is_new else self._kept)
            count += 1
            void = outcome.trouble is not None and self._attention.was_lost(begun)
            if not void:
                self._record(key, outcome)
            interval_s = order.probe.interval_s
            order = self._orders[key]
            if outcome.trouble is not None or not order.passing:
                interval_s = min(interval_s, EAGER_INTERVAL_S)
            await asyncio.sleep(interval_s)

    def _record(self, key: Key, outcome: _Outcome) -> None:
        now = self._attention.now()
        order = self._orders[key]
        if outcome.reached and key in self._remote:
            self._reached_at = now
        if outcome.trouble is None:
            self._forget(key)
        else:
            failed = self._failed.setdefault(order.service, {})
            failed[order.replica_id] = FailedProbe(now, outcome.reached)
        event = _event(order, outcome.trouble)
        if event is not None:
            self._events.put((order.service, event))
            self._wake()

    def _forget(self, key: Key) -> None:
        failed = self._failed.get(key[0])
        if failed is not None:
            failed.pop(key[1], None)
            if not failed:
                del self._failed[key[0]]

    async def _probe(self, order: ProbeOrder, session: aiohttp.ClientSession) -> _Outcome:
        """The trouble is told in a few words and without header values."""
        probe = order.probe
        headers = dict(probe.headers)
        data = None
        if probe.post_data is not None:
            data = probe.post_data.encode()
            headers.setdefault("Content-Type", "application/json")
        timeout = aiohttp.ClientTimeout(total=probe.timeout_s, sock_connect=probe.timeout_s / 2)
        url = order.endpoint.rstrip("/") + probe.path
        try:
            async with session.request(
                probe.method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if 0 < (response.content_length or 0) <= SMALL_BODY_BYTES:
                    with suppress(aiohttp.ClientError, TimeoutError):
                        await response.read()  # or its connection could not be used again
                if response.status == 200:
                    return _Outcome(None, reached=True)
                return _Outcome(f"probe answered {response.status}", reached=True)
        except aiohttp.ConnectionTimeoutError:
            return _Outcome(f"no connection within {probe.timeout_s / 2:g} s", reached=False)
        except TimeoutError:
            return _Outcome(f"probe took longer than {probe.timeout_s:g} s", reached=True)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reached = isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError))
            return _Outcome(f"probe failed: {type(error).__name__}", reached)


def _event(order: ProbeOrder, trouble: str | None) -> Event | None:
    if trouble is None:
        return None if order.passing else ProbePassed(order.replica_id)
    return ProbeFailed(order.replica_id, trouble) if order.passing else None


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
