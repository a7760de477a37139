"""The target table in virtual time: standing, ejection, generations, and books that always balance."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.table_audit import audit
from lb.config.options import Breaker, Pushing, PushMode
from lb.config.schema import Readiness, Table, Target
from lb.config.stats import TargetHealth
from lb.core.admission import EngineLoad
from lb.core.target_choice import choose
from lb.core.targets import (
    Blame,
    Booking,
    BookingError,
    Health,
    Outlook,
    TargetTable,
)
from policies.routing.base import Choice, RequestView, RoutingPolicy, TargetView
from policies.routing.registry import UnknownPolicyError, make_policy

REQUEST = RequestView("r", "POST", "/")
FIRST_EJECTION_S = Breaker().first_s
LONGEST_EJECTION_S = Breaker().longest_s


def target(name: str, state: Readiness = Readiness.READY, port: int = 1) -> Target:
    return Target(name, f"http://{name}:{port}", state=state)


def table(*targets: Target, policy: str = "least_load") -> Table:
    return Table("s", "1", targets, policy)


def of(*names: str) -> TargetTable:
    return TargetTable(table(*map(target, names)), 0.0)


def offered(it: TargetTable, now: float, exclude: set[int] = frozenset()) -> tuple[Health, list[str]]:
    standing, views = it.candidates(now, exclude)
    return standing, sorted(view.id for view in views)


def fail(it: TargetTable, name: str, now: float, blame: Blame = Blame.EJECT) -> int:
    """A request on the target fails, by default on a refused connection; the life it met."""
    booking = it.book(REQUEST, name, now)
    it.failed(booking, blame, now)
    it.release(booking, now)
    return booking.epoch


def serve(it: TargetTable, name: str, now: float) -> bool:
    """A request on the target succeeds; whether that ended an ejection."""
    booking = it.book(REQUEST, name, now)
    readmitted = it.responded(booking, now)
    it.release(booking, now)
    return readmitted


@pytest.mark.parametrize(
    ("states", "standing", "names"),
    [
        pytest.param("RRR", Health.GOOD, "abc", id="all ready"),
        pytest.param("RUD", Health.GOOD, "a", id="ready before the rest"),
        pytest.param("UUD", Health.UNHEALTHY, "ab", id="unhealthy as a last resort"),
        pytest.param("DDD", Health.CLOSED, "", id="draining never"),
    ],
)
def test_who_is_offered(states: str, standing: Health, names: str) -> None:
    by_letter = {"R": Readiness.READY, "U": Readiness.UNHEALTHY, "D": Readiness.DRAINING}
    it = TargetTable(table(*(target(n, by_letter[s]) for n, s in zip("abc", states, strict=True))), 0.0)
    assert offered(it, 0.0) == (standing, list(names))


def test_ejected_before_unhealthy_as_last_resorts() -> None:
    it = TargetTable(table(target("a"), target("b", Readiness.UNHEALTHY)), 0.0)
    fail(it, "a", 0.0)
    assert offered(it, 0.5) == (Health.EJECTED, ["a"])


def test_ejection_backs_off_exponentially_to_a_bound_and_ends_with_an_answer() -> None:
    it = of("a", "b")
    now = 0.0
    expected_s = FIRST_EJECTION_S
    for _ in range(9):
        fail(it, "a", now)
        assert offered(it, now + expected_s - 0.01) == (Health.GOOD, ["b"])
        now += expected_s
        assert offered(it, now) == (Health.GOOD, ["a", "b"])
        expected_s = min(2 * expected_s, LONGEST_EJECTION_S)
    assert serve(it, "a", now)
    fail(it, "a", now)
    assert offered(it, now + FIRST_EJECTION_S) == (Health.GOOD, ["a", "b"])  # it began again


def test_a_trial_is_one_request() -> None:
    it = of("a", "b")
    fail(it, "a", 0.0)
    trial = it.book(REQUEST, "a", 1.0)
    assert offered(it, 1.0) == (Health.GOOD, ["b"])
    it.release(trial, 1.0)  # the client left: nothing was learnt, the next one is the trial
    assert offered(it, 1.0) == (Health.GOOD, ["a", "b"])


def test_a_burst_of_failures_is_one_failure() -> None:
    it = of("a", "b")
    bookings = [it.book(REQUEST, "a", 0.0) for _ in range(20)]
    assert [it.failed(booking, Blame.EJECT, 0.0) for booking in bookings] == [True] + [False] * 19
    for booking in bookings:
        it.release(booking, 0.0)
    assert offered(it, FIRST_EJECTION_S) == (Health.GOOD, ["a", "b"])


@pytest.mark.parametrize("blame", [Blame.NONE, Blame.TROUBLE])
def test_only_connection_failures_eject(blame: Blame) -> None:
    it = of("a", "b")
    booking = it.book(REQUEST, "a", 0.0)
    assert not it.failed(booking, blame, 0.0)
    it.release(booking, 0.0)
    assert offered(it, 0.0) == (Health.GOOD, ["a", "b"])
    assert it.stats(0.0, 60)[0].errors == (0 if blame is Blame.NONE else 1)


def test_trouble_makes_a_target_less_attractive_and_fades() -> None:
    it = of("a", "b")
    booking = it.book(REQUEST, "a", 0.0)
    it.failed(booking, Blame.TROUBLE, 0.0)
    it.release(booking, 0.0)
    trouble = {view.id: view.trouble for view in it.candidates(0.0)[1]}
    later = {view.id: view.trouble for view in it.candidates(20.0)[1]}
    assert (trouble["a"], later["a"], trouble["b"]) == (1.0, 0.25, 0.0)


def test_a_request_never_meets_again_what_failed_it_unless_it_proved_itself() -> None:
    it = of("a")
    tried = {fail(it, "a", 0.0)}
    assert offered(it, 0.5, tried) == (Health.CLOSED, [])
    assert offered(it, 5.0, tried) == (Health.CLOSED, [])  # time alone is no proof
    serve(it, "a", 5.0)
    assert offered(it, 5.0, tried) == (Health.GOOD, ["a"])


def test_a_probe_that_is_answered_lets_failed_requests_try_again_but_keeps_the_ejection() -> None:
    it = of("a", "b")
    tried = {fail(it, "a", 0.0)}
    ((key, _, left_s),) = it.ejected(0.25)
    assert left_s == FIRST_EJECTION_S - 0.25
    assert it.renew(key)
    assert offered(it, 0.5, tried) == (Health.GOOD, ["b"])
    assert offered(it, 1.0, tried) == (Health.GOOD, ["a", "b"])


def test_a_target_that_returns_is_another_generation() -> None:
    it = of("a", "b")
    old = it.book(REQUEST, "a", 0.0)
    assert it.apply(table(target("b")), 1.0).removed == ("a",)
    assert it.outlook(old, 1.0) is Outlook.LOST
    it.apply(table(target("a"), target("b")), 2.0)
    it.failed(old, Blame.EJECT, 3.0)  # late news about the old one
    assert offered(it, 3.0) == (Health.GOOD, ["a", "b"])
    new = it.book(REQUEST, "a", 3.0)
    assert {one.id: one.in_flight for one in it.stats(3.0, 60)} == {"a": 2, "b": 0}
    it.release(old, 3.0)
    it.release(new, 3.0)
    assert audit(it) == []


def test_a_target_at_another_address_is_another_generation() -> None:
    it = of("a")
    old = it.book(REQUEST, "a", 0.0)
    changes = it.apply(table(target("a", port=2)), 1.0)
    assert (changes.added, changes.removed, changes.lost) == (("a",), ("a",), frozenset({old.key}))
    it.release(old, 1.0)
    assert audit(it) == []


def test_stats_remember_a_removed_target_until_it_is_idle() -> None:
    it = of("a")
    booking = it.book(REQUEST, "a", 0.0)
    it.apply(table(), 1.0)
    assert [(one.id, one.in_flight) for one in it.stats(1.0, 60)] == [("a", 1)]
    it.release(booking, 1.0)
    assert it.stats(1.0, 60) == ()


@pytest.mark.parametrize(
    ("before", "after", "outlook"),
    [
        pytest.param(Readiness.READY, Readiness.READY, Outlook.FINE, id="unchanged"),
        pytest.param(Readiness.READY, Readiness.UNHEALTHY, Outlook.DOUBTFUL, id="marked unhealthy"),
        pytest.param(Readiness.READY, Readiness.DRAINING, Outlook.FINE, id="drains"),
        pytest.param(Readiness.READY, None, Outlook.LOST, id="removed"),
        pytest.param(Readiness.DRAINING, None, Outlook.FINE, id="removed after draining"),
    ],
)
def test_the_outlook_of_a_waiting_attempt(
    before: Readiness, after: Readiness | None, outlook: Outlook
) -> None:
    it = of("a")
    booking = it.book(REQUEST, "a", 0.0)
    it.apply(table(target("a", before)), 1.0)
    it.apply(table(target("a", after)) if after else table(), 2.0)
    assert it.outlook(booking, 2.0) is outlook


def test_the_trial_itself_is_not_called_back() -> None:
    it = of("a", "b")
    fail(it, "a", 0.0)
    trial = it.book(REQUEST, "a", 1.0)
    assert it.outlook(trial, 1.0) is Outlook.FINE
    it.eject(trial.key, 2.0)
    assert it.outlook(trial, 2.0) is Outlook.DOUBTFUL


@pytest.mark.parametrize(
    ("blame", "outlook"),
    [
        pytest.param(Blame.DIED, Outlook.FINE, id="another request died on it"),
        pytest.param(Blame.EJECT, Outlook.DOUBTFUL, id="it cannot be reached"),
    ],
)
def test_what_an_ejection_means_for_who_waits(blame: Blame, outlook: Outlook) -> None:
    it = of("a", "b")
    waiting = it.book(REQUEST, "a", 0.0)
    fail(it, "a", 0.5, blame)
    assert it.health(waiting.key, 0.6) is Health.EJECTED
    assert it.outlook(waiting, 0.6) is outlook


def test_a_sign_of_life_ends_the_doubt_and_not_the_ejection() -> None:
    it = of("a", "b")
    waiting = it.book(REQUEST, "a", 0.0)
    it.eject(waiting.key, 0.5)
    assert it.outlook(waiting, 0.6) is Outlook.DOUBTFUL
    assert it.renew(waiting.key)
    assert it.outlook(waiting, 0.7) is Outlook.FINE
    assert it.health(waiting.key, 0.7) is Health.EJECTED


def test_a_silent_stream_is_better_off_elsewhere_if_its_target_is_gone_and_not_if_it_is_only_unwell() -> None:
    it = of("a", "b")
    there, gone = it.book(REQUEST, "a", 0.0), it.book(REQUEST, "b", 0.0)
    assert not it.missing(there, 0.5)
    it.apply(table(target("a", state=Readiness.UNHEALTHY)), 0.5)
    assert it.outlook(there, 0.6) is Outlook.DOUBTFUL
    assert not it.missing(there, 0.6)
    assert it.missing(gone, 0.6)
    it.eject(there.key, 0.7)
    assert it.missing(there, 0.8)
    assert it.renew(there.key)
    assert not it.missing(there, 0.9)


def test_silence_is_suspicious_only_while_an_answer_is_owed() -> None:
    it = of("a", "b")
    assert it.suspects(100.0, 2.0) == []
    booking = it.book(REQUEST, "a", 100.0)
    assert it.suspects(102.0, 2.0) == []
    assert [key.id for key, _ in it.suspects(102.1, 2.0)] == ["a"]
    it.received_from(booking.key, 102.1)  # a byte for someone else will do
    assert it.suspects(104.0, 2.0) == []
    assert [key.id for key, _ in it.suspects(104.2, 2.0)] == ["a"]
    it.responded(booking, 104.2)
    assert it.suspects(106.0, 2.0) == []
    assert [key.id for key, _ in it.suspects(106.3, 2.0)] == ["a"]  # the rest of its response
    it.release(booking, 200.0)
    assert it.suspects(300.0, 2.0) == []


def test_only_a_response_that_succeeded_counts_as_served() -> None:
    it = of("a")

    def served_s(now: float) -> float | None:
        (one,) = it.stats(now, 60.0)
        return one.served_s

    booking = it.book(REQUEST, "a", 100.0)
    it.received_from(booking.key, 101.0)  # a sign of life when asked
    it.responded(booking, 102.0, status=404)
    it.release(booking, 103.0)
    assert served_s(103.0) is None
    booking = it.book(REQUEST, "a", 104.0)
    it.responded(booking, 105.0, status=200)
    it.release(booking, 106.0)
    fail(it, "a", 107.0)
    assert served_s(108.0) == 3.0


def test_a_row_of_errors_lasts_until_a_client_gets_another_response() -> None:
    it = of("a")

    def health(now: float) -> TargetHealth | None:
        (one,) = it.stats(now, 60.0)
        return one.health

    def gets(status: int, now: float) -> None:
        booking = it.book(REQUEST, "a", now)
        it.responded(booking, now, status)
        it.release(booking, now)

    assert health(99.0) is None
    waits = it.book(REQUEST, "a", 99.0)
    assert health(99.5) == TargetHealth()
    it.release(waits, 99.5)
    gets(404, 100.0)
    assert health(103.0) == TargetHealth(worked_s=3.0)
    gets(500, 104.0)
    gets(503, 105.0)
    booking = it.book(REQUEST, "a", 106.0)
    it.refused(booking, 106.0)  # another target has the request
    it.failed(booking, Blame.TROUBLE, 106.0)
    it.release(booking, 106.0)
    assert health(110.0) == TargetHealth(worked_s=10.0, errors=3, first_error_s=6.0, last_error_s=4.0)
    gets(501, 111.0)  # it does not support that, and says so
    assert health(111.0) == TargetHealth(worked_s=0.0)
    gets(500, 112.0)
    it.received_from(booking.key, 113.0)  # a health check
    assert health(113.0) == TargetHealth(worked_s=2.0, errors=1, first_error_s=1.0, last_error_s=1.0)
    it.received_from(booking.key, 114.0, worked=True)  # a byte of a stream
    assert health(114.0) == TargetHealth(worked_s=0.0)


def test_what_an_engine_reports_of_its_load_is_passed_on() -> None:
    it = of("a")
    key = it.key("a")
    assert key is not None
    it.loaded(key, EngineLoad(running=3, pending=2, kv_usage=0.75), 1.0, 1.0)
    (one,) = it.stats(1.0, 60.0)
    assert one.health == TargetHealth(running=5, queued=2, kv_usage=0.75)
    it.loaded(key, None, 2.0, 2.0)
    assert it.stats(2.0, 60.0)[0].health is None


def test_a_loaded_target_has_what_others_have_no_room_for() -> None:
    it = of("a", "b")
    table = it.table
    first, second = table.targets
    it.apply(replace(table, targets=(replace(first, state=Readiness.LOADED), second)), 1.0)
    assert [view.id for view in it.offers(1.0)] == ["b"]
    it.apply(
        replace(
            table,
            targets=(replace(first, state=Readiness.LOADED), replace(second, state=Readiness.UNHEALTHY)),
        ),
        2.0,
    )
    assert [view.id for view in it.offers(2.0)] == ["a"]
    both = tuple(replace(one, state=Readiness.LOADED) for one in table.targets)
    it.apply(replace(table, targets=both), 3.0)
    assert [view.id for view in it.offers(3.0)] == ["a", "b"]
    assert audit(it) == []


def test_a_booking_is_released_exactly_once() -> None:
    it = of("a")
    booking = it.book(REQUEST, "a", 0.0)
    it.release(booking, 0.0)
    with pytest.raises(BookingError):
        it.release(booking, 0.0)
    assert audit(it) == []


def test_news_of_an_attempt_that_is_over_change_no_count() -> None:
    it = of("a")
    booking = it.book(REQUEST, "a", 0.0)
    it.release(booking, 0.0)
    assert not it.responded(booking, 0.0)
    assert audit(it) == []
    assert seen(it, "a", 0.0).waiting == 0


def test_the_audit_finds_a_lost_count() -> None:
    it = of("a")
    booking = it.book(REQUEST, "a", 0.0)
    it._open.discard(booking)
    assert "1 in flight, 0 bookings" in audit(it)[0]


def test_a_push_may_change_the_policy_and_an_unknown_one_changes_nothing() -> None:
    it = of("a")
    it.apply(table(target("b"), policy="round_robin"), 0.0)
    choice = choose(it, REQUEST, 0.0)
    assert choice is not None
    assert choice.because == "used longest ago"
    with pytest.raises(UnknownPolicyError):
        it.apply(table(target("c"), policy="best"), 0.0)
    assert offered(it, 0.0) == (Health.GOOD, ["b"])


def test_ready_again_after_unhealthy_is_a_new_life() -> None:
    it = of("a")
    tried = {fail(it, "a", 0.0)}
    it.apply(table(target("a", Readiness.UNHEALTHY)), 1.0)
    it.apply(table(target("a")), 5.0)
    assert offered(it, 5.0, tried) == (Health.GOOD, ["a"])


@pytest.mark.parametrize(
    ("breaker", "blames", "ejected"),
    [
        pytest.param(Breaker(), "E", True, id="one that cannot be reached"),
        pytest.param(Breaker(failures=3), "EE", False, id="two of three failures"),
        pytest.param(Breaker(failures=3), "EEE", True, id="three of three"),
        pytest.param(Breaker(failures=3), "EE.E", False, id="an answer between them"),
        pytest.param(Breaker(failures=3), "EETE", False, id="an error between them: it can be reached"),
        pytest.param(Breaker(errors_in_row=3), "TT", False, id="two of three errors"),
        pytest.param(Breaker(errors_in_row=3), "TTT", True, id="three of three errors"),
        pytest.param(Breaker(errors_in_row=3), "TT.T", False, id="a good answer between them"),
        pytest.param(Breaker(errors_in_row=3), "TTNT", True, id="an attempt that says nothing between them"),
        pytest.param(Breaker(errors_in_row=1), "N", False, id="no blame"),
    ],
)
def test_when_the_breaker_opens(breaker: Breaker, blames: str, ejected: bool) -> None:
    """E: cannot be reached or crashes. T: server error. N: no blame, no response. '.': a good response."""
    it = TargetTable(replace(table(target("a"), target("b")), breaker=breaker), 0.0)
    for letter in blames:
        if letter == ".":
            serve(it, "a", 0.0)
        else:
            fail(it, "a", 0.0, {"E": Blame.EJECT, "T": Blame.TROUBLE, "N": Blame.NONE}[letter])
    assert (offered(it, 0.0)[1] == ["b"]) == ejected


def test_the_breaker_has_the_times_of_the_table() -> None:
    it = TargetTable(
        replace(table(target("a"), target("b")), breaker=Breaker(first_s=4.0, longest_s=5.0)), 0.0
    )
    fail(it, "a", 0.0)
    assert [left for _, _, left in it.ejected(0.0)] == [4.0]
    fail(it, "a", 4.0)
    assert [left for _, _, left in it.ejected(4.0)] == [5.0]


def test_a_trial_answered_with_a_server_error_is_a_failed_trial() -> None:
    it = of("a", "b")
    fail(it, "a", 0.0)
    fail(it, "a", 1.0, Blame.TROUBLE)
    assert [left for _, _, left in it.ejected(1.0)] == [2.0]


def test_a_target_that_dies_on_every_answer_is_left_out_longer_and_longer() -> None:
    it = of("a", "b")
    now, left_s = 0.0, []
    for _ in range(4):
        booking = it.book(REQUEST, "a", now)
        it.responded(booking, now)
        it.failed(booking, Blame.EJECT, now)
        it.release(booking, now)
        ((_, _, left),) = it.ejected(now)
        left_s.append(left)
        now += left
    assert left_s == [1.0, 2.0, 4.0, 8.0]


def drained(deadline_s: float | None, state: Readiness = Readiness.DRAINING) -> Table:
    return table(Target("a", "http://a:1", state=state, drain_deadline_s=deadline_s), target("b"))


def test_what_runs_on_a_draining_target_is_handed_over_before_its_deadline_once() -> None:
    it = of("a", "b")
    first, second = it.book(REQUEST, "a", 0.0), it.book(REQUEST, "a", 1.0)
    other = it.book(REQUEST, "b", 1.0)
    it.responded(first, 1.0)
    assert it.handovers(5.0, 5.0) == []
    it.apply(drained(30.0), 10.0)
    assert it.handovers(34.9, 5.0) == []
    assert it.handovers(35.0, 5.0) == [first, second]
    assert it.handovers(36.0, 5.0) == []
    for booking in (first, second, other):
        it.release(booking, 40.0)


@pytest.mark.parametrize(
    ("pushes", "due_at"),
    [
        pytest.param([(10.0, drained(30.0)), (20.0, drained(30.0))], 40.0, id="repeated: the first counts"),
        pytest.param(
            [(10.0, drained(30.0)), (20.0, drained(29.0))], 49.0, id="another deadline: the last counts"
        ),
        pytest.param([(10.0, drained(30.0)), (11.0, drained(2.0))], 13.0, id="a notice comes: sooner"),
        pytest.param([(10.0, drained(30.0)), (20.0, table(target("b")))], 40.0, id="it leaves the table"),
        pytest.param([(10.0, drained(None))], None, id="no deadline"),
        pytest.param(
            [(10.0, drained(30.0)), (20.0, drained(None, Readiness.READY))], None, id="stays after all"
        ),
        pytest.param([(10.0, drained(30.0, Readiness.READY))], None, id="a deadline without a drain"),
    ],
)
def test_when_a_drain_is_due(pushes: list[tuple[float, Table]], due_at: float | None) -> None:
    it = of("a", "b")
    booking = it.book(REQUEST, "a", 0.0)
    for at, wire in pushes:
        it.apply(wire, at)
    if due_at is None:
        assert it.handovers(1e6, 0.0) == []
    else:
        assert it.handovers(due_at - 0.01, 0.0) == []
        assert it.handovers(due_at, 0.0) == [booking]


def test_a_target_that_drains_again_hands_over_again() -> None:
    it = of("a", "b")
    booking = it.book(REQUEST, "a", 0.0)
    it.apply(drained(1.0), 0.0)
    assert it.handovers(1.0, 0.0) == [booking]
    it.apply(table(target("a"), target("b")), 2.0)
    it.apply(drained(1.0), 3.0)
    assert it.handovers(4.0, 0.0) == [booking]


# --- policies


class Diary:
    """A policy that writes down what it hears."""

    name: ClassVar[str] = "diary"
    needs_prompt: ClassVar[bool] = False
    waits: ClassVar[bool] = False

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        return Choice(targets[-1].id, "the last") if targets else None

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        self.heard.append(("record", request.id, target_id, now))

    def responded(self, request: RequestView, target_id: str, now: float) -> None:
        self.heard.append(("answered", request.id, target_id, now))

    def ended(self, request: RequestView, target_id: str, now: float, tokens: int | None) -> None:
        self.heard.append(("ended", request.id, target_id, now, tokens))

    def forget(self, target_id: str) -> None:
        self.heard.append(("forget", target_id))

    def ready(self, target: TargetView, now: float) -> bool:
        return True

    def queued(self, request: RequestView, choice: Choice, now: float) -> None: ...

    def dequeued(self, request: RequestView) -> None: ...

    def cached(self, request: RequestView, target_id: str, now: float) -> None: ...

    def gauges(self) -> Mapping[str, float]:
        return {}


def with_diaries() -> tuple[TargetTable, list[Diary]]:
    diaries: list[Diary] = []

    def make(name: str) -> RoutingPolicy:
        if name != Diary.name:
            return make_policy(name)
        diaries.append(Diary())
        return diaries[-1]

    return TargetTable(table(target("a"), target("b"), policy="diary"), 0.0, make), diaries


def request(name: str) -> RequestView:
    return RequestView(name, "POST", "/")


def test_the_policy_hears_of_every_attempt_from_its_beginning_to_its_end() -> None:
    it, (diary,) = with_diaries()
    booking = it.book(request("1"), "a", 1.0)
    it.responded(booking, 2.0)
    it.responded(booking, 2.5)  # the second byte
    it.release(booking, 3.0, 17)
    unanswered = it.book(request("2"), "b", 4.0)
    it.failed(unanswered, Blame.EJECT, 5.0)
    it.apply(table(target("a"), policy="diary"), 5.0)
    it.release(unanswered, 6.0)
    assert diary.heard == [
        ("record", "1", "a", 1.0),
        ("answered", "1", "a", 2.0),
        ("ended", "1", "a", 3.0, 17),
        ("record", "2", "b", 4.0),
        ("forget", "b"),
        ("ended", "2", "b", 6.0, None),
    ]


def test_a_policy_asked_for_by_name_decides_for_that_request_and_hears_of_all() -> None:
    it, diaries = with_diaries()
    it.apply(table(target("a"), target("b")), 0.0)  # least load from now on
    one = it.book(request("1"), "a", 1.0)
    it.responded(one, 1.5)
    two = it.book(request("2"), "b", 2.0)
    choice = choose(it, REQUEST, 3.0, policy="diary")
    assert choice is not None
    assert choice.because == "the last"
    it.release(two, 4.0)
    it.release(one, 5.0)
    assert diaries[1].heard == [
        ("record", "1", "a", 1.0),
        ("answered", "1", "a", 1.0),
        ("record", "2", "b", 2.0),
        ("ended", "2", "b", 4.0, None),
        ("ended", "1", "a", 5.0, None),
    ]
    own = choose(it, REQUEST, 6.0)
    assert own is not None
    assert own.because != "the last"
    assert len(diaries) == 2


def test_a_new_policy_hears_nothing_of_targets_that_have_left() -> None:
    it, diaries = with_diaries()
    it.apply(table(target("a"), target("b")), 0.0)
    it.book(request("1"), "a", 1.0)
    it.book(request("2"), "b", 2.0)
    it.apply(table(target("b")), 3.0)
    it.policies.named("diary")
    assert diaries[1].heard == [("record", "2", "b", 2.0)]


def test_a_policy_that_is_promoted_keeps_what_it_has_learnt() -> None:
    it, diaries = with_diaries()
    it.apply(table(target("a"), target("b")), 0.0)
    it.policies.named("diary")
    it.apply(table(target("a"), target("b"), policy="diary"), 1.0)
    assert len(diaries) == 2
    it.apply(table(target("a"), target("b"), policy="diary"), 2.0)
    assert len(diaries) == 2


def test_prompts_are_needed_if_any_policy_in_use_needs_them() -> None:
    it = of("a")
    assert not it.policies.needs_prompt
    it.policies.named("prefix_tree")
    assert it.policies.needs_prompt
    with pytest.raises(UnknownPolicyError):
        it.policies.named("best")


# --- admission


def tell(
    it: TargetTable, name: str, load: EngineLoad | None, polled_at: float, now: float | None = None
) -> bool:
    keys = {key.id: key for key, _, _ in it.probe_list()}
    return it.loaded(keys[name], load, polled_at, polled_at if now is None else now)


def seen(it: TargetTable, name: str, now: float) -> TargetView:
    return next(view for view in it.views(now) if view.id == name)


def test_a_target_without_room_is_not_offered_and_neither_is_a_worse_one() -> None:
    it = TargetTable(table(target("a"), target("b", Readiness.UNHEALTHY)), 0.0)
    tell(it, "a", EngineLoad(5, 0, max_running=6), 0.0)
    booking = it.book(REQUEST, "a", 0.0)
    assert offered(it, 0.0) == (Health.GOOD, [])
    assert choose(it, REQUEST, 0.0) is None
    assert (it.has_candidate(0.0), it.room(0.0)) == (True, True)
    assert offered(it, 0.0, {booking.epoch}) == (Health.UNHEALTHY, ["b"])
    assert it.has_candidate(0.0, {booking.epoch, booking.epoch + 1}) is False
    it.release(booking, 0.0)
    assert offered(it, 0.0) == (Health.GOOD, ["a"])


@pytest.mark.parametrize(
    ("loads", "opened"),
    [
        pytest.param([EngineLoad(1, 0)], [True], id="room"),
        pytest.param([EngineLoad(1, 1), EngineLoad(1, 0)], [False, True], id="none, then room"),
        pytest.param([EngineLoad(1, 0), EngineLoad(1, 0)], [True, False], id="room that was there before"),
        pytest.param([None], [True], id="tells nothing any more"),
    ],
)
def test_a_look_says_whether_it_has_made_room(loads: list[EngineLoad | None], opened: list[bool]) -> None:
    it = of("a")
    tell(it, "a", EngineLoad(0, 0, max_running=1), 0.0)
    it.book(REQUEST, "a", 0.05)
    assert [tell(it, "a", load, 0.1 * number) for number, load in enumerate(loads, 1)] == opened


def test_looks_that_are_out_of_order_too_late_or_of_another_generation_are_passed_over() -> None:
    it = of("a", "b")
    (old, _, _), _ = it.probe_list()
    tell(it, "a", EngineLoad(3, 0), 1.0)
    tell(it, "a", EngineLoad(9, 9), 0.9, 1.1)
    assert seen(it, "a", 1.1).running == 3
    tell(it, "a", EngineLoad(9, 9), 1.2, 2.2)
    assert seen(it, "a", 1.1).running == 3
    it.apply(table(target("a", port=2)), 1.3)
    assert not it.loaded(old, EngineLoad(9, 9), 1.4, 1.4)
    assert seen(it, "a", 1.4).running is None


def test_policies_see_the_engine_with_what_has_been_sent_since() -> None:
    it = of("a")
    tell(it, "a", EngineLoad(5, 2, 0.5), 0.0)
    accounts = []

    def note() -> None:
        view = seen(it, "a", 0.1)
        accounts.append((view.running, view.pending, view.in_flight, view.waiting))

    bookings = [it.book(REQUEST, "a", 0.1) for _ in range(3)]
    note()
    it.responded(bookings[0], 0.1)
    note()
    it.release(bookings[1], 0.1)  # its client has gone
    note()
    it.release(bookings[0], 0.1)
    note()
    assert accounts == [(5, 5, 3, 3), (6, 4, 2 + 1, 2), (6, 3, 2, 1), (5, 3, 1, 1)]
    assert seen(it, "a", 0.1).kv_usage == 0.5


def test_without_news_own_counts_decide() -> None:
    it = of("a")
    booking = it.book(REQUEST, "a", 0.0)
    tell(it, "a", EngineLoad(5, 5), 0.0)
    assert offered(it, 0.99) == (Health.GOOD, [])
    it.responded(booking, 0.99)
    assert offered(it, 1.0) == (Health.GOOD, ["a"])
    view = seen(it, "a", 1.0)
    assert (view.running, view.pending, view.kv_usage) == (None, None, None)
    for _ in range(2):  # the look has found so much pending that only two are trusted to it
        assert offered(it, 1.0) == (Health.GOOD, ["a"])
        it.book(REQUEST, "a", 1.0)
    assert offered(it, 1.0) == (Health.GOOD, [])


def test_an_old_look_is_forgotten_although_nothing_else_has_happened() -> None:
    it = of("a")
    assert choose(it, REQUEST, 0.0) is not None
    tell(it, "a", EngineLoad(5, 0, 0.5), 0.0)
    assert seen(it, "a", 0.99).running == 5
    assert seen(it, "a", 1.0).running is None


def test_another_way_of_pushing_holds_from_the_push_on() -> None:
    it = of("a")
    tell(it, "a", EngineLoad(5, 5), 0.0)
    it.book(REQUEST, "a", 0.0)
    assert offered(it, 0.0)[1] == []
    it.apply(replace(it.table, pushing=Pushing(PushMode.FIXED_CAP, 2)), 0.0)
    assert offered(it, 0.0)[1] == ["a"]
    it.book(REQUEST, "a", 0.0)
    assert offered(it, 0.0)[1] == []
    it.apply(replace(it.table, pushing=Pushing(PushMode.BLIND)), 0.0)
    assert offered(it, 0.0)[1] == ["a"]


class Books(RuleBasedStateMachine):
    """Any sequence of pushes, attempts, failures and probes leaves the books balanced, and every booking can be
    released, after which nothing is in flight."""

    names = st.sampled_from("abcd")

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.wire = table(target("a"), target("b"))
        self.it = TargetTable(self.wire, self.now)
        self.open: list[Booking] = []

    @rule(seconds=st.floats(0.0, 40.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(states=st.dictionaries(names, st.tuples(st.sampled_from(Readiness), st.integers(1, 2))))
    def push(self, states: dict[str, tuple[Readiness, int]]) -> None:
        targets = [target(n, s, p) for n, (s, p) in states.items()]
        wire = replace(self.wire, targets=tuple(replace(one, drain_deadline_s=20.0) for one in targets))
        self.it.apply(wire, self.now)
        again = self.it.apply(wire, self.now)
        assert again.added == again.removed == ()

    @rule()
    def hand_over(self) -> None:
        for booking in self.it.handovers(self.now, 5.0):
            assert booking in self.open
            assert booking.target.state is Readiness.DRAINING

    @rule()
    def begin(self) -> None:
        tried = {booking.epoch for booking in self.open[-2:]}
        choice = choose(self.it, REQUEST, self.now, tried)
        views = {view.id for view in self.it.candidates(self.now, tried)[1]}
        assert (choice.target_id in views) if choice is not None else not views
        if choice is not None:
            booking = self.it.book(REQUEST, choice.target_id, self.now)
            assert booking.target.state is not Readiness.DRAINING
            assert booking.epoch not in {other.epoch for other in self.open[-2:]}
            self.open.append(booking)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.it.responded(data.draw(st.sampled_from(self.open)), self.now)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), blame=st.sampled_from(Blame))
    def end(self, data: st.DataObject, blame: Blame) -> None:
        booking = data.draw(st.sampled_from(self.open))
        self.open.remove(booking)
        self.it.failed(booking, blame, self.now)
        self.it.release(booking, self.now)

    @rule(
        data=st.data(),
        load=st.none()
        | st.builds(
            EngineLoad, *[st.none() | st.integers(0, 9)] * 2, st.none(), st.none() | st.integers(1, 9)
        ),
        took_s=st.floats(0.0, 1.5),
    )
    def look(self, data: st.DataObject, load: EngineLoad | None, took_s: float) -> None:
        keys = [key for key, _, _ in self.it.probe_list()]
        if keys:
            key = data.draw(st.sampled_from(keys))
            opened = self.it.loaded(key, load, self.now - took_s, self.now)
            assert self.it.room(self.now) or not opened or self.it.health(key, self.now) is Health.CLOSED

    @rule(data=st.data(), warming=st.booleans())
    def warm(self, data: st.DataObject, warming: bool) -> None:
        keys = [key for key, _, _ in self.it.probe_list()]
        if keys:
            self.it.warm(data.draw(st.sampled_from(keys)), warming)

    @rule(mode=st.sampled_from(PushMode))
    def push_otherwise(self, mode: PushMode) -> None:
        self.wire = replace(self.wire, pushing=Pushing(mode, 2))
        self.it.apply(self.wire, self.now)

    @rule(policy=st.sampled_from(["round_robin", "least_load"]))
    def choose_otherwise(self, policy: str) -> None:
        self.wire = replace(self.wire, policy=policy)
        self.it.apply(self.wire, self.now)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), frozen=st.booleans())
    def probe(self, data: st.DataObject, frozen: bool) -> None:
        key = data.draw(st.sampled_from(self.open)).key
        if frozen:
            self.it.eject(key, self.now, 5.0)
        else:
            self.it.renew(key)

    @invariant()
    def balanced(self) -> None:
        assert audit(self.it) == []
        assert self.it.in_flight == len(self.open)
        stats = self.it.stats(self.now, 60)
        assert sum(one.in_flight for one in stats) == len(self.open)
        for view in self.it.views(self.now):
            assert 0 <= view.waiting <= view.in_flight
            assert view.pending is None or view.pending >= 0
            assert view.running is None or view.running >= 0
        self.agree(())
        self.agree(self.open[-2:])
        if not self.it.room(self.now):
            assert self.it.candidates(self.now)[1] == []
        # With nothing of ours in flight a target is always worth one.
        best, views = self.it.candidates(self.now)
        for target, standing, in_flight in self.rows():
            if standing is best and best is not Health.CLOSED and not in_flight:
                assert target.id in {view.id for view in views}

    def rows(self) -> list[tuple[Target, Health, int]]:
        """Those that are loaded are listed with those that are warming."""
        rows = self.it.rows(self.now)
        return [(one, Health.WARMING if health is Health.LOADED else health, n) for one, health, n in rows]

    def agree(self, tried: Sequence[Booking]) -> None:
        """The cached candidates equal those computed from all targets."""
        epochs = {booking.epoch for booking in tried}
        gone = {one.key.id for one in tried if one.epoch == one.entry.epoch and not one.entry.departed}
        rows = [row for row in self.rows() if row[0].id not in gone]
        best = next((one for one in Health if any(health is one for _, health, _ in rows)), Health.CLOSED)
        standing, views = self.it.candidates(self.now, epochs)
        assert standing is best
        assert self.it.has_candidate(self.now, epochs) == (best is not Health.CLOSED)
        assert self.it.admits(self.now, epochs) == bool(views)
        if not self.it.table.pushing.is_polled and best is not Health.CLOSED:
            cap = 2 if self.it.table.pushing.mode is PushMode.FIXED_CAP else sys.maxsize
            room = [(one.id, health) for one, health, in_flight in rows if in_flight < cap]
            expected = [name for name, health in room if health is best]
            if best is Health.GOOD and not expected:
                expected = [name for name, health in room if health is Health.WARMING]
            assert [view.id for view in views] == [views[at].id for at in range(len(views))] == expected

    def teardown(self) -> None:
        for booking in self.open:
            self.it.release(booking, self.now)
        assert audit(self.it) == []
        assert all(one.in_flight == 0 for one in self.it.stats(self.now, 60))


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_target_is_newly_busy_once_for_each_time_that_it_was_idle() -> None:
    it = of("a", "b")
    first, second = it.book(REQUEST, "a", 0.0), it.book(REQUEST, "a", 0.0)
    assert [key.id for key in it.newly_busy()] == ["a"]
    assert it.newly_busy() == []
    it.release(first, 1.0)
    it.book(REQUEST, "a", 1.0)
    assert it.newly_busy() == []  # it was busy all the time
    key = second.key
    assert it.is_busy(key)
    gone = it.book(REQUEST, "b", 2.0)
    it.apply(table(target("a")), 2.0)
    assert it.newly_busy() == []
    assert not it.is_busy(gone.key)


def test_policies_asked_for_by_name_are_dropped_when_no_request_asks_any_longer() -> None:
    table = TargetTable(Table("s", "r1", (Target("a", "http://h:1"),), policy="least_load"), 0.0)
    request = RequestView("1", "GET", "/", 0)
    assert not table.policies.needs_prompt
    choose(table, request, 10.0, policy="cache_aware")
    table.drop_unused_policies(300.0)
    assert table.policies.needs_prompt
    table.drop_unused_policies(310.0)
    assert not table.policies.needs_prompt
