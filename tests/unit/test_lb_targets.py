"""The target table in virtual time: standing, ejection, generations, and books that always balance."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lb.targets import (
    FIRST_EJECTION_S,
    LONGEST_EJECTION_S,
    Blame,
    Booking,
    BookingError,
    Outlook,
    Standing,
    TargetTable,
)
from lb.wire import Table, Target, TargetState
from policies.routing.base import RequestView
from policies.routing.registry import UnknownPolicyError

REQUEST = RequestView("r", "POST", "/")


def target(name: str, state: TargetState = TargetState.READY, port: int = 1) -> Target:
    return Target(name, f"http://{name}:{port}", state=state)


def table(*targets: Target, policy: str = "least_load") -> Table:
    return Table("s", "1", targets, policy)


def of(*names: str) -> TargetTable:
    return TargetTable(table(*map(target, names)), 0.0)


def offered(it: TargetTable, now: float, exclude: set[int] = frozenset()) -> tuple[Standing, list[str]]:
    standing, views = it.candidates(now, exclude)
    return standing, sorted(view.id for view in views)


def fail(it: TargetTable, name: str, now: float) -> int:
    """A request on the target meets a refused connection; the life it met."""
    with it.book(REQUEST, name, now) as booking:
        it.failed(booking, Blame.EJECT, now)
    return booking.life


@pytest.mark.parametrize(
    ("states", "standing", "names"),
    [
        pytest.param("RRR", Standing.GOOD, "abc", id="all ready"),
        pytest.param("RUD", Standing.GOOD, "a", id="ready before the rest"),
        pytest.param("UUD", Standing.UNHEALTHY, "ab", id="unhealthy as a last resort"),
        pytest.param("DDD", Standing.CLOSED, "", id="draining never"),
    ],
)
def test_who_is_offered(states: str, standing: Standing, names: str) -> None:
    by_letter = {"R": TargetState.READY, "U": TargetState.UNHEALTHY, "D": TargetState.DRAINING}
    it = TargetTable(table(*(target(n, by_letter[s]) for n, s in zip("abc", states, strict=True))), 0.0)
    assert offered(it, 0.0) == (standing, list(names))


def test_ejected_before_unhealthy_as_last_resorts() -> None:
    it = TargetTable(table(target("a"), target("b", TargetState.UNHEALTHY)), 0.0)
    fail(it, "a", 0.0)
    assert offered(it, 0.5) == (Standing.EJECTED, ["a"])


def test_ejection_backs_off_exponentially_to_a_bound_and_ends_with_an_answer() -> None:
    it = of("a", "b")
    now = 0.0
    expected_s = FIRST_EJECTION_S
    for _ in range(9):
        fail(it, "a", now)
        assert offered(it, now + expected_s - 0.01) == (Standing.GOOD, ["b"])
        now += expected_s
        assert offered(it, now) == (Standing.GOOD, ["a", "b"])
        expected_s = min(2 * expected_s, LONGEST_EJECTION_S)
    with it.book(REQUEST, "a", now) as trial:
        assert it.answered(trial, now)
    fail(it, "a", now)
    assert offered(it, now + FIRST_EJECTION_S) == (Standing.GOOD, ["a", "b"])  # it began anew


def test_a_trial_is_one_request() -> None:
    it = of("a", "b")
    fail(it, "a", 0.0)
    trial = it.book(REQUEST, "a", 1.0)
    assert offered(it, 1.0) == (Standing.GOOD, ["b"])
    it.release(trial)  # the client left: nothing was learnt, the next one is the trial
    assert offered(it, 1.0) == (Standing.GOOD, ["a", "b"])


def test_a_burst_of_failures_is_one_failure() -> None:
    it = of("a", "b")
    bookings = [it.book(REQUEST, "a", 0.0) for _ in range(20)]
    assert [it.failed(booking, Blame.EJECT, 0.0) for booking in bookings] == [True] + [False] * 19
    for booking in bookings:
        it.release(booking)
    assert offered(it, FIRST_EJECTION_S) == (Standing.GOOD, ["a", "b"])


@pytest.mark.parametrize("blame", [Blame.NONE, Blame.TROUBLE])
def test_only_connection_failures_eject(blame: Blame) -> None:
    it = of("a", "b")
    with it.book(REQUEST, "a", 0.0) as booking:
        assert not it.failed(booking, blame, 0.0)
    assert offered(it, 0.0) == (Standing.GOOD, ["a", "b"])
    assert it.stats(0.0, 60)[0].errors == (0 if blame is Blame.NONE else 1)


def test_trouble_makes_a_target_less_attractive_and_fades() -> None:
    it = of("a", "b")
    with it.book(REQUEST, "a", 0.0) as booking:
        it.failed(booking, Blame.TROUBLE, 0.0)
    trouble = {view.id: view.trouble for view in it.candidates(0.0)[1]}
    later = {view.id: view.trouble for view in it.candidates(20.0)[1]}
    assert (trouble["a"], later["a"], trouble["b"]) == (1.0, 0.25, 0.0)


def test_a_request_never_meets_again_what_failed_it_unless_it_proved_itself() -> None:
    it = of("a")
    tried = {fail(it, "a", 0.0)}
    assert offered(it, 0.5, tried) == (Standing.CLOSED, [])
    assert offered(it, 5.0, tried) == (Standing.CLOSED, [])  # time alone is no proof
    with it.book(REQUEST, "a", 5.0) as other:
        it.answered(other, 5.0)
    assert offered(it, 5.0, tried) == (Standing.GOOD, ["a"])


def test_a_probe_that_is_answered_lets_failed_requests_try_again_but_keeps_the_ejection() -> None:
    it = of("a", "b")
    tried = {fail(it, "a", 0.0)}
    ((key, _, left_s),) = it.ejected(0.25)
    assert left_s == FIRST_EJECTION_S - 0.25
    assert it.renew(key)
    assert offered(it, 0.5, tried) == (Standing.GOOD, ["b"])
    assert offered(it, 1.0, tried) == (Standing.GOOD, ["a", "b"])


def test_a_target_that_returns_is_another_generation() -> None:
    it = of("a", "b")
    old = it.book(REQUEST, "a", 0.0)
    assert it.apply(table(target("b")), 1.0).removed == ("a",)
    assert it.outlook(old, 1.0) is Outlook.LOST
    it.apply(table(target("a"), target("b")), 2.0)
    it.failed(old, Blame.EJECT, 3.0)  # late news about the old one
    assert offered(it, 3.0) == (Standing.GOOD, ["a", "b"])
    new = it.book(REQUEST, "a", 3.0)
    assert {one.id: one.in_flight for one in it.stats(3.0, 60)} == {"a": 2, "b": 0}
    it.release(old)
    it.release(new)
    assert it.audit() == []


def test_a_target_at_another_address_is_another_generation() -> None:
    it = of("a")
    old = it.book(REQUEST, "a", 0.0)
    changes = it.apply(table(target("a", port=2)), 1.0)
    assert (changes.added, changes.removed, changes.lost) == (("a",), ("a",), frozenset({old.key}))
    it.release(old)
    assert it.audit() == []


def test_stats_remember_a_removed_target_until_it_is_idle() -> None:
    it = of("a")
    booking = it.book(REQUEST, "a", 0.0)
    it.apply(table(), 1.0)
    assert [(one.id, one.in_flight) for one in it.stats(1.0, 60)] == [("a", 1)]
    it.release(booking)
    assert it.stats(1.0, 60) == ()


@pytest.mark.parametrize(
    ("before", "after", "outlook"),
    [
        pytest.param(TargetState.READY, TargetState.READY, Outlook.FINE, id="unchanged"),
        pytest.param(TargetState.READY, TargetState.UNHEALTHY, Outlook.DOUBTFUL, id="marked unhealthy"),
        pytest.param(TargetState.READY, TargetState.DRAINING, Outlook.FINE, id="drains"),
        pytest.param(TargetState.READY, None, Outlook.LOST, id="removed"),
        pytest.param(TargetState.DRAINING, None, Outlook.FINE, id="removed after draining"),
    ],
)
def test_the_outlook_of_a_waiting_attempt(
    before: TargetState, after: TargetState | None, outlook: Outlook
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


def test_silence_is_suspicious_only_while_an_answer_is_owed() -> None:
    it = of("a", "b")
    assert it.suspects(100.0, 2.0) == []
    booking = it.book(REQUEST, "a", 100.0)
    assert it.suspects(102.0, 2.0) == []
    assert [key.id for key, _ in it.suspects(102.1, 2.0)] == ["a"]
    it.heard(booking.key, 102.1)  # a byte for somebody else will do
    assert it.suspects(104.0, 2.0) == []
    assert [key.id for key, _ in it.suspects(104.2, 2.0)] == ["a"]
    it.answered(booking, 104.2)
    assert it.suspects(200.0, 2.0) == []


def test_a_booking_is_released_exactly_once() -> None:
    it = of("a")
    with it.book(REQUEST, "a", 0.0) as booking:
        pass
    with pytest.raises(BookingError):
        it.release(booking)
    assert it.audit() == []


def test_the_audit_finds_a_lost_count() -> None:
    it = of("a")
    booking = it.book(REQUEST, "a", 0.0)
    it._open.discard(booking)
    assert "1 in flight, 0 bookings" in it.audit()[0]


def test_a_push_may_change_the_policy_and_an_unknown_one_changes_nothing() -> None:
    it = of("a")
    it.apply(table(target("b"), policy="round_robin"), 0.0)
    choice = it.choose(REQUEST, 0.0)
    assert choice is not None
    assert choice.because == "used longest ago"
    with pytest.raises(UnknownPolicyError):
        it.apply(table(target("c"), policy="best"), 0.0)
    assert offered(it, 0.0) == (Standing.GOOD, ["b"])


def test_ready_again_after_unhealthy_is_a_new_life() -> None:
    it = of("a")
    tried = {fail(it, "a", 0.0)}
    it.apply(table(target("a", TargetState.UNHEALTHY)), 1.0)
    it.apply(table(target("a")), 5.0)
    assert offered(it, 5.0, tried) == (Standing.GOOD, ["a"])


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

    @rule(states=st.dictionaries(names, st.tuples(st.sampled_from(TargetState), st.integers(1, 2))))
    def push(self, states: dict[str, tuple[TargetState, int]]) -> None:
        wire = replace(self.wire, targets=tuple(target(n, s, p) for n, (s, p) in states.items()))
        self.it.apply(wire, self.now)
        again = self.it.apply(wire, self.now)
        assert again.added == again.removed == ()

    @rule()
    def begin(self) -> None:
        choice = self.it.choose(REQUEST, self.now, {booking.life for booking in self.open[-2:]})
        if choice is not None:
            booking = self.it.book(REQUEST, choice.target_id, self.now)
            assert booking.target.state is not TargetState.DRAINING
            assert booking.life not in {other.life for other in self.open[-2:]}
            self.open.append(booking)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.it.answered(data.draw(st.sampled_from(self.open)), self.now)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), blame=st.sampled_from(Blame))
    def end(self, data: st.DataObject, blame: Blame) -> None:
        booking = data.draw(st.sampled_from(self.open))
        self.open.remove(booking)
        self.it.failed(booking, blame, self.now)
        self.it.release(booking)

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
        assert self.it.audit() == []
        assert self.it.in_flight == len(self.open)
        stats = self.it.stats(self.now, 60)
        assert sum(one.in_flight for one in stats) == len(self.open)
        assert all(view.in_flight >= 0 for view in self.it.candidates(self.now)[1])

    def teardown(self) -> None:
        for booking in self.open:
            self.it.release(booking)
        assert self.it.audit() == []
        assert all(one.in_flight == 0 for one in self.it.stats(self.now, 60))


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
