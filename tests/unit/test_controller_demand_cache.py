"""What the controller stores of the minutes that agents report."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from lb.config.demand import Demand
from skyserve_cli.controller.reconcile.demand_cache import KEPT_MIN, DemandCache
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import DemandRow


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(Database("sqlite://"))
    yield store
    store.close()


def told(first: int, *requests: int, late: int = 0, ready: int = 1) -> Demand:
    zeros = (0,) * len(requests)
    return Demand(0.0, first, requests, zeros, zeros, (late,) * len(requests), (ready,) * len(requests))


def requests(book: DemandCache, now: float = 60.0 * 1000) -> list[float]:
    found = book.history("chat", now)
    return [] if found is None else list(found.requests)


def test_minutes_are_stored_once_and_known_to_the_next_process(store: Store) -> None:
    book = DemandCache(store)
    assert book.history("chat", 60_000.0) is None
    assert book.take("chat", [told(990, 5, 6, 7, late=2, ready=3)], 60_000.0)
    assert not book.take("chat", [told(990, 5, 6, 7)], 60_001.0)
    assert store.demand("chat")[0] == DemandRow(990, 5.0, 0.0, 0.0, 2.0, 3.0)
    for found in (book.history("chat", 60_000.0), DemandCache(store).history("chat", 60_000.0)):
        assert found is not None
        assert found.ready is not None
        assert (found.first, found.end) == (990, 993)
        assert (list(found.requests), list(found.within_slo), list(found.ready)) == (
            [5, 6, 7],
            [3, 4, 5],
            [3] * 3,
        )


def test_what_came_while_no_controller_ran_is_read_from_the_agent(store: Store) -> None:
    DemandCache(store).take("chat", [told(990, 5)], 60_000.0)
    book = DemandCache(store)
    book.take("chat", [told(985, *range(10))], 60_000.0)
    assert requests(book) == [5.0, 6.0, 7.0, 8.0, 9.0]


def test_what_no_agent_knows_is_missing_and_not_zero(store: Store) -> None:
    book = DemandCache(store)
    book.take("chat", [told(990, 5)], 60_000.0)
    book.take("chat", [told(993, 8)], 60_000.0)
    found = requests(book)
    assert (found[0], found[3]) == (5.0, 8.0)
    assert all(math.isnan(value) for value in found[1:3])


def test_a_minute_waits_for_all_agents_and_is_their_sum(store: Store) -> None:
    book = DemandCache(store)
    assert not book.take("chat", [told(997, 5), None], 60.0 * 999)
    assert book.take("chat", [told(997, 5, 5), told(997, 2)], 60.0 * 999)
    assert requests(book) == [7.0]
    assert book.take("chat", [told(997, 5, 5), told(997, 2, 0)], 60.0 * 999)
    assert requests(book) == [7.0, 5.0]


def test_a_silent_agent_hides_no_rise_and_fakes_no_fall(store: Store) -> None:
    book = DemandCache(store)
    book.take("chat", [told(990, 10), told(990, 10)], 60.0 * 991)
    assert not book.take("chat", [told(990, 10, 12), None], 60.0 * 998)
    assert book.take("chat", [told(990, 10, 40), None], 60.0 * 998)
    assert requests(book) == [20.0, 40.0]


def test_a_new_agent_adds_nothing_to_the_minutes_before_it(store: Store) -> None:
    book = DemandCache(store)
    book.take("chat", [told(990, 5, 5, 5), told(992, 3)], 60.0 * 993)
    assert requests(book) == [5.0, 5.0, 8.0]


def test_a_clock_that_was_set_back_takes_back_the_minutes_that_are_to_come(store: Store) -> None:
    book = DemandCache(store)
    book.take("chat", [told(990, *[5] * 10)], 60.0 * 1000)
    book.take("chat", [told(990, *[5] * 10)], 60.0 * 995)
    assert [row.minute for row in store.demand("chat")] == list(range(990, 995))
    book.take("chat", [told(994, 5, 9)], 60.0 * 996)
    assert requests(book, 60.0 * 996) == [5.0] * 5 + [9.0]


def test_a_history_is_two_weeks_long_and_keeps_its_end(store: Store) -> None:
    book = DemandCache(store)
    now = 60.0 * (KEPT_MIN + 500)
    book.take("chat", [told(0, *range(KEPT_MIN + 500))], now)
    found = book.history("chat", now)
    assert found is not None
    assert (found.first, found.end, len(found.requests)) == (500, KEPT_MIN + 500, KEPT_MIN)
    again = DemandCache(store).history("chat", now)
    assert again is not None
    assert list(again.requests) == list(found.requests)


def test_tokens_are_in_the_history_of_this_and_of_the_next_process(store: Store) -> None:
    book = DemandCache(store)
    report = Demand(0.0, 990, (5, 6), (500, 700), (50, 60), (0, 0), (1, 1))
    assert book.take("chat", [report, report], 60_000.0)
    for found in (book.history("chat", 60_000.0), DemandCache(store).history("chat", 60_000.0)):
        assert found is not None
        assert found.prompt is not None
        assert found.response is not None
        assert (list(found.prompt), list(found.response)) == ([1000.0, 1400.0], [100.0, 120.0])
