"""Sums by key and model: what is counted where, how many sums a client can make, and the totals that come from a controller."""

from __future__ import annotations

from datetime import date, timedelta

import pytest

from lb.config.decode import WireError
from lb.config.usage import MOST_COUNT, MOST_ROWS, KeyTotal, UsageTotals, first_day, month_of
from lb.observe import key_usage
from lb.observe.key_usage import LONGEST_MODEL, MOST_MODELS, KeyUsage


def taken(usage: KeyUsage) -> dict[tuple[str, str], tuple[int, int, int]]:
    return {(found.key, found.model): found[2:] for found in usage.take()}


def test_requests_and_tokens_add_up_by_key_and_model() -> None:
    usage = KeyUsage()
    usage.add("alice", "small", True, 10, 5)
    usage.add("alice", "small", True, 1, 2)
    usage.add("alice", "large", True, 7, 7)
    usage.add("bob", "small", True, 3, 0)
    assert taken(usage) == {
        ("alice", "small"): (2, 11, 7),
        ("alice", "large"): (1, 7, 7),
        ("bob", "small"): (1, 3, 0),
    }


def test_what_was_taken_is_not_taken_again() -> None:
    usage = KeyUsage()
    usage.add("alice", "small", True, 10, 5)
    usage.take()
    assert usage.take() == []
    usage.add("alice", "small", True, 1, 1)
    assert taken(usage) == {("alice", "small"): (1, 1, 1)}


@pytest.mark.parametrize(
    ("model", "served", "counted_as"),
    [
        pytest.param("small", True, "small", id="an engine served it"),
        pytest.param("invented", False, "", id="no engine has served it"),
        pytest.param("", True, "", id="the request names none"),
        pytest.param("a\0b", True, "", id="a database may not take it"),
        pytest.param("\ud800", True, "", id="no text that can be encoded"),
        pytest.param("m" * LONGEST_MODEL, True, "m" * LONGEST_MODEL, id="as long as can be"),
        pytest.param("m" * (LONGEST_MODEL + 1), True, "", id="too long"),
    ],
)
def test_a_model_gets_a_sum_once_an_engine_has_served_it(model: str, served: bool, counted_as: str) -> None:
    usage = KeyUsage()
    usage.add("alice", model, served, 1, 1)
    assert list(taken(usage)) == [("alice", counted_as)]


def test_a_failure_of_a_model_that_was_served_before_is_counted_for_the_model() -> None:
    usage = KeyUsage()
    usage.add("alice", "small", True, 1, 1)
    usage.take()
    usage.add("alice", "small", False, 9, 0)
    usage.add("bob", "small", False, 9, 0)
    assert list(taken(usage)) == [("alice", "small"), ("bob", "")]


def test_a_key_that_invents_models_has_few_sums_and_takes_none_from_others() -> None:
    usage = KeyUsage()
    for number in range(MOST_MODELS + 50):
        usage.add("mallory", f"m{number}", True, 1, 1)
    usage.add("alice", "small", True, 1, 1)
    found = taken(usage)
    assert len(found) == MOST_MODELS + 2
    assert found["mallory", ""] == (50, 50, 50)
    assert found["alice", "small"] == (1, 1, 1)


def test_all_keys_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_usage, "MOST_SUMS", 3)
    usage = KeyUsage()
    for number in range(5):
        usage.add(f"k{number}", "small", True, 1, 1)
    assert list(taken(usage)) == [(f"k{number}", "small" if number < 3 else "") for number in range(5)]


def test_the_next_day_has_room_for_other_models() -> None:
    usage = KeyUsage()
    for number in range(MOST_MODELS):
        usage.add("alice", f"m{number}", True, 1, 1)
    usage.add("alice", "m0", True, 1, 1)
    usage.forget_models()
    usage.add("alice", "new", True, 1, 1)
    assert ("alice", "new") in taken(usage)


# --- totals


def test_months_begin_and_end_where_those_of_the_calendar_do() -> None:
    start = (date(2023, 12, 1) - date(1970, 1, 1)).days
    for day in (0, 30, 31, *range(start, start + 800)):
        shown = date(1970, 1, 1) + timedelta(days=day)
        month = month_of(day)
        assert month == (shown.year - 1970) * 12 + shown.month - 1
        assert first_day(month) == day - shown.day + 1
        assert month_of(first_day(month)) == month
        assert first_day(month) <= day < first_day(month + 1)


TOTALS = (
    KeyTotal("", "", 0, 0, 0, 0, 0),
    KeyTotal("ada", "", 1, 2, 3, 4, 5),
    KeyTotal("ada", "größe/模型", 1, 2, 3, MOST_COUNT, 5),
    KeyTotal("bob", "m", 1, 2, 3, 4, 5),
)


@pytest.mark.parametrize("rows", [(), TOTALS])
def test_totals_come_back_from_json(rows: tuple[KeyTotal, ...]) -> None:
    totals = UsageTotals(20_000, rows)
    assert UsageTotals.from_json(totals.to_json()) == totals


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"day": -1}, "day"),
        ({"day": 1.0}, "day"),
        ({"day": 10**7}, "day"),
        ({"more": False}, "more"),
        ({"rows": {}}, "rows"),
        ({"rows": [["a", "m", 1, 1, 1, 1, 1]] * (MOST_ROWS + 1)}, "rows"),
        ({"rows": [["a", "m", 1, 1, 1, 1]]}, r"rows\[0\]"),
        ({"rows": [["a", "m", 1, 1, 1, 1, -1]]}, r"rows\[0\]"),
        ({"rows": [["a", "m", 1, 1, 1, 1, 1.5]]}, r"rows\[0\]"),
        ({"rows": [["a", "m", 1, 1, 1, 1, True]]}, r"rows\[0\]"),
        ({"rows": [["a", "m", 1, 1, 1, 1, 2 * MOST_COUNT]]}, r"rows\[0\]"),
        ({"rows": [["a\n", "m", 1, 1, 1, 1, 1]]}, r"rows\[0\]"),
        ({"rows": [["a", None, 1, 1, 1, 1, 1]]}, r"rows\[0\]"),
        ({"rows": [["a", "m" * 600, 1, 1, 1, 1, 1]]}, r"rows\[0\]"),
        ({"rows": [["a", "m", 1, 1, 1, 1, 1]] * 2}, r"rows\[1\]"),
        ({"rows": [[key, "m", 1, 1, 1, 1, 1] for key in "acb"]}, r"rows\[2\]"),
        ({"rows": [["a", model, 1, 1, 1, 1, 1] for model in "yx"]}, r"rows\[1\]"),
    ],
)
def test_what_are_no_totals_is_refused_with_its_place(change: dict[str, object], path: str) -> None:
    with pytest.raises(WireError, match=path):
        UsageTotals.from_json({"day": 20_000, "rows": []} | change)


def test_totals_have_a_day() -> None:
    with pytest.raises(WireError, match="day"):
        UsageTotals.from_json({"rows": []})
