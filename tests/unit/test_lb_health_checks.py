"""Probes of targets that the controller calls unhealthy: the load balancer is a second witness. In virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

import pytest

from lb.agent.ticker import Ticker
from lb.config.schema import Readiness, Table, Target
from lb.core.targets import TargetTable
from lb.engines.health_checks import LOOK_EVERY_S, PROBE_UNHEALTHY_EVERY_S, UNHEALTHY_AT_ONCE, HealthChecker
from lb.observe.metrics import Metrics
from policies.routing.base import RequestView
from tests.integration.lb_wires import run


def _target(number: int, state: Readiness) -> Target:
    return Target(str(number), f"http://192.0.2.1:{number}", state=state)


class _World:
    """A table of targets, some of which are alive."""

    def __init__(self, targets: Iterable[Target], alive: Iterable[str]) -> None:
        loop = asyncio.get_running_loop()
        self.alive = set(alive)
        self.probes: Counter[str] = Counter()
        self.table = TargetTable(Table("s", "r1", tuple(targets)), loop.time())
        self.metrics = Metrics("s", "r")
        self.checker = HealthChecker(
            self.table, self._probe, self.metrics, loop.time, lambda: None, lambda: False
        )

    async def _probe(self, target: Target, timeout_s: float) -> bool:
        self.probes[target.id] += 1
        if target.id not in self.alive:
            await asyncio.sleep(timeout_s)
        return target.id in self.alive

    def _faulty(self, name: str, error: Exception) -> None:
        raise AssertionError(name) from error

    async def watch(self, seconds: float) -> dict[str, float | None]:
        """When each target was last heard from, after so long."""
        loop = asyncio.get_running_loop()
        ticker = Ticker(loop.time, self._faulty)
        ticker.add("health checks", self.checker.check_silent, LOOK_EVERY_S)
        task = loop.create_task(ticker.run())
        await asyncio.sleep(seconds)
        task.cancel()
        self.checker.close()
        return {one.id: one.heard_s for one in self.table.stats(loop.time(), 60.0)}


def test_those_that_the_controller_calls_unhealthy_are_probed_and_only_they() -> None:
    async def story() -> None:
        world = _World(
            [_target(1, Readiness.UNHEALTHY), _target(2, Readiness.UNHEALTHY), _target(3, Readiness.READY)],
            ["1"],
        )
        heard = await world.watch(60.0)
        assert heard["1"] is not None
        assert heard["1"] <= PROBE_UNHEALTHY_EVERY_S + LOOK_EVERY_S
        assert heard["2"] == heard["3"] == 60.0
        assert world.probes["3"] == 0
        assert 10 <= world.probes["1"] <= 13

    run(story())


def test_many_of_them_have_their_turns_and_cost_no_more_than_a_hundred_probes_a_second() -> None:
    async def story() -> None:
        world = _World([_target(number, Readiness.UNHEALTHY) for number in range(1, 2001)], [])
        await world.watch(60.0)
        assert sum(world.probes.values()) <= 60.0 / LOOK_EVERY_S * UNHEALTHY_AT_ONCE
        assert set(world.probes.values()) <= {2, 3, 4}
        assert len(world.probes) == 2000

    run(story())


def test_a_new_table_says_who_is_unhealthy_now() -> None:
    async def story() -> None:
        world = _World([_target(1, Readiness.UNHEALTHY)], ["1"])
        await world.watch(20.0)
        before = world.probes["1"]
        assert before >= 3
        world.table.apply(Table("s", "r2", (_target(1, Readiness.READY),)), asyncio.get_running_loop().time())
        await world.watch(20.0)
        assert world.probes["1"] == before

    run(story())


@pytest.mark.parametrize(
    ("every_s", "is_left_out"),
    [
        pytest.param(3.0, False, id="a response every three seconds"),
        pytest.param(5.9, False, id="one before two probes have failed"),
        pytest.param(9.0, True, id="none until then"),
    ],
)
def test_a_target_that_has_no_time_for_probes_works_on(every_s: float, is_left_out: bool) -> None:
    """One seat, and a queue of requests in which its probe waits as well."""

    async def story() -> None:
        world = _World([_target(1, Readiness.READY)], [])
        loop = asyncio.get_running_loop()
        waiting = [world.table.book(RequestView(str(n), "POST", "/"), "1", loop.time()) for n in range(9)]

        async def serve() -> None:
            for booking in waiting:
                await asyncio.sleep(every_s)
                world.table.responded(booking, loop.time())
                world.table.release(booking, loop.time())

        task = loop.create_task(serve())
        await world.watch(every_s + 7.0)
        assert (world.metrics.of(_target(1, Readiness.READY)).ejections > 0) is is_left_out
        assert world.probes["1"] > 0
        task.cancel()

    run(story())
