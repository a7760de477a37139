"""The Omniscient policy: by hand on tiny traces, against itself on random ones, against the paper's on recorded ones."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyserve_cli.sim import omniscient_program
from skyserve_cli.sim.omniscient import OmniscientResult, solve
from skyserve_cli.sim.omniscient_program import SolverError
from skyserve_cli.sim.trace import Steps, Trace, ZoneTrace, load, named

TICK_S = 30.0
COLD_TICKS = 2
COLD_S = COLD_TICKS * TICK_S
RECORDED = Path(
    os.environ.get("SKYSERVE_TRACES", Path(__file__).resolve().parents[3] / "shared" / "traces"), "spot"
)


def trace_of(*zones: list[int]) -> Trace:
    return Trace(
        name="tiny",
        zones=tuple(
            ZoneTrace(f"z{number}", "r", Steps.of(iter(list(enumerate(counts)))))
            for number, counts in enumerate(zones)
        ),
        n_ticks=len(zones[0]),
        tick_s=TICK_S,
        gap_s=TICK_S,
        reading="counts of instances",
    )


def costs(trace: Trace, found: OmniscientResult, n_target: int, cold_ticks: int, price_ratio: float) -> float:
    """The relative cost, from the step functions alone."""
    spent = sum(
        sum(steps.at(tick) for steps in found.spot.values()) + price_ratio * found.on_demand.at(tick)
        for tick in range(cold_ticks, trace.n_ticks)
    )
    return spent / (price_ratio * n_target * (trace.n_ticks - cold_ticks))


def keeps_the_rules(trace: Trace, found: OmniscientResult, n_target: int, cold_ticks: int) -> bool:
    """No zone holds more than it has room for, and who is ready has been alive for a cold start."""
    everywhere = [*found.spot.values(), found.on_demand]
    for tick in range(trace.n_ticks):
        if any(found.spot[zone.name].at(tick) > zone.capacity.at(tick) for zone in trace.zones):
            return False
        if tick >= cold_ticks:
            warm = sum(min(steps.at(tick - ago) for ago in range(cold_ticks + 1)) for steps in everywhere)
            if found.ready.at(tick) > warm:
                return False
    served = sum(found.ready.at(tick) >= n_target for tick in range(cold_ticks, trace.n_ticks))
    return found.availability == pytest.approx(served / (trace.n_ticks - cold_ticks))


# --- by hand --------------------------------------------------------------------------------------------------
# 20 ticks, of which 18 are on the books, at a price ratio of 3: one on-demand replica all the time is 54.


@pytest.mark.parametrize(
    ("zones", "n_target", "availability", "spot_ticks", "on_demand_ticks"),
    [
        pytest.param([[1] * 20], 1, 1.0, 18, 0, id="always spot"),
        pytest.param([[0] * 20], 1, 1.0, 0, 18, id="never spot"),
        pytest.param([[9] * 20], 1, 1.0, 18, 0, id="more than is needed is not bought"),
        pytest.param([[1] * 20], 2, 1.0, 18, 18, id="room for one of two"),
        pytest.param([[1] * 10 + [0] * 10], 1, 1.0, 8, 12, id="on-demand starts a cold start early"),
        pytest.param([[0] * 10 + [1] * 10], 1, 1.0, 10, 10, id="on-demand stays until spot is warm"),
        pytest.param([[1] * 10 + [0] + [1] * 9], 1, 1.0, 17, 5, id="a gap of one tick costs five"),
        pytest.param(
            [[1] * 10 + [0] * 10, [0] * 6 + [1] * 14], 1, 1.0, 20, 0, id="one zone relieves another"
        ),
        pytest.param([[1] * 10 + [0] * 10, [0] * 9 + [1] * 11], 1, 1.0, 19, 3, id="and is a tick late"),
        pytest.param([[2] * 10 + [1] * 10], 2, 1.0, 26, 12, id="a zone loses a part"),
        pytest.param([[1] * 10 + [0] + [1] * 9], 1, 15 / 18, 17, 0, id="an outage that may be"),
        pytest.param([[1] * 10 + [0] + [1] * 9], 1, 16 / 18, 17, 3, id="a part of an outage that may be"),
    ],
)
@pytest.mark.parametrize("full_grid", [False, True], ids=["compressed", "full grid"])
def test_tiny_traces_by_hand(
    zones: list[list[int]],
    n_target: int,
    availability: float,
    spot_ticks: int,
    on_demand_ticks: int,
    full_grid: bool,
) -> None:
    trace = trace_of(*zones)
    found = solve(
        trace,
        n_target=n_target,
        cold_start_s=COLD_S,
        price_ratio=3.0,
        availability=availability,
        full_grid=full_grid,
    )
    cost = spot_ticks + 3 * on_demand_ticks
    assert found.cost_relative == pytest.approx(cost / (54 * n_target))
    assert found.cost_bound <= found.cost_relative + 1e-9
    assert found.on_demand_cost_share == pytest.approx(3 * on_demand_ticks / cost)
    assert found.availability == pytest.approx(availability)
    assert found.status == "optimal"
    assert costs(trace, found, n_target, COLD_TICKS, 3.0) == pytest.approx(found.cost_relative)
    assert keeps_the_rules(trace, found, n_target, COLD_TICKS)


def test_the_cheaper_zone_is_used_and_a_dear_one_is_not() -> None:
    trace = trace_of([1] * 20, [1] * 20)
    found = solve(trace, n_target=1, cold_start_s=COLD_S, price_ratio=3.0, spot_prices={"z1": 0.6})
    assert found.cost_relative == pytest.approx(0.2)
    assert found.spot["z1"].at(10) == 1
    assert found.spot["z0"].at(10) == 0
    dear = solve(trace, n_target=1, cold_start_s=COLD_S, price_ratio=3.0, spot_prices={"z0": 4.0, "z1": 5.0})
    assert dear.on_demand_cost_share == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_target": 0},
        {"price_ratio": 0.0},
        {"availability": 0.0},
        {"availability": 1.1},
        {"cold_start_s": 600.0},
    ],
    ids=str,
)
def test_arguments_make_sense(wrong: dict[str, float]) -> None:
    asked = {"n_target": 1, "cold_start_s": COLD_S, "price_ratio": 3.0} | wrong
    with pytest.raises(ValueError, match=r"at least|cold start"):
        solve(trace_of([1] * 20), **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("availability", [1.0, 0.99])
def test_where_no_plan_is_found_in_time_on_demand_is_one(availability: float) -> None:
    days = named("synthetic-wide").window(0.0, 3 * 86400.0)
    asked = {"n_target": 4, "cold_start_s": 183, "price_ratio": 3.0, "availability": availability}
    found = solve(days, **asked, time_limit_s=0.0)  # type: ignore[arg-type]
    assert (found.cost_relative, found.availability) == (1.0, 1.0)
    assert found.status == "time limit reached: on demand alone"
    assert keeps_the_rules(days, found, 4, 6)
    best = solve(days, **asked)  # type: ignore[arg-type]
    assert 0.9 * best.cost_relative < found.cost_bound <= best.cost_bound


# --- against itself -------------------------------------------------------------------------------------------


@st.composite
def small_traces(draw: st.DrawFn) -> Trace:
    """Zones that flap: random counts, each held for some ticks."""
    rng = random.Random(draw(st.integers(0, 10_000)))
    n_ticks = draw(st.integers(20, 70))
    zones = []
    for _ in range(draw(st.integers(1, 3))):
        counts: list[int] = []
        while len(counts) < n_ticks:
            counts += [rng.choice([0, 0, 1, 2, 3])] * rng.randint(1, 15)
        zones.append(counts[:n_ticks])
    return trace_of(*zones)


@settings(max_examples=40, deadline=None)
@given(small_traces(), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1.5, 3.0, 3.33]))
def test_the_compressed_grid_loses_nothing(
    trace: Trace, n_target: int, cold_ticks: int, price_ratio: float
) -> None:
    asked = {"n_target": n_target, "cold_start_s": cold_ticks * TICK_S, "price_ratio": price_ratio}
    found = solve(trace, **asked)  # type: ignore[arg-type]
    full = solve(trace, **asked, full_grid=True)  # type: ignore[arg-type]
    assert found.cost_relative == pytest.approx(full.cost_relative, abs=1e-6)
    assert found.segments <= full.segments == trace.n_ticks
    assert found.availability == 1.0
    assert costs(trace, found, n_target, cold_ticks, price_ratio) == pytest.approx(found.cost_relative)
    assert keeps_the_rules(trace, found, n_target, cold_ticks)


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(small_traces(), st.sampled_from([0.9, 0.97]))
def test_outages_save_money_and_keep_the_promise(trace: Trace, availability: float) -> None:
    always = solve(trace, n_target=2, cold_start_s=COLD_S, price_ratio=3.0)
    mostly = solve(trace, n_target=2, cold_start_s=COLD_S, price_ratio=3.0, availability=availability)
    finest = solve(
        trace, n_target=2, cold_start_s=COLD_S, price_ratio=3.0, availability=availability, full_grid=True
    )
    assert finest.cost_bound - 1e-9 <= mostly.cost_relative <= always.cost_relative + 1e-9
    assert availability - 1e-9 <= mostly.availability
    assert keeps_the_rules(trace, mostly, 2, COLD_TICKS)


def test_whole_replicas_are_no_dearer_than_parts_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = named("synthetic-volatile").window(0.0, 2 * 86400.0)
    linear = solve(trace, n_target=4, cold_start_s=183, price_ratio=3.0)
    monkeypatch.setattr(omniscient_program, "WHOLE", -1.0)  # as if the response had not been whole
    monkeypatch.setattr(omniscient_program, "MIP_GAP", 0.0)
    whole = solve(trace, n_target=4, cold_start_s=183, price_ratio=3.0)
    assert whole.cost_relative == pytest.approx(linear.cost_relative, abs=1e-9)


@pytest.mark.filterwarnings("ignore:Invalid option value")  # by the solver, of a gap below zero
def test_where_no_outages_are_found_in_time_there_are_some_nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = named("synthetic-volatile").window(0.0, 2 * 86400.0)
    asked = {"n_target": 4, "cold_start_s": 180, "price_ratio": 3.0}
    exact = solve(trace, **asked, availability=0.98)  # type: ignore[arg-type]
    always = solve(trace, **asked)  # type: ignore[arg-type]
    in_time = omniscient_program._optimum
    monkeypatch.setattr(
        omniscient_program, "MIP_GAP", -1.0
    )  # as if what is found at once were not near enough

    def too_late(program: omniscient_program._Program, whole: Any = None) -> omniscient_program._Solution:
        if whole is not None:
            raise SolverError("time limit")
        return in_time(program)

    monkeypatch.setattr(omniscient_program, "_optimum", too_late)
    near = solve(trace, **asked, availability=0.98)  # type: ignore[arg-type]
    assert near.status == "time limit reached: near the optimum"
    assert near.availability >= 0.98
    assert near.cost_bound <= exact.cost_relative <= near.cost_relative * 1.001
    assert near.cost_relative < always.cost_relative
    assert keeps_the_rules(trace, near, 4, 6)


def test_chunks_cover_the_trace_and_change_little() -> None:
    trace = named("synthetic-volatile").window(0.0, 4 * 86400.0)
    heard: list[tuple[int, int]] = []
    asked = {"n_target": 4, "cold_start_s": 180, "price_ratio": 3.0}
    whole = solve(trace, **asked)  # type: ignore[arg-type]
    parts = solve(trace, **asked, chunk_s=86400.0, progress=lambda done, of: heard.append((done, of)))  # type: ignore[arg-type]
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert (whole.chunks, parts.chunks) == (1, 4)
    assert parts.cost_relative <= whole.cost_relative + 1e-9  # each begins with a cold start no one pays for
    assert parts.cost_relative == pytest.approx(whole.cost_relative, abs=0.005)
    assert costs(trace, parts, 4, 6, 3.0) == pytest.approx(parts.cost_relative)
    for steps in (*parts.spot.values(), parts.on_demand, parts.ready):
        assert list(steps.ticks) == sorted(set(steps.ticks))
        assert steps.ticks[-1] < trace.n_ticks
    assert all(parts.ready.at(tick) >= 4 for tick in range(6, trace.n_ticks))


# --- against recorded markets ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(
    not RECORDED.is_dir(), reason="no recorded traces: SKYSERVE_TRACES names no folder with them"
)
@pytest.mark.parametrize(
    ("name", "availability", "chunk_days", "cost_percent"),
    [
        pytest.param("aws1", 1.0, 11, 40.4, id="AWS 1"),
        pytest.param("v100w", 1.0, 11, 41.8, id="V100, a week"),
        pytest.param("v100w", 0.99, 11, 40.6, id="V100, a week, 99 %"),
        pytest.param("aws3-first-half", 1.0, 3, 34.7, id="AWS 3, its first half"),
    ],
)
def test_recorded_traces_cost_what_they_did(
    name: str, availability: float, chunk_days: float, cost_percent: float
) -> None:
    found = solve(
        load(RECORDED / name),
        n_target=4,
        cold_start_s=183,
        price_ratio=3.0,
        availability=availability,
        chunk_s=chunk_days * 86400.0,
    )
    assert 100 * found.cost_relative == pytest.approx(cost_percent, abs=0.3)
    assert found.status == "optimal"
    assert found.availability >= availability
