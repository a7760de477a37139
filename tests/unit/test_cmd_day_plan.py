"""`serve plan --requests|--history`: replicas and USD of the next 24 hours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.goals import ScalingGoal
from skyserve_cli.commands import day_plan
from skyserve_cli.commands.day_plan import KnownDemand, asked, by_minute, carried, planned, price_of, recorded
from skyserve_cli.output import CommandFailed, WrongUsage
from skyserve_cli.spec.model import ScheduledSize, ServiceSpec, SloSpec

SLO = SloSpec(2000.0, None, 0.99, 2.0)
SPEC = ServiceSpec("chat", "run", scaling=ScalingGoal(1, 10), slo=SLO)
MONDAY = 1_767_571_200.0 + 30.0  # 2026-01-05 00:00:30 UTC


def two_days(low: float = 60.0, high: float = 600.0) -> KnownDemand:
    """12 hours of `low` requests a minute, 12 hours of `high`, twice."""
    return KnownDemand("a recording", np.tile(np.repeat([low, high], 720), 2).astype(float))


def test_replicas_follow_the_forecast_within_the_limits_and_cost_what_they_cost() -> None:
    plan = planned(SPEC, two_days(), 1.0, MONDAY, 2.5)
    assert [hour.replicas for hour in plan.hours] == [1] * 12 + [10] * 12
    view = plan.view()
    assert view["replica_hours"] == 132
    assert sum(hour["usd"] for hour in view["hours"]) == pytest.approx(132 * 2.5)
    assert view["hours"][0]["at"] == MONDAY + 30.0, "from the next full minute"
    assert "132 replica hours for $330.00" in plan.sentence()
    assert "2.0 days of a recording" in plan.sentence()


def test_a_schedule_sets_the_limits_of_its_hours() -> None:
    entry = ScheduledSize(cron="0 3 * * *", timezone="UTC", duration_s=7200.0, min_replicas=4)
    plan = planned(replace(SPEC, schedule=(entry,)), two_days(), 1.0, MONDAY + 30.0, None)
    assert [hour.replicas for hour in plan.hours[:6]] == [1, 1, 1, 4, 4, 1]
    assert {hour.usd for hour in plan.hours} == {None}
    assert "$" not in plan.sentence()


def test_what_a_replica_carries_is_the_options_else_the_files_else_what_was_learned() -> None:
    lived = KnownDemand("chat", np.ones(60), capacity_qps=3.0, headroom=1.5)
    learning = replace(SPEC, slo=replace(SLO, capacity_qps=None))
    by_target = replace(SPEC, slo=None, scaling=ScalingGoal(1, 10, 0.7))
    assert carried(SPEC, lived, 6.0) == pytest.approx(4.0)
    assert carried(SPEC, lived, None) == pytest.approx(2.0 / 1.5)
    assert carried(learning, lived, None) == pytest.approx(2.0)
    assert carried(by_target, lived, None) == 0.7
    with pytest.raises(WrongUsage, match=r"slo\.capacity_qps"):
        carried(learning, two_days(), None)


def test_minutes_replace_quarters_and_what_is_not_known_stays_so() -> None:
    end = 60.0 * 100_000
    quarters = {"span_s": 900, "at": [end - 3600.0, end - 1800.0], "requests": [150, 300]}
    minutes = {"span_s": 60, "at": [end - 1800.0, end - 60.0], "requests": [7, 9]}
    found = by_minute([quarters, minutes], end)
    assert len(found) == 60
    assert found[:15].tolist() == [10.0] * 15
    assert np.isnan(found[15:30]).all()
    assert found[30:33].tolist() == [7.0, 20.0, 20.0]
    assert found[-1] == 9.0
    assert len(by_minute([], end)) == 0


def test_the_price_is_that_of_the_replicas_that_last() -> None:
    launches = [
        {"price_usd_hour": 1.0, "stands_in": False},
        {"price_usd_hour": 2.0, "stands_in": False},
        {"price_usd_hour": 9.0, "stands_in": True},
    ]
    candidates = [{"price_usd_hour": 4.0}]
    assert price_of({"launches": launches}, candidates) == 1.5
    assert price_of({"launches": []}, candidates) == 4.0
    assert price_of({"launches": []}, []) is None


def test_a_recording_ends_now(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("t_s,requests\n" + "".join(f"{600 * n},{600 * (n + 1)}\n" for n in range(12)))
    known = recorded(str(path))
    assert (known.source, len(known.requests)) == ("requests.csv (without tokens)", 120)
    assert known.requests[0] == pytest.approx(60.0)
    assert known.requests[-1] == pytest.approx(720.0)


@pytest.mark.parametrize(
    ("requests", "history", "capacity", "why"),
    [
        ("constant:1", True, None, "leave one of them out"),
        (None, False, 2.0, "name one of them"),
        ("constant:1", False, -1.0, "above 0"),
        ("constant:0", False, None, "no request in it"),
        ("/nowhere.csv", False, None, "neither a rate"),
    ],
)
def test_options_that_make_no_sense_are_one_sentence(
    requests: str | None, history: bool, capacity: float | None, why: str
) -> None:
    with pytest.raises(WrongUsage, match=why):
        asked(SPEC, requests, history, capacity, MONDAY)


class Controller:
    """Shows what a controller would of one service."""

    def __init__(self, minutes: int) -> None:
        self.minutes = minutes

    def services(self, name: str = "") -> list[dict[str, Any]]:
        return [{"name": "chat", "slo": {"capacity_qps": 2.5, "headroom": 1.25}}]

    def series(self, name: str, *, since: float) -> dict[str, Any]:
        end = MONDAY // 60 * 60
        at = [end - 60.0 * back for back in range(self.minutes, 0, -1) if end - 60.0 * back >= since]
        return {"name": name, "span_s": 60, "at": at, "requests": [30] * len(at)}


def test_history_is_that_of_the_running_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(day_plan, "controller", lambda: Controller(200))
    found = asked(replace(SPEC, slo=replace(SLO, capacity_qps=None)), None, True, None, MONDAY)
    assert found.known.requests.tolist() == [30.0] * 200
    assert found.carried_qps == pytest.approx(2.0)
    monkeypatch.setattr(day_plan, "controller", lambda: Controller(20))
    with pytest.raises(CommandFailed, match="less than an hour"):
        asked(SPEC, None, True, None, MONDAY)


def test_a_recording_with_tokens_is_planned_by_its_work(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    rows = "".join(f"{600 * n},600,{600 * (300 if n < 6 else 900)},0\n" for n in range(12))
    path.write_text("t_s,requests,prompt_tokens,response_tokens\n" + rows)
    known = recorded(str(path))
    assert known.source == "requests.csv by its tokens"
    assert known.requests[:50] == pytest.approx(np.full(50, 30.0)), "half of the usual size"
    assert known.requests[-50:] == pytest.approx(np.full(50, 90.0))


def test_a_response_token_weighs_in_the_plan_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    rows = "".join(f"{600 * n},600,{600 * 300},{0 if n < 6 else 600 * 100}\n" for n in range(12))
    path.write_text("t_s,requests,prompt_tokens,response_tokens\n" + rows)
    for weight, ratio in ((None, 400 / 300), (3.0, 600 / 300)):
        spec = replace(SPEC, slo=replace(SLO, response_weight=weight))
        known = asked(spec, str(path), False, None, MONDAY).known.requests
        assert known[-1] / known[0] == pytest.approx(ratio, rel=0.01)
