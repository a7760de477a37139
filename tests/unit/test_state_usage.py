"""Rows of usage: counted once, whatever comes twice, late or after a restart, and kept for as long as is promised."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from lb.config.usage import DAY_S, UsageReport, UsageRow
from skyserve_cli.controller.persistence.series_recorder import USAGE_ROWS, SeriesRecorder
from skyserve_cli.controller.reconcile.traffic_buffer import TrafficBuffer
from skyserve_cli.state import tables as t
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from skyserve_cli.state.usage import KEPT, OPEN_DAYS, StoredUsage, UsageTotal, is_open
from tests.kit.clock import SimClock
from tests.unit.databases import KINDS, empty_database

TODAY = 20_000
NOW = TODAY * float(DAY_S) + 3600.0


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
    return store.usage("chat", since=0, until=10**6, by=(), most=1)[1][0]


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
    assert total == (36, 360, 36)


def test_nothing_was_used(store: Store) -> None:
    assert store.usage("chat", since=0, until=TODAY, by=(), most=10) == ([], (0, 0, 0))


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
