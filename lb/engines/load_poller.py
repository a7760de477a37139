"""Asking engines for their load, so that pushing by work and selective pushing know who has room.

A target is asked every `pushing.probe_s` while it has requests of ours (or requests are held), else every five
seconds, because others may send it work; never twice at a time. Targets are asked in turns and not all at once:
each has its own place in the interval. If pushing is neither nobody's load is wanted: then an engine is only
asked what it is, which continuing its streams depends on.

*One budget.* An agent makes at most PROBES_PER_S probes: where the targets would need more, all intervals are stretched
by the same factor. Once in `pushing.probe_s` all targets are looked at, to find which are due before the next time; in
between only those that are.

That is found out as soon as a target joins (see `lb.engines.kinds.detection`) and again after a while if it is none of
the engines known, or could not be told.

An engine that does not answer is not judged: that is the business of `lb.engines.health_checks`. What is known of its load goes
stale in the table; after half a minute without an answer it is unknown, and what the engine is, is asked anew.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Any, Protocol
from urllib.parse import urlsplit

from lb.config.schema import Readiness, Table, Target
from lb.core.admission import EngineLoad
from lb.core.targets import Key
from lb.engines.kinds import NO_RESPONSE, Adapter, EngineKind, Fetched, LoadQuery, detection

IDLE_PROBE_S = 5.0
DETECT_AGAIN_S = 60.0  # a server that is no engine we know
DETECT_RETRY_S = 1.0  # one that does not answer yet; doubling up to DETECT_AGAIN_S
FORGET_AFTER_S = 30.0
PROBES_PER_S = 1000.0
SHORTEST_TIMEOUT_S = 1.0
_LOOKS_PER_PROBE = 8
_SHORTEST_PAUSE_S = 0.005
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples spread evenly over an interval, however many there are

Fetch = Callable[[Target, str, float], Awaitable[Fetched]]
"""GET a path of a target within so many seconds. Raises OSError or asyncio.TimeoutError; bounds the body."""

_log = logging.getLogger("lb.engines.load_poller")


class Probed(Protocol):
    """What the prober needs of `lb.core.targets.TargetTable`."""

    @property
    def table(self) -> Table: ...

    def probe_list(self) -> Iterable[tuple[Key, Target, int]]:
        """Every target of the table, and how many requests of ours it has in flight."""
        ...

    def loaded(
        self, key: Key, load: EngineLoad | None, asked_at: float, now: float, every_s: float = 0.0
    ) -> bool:
        """An engine's answer (None: it tells nothing); True if a target may take a request now that could not. Busy
        targets are polled every `every_s`."""
        ...


@dataclass(slots=True)
class _Watch:
    """What is known of one target."""

    place: float  # in the interval, 0 to 1
    asked_at: float  # until it was asked anything: when it was first seen
    kind: EngineKind = EngineKind.UNKNOWN
    adapter: Adapter | None = None
    mute_since: float | None = None  # since when it has been asked for its load in vain
    failed: int = 0  # attempts in a row to find out what it is
    probe: asyncio.Task[None] | None = None


class LoadPoller:
    """One loop over the table; every probe is a task of its own, one per target at a time.

    `changed` is called when a target may take a request that it could not take before.
    """

    def __init__(
        self,
        table: Probed,
        fetch: Fetch,
        clock: Callable[[], float],
        changed: Callable[[], None],
        anybody_held: Callable[[], bool] = lambda: False,
    ) -> None:
        self._table = table
        self._fetch = fetch
        self._clock = clock
        self._changed = changed
        self._anybody_held = anybody_held
        self._watches: dict[Key, _Watch] = {}
        self._seen = 0
        self._review_at = -math.inf
        self._due: list[tuple[float, float, float, Key, Target, _Watch]] = []  # until then; a heap
        self._stretch = 1.0  # of all intervals, to keep within the budget
        self._usual = EngineKind.UNKNOWN  # what the last one was that could be told

    def kind(self, key: Key) -> EngineKind:
        """What the target is. One that has just joined is taken for what the others are: a stream that has waited for
        it must not be refused for the moment it takes to ask."""
        watch = self._watches.get(key)
        joining = watch is None or (watch.adapter is None and not watch.failed)
        return self._usual if joining or watch is None else watch.kind

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                pause_s = self.look()
                await asyncio.sleep(pause_s)
        finally:
            probes = [watch.probe for watch in self._watches.values() if watch.probe is not None]
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    def look(self) -> float:
        """Start the probes that are due; in how many seconds to look again."""
        now = self._clock()
        probe_s = self._table.table.pushing.probe_s
        if now >= self._review_at:
            self._review(now)
            self._review_at = now + probe_s
        selective = self._table.table.pushing.asks
        while self._due and self._due[0][0] <= now:
            _, place, interval_s, key, target, watch = heappop(self._due)
            if watch.probe is None:
                watch.asked_at = now
                self._start(key, watch, self._probe(key, target, watch, selective))
            due_at = max(_due_at(watch, interval_s), now + 0.5 * interval_s)
            if due_at < self._review_at:
                heappush(self._due, (due_at, place, interval_s, key, target, watch))
        next_at = self._due[0][0] if self._due else self._review_at
        shortest_s = max(probe_s / _LOOKS_PER_PROBE, _SHORTEST_PAUSE_S)
        return max(shortest_s, min(next_at, self._review_at) - now)

    # --- inside

    def _review(self, now: float) -> None:
        """Find out which targets are due before the next review."""
        pushing = self._table.table.pushing
        selective = pushing.asks
        held = selective and self._anybody_held()
        present: dict[Key, _Watch] = {}
        wanted: list[tuple[float, Key, Target, _Watch]] = []
        for key, target, in_flight in self._table.probe_list():
            watch = present[key] = self._watches.get(key) or self._new_watch(now)
            if target.state is Readiness.DRAINING:
                continue  # it gets nothing new
            busy = in_flight > 0 or held
            wanted.append((_interval_s(watch, selective, busy, pushing.probe_s), key, target, watch))
        for key, watch in self._watches.items():
            if key not in present and watch.probe is not None:
                watch.probe.cancel()
        self._watches = present
        self._stretch = max(1.0, sum(1.0 / interval_s for interval_s, _, _, _ in wanted) / PROBES_PER_S)
        until = now + pushing.probe_s
        self._due.clear()
        for interval_s, key, target, watch in wanted:
            if interval_s < math.inf:
                stretched_s = interval_s * self._stretch
                due_at = _due_at(watch, stretched_s)
                if due_at < until:
                    self._due.append((due_at, watch.place, stretched_s, key, target, watch))
        heapify(self._due)

    def _new_watch(self, now: float) -> _Watch:
        self._seen += 1
        return _Watch(place=self._seen * _GOLDEN % 1.0, asked_at=now)

    def _start(self, key: Key, watch: _Watch, probe: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            watch.probe = None
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("probe of target=%s failed", key.id, exc_info=error)

        watch.probe = asyncio.get_running_loop().create_task(probe)
        watch.probe.add_done_callback(ended)

    async def _probe(self, key: Key, target: Target, watch: _Watch, selective: bool) -> None:
        if watch.adapter is None or watch.adapter.ask is None:
            await self._find_out(key, target, watch)
        if selective and watch.adapter is not None:
            await self._read(key, target, watch, watch.adapter)

    async def _find_out(self, key: Key, target: Target, watch: _Watch) -> None:
        questions = detection()
        ask = next(questions)
        while True:
            fetched = await self._get(target, ask)
            try:
                ask = questions.send(fetched)
            except StopIteration as answer:
                adapter: Adapter | None = answer.value
                break
        if adapter is None:
            watch.failed += 1
            return
        if adapter.kind is not watch.kind:
            _log.info("engine target=%s kind=%s", key.id, adapter.kind.value)
        watch.kind, watch.adapter, watch.failed, watch.mute_since = adapter.kind, adapter, 0, None
        if adapter.kind is not EngineKind.UNKNOWN:
            self._usual = adapter.kind

    async def _read(self, key: Key, target: Target, watch: _Watch, adapter: Adapter) -> None:
        asked_at, load = self._clock(), None
        if adapter.ask is not None:
            load = adapter.read(await self._get(target, adapter.ask))
        now = self._clock()
        if load is not None:
            watch.mute_since = None
        elif adapter.ask is not None:
            if watch.mute_since is None:
                watch.mute_since = asked_at
            if now - watch.mute_since < FORGET_AFTER_S:
                return
            watch.adapter, watch.failed = None, 1
        every_s = self._stretch * self._table.table.pushing.probe_s
        if self._table.loaded(key, load, asked_at, now, every_s):
            self._changed()

    async def _get(self, target: Target, ask: LoadQuery) -> Fetched:
        if ask.port is not None:
            target = replace(target, url=_on_port(target.url, ask.port))
        timeout_s = max(10.0 * self._table.table.pushing.probe_s, SHORTEST_TIMEOUT_S)
        try:
            return await self._fetch(target, ask.path, timeout_s)
        except (OSError, asyncio.TimeoutError):  # noqa: UP041  (two classes in Python 3.10)
            return NO_RESPONSE


def _interval_s(watch: _Watch, selective: bool, busy: bool, probe_s: float) -> float:
    """How long to wait between two questions."""
    if watch.adapter is None:
        if not watch.failed:
            return probe_s
        return float(min(DETECT_AGAIN_S, DETECT_RETRY_S * 2.0 ** min(watch.failed - 1, 10)))
    if watch.adapter.ask is None:
        return DETECT_AGAIN_S
    if not selective:
        return math.inf
    return probe_s if busy else max(IDLE_PROBE_S, probe_s)


def _due_at(watch: _Watch, interval_s: float) -> float:
    """When half an interval will have passed since it was asked, and its place in the interval will have come."""
    # Without the hundredth, rounding would have a target that was asked in its place asked there again.
    intervals = math.floor(watch.asked_at / interval_s + watch.place + 0.01) + 1
    place_at = (intervals - watch.place) * interval_s
    return max(place_at, watch.asked_at + 0.5 * interval_s)


def _on_port(url: str, port: int) -> str:
    """The same host on another port, without a path."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
