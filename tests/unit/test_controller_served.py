"""Which probes the reports of load balancer agents spare the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lb.config.stats import Stats, TargetHealth, TargetStats
from policies.health import Work
from policies.model import ProbeFailed, ReplicaState
from skyserve_cli.controller.readiness import HttpProber, ProbeOutcome
from skyserve_cli.controller.reconcile.attention import Attention
from skyserve_cli.controller.reconcile.ports import ProbeOrder
from skyserve_cli.controller.reconcile.served_replicas import (
    NEVER,
    WORK_KEPT_S,
    ServedReplicas,
    ServedReport,
    counts_served,
    has_one_version,
    merged_report,
    next_probe_at,
    served_report,
    together,
)
from skyserve_cli.spec.model import Probe
from skyserve_cli.state.values import ServiceRow
from tests.integration.lb_wires import run
from tests.unit.test_controller_reconciler import a_replica

S = ReplicaState
INTERVAL_S = 10.0


@pytest.mark.parametrize(
    ("served_at", "interval_s", "due"),
    [
        pytest.param(NEVER, 10.0, 110.0, id="it never served: its own interval"),
        pytest.param(90.0, 10.0, 110.0, id="it served before the probe: its own interval"),
        pytest.param(104.0, 10.0, 114.0, id="it served since: one interval after that"),
        pytest.param(128.0, 10.0, 138.0, id="it goes on serving: later and later"),
        pytest.param(131.0, 10.0, 140.0, id="at most four intervals after the last probe"),
        pytest.param(175.0, 30.0, 160.0, id="at most a minute"),
        pytest.param(150.0, 90.0, 190.0, id="never sooner than the interval"),
        pytest.param(101.0, 1.0, 102.0, id="a short interval: one after the response"),
        pytest.param(109.0, 1.0, 104.0, id="a short interval: at most four"),
    ],
)
def test_when_the_next_probe_is_due(served_at: float, interval_s: float, due: float) -> None:
    assert next_probe_at(100.0, served_at, interval_s) == due


@pytest.mark.parametrize(
    ("state", "probe", "counts"),
    [
        pytest.param(S.READY, Probe("/health"), True, id="ready, a plain probe"),
        pytest.param(S.STARTING, Probe("/health"), False, id="it has never passed"),
        pytest.param(S.NOT_READY, Probe("/health"), False, id="its last probe failed"),
        pytest.param(S.READY, Probe("/v1", post_data="{}"), False, id="a probe with a body"),
        pytest.param(S.READY, Probe("/", headers=(("X-Key", "k"),)), False, id="a probe with a header"),
    ],
)
def test_what_responses_to_clients_stand_in_for(state: ReplicaState, probe: Probe, counts: bool) -> None:
    assert counts_served(a_replica(1, state), probe) is counts


@pytest.mark.parametrize(
    ("versions", "same", "is_one"),
    [
        ((3, 3), frozenset(), True),
        ((3, 2), frozenset(), False),
        ((3, 2), frozenset({2}), True),
        ((), frozenset(), True),
    ],
    ids=["all newest", "an update goes on", "the older one is kept", "no replica"],
)
def test_during_an_update_every_probe_is_sent(
    versions: tuple[int, ...], same: frozenset[int], is_one: bool
) -> None:
    row = cast("ServiceRow", SimpleNamespace(version=3, same_replicas=same))
    replicas = [a_replica(number, version=version) for number, version in enumerate(versions)]
    assert has_one_version(row, replicas) is is_one


def stats(*targets: TargetStats) -> Stats:
    return Stats("chat", "", "r", 100.0, 60.0, 0, 0, 0, 0, 0.0, targets)


def test_what_a_report_says() -> None:
    good = TargetStats("1", 0, 5, 0, ejected=False, heard_s=0.1, served_s=2.0)
    report = served_report(
        stats(
            good,
            replace(good, id="2", errors=1),
            replace(good, id="3", ejected=True),
            replace(good, id="4", served_s=None),
            replace(good, id="5", served_s=3600.0),
        ),
        asked_at=50.0,
    )
    assert report == ServedReport({1: 48.0}, frozenset({2, 3}), at=50.0)


def test_the_work_of_replicas_as_several_agents_see_it() -> None:
    good, bad = TargetHealth(worked_s=1.0, running=4), TargetHealth(40.0, 6, 30.0, 2.0)
    one = TargetStats("1", 2, 5, 0, ejected=False, health=good)
    report = served_report(
        stats(one, replace(one, id="2", health=bad), replace(one, id="3", health=None)), asked_at=50.0
    )
    # What an older agent has in flight is no evidence: it could not be sent who is loaded either.
    assert report.work == {1: Work(49.0, waiting=4), 2: Work(10.0, 6, 20.0, 48.0, 2)}
    other = served_report(stats(replace(one, health=bad), replace(one, id="2", health=bad)), asked_at=51.0)
    assert together([report.work, other.work]) == {
        1: Work(49.0, waiting=6),  # its errors were before a response of which the other agent knows
        2: Work(11.0, 12, 20.0, 49.0, 4),
    }
    assert merged_report([report, other]).work == together([report.work, other.work])
    served = ServedReplicas()
    assert served.work("chat") == {}
    served.reported("chat", 0, report)
    assert served.work("chat") == report.work
    served.silent("chat", 0)  # an agent that restarts: what was is kept for a while, what is now is not known
    assert served.work("chat") == {1: Work(49.0), 2: Work(10.0)}
    served.reported("code", 0, other._replace(at=50.0 + WORK_KEPT_S + 1.0))
    assert served.work("chat") == {}


def test_several_agents_of_a_service() -> None:
    served = ServedReplicas()
    assert served.last("chat", 1) == NEVER
    served.reported("chat", 0, ServedReport({1: 10.0, 2: 20.0}, frozenset()))
    served.reported("chat", 7, ServedReport({1: 15.0}, frozenset({2})))
    served.reported("code", 0, ServedReport({3: 1.0}, frozenset()))
    assert [served.last("chat", number) for number in (1, 2, 3)] == [15.0, NEVER, NEVER]
    served.silent("chat", 7)
    assert [served.last("chat", number) for number in (1, 2)] == [10.0, 20.0]
    served.silent("chat", 0)
    served.silent("chat", 0)
    assert served.last("chat", 1) == NEVER


# --- in virtual time: one replica, one agent that reports every second, and the real prober


class World:
    """A replica that serves a client every second until `dies_at`, and from then on takes no connection."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.served = ServedReplicas()
        self.dies_at = float("inf")
        self.agent_dies_at = float("inf")
        self.fails_probes_from = float("inf")
        self.probed: list[float] = []
        self.prober = HttpProber(
            self.loop, lambda: None, Attention(self.loop, self), self.served, lambda _: _Line(self)
        )
        self._agent = self.loop.create_task(self._report())

    def now(self) -> float:
        return self.loop.time()

    def watch(self, *, counts_served: bool) -> None:
        order = ProbeOrder("chat", 1, "http://192.0.2.1", Probe(interval_s=INTERVAL_S), True, counts_served)
        self.prober.watch([order])

    async def found_dead(self, until: float = 1000.0) -> float:
        """When the prober reported the failure."""
        while self.loop.time() < until:
            await asyncio.sleep(0.1)
            for _, event in self.prober.drain():
                assert isinstance(event, ProbeFailed)
                return self.loop.time()
        raise AssertionError("not found")

    async def close(self) -> None:
        self._agent.cancel()
        await self.prober.close()

    async def _report(self) -> None:
        while self.loop.time() < self.agent_dies_at:
            now = self.loop.time()
            age_s = max(0.0, now - self.dies_at)
            self.served.reported("chat", 0, ServedReport({1: now - age_s}, frozenset()))
            await asyncio.sleep(1.0)


class _Line:
    def __init__(self, world: World) -> None:
        self._world = world

    async def probe(self, order: ProbeOrder) -> ProbeOutcome:
        now = self._world.loop.time()
        self._world.probed.append(now)
        if now >= min(self._world.dies_at, self._world.fails_probes_from):
            return ProbeOutcome("no connection", reached=False)
        return ProbeOutcome(None, reached=True)

    def close(self) -> None:
        pass


def _run(story: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        world = World()
        await story(world)
        await world.close()

    run(whole())


def test_a_replica_that_serves_is_probed_a_quarter_as_often() -> None:
    async def story(world: World) -> None:
        world.watch(counts_served=True)
        await asyncio.sleep(400.0)
        assert 9 <= len(world.probed) <= 12
        world.probed.clear()
        world.watch(counts_served=False)  # an update begins
        await asyncio.sleep(400.0)
        assert 38 <= len(world.probed) <= 41

    _run(story)


@pytest.mark.parametrize("agent_dies", [False, True], ids=["its agent lives", "its agent dies with it"])
@pytest.mark.parametrize("dies_at", [100.0, 103.3, 117.0, 129.9])
def test_a_dead_replica_is_found_within_one_interval(agent_dies: bool, dies_at: float) -> None:
    """As without agents."""

    async def story(world: World) -> None:
        world.dies_at = dies_at
        if agent_dies:
            world.agent_dies_at = dies_at
        world.watch(counts_served=True)
        assert await world.found_dead() - dies_at <= INTERVAL_S + 0.2

    _run(story)


def test_an_agent_that_falls_silent_spares_no_probe() -> None:
    async def story(world: World) -> None:
        world.agent_dies_at = 100.0
        world.watch(counts_served=True)
        await asyncio.sleep(120.0)
        world.probed.clear()
        await asyncio.sleep(400.0)
        assert 39 <= len(world.probed) <= 41

    _run(story)


def test_a_replica_that_serves_on_but_fails_its_probe_is_found_in_four_intervals_and_then_probed_eagerly() -> (
    None
):
    async def story(world: World) -> None:
        world.fails_probes_from = 100.0
        world.watch(counts_served=True)
        found_at = await world.found_dead()
        assert found_at - 100.0 <= 4 * INTERVAL_S + 0.2
        world.probed.clear()
        await asyncio.sleep(20.0)
        assert len(world.probed) >= 19

    _run(story)
