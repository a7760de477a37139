"""What simulations are summed up to, and their pictures."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from scipy.stats import t as student

from skyserve_cli.account.curves import spend, spend_on_demand, timeline
from skyserve_cli.account.runs import ON_DEMAND, SPOT, FleetSample, Run, Simulation
from skyserve_cli.report import page as report
from skyserve_cli.report.export import to_json
from skyserve_cli.report.text import (
    availability_sentences,
    equal_availability,
    per_day,
    setting,
    table_cells,
    verdict,
)
from skyserve_cli.sim.frontier import ALL_ON_DEMAND, Point, cost_at, lower_hull, mixed
from skyserve_cli.sim.summary import cheapest, estimate, most_available, summarize

HOUR_S = 3600.0


def run(
    policy: str = "spothedge",
    overprovision: int | None = 1,
    *,
    seed: int = 0,
    window: int = 0,
    availability: float = 0.99,
    cost: float = 0.5,
    steps: tuple[FleetSample, ...] = (FleetSample(0.0, (("a", SPOT, 2, 2),)),),
    target: float | None = None,
    days: float = 1.0,
) -> Run:
    return Run(
        policy=policy, overprovision=overprovision, seed=seed, availability=availability, capacity_fraction=1.0,
        cost_relative=cost, preemptions_per_day=3.0, failed_launches_per_day=1234.0, on_demand_cost_share=0.2,
        days=days, usd=48 * cost * days, usd_on_demand=48.0 * days, launches=7, cpu_s=0.1, ticks=100, digest="d", zones="",
        steps=steps, n_target=2, availability_target=target, window=window,
    )  # fmt: skip


def simulation(*runs: Run, priced: bool = True) -> Simulation:
    return Simulation(
        "aws", 2, 180.0, 3.0, 30.0, 1.0, (("a", "east"), ("b", "east"), ("c", "west")), priced, runs
    )


def test_a_plan_that_is_not_proven_says_how_far_from_the_best_it_may_be() -> None:
    plan = replace(run("omniscient", None, cost=0.4), cost_bound=0.39, status="optimal")
    assert availability_sentences(summarize([plan])) == []
    (sentence,) = availability_sentences(summarize([replace(plan, status="time limit reached")]))
    assert "39.00% or more" in sentence
    assert "up to 2.50% too much" in sentence


# --- the frontier -------------------------------------------------------------------------------------------


def test_the_hull_keeps_what_mixing_cannot_better() -> None:
    points = [Point(0.5, 0.01), Point(0.4, 0.02), Point(0.45, 0.019), Point(0.6, 0.01), Point(0.9, 0.0)]
    assert lower_hull(points) == (Point(0.4, 0.02), Point(0.5, 0.01), Point(0.9, 0.0))


def test_of_equal_costs_the_more_available_counts() -> None:
    assert lower_hull([Point(0.5, 0.03), Point(0.5, 0.01)]) == (Point(0.5, 0.01),)


@pytest.mark.parametrize(
    ("down", "cost"),
    [(0.05, 0.4), (0.02, 0.4), (0.015, 0.45), (0.01, 0.5), (0.005, 0.75), (0.0, 1.0)],
    ids=[
        "better than asked",
        "just so",
        "between two settings",
        "the second",
        "mixed with on demand",
        "always up",
    ],
)
def test_cost_at_an_availability_is_that_of_the_cheapest_mixture(down: float, cost: float) -> None:
    assert cost_at([Point(0.4, 0.02), Point(0.5, 0.01)], down) == pytest.approx(cost)


def test_what_costs_more_than_on_demand_is_not_taken() -> None:
    assert cost_at([Point(1.2, 0.5)], 0.001) == 1.0


def test_a_mixture_lies_on_the_line_and_reaches_both_ends() -> None:
    left, right = Point(0.4, 0.02), ALL_ON_DEMAND
    path = mixed((left, right))
    assert (path[0], path[-1]) == (left, right)
    for point in path:
        assert (point.cost - 0.4) / 0.6 == pytest.approx((0.02 - point.down) / 0.02)


# --- means --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 10, 31, 32, 60, 500])
def test_the_interval_is_students(count: int) -> None:
    values = [0.0, 1.0] * (count // 2) + [0.5] * (count % 2)
    mean = sum(values) / count
    deviation = (sum((value - mean) ** 2 for value in values) / (count - 1)) ** 0.5
    found = estimate(values)
    assert found.mean == pytest.approx(mean)
    assert found.half_width == pytest.approx(
        student.ppf(0.975, count - 1) * deviation / count**0.5, rel=0.005
    )


def test_one_value_has_no_interval() -> None:
    assert estimate([0.7]) == (0.7, None)


def test_seeds_of_one_window_are_averaged_before_windows_are_compared() -> None:
    values = [(0, 0, 0.9), (1, 0, 1.0), (0, 1, 0.8), (1, 1, 0.7)]
    (row,) = summarize(run(seed=seed, window=window, availability=a) for seed, window, a in values)
    assert row.availability == estimate([0.95, 0.75])


def test_rows_come_in_the_order_of_the_runs() -> None:
    rows = summarize(
        [
            run("risk_hedge", None, target=0.999),
            run("spothedge", 0),
            run("risk_hedge", None, target=0.995),
            run("spothedge", 0, seed=1),
        ]
    )
    assert [row.label for row in rows] == ["risk_hedge 99.9%", "spothedge +0", "risk_hedge 99.5%"]
    assert [len(row.runs) for row in rows] == [1, 2, 1]


def test_the_cheapest_is_one_that_could_be_run() -> None:
    rows = summarize(
        [
            run("omniscient", None, availability=1.0, cost=0.3),
            run("spothedge", 0, availability=0.98, cost=0.4),
            run("spothedge", 1, availability=0.991, cost=0.5),
            run("on_demand", None, availability=1.0, cost=1.0),
        ]
    )
    assert [row.label if (row := cheapest(rows, level)) else None for level in (0.9, 0.99, 0.999)] == [
        "spothedge +0",
        "spothedge +1",
        "on_demand",
    ]
    assert cheapest(rows[:3], 0.999) is None
    closest = most_available(rows[:3])
    assert closest is not None
    assert closest.label == "spothedge +1"


# --- words --------------------------------------------------------------------------------------------------


def test_a_saving_is_told_with_its_price_and_its_bound() -> None:
    rows = summarize([run(cost=0.5), run("omniscient", None, cost=0.404, availability=1.0)])
    assert verdict(rows, 0.99, priced=True) == (
        "spothedge +1 is the cheapest that is up 99% of the time: 50.0% of the on-demand cost, 50.0% saved "
        "($1.00 instead of $2.00 per hour). omniscient, who knows the future, pays 40.4%."
    )
    assert verdict(rows[:1], 0.99, priced=False).endswith("50.0% saved.")


def test_where_nothing_is_good_enough_the_closest_is_told() -> None:
    rows = summarize([run(availability=0.9), run("round_robin", 1, availability=0.95)])
    assert verdict(rows, 0.995, priced=True) == (
        "Nothing here is up 99.5% of the time; round_robin +1 comes closest with 95.00%."
    )


def test_on_demand_saves_nothing() -> None:
    rows = summarize([run("on_demand", None, availability=1.0, cost=1.0)])
    assert "nothing saved" in verdict(rows, 0.99, priced=True)


def test_columns_in_which_nobody_says_anything_are_left_out() -> None:
    columns, cells = table_cells(summarize([run("on_demand", None)]), priced=False)
    assert columns == [
        "POLICY",
        "#AVAILABLE",
        "#CAPACITY",
        "#COST",
        "#ON DEMAND",
        "#PREEMPTED/DAY",
        "#FAILED/DAY",
    ]
    assert cells == [["on_demand", "99.00%", "100.00%", "50.0%", "20.0%", "3.0", "1,234"]]


def test_several_runs_have_an_interval_and_knobs_a_column() -> None:
    runs = [run(seed=seed, availability=0.98 + 0.01 * seed) for seed in (0, 1)]
    known = {"requests": 10, "requests_short": 0.01, "requests_failed": 0.02, "usd_beside": 2.4, "zones": "b"}
    short = [replace(each, **known) for each in runs]  # type: ignore[arg-type]
    columns, cells = table_cells(summarize([*short, run("risk_hedge", None, target=0.995)]), priced=True)
    shown = [dict(zip(columns, row, strict=True)) for row in cells]
    assert shown[0]["#AVAILABLE"] == "98.50% ±6.35"
    assert [row["#EXTRA"] for row in shown] == ["+1", "-"]
    assert [row["#TARGET"] for row in shown] == ["-", "99.5%"]
    assert [row["#SHORT REQUESTS"] for row in shown] == ["1.00% ±0.00", "-"]
    assert [row["WHERE"] for row in shown] == ["b", "-"]
    assert shown[0]["$/H"] == "1.00"
    assert [row["#FAILED REQUESTS"] for row in shown] == ["2.00% ±0.00", "-"]
    assert [row["$/H DISKS"] for row in shown] == ["0.1000", "-"]


@pytest.mark.parametrize(
    ("rate", "shown"), [(0, "0"), (0.04, "0.0"), (3.14, "3.1"), (9.96, "10"), (2233.4, "2,233")]
)
def test_small_rates_have_a_decimal(rate: float, shown: str) -> None:
    assert per_day(rate) == shown


def test_the_setting_tells_seeds_and_windows_where_there_are_several() -> None:
    assert setting(simulation(run())) == (
        "trace aws: 3 zones, 1d, target 2 replicas, cold start 180 s, on demand 3 times spot, ticks of 30 s"
    )
    several = simulation(run(seed=1), run(window=1, days=0.5))
    assert setting(several).endswith("2 windows of 1d, 2 seeds")


# --- series -------------------------------------------------------------------------------------------------

HOUR = 1 / 24
STEPS = (
    FleetSample(0.0, (("a", SPOT, 9, 0),)),
    FleetSample(180.0, (("a", SPOT, 2, 2),)),
    FleetSample(1080.0, (("a", SPOT, 1, 1), ("b", ON_DEMAND, 1, 0))),
    FleetSample(1260.0, (("a", SPOT, 1, 1), ("b", ON_DEMAND, 1, 1))),
    FleetSample(1980.0, ()),
)


def test_slices_keep_the_area_and_begin_where_counting_does() -> None:
    found = timeline(run(steps=STEPS, days=HOUR), slices=4, tick_s=30.0, begin_s=180.0)
    assert found.edges_s.tolist() == [0, 900, 1800, 2700, 3600]
    assert found.alive["a", SPOT].tolist() == [2, 1, 0, 0]
    assert found.alive["b", ON_DEMAND].tolist() == [0, 1, 0, 0]
    assert found.wanted.tolist() == [2] * 4
    assert found.short.tolist() == pytest.approx([0, 0.2, 1, 1])


def test_there_are_no_more_slices_than_ticks() -> None:
    assert len(timeline(run(steps=STEPS, days=HOUR), 1600, tick_s=30.0, begin_s=0.0).edges_s) == 121


def test_short_follows_a_target_that_changes_between_steps() -> None:
    scaled = replace(run(steps=STEPS[:2], days=HOUR), wanted=((0.0, 2), (1980.0, 3), (2880.0, 1)))
    found = timeline(scaled, 4, tick_s=30.0, begin_s=180.0)
    assert found.short.tolist() == [0, 0, 1, 0]
    assert found.wanted.tolist() == [2, 2, 3, 1]


def test_spend_ends_at_what_was_paid_and_weighs_markets() -> None:
    priced = replace(run(steps=STEPS, days=HOUR), usd=10.0, usd_on_demand=24.0)
    at, paid = spend(priced, 3.0, points=4, begin_s=180.0)
    assert at.tolist() == [0, 900, 1800, 2700, 3600]
    assert paid.tolist() == pytest.approx([0, 10 / 3, 10, 10, 10])  # 2 spot, then 1 spot and 1 on demand at 3
    assert spend_on_demand(priced, 4, begin_s=180.0)[1].tolist() == pytest.approx([0, 6, 12, 18, 24])


def test_a_run_in_which_nothing_ever_lived_costs_nothing() -> None:
    empty = replace(run(steps=(FleetSample(0.0, ()),), days=HOUR), usd=0.0)
    assert spend(empty, 3.0, 4, begin_s=180.0)[1].tolist() == [0.0] * 5
    assert timeline(empty, 4, tick_s=30.0, begin_s=180.0).short.tolist() == [1.0] * 4


@pytest.mark.parametrize(("cold_start_s", "counted_s"), [(0.0, 30.0), (183.0, 180.0), (200.0, 210.0)])
def test_counting_begins_a_whole_number_of_ticks_after_the_start(
    cold_start_s: float, counted_s: float
) -> None:
    assert replace(simulation(), cold_start_s=cold_start_s).counted_from_s == counted_s


# --- the report ---------------------------------------------------------------------------------------------

VOID = frozenset({"meta", "br", "hr", "img", "link"})


class Page(HTMLParser):
    """Checks that tags are balanced, and collects links and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def several() -> Simulation:
    return simulation(
        run(steps=STEPS, days=HOUR),
        run("spothedge", 2, steps=STEPS, days=HOUR, availability=0.999, cost=0.7),
        run("risk_hedge", None, target=0.995, steps=STEPS, days=HOUR, availability=0.996, cost=0.6),
        run(
            "on_demand",
            None,
            steps=(FleetSample(0.0, (("a", ON_DEMAND, 2, 2),)),),
            days=HOUR,
            availability=1.0,
            cost=1.0,
        ),
        run("omniscient", None, steps=STEPS, days=HOUR, availability=1.0, cost=0.4),
    )


def test_the_page_holds_everything_and_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    report.write(several(), path, command="serve simulate --trace '<b>&'", targets=(0.99, 0.995))
    content = path.read_text()
    page = Page(content)
    assert page.tags.count("svg") == 3
    assert "script" not in page.tags
    assert "://" not in content
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    for words in (
        "serve simulate --trace '<b>&'",
        "up 99.5% of the time",
        "fewer ready than the target",
    ):
        assert words in page.text
    rows = re.findall(r"<tr><td>(.*?)</td>", content)
    assert rows[:5] == ["spothedge", "spothedge", "risk_hedge", "on_demand", "omniscient"]
    assert [each.name for each in tmp_path.iterdir()] == ["out.html"]


@pytest.mark.long
def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    for suffix, told in ((".html", several()), (".png", simulation(run()))):
        once, again = tmp_path / f"once{suffix}", tmp_path / f"again{suffix}"
        for path in (once, again):
            report.write(told, path, command="serve simulate", targets=(0.99,))
        assert once.read_bytes() == again.read_bytes()
    assert once.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_a_long_busy_run_makes_a_small_page(tmp_path: Path) -> None:
    zones = [f"r{region}-{letter}" for region in range(3) for letter in "abc"]
    steps = tuple(
        FleetSample(
            30.0 * tick,
            tuple((zone, SPOT, 1 + (tick * 7 + place) % 5, 1) for place, zone in enumerate(zones)),
        )
        for tick in range(0, 20_000, 2)
    )
    names = ("spothedge", "risk_hedge", "even_spread", "round_robin", "asg", "single_zone")
    busy = replace(
        simulation(*(run(name, steps=steps, days=20_000 * 30 / 86400) for name in names)),
        zones=tuple((zone, zone[:2]) for zone in zones),
    )
    report.write(busy, tmp_path / "busy.html", command="serve simulate", targets=(0.99,))
    assert (tmp_path / "busy.html").stat().st_size < 2_000_000


@pytest.mark.parametrize("priced", [True, False], ids=["with prices", "without prices"])
@pytest.mark.parametrize("suffix", report.SUFFIXES)
def test_one_run_that_is_always_up_is_enough(tmp_path: Path, suffix: str, priced: bool) -> None:
    path = tmp_path / f"out{suffix}"
    path.write_text("older")
    report.write(
        simulation(run(availability=1.0), priced=priced), path, command="serve simulate", targets=(0.99,)
    )
    content = path.read_bytes()
    assert content != b"older"
    if suffix == ".html":
        assert ("$1.00" in content.decode()) is priced


def test_each_policy_is_shown_by_the_setting_one_would_take() -> None:
    rows = summarize(several().runs)
    assert [each.label for each in report.shown_runs(rows, 0.995)] == [
        "spothedge +2",
        "risk_hedge 99.5%",
        "on_demand",
        "omniscient",
    ]
    assert report.shown_runs(rows, 0.9995)[0].label == "spothedge +2"


def test_without_a_run_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a run"):
        report.write(simulation(), tmp_path / "out.png", command="", targets=(0.99,))
    assert list(tmp_path.iterdir()) == []


# --- JSON ---------------------------------------------------------------------------------------------------


def test_json_holds_every_run_in_order_and_nothing_that_varies() -> None:
    told = several()
    found = to_json(told, summarize(told.runs), (0.995,), capacity="counts")
    assert [each["policy"] for each in found["runs"]] == [each.policy for each in told.runs]
    assert {"steps", "wanted", "cpu_s"}.isdisjoint(found["runs"][0])
    assert found["runs"][0]["cost_relative"] == 0.5
    assert found["cheapest"] == [
        {
            "availability": 0.995,
            "policy": "risk_hedge",
            "overprovision": None,
            "availability_target": 0.995,
            "cost_relative": 0.6,
        }
    ]
    assert found["summary"][0]["availability"] == {"mean": 0.99, "half_width_95": None}
    assert found["cost_at_equal_availability"][0] == {
        "policy": "spothedge",
        "0.99": 0.5,
        "0.995": 0.611111,
        "0.999": 0.7,
    }


def test_json_has_no_money_where_the_trace_has_none() -> None:
    told = simulation(run(), priced=False)
    found = to_json(told, summarize(told.runs), (0.99,), capacity="counts")
    assert found["runs"][0]["usd"] is None
    assert found["summary"][0]["usd_per_hour"] is None


def test_families_are_compared_at_equal_availability() -> None:
    rows = summarize([run(availability=0.98, cost=0.4), run("omniscient", None, availability=1.0, cost=0.3)])
    assert equal_availability(rows) == [
        ("spothedge", (pytest.approx(0.7), pytest.approx(0.85), pytest.approx(0.97)))
    ]
