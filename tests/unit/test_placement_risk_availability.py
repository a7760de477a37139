"""What RiskHedge promised and kept, from its budget."""

from __future__ import annotations

import orjson
import pytest

from policies.model import Json
from policies.placement import risk_budget
from policies.placement.risk_availability import availability

NOW, DAY, WINDOW = 1_700_000_000.0, 86_400.0, 200.0


def after(*looks: tuple[float, bool]) -> Json:
    """The budget after looks at (days since the start, whether it was short); through JSON, as it is kept."""
    budget: Json | None = None
    for day, short in looks:
        budget = risk_budget.written(
            budget,
            now=NOW + day * DAY,
            short=short,
            predicted=0.001,
            fleet=(4,),
            target=0.999,
            window_s=WINDOW,
            saved=(0.0, 1.0, 0.0, NOW + day * DAY),
        )
        budget = orjson.loads(orjson.dumps(budget))
    assert budget is not None
    return budget


def test_nothing_is_said_before_the_wanted_number_was_first_ready() -> None:
    assert availability(None, 0.999, NOW) is None
    assert availability({"spent": 0.0, "at": NOW, "rate": 0.0, "met": 4}, 0.999, NOW) is None


def test_an_outage_counts_since_the_start_and_within_the_month() -> None:
    an_hour = after((0, False), (1, True), (1 + 1 / 24, False), (10, False))
    found = availability(an_hour, 0.999, NOW + 10 * DAY)
    assert found is not None
    assert found.outages == 1
    assert found.realised == found.realised_month == pytest.approx(1 - 1 / 240)
    assert found.outages_left == pytest.approx((0.001 * 30 * DAY - 3600) / WINDOW)
    assert 0.99 < found.predicted < 1.0


def test_after_a_month_an_outage_is_of_the_past() -> None:
    later = availability(
        after((0, False), (1, True), (1 + 1 / 24, False), (50, False)), 0.999, NOW + 50 * DAY
    )
    assert later is not None
    assert later.realised_month == 1.0
    assert later.realised == pytest.approx(1 - 1 / 1200)
    assert later.outages_left == pytest.approx(0.001 * 30 * DAY / WINDOW)


def test_what_is_being_missed_counts_until_now() -> None:
    found = availability(after((0, False), (40, True)), 0.999, NOW + 60 * DAY)
    assert found is not None
    assert found.realised == pytest.approx(2 / 3)
    assert found.realised_month == pytest.approx(1 / 3, abs=0.04)
    assert found.outages_left < 0


def test_what_is_remembered_stays_small() -> None:
    looks = [(day / 2, day % 2 == 1) for day in range(400)]
    assert len(after(*looks)["days"]) <= risk_budget.KEPT_DAYS + 2
