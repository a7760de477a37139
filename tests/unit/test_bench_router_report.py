"""The arithmetic of `benchmarks.router`: ratios within rounds, intervals of the sign test, rows that do not count."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.router.cells import CELLS, Measure
from benchmarks.router.report import headlines, render
from benchmarks.router.rows import Row, best_rust, interval, ratio, ratio_of_cells
from benchmarks.router.systems import Family


def row(round: int, system: str, cost_us: float, cell: str = "unary", **load: Any) -> Row:
    family = {"skyserve": Family.OURS, "nginx": Family.NGINX}.get(system, Family.RUST)
    said: dict[str, Any] = dict.fromkeys(("failed", "wrong", "cut", "unfinished"), 0)
    said |= {"sent": 1000, "requests": 1000, "proxy_cpu_s": cost_us / 1000, "window_s": 2.0, "p50_us": 100.0}
    said |= {"backend_cpu_s": 0.1, "load_cpu_s": 0.1, "machine_cpu_s": 1.5, "by_target": {"1": 250, "2": 750}}
    engine_requests = load.pop("engine_requests", 1000)
    (measure,) = {one.measure for one in CELLS if one.name == cell}
    streams = 0 if measure is Measure.CPU else 500
    return Row(
        round, cell, system, family, "1", "round_robin", said | load, engine_requests, streams, measure
    )


@pytest.mark.parametrize(
    ("values", "low", "high", "coverage"),
    [
        pytest.param([3.0], 3.0, 3.0, 0.0, id="one value says nothing of its spread"),
        pytest.param([1.0, 2.0], 1.0, 2.0, 0.5, id="two values"),
        pytest.param([5, 1, 4, 2, 3], 1, 5, 0.9375, id="five: smallest to largest"),
        pytest.param(list(range(8)), 1, 6, 0.9296875, id="eight: second to seventh"),
        pytest.param(list(range(15)), 3, 11, 0.96484375, id="fifteen: fourth to twelfth"),
    ],
)
def test_an_interval_holds_the_median_with_its_coverage(
    values: list[float], low: float, high: float, coverage: float
) -> None:
    assert interval(values) == pytest.approx((low, high, coverage))


def test_a_ratio_is_of_what_was_measured_in_the_same_round() -> None:
    # Round 2 was slow for both: medians of costs would say 50 / 100, and so does each round.
    rows = [row(1, "skyserve", 50), row(1, "smg", 100), row(2, "smg", 400), row(2, "skyserve", 200)]
    found = ratio(rows, "skyserve", "smg")
    assert found is not None
    assert (found.median, found.low, found.high, found.rounds) == pytest.approx((0.5, 0.5, 0.5, 2))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param({"wrong": 1}, "1 wrong", id="an answer is not what the engine said"),
        pytest.param({"cut": 2}, "2 cut", id="a connection ended in the middle"),
        pytest.param({"unfinished": 3}, "3 unfinished", id="no end in time"),
        pytest.param({"engine_requests": 1001}, "engines had 1001 of 1000", id="a request was sent twice"),
    ],
)
def test_a_row_with_faults_does_not_count(fault: dict[str, Any], said: str) -> None:
    rows = [row(1, "skyserve", 1, **fault), row(2, "skyserve", 60), row(1, "smg", 100), row(2, "smg", 100)]
    assert rows[0].faults == said
    found = ratio(rows, "skyserve", "smg")
    assert found is not None
    assert (found.median, found.rounds) == (pytest.approx(0.6), 1)
    assert said in render(rows, {})


def test_the_goal_is_against_the_best_of_the_rust_routers() -> None:
    rows = [row(1, "smg", 100), row(1, "vllm-router", 80), row(1, "nginx", 20), row(1, "skyserve", 50)]
    (line,) = headlines(rows)
    assert best_rust(rows) == line.best == "vllm-router"
    assert line.to_best is not None
    assert line.to_nginx is not None
    assert (line.to_best.median, line.to_nginx.median) == (pytest.approx(0.625), pytest.approx(2.5))
    assert line.holds is False


@pytest.mark.parametrize(
    ("mib", "holds"),
    [pytest.param(4.9, True, id="9.8 MiB for 1,000"), pytest.param(5.1, False, id="10.2 MiB for 1,000")],
)
def test_the_memory_of_1000_streams_has_a_limit_of_its_own(mib: float, holds: bool) -> None:
    # 500 streams were open; no Rust router is needed to judge.
    (line,) = headlines([row(1, "skyserve", 0, "idle", rss_before_kib=2048, rss_kib=2048 + mib * 1024)])
    assert line.cost == pytest.approx(2 * mib)
    assert line.holds is holds


def test_late_streams_are_compared_by_the_time_to_their_first_chunk() -> None:
    seen = {"latencies": 500, "events": 10_000, "reads": 9_000}
    rows = [
        row(1, "skyserve", 10, "latecomers", p99_us=9_000.0, **seen),
        row(1, "smg", 99, "latecomers", p99_us=6_000.0, **seen),
        row(1, "vllm-router", 1, "latecomers", p99_us=8_000.0, **seen),
    ]
    (line,) = headlines(rows)
    assert line.to_best is not None
    assert (line.best, line.to_best.median, line.holds) == ("smg", pytest.approx(1.5), False)
    assert "9.0" in render(rows, {})


def test_a_window_without_a_late_stream_does_not_count() -> None:
    one = row(1, "skyserve", 10, "latecomers", p99_us=-1.0, latencies=0, events=1, reads=1)
    assert one.faults == "no first chunk"
    (line,) = headlines([one])
    assert line.holds is None


def test_a_system_that_puts_all_on_one_target_is_flagged() -> None:
    text = render([row(1, "smg", 100, by_target={"1": 10, "2": 990})], {"rounds": 1})
    assert "NOT SPREAD" in text
    assert "99%" in text


def test_rows_survive_their_file() -> None:
    one = row(3, "skyserve", 42)
    assert Row.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_the_report_says_what_was_measured() -> None:
    facts = {
        "agent": "regional",
        "build": "interpreted",
        "chunks": "in Python",
        "keys": "limited",
        "workers": 2,
    }
    one = replace(row(1, "skyserve", 50), facts=facts)
    text = render([one, replace(one, cell="light"), row(1, "smg", 100)], {})
    (line,) = (line for line in text.splitlines() if "in Python" in line)
    assert [word.strip() for word in line.strip("| ").split("|")] == [
        *("skyserve", "1", "regional", "interpreted", "in Python", "limited", "2", "unary, light")
    ]


def test_the_worst_comes_first() -> None:
    names = ("skyserve", "skyserve-keyed", "skyserve-off")
    rows = [
        replace(row(1, "skyserve", cost), system=name) for name, cost in zip(names, (50, 90, 70), strict=True)
    ]
    rows += [
        row(1, "smg", 10),
        row(1, "vllm-router", 200),
        replace(rows[0], system="broken", engine_requests=0),
    ]
    wanted = ["broken", "skyserve-keyed", "skyserve-off", "skyserve"]
    assert [line.system for line in headlines(rows)] == wanted
    table = render(rows, {}).split("### ")[1]
    assert re.findall(r"^\| ([\w-]+) 1 ", table, re.MULTILINE) == [*wanted, "vllm-router", "smg"]


def test_a_cell_is_compared_with_the_plain_one_of_the_same_system() -> None:
    rows = [row(1, "skyserve", 50), row(1, "skyserve", 60, "extras"), row(2, "skyserve", 90, "extras")]
    found = ratio_of_cells(rows, "skyserve", "extras", "unary")
    assert found is not None
    assert (found.median, found.rounds) == (pytest.approx(1.2), 1)
    assert "of its own in unary" in render(rows, {})


@pytest.mark.parametrize(("wanted_s", "in_pace"), [(0.0, True), (500.0, True), (600.0, False)])
def test_a_proxy_that_is_behind_its_schedule_is_flagged(wanted_s: float, in_pace: bool) -> None:
    one = replace(row(1, "skyserve", 50, "half"), wanted_s=wanted_s)  # 1,000 requests in two seconds
    assert one.is_in_pace is in_pace
    assert ("NOT IN PACE" in render([one], {})) is not in_pace


def test_rows_of_an_earlier_run_can_be_shown() -> None:
    kept = row(1, "skyserve", 50).to_json()
    del kept["facts"], kept["wanted_s"]
    assert "skyserve" in render([Row.from_json(kept)], {})
