"""The production controller in recorded markets: exact on hand-made ones, at the published figures on real ones."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from policies.goals import ScalingGoal
from policies.registry import PLACERS
from skyserve_cli.sim import trace as traces
from skyserve_cli.sim.arrivals import Arrivals
from skyserve_cli.sim.run import Replay, simulate
from skyserve_cli.sim.settings import POLICIES, Job, Setting
from skyserve_cli.sim.trace import Steps, Trace, ZoneTrace
from skyserve_cli.spec.fields import SpotPlacer
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.spec.placement import ALIASES
from tests.clouds.schedules import only_long

SHARED = Path(
    os.environ.get("SKYSERVE_TRACES", Path(__file__).resolve().parents[3] / "shared" / "traces"), "spot"
)
recorded = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no recorded spot traces at {SHARED}")
ONLINE = [name for name in POLICIES if name != "omniscient"]
SLOW = ("even_spread", "single_zone")


def market(n_ticks: int, **zones: list[tuple[int, int]]) -> Trace:
    """Zones named r1a, r2b, … of regions r1, r2; each a list of (from tick, capacity)."""
    found = tuple(
        ZoneTrace(name, name[:-1], Steps(tuple(t for t, _ in steps), tuple(c for _, c in steps)))
        for name, steps in zones.items()
    )
    return Trace("made", found, n_ticks, 30.0, 30.0, "counts")


# --- by hand ---------------------------------------------------------------------------------------------------


def test_a_cold_start_is_paid_for_and_serves_nobody() -> None:
    """Two replicas of 6 ticks of cold start over 106 ticks: accounting begins when the first could be ready."""
    run = simulate(Setting(market(106, r1a=[(0, 9)]), 2, 180.0), Job("round_robin"))
    assert (run.availability, run.capacity_fraction, run.failed_launches_per_day) == (1.0, 1.0, 0.0)
    assert run.cost_relative == pytest.approx(1 / 3)


def test_one_loss_costs_its_cold_start_and_a_tick_to_notice() -> None:
    """At tick 50 a zone is lost; the loss is seen at 51, the new replica in the other zone starts then and is ready
    at 57: 7 of 100 accounted ticks with one of two ready."""
    trace = market(106, r1a=[(0, 1), (50, 0)], r2a=[(0, 9)])
    run = simulate(Setting(trace, 2, 180.0), Job("spothedge", 0, seed=1))
    assert run.preemptions_per_day == pytest.approx(1 / run.days)
    assert run.availability == pytest.approx(0.93)
    assert run.capacity_fraction == pytest.approx(1 - 7 / 200)


def test_fallback_when_all_zones_are_gone_and_back_to_spot() -> None:
    """Both zones are empty from tick 40 to 200. On-demand takes over, and leaves when spot is back."""
    trace = market(400, r1a=[(0, 4), (40, 0), (200, 4)], r2a=[(0, 4), (40, 0), (200, 4)])
    run = simulate(Setting(trace, 2, 180.0), Job("spothedge", 1))

    def counts(tick: int) -> dict[str, int]:
        step = [step for step in run.steps if step.at_s <= tick * 30.0][-1]
        ready = {"spot": 0, "on_demand": 0}
        for _, kind, _, serving in step.counts:
            ready[kind] += serving
        return ready

    assert counts(39) == {"spot": 3, "on_demand": 0}
    assert counts(100) == {"spot": 0, "on_demand": 2}
    assert counts(300) == {"spot": 3, "on_demand": 0}
    assert run.availability == pytest.approx(1 - 7 / 394)


def test_on_demand_costs_what_it_costs() -> None:
    run = simulate(Setting(market(106, r1a=[(0, 0)]), 2, 180.0), Job("on_demand"))
    assert (run.availability, run.cost_relative, run.on_demand_cost_share) == (1.0, pytest.approx(1.0), 1.0)


def test_a_replica_of_two_nodes_needs_room_for_both_and_dies_as_one() -> None:
    trace = market(206, r1a=[(0, 5), (100, 3)], r2a=[(0, 1)])
    spec = ServiceSpec(name="x", run="x", scaling=ScalingGoal(2, 2), num_nodes=2)
    run = simulate(Setting(trace, 2, 180.0, spec=spec), Job("round_robin"))
    assert run.preemptions_per_day == pytest.approx(1 / run.days)
    assert run.steps[-1].counts == (("r1a", "spot", 1, 1),)
    assert run.cost_relative == pytest.approx((1 + 94 / 200) / 6, abs=0.01)


# --- what holds of every policy -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "policy", [pytest.param(each, marks=only_long if each in SLOW else ()) for each in ONLINE]
)
def test_leaving_out_idle_ticks_changes_nothing(policy: str) -> None:
    """Every line of the story is as if all ticks had been run, and every figure but for rounding."""
    trace = traces.named("synthetic-volatile").window(3 * 86400.0, 28_800.0)
    setting, job = Setting(trace, 3, 183.0), Job(policy, 1, seed=7)
    quick, thorough = Replay(setting, job), Replay(setting, job, compressed=False)
    found, expected = quick.run(), thorough.run()
    assert (found.digest, found.launches, found.steps) == (expected.digest, expected.launches, expected.steps)
    for figure in ("availability", "capacity_fraction", "cost_relative", "on_demand_cost_share", "usd"):
        assert getattr(found, figure) == pytest.approx(getattr(expected, figure))
    assert expected.ticks == trace.n_ticks


@pytest.mark.long
@pytest.mark.parametrize("policy", ["spothedge", "risk_hedge"])
def test_nor_where_prices_move(policy: str) -> None:
    trace = market(900, r1a=[(0, 4), (100, 1), (300, 4)], r2a=[(0, 4), (500, 0), (700, 3)])
    prices = (Steps((0, 333), (1.0, 2.0)), Steps((0, 111, 555), (1.2, 0.8, 1.6)))
    zones = tuple(replace(z, spot_usd_hour=p) for z, p in zip(trace.zones, prices, strict=True))
    setting, job = Setting(replace(trace, zones=zones), 3, 180.0), Job(policy, 1, seed=2)
    quick, thorough = Replay(setting, job).run(), Replay(setting, job, compressed=False).run()
    assert (quick.digest, quick.steps) == (thorough.digest, thorough.steps)
    assert quick.ticks < thorough.ticks


@pytest.mark.long
@pytest.mark.parametrize("policy", ["spothedge", "risk_hedge"])
def test_nor_where_the_size_follows_the_load(policy: str) -> None:
    """Two requests a second for two hours, then five for one; the size follows a minute later, and back after ten."""
    trace = traces.named("synthetic-volatile").window(3 * 86400.0, 28_800.0)
    load = Arrivals("in steps", (0.0, 7200.0, 10_800.0), (0.0, 14_400.0, 32_400.0))
    scaling = ScalingGoal(1, 6, target_qps_per_replica=1.0, upscale_delay_s=60.0, downscale_delay_s=600.0)
    spec = ServiceSpec("steps", "serve", scaling=scaling, load_window_s=trace.tick_s)
    setting, job = Setting(trace, 2, 183.0, arrivals=load, spec=spec), Job(policy, 1, seed=7)
    quick, thorough = Replay(setting, job).run(), Replay(setting, job, compressed=False).run()
    assert (quick.digest, quick.steps, quick.wanted) == (thorough.digest, thorough.steps, thorough.wanted)
    for figure in ("availability", "cost_relative", "growth", "outages", "requests_short"):
        assert getattr(quick, figure) == pytest.approx(getattr(thorough, figure))
    assert quick.ticks < thorough.ticks / 4
    assert quick.growth > 0


def test_every_placer_can_be_simulated_and_named_in_a_file() -> None:
    assert set(ONLINE) == set(PLACERS)
    named = set(get_args(SpotPlacer)[2].json_schema["enum"]) - {"auto"}
    assert {ALIASES.get(name, name) for name in named} == set(PLACERS) - {"on_demand"}


@pytest.mark.long
@pytest.mark.parametrize("policy", ["spothedge", "risk_hedge", pytest.param("even_spread", marks=only_long)])
def test_the_same_seed_tells_the_same_story_and_on_demand_is_never_beyond_the_target(policy: str) -> None:
    trace = traces.named("synthetic-volatile").window(0.0, 43_200.0)
    setting = Setting(trace, 3, 183.0)
    once, again = (Replay(setting, Job(policy, 2, seed=3)).run() for _ in range(2))
    assert once == again
    most = max(sum(alive for _, kind, alive, _ in step.counts if kind == "on_demand") for step in once.steps)
    assert most <= 3


def test_another_seed_has_other_victims() -> None:
    trace = market(500, r1a=[(0, 4), (100, 2), (200, 4), (300, 2)], r2a=[(0, 4), (150, 1), (250, 4)])
    digests = {simulate(Setting(trace, 3, 183.0), Job("spothedge", 1, seed=seed)).digest for seed in range(4)}
    assert len(digests) > 1


# --- published figures --------------------------------------------------------------------------------------------


@pytest.mark.long
@recorded
@pytest.mark.parametrize(
    ("policy", "availability", "cost"),
    [
        pytest.param("spothedge", 99.11, 53.6, id="spothedge"),
        pytest.param("spothedge_literal", 98.98, 59.1, id="literal", marks=only_long),  # a minute of CPU
        pytest.param("on_demand", 100.0, 100.0, id="on demand"),
    ],
)
def test_aws1_is_as_an_independent_simulator_has_it(policy: str, availability: float, cost: float) -> None:
    """4 replicas and one extra, 183 s of cold start, on-demand at three times the price of spot."""
    run = simulate(Setting(traces.load(SHARED / "aws1"), 4, 183.0), Job(policy, 1))
    assert run.availability * 100 == pytest.approx(availability, abs=0.5)
    assert run.cost_relative * 100 == pytest.approx(cost, abs=1.5)
