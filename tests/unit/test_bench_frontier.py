"""The arithmetic of `benchmarks.frontier`: blocks add up to their run, mixtures cost what the frontier has,
intervals are of pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import synthetic
from benchmarks.frontier import table
from benchmarks.frontier_stats import (
    Family,
    Outcome,
    Sample,
    cost,
    cost_difference,
    failed_launches,
    mixture,
    one_by_one,
    point_difference,
)
from benchmarks.market_runs import (
    FAMILIES,
    Case,
    Circumstances,
    Piece,
    blocks_of,
    recorded_cases,
    run_all,
)
from skyserve_cli.sim.frontier import Point, cost_at
from skyserve_cli.sim.run import simulate
from skyserve_cli.sim.settings import Job, Setting
from skyserve_cli.sim.trace import Steps, Trace

MARKET = synthetic.RECIPES["synthetic-volatile"].market
CHEAP, SAFE = Point(0.4, 0.02), Point(0.6, 0.004)


def small_trace(days: float = 0.625) -> Trace:
    return synthetic.generate(MARKET, seed=7, days=days, name="small")


def family(*settings: tuple[list[float], list[float]]) -> Family:
    """Settings as (what was paid, hours below target) of samples of 10 h; the n-th fails 100 n launches a day."""
    return tuple(
        Outcome(
            Job("spothedge", number),
            tuple(Sample(10.0, paid, down) for paid, down in zip(paids, downs, strict=True)),
            100.0 * number,
        )
        for number, (paids, downs) in enumerate(settings)
    )


@pytest.mark.parametrize(
    ("down", "shares"),
    [
        pytest.param(0.03, [1.0, 0.0], id="the cheapest is good enough"),
        pytest.param(0.02, [1.0, 0.0], id="the cheapest is just good enough"),
        pytest.param(0.012, [0.5, 0.5], id="half way between two"),
        pytest.param(0.004, [0.0, 1.0], id="just the safe one"),
        pytest.param(0.001, [0.0, 0.25], id="the rest on demand"),
        pytest.param(0.0, [0.0, 0.0], id="only on demand is never down"),
    ],
)
def test_mixture_shares_the_time_between_neighbours(down: float, shares: list[float]) -> None:
    assert mixture([CHEAP, SAFE], down) == pytest.approx(shares)


def test_of_equal_points_one_is_counted() -> None:
    assert mixture([CHEAP, CHEAP, SAFE], 0.02) == [1.0, 0.0, 0.0]


points = st.builds(Point, st.floats(0.2, 1.1), st.floats(0.0, 0.3))


@given(st.lists(points, min_size=1, max_size=8), st.floats(0.0, 0.1))
def test_mixture_costs_what_the_frontier_says(family: list[Point], down: float) -> None:
    shares = mixture(family, down)
    total = sum(share * point.cost for share, point in zip(shares, family, strict=True))
    assert total + 1.0 - sum(shares) == pytest.approx(cost_at(family, down))
    assert sum(share * point.down for share, point in zip(shares, family, strict=True)) <= down + 1e-9


def test_failed_launches_are_those_of_the_mixture() -> None:
    mixed = family(([4.0], [0.2]), ([6.0], [0.04]))
    assert failed_launches(mixed, 1 - 0.012) == pytest.approx(50.0)


def test_a_family_against_itself_differs_by_nothing() -> None:
    one = family(([4.0, 5.0, 9.0], [0.1, 0.0, 0.4]), ([7.0, 8.0, 9.5], [0.0, 0.0, 0.1]))
    assert cost_difference(one, one, 0.99, resamples=50) == (0.0, 0.0)


def test_what_is_dearer_in_every_sample_is_dearer_for_sure() -> None:
    paid = [3.0, 9.0, 4.0, 8.0]  # samples differ by more than the families do
    one, other = family((paid, [0.0] * 4)), family(([p + 0.5 for p in paid], [0.0] * 4))
    assert cost_difference(one, other, 0.99, resamples=50) == pytest.approx((0.05, 0.05))
    assert one_by_one(one, other, 0.99).dearer == 4
    assert one_by_one(other, one, 0.99).cheaper == 4
    dearer, longer = point_difference(one[0], other[0], resamples=50)
    assert dearer == pytest.approx((0.05, 0.05))
    assert longer == (0.0, 0.0)


def test_an_interval_is_wide_where_samples_disagree() -> None:
    flat, split = family(([5.0] * 4, [0.0] * 4)), family(([2.0, 8.0, 2.0, 8.0], [0.0] * 4))
    low, high = cost_difference(flat, split, 0.99, resamples=200)
    assert low < 0 < high
    assert cost(split, 0.99) == cost(flat, 0.99) == 0.5


@pytest.mark.parametrize("job", [Job("spothedge", 1), Job("risk_hedge", availability_target=0.99)], ids=str)
def test_blocks_add_up_to_the_run(job: Job) -> None:
    setting = Setting(small_trace(), 2, 183.0)
    run = simulate(setting, job)
    blocks = blocks_of(run, setting)
    assert [round(hours, 2) for hours in blocks.hours] == [6.0, 6.0, 2.95]  # 15 h without the cold start
    assert sum(blocks.paid) / sum(blocks.hours) == pytest.approx(run.cost_relative)
    assert 1 - sum(blocks.down) / sum(blocks.hours) == pytest.approx(run.availability)


def test_prices_that_move_are_not_cut_into_wrong_blocks() -> None:
    trace = small_trace()
    moving = Steps((0, 200), (1.0, 2.0))
    trace = replace(trace, zones=tuple(replace(zone, spot_usd_hour=moving) for zone in trace.zones))
    setting = Setting(trace, 2, 183.0)
    with pytest.raises(ValueError, match="its prices move"):
        blocks_of(simulate(setting, Job("spothedge", 1)), setting)


def test_what_is_in_the_cache_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = small_trace(days=0.2)
    case = Case("small", "whole", True, ((0, trace),))
    pieces = [Piece(case, trace, job, Circumstances(2)) for job in FAMILIES["spothedge"][:2]]
    cache = tmp_path / "runs.json"
    first = run_all(pieces[:1], cache, processes=1)
    capsys.readouterr()
    assert run_all(pieces, cache, processes=1)[:1] == first
    assert "2 runs, 1 of them in the cache" in capsys.readouterr().err


def test_a_recording_is_split_in_time(tmp_path: Path) -> None:
    trace = small_trace()
    synthetic.write(trace, tmp_path / "recorded")
    second, first = recorded_cases(f"{tmp_path}/recorded", whole=False, policy_seeds=1)
    (_, late), (_, early) = second.traces[0], first.traces[0]
    assert early.n_ticks == late.n_ticks == trace.n_ticks // 2
    assert early.zones[0].capacity.at(0) == trace.zones[0].capacity.at(0)
    assert late.zones[0].capacity.at(0) == trace.zones[0].capacity.at(trace.n_ticks - late.n_ticks)


def test_markdown_has_a_line_below_the_head() -> None:
    assert table([["a", "b"], ["1", "22"]], markdown=True).split("\n") == [
        "| a | b |",
        "| --- | --- |",
        "| 1 | 22 |",
    ]
    assert table([["a", "b"], ["1", "22"]], markdown=False) == "a  b\n1  22"
