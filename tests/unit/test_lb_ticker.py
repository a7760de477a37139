"""The one timer of an agent: when parts are called, what a part that raises does to the others, and to itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from lb.agent.ticker import TICK_S, Ticker
from tests.integration.lb_wires import run


class _Watched:
    """A ticker whose parts note when they were called."""

    def __init__(self) -> None:
        self.clock = asyncio.get_running_loop().time
        self.began = self.clock()
        self.calls: dict[str, list[float]] = {}
        self.faults: Counter[str] = Counter()
        self.lags: list[float] = []
        self.ticker = Ticker(self.clock, self._report, self.lags.append)

    def _report(self, name: str, error: Exception) -> None:
        self.faults[name] += 1

    def add(self, name: str, act: Callable[[], float | None] = lambda: None, every_s: float = TICK_S) -> None:
        def noted() -> float | None:
            self.calls.setdefault(name, []).append(round(self.clock() - self.began, 3))
            return act()

        self.ticker.add(name, noted, every_s)

    async def watch(self, seconds: float) -> None:
        running = asyncio.get_running_loop().create_task(self.ticker.run())
        await asyncio.sleep(seconds)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_parts_are_called_at_once_and_then_in_the_same_ticks() -> None:
    async def story() -> None:
        w = _Watched()
        w.add("often")
        w.add("seldom", every_s=0.5)
        await w.watch(1.05)
        assert w.calls["often"] == [round(TICK_S * tick, 3) for tick in range(11)]
        assert w.calls["seldom"] == [0.0, 0.5, 1.0]

    run(story())


def test_a_part_that_wants_to_be_called_sooner_is_and_the_others_are_not() -> None:
    async def story() -> None:
        w = _Watched()
        pauses = iter([0.03, 0.03, 5.0, 0.02])
        w.add("often")
        w.add("sooner", lambda: next(pauses, None))
        await w.watch(0.25)
        assert w.calls["often"] == [0.0, 0.1, 0.2]
        assert w.calls["sooner"] == [0.0, 0.03, 0.06, 0.1, 0.12, 0.2]

    run(story())


def test_a_part_that_raises_is_reported_and_called_again_and_the_others_go_on() -> None:
    async def story() -> None:
        def broken() -> None:
            raise KeyError("a defect")

        w = _Watched()
        w.add("broken", broken, every_s=0.5)
        w.add("sound")
        await w.watch(1.05)
        assert w.calls["broken"] == [0.0, 0.5, 1.0]
        assert w.faults == {"broken": 3}
        assert len(w.calls["sound"]) == 11

    run(story())


def test_a_defect_in_a_call_that_came_sooner_is_reported_as_well() -> None:
    async def story() -> None:
        pauses = iter(["0.03", "no number"])
        w = _Watched()
        w.add("sooner", lambda: float(next(pauses, "1.0")))
        await w.watch(0.25)
        assert w.calls["sooner"] == [0.0, 0.03, 0.1, 0.2]
        assert w.faults == {"sooner": 1}

    run(story())


def test_nothing_is_called_after_the_end() -> None:
    async def story() -> None:
        w = _Watched()
        w.add("sooner", lambda: 0.03)
        await w.watch(0.05)
        count = len(w.calls["sooner"])
        await asyncio.sleep(5.0)
        assert len(w.calls["sooner"]) == count

    run(story())


def test_how_late_a_tick_is() -> None:
    async def story() -> None:
        w = _Watched()
        w.add("often")
        await w.watch(0.25)
        assert len(w.lags) == 3
        assert max(w.lags) < 1e-6

    run(story())
