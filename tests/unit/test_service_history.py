"""What a service lived through, counted and drawn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyserve_cli.account.curves import timeline
from skyserve_cli.account.runs import ON_DEMAND, SPOT
from skyserve_cli.account.service_history import Bought, NoHistoryError, service_history
from skyserve_cli.report import history_text
from skyserve_cli.report import page as report

READY, NOT_READY, DRAINING = "READY", "NOT_READY", "DRAINING"


class Past:
    """A history, written line by line."""

    def __init__(self, wanted: int = 2, **more: Any) -> None:
        self.replicas: list[dict[str, Any]] = []
        self.changes: list[dict[str, Any]] = []
        self.more = {"now": 210.0, "down": False, "created_at": 0.0, "complete_from": 0.0} | more
        self.wants(0.5, wanted)

    def wants(self, at: float, count: int) -> Past:
        self.changes.append({"at": at, "replica_id": None, "state": str(count)})
        return self

    def becomes(self, at: float, replica_id: int, state: str) -> Past:
        self.changes.append({"at": at, "replica_id": replica_id, "state": state})
        return self

    def lives(
        self,
        replica_id: int,
        launched_at: float | None,
        ready_at: float | None,
        ended_at: float | None = None,
        *,
        zone: str = "a",
        region: str = "east",
        kind: str = SPOT,
        reason: str | None = None,
    ) -> Past:
        self.replicas.append(
            {
                "id": replica_id, "cloud": "sky", "region": region, "zone": zone, "capacity_type": kind,
                "price_usd_hour": 0.36 if kind == SPOT else 1.2, "on_demand_usd_hour": 1.2,
                "launched_at": launched_at, "ready_at": ready_at, "ended_at": ended_at, "end_reason": reason,
            }
        )  # fmt: skip
        if ready_at is not None:
            self.becomes(ready_at, replica_id, READY)
        if ended_at is not None:
            self.becomes(ended_at, replica_id, "GONE")
        return self

    def json(self) -> dict[str, Any]:
        self.changes.sort(key=lambda change: change["at"])
        return {
            "name": "chat", "version": 1, "policy": "spothedge", "overprovision": 1, "availability_target": None,
            "replicas": self.replicas, "changes": self.changes, **self.more,
        }  # fmt: skip


def eventful() -> Past:
    """Two from 10 s on; at 100 s one is lost, at 105 s a zone refuses, an on-demand one stands in from 110 s on, and
    goes when spot is back."""
    return (
        Past()
        .lives(1, 1.0, 10.0, 100.0, reason="PREEMPTED")
        .lives(2, 1.0, 10.0, zone="b")
        .lives(3, 100.0, 110.0, 200.0, zone="b", kind=ON_DEMAND, reason="SCALED_DOWN")
        .lives(4, None, None, 105.0, zone="b", reason="CAPACITY")
        .lives(5, 190.0, 199.0)
    )


def test_an_eventful_life_in_figures() -> None:
    account = service_history(eventful().json())
    run = account.run
    assert (account.counted_from, account.counted_to) == (10.0, 210.0)
    assert run.availability == pytest.approx(1 - 10 / 200)
    assert run.capacity_fraction == pytest.approx(1 - 0.5 * 10 / 200)
    on_spot, there = 0.36 * (90 + 200 + 20) / 3600, 1.2 * 100 / 3600
    assert run.usd == pytest.approx(on_spot + there)
    assert run.usd_on_demand == pytest.approx(2 * 1.2 * 200 / 3600)
    assert run.cost_relative == pytest.approx(run.usd / run.usd_on_demand)
    assert run.on_demand_cost_share == pytest.approx(there / run.usd)
    assert (account.preemptions, account.failed_launches, run.launches, run.n_target) == (1, 1, 2, 2)
    assert run.label == "spothedge +1"


def test_where_it_went() -> None:
    account = service_history(eventful().json())
    assert [each._replace(hours=round(each.hours * 3600), usd=0.0) for each in account.bought] == [
        Bought("a", "east", SPOT, 1, 1, 0, 0, 110, 0.0),
        Bought("b", "east", ON_DEMAND, 1, 0, 0, 0, 100, 0.0),
        Bought("b", "east", SPOT, 0, 0, 1, 0, 200, 0.0),
    ]
    assert sum(each.usd for each in account.bought) == pytest.approx(account.run.usd)


@pytest.mark.parametrize(
    ("reason", "crashes"),
    [
        ("SETUP_FAILED", 1),
        ("RUN_EXITED", 1),
        ("START_TIMEOUT", 1),
        ("PROBE_FAILED", 1),
        ("PREEMPTED", 0),
        ("SCALED_DOWN", 0),
        ("REPLACED", 0),
    ],
)
def test_replicas_that_failed_by_themselves_are_counted(reason: str, crashes: int) -> None:
    past = Past().lives(1, 1.0, 10.0).lives(2, 1.0, 10.0).lives(3, 20.0, None, 50.0, zone="b", reason=reason)
    account = service_history(past.json())
    assert (account.crashes, account.failed_launches) == (crashes, 0)
    assert [each.crashes for each in account.bought] == [0, crashes]


def test_what_is_drawn_is_what_was_paid_for_and_when_it_was_short() -> None:
    simulation = service_history(eventful().json()).simulation
    (run,) = simulation.runs
    series = timeline(run, 200, tick_s=simulation.tick_s, begin_s=simulation.counted_from_s)
    second_s = (series.edges_s[-1] - series.edges_s[0]) / 200
    assert second_s == pytest.approx(1.0)
    assert {group: round(sum(values)) for group, values in series.alive.items()} == {
        ("a", SPOT): 110,
        ("b", SPOT): 200,
        ("b", ON_DEMAND): 100,
    }
    assert [index for index, part in enumerate(series.short) if part > 0.5] == list(range(90, 100))
    assert set(series.wanted) == {2.0}
    assert simulation.began_at is not None
    assert simulation.began_at + simulation.counted_from_s == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("past", "begin", "availability"),
    [
        pytest.param(
            Past(now=110.0).lives(1, 1.0, 10.0).lives(2, 1.0, 10.0).becomes(60.0, 2, NOT_READY).becomes(70.0, 2, READY),
            10.0, 0.9, id="a replica that did not answer for a while",
        ),
        pytest.param(
            Past(now=110.0).lives(1, 1.0, 10.0).lives(2, 1.0, 10.0).becomes(90.0, 1, DRAINING),
            10.0, 0.8, id="one that drains takes no requests",
        ),
        pytest.param(Past(now=100.0).lives(1, 1.0, 10.0), 0.0, 0.005, id="never as many as wanted: from the beginning"),
        pytest.param(
            Past(1, now=110.0, complete_from=10.0, created_at=5.0).lives(1, 6.0, 60.0),
            10.0, 0.5, id="from where nothing is missing, although it was coming up",
        ),
        pytest.param(
            Past(1, now=110.0).lives(1, 1.0, 10.0).wants(60.0, 2).lives(2, 60.0, 70.0).wants(100.0, 0),
            10.0, 0.9, id="more wanted than there were",
        ),
        pytest.param(
            Past(1, now=900.0, down=True).lives(1, 1.0, 10.0, 110.0, reason="SERVICE_DOWN"),
            10.0, 1.0, id="down: until the last one ended",
        ),
    ],
)  # fmt: skip
def test_when_it_was_available(past: Past, begin: float, availability: float) -> None:
    account = service_history(past.json())
    assert account.counted_from == begin
    assert account.run.availability == pytest.approx(availability)


def test_what_is_no_longer_told_is_in_the_row() -> None:
    past = Past(1, now=1010.0, complete_from=900.0, created_at=0.0).lives(1, 1.0, 10.0)
    past.changes = [change for change in past.changes if change["replica_id"] is None]
    past.becomes(960.0, 1, NOT_READY)
    account = service_history(past.json())
    assert account.run.availability == pytest.approx(60 / 110)
    assert account.run.usd == pytest.approx(0.36 * 110 / 3600), "only what counts is counted as paid"


def test_zones_of_one_name_are_told_apart() -> None:
    account = service_history(
        Past(2, now=100.0)
        .lives(1, 1.0, 2.0, zone="1", region="x")
        .lives(2, 1.0, 2.0, zone="1", region="y")
        .json()
    )
    assert [each.zone for each in account.bought] == ["sky/x/1", "sky/y/1"]
    assert account.simulation.zones == (("sky/x/1", "sky/x"), ("sky/y/1", "sky/y"))


@pytest.mark.parametrize(
    ("policy", "knobs", "label"),
    [
        ("spothedge", {"overprovision": 2}, "spothedge +2"),
        ("risk_hedge", {"overprovision": 0, "availability_target": 0.999}, "risk_hedge 99.9%"),
        ("risk_hedge", {"overprovision": 0}, "risk_hedge"),
    ],
)
def test_the_label_has_the_knob_of_the_policy(policy: str, knobs: dict[str, Any], label: str) -> None:
    assert service_history(eventful().json() | {"policy": policy} | knobs).run.label == label


@pytest.mark.parametrize(
    "past",
    [Past(now=0.7), Past(1, now=10.5).lives(1, 1.0, 10.0)],
    ids=["nothing was launched", "ready for half a second"],
)
def test_there_is_nothing_to_report_yet(past: Past) -> None:
    with pytest.raises(NoHistoryError, match="nothing to report of chat yet"):
        service_history(past.json())


# --- words and pictures -------------------------------------------------------------------------------------


def test_the_verdict_compares_with_on_demand() -> None:
    assert history_text.verdict(service_history(eventful().json())) == (
        "The wanted replicas were ready 95.00% of the time, for $0.0643: 48.2% of $0.1333 on demand, 51.8% less."
    )
    assert ", 2 replicas wanted, 2 zones, cold start 9s, " in history_text.setting(
        service_history(eventful().json())
    )


@pytest.mark.parametrize("suffix", report.SUFFIXES)
def test_the_same_past_is_the_same_file(suffix: str, tmp_path: Path) -> None:
    one, other = tmp_path / f"one{suffix}", tmp_path / f"other{suffix}"
    for path in (one, other):
        report.write_history(service_history(eventful().json()), path, command="serve report chat")
    assert one.read_bytes() == other.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([one.name, other.name])


def test_the_page_says_what_happened_and_not_what_a_simulation_would(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    report.write_history(service_history(eventful().json()), path, command="serve report '<chat>'")
    page = path.read_text()
    for said in (
        "What chat has done",
        "95.00%",
        "1 preemptions and 1 failed launches<",
        "Spend over time",
        "&lt;chat&gt;",
    ):
        assert said in page
    for unsaid in ("Availability against cost", "a day", "would have done"):
        assert unsaid not in page


@pytest.fixture
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("length_s", "expected"),
    [(60.0, "00:00:20"), (3600.0 * 5, "00:30"), (86400.0 * 4, "12:00")],
    ids=["seconds", "half hours", "days"],
)
@pytest.mark.usefixtures("in_utc")
def test_the_axis_is_the_clock_of_the_reader(length_s: float, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    past = Past(1, now=length_s).lives(1, 0.6, 1.0)
    report.write_history(service_history(past.json()), path, command="")
    assert f">{expected}<" in path.read_text()
