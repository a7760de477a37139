"""What the words of `serve simulate` ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from policies.goals import PlacementGoal, ScalingGoal
from skyserve_cli.commands import runs
from skyserve_cli.commands.durations import seconds
from skyserve_cli.output import WrongUsage
from skyserve_cli.sim.settings import Job
from skyserve_cli.sim.trace import UNLIMITED, Steps, Trace, ZoneTrace
from skyserve_cli.spec import ResourceChoice, ServiceSpec


def spec(scaling: ScalingGoal, placement: PlacementGoal | None = None, *, spot: bool = True) -> ServiceSpec:
    return ServiceSpec(
        name="chat",
        run="serve",
        scaling=scaling,
        placement=placement or PlacementGoal(),
        resources=(ResourceChoice(use_spot=spot),),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two zones for an hour: one empty in its second half, the other with room for one."""
    here = tmp_path / "market"
    here.mkdir()
    for zone, data in {"us-east-1a": [2, 2, 0, 0], "eu-west-1b": [1, 1, 1, 1]}.items():
        prices = {"gap_seconds": 900, "spot_usd_hour": 1.0, "on_demand_usd_hour": 4.0}
        (here / f"{zone}.json").write_text(json.dumps({"metadata": prices, "data": data}))
    return here


# --- durations and lists ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found_s"),
    [("183", 183), ("10s", 10), ("500ms", 0.5), ("2m", 120), ("1.5h", 5400), ("24 h", 86400), ("7d", 604800)],
)
def test_durations(text: str, found_s: float) -> None:
    assert seconds("--window", text) == found_s


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1w", "1h30m", "nan"])
def test_what_is_no_duration_names_its_option(text: str) -> None:
    with pytest.raises(WrongUsage, match=r"^--window takes a duration such as 10s, 2m or 24h \(got "):
        seconds("--window", text)


def test_lists_are_comma_lists_or_repeated_options() -> None:
    assert runs.items(["a, b", "c", "a,"]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "found"),
    [("0", (0,)), ("3,1,3", (3, 1)), ("0..3", (0, 1, 2, 3)), ("7,0..1", (7, 0, 1)), ("5..5", (5,))],
)
def test_seeds(text: str, found: tuple[int, ...]) -> None:
    assert runs.seeds(text) == found


@pytest.mark.parametrize(
    ("parse", "given", "sentence"),
    [
        pytest.param(runs.seeds, "", "--seed takes a whole number", id="no seed"),
        pytest.param(runs.seeds, "x", "--seed takes a whole number", id="a word for a seed"),
        pytest.param(runs.seeds, "-1", "--seed takes a whole number", id="a negative seed"),
        pytest.param(runs.seeds, "3..1", "--seed: a range goes up", id="a range backwards"),
        pytest.param(runs.seeds, "0..99999999", "--seed: a range goes up", id="a range without end"),
        pytest.param(runs.policies, ["spothdge"], "did you mean spothedge?", id="a slip in a policy"),
        pytest.param(runs.policies, ["xyz"], "--policy: no policy is called xyz", id="no such policy"),
        pytest.param(runs.overprovisions, ["1,-1"], "--overprovision takes", id="fewer than none beyond"),
        pytest.param(runs.overprovisions, ["1.5"], "--overprovision takes", id="half a replica"),
        pytest.param(runs.availability_targets, ["1"], "--availability-target takes", id="always up"),
        pytest.param(
            runs.availability_targets, ["99.5"], "--availability-target takes", id="percent without sign"
        ),
        pytest.param(runs.availability_targets, ["nan"], "--availability-target takes", id="not a number"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(
    parse: Callable[[object], object], given: object, sentence: str
) -> None:
    with pytest.raises(WrongUsage) as raised:
        parse(given)
    assert sentence in str(raised.value)
    assert raised.value.code == 2


def test_availability_is_a_share_or_a_percentage() -> None:
    assert runs.availability_targets(["0.995,99.9%", "99.50%"]) == (0.995, 0.999)


# --- the market ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "first"),
    [(None, 2), ("1", 1), ("unlimited", UNLIMITED)],
    ids=["as recorded", "at most one", "any number"],
)
def test_a_folder_is_a_market(folder: Path, capacity: str | None, first: int) -> None:
    assert runs.market(str(folder), capacity, 30.0).capacity("us-east-1a", 0) == first


def test_without_a_name_the_market_is_a_shipped_one() -> None:
    assert runs.market(None, None, 300.0).zones


@pytest.mark.parametrize(
    ("source", "capacity", "sentence"),
    [
        ("synthetic-volatil", None, "did you mean synthetic-volatile?"),
        ("nowhere", None, "--trace nowhere: neither a folder nor"),
        (None, "0", "--capacity-per-zone takes a number"),
        (None, "many", "--capacity-per-zone takes a number"),
    ],
)
def test_a_market_that_is_not(source: str | None, capacity: str | None, sentence: str) -> None:
    with pytest.raises(WrongUsage) as raised:
        runs.market(source, capacity, 30.0)
    assert sentence in str(raised.value)


def test_an_empty_folder_is_no_market(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="--trace"):
        runs.market(str(tmp_path), None, 30.0)


def test_windows_cover_the_trace(folder: Path) -> None:
    market = runs.market(str(folder), None, 30.0)
    assert runs.windows(market, None, 180.0) == (market,)
    assert [part.length_s for part in runs.windows(market, "25m", 180.0)] == [1500.0, 1500.0]


@pytest.mark.parametrize(
    ("window", "cold_start_s", "sentence"),
    [
        ("2h", 180.0, "--window takes a length up to that of the trace, 1h"),
        ("10s", 180.0, "--window takes a length"),
        ("3m", 180.0, "--cold-start must be shorter than a window, 3m"),
        (None, 3600.0, "--cold-start must be shorter than the trace, 1h"),
    ],
    ids=[
        "longer than the trace",
        "shorter than a tick",
        "as short as a cold start",
        "a cold start without end",
    ],
)
def test_windows_that_make_no_sense(
    folder: Path, window: str | None, cold_start_s: float, sentence: str
) -> None:
    with pytest.raises(WrongUsage) as raised:
        runs.windows(runs.market(str(folder), None, 30.0), window, cold_start_s)
    assert sentence in str(raised.value)


def test_prices_are_a_ratio_or_those_of_the_trace(folder: Path) -> None:
    market = runs.market(str(folder), None, 30.0)
    assert runs.prices(market, "3.33") == (3.33, 3.33)
    assert runs.prices(market, "trace") == (None, 4.0)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "dear"])
def test_a_ratio_that_is_none(folder: Path, text: str) -> None:
    with pytest.raises(WrongUsage, match="--ondemand-price-ratio takes a number above 0, or trace"):
        runs.prices(runs.market(str(folder), None, 30.0), text)


def test_a_trace_without_prices_has_no_ratio(folder: Path) -> None:
    (folder / "us-east-1a.json").write_text('{"metadata": {"gap_seconds": 900}, "data": [1, 1, 1, 1]}')
    with pytest.raises(WrongUsage, match="does not say the prices of all zones"):
        runs.prices(runs.market(str(folder), None, 30.0), "trace")


def test_requests_come_by_rate_by_seed_or_from_a_file(tmp_path: Path) -> None:
    recording = tmp_path / "load.csv"
    recording.write_text("t_s,requests\n0,10\n60,20\n")
    found = [
        runs.arrivals(text, 3600.0)
        for text in ("constant:2.5", "poisson:2.5", "poisson:2.5,1", "poisson:2.5,1", str(recording))
    ]
    assert runs.arrivals(None, 3600.0) is None
    counts = [each.count(0, 60) for each in found if each is not None]
    assert counts[0] == 150
    assert counts[4] == 10
    assert counts[2] == counts[3]
    assert found[1] != found[2]


@pytest.mark.parametrize(
    "text", ["constant:fast", "constant:-1", "poisson:2.5,x", "poisson:", "nowhere.csv", "constant:nan"]
)
def test_requests_that_make_no_sense_name_the_option(text: str) -> None:
    with pytest.raises(WrongUsage, match=r"^--requests "):
        runs.arrivals(text, 3600.0)


# --- the service --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "spot", "names", "extras", "targets"),
    [
        pytest.param(
            PlacementGoal("spothedge", 2),
            True, ("spothedge", "on_demand"), (2,), (), id="SpotHedge",
        ),
        pytest.param(
            PlacementGoal("risk_hedge", availability_target=0.995),
            True, ("risk_hedge", "on_demand"), (0,), (0.995,), id="a target",
        ),
        pytest.param(PlacementGoal(), False, ("on_demand",), (0,), (), id="no spot"),
    ],
)  # fmt: skip
def test_a_file_says_what_is_simulated(
    placement: PlacementGoal,
    spot: bool,
    names: tuple[str, ...],
    extras: tuple[int, ...],
    targets: tuple[float, ...],
) -> None:
    asked = spec(ScalingGoal(3, 3), placement, spot=spot)
    assert runs.wanted_policies(asked, None) == names
    assert runs.wanted_overprovisions(asked, None) == extras
    assert runs.wanted_availabilities(asked, None) == targets
    assert runs.target_size(asked, None) == 3


def test_the_command_line_has_the_last_word() -> None:
    asked = spec(ScalingGoal(3, 9), PlacementGoal("spothedge", 2))
    assert runs.wanted_policies(asked, ["asg"]) == ("asg",)
    assert runs.wanted_overprovisions(asked, ["0", "1"]) == (0, 1)
    assert runs.wanted_availabilities(asked, ["0.9"]) == (0.9,)
    fixed = runs.sized(asked, 5)
    assert fixed is not None
    assert (fixed.scaling.min_replicas, fixed.scaling.max_replicas) == (5, 5)
    assert runs.target_size(fixed, 5) == 5


def test_without_a_file_there_are_defaults() -> None:
    assert runs.wanted_policies(None, None) == ("spothedge", "risk_hedge", "on_demand")
    assert runs.wanted_overprovisions(None, None) == (1,)
    assert runs.wanted_availabilities(None, None) == ()
    assert (runs.target_size(None, None), runs.target_size(None, 7)) == (4, 7)


def test_a_service_that_scales_from_zero_needs_requests() -> None:
    asleep = spec(ScalingGoal(0, 4, target_qps_per_replica=1.0))
    with pytest.raises(WrongUsage, match="say with --requests how many come"):
        runs.insist_on_some(asleep)
    runs.insist_on_some(spec(ScalingGoal(1, 4, target_qps_per_replica=1.0)))


def test_a_target_of_ongoing_requests_cannot_be_simulated_from_arrivals() -> None:
    with pytest.raises(WrongUsage, match="by its ongoing requests"):
        runs.insist_on_rates(spec(ScalingGoal(1, 4, target_ongoing_requests_per_replica=4.0)))
    runs.insist_on_rates(spec(ScalingGoal(1, 4, target_qps_per_replica=1.0)))


def test_every_knob_is_turned_for_the_policies_that_have_it() -> None:
    found = runs.jobs(("spothedge", "risk_hedge", "on_demand"), (0, 1), (0.99, 0.999), (7, 8))
    assert found == [
        Job("spothedge", 0, None, 7),
        Job("spothedge", 0, None, 8),
        Job("spothedge", 1, None, 7),
        Job("spothedge", 1, None, 8),
        Job("risk_hedge", None, 0.99, 7),
        Job("risk_hedge", None, 0.99, 8),
        Job("risk_hedge", None, 0.999, 7),
        Job("risk_hedge", None, 0.999, 8),
        Job("on_demand", None, None, 7),
        Job("on_demand", None, None, 8),
    ]


def test_a_slip_of_a_range_is_refused() -> None:
    runs.insist_on_few(runs.MOST_RUNS)
    with pytest.raises(WrongUsage, match="20000 runs"):
        runs.insist_on_few(20_000)


AWS, GCP = ResourceChoice("aws", disk_size_gb=365), ResourceChoice("gcp", use_spot=True)


@pytest.mark.parametrize(
    ("choices", "usd_hour"),
    [
        pytest.param((AWS,), 0.08 * 365 / 730 + 0.005, id="the file's disk"),
        pytest.param((GCP,), 0.10 * 256 / 730 + 0.005, id="the usual disk"),
        pytest.param((AWS, GCP), 0.08 * 365 / 730 + 0.005, id="the most of two"),
        pytest.param((AWS, ResourceChoice()), None, id="one in any cloud"),
        pytest.param((ResourceChoice("kubernetes"),), None, id="no price"),
    ],
)
def test_a_machine_has_a_disk_and_an_address(
    choices: tuple[ResourceChoice, ...], usd_hour: float | None
) -> None:
    zone = ZoneTrace("a", "east", Steps((0,), (4,)), Steps((0,), (1.0,)))
    market = Trace("made", (zone,), 10, 30.0, 30.0, "counts")
    given = replace(spec(ScalingGoal()), resources=choices)
    assert runs.beside_usd_hour(given, market) == (usd_hour and pytest.approx(usd_hour))
    assert runs.beside_usd_hour(given, replace(market, zones=(replace(zone, spot_usd_hour=None),))) is None
    assert runs.beside_usd_hour(None, market) is None
