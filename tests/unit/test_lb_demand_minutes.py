"""What an agent counts of each minute, and which requests it calls late, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.config.demand import Demand
from lb.config.options import Slo
from lb.config.schema import Table, WireError
from lb.core.demand_minutes import KEPT_MIN, DemandMinutes, is_late

START = 600_000.0  # of the UNIX clock: minute 10,000
SLO = Slo(ttft_s=2.0, tpot_s=0.1)


def minutes(ready: int = 2) -> DemandMinutes:
    return DemandMinutes(0.0, START, lambda: ready)


def test_a_request_counts_when_it_arrives_and_its_tokens_when_it_ends() -> None:
    counted = minutes()
    counted.arrived(70.0)
    counted.arrived(71.0)
    counted.ended(130.0, 12, 5, late=True)
    found = counted.report(300.0, 0)
    assert (found.now, found.first, found.end) == (START + 300.0, 10_001, 10_005)
    assert found.requests == (2, 0, 0, 0)
    assert (found.prompt_tokens, found.response_tokens) == ((0, 12, 0, 0), (0, 5, 0, 0))
    assert found.late == (0, 1, 0, 0)
    assert found.ready == (2, 2, 0, 0)


def test_neither_the_minute_of_the_start_nor_the_present_one_is_reported() -> None:
    counted = minutes()
    counted.arrived(1.0)
    assert counted.report(59.0, 0).requests == ()
    assert counted.report(119.9, 0).requests == ()
    assert counted.report(120.0, 0).requests == (0,)


@given(st.lists(st.floats(0.0, 400.0), max_size=60), st.integers(0, 30))
def test_a_report_has_each_minute_since_once_whatever_came(gaps: list[float], since: int) -> None:
    counted, now = minutes(), 0.0
    for gap in gaps:
        now += gap
        counted.arrived(now)
    found = counted.report(now, 10_000 + since)
    assert found.first == max(10_001, 10_000 + since)
    assert found.end == max(found.first, int((START + now) // 60))
    assert Demand.from_json(found.to_json()) == found


def test_memory_is_bounded_by_a_day() -> None:
    counted = minutes()
    for minute in range(3 * KEPT_MIN):
        counted.arrived(60.0 * minute)
    assert len(counted._minutes) == KEPT_MIN + 1
    assert len(counted.report(180.0 * KEPT_MIN, 0).requests) == KEPT_MIN


@pytest.mark.parametrize(
    ("slo", "first_s", "whole_s", "tokens", "late"),
    [
        (SLO, 1.9, 1.9 + 9.9, 100, False),
        (SLO, 2.1, 2.1 + 1.0, 100, True),
        (SLO, 0.5, 0.5 + 10.1, 100, True),
        (SLO, 11.8, 11.8, 100, False),  # in one piece: 2 s and 99 tokens of 0.1 s
        (SLO, 12.0, 12.0, 100, True),
        (Slo(ttft_s=2.0), 0.5, 60.0, 100, False),
        (Slo(ttft_s=2.0), 2.5, 2.5, 0, True),
        (Slo(tpot_s=0.1), 30.0, 35.0, 100, False),
        (Slo(tpot_s=0.1), 12.0, 12.0, 100, True),  # in one piece
        (Slo(), 500.0, 900.0, 10, False),
    ],
)
def test_late_is(slo: Slo, first_s: float, whole_s: float, tokens: int, late: bool) -> None:
    assert is_late(slo, 100.0, 100.0 + first_s, 100.0 + whole_s, tokens) is late


def test_a_client_that_gave_up_waited_too_long_or_not() -> None:
    assert is_late(SLO, 0.0, None, 2.5, 0)
    assert not is_late(SLO, 0.0, None, 1.0, 0)


def test_a_table_without_an_slo_is_one_that_older_agents_take() -> None:
    assert "slo" not in Table("chat", "r1").to_json()
    told = Table("chat", "r1", slo=SLO)
    assert Table.from_json(told.to_json()) == told


@pytest.mark.parametrize("change", [{"late": [1]}, {"requests": [-1, 0]}, {"requests": "x"}, {"more": 1}])
def test_a_wrong_report_is_refused(change: dict[str, object]) -> None:
    good = Demand(1.0, 5, (1, 2), (0, 0), (0, 0), (0, 0), (1, 1)).to_json()
    assert Demand.from_json(good).end == 7
    with pytest.raises(WireError):
        Demand.from_json(good | change)
