"""Questions about usage, and what is shown of the rows."""

from __future__ import annotations

import pytest

from skyserve_cli.controller.api import usage_view as view
from skyserve_cli.controller.api.usage_view import UsageOfDays, usage_question
from skyserve_cli.state.usage import UsageTotal

TODAY = 20_785  # 2026-11-28


@pytest.mark.parametrize(
    ("query", "since", "until", "by", "top"),
    [
        pytest.param({}, "2026-10-30", "2026-11-28", ("key", "model"), None, id="30 days, today included"),
        pytest.param({"since": "2026-11-28"}, "2026-11-28", "2026-11-28", ("key", "model"), None, id="today"),
        pytest.param(
            {"until": "2026-02-28"}, "2026-01-30", "2026-02-28", ("key", "model"), None, id="30 days before"
        ),
        pytest.param({"by": "day"}, "2026-10-30", "2026-11-28", ("day",), None, id="one group"),
        pytest.param({"by": ""}, "2026-10-30", "2026-11-28", (), None, id="no group"),
        pytest.param(
            {"by": "day,key,model", "top": "5"},
            "2026-10-30",
            "2026-11-28",
            ("day", "key", "model"),
            5,
            id="all",
        ),
        pytest.param({"top": "0"}, "2026-10-30", "2026-11-28", ("key", "model"), 1, id="one row at least"),
    ],
)
def test_what_is_asked(
    query: dict[str, str], since: str, until: str, by: tuple[str, ...], top: int | None
) -> None:
    asked = usage_question(query).on(TODAY)
    assert (view.text_of(asked.since), view.text_of(asked.until), asked.by, asked.top) == (
        since,
        until,
        by,
        top,
    )


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ({"since": "yesterday"}, "since: 'yesterday' is no date such as 2026-11-27"),
        ({"until": "2026-13-01"}, "until: '2026-13-01' is no date"),
        ({"since": "2026-11-28", "until": "2026-11-27"}, "until: 2026-11-27 is before 2026-11-28"),
        ({"by": "zone"}, "by: 'zone' is not some of day, key, model"),
        ({"by": "key,key"}, "each once"),
        ({"top": "many"}, "many"),
    ],
)
def test_what_makes_no_sense_is_refused(query: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        usage_question(query).on(TODAY)


def test_rows_have_their_groups_only() -> None:
    asked = UsageOfDays(TODAY - 1, TODAY, ("day", "key"), None)
    shown = view.usage_view("chat", asked, [UsageTotal(TODAY, "", None, 1, 2, 3)], (1, 2, 3))
    assert shown == {
        "name": "chat",
        "since": "2026-11-27",
        "until": "2026-11-28",
        "by": ["day", "key"],
        "rows": [{"day": "2026-11-28", "key": "", "requests": 1, "tokens_in": 2, "tokens_out": 3}],
        "total": {"requests": 1, "tokens_in": 2, "tokens_out": 3},
    }


def test_too_many_rows_are_refused_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "MOST_ROWS", 2)
    rows = [UsageTotal(None, f"k{number}", None, 1, 1, 1) for number in range(3)]
    with pytest.raises(ValueError, match="more than 2 rows"):
        view.usage_view("chat", UsageOfDays(1, 1, ("key",), None), rows, (3, 3, 3))
