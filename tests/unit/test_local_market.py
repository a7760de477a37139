"""The local spot market as a function of time, and the files it is read from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from policies.model import CapacityType
from provisioners.local import controls as local_controls
from provisioners.local.config import load_cloud, read_market
from provisioners.local.spot_market import (
    Limit,
    LocalMarket,
    MarketReader,
    MarketStep,
    load_market,
    save_market,
)
from provisioners.local.store import LocalStore
from provisioners.port.errors import InvalidRequestError

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
START = 1000.0
SCRIPTED = LocalMarket(
    started_at=START,
    speed=10.0,
    schedule={
        ("us-a", SPOT): (
            MarketStep(100.0, Limit(2)),
            MarketStep(200.0, Limit(0, 30.0)),
            MarketStep(300.0, Limit(None)),
        )
    },
    overrides={("eu-a", SPOT): 1},
    source="script.yaml",
)


@pytest.mark.parametrize(
    ("zone", "capacity_type", "at", "limit"),
    [
        pytest.param("us-a", SPOT, START, None, id="before the first step it says nothing"),
        pytest.param("us-a", SPOT, START + 9.99, None, id="until just before it"),
        pytest.param(
            "us-a", SPOT, START + 10, Limit(2), id="a step holds from its instant, in compressed time"
        ),
        pytest.param("us-a", SPOT, START + 19.99, Limit(2), id="until the next"),
        pytest.param("us-a", SPOT, START + 20, Limit(0, 30.0), id="a step may bring notice"),
        pytest.param("us-a", SPOT, START + 1e9, Limit(None), id="the last step stays"),
        pytest.param("us-a", ON_DEMAND, START + 20, None, id="spot says nothing about on-demand"),
        pytest.param("us-b", SPOT, START + 20, None, id="a zone it does not name is calm"),
        pytest.param("eu-a", SPOT, START - 1e6, Limit(1), id="an override holds at all times"),
    ],
)
def test_what_the_market_says(zone: str, capacity_type: CapacityType, at: float, limit: Limit | None) -> None:
    assert SCRIPTED.limit(zone, capacity_type, at) == limit


def test_an_override_is_louder_than_the_schedule() -> None:
    loud = replace(SCRIPTED, overrides={("us-a", SPOT): 7})
    assert loud.limit("us-a", SPOT, START + 20) == Limit(7)


def test_a_market_survives_the_disk(tmp_path: Path) -> None:
    save_market(tmp_path / "market.json", SCRIPTED)
    assert load_market(tmp_path / "market.json") == SCRIPTED


def test_no_file_is_a_calm_market(tmp_path: Path) -> None:
    assert load_market(tmp_path / "market.json") == LocalMarket()


def test_a_reader_sees_a_market_that_comes_changes_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "market.json"
    reader = MarketReader(path)
    assert reader.read() == LocalMarket()
    save_market(path, SCRIPTED)
    assert reader.read() == SCRIPTED
    assert reader.read() is reader.read()
    save_market(path, LocalMarket(source="other"))
    assert reader.read() == LocalMarket(source="other")
    path.unlink()
    assert reader.read() == LocalMarket()


# --- From files ---------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "home")


def play(store: LocalStore, folder: Path, text: str, speed: float | None = None) -> LocalMarket:
    path = folder / "market.yaml"
    path.write_text(text)
    return read_market(path, load_cloud(store), START, speed)


def test_a_timeline_is_sorted_and_a_star_is_every_zone(store: LocalStore, tmp_path: Path) -> None:
    market = play(
        store,
        tmp_path,
        "timeline:\n"
        "  - {at: 2m, zone: us-a, spot: 5, notice: 10s}\n"
        "  - {at: 500ms, zone: '*', spot: 0}\n"
        "  - {at: 3, zone: us-a, on_demand: 1}\n",
    )
    assert len({zone for zone, _ in market.schedule}) == 6
    assert market.schedule["us-a", SPOT] == (MarketStep(0.5, Limit(0)), MarketStep(120.0, Limit(5, 10.0)))
    assert market.schedule["us-a", ON_DEMAND] == (MarketStep(3.0, Limit(1)),)


@pytest.mark.parametrize(
    ("in_file", "asked", "speed"), [("", None, 1.0), ("speed: 60", None, 60.0), ("speed: 60", 5.0, 5.0)]
)
def test_the_speed_asked_for_wins_over_the_files(
    store: LocalStore, tmp_path: Path, in_file: str, asked: float | None, speed: float
) -> None:
    assert play(store, tmp_path, f"timeline: []\n{in_file}", asked).speed == speed


def write_trace(folder: Path, **zones: list[int]) -> Path:
    folder.mkdir()
    for name, data in zones.items():
        zone = {"metadata": {"gap_seconds": 300, "other": 1}, "data": data, "prices": None}
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(zone))
    return folder


def test_a_trace_goes_to_zones_by_name_if_it_has_their_names(store: LocalStore, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", us_b=[4, 4, 0, 0, 1], asia_a=[1])
    market = read_market(trace, load_cloud(store), START)
    assert market.schedule["us-b", SPOT] == (
        MarketStep(0, Limit(4)),
        MarketStep(600, Limit(0)),
        MarketStep(1200, Limit(1)),
    )
    assert market.schedule["asia-a", SPOT] == (MarketStep(0, Limit(1)),)
    assert market.limit("us-a", SPOT, START) == Limit(0)  # not in the trace: not in this world


def test_a_trace_goes_to_zones_in_order_if_it_has_not(store: LocalStore, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace", us_east_1a=[1], us_west_2b=[2])
    market = play(store, tmp_path, "trace: trace\nspeed: 100")
    assert [market.limit(zone, SPOT, START) for zone in ("us-a", "us-b", "eu-a")] == [
        Limit(1),
        Limit(2),
        Limit(0),
    ]
    assert market.speed == 100


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("timeline: []\ntrace: x", "give either `timeline` or `trace`"),
        ("speed: 2", "give either `timeline` or `trace`"),
        ("timelime: []", "timelime: unknown key; did you mean 'timeline'?"),
        ("timeline: []\nspeed: 0", "speed: Input should be greater than 0 (got 0)"),
        ("timeline: [{at: soon, zone: us-a, spot: 1}]", "timeline.0.at: a duration is a number of seconds"),
        ("timeline: [{at: 1, zone: us-a, spott: 1}]", "timeline.0.spott: unknown key; did you mean 'spot'?"),
        (
            "timeline: [{at: 1, zone: us-a, spot: -1}]",
            "timeline.0.spot: Input should be greater than or equal to 0",
        ),
        (
            "timeline: [{at: 1, zone: us-c, spot: 1}]",
            "timeline.0.zone: there is no zone 'us-c'; did you mean 'us-",
        ),
        ("timeline: [", "not YAML"),
        ("trace: nowhere", "nowhere: no trace"),
    ],
)
def test_a_wrong_market_is_refused_with_its_path(
    store: LocalStore, tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        play(store, tmp_path, text)
    assert says in caught.value.message


# --- cloud.yaml ---------------------------------------------------------------------------------------------


def test_the_first_look_writes_a_cloud_one_can_edit(store: LocalStore) -> None:
    cloud = load_cloud(store)
    assert list(cloud.regions) == ["us", "eu", "asia"]
    assert len({zone.spot_usd_hour for _, _, zone in cloud.zones()}) == len(cloud.zones()) == 6
    store.config_path.write_text(
        store.config_path.read_text().replace("cold_start_s: 0.5", "cold_start_s: 2m")
    )
    assert load_cloud(store).cold_start_s == 120.0


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("cold_start_s", "cold_starts_s", "cold_starts_s: unknown key; did you mean 'cold_start_s'?"),
        (
            "us-a: {spot_usd_hour",
            "us-a: {spot_usd_hours: 1, spot_usd_hour",
            "regions.us.us-a.spot_usd_hours: unknown key; did you mean 'spot_usd_hour'?",
        ),
        (
            "spot_usd_hour: 0.30",
            "spot_usd_hour: cheap",
            "regions.us.us-a.spot_usd_hour: Input should be a valid number",
        ),
        ("    eu-a:", "    us-a:", "zone names must differ over all regions: us-a"),
        ("10.213.0.0/16", "everywhere", "network: "),
    ],
)
def test_a_wrong_cloud_is_refused_with_its_path(
    store: LocalStore, before: str, after: str, says: str
) -> None:
    load_cloud(store)
    store.config_path.write_text(store.config_path.read_text().replace(before, after, 1))
    with pytest.raises(InvalidRequestError) as caught:
        load_cloud(store)
    assert says in caught.value.message


def test_all_that_is_wrong_is_said_at_once(store: LocalStore) -> None:
    load_cloud(store)
    store.config_path.write_text("cold_start_s: -1\nregion: {}\n")
    with pytest.raises(InvalidRequestError) as caught:
        load_cloud(store)
    assert len(caught.value.message.splitlines()) == 3  # and `regions` is missing


# --- By hand ------------------------------------------------------------------------------------------------


def test_overrides_come_and_go_one_by_one(tmp_path: Path) -> None:
    local_controls.set_capacity(tmp_path, "us-a", 3)
    local_controls.set_capacity(tmp_path, "us-a", 2, ON_DEMAND)
    local_controls.set_capacity(tmp_path, "us-a", None)
    us_a = local_controls.zones(tmp_path)[0]
    assert (us_a.spot_capacity, us_a.on_demand_capacity) == (8, 2)


@pytest.mark.parametrize(
    ("zone", "capacity", "says"), [("us-q", 1, "did you mean"), ("us-a", -1, "less than 0")]
)
def test_an_override_that_makes_no_sense_is_refused(
    tmp_path: Path, zone: str, capacity: int, says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        local_controls.set_capacity(tmp_path, zone, capacity)
