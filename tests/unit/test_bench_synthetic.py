"""Make-believe markets: same seed, same trace; and the three habits, measured on what comes out."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.synthetic import RECIPES, Lull, MarketParameters, generate, main, write
from skyserve_cli.sim.trace import Trace, find, load, named, shipped

ZONES = tuple(f"{region}-1{zone}" for region in ("east", "west") for zone in "abc")
ALIKE = MarketParameters(ZONES, unlike=0.0)
TOGETHER_TICKS = 20  # ten minutes


def losses(trace: Trace, zone: str) -> list[int]:
    steps = trace.zone(zone).capacity
    pairs = zip(steps.ticks[1:], steps.values[1:], steps.values, strict=False)
    return [tick for tick, after, before in pairs if after < before]


def hazard_per_h(trace: Trace, from_h: float, to_h: float) -> float:
    """Losses per hour at an age between the two: since the last loss, or the last return from nothing."""
    events, exposure_h = 0, 0.0
    for zone in trace.zones:
        ticks, values = zone.capacity.ticks, zone.capacity.values
        born = None
        for index in range(1, len(ticks) - 1):
            if values[index] < values[index - 1] or values[index - 1] == 0:
                born = ticks[index]
            if born is None or values[index] == 0:
                continue
            begin_h, end_h = (
                (tick - born) * trace.tick_s / 3600 for tick in (ticks[index], ticks[index + 1])
            )
            exposure_h += max(0.0, min(end_h, to_h) - max(begin_h, from_h))
            events += values[index + 1] < values[index] and from_h < end_h <= to_h
    return events / exposure_h


def falls_along(trace: Trace, *, same_region: bool) -> float:
    """How often, when a zone loses, another one does so within ten minutes."""
    falls = {zone.name: losses(trace, zone.name) for zone in trace.zones}
    along, chances = 0, 0
    for one in trace.zones:
        for other in trace.zones:
            if one is other or (one.region == other.region) is not same_region:
                continue
            theirs = falls[other.name]
            for tick in falls[one.name]:
                along += bisect_right(theirs, tick + TOGETHER_TICKS) > bisect_left(theirs, tick)
                chances += 1
    return along / chances


# --- the same every time --------------------------------------------------------------------------------------


def test_same_market_and_seed_same_trace_and_another_seed_another() -> None:
    assert generate(ALIKE, 7, 3) == generate(ALIKE, 7, 3)
    assert generate(ALIKE, 7, 3) != generate(ALIKE, 8, 3)


def test_what_ships_is_made_again_byte_for_byte(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    assert sorted(RECIPES) == sorted(path.name for path in tmp_path.iterdir()) == list(shipped())
    for name in shipped():
        made = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        assert made == {entry.name: entry.read_bytes() for entry in find(name).iterdir()}


def test_the_writer_wants_one_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("gap_s", [30.0, 77.5, 300.0], ids=str)
def test_what_is_written_is_what_was_generated(tmp_path: Path, gap_s: float) -> None:
    made = generate(replace(ALIKE, gap_s=gap_s), 3, 1.3, name="made")
    write(made, tmp_path / "made")
    assert load(tmp_path / "made") == made


def test_length_and_bounds() -> None:
    trace = generate(replace(ALIKE, capacity=3), 1, 2)
    assert trace.length_s == 2 * 86400
    assert {value for zone in trace.zones for value in zone.capacity.values} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "wrong",
    [
        {"zones": ()},
        {"zones": ("a", "a")},
        {"capacity": 0},
        {"gap_s": 0.0},
        {"partial": 1.5},
        {"daily": -0.1},
    ],
    ids=str,
)
def test_a_market_makes_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"between|at least|once"):
        replace(ALIKE, **wrong)  # type: ignore[arg-type]


# --- the habits -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_trace() -> Trace:
    return generate(ALIKE, 11, 250)


def test_the_hazard_falls_with_age(long_trace: Trace) -> None:
    young, grown, old = (hazard_per_h(long_trace, *ages) for ages in ((0.0, 1.0), (2.0, 5.0), (12.0, 48.0)))
    assert 0.5 < young < 1.6
    assert 0.15 < grown < 0.6
    assert old < 0.25
    assert young > 2 * grown > 2 * old


def test_without_age_it_does_not() -> None:
    """What the measurement above sees is not an artefact of measuring."""
    constant = Lull(shape=0.0, scale_h=1.0, floor=0.3)
    trace = generate(replace(ALIKE, calm=constant, same_region=0.0, other_region=0.0), 11, 250)
    young, old = hazard_per_h(trace, 0.0, 1.0), hazard_per_h(trace, 5.0, 20.0)
    assert 0.8 < young / old < 1.25


def test_zones_of_a_region_fall_together(long_trace: Trace) -> None:
    same, other = falls_along(long_trace, same_region=True), falls_along(long_trace, same_region=False)
    assert 0.12 < same < 0.4
    assert 0.01 < other < 0.12
    assert same > 2 * other


def test_shortages_are_mostly_short_and_sometimes_long(long_trace: Trace) -> None:
    hours = sorted(
        (end - start) * long_trace.tick_s / 3600
        for zone in long_trace.zones
        for start, end, value in zip(
            zone.capacity.ticks, zone.capacity.ticks[1:], zone.capacity.values, strict=False
        )
        if value == 0
    )
    assert hours[len(hours) // 2] < 1.5
    assert hours[len(hours) * 99 // 100] > 6.0


def test_losses_come_by_day_where_asked() -> None:
    trace = generate(replace(ALIKE, daily=1.0, same_region=0.0, other_region=0.0), 5, 250)
    by_day = [
        6 <= tick * trace.tick_s / 3600 % 24 < 18 for zone in trace.zones for tick in losses(trace, zone.name)
    ]
    assert sum(by_day) > 1.5 * (len(by_day) - sum(by_day))


@pytest.mark.parametrize(
    ("name", "somewhere"),
    [
        pytest.param("synthetic-volatile", (0.80, 0.97), id="volatile: at times nothing anywhere"),
        pytest.param("synthetic-wide", (0.97, 1.0), id="wide: nearly always something"),
    ],
)
def test_what_ships_is_neither_hopeless_nor_easy(name: str, somewhere: tuple[float, float]) -> None:
    trace = named(name)
    ticks = range(0, trace.n_ticks, 10)
    share = sum(any(zone.capacity.at(tick) for zone in trace.zones) for tick in ticks) / len(ticks)
    assert somewhere[0] <= share <= somewhere[1]
    for zone in trace.zones:
        up = sum(zone.capacity.at(tick) > 0 for tick in ticks) / len(ticks)
        assert 0.1 < up < 0.95
