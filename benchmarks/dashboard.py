"""What the page costs the controller: its readers, and clients of the API.

    python -m benchmarks.dashboard [--replicas 1000] [--services 50] [--readers 50] [--seconds 20] [--clients 200]

The controller is that of `benchmarks.daemon_cpu`: everything but the cloud is the product. A reader does what the page in a browser
does: it enters with a code, follows the stream of changes, and after each one requests what the page of all services, or of one
service, shows, one refresh at a time. One replica per second is terminated, so that there are changes. It runs in a network
namespace of its own, so this needs root.

Prints the controller's CPU per reader and second beyond that without readers, bytes per change and reader, the memory of the
controller; then, for `--clients` clients of /v1/services, how late ticks were and how many load balancers were restarted. Exit
code 1 if a tick was later than LATE_MS or an agent was restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import aiohttp

from benchmarks.daemon_cpu import TICK_S, Bench, ask
from skyserve_cli.controller.api.client import RefusedError

_INSIDE = "SKYSERVE_BENCH_INSIDE"
LATE_MS = 100.0
LEAST_PAUSE_S = 1.0  # between two refreshes of a page (`static/app.js`)


class Read(NamedTuple):
    """What one reader received: changes, and bytes of the stream and of responses."""

    changes: int
    streamed: int
    received: int
    refreshes: int


class Reader:
    """A page in a browser. `shows` returns the paths that a refresh requests, at an instant in UNIX seconds."""

    def __init__(self, shows: Callable[[float], list[str]]) -> None:
        self._shows = shows
        self._base = ""
        self._tags: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._counts = [0, 0, 0, 0]
        self._session = aiohttp.ClientSession(
            cookie_jar=aiohttp.CookieJar(unsafe=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=60.0),
            auto_decompress=False,
        )

    async def enter(self, url: str) -> None:
        """Begin a session with the code in an address of the page."""
        self._base, code = url.split("/#")
        headers = {"Sec-Fetch-Site": "same-origin"}
        async with self._session.post(
            f"{self._base}/session", json={"code": code}, headers=headers
        ) as entered:
            entered.raise_for_status()

    async def read(self, seconds: float) -> Read:
        """Read for a time, and close the page."""
        parts = [asyncio.create_task(part(self._session)) for part in (self._follow, self._refresh)]
        done, pending = await asyncio.wait(parts, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for part in pending:
            part.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self._session.close()
        for part in done:
            part.result()
        return Read(*self._counts)

    async def _follow(self, session: aiohttp.ClientSession) -> None:
        async with session.get(f"{self._base}/v1/stream") as stream:
            stream.raise_for_status()
            async for line in stream.content:
                self._counts[1] += len(line)
                if line.startswith(b"data:"):
                    self._counts[0] += 1
                    self._changed.set()
        raise ConnectionError("the stream has ended")

    async def _refresh(self, session: aiohttp.ClientSession) -> None:
        while True:
            self._changed.clear()
            self._counts[3] += 1
            first, *others = self._shows(time.time())
            await self._get(session, first)
            await asyncio.gather(*(self._get(session, path) for path in others))
            await asyncio.sleep(LEAST_PAUSE_S)
            await self._changed.wait()

    async def _get(self, session: aiohttp.ClientSession, path: str) -> None:
        headers = {"If-None-Match": self._tags[path]} if path in self._tags else {}
        async with session.get(self._base + path, headers=headers) as response:
            body = await response.read()
            if response.status not in (200, 304):
                raise ValueError(f"{path}: {response.status} {body[:200]!r}")
            self._counts[2] += len(body)
            if response.status == 200 and "ETag" in response.headers:
                self._tags[path] = response.headers["ETag"]


def fleet(now: float) -> list[str]:
    """Return what `static/pages/fleet.js` requests."""
    return ["/v1/fleet"]


def page_of(name: str) -> Callable[[float], list[str]]:
    """Return what `static/pages/service.js` requests."""
    path = f"/v1/services/{name}"

    def shows(now: float) -> list[str]:
        since = f"since={now - 7200.0:.3f}"
        parts = [f"{path}/{part}?{since}" for part in ("history", "report", "series")]
        return [path, *parts, f"/v1/events?service={name}&newest=1&limit=30"]

    return shows


class Measured(NamedTuple):
    """Of one time: CPU and wall-clock seconds of the controller, and what readers received."""

    cpu_s: float
    took_s: float
    reads: list[Read]


async def measure(bench: Bench, readers: Iterable[Callable[[float], list[str]]], seconds: float) -> Measured:
    """Run readers for a time in which one replica per second is terminated."""
    pages = [Reader(shows) for shows in readers]
    for page in pages:  # one after the other: of many codes only the last ones work
        await page.enter((await asyncio.to_thread(bench.client.dashboard, None))["url"])
    stopping = asyncio.Event()
    changes = asyncio.create_task(_change(bench, stopping))
    started, used = time.monotonic(), bench.cpu_s()
    reads = list(await asyncio.gather(*(page.read(seconds) for page in pages)))
    if not pages:
        await asyncio.sleep(seconds)
    found = Measured(bench.cpu_s() - used, time.monotonic() - started, reads)
    stopping.set()
    await changes
    return found


async def _change(bench: Bench, stopping: asyncio.Event) -> None:
    for number in itertools.count():
        if stopping.is_set():
            return
        name = f"s{number % bench.services}"
        views = await asyncio.to_thread(bench.client.services)
        ready = [
            r["id"]
            for view in views
            if view["name"] == name
            for r in view["replicas"]
            if r["state"] == "READY"
        ]
        if ready:
            try:
                await asyncio.to_thread(bench.client.kill, name, ready[0])
            except RefusedError:
                continue
        await asyncio.sleep(1.0)


def sentence(what: str, found: Measured, alone: Measured, rss: float) -> str:
    """Return a line of the report."""
    readers = len(found.reads)
    beyond_s = found.cpu_s / found.took_s - alone.cpu_s / alone.took_s
    changes = sum(read.changes for read in found.reads)
    refreshes = sum(read.refreshes for read in found.reads)
    streamed, received = (
        sum(read.streamed for read in found.reads),
        sum(read.received for read in found.reads),
    )
    return (
        f"{readers} readers of {what}: {1000 * beyond_s / readers:.2f} ms of CPU per reader and second beyond "
        f"{100 * alone.cpu_s / alone.took_s:.0f} % of a core without; {changes / readers:.0f} changes each, {streamed / changes:.0f} bytes of "
        f"the stream and {received / changes:.0f} of responses per change, {received / refreshes / 1024:.1f} KiB per refresh; RSS {rss:.0f} MiB"
    )


def restarts(bench: Bench) -> int:
    return sum(view["load_balancer"]["restarts"] for view in bench.client.services())


def latest_ms(lateness: str) -> float:
    """Return how late the latest tick was, of `Bench.lateness`."""
    found = re.search(r"at most (\d+) ms late", lateness)
    if found is None:
        raise SystemExit(f"no tick: {lateness}")
    return float(found[1])


def run(given: argparse.Namespace, bench: Bench) -> bool:
    """Print the report; return whether the bounds hold."""

    def rss() -> float:
        return float(bench.daemon.memory_info().rss) / 2**20

    bench.up()
    bench.all_ready()
    time.sleep(10.0)
    print(
        f"{given.replicas} replicas in {given.services} services are ready; RSS {rss():.0f} MiB", flush=True
    )
    alone = asyncio.run(measure(bench, [], given.seconds))
    pages = [page_of(f"s{number % given.services}") for number in range(given.readers)]
    for what, readers in (("all services", [fleet] * given.readers), ("one service", pages)):
        found = asyncio.run(measure(bench, readers, given.seconds))
        print(sentence(what, found, alone, rss()), flush=True)
    before, started = restarts(bench), time.monotonic()
    took_s, received = asyncio.run(ask(bench.home, given.clients))
    time.sleep(2 * TICK_S)
    late, restarted = bench.lateness(started), restarts(bench) - before
    rate = 5 * given.clients / took_s
    print(
        f"{given.clients} clients of /v1/services: {rate:.0f} responses/s, {received / 2**20:.0f} MiB; {late}; "
        f"{restarted} agents restarted; RSS {rss():.0f} MiB"
    )
    return latest_ms(late) <= LATE_MS and restarted == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="What the page costs the controller.")
    parser.add_argument("--services", type=int, default=50)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--readers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=200)
    given = parser.parse_args()
    if _INSIDE not in os.environ:
        os.environ[_INSIDE] = "1"
        inside = ["-m", "benchmarks.dashboard", *sys.argv[1:]]
        script = f'ip link set lo up && exec "{sys.executable}" "$@"'
        os.execvp("unshare", ["unshare", "-n", "--", "sh", "-c", script, "sh", *inside])  # noqa: S606
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with Bench(given.services, given.replicas, 5.0, on_half_a_core=False, serving=False) as bench:
        return 0 if run(given, bench) else 1


if __name__ == "__main__":
    sys.exit(main())
