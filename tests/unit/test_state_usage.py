"""Rows of usage: counted once, whatever comes twice, late or after a restart, and kept for as long as is promised."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from lb.config.usage import (
    DAY_S,
    MOST_COUNT,
    MOST_ROWS,
    KeyTotal,
    UsageReport,
    UsageRow,
    UsageTotals,
    first_day,
    month_of,
)
from skyserve_cli.controller.persistence import series_recorder
from skyserve_cli.controller.persistence.series_recorder import (
    SLOT_S,
    TOTALS_EVERY_S,
    TOTALS_KEPT_S,
    USAGE_ROWS,
    SeriesRecorder,
)
from skyserve_cli.controller.reconcile.traffic_buffer import TrafficBuffer
from skyserve_cli.controller.reconcile.usage_buffer import MOST_MODELS, UsageBuffer, service_totals
from skyserve_cli.state import tables as t
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from skyserve_cli.state.usage import KEPT, OPEN_DAYS, StoredUsage, UsageTotal, is_open
from tests.kit.clock import SimClock
from tests.unit.databases import KINDS, empty_database

TODAY = 20_000
NOW = TODAY * float(DAY_S) + 3600.0
NOTHING = UsageTotal(None, None, None, 0, 0, 0)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(Database(empty_database(request.param, tmp_path)))


def stored(
    requests: int,
    *,
    day: int = TODAY,
    key: str = "ada",
    model: str = "m",
    source: str = "s1",
    service: str = "chat",
) -> StoredUsage:
    return StoredUsage(service, day, key, model, source, requests, 10 * requests, requests)


def sums(store: Store, by: tuple[str, ...] = (), **more: int) -> list[UsageTotal]:
    days = {"since": TODAY - 1000, "until": TODAY + 1000} | more
    return store.usage("chat", by=by, most=1000, **days)[0]


def requests(store: Store) -> int:
    return store.usage("chat", since=0, until=10**6, by=(), most=1)[1].requests


@pytest.mark.parametrize(
    ("reports", "total"),
    [
        pytest.param([[stored(3)], [stored(3)]], 3, id="the same report twice"),
        pytest.param([[stored(3)], [stored(5)]], 5, id="the sum of the day grows"),
        pytest.param([[stored(5)], [stored(3)]], 5, id="an older report comes late"),
        pytest.param(
            [[stored(5)], [stored(2, source="s2")]], 7, id="another host, or a host that lost its file"
        ),
        pytest.param([[stored(5), stored(1, day=TODAY - 1)]], 6, id="two days"),
        pytest.param([[stored(5), stored(1, key="bob"), stored(1, model="")]], 7, id="keys and models"),
        pytest.param([[stored(5), stored(9, service="other")]], 5, id="services are apart"),
    ],
)
def test_every_request_counts_once(store: Store, reports: list[list[StoredUsage]], total: int) -> None:
    for report in reports:
        store.put_usage(report)
    assert requests(store) == total


def test_groups_add_up_to_the_same_total(store: Store) -> None:
    store.put_usage(
        [
            stored(1),
            stored(2, source="s2"),
            stored(4, key="bob"),
            stored(8, key="bob", model="large"),
            stored(16, day=TODAY - 1),
        ]
    )
    assert [(row.key, row.requests) for row in sums(store, ("key",))] == [("ada", 19), ("bob", 12)]
    assert [(row.model, row.requests) for row in sums(store, ("model",))] == [("large", 8), ("m", 23)]
    assert [(row.day, row.requests) for row in sums(store, ("day",))] == [(TODAY - 1, 16), (TODAY, 15)]
    assert len(sums(store, ("key", "model", "day"))) == 4
    assert sums(store) == [UsageTotal(None, None, None, 31, 310, 31)]
    assert [row.requests for row in sums(store, ("key",), since=TODAY)] == [3, 12]
    assert [row.requests for row in sums(store, ("key",), until=TODAY - 1)] == [16]


def test_the_top_rows_have_the_most_tokens(store: Store) -> None:
    store.put_usage([stored(number, key=f"k{number}") for number in range(1, 9)])
    rows, total = store.usage("chat", since=0, until=TODAY, by=("key",), most=3, top=True)
    assert [row.key for row in rows] == ["k8", "k7", "k6"]
    assert total == UsageTotal(None, None, None, 36, 360, 36)


def test_nothing_was_used(store: Store) -> None:
    assert store.usage("chat", since=0, until=TODAY, by=(), most=10) == ([], NOTHING)


def test_days_that_are_over_everywhere_are_folded_and_keep_their_sums(store: Store) -> None:
    over = TODAY - OPEN_DAYS
    store.put_usage(
        [stored(3, day=over), stored(4, day=over, source="s2"), stored(5, day=over + 1), stored(6)]
    )
    store.fold_usage(NOW)
    store.fold_usage(NOW)  # again: nothing is counted twice
    assert [(row.day, row.requests) for row in sums(store, ("day",))] == [
        (over, 7),
        (over + 1, 5),
        (TODAY, 6),
    ]
    with store.database.reading() as c:
        rows = c.execute(sa.select(t.usage.c.source).where(t.usage.c.day == over)).scalars().all()
    assert rows == [""]
    assert not is_open(over, NOW)


def test_rows_are_kept_for_as_long_as_promised(store: Store) -> None:
    store.put_usage([stored(1, day=TODAY - KEPT), stored(2, day=TODAY - KEPT + 1)])
    store.fold_usage(NOW)
    assert requests(store) == 2


def test_large_numbers_and_any_text(store: Store) -> None:
    model = "größe/模型 'x' \"y\""
    store.put_usage([stored(2**50, model=model), stored(2**50, model=model, source="s2")])
    assert [(row.model, row.requests) for row in sums(store, ("model",))] == [(model, 2**51)]


# --- totals of today and of the month


def test_totals_are_those_of_all_sources_today_and_in_this_month(store: Store) -> None:
    first = first_day(month_of(TODAY))
    store.put_usage(
        [
            stored(1),
            stored(2, source="s2"),
            stored(4, day=first),
            stored(8, day=first - 1),
            stored(16, day=TODAY + 1),
            stored(32, day=first, model="large"),
            stored(64, key="bob"),
            stored(128, service="other"),
        ]
    )
    assert store.usage_totals("chat", TODAY, 10) == [
        KeyTotal("ada", "large", 0, 0, 0, 320, 32),
        KeyTotal("ada", "m", 3, 30, 3, 70, 7),
        KeyTotal("bob", "m", 64, 640, 64, 640, 64),
    ]
    assert [row.key for row in store.usage_totals("chat", TODAY, 2)] == ["ada", "ada"]
    assert store.usage_totals("none", TODAY, 10) == []


def test_on_the_first_of_a_month_the_month_is_today(store: Store) -> None:
    first = first_day(month_of(TODAY))
    store.put_usage([stored(1, day=first - 1), stored(2, day=first)])
    assert store.usage_totals("chat", first, 10) == [KeyTotal("ada", "m", 2, 20, 2, 20, 2)]


def test_folding_keeps_totals(store: Store) -> None:
    day = first_day(month_of(TODAY))
    now = (day + OPEN_DAYS) * float(DAY_S)
    store.put_usage([stored(1, day=day), stored(2, day=day, source="s2")])
    before = store.usage_totals("chat", day + OPEN_DAYS, 10)
    store.fold_usage(now)
    assert store.usage_totals("chat", day + OPEN_DAYS, 10) == before == [KeyTotal("ada", "m", 0, 0, 0, 30, 3)]


def test_totals_of_any_size_can_be_sent(store: Store) -> None:
    store.put_usage([stored(2**49, source=f"s{number}") for number in range(20)])
    (row,) = store.usage_totals("chat", TODAY, 10)
    assert row[2:] == (MOST_COUNT,) * 5
    assert UsageTotals.from_json(UsageTotals(TODAY, (row,)).to_json()).rows == (row,)


# --- what it costs


def test_each_model_has_its_price_whatever_the_groups_are(store: Store) -> None:
    store.put_usage(
        [stored(1), stored(2, source="s2"), stored(4, model="large"), stored(8, key="bob", day=TODAY - 1)]
    )
    usd_per_token = {"m": (1.0, 0.5), "large": (2.0, 3.0)}

    def usd(model: str, tokens_in: int, tokens_out: int) -> float:
        return tokens_in * usd_per_token[model][0] + tokens_out * usd_per_token[model][1]

    for by, expected in (
        (("key",), [("ada", 7, 30 + 1.5 + 80 + 12), ("bob", 8, 84.0)]),
        (("model",), [("large", 4, 92.0), ("m", 11, 110 + 5.5)]),
        (("day", "key"), [(TODAY - 1, 8, 84.0), (TODAY, 7, 123.5)]),
        ((), [(None, 15, 207.5)]),
    ):
        days = {"since": TODAY - 9, "until": TODAY}
        rows, total = store.usage("chat", by=by, most=10, usd=usd, **days)
        first = by[0] if by else "key"
        assert [(getattr(row, first), row.requests, row.usd) for row in rows] == expected
        assert total == UsageTotal(None, None, None, 15, 150, 15, 207.5)
        plain, plain_total = store.usage("chat", by=by, most=10, **days)
        assert ([row._replace(usd=None) for row in rows], total._replace(usd=None)) == (plain, plain_total)
    rows, total = store.usage("chat", since=0, until=TODAY, by=("key",), most=1, top=True, usd=usd)
    assert ([row.key for row in rows], total.usd) == (["bob"], 207.5)


def test_nothing_costs_nothing(store: Store) -> None:
    found = store.usage("chat", since=0, until=TODAY, by=(), most=10, usd=lambda *tokens: 1.0)
    assert found == ([], NOTHING._replace(usd=0.0))


# --- from reports to rows


def report(requests: int, *, source: str = "s1", day: int = TODAY, key: str = "ada") -> UsageReport:
    return UsageReport(source, 1, False, (UsageRow(day, key, "m", requests, 10 * requests, requests),))


class Flaky:
    """A store that fails as often as it is configured to."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.puts: list[int] = []
        self.kept: dict[tuple[object, ...], int] = {}

    def put_usage(self, rows: list[StoredUsage]) -> None:
        if self.failures:
            self.failures -= 1
            raise OperationalError("INSERT", {}, Exception("database is locked"))
        self.puts.append(len(rows))
        self.kept |= {row[:5]: row.requests for row in rows}


def test_what_cannot_be_stored_is_stored_later_with_its_newest_numbers() -> None:
    clock, book, store = SimClock(NOW), TrafficBuffer(), Flaky(1)
    recorder = SeriesRecorder(store, book, clock)  # type: ignore[arg-type]
    book.usage.add("chat", report(1))
    recorder.round()
    assert store.kept == {}
    book.usage.add("chat", report(4))
    book.usage.add("chat", report(2, key="bob"))
    recorder.round()
    recorder.round()
    assert store.kept == {
        ("chat", TODAY, "ada", "m", "s1"): 4,
        ("chat", TODAY, "bob", "m", "s1"): 2,
    }
    assert store.puts == [2]


def test_what_was_put_back_does_not_hide_what_has_come_since() -> None:
    book = TrafficBuffer()
    book.usage.add("chat", report(1))
    taken = book.usage.take(10)
    book.usage.add("chat", report(3))
    book.usage.put_back(taken)
    assert [row.requests for row in book.usage.take(10).values()] == [3]
    assert book.usage.take(10) == {}


def test_many_rows_are_stored_in_steps() -> None:
    clock, book, store = SimClock(NOW), TrafficBuffer(), Flaky(0)
    rows = tuple(UsageRow(TODAY, f"k{number}", "m", 1, 1, 1) for number in range(2 * USAGE_ROWS + 1))
    book.usage.add("chat", UsageReport("s1", 1, False, rows))
    SeriesRecorder(store, book, clock).round()  # type: ignore[arg-type]
    assert store.puts == [USAGE_ROWS, USAGE_ROWS, 1]


@pytest.mark.parametrize(
    ("day", "is_taken"),
    [
        (TODAY, True),
        (TODAY + 1, True),
        (TODAY + 2, False),
        (TODAY - OPEN_DAYS + 1, True),
        (TODAY - OPEN_DAYS, False),
    ],
)
def test_only_days_that_are_not_folded_are_taken(
    day: int, is_taken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock, book, store = SimClock(NOW), TrafficBuffer(), Flaky(0)
    book.usage.add("chat", report(1, day=day))
    SeriesRecorder(store, book, clock).round()  # type: ignore[arg-type]
    assert bool(store.kept) == is_taken
    assert ("left out" in caplog.text) != is_taken


# --- from rows to totals


class Summed:
    """A store with the same totals for each service; it fails as often as it is configured to."""

    def __init__(self, *rows: KeyTotal) -> None:
        self.rows = list(rows)
        self.failures = 0
        self.reads: list[tuple[str, int]] = []

    def put_usage(self, rows: list[StoredUsage]) -> None:
        pass

    def usage_totals(self, service: str, today: int, most: int) -> list[KeyTotal]:
        if self.failures:
            self.failures -= 1
            raise OperationalError("SELECT", {}, Exception("database is locked"))
        self.reads.append((service, today))
        return self.rows[:most]


def key_total(key: str, model: str = "m", used: int = 1) -> KeyTotal:
    return KeyTotal(key, model, used, used, used, used, used)


def wanting(source: str = "s1") -> UsageReport:
    return UsageReport(source, 1, False, (), totals=True)


def test_totals_are_read_for_services_that_want_them_once_a_minute() -> None:
    clock, book, store = SimClock(NOW), TrafficBuffer(), Summed(key_total("ada"))
    recorder = SeriesRecorder(store, book, clock)  # type: ignore[arg-type]
    for _ in range(int(2 * TOTALS_EVERY_S / SLOT_S)):
        book.usage.add("chat", wanting())
        book.usage.add("chat", wanting("s2"))
        book.usage.add("other", report(1))
        recorder.round()
        clock.advance(clock.now() + SLOT_S)
    assert store.reads == [("chat", TODAY)] * 2
    assert book.usage.totals("chat") == service_totals(TODAY, [key_total("ada")])
    assert book.usage.totals("other") is None


def test_totals_of_another_day_and_those_that_could_not_be_read_are_read_at_once() -> None:
    clock, book, store = SimClock(NOW), TrafficBuffer(), Summed()
    recorder = SeriesRecorder(store, book, clock)  # type: ignore[arg-type]
    store.failures = 1

    def after(seconds: float) -> list[tuple[str, int]]:
        clock.advance(clock.now() + seconds)
        book.usage.add("chat", wanting())
        recorder.round()
        return store.reads

    assert after(0.0) == []
    assert after(SLOT_S) == [("chat", TODAY)]
    clock.advance((TODAY + 1) * DAY_S - TOTALS_EVERY_S)
    assert after(0.0) == [("chat", TODAY)] * 2
    assert after(TOTALS_EVERY_S - SLOT_S) == [("chat", TODAY)] * 2
    assert after(SLOT_S) == [("chat", TODAY)] * 2 + [("chat", TODAY + 1)]


def test_totals_that_no_agent_wants_any_more_are_forgotten() -> None:
    clock, book, store = SimClock(NOW), TrafficBuffer(), Summed(key_total("ada"))
    recorder = SeriesRecorder(store, book, clock)  # type: ignore[arg-type]
    book.usage.add("chat", wanting())
    recorder.round()
    clock.advance(clock.now() + TOTALS_KEPT_S)
    recorder.round()
    assert book.usage.totals("chat") is not None
    clock.advance(clock.now() + 1.0)
    recorder.round()
    assert book.usage.totals("chat") is None
    assert len(store.reads) == 1


def test_of_too_many_totals_whole_keys_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(series_recorder, "MOST_TOTALS", 3)
    clock, book = SimClock(NOW), TrafficBuffer()
    store = Summed(key_total("ada", "a"), key_total("ada", "b"), key_total("bob", "a"), key_total("bob", "b"))
    book.usage.add("chat", wanting())
    SeriesRecorder(store, book, clock).round()  # type: ignore[arg-type]
    held = book.usage.totals("chat")
    assert held is not None
    assert list(held.keys) == ["ada"]
    assert "keys from 'bob' on are left out" in caplog.text


def test_totals_are_in_order_of_keys_and_models() -> None:
    rows = [key_total("b", "y"), key_total("b", "x"), key_total("a"), key_total("")]
    found = service_totals(TODAY, rows)
    assert list(found.keys) == ["", "a", "b"]
    ordered = tuple(row for models in found.keys.values() for row in models)
    assert UsageTotals.from_json(UsageTotals(TODAY, ordered).to_json()).rows == ordered


@pytest.mark.parametrize("has_rest", [False, True])
def test_a_key_with_many_models_fits_into_one_message_and_keeps_its_sums(has_rest: bool) -> None:
    rows = [key_total("ada", f"m{number:05}", number) for number in range(1, 2 * MOST_MODELS)]
    rows += [key_total("ada", "", 7)] * has_rest
    (found,) = service_totals(TODAY, rows).keys.values()
    assert len(found) <= MOST_MODELS <= MOST_ROWS
    assert [sum(row[at] for row in found) for at in range(2, 7)] == [
        sum(row[at] for row in rows) for at in range(2, 7)
    ]
    assert found[0].model == ""
    assert found[-1] == rows[2 * MOST_MODELS - 2]


def test_a_service_wants_totals_until_it_was_taken() -> None:
    buffer = UsageBuffer()
    buffer.add("chat", wanting())
    buffer.add("chat", report(1))  # of another agent, without such limits
    assert buffer.take_wanting() == {"chat"}
    assert buffer.take_wanting() == set()
