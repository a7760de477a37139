"""Polling engines for their load, so that pushing by work and selective pushing know who has room.

A target is polled every `pushing.probe_s` while it has requests of ours (or requests are queued), else every five
seconds (where there are many less often: IDLE_PROBES_PER_S in all), because others may send it work; never twice at a time. Targets are polled in turns and not all at once:
each has its own place in the interval. If pushing is neither, no load is needed: then an engine is only
detected, which continuing its streams depends on.

*One budget.* An agent makes at most PROBES_PER_S probes: where the targets would need more, all intervals are stretched
by the same factor.

*What it costs.* Every target waits in one heap for its next probe, and is given its next instant when a probe is over
and when it becomes busy. So the work grows with the number of probes and not with that of targets. All targets are
gone through only when the table has been replaced, and when requests begin or cease to be queued.

That is found out as soon as a target joins (see `lb.engines.kinds.detection`) and again after a while if it is none of
the engines known, or could not be recognized.

An engine that does not respond is not ejected here: `lb.engines.health_checks` does that. Knowledge of its load goes
stale in the table; after half a minute without a response it is unknown, and the engine is detected again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from urllib.parse import urlsplit

from lb.config.schema import Readiness, Target
from lb.core.targets import Key, TargetTable
from lb.engines.kinds import NO_RESPONSE, Adapter, EngineKind, Fetched, LoadQuery, detection
from policies.backoff import delay_s

GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples spread evenly over an interval, however many there are


@dataclass(slots=True, eq=False)
class PolledLoad:
    """State of one target."""

    key: Key
    target: Target
    place: float  # in the interval, 0 to 1
    polled_at: float  # until it was polled: when it was first seen
    kind: EngineKind = EngineKind.UNKNOWN
    adapter: Adapter | None = None
    mute_since: float | None = None  # since when it has been polled for its load in vain
    failed: int = 0  # attempts in a row to find out what it is
    probe: asyncio.Task[None] | None = None
    interval_s: float = math.inf
    due_at: float = math.inf  # infinite while a probe is under way


def due_at_of(watch: PolledLoad, interval_s: float) -> float:
    """Return when its place in the interval will come next, but for half an interval since it was polled."""
    return place_after(watch.polled_at + 0.5 * interval_s, watch.place, interval_s)


def place_after(instant: float, place: float, interval_s: float) -> float:
    # Without the hundredth, rounding would have a target that was polled in its place polled there again.
    intervals = math.floor(instant / interval_s + place + 0.01) + 1
    return (intervals - place) * interval_s


IDLE_PROBE_S = 5.0
IDLE_PROBES_PER_S = 50.0  # each is a connection, and what it brings is good for a second or so
DETECT_AGAIN_S = 60.0  # a server that is no engine we know
DETECT_RETRY_S = 1.0  # one that does not respond yet; doubling up to DETECT_AGAIN_S
FORGET_AFTER_S = 30.0
QUEUED_FOR_S = (
    1.0  # requests count as queued for so long, since they are queued and let in many times a second
)
PROBES_PER_S = 1000.0
RELAX_EVERY_S = 1.0  # at most: to schedule all targets again because fewer have to share the budget
SHORTEST_TIMEOUT_S = 1.0
_LOOKS_PER_PROBE = 8
_BURST = 2.0  # how far one look may exceed its share of the budget
_SHORTEST_PAUSE_S = 0.005

Fetch = Callable[[Target, str, float], Awaitable[Fetched]]
"""GETs a path of a target within a time limit in seconds. Raises OSError or asyncio.TimeoutError; bounds the body."""

_log = logging.getLogger("lb.engines.load_poller")


class LoadPoller:
    """Goes over the table; every probe is a task of its own, one per target at a time.

    `changed` is called when a target may take a request that it could not take before. `usual_elsewhere` returns what the
    engines of other regions are.
    """

    def __init__(
        self,
        table: TargetTable,
        fetch: Fetch,
        clock: Callable[[], float],
        changed: Callable[[], None],
        has_queued: Callable[[], bool] = lambda: False,
        usual_elsewhere: Callable[[], EngineKind] = lambda: EngineKind.UNKNOWN,
    ) -> None:
        self._table = table
        self._fetch = fetch
        self._clock = clock
        self._changed = changed
        self._has_queued = has_queued
        self._watches: dict[Key, PolledLoad] = {}
        self._seen = 0
        self._reviewed = (-1, False)  # the table, and whether requests are queued
        self._queued_until = -math.inf
        # A heap; a row whose watch has another `due_at` is void.
        self._due: list[tuple[float, float, PolledLoad]] = []
        self._intervals: Counter[float] = Counter()  # how many watches have each
        self._must_share = False  # the budget again: an interval has changed, or all may have shorter ones
        self._stretch = 1.0  # of all intervals, to keep within the budget
        self._longest_stretch = 1.0  # by which a target may still be scheduled
        self._relaxed_at = -math.inf
        self._usual = EngineKind.UNKNOWN  # the last one that was recognized
        self._usual_elsewhere = usual_elsewhere

    def kind(self, key: Key) -> EngineKind:
        """Return what the target is.

        One that has just joined is taken for what the others are, here or in other regions: a stream that has waited for it
        must not be refused for the moment it takes to poll.
        """
        watch = self._watches.get(key)
        if watch is None or (watch.adapter is None and not watch.failed):
            return self._usual if self._usual is not EngineKind.UNKNOWN else self._usual_elsewhere()
        return watch.kind

    def usual_kind(self) -> str:
        """Return the kind of the engines here."""
        return self._usual.value

    async def close(self) -> None:
        """Stop the probes that are under way."""
        probes = [watch.probe for watch in self._watches.values() if watch.probe is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    def poll_due(self) -> float:
        """Start the probes that are due. Returns after how many seconds to call it again, at the latest."""
        now = self._clock()
        pushing = self._table.table.pushing
        if self._has_queued():
            self._queued_until = now + QUEUED_FOR_S
        reviewed = self._table.replaced, self._queued_lately(now)
        if reviewed != self._reviewed:
            self._reviewed = reviewed
            self._review(now)
        busy = [self._watches[key] for key in self._table.newly_busy() if key in self._watches]
        if busy or self._must_share:
            self._hurry(busy, now)
        shortest_s = max(pushing.probe_s / _LOOKS_PER_PROBE, _SHORTEST_PAUSE_S)
        if self._due and self._due[0][0] <= now:
            self._start_due(math.ceil(_BURST * PROBES_PER_S * shortest_s), now)
        next_at = self._due[0][0] if self._due else math.inf
        return max(shortest_s, min(next_at - now, pushing.probe_s))

    # --- inside

    def _start_due(self, left: int, now: float) -> None:
        """Start the probes that are due, but no more than `left`."""
        is_polled = self._table.table.pushing.is_polled
        while left and self._due and self._due[0][0] <= now:
            due_at, _, watch = heappop(self._due)
            if watch.due_at != due_at:
                continue
            self._count(watch, now)
            if self._schedule(watch) <= now:
                watch.due_at = math.inf
                watch.polled_at = now
                left -= 1
                self._start(watch, is_polled)

    def _queued_lately(self, now: float) -> bool:
        return self._table.table.pushing.is_polled and now < self._queued_until

    def _review(self, now: float) -> None:
        """Go through all targets: any may have joined, left or changed, and all intervals."""
        before = self._watches
        self._watches = {}
        self._due.clear()
        self._intervals.clear()
        for key, target, _ in self._table.probe_list():
            watch = before.pop(key, None) or self._new_watch(key, target, now)
            self._watches[key] = watch
            watch.target = target
            if watch.due_at < math.inf:
                self._due.append((watch.due_at, watch.place, watch))
            self._intervals[watch.interval_s] += 1
        heapify(self._due)
        for watch in before.values():
            if watch.probe is not None:
                watch.probe.cancel()
        self._hurry(list(self._watches.values()), now)

    def _hurry(self, watches: list[PolledLoad], now: float) -> None:
        """These targets may have other intervals now."""
        late = [watch for watch in watches if self._count(watch, now)]
        self._share_budget()
        self._longest_stretch = max(self._longest_stretch, self._stretch)
        self._must_share = self._longest_stretch > 2.0 * self._stretch
        if self._must_share and now >= self._relaxed_at + RELAX_EVERY_S:
            self._longest_stretch, self._relaxed_at = self._stretch, now
            late = list(self._watches.values())
        for watch in late:
            if self._schedule(watch) < now:  # not all of them at once
                self._put(watch, place_after(now, watch.place, watch.interval_s * self._stretch))

    def _new_watch(self, key: Key, target: Target, now: float) -> PolledLoad:
        self._seen += 1
        return PolledLoad(key, target, place=self._seen * GOLDEN % 1.0, polled_at=now)

    def _share_budget(self) -> None:
        probes_per_s = sum(many / interval_s for interval_s, many in self._intervals.items())
        self._stretch = max(1.0, probes_per_s / PROBES_PER_S)

    def _count(self, watch: PolledLoad, now: float) -> bool:
        """Find out the interval of a target as things are now. Returns True if it has changed."""
        interval_s = self._interval_s(watch, now)
        if interval_s == watch.interval_s:
            return False
        self._intervals[watch.interval_s] -= 1
        self._intervals[interval_s] += 1
        watch.interval_s = interval_s
        self._must_share = True
        return True

    def _schedule(self, watch: PolledLoad) -> float:
        """Return when the target is due for its next probe; infinite if one is under way."""
        due_at = math.inf
        if watch.probe is None and watch.interval_s < math.inf:
            due_at = due_at_of(watch, watch.interval_s * self._stretch)
        self._put(watch, due_at)
        return due_at

    def _put(self, watch: PolledLoad, due_at: float) -> None:
        if due_at < math.inf and due_at != watch.due_at:
            heappush(self._due, (due_at, watch.place, watch))
        watch.due_at = due_at

    def _interval_s(self, watch: PolledLoad, now: float) -> float:
        """Return how long to wait between two probes."""
        pushing = self._table.table.pushing
        if watch.target.state is Readiness.DRAINING:
            return math.inf  # it gets nothing new
        if watch.adapter is None:
            if not watch.failed:
                return pushing.probe_s
            return delay_s(watch.failed, DETECT_RETRY_S, DETECT_AGAIN_S)
        if watch.adapter.query is None:
            return DETECT_AGAIN_S
        if not pushing.is_polled:
            return math.inf
        busy = self._queued_lately(now) or self._table.is_busy(watch.key)
        if busy:
            return pushing.probe_s
        return max(IDLE_PROBE_S, pushing.probe_s, len(self._watches) / IDLE_PROBES_PER_S)

    def _start(self, watch: PolledLoad, selective: bool) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            watch.probe = None
            if self._watches.get(watch.key) is watch:
                self._count(watch, self._clock())
                self._schedule(watch)
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("probe of target=%s failed", watch.key.id, exc_info=error)

        watch.probe = asyncio.get_running_loop().create_task(self._probe(watch, selective))
        watch.probe.add_done_callback(ended)

    async def _probe(self, watch: PolledLoad, selective: bool) -> None:
        if watch.adapter is None or watch.adapter.query is None:
            await self._detect_kind(watch)
        if selective and watch.adapter is not None:
            await self._read(watch, watch.adapter)

    async def _detect_kind(self, watch: PolledLoad) -> None:
        questions = detection()
        query = next(questions)
        while True:
            fetched = await self._get(watch.target, query)
            try:
                query = questions.send(fetched)
            except StopIteration as outcome:
                adapter: Adapter | None = outcome.value
                break
        if adapter is None:
            watch.failed += 1
            return
        if adapter.kind is not watch.kind:
            _log.info("engine target=%s kind=%s", watch.key.id, adapter.kind.value)
        watch.kind, watch.adapter, watch.failed, watch.mute_since = adapter.kind, adapter, 0, None
        if adapter.kind is not EngineKind.UNKNOWN:
            self._usual = adapter.kind

    async def _read(self, watch: PolledLoad, adapter: Adapter) -> None:
        polled_at, load = self._clock(), None
        if adapter.query is not None:
            load = adapter.read(await self._get(watch.target, adapter.query))
        now = self._clock()
        if load is not None:
            watch.mute_since = None
        elif adapter.query is not None:
            if watch.mute_since is None:
                watch.mute_since = polled_at
            if now - watch.mute_since < FORGET_AFTER_S:
                return
            watch.adapter, watch.failed = None, 1
        every_s = self._stretch * self._table.table.pushing.probe_s
        if self._table.loaded(watch.key, load, polled_at, now, every_s):
            self._changed()

    async def _get(self, target: Target, query: LoadQuery) -> Fetched:
        if query.port is not None:
            target = replace(target, url=_on_port(target.url, query.port))
        timeout_s = max(10.0 * self._table.table.pushing.probe_s, SHORTEST_TIMEOUT_S)
        try:
            return await self._fetch(target, query.path, timeout_s)
        except (OSError, asyncio.TimeoutError):  # noqa: UP041  (two classes in Python 3.10)
            return NO_RESPONSE


def _on_port(url: str, port: int) -> str:
    """Return the same host on another port, without a path."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
