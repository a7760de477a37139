"""A service with an SLO through the real tick and a real store: the decisions, their time, and what a kill does to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from lb.config.demand import Demand
from policies.goals import ScalingGoal
from policies.history import Load
from skyserve_cli.controller.reconcile.mappers import scaling_of
from skyserve_cli.controller.reconcile.reconciler import Reconciler
from skyserve_cli.sim.scaling import STEPS, ScalingTrial, decisions, first_fleet
from skyserve_cli.spec.model import ScheduledSize, ServiceSpec, SloSpec
from tests.unit.test_controller_reconciler import World

SLO = SloSpec(ttft_ms=2000.0, attainment=0.995, capacity_qps=2.0)
SPEC = ServiceSpec("chat", "run", scaling=ScalingGoal(1, 60), slo=SLO)
KNOWN_MIN = 700


def reported(first: int, asked: list[int], met: list[int]) -> Demand:
    zeros = (0,) * len(asked)
    late = tuple(max(0, all_ - in_time) for all_, in_time in zip(asked, met, strict=True))
    return Demand(0.0, first, tuple(asked), zeros, zeros, late, zeros)


def slo_world(spec: ServiceSpec = SPEC) -> World:
    world = World()
    world.up(spec)
    return world


@pytest.fixture
def world() -> Iterator[World]:
    world = slo_world()
    yield world
    world.store.close()


def a_trial(minutes: int) -> ScalingTrial:
    """A sine of a day, and a step up half an hour before the end."""
    at = np.arange((KNOWN_MIN + minutes) * STEPS)
    rate = 12.0 + 6.0 * np.sin(2 * np.pi * at / (1440 * STEPS))
    rate[-30 * STEPS :] *= 1.7
    counts = np.random.RandomState(5).poisson(20.0 * rate)
    return ScalingTrial(tuple(counts.tolist()), KNOWN_MIN, 2.0, 300.0, 0.995)


@pytest.mark.parametrize(
    ("autoscaler", "killed_every"), [("predictive", 0), ("predictive", 7), ("reactive", 0)]
)
def test_the_daemon_decides_as_the_simulator_does(autoscaler: str, killed_every: int) -> None:
    trial = a_trial(60)
    spec = replace(SPEC, slo=replace(SLO, autoscaler=autoscaler))
    world = slo_world(spec)
    goal = replace(scaling_of(spec), slo=replace(scaling_of(spec).slo, learns_cold_start=False))  # type: ignore[type-var]
    per_minute = np.reshape(trial.counts, (-1, STEPS)).sum(axis=1).tolist()
    asked, met = per_minute[:KNOWN_MIN], per_minute[:KNOWN_MIN]
    fleet, memory = first_fleet(trial, goal)
    world.has(memory=replace(world.row().memory, scaling=memory))
    world.lists()
    reconciler = world.reconciler()
    sizes = []
    for minute in decisions(trial, goal, fleet, memory):
        if killed_every and minute.number % killed_every == 0:
            reconciler = world.reconciler()
        world.time = 60.0 * minute.number + 0.5
        world.loads["chat"] = Load(queued=minute.queued, known=True)
        world.minutes["chat"] = reported(0, asked, met)
        world.lists()
        reconciler.tick()
        assert world.row().wanted == minute.wanted, f"minute {minute.number}"
        known = world.row().memory.scaling.get("outlook")
        expected = None if minute.outlook is None else [*minute.outlook[:2], list(minute.outlook.later)]
        assert known == expected, f"minute {minute.number}"
        sizes.append(minute.wanted)
        asked, met = [*asked, minute.requests], [*met, minute.met]
    assert max(sizes) > 1.3 * min(sizes)
    world.store.close()


def tick(world: World, reconciler: Reconciler, now: float, asked: list[int]) -> int:
    world.time = now
    world.loads["chat"] = Load(known=True)
    world.minutes["chat"] = reported(0, asked, asked)
    world.lists()
    reconciler.tick()
    return world.row().wanted


def test_between_two_minutes_nothing_is_decided_and_nothing_written(world: World) -> None:
    reconciler = world.reconciler()
    asked = [600] * 100
    tick(world, reconciler, 6000.5, asked)
    tick(world, reconciler, 6001.5, asked)
    before = world.store.count()
    for second in range(2, 50):
        world.loads["chat"] = Load(requests=600 + second, ongoing=second / 7, known=True)
        world.time = 6000.5 + second
        reconciler.tick()
        assert reconciler.decided == 0
    assert world.store.count() == before


def test_an_hour_without_a_report_changes_no_size_and_the_missed_minutes_are_read_after_it(
    world: World,
) -> None:
    reconciler = world.reconciler()
    size = tick(world, reconciler, 6000.5, [600] * 100)
    assert size > 4
    for minute in range(101, 160):
        assert tick(world, reconciler, 60.0 * minute + 0.5, [600] * 100) == size
    assert tick(world, reconciler, 60.0 * 160 + 0.5, [600] * 100 + [610] * 60) in (size, size + 1)
    assert [row.minute for row in world.store.demand("chat")] == list(range(160))


def test_the_event_log_says_why(world: World) -> None:
    tick(world, world.reconciler(), 6000.5, [600] * 100)
    (line,) = [line.record.message for line in world.store.events("chat") if line.record.kind == "scale"]
    assert "600 requests in the last minute" in line
    assert "headroom 1.06" in line


def test_an_agent_is_told_the_slo_and_read_by_the_minute(world: World) -> None:
    tick(world, world.reconciler(), 6000.5, [1])
    order = world.agents["chat"]
    assert order is not None
    assert order.counts_demand
    assert (order.table.slo.ttft_s, order.table.slo.tpot_s) == (2.0, 0.0)


def test_forecast_only_acts_as_reactive_and_says_what_it_would_do() -> None:
    minutes = np.arange(3 * 1440 + 500)
    rate = 600.0 * np.interp(minutes % 1440, (0, 400, 480, 540, 1439), (1, 1, 1, 4, 4))
    asked = np.random.RandomState(3).poisson(rate).tolist()
    now = 3 * 1440 + 478
    wanted, would = [], []
    for name in ("reactive", "predictive", "forecast_only"):
        world = slo_world(replace(SPEC, slo=replace(SLO, autoscaler=name)))
        wanted.append(tick(world, world.reconciler(), 60.0 * now + 0.5, asked[:now]))
        would.append(world.row().memory.scaling["seen"].get("would_want"))
        world.store.close()
    assert wanted[2] == wanted[0] < wanted[1] == would[2]
    assert would[:2] == [None, None]


def test_a_schedule_changes_the_size_at_its_instants_and_back() -> None:
    entry = ScheduledSize("0 8 * * *", "Europe/Berlin", 2 * 3600.0, min_replicas=5)
    world = slo_world(ServiceSpec("chat", "run", scaling=ScalingGoal(2, 2), schedule=(entry,)))
    reconciler = world.reconciler()
    seven = 7 * 3600.0  # 08:00 in Berlin, on the first day of 1970
    sizes = []
    for now in (seven - 61.0, seven - 1.0, seven, seven + 1.0, seven + 7199.0, seven + 7200.0):
        world.time = now
        world.lists()
        reconciler.tick()
        sizes.append(world.row().wanted)
    assert sizes == [2, 2, 5, 5, 5, 2]
    world.store.close()
