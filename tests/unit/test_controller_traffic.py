"""What agents count becomes rows: once, whatever was restarted in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy.exc import OperationalError

from lb.config.decode import WireError
from lb.config.totals import Tally, Totals
from skyserve_cli.controller.api.series_view import MOST_POINTS, series_view, span_for
from skyserve_cli.controller.persistence.series_recorder import SeriesRecorder
from skyserve_cli.controller.reconcile.traffic_buffer import NEW_S, TrafficBuffer, increase
from skyserve_cli.state.database import Database
from skyserve_cli.state.samples import BOUNDS_S, WHOLE, Sample, Slot
from skyserve_cli.state.series import RINGS
from skyserve_cli.state.store import Store
from tests.kit.clock import SimClock

BUCKETS = len(BOUNDS_S) + 1


def tally(requests: int, in_flight: int = 0, errors: int = 0) -> Tally:
    ttft = (requests,) + (0,) * (BUCKETS - 1)
    return Tally(in_flight, 0, requests, errors, requests * 10, requests * 20, 100, 50, ttft)


def totals(uptime_s: float, requests: int, **targets: Tally) -> Totals:
    return Totals(
        uptime_s, BOUNDS_S, tally(requests), {name.strip("r"): each for name, each in targets.items()}
    )


def test_totals_come_back_from_json() -> None:
    sent = totals(0.5, 3, r1=tally(2), r2=tally(1))
    assert Totals.from_json(sent.to_json()) == sent


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param({"agent": [1, 2]}, "agent: expected a list of 9 values", id="too few numbers"),
        pytest.param({"agent": [-1, *[0] * 7, [0] * BUCKETS]}, "agent: expected counts", id="negative"),
        pytest.param({"bounds": [2.0, 1.0]}, "bounds: expected increasing numbers", id="bounds in disorder"),
        pytest.param({"targets": []}, "targets: expected at most 10000 targets by id", id="no object"),
        pytest.param({"bounds": [1.0]}, "message: expected one bucket more than bounds", id="buckets"),
        pytest.param({"more": 1}, "more: unknown key", id="unknown key"),
    ],
)
def test_what_is_no_totals_is_refused_with_its_path(change: dict[str, object], problem: str) -> None:
    with pytest.raises(WireError) as error:
        Totals.from_json({**totals(1.0, 1).to_json(), **change})
    assert problem.split(":")[0] in str(error.value)


@pytest.mark.parametrize(
    ("before", "after", "requests"),
    [
        pytest.param(totals(100, 7), totals(105, 9), 2, id="it goes on"),
        pytest.param(totals(100, 7), totals(3, 2), 2, id="it was restarted"),
        pytest.param(None, totals(NEW_S, 4), 4, id="it has just started"),
        pytest.param(None, totals(NEW_S + 1, 4), None, id="an earlier controller has stored its counts"),
    ],
)
def test_what_is_new(before: Totals | None, after: Totals, requests: int | None) -> None:
    found = increase(before, after)
    assert (None if found is None else found[WHOLE].requests) == requests


def test_a_replica_that_comes_later_is_new_and_one_with_less_has_lost_its_place() -> None:
    before = totals(100, 9, r1=tally(5), r3=tally(4))
    found = increase(before, totals(105, 12, r1=tally(6), r2=tally(2), r3=tally(1)))
    assert found is not None
    assert {key: each.requests for key, each in found.items()} == {WHOLE: 3, 1: 1, 2: 2, 3: 1}
    assert found[1].tokens_out == 20


def test_other_buckets_than_ours_are_left_out() -> None:
    odd = replace(totals(1.0, 3), bounds=(1.0,), agent=tally(3)._replace(ttft=(1, 2)))
    found = increase(None, odd)
    assert found is not None
    assert (found[WHOLE].requests, found[WHOLE].ttft) == (3, ())


def test_the_book_adds_polls_up_and_agents_beside_each_other() -> None:
    book = TrafficBuffer()
    for in_flight in (2, 4):
        book.add("chat", 0, {WHOLE: Sample(1, in_flight, 0, requests=1)})
    book.add("chat", 5, {WHOLE: Sample(1, 10, 0, requests=1), 7: Sample(1, 1, requests=1)})
    taken = book.take()["chat"]
    assert (taken[WHOLE].requests, taken[WHOLE].view()["in_flight"], taken[7].requests) == (3, 13.0, 1)
    assert book.take() == {}


class FailingStore:
    """Fails as often as it is configured to, then keeps what it gets."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.kept: dict[int, dict[str, Slot]] = {}

    def put_series(self, at: int, slots: dict[str, Slot]) -> None:
        if self.failures:
            self.failures -= 1
            raise OperationalError("INSERT", {}, Exception("database is locked"))
        self.kept[at] = slots


def test_a_slot_that_cannot_be_stored_is_stored_later() -> None:
    clock, book, store = SimClock(1_800_000_010.0), TrafficBuffer(), FailingStore(2)
    recorder = SeriesRecorder(store, book, clock)  # type: ignore[arg-type]
    for _ in range(3):
        book.add("chat", 0, {WHOLE: Sample(1, requests=1)})
        recorder.round()
        clock.advance(clock.now() + 10.0)
    assert sorted(store.kept) == [1_800_000_000, 1_800_000_010, 1_800_000_020]


def test_a_day_of_traffic_is_read_back() -> None:
    clock, book, store = SimClock(1_800_000_000.0), TrafficBuffer(), Store(Database("sqlite://"))
    recorder = SeriesRecorder(store, book, clock)
    for _ in range(60 * 6):
        clock.advance(clock.now() + 10.0)
        book.add("chat", 0, {WHOLE: Sample(1, 2, requests=3), 4: Sample(1, 1, requests=3)})
        recorder.round()
    since, until = 1_800_000_000.0, clock.now()
    assert span_for(since, until) == 10
    slots = store.series("chat", 60, since=since, until=until)
    view = series_view("chat", 4, 60, since, until, slots)
    assert (len(view["at"]), set(view["requests"]), set(view["in_flight"])) == (59, {18}, {1.0})
    assert view["replicas"]["4"]["requests"] == view["total"]["requests"] == 59 * 18


@pytest.mark.parametrize(
    ("length_s", "span_s"),
    [(60, 10), (2 * 3600, 10), (2 * 3600 + 1, 60), (25 * 3600, 60), (26 * 3600, 900), (90 * 86_400, 900)],
)
def test_the_slots_fit_the_time(length_s: float, span_s: int) -> None:
    now = 1_800_000_000.0
    assert span_for(now - length_s, now) == span_s
    assert span_s == RINGS[-1].span_s or length_s / span_s <= MOST_POINTS
