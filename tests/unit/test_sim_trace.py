"""Spot traces: what files say, how they are laid on ticks, and cut."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioners.local.config import load_cloud, read_market
from provisioners.local.store import LocalStore
from skyserve_cli.sim import trace as traces
from skyserve_cli.sim.trace import UNLIMITED, Steps, Trace, TraceError, find, load, named, region_of, shipped


def write_zone(folder: Path, stem: str, data: object, gap_s: float = 30, **rest: Any) -> Path:
    folder.mkdir(exist_ok=True)
    metadata = {"gap_seconds": gap_s, **rest.pop("metadata", {})}
    path = folder / f"{stem}.json"
    path.write_text(json.dumps({"metadata": metadata, "data": data, **rest}))
    return path


def by_tick(trace: Trace, zone: str) -> list[int]:
    return [trace.capacity(zone, tick) for tick in range(trace.n_ticks)]


# --- steps ----------------------------------------------------------------------------------------------------


def test_steps_keep_changes_only_and_of_one_tick_the_last() -> None:
    steps = Steps.of(iter([(0, 4), (2, 4), (3, 1), (3, 4), (5, 2), (5, 0), (9, 0)]))
    assert steps == Steps((0, 5), (4, 0))


@pytest.mark.parametrize(
    ("tick", "value", "following"),
    [
        pytest.param(0, 4, 2, id="at the beginning"),
        pytest.param(1, 4, 2, id="just before a change"),
        pytest.param(2, 1, 5, id="at a change"),
        pytest.param(5, 3, None, id="at the last change"),
        pytest.param(99, 3, None, id="it stays as it was left"),
    ],
)
def test_steps_answer_for_every_tick(tick: int, value: int, following: int | None) -> None:
    steps = Steps((0, 2, 5), (4, 1, 3))
    assert steps.at(tick) == value
    assert steps.next_change(tick) == following


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.data())
def test_a_cut_is_the_same_as_a_slice(values: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(values) - 1))
    length = data.draw(st.integers(1, len(values) - start))
    cut = Steps.of(iter(list(enumerate(values)))).cut(start, length)
    assert [cut.at(tick) for tick in range(length)] == values[start : start + length]
    assert cut == Steps.of(iter(list(enumerate(values[start : start + length]))))


# --- reading --------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 3), min_size=3, max_size=60),
    st.sampled_from([15, 30, 32, 40, 195, 300, 45.5]),
    st.sampled_from([10.0, 30.0, 60.0]),
)
def test_a_tick_has_what_was_recorded_last_before_it(data: list[int], gap_s: float, tick_s: float) -> None:
    recording = traces._Recording("z.json", "z", "z", gap_s, data, None, None)
    n_ticks = math.floor(len(data) * gap_s / tick_s)
    zone = traces._on_grid(recording, traces._Available(), n_ticks, tick_s)
    wanted = [data[math.floor(tick * tick_s / gap_s)] for tick in range(n_ticks)]
    assert [zone.capacity.at(tick) for tick in range(n_ticks)] == wanted


def test_zones_of_different_gaps_and_lengths_are_cut_to_what_they_share(tmp_path: Path) -> None:
    write_zone(tmp_path / "set", "us-east-1a", [2, 0, 5], gap_s=60)
    write_zone(tmp_path / "set", "us-central1-b_a100-80gb_8", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    trace = load(tmp_path / "set")
    assert (trace.name, trace.n_ticks, trace.length_s, trace.gap_s) == ("set", 6, 180.0, 60)
    assert [(zone.name, zone.region) for zone in trace.zones] == [
        ("us-central1-b", "us-central1"),
        ("us-east-1a", "us-east-1"),
    ]
    assert by_tick(trace, "us-east-1a") == [2, 2, 0, 0, 5, 5]
    assert by_tick(trace, "us-central1-b") == [1, 2, 3, 4, 5, 6]
    assert trace.changes() == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("data", "capacity_per_zone", "capacities", "reading"),
    [
        pytest.param(
            [1, 0], None, [UNLIMITED, 0], "a probe of one instance, read as any number", id="a probe: any"
        ),
        pytest.param(
            [1, 0], 1, [1, 0], "a probe of one instance, read as 1 per zone", id="a probe, one per zone"
        ),
        pytest.param(
            [1, 0], 6, [6, 0], "a probe of one instance, read as 6 per zone", id="a probe, six per zone"
        ),
        pytest.param([4, 1], None, [4, 1], "counts of instances", id="counts as they are"),
        pytest.param([4, 1], 2, [2, 1], "counts of instances, at most 2 per zone", id="counts, capped"),
        pytest.param(
            [4, 0], "unlimited", [UNLIMITED, 0], "counts of instances, read as any number", id="counts, any"
        ),
    ],
)
def test_what_a_number_stands_for(
    tmp_path: Path, data: list[int], capacity_per_zone: Any, capacities: list[int], reading: str
) -> None:
    write_zone(tmp_path, "us-a", data)
    trace = load(tmp_path, capacity_per_zone=capacity_per_zone)
    assert by_tick(trace, "us-a") == capacities
    assert trace.reading == reading


def test_a_set_is_counts_as_soon_as_one_zone_counts(tmp_path: Path) -> None:
    write_zone(tmp_path, "us-a", [1, 0])
    write_zone(tmp_path, "us-b", [0, 3])
    assert by_tick(load(tmp_path), "us-a") == [1, 0]


def test_prices_and_the_region_where_a_recording_says_them(tmp_path: Path) -> None:
    write_zone(
        tmp_path,
        "z1",
        [1, 1, 0],
        prices=[0.9, 0.9, 1.1],
        metadata={"region": "mars", "on_demand_usd_hour": 3},
    )
    write_zone(tmp_path, "z2", [1, 1, 0], metadata={"spot_usd_hour": 0.5})
    write_zone(tmp_path, "z3", [1, 1, 0])
    first, second, third = load(tmp_path).zones
    assert (first.region, first.spot_usd_hour, first.on_demand_usd_hour) == (
        "mars",
        Steps((0, 2), (0.9, 1.1)),
        3.0,
    )
    assert (second.region, second.spot_usd_hour) == ("z2", Steps.constant(0.5))
    assert (third.spot_usd_hour, third.on_demand_usd_hour) == (None, None)


@pytest.mark.parametrize(
    ("zone", "region"),
    [
        ("us-east-1a", "us-east-1"),
        ("ap-southeast-2c", "ap-southeast-2"),
        ("us-central1-b", "us-central1"),
        ("us-west-2-lax-1a", "us-west-2-lax-1"),
        ("eastus-1", "eastus-1"),
        ("a", "a"),
    ],
)
def test_the_region_is_in_the_name(zone: str, region: str) -> None:
    assert region_of(zone) == region


GOOD = {"metadata": {"gap_seconds": 30}, "data": [1]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param("[[[[[", "not JSON", id="no JSON"),
        pytest.param("[" * 100_000, "not JSON", id="a very deep one"),
        pytest.param("[]", "not a zone of a trace", id="a list"),
        pytest.param(GOOD | {"metadata": 3}, "not a zone of a trace", id="metadata of another kind"),
        pytest.param(
            GOOD | {"metadata": {}},
            "metadata.gap_seconds is null, and must be a number from 0 to 1e+06",
            id="no gap",
        ),
        pytest.param(GOOD | {"metadata": {"gap_seconds": 0}}, "must be more", id="a gap of nothing"),
        pytest.param(
            GOOD | {"metadata": {"gap_seconds": True}}, "metadata.gap_seconds is true", id="a gap of truth"
        ),
        pytest.param(
            '{"metadata": {"gap_seconds": NaN}, "data": [1]}', "not JSON", id="a gap that is no number"
        ),
        pytest.param(
            GOOD | {"metadata": {"gap_seconds": 30, "region": 7}}, "are texts", id="a region that is none"
        ),
        pytest.param(GOOD | {"data": None}, "data is not a list", id="no data"),
        pytest.param(GOOD | {"data": []}, "data is not a list", id="empty data"),
        pytest.param(
            GOOD | {"data": [1, -1]},
            "data[1] is -1, and must be a whole number from 0 to 1000000",
            id="a negative count",
        ),
        pytest.param(GOOD | {"data": [1.5]}, "data[0] is 1.5", id="half an instance"),
        pytest.param(GOOD | {"data": [True]}, "data[0] is true", id="a truth for a count"),
        pytest.param(GOOD | {"data": ["x" * 99]}, 'data[0] is "xxx', id="a text for a count"),
        pytest.param(GOOD | {"data": [10**7]}, "data[0] is 10000000", id="more than there are"),
        pytest.param(GOOD | {"prices": [1, 2]}, "prices is not a list as long as data", id="too many prices"),
        pytest.param(GOOD | {"prices": ["a"]}, 'prices[0] is "a"', id="a price that is none"),
        pytest.param(
            {"metadata": {"gap_seconds": 30, "spot_usd_hour": -1}, "data": [1]},
            "metadata.spot_usd_hour is -1",
            id="a negative price",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence_with_the_path(tmp_path: Path, content: Any, says: str) -> None:
    path = tmp_path / "us-a.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TraceError) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200


def test_folders_that_are_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no-such: No such file"):
        load(tmp_path / "no-such")
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "._us-a.json").write_text("a file manager's")
    (tmp_path / "us-b.json").mkdir()
    os.mkfifo(tmp_path / "us-c.json")
    with pytest.raises(TraceError, match="no trace: a trace is a folder"):
        load(tmp_path)


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zone(tmp_path, "us-a", [1, 1, 1])
    with pytest.raises(TraceError, match="shorter than one tick of 100 s"):
        load(tmp_path, tick_s=100.0)
    with pytest.raises(TraceError, match="capacity_per_zone is 0"):
        load(tmp_path, capacity_per_zone=0)
    monkeypatch.setattr(traces, "MAX_POINTS", 2)
    with pytest.raises(TraceError, match="data has 3 points, and at most 2"):
        load(tmp_path)
    monkeypatch.setattr(traces, "MAX_FILE_BYTES", 10)
    with pytest.raises(TraceError, match="larger than"):
        load(tmp_path)
    write_zone(tmp_path, "us-a_again", [1])
    monkeypatch.setattr(traces, "MAX_FILES", 1)
    with pytest.raises(TraceError, match="2 zones, and at most 1"):
        load(tmp_path)


def test_a_zone_is_there_once(tmp_path: Path) -> None:
    write_zone(tmp_path, "us-a_first", [1])
    write_zone(tmp_path, "us-a_second", [1])
    with pytest.raises(TraceError, match=r"us-a_second.json: the zone us-a is also in .*us-a_first.json"):
        load(tmp_path)


def test_the_local_cloud_reads_the_same_format(tmp_path: Path) -> None:
    """`serve local market` has a reader of its own in another package: it replays what the simulator does."""
    data = [3, 3, 0, 2, 2, 5]
    write_zone(tmp_path / "set", "us-a", data, gap_s=60)
    market = read_market(tmp_path / "set", load_cloud(LocalStore(tmp_path / "home")), now=0.0)
    steps = market.schedule["us-a", next(key[1] for key in market.schedule if key[0] == "us-a")]
    zone = load(tmp_path / "set").zone("us-a")
    assert [(step.at_s / 30.0, step.limit.capacity) for step in steps] == list(
        zip(zone.capacity.ticks, zone.capacity.values, strict=True)
    )


# --- windows --------------------------------------------------------------------------------------------------


def test_windows_are_whole_and_follow_each_other(tmp_path: Path) -> None:
    write_zone(tmp_path / "set", "us-a", [0, 1, 2, 3, 4, 5, 6], prices=[1, 1, 1, 2, 2, 2, 2])
    trace = load(tmp_path / "set")
    first, second = trace.windows(90.0)
    assert by_tick(first, "us-a") == [0, 1, 2]
    assert by_tick(second, "us-a") == [3, 4, 5]
    assert second.n_ticks == 3
    assert second.name == "set@0.025h+0.025h"
    assert second.zones[0].spot_usd_hour == Steps.constant(2.0)
    assert by_tick(trace.window(60.0, 60.0), "us-a") == [2, 3]


@pytest.mark.parametrize(
    ("start_s", "length_s"), [(-30.0, 60.0), (0.0, 0.0), (0.0, 90.0), (30.0, 60.0)], ids=str
)
def test_a_window_lies_within_the_trace(tmp_path: Path, start_s: float, length_s: float) -> None:
    write_zone(tmp_path, "us-a", [0, 1])
    with pytest.raises(ValueError, match="no window of"):
        load(tmp_path).window(start_s, length_s)


def test_a_trace_shorter_than_a_window_has_none(tmp_path: Path) -> None:
    write_zone(tmp_path, "us-a", [0, 1])
    with pytest.raises(ValueError, match="no window of 24 h"):
        load(tmp_path).windows(86400.0)


# --- what ships -----------------------------------------------------------------------------------------------


def test_traces_come_with_the_package() -> None:
    assert shipped() == ("synthetic-volatile", "synthetic-wide")
    assert load(find("synthetic-wide")) == named("synthetic-wide")
    wide = named("synthetic-wide")
    assert (len(wide.zones), len({zone.region for zone in wide.zones}), wide.length_s) == (9, 3, 14 * 86400.0)


def test_a_folder_goes_before_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zone(tmp_path / "synthetic-wide", "us-a", [1])
    monkeypatch.chdir(tmp_path)
    assert len(load(find("synthetic-wide")).zones) == 1


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(TraceError, match=r"no-such: .*synthetic-volatile, synthetic-wide"):
        find("no-such")
    with pytest.raises(TraceError, match=r"no-such: .*synthetic-volatile, synthetic-wide"):
        named("no-such")
