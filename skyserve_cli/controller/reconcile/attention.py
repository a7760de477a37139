"""Whether this process has had the CPU to watch: a late event loop makes healthy replicas look dead.

A task beats on the loop four times a second. If a beat comes late, every measurement across the gap was made with a stopped
watch: a probe that "took longer than 5 s" may have had its response in the socket all that time.
"""

from __future__ import annotations

import asyncio

from skyserve_cli.controller.reconcile.clock import Clock, SteadyClock

BEAT_S = 0.25
VOID_AFTER_S = 1.0  # a beat that is later than this voids the probes that ran across it
LOST_AFTER_S = 5.0  # and with one that is later than this the watch begins again


class Attention:
    """The watch over one event loop. `steady` counts the time for which the host was suspended; the loop's own clock does not."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock, steady: Clock | None = None) -> None:
        self._loop = loop
        self._clock = clock
        self._steady: Clock = SteadyClock() if steady is None else steady
        self._beat_at = self._since = self._steady.now()
        self._late_at = float("-inf")  # of the loop
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._beat_at = self._steady.now()
        self._task = self._loop.create_task(self._run())

    @property
    def since(self) -> float:
        """The instant of `clock` from which the loop has not been late for long. Safe from any thread."""
        return self._clock.now() - (self._steady.now() - self._since)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def now(self) -> float:
        return self._clock.now()

    def at(self, instant: float) -> float:
        """Return the instant of `clock` for one of the loop. Safe from any thread."""
        return self._clock.now() - (self._loop.time() - instant)

    def was_lost(self, started: float) -> bool:
        """Return True if the loop was late at some time since `started`, an instant of the loop, or is now."""
        self._check()
        return self._late_at >= started

    def _check(self) -> None:
        now = self._steady.now()
        late_s = now - self._beat_at - BEAT_S
        if self._task is None or late_s <= VOID_AFTER_S:
            return
        self._late_at = self._loop.time()
        if late_s > LOST_AFTER_S:
            self._since = now

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._check()
            self._beat_at = self._steady.now()
