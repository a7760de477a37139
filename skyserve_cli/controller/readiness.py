"""Readiness probes: one small task per replica on the daemon's event loop.

A probe that failed while this process had no CPU is void (`attention`). Replicas that pass are probed over connections that
are kept, every tenth time over a new one, because a kept one is no evidence about new clients; all others over new ones.
Replicas that serve clients are probed less often (`served`), and so are loaded ones, whose probes wait behind requests: a probe
is work for them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import queue
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, Protocol
from urllib.parse import SplitResult, urljoin, urlsplit

from policies.health import FailedProbe
from policies.model import Event, ProbeFailed, ProbePassed
from skyserve_cli.controller.probe_connection import ProbeConnection, ProbeRequest, connect, probe_request
from skyserve_cli.controller.reconcile.attention import Attention
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.controller.reconcile.ports import ProbeOrder
from skyserve_cli.controller.reconcile.served_replicas import NEVER, ServedReplicas, next_probe_at
from skyserve_cli.spec.model import Probe

log = logging.getLogger(__name__)

#: A replica that is not serving is probed at least this often: each second of waiting is a second not served.
EAGER_INTERVAL_S = 1.0
MAX_IN_FLIGHT = 256
NEW_CONNECTION_EVERY = 10
_GOLDEN = 0.6180339887498949  # its multiples spread evenly over an interval, however many there are

Key = tuple[str, int]


class ProbeOutcome(NamedTuple):
    """Of one probe. `trouble` is None if it passed; `reached` is true if there was a connection, `timed_out` if the time was over."""

    trouble: str | None
    reached: bool
    timed_out: bool = False


class ReplicaConnection(Protocol):
    """To one replica."""

    async def probe(self, order: ProbeOrder) -> ProbeOutcome: ...

    def close(self) -> None: ...


class HttpProber:
    """Ready is HTTP 200 within the probe's time-out. Reports to the tick only what it does not know yet."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        attention: Attention | None = None,
        served: ServedReplicas | None = None,
        line: Callable[[ssl.SSLContext], ReplicaConnection] | None = None,
        authority: bytes | None = None,
    ) -> None:
        """`authority` is the certificate (DER) by which replicas with a `tls_name` are known, and by which alone."""
        self._loop = loop
        self._served = ServedReplicas() if served is None else served
        self._line: Callable[[ssl.SSLContext], ReplicaConnection] = ReplicaLine if line is None else line
        self._wake = wake
        self._attention = Attention(loop, SystemClock()) if attention is None else attention
        self._watched: tuple[ProbeOrder, ...] = ()
        self._orders: dict[Key, ProbeOrder] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._failed: dict[str, dict[int, FailedProbe]] = {}
        self._remote: set[Key] = set()  # replicas on other machines
        self._reached_at = float("-inf")
        self._events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
        self._in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._tls = ssl.create_default_context()
        self._own_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if authority is not None:
            self._own_tls.load_verify_locations(cadata=authority)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._apply(())
        await asyncio.gather(*tasks, return_exceptions=True)

    def watch(self, orders: Sequence[ProbeOrder]) -> None:
        watched = tuple(orders)
        if watched != self._watched:  # at most turns of a large fleet they are the very same objects
            self._watched = watched
            self._loop.call_soon_threadsafe(self._apply, watched)

    def drain(self) -> list[tuple[str, Event]]:
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def failed(self, service: str) -> Mapping[int, FailedProbe]:
        """Return the replicas of the service whose last valid probe failed. Safe from any thread."""
        failed = self._failed.get(service)
        return {} if failed is None else failed.copy()

    def reached_at(self) -> float | None:
        """Return when a replica on another machine last responded; None if there are none."""
        return self._reached_at if self._remote else None

    def _apply(self, orders: Sequence[ProbeOrder]) -> None:
        self._orders = {(order.service, order.replica_id): order for order in orders}
        for key in self._tasks.keys() - self._orders.keys():
            self._tasks.pop(key).cancel()
            self._forget(key)
            self._remote.discard(key)
        for key in self._orders.keys() - self._tasks.keys():
            if not _is_loopback(self._orders[key].endpoint):
                self._remote.add(key)
            self._tasks[key] = self._loop.create_task(self._probe_on(key))

    async def _probe_on(self, key: Key) -> None:
        order = self._orders[key]
        line = self._line(self._own_tls if order.tls_name else self._tls)
        if order.passing:  # a controller that has just started does not probe a whole fleet in one moment
            await asyncio.sleep(order.probe.interval_s * (order.replica_id * _GOLDEN % 1.0))
        try:
            while True:
                passed = timed_out = False
                try:
                    async with self._in_flight:
                        started = self._loop.time()
                        outcome = await line.probe(self._orders[key])
                    passed, timed_out = outcome.trouble is None, outcome.timed_out
                    if passed or not self._attention.was_lost(started):
                        self._record(key, outcome)
                except Exception:  # only a defect; the replica must not stay unprobed for it
                    log.exception("probing %s replica %d", *key)
                await self._pause(key, self._loop.time(), passed=passed, timed_out=timed_out)
        finally:
            line.close()

    async def _pause(self, key: Key, probed_at: float, *, passed: bool, timed_out: bool) -> None:
        order = self._orders[key]
        if not passed or not order.passing:
            await asyncio.sleep(min(order.probe.interval_s, EAGER_INTERVAL_S))
            if timed_out and self._orders[key].passing:  # loaded
                await asyncio.sleep(max(0.0, order.probe.interval_s - EAGER_INTERVAL_S))
            return
        while True:
            order = self._orders[key]
            served_at = self._served.last(*key) if order.counts_served and order.passing else NEVER
            left_s = next_probe_at(probed_at, served_at, order.probe.interval_s) - self._loop.time()
            if left_s <= 0.0:
                return
            await asyncio.sleep(left_s)

    def _record(self, key: Key, outcome: ProbeOutcome) -> None:
        now = self._attention.now()
        order = self._orders[key]
        if outcome.reached and key in self._remote:
            self._reached_at = now
        failed = self._failed.setdefault(order.service, {})
        before = failed.get(order.replica_id)
        if outcome.trouble is None:
            self._forget(key)
        else:
            first_at = now if before is None else before.since
            failed[order.replica_id] = FailedProbe(
                now, outcome.reached, outcome.timed_out, first_at, outcome.trouble
            )
        event = _event(order, outcome.trouble, was_failing=before is not None)
        if event is not None:
            self._events.put((order.service, event))
            self._wake()

    def _forget(self, key: Key) -> None:
        failed = self._failed.get(key[0])
        if failed is not None:
            failed.pop(key[1], None)
            if not failed:
                del self._failed[key[0]]


class ReplicaLine:
    """To one replica: the connection that is kept for its next probe."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls
        self._sent: tuple[str, Probe, ProbeRequest] | None = None  # the last request, and what it was made of
        self._kept: ProbeConnection | None = None
        self._uses = 0  # of the connections so far

    async def probe(self, order: ProbeOrder) -> ProbeOutcome:
        """The trouble is described in a few words and without header values."""
        timeout_s = order.probe.timeout_s
        connection: ProbeConnection | None = None
        is_new = True
        try:
            async with asyncio.timeout(timeout_s):
                request = self._request(order)
                if not order.passing or self._uses % NEW_CONNECTION_EVERY == 0:
                    self.close()
                self._uses += 1
                connection, self._kept = self._kept, None
                status, is_new, location = 0, connection is None, ""
                if connection is not None:
                    with suppress(OSError):  # it had gone stale
                        status = await connection.status_of(request.data)
                if not status:
                    connection, is_new = None, True
                    async with asyncio.timeout(timeout_s / 2):
                        connection = await connect(request, self._tls)
                    status = await connection.status_of(request.data)
                location = connection.location if connection is not None else ""
                if location:
                    status, location = await self._followed(order, status, location)
        except TimeoutError:
            if connection is None:
                return ProbeOutcome(
                    f"no connection within {timeout_s / 2:g} s", reached=False, timed_out=True
                )
            if not connection.status:
                # What has become of the host of an old connection only a new one can show.
                return ProbeOutcome(f"probe took longer than {timeout_s:g} s", reached=is_new, timed_out=True)
            status, location = connection.status, ""  # the rest of the body is late
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            return ProbeOutcome(f"probe failed: {why}", reached=connection is not None)
        finally:
            if connection is not None:
                if connection.reusable and connection.is_idle:
                    self._kept = connection
                else:
                    connection.close()
        return ProbeOutcome(None if status == 200 else described(status, location), reached=True)

    async def _followed(self, order: ProbeOrder, status: int, location: str) -> tuple[int, str]:
        """Follow a redirect of the replica to itself. Returns the last status, and where that leads. Raises OSError."""
        probe = order.probe
        for _ in range(MOST_REDIRECTS):
            following = redirected(order.endpoint, probe, status, location)
            if following is None:
                break
            probe = following
            request = probe_request(order.endpoint, probe, order.tls_name)
            connection = await connect(request, self._tls)
            try:
                status, location = await connection.status_of(request.data), connection.location
            finally:
                connection.close()
        return status, location

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _request(self, order: ProbeOrder) -> ProbeRequest:
        sent = self._sent
        if sent is None or sent[0] != order.endpoint or sent[1] != order.probe:
            request = probe_request(order.endpoint, order.probe, order.tls_name)
            if sent is not None and sent[0] != order.endpoint:
                self.close()
            self._sent = sent = (order.endpoint, order.probe, request)
        return sent[2]


def _event(order: ProbeOrder, trouble: str | None, *, was_failing: bool) -> Event | None:
    if trouble is None:
        return ProbePassed(order.replica_id) if was_failing or not order.passing else None
    return ProbeFailed(order.replica_id, trouble) if order.passing else None


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# Where a probe goes on if its response is a redirect. Pure.
#
# A server that adds a slash to its paths redirects the probe to itself; SkyPilot's probe, by its client library, follows. Another
# host is not followed: what is well there says nothing of the replica.

MOST_REDIRECTS = 3
_KEEPS_METHOD = (307, 308)
_BECOMES_GET = (301, 302, 303)
_MOST_SHOWN = 100  # characters


def redirected(endpoint: str, probe: Probe, status: int, location: str) -> Probe | None:
    """Return the probe that follows the redirect; None: the response is none, or leads to another host."""
    if status not in (*_KEEPS_METHOD, *_BECOMES_GET) or not location:
        return None
    base = endpoint.rstrip("/")
    to = urlsplit(urljoin(base + probe.path, location))
    at = urlsplit(base)
    if _origin(to) != _origin(at) or not to.path.startswith(at.path):
        return None
    path = to.path[len(at.path) :] + (f"?{to.query}" if to.query else "")
    return replace(probe, path=path or "/", post_data=probe.post_data if status in _KEEPS_METHOD else None)


def described(status: int, location: str) -> str:
    """Return what is wrong with a response that is not 200. A query, which may hold a secret, is left out."""
    if not location:
        return f"probe returned {status}"
    return f"probe returned {status}, to {location.partition('?')[0][:_MOST_SHOWN]}"


def _origin(url: SplitResult) -> tuple[str, str | None, int]:
    return url.scheme, url.hostname, url.port or (443 if url.scheme == "https" else 80)
