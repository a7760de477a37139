"""The keys slo, autoscaler and schedule of a service file."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from policies.goals import ScalingGoal
from skyserve_cli.controller.reconcile.mappers import scaling_of
from skyserve_cli.spec.codec import spec_from_json, spec_to_json
from skyserve_cli.spec.load import load_text
from skyserve_cli.spec.model import ScheduledSize, ServiceSpec, SloSpec
from skyserve_cli.spec.schedule import limits_at
from tests.unit.test_spec_wrong import problems_of

BERLIN = ZoneInfo("Europe/Berlin")


def spec_of(text: str) -> ServiceSpec:
    spec = load_text(f"run: x\nresources: {{infra: local}}\nservice:\n  replica_policy: {text}\n").spec
    assert spec_from_json(spec_to_json(spec)) == spec
    return spec


def test_an_slo_alone_turns_the_forecast_on() -> None:
    found = spec_of(
        "{min_replicas: 1, max_replicas: 4, slo: {ttft_ms: 2000, tpot_ms: 100, attainment: 99.5%}}"
    )
    assert found.slo == SloSpec(2000.0, 100.0, 0.995, None, "predictive")
    other = spec_of("{max_replicas: 4, slo: {ttft_ms: 1}, autoscaler: Reactive}")
    assert other.slo == SloSpec(1.0, None, 0.99, None, "reactive")
    weighed = spec_of("{max_replicas: 4, slo: {ttft_ms: 1, response_weight: 2.5}}")
    assert weighed.slo == SloSpec(1.0, None, 0.99, response_weight=2.5)
    goal = scaling_of(weighed).slo
    assert goal is not None
    assert goal.response_weight == 2.5
    assert spec_of("{min_replicas: 2}").slo is None
    for late in ("queue", "shed"):
        found = spec_of(f"{{max_replicas: 4, slo: {{ttft_ms: 1, late: {late}}}}}")
        assert found.slo is not None
        assert found.slo.late == late


@pytest.mark.parametrize(
    ("text", "share"), [("99.5%", 0.995), ("99.5", 0.995), ("0.995", 0.995), ("'99 %'", 0.99)]
)
def test_a_share_may_be_written_in_percent(text: str, share: float) -> None:
    slo = spec_of(f"{{max_replicas: 4, slo: {{ttft_ms: 9, attainment: {text}}}}}").slo
    assert slo is not None
    assert slo.attainment == share


@pytest.mark.parametrize(
    ("text", "path", "sentence"),
    [
        ("{max_replicas: 4, slo: {ttft_ms: 9}, target_qps_per_replica: 2}", "target_qps_per_replica", "next to slo"),
        ("{max_replicas: 4, slo: {ttft_ms: 9}, target_ongoing_requests_per_replica: 2}", "target_ongoing_requests_per_replica", "next to slo"),
        ("{max_replicas: 4, slo: {ttft_ms: 9}, availability_target: 0.99}", "availability_target", "next to slo"),
        ("{max_replicas: 4, slo: {attainment: 0.99}}", "slo", "needs ttft_ms or tpot_ms"),
        ("{max_replicas: 4, slo: {ttft_ms: 9, attainment: 3}}", "slo.attainment", "from 50% to 99.99%"),
        ("{max_replicas: 4, slo: {ttft_ms: 9, response_weight: 0}}", "slo.response_weight", "above 0"),
        ("{max_replicas: 4, slo: {ttft_ms: 9, late: drop}}", "slo.late", "must be one of"),
        ("{autoscaler: predictive}", "autoscaler", "needs slo"),
        ("{max_replicas: 4, slo: {ttft_ms: 9}, autoscaler: magic}", "autoscaler", "must be one of"),
        ("{schedule: [{cron: '0 8 * *', duration: 1h, min_replicas: 2}]}", "schedule[0].cron", "five fields"),
        ("{schedule: [{cron: '0 25 * * *', duration: 1h, min_replicas: 2}]}", "schedule[0].cron", "no cron expression"),
        ("{schedule: [{cron: '0 8 * * *', duration: 1h}]}", "schedule[0]", "needs min_replicas or max_replicas"),
        ("{schedule: [{cron: '0 8 * * *', duration: 9y, min_replicas: 2}]}", "schedule[0].duration", "a duration from"),
        ("{schedule: [{cron: '0 8 * * *', duration: 1h, min_replicas: 2, timezone: Mars}]}", "schedule[0].timezone", "no time zone"),
        ("{schedule: [{cron: '0 8 * * *', duration: 1h, min_replicas: 5, max_replicas: 3}]}", "schedule[0].max_replicas", ">= min_replicas"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_at_its_place(text: str, path: str, sentence: str) -> None:
    found = problems_of(f"run: x\nresources: {{infra: local}}\nservice:\n  replica_policy: {text}\n")
    assert [(at, sentence in message) for at, message in found.items()] == [
        (f"service.replica_policy.{path}", True)
    ]


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


def sized(least: int, most: int, *schedule: ScheduledSize) -> ServiceSpec:
    return ServiceSpec("chat", "run", scaling=ScalingGoal(least, most), schedule=schedule)


OFFICE = ScheduledSize("0 8 * * 1-5", "Europe/Berlin", 10 * 3600.0, min_replicas=4)


@pytest.mark.parametrize(
    ("now", "least", "until"),
    [
        ("2026-03-27 07:59", 1, "2026-03-27 08:00"),  # a Friday
        ("2026-03-27 08:00", 4, "2026-03-27 18:00"),
        ("2026-03-27 17:59", 4, "2026-03-27 18:00"),
        ("2026-03-27 18:00", 1, "2026-03-30 08:00"),  # the clocks change on Sunday
        ("2026-03-30 08:00", 4, "2026-03-30 18:00"),
    ],
)
def test_an_entry_lasts_from_its_cron_for_its_duration(now: str, least: int, until: str) -> None:
    found = limits_at(sized(1, 6, OFFICE), at(now))
    assert (found.least, found.most, found.until) == (least, 6, at(until))


def test_of_entries_that_overlap_the_later_counts_key_by_key() -> None:
    lunch: Any = ScheduledSize("0 12 * * *", "Europe/Berlin", 3600.0, min_replicas=8, max_replicas=9)
    found = limits_at(sized(1, 6, OFFICE, lunch), at("2026-03-27 12:30"))
    assert (found.least, found.most, found.until) == (8, 9, at("2026-03-27 13:00"))
    assert limits_at(sized(2, 3), 0.0) == (2, 3, math.inf)
