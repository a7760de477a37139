"""Questions about usage, and what is shown of the rows."""

from __future__ import annotations

import pytest

from lb.config.key_limits import Price
from skyserve_cli.commands import usage as command
from skyserve_cli.controller.api import usage_view as view
from skyserve_cli.controller.api.usage_view import UsageOfDays, usage_question
from skyserve_cli.state.usage import UsageTotal

TODAY = 20_785  # 2026-11-28


def sums(requests: int, tokens_in: int, tokens_out: int, usd: float | None = None) -> UsageTotal:
    return UsageTotal(None, None, None, requests, tokens_in, tokens_out, usd)


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
    shown = view.usage_view("chat", asked, [UsageTotal(TODAY, "", None, 1, 2, 3)], sums(1, 2, 3))
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
        view.usage_view("chat", UsageOfDays(1, 1, ("key",), None), rows, sums(3, 3, 3))


ASKED = UsageOfDays(TODAY, TODAY, ("key", "model"), None)
ROW = UsageTotal(None, "ada", "m", 1200, 2_000_000, 30)


def test_with_prices_rows_and_the_total_have_what_they_cost() -> None:
    shown = view.usage_view("chat", ASKED, [ROW._replace(usd=0.1 + 0.2)], sums(1200, 2_000_000, 30, 12.0))
    assert [row["usd"] for row in shown["rows"]] == [0.3]
    assert shown["total"]["usd"] == 12.0
    free = view.usage_view("chat", ASKED, [ROW._replace(usd=0.0)], sums(1200, 2_000_000, 30, 0.0))
    assert (free["rows"][0]["usd"], free["total"]["usd"]) == (0.0, 0.0)


def test_a_model_without_a_price_has_that_of_all_others() -> None:
    usd = view.usd_of((("m", Price(2.0, 10.0)), ("*", Price(1.0, 1.0))))
    assert usd("m", 1_000_000, 100_000) == 3.0
    assert usd("other", 1_000_000, 1_000_000) == usd("", 1_000_000, 1_000_000) == 2.0
    assert view.usd_of((("m", Price(2.0, 10.0)),))("other", 10**6, 10**6) == 0.0


@pytest.mark.parametrize("priced", [False, True])
def test_the_command_prints_what_it_costs_where_there_are_prices(
    priced: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    row = ROW._replace(usd=0.25 if priced else None)
    shown = view.usage_view("chat", ASKED, [row], sums(1200, 2_000_000, 30, 1234.5 if priced else None))
    command._put_table(shown)
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    costs = [["USD"], ["0.2500"], ["1,234.50"]] if priced else [[]] * 3
    assert table == [
        ["KEY", "MODEL", "REQUESTS", "TOKENS", "IN", "TOKENS", "OUT", *costs[0]],
        ["ada", "m", "1,200", "2,000,000", "30", *costs[1]],
        ["total", "1,200", "2,000,000", "30", *costs[2]],
    ]
    command._put_csv(shown)
    head, line = capsys.readouterr().out.splitlines()
    assert head == "key,model,requests,tokens_in,tokens_out" + ",usd" * priced
    assert line == "ada,m,1200,2000000,30" + ",0.25" * priced
