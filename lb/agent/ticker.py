"""One timer for all that an agent does by the clock.

Waking an event loop costs more than most of what is then done: tasks that sleep for themselves woke an idle agent 28 times a
second, which was most of the CPU time that it took. So all parts share ten ticks a second. One that needs to be called sooner
than at the next tick returns in how many seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

TICK_S = 0.1

Act = Callable[[], "float | None"]
"""What a part does when it is due. It may return in how many seconds to call it again, if that is before its next tick."""


@dataclass(slots=True, eq=False)
class _Part:
    name: str
    act: Act
    ticks: int  # from one call to the next
    due: int  # the tick of the next call
    sooner: asyncio.TimerHandle | None = None


class Ticker:
    """Calls its parts, each behind a barrier: one that raises is reported, and called again when it is due."""

    def __init__(
        self,
        clock: Callable[[], float],
        report: Callable[[str, Exception], None],
        late: Callable[[float], None] = lambda lag_s: None,
    ) -> None:
        """`late` is called at every tick with the seconds by which it was late, `report` with the part that raised, and the error."""
        self._clock = clock
        self._report = report
        self._late = late
        self._parts: list[_Part] = []
        self._tick = 0

    def add(self, name: str, act: Act, every_s: float = TICK_S) -> None:
        """Call `act` at once when `run` begins, and then every `every_s`, rounded to whole ticks."""
        self._parts.append(_Part(name, act, max(1, round(every_s / TICK_S)), 0))

    async def run(self) -> None:
        """Call the parts until cancelled."""
        loop = asyncio.get_running_loop()
        ended, timer = loop.create_future(), None

        def tick(due_at: float) -> None:
            nonlocal timer
            try:
                self._late(max(0.0, self._clock() - due_at))
                self._call_due(loop)
            finally:
                timer = loop.call_later(TICK_S, tick, self._clock() + TICK_S)

        try:
            tick(self._clock())
            await ended
        finally:
            if timer is not None:
                timer.cancel()
            for part in self._parts:
                if part.sooner is not None:
                    part.sooner.cancel()

    def _call_due(self, loop: asyncio.AbstractEventLoop) -> None:
        self._tick += 1
        for part in self._parts:
            if self._tick >= part.due:
                part.due = self._tick + part.ticks
                self._call(part, loop)

    def _call(self, part: _Part, loop: asyncio.AbstractEventLoop) -> None:
        try:
            pause_s = part.act()
        except Exception as error:  # noqa: BLE001 (the barrier: a defect in a part must not end the agent)
            self._report(part.name, error)
            return
        if pause_s is not None and pause_s < TICK_S and part.sooner is None:
            part.sooner = loop.call_later(pause_s, self._call_sooner, part, loop)

    def _call_sooner(self, part: _Part, loop: asyncio.AbstractEventLoop) -> None:
        part.sooner = None
        self._call(part, loop)
