"""Health checks: probe targets only when there is a reason to.

*Frozen targets, and vanished ones.* A stopped process still accepts connections, and a machine that is taken away closes
none: its requests wait for ever, and nothing fails. A target that owes a response and has sent no byte to
anyone for `suspect_after_s` is under suspicion and is probed. If it responds, it is slow but alive, and is
left alone until it has been silent as long again. So is one that sends a byte to some client while its probe waits: it works, and has
no time for probes. If two probes fail, it is ejected, its waiting requests go elsewhere, and
its streams are continued there (`lb.proxy.registry`). Healthy targets are not probed; readiness is the controller's business.

*Targets that the controller cannot reach.* It may be the controller that is cut off. Those that its table calls unhealthy
are probed every few seconds, and the report to the controller (`TargetStats.heard_s`) has the time since each last sent a byte.

*Ejected targets.* Shortly before the trial of an ejected target is due it is probed, so that no user's request
is spent on finding out that it is still dead; while requests are queued, it is probed once a second, so that they
wait no longer than they must.

Without a health path only a TCP connect can be tried. That finds hosts and processes that are gone, not frozen
ones; against those only the time to first byte helps then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from lb.config.schema import Readiness, Table, Target
from lb.core.targets import Health, Key, TargetTable
from lb.observe.metrics import Metrics

LOOK_EVERY_S = 0.2
PROBES_BEFORE_EJECTION = 2
PROBE_EJECTED_EVERY_S = 1.0
PROBE_UNHEALTHY_EVERY_S = 5.0
UNHEALTHY_AT_ONCE = 20  # probed in one look: a hundred a second, however many there are
SUM_UP_EVERY_S = 60.0
FROZEN_EJECTION_S = 5.0  # at least: a probe of a frozen target takes its whole timeout

Alive = Callable[[Target, float], Awaitable[bool]]
"""Returns whether a target responds within a time limit in seconds. Never raises."""

_log = logging.getLogger("lb.engines.health_checks")


class HealthChecker:
    """Looks at the table every LOOK_EVERY_S; every probe is a task of its own, one per target at a time."""

    def __init__(
        self,
        table: TargetTable,
        alive: Alive,
        metrics: Metrics,
        clock: Callable[[], float],
        changed: Callable[[], None],
        has_queued: Callable[[], bool],
    ) -> None:
        self._table = table
        self._alive = alive
        self._metrics = metrics
        self._clock = clock
        self._changed = changed
        self._has_queued = has_queued
        self._probed_at: dict[Key, float] = {}  # of ejected targets
        self._probes: dict[Key, asyncio.Task[None]] = {}
        self._still_out: dict[
            str, int
        ] = {}  # failed probes by the ids of ejected targets, since the last summary
        self._summed_at = clock()
        self._unhealthy: deque[Target] = deque()  # those probed longest ago first
        self._unhealthy_of: Table | None = None  # the table that they were read from
        self._unhealthy_at = clock()

    def close(self) -> None:
        """Stop the probes that are under way."""
        for probe in self._probes.values():
            probe.cancel()

    def check_silent(self) -> None:
        """Start the probes that are due now."""
        now = self._clock()
        self._sum_up(now)
        limits = self._table.table.limits
        # Not less than the gap between two probes, or an ejection could run out between them.
        soon_s = max(limits.probe_timeout_s, PROBE_EJECTED_EVERY_S) + LOOK_EVERY_S
        ejected = self._table.ejected(now)
        self._probed_at = {key: self._probed_at[key] for key, _, _ in ejected if key in self._probed_at}
        for key, target, left_s in ejected:
            # Held requests have tried this target: if its ejection ran out unprobed, no other request may come to try it.
            due = 0.0 < left_s <= soon_s or self._has_queued()
            if due and now - self._probed_at.get(key, now - PROBE_EJECTED_EVERY_S) >= PROBE_EJECTED_EVERY_S:
                self._probed_at[key] = now
                self._start(key, self._probe_ejected(key, target, lengthen=left_s <= soon_s))
        for key, target in self._table.suspects(now, limits.suspect_after_s):
            self._start(key, self._probe_suspect(key, target))
        self._check_unhealthy(now)

    def _check_unhealthy(self, now: float) -> None:
        table = self._table.table
        if table is not self._unhealthy_of:
            self._unhealthy_of = table
            self._unhealthy = deque(one for one in table.targets if one.state is Readiness.UNHEALTHY)
        # As many of them as are due after this time, so that each has its turn every PROBE_UNHEALTHY_EVERY_S.
        due = len(self._unhealthy) * (now - self._unhealthy_at) / PROBE_UNHEALTHY_EVERY_S
        count = min(int(due), UNHEALTHY_AT_ONCE)
        if count or not self._unhealthy:
            self._unhealthy_at = now
        for _ in range(count):
            self._unhealthy.rotate(-1)
            target = self._unhealthy[-1]
            key = self._table.key(target.id)
            if key is not None:
                self._start(key, self._probe_unhealthy(key, target))

    def _start(self, key: Key, probe: Coroutine[Any, Any, None]) -> None:
        if key in self._probes:
            probe.close()
            return
        task = asyncio.get_running_loop().create_task(probe)
        self._probes[key] = task
        task.add_done_callback(lambda _: self._probes.pop(key, None))

    async def _probe_suspect(self, key: Key, target: Target) -> None:
        timeout_s, began_at = self._table.table.limits.probe_timeout_s, self._clock()
        for _ in range(PROBES_BEFORE_EJECTION):
            if await self._alive(target, timeout_s):
                self._table.received_from(key, self._clock())
                return
            entry = self._table.entry(key.id)
            if entry is not None and entry.received_at > began_at:
                return
        self._eject(key, target, "silent, and the probe failed")

    async def _probe_unhealthy(self, key: Key, target: Target) -> None:
        if await self._alive(target, self._table.table.limits.probe_timeout_s):
            self._table.received_from(key, self._clock())

    async def _probe_ejected(self, key: Key, target: Target, lengthen: bool) -> None:
        if await self._alive(target, self._table.table.limits.probe_timeout_s):
            if self._table.renew(key):
                self._changed()
        elif lengthen:
            self._eject(key, target, "the probe failed again")

    def _eject(self, key: Key, target: Target, why: str) -> None:
        now = self._clock()
        known = self._table.health(key, now) is Health.EJECTED
        if self._table.eject(key, now, FROZEN_EJECTION_S):
            self._metrics.of(target).ejections += 1
            if known:
                self._still_out[key.id] = self._still_out.get(key.id, 0) + 1
            else:
                _log.warning("eject target=%s why=%r", key.id, why)
            self._changed()

    def _sum_up(self, now: float) -> None:
        """Once a minute one line for all targets that stay out: a hundred lost replicas must not be a log of their own."""
        if now - self._summed_at < SUM_UP_EVERY_S:
            return
        self._summed_at = now
        if self._still_out:
            some = ", ".join(sorted(self._still_out)[:3])
            _log.warning(
                "still out targets=%d probes_failed=%d such_as=%r",
                len(self._still_out),
                sum(self._still_out.values()),
                some,
            )
            self._still_out.clear()
