"""A process that had no CPU knows it."""

from __future__ import annotations

import asyncio

import pytest

from skyserve_cli.controller.reconcile.attention import LOST_AFTER_S, Attention
from tests.integration.lb_wires import LeapLoop, run


class _LoopClock:
    def now(self) -> float:
        return 1_000_000.0 + asyncio.get_running_loop().time()


class _LoopTime:
    def now(self) -> float:
        return asyncio.get_running_loop().time()


def _loop() -> LeapLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, LeapLoop)
    return loop


def test_what_ran_across_a_gap_is_known_and_what_came_after_it_is_not_blamed() -> None:
    async def story() -> None:
        loop, clock = _loop(), _LoopClock()
        attention = Attention(loop, clock, _LoopTime())
        attention.start()
        began, first = attention.since, loop.time()
        await asyncio.sleep(100.0)
        assert not attention.was_lost(first)
        loop._forward(2.0)  # nothing else ran meanwhile
        assert attention.was_lost(first)  # before the beat itself has noticed
        assert attention.since == pytest.approx(
            began
        )  # a short gap voids probes, and does not begin the watch again
        await asyncio.sleep(1.0)
        second = loop.time()
        assert attention.was_lost(first)
        assert not attention.was_lost(second)
        loop._forward(LOST_AFTER_S + 1.0)
        await asyncio.sleep(1.0)
        assert attention.was_lost(second)
        assert attention.since > began + 100.0
        await attention.close()

    run(story())


def test_small_delays_are_nothing() -> None:
    async def story() -> None:
        loop = _loop()
        attention = Attention(loop, _LoopClock(), _LoopTime())
        attention.start()
        began = loop.time()
        for _ in range(50):
            loop._forward(0.8)
            await asyncio.sleep(0.3)
        assert not attention.was_lost(began)
        await attention.close()

    run(story())


def test_a_host_that_slept_begins_its_watch_again_although_the_loop_did_not_notice() -> None:
    class Sleepy:
        slept_s = 0.0

        def now(self) -> float:
            return asyncio.get_running_loop().time() + self.slept_s

    async def story() -> None:
        steady = Sleepy()
        attention = Attention(_loop(), _LoopClock(), steady)
        attention.start()
        began = attention.since
        await asyncio.sleep(10.0)
        begun = _loop().time()
        steady.slept_s = 8 * 3600.0
        assert attention.was_lost(begun)
        assert attention.since > began + 9.0
        await attention.close()

    run(story())


def test_a_clock_that_is_set_does_not_change_for_how_long_it_has_been_watched() -> None:
    class Wall:
        set_s = 0.0

        def now(self) -> float:
            return 1_000_000.0 + asyncio.get_running_loop().time() + self.set_s

    async def story() -> None:
        wall = Wall()
        attention = Attention(_loop(), wall, _LoopTime())
        attention.start()
        await asyncio.sleep(100.0)
        for by_s in (-28_800.0, 28_800.0):
            wall.set_s += by_s
            assert wall.now() - attention.since == pytest.approx(100.0)
        await attention.close()

    run(story())
