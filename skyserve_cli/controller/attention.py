"""Whether this process has had the CPU to watch: a late event loop makes healthy replicas look dead.

A beat on the loop four times a second. If one comes late, whatever ran across the gap has been measured with a stopped
watch: a probe that "took longer than 5 s" may have had its response in the socket all that time.
"""

from __future__ import annotations

import asyncio

from skyserve_cli.controller.clock import Clock

BEAT_S = 0.25
VOID_AFTER_S = 1.0  # a beat that is so late voids the probes that ran across it
LOST_AFTER_S = 5.0  # and one that is so late begins the watch again


class Attention:
    """Of one event loop. `since` may be read from any thread; it is an instant of `clock`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._beat_at = loop.time()
        self._late_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self.since = clock.now()

    def start(self) -> None:
        self._beat_at = self._loop.time()
        self._task = self._loop.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def now(self) -> float:
        return self._clock.now()

    def was_lost(self, begun: float) -> bool:
        """Returns True if the loop was late at some time since `begun`, an instant of the loop, or is now."""
        self._look()
        return self._late_at >= begun

    def _look(self) -> None:
        now = self._loop.time()
        late_s = now - self._beat_at - BEAT_S
        if self._task is None or late_s <= VOID_AFTER_S:
            return
        self._late_at = now
        if late_s > LOST_AFTER_S:
            self.since = self._clock.now()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._look()
            self._beat_at = self._loop.time()
