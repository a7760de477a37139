"""Sends the prefixes that fill the caches of new replicas. What is sent, and when, is decided in `lb.core.warming`.

Its requests go past the queue and the bookings: they are no load that a policy counts or learns from, no demand that a
controller sees, and no API key pays for them. An engine that refuses their priority gets them without.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from lb.config.schema import Readiness, Table, Target
from lb.core.targets import Changes, Health, Key
from lb.core.warming import PromptSamples, Surroundings, WarmingEnd, WarmingStep, WarmUp, new_replicas
from lb.engines.kinds import EngineKind, Fetched
from lb.observe.metrics import Metrics
from lb.proxy.dispatch import Dispatch
from lb.stream.warming_request import has_priority, warming_body

Post = Callable[[Target, str, bytes, float], Awaitable[Fetched]]
"""POSTs a body to a path of a target within a time limit in seconds. Raises OSError or asyncio.TimeoutError."""

_log = logging.getLogger("lb.proxy.warmer")


class _Warming:
    """One target whose cache is being filled."""

    def __init__(self, target: Target, up: WarmUp) -> None:
        self.target = target
        self.up = up
        self.has_priority = True  # until the engine refuses it
        self.request: asyncio.Task[None] | None = None


class Warmer:
    """Fills the caches of the targets that join the table, each by one request at a time. Needs a running event loop."""

    def __init__(
        self,
        dispatch: Dispatch,
        samples: PromptSamples,
        metrics: Metrics,
        post: Post,
        stopping: Callable[[], bool],
    ) -> None:
        self._dispatch = dispatch
        self._registry = dispatch.registry
        self._clock = dispatch.runtime.clock
        self._table = dispatch.table
        self._samples = samples
        self._metrics = metrics
        self._post = post
        self._stopping = stopping
        self._new: dict[Key, None] = {}  # not ready yet
        self._warming: dict[Key, _Warming] = {}

    def applied(self, before: Table, changes: Changes) -> None:
        """Another table is in force in place of `before`."""
        table = self._table.table
        for target_id in new_replicas(before, table, changes.added):
            key = self._table.key(target_id)
            if key is not None and table.warming.seconds > 0.0:
                self._new[key] = None
        self.tick()

    def close(self) -> None:
        """Fill no more caches."""
        for key, warming in list(self._warming.items()):
            self._end(key, warming, WarmingEnd.STOPPED)

    def tick(self) -> None:
        """Begin, go on and end, as things are now. Called ten times a second."""
        if self._new:
            self._begin_ready()
        for key, warming in list(self._warming.items()):
            self._go_on(key, warming)

    # --- inside

    def _begin_ready(self) -> None:
        now, table = self._clock(), self._table
        targets = {key: target for key, target, _ in table.probe_list()}
        samples = self._samples
        models = samples.models() - {""}
        plans: dict[tuple[object, ...], list[WarmingStep]] = {}  # of replicas that are alike
        for key in list(self._new):
            target = targets.get(key)
            if target is not None and target.state is Readiness.UNHEALTHY:
                continue
            del self._new[key]
            if target is None or not self._around(key).others or self._stopping():
                continue
            foreign = frozenset(one for one in models if table.models.serves(key.id, one) is False)
            alike = target.zones, foreign
            if alike not in plans:
                plans[alike] = samples.steps(target.zones, foreign, now)
            steps = plans[alike]
            if steps:
                table.warm(key, True)
                self._warming[key] = _Warming(target, WarmUp(steps, now, table.table.warming.seconds))
                _log.info("warm target=%s prefixes=%d", key.id, len(steps))

    def _around(self, key: Key) -> Surroundings:
        now, table = self._clock(), self._table
        return Surroundings(
            ready=table.health(key, now) is Health.WARMING,
            others=any(health is Health.GOOD and one.id != key.id for one, health, _ in table.rows(now)),
            pressed=table.waiting(key) > 0 or self._registry.queued > 0,
            stopping=self._stopping() or table.table.warming.seconds <= 0.0,
        )

    def _go_on(self, key: Key, warming: _Warming) -> None:
        step = warming.up.next(self._around(key), self._clock())
        if isinstance(step, WarmingEnd):
            self._end(key, warming, step)
        elif step is not None:
            warming.request = asyncio.get_running_loop().create_task(self._send(key, warming, step))

    async def _send(self, key: Key, warming: _Warming, step: WarmingStep) -> None:
        succeeded = await self._prefilled(key, warming, step)
        warming.request = None
        warming.up.ended(succeeded)
        if succeeded:
            counts = self._metrics.counts
            counts.warmed_prefixes += 1
            counts.warmed_bytes += step.added
            self._table.cached(key, step.view(), self._dispatch.runtime.clock())
        if key in self._warming:
            self._go_on(key, warming)

    async def _prefilled(self, key: Key, warming: _Warming, step: WarmingStep) -> bool:
        sample, kind = step.sample, self._dispatch.kind_of(key)
        if sample.model and self._table.models.serves(key.id, sample.model) is False:
            return False
        if warming.has_priority and has_priority(kind):
            status = await self._posted(warming, step, kind)
            if status in (0, 200):
                return status == 200
            warming.has_priority = False
        return await self._posted(warming, step, EngineKind.UNKNOWN) == 200

    async def _posted(self, warming: _Warming, step: WarmingStep, kind: EngineKind) -> int:
        """Return the status of the response; 0 if there is none."""
        sample, left_s = step.sample, warming.up.until - self._clock()
        body = warming_body(sample.path, sample.body, step.length, kind)
        if body is None or left_s <= 0.0:
            return 0
        try:
            fetched = await self._post(warming.target, sample.path.decode("latin-1"), body, left_s)
        except (OSError, asyncio.TimeoutError):  # noqa: UP041 (not the same in 3.10)
            return 0
        return fetched.status

    def _end(self, key: Key, warming: _Warming, why: WarmingEnd) -> None:
        del self._warming[key]
        if warming.request is not None:
            warming.request.cancel()
        self._table.warm(key, False)
        took_s = self._clock() - warming.up.since
        counts = self._metrics.counts
        counts.warmups[why.value] += 1
        counts.warming_s += took_s
        _log.info(
            "warmed target=%s why=%s prefixes=%d of=%d seconds=%.1f",
            key.id,
            why.value,
            warming.up.done,
            warming.up.total,
            took_s,
        )
        self._registry.changed_soon()
