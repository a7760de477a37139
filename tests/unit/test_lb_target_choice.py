"""The choice over the facts of a table, as truth tables: it decides, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from benchmarks.table_audit import audit
from lb.config.options import Pushing, PushMode
from lb.config.schema import Readiness, Table, Target
from lb.core.admission import EngineLoad
from lb.core.target_choice import choose, choose_only, ready, takes_another, waits
from lb.core.targets import Blame, TargetTable
from policies.routing.base import Choice, RequestView, RoutingPolicy, TargetView
from policies.routing.registry import make_policy

REQUEST = RequestView("r", "POST", "/")


class Patient:
    """Chooses the first target it is offered, and waits for it. `keen`: what can be sent although the gate is shut.

    Not derived from `Policy`: a class of Python cannot inherit from one that is compiled.
    """

    name = "patient"
    needs_prompt = False
    waits = True
    keen = False
    keeping = False

    def __init__(self, wait: bool = True) -> None:
        self.wait = wait
        self.offered: list[list[str]] = []

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        self.offered.append([view.id for view in targets])
        return Choice(targets[0].id, "the first", wait=self.wait)

    def ready(self, target: TargetView, now: float, urgent: bool = False) -> bool:
        return self.keen or urgent

    def keeps_room(self, now: float) -> bool:
        return self.keeping

    def _nothing(self, *arguments: Any) -> None: ...

    queued = dequeued = record = responded = ended = cached = forget = _nothing

    def gauges(self) -> Mapping[str, float]:
        return {}


def facts(
    mode: PushMode, policy: Patient, *full: str, unhealthy: Sequence[str] = (), names: str = "ab"
) -> TargetTable:
    """A table of targets with room for one request each, which those in `full` have."""

    def make(name: str) -> RoutingPolicy:
        return cast(RoutingPolicy, policy) if name == "patient" else make_policy(name)

    targets = tuple(
        Target(name, f"http://{name}:1", state=Readiness.UNHEALTHY if name in unhealthy else Readiness.READY)
        for name in names
    )
    it = TargetTable(Table("s", "1", targets, "patient", pushing=Pushing(mode, 1)), 0.0, make)
    for name in full:
        if mode is PushMode.WORK:
            (key,) = (key for key, _, _ in it.probe_list() if key.id == name)
            it.loaded(key, EngineLoad(5, 0, max_running=6), 0.0, 0.0)
        it.book(REQUEST, name, 0.0)
    return it


@pytest.mark.parametrize(
    ("mode", "full", "wait", "offered", "expected"),
    [
        pytest.param(PushMode.WORK, "", True, "ab", ("a", False), id="there is room: no wait"),
        pytest.param(
            PushMode.WORK, "a", True, "ab", ("a", True), id="the full one is offered, and waited for"
        ),
        pytest.param(
            PushMode.WORK, "a", False, "ab", ("a", False), id="the policy sends although it is full"
        ),
        pytest.param(PushMode.WORK, "ab", True, "ab", ("a", True), id="all are full: waits for one"),
        pytest.param(PushMode.FIXED_CAP, "", True, "ab", ("a", False), id="a fixed cap: no wait"),
        pytest.param(
            PushMode.FIXED_CAP, "a", True, "b", ("b", False), id="a fixed cap: full ones not offered"
        ),
        pytest.param(PushMode.FIXED_CAP, "ab", True, None, None, id="a fixed cap: none has room"),
    ],
)
def test_who_is_offered_and_whether_the_request_waits(
    mode: PushMode, full: str, wait: bool, offered: str | None, expected: tuple[str, bool] | None
) -> None:
    policy = Patient(wait)
    choice = choose(facts(mode, policy, *full), REQUEST, 0.0)
    assert (None if choice is None else (choice.target_id, choice.wait)) == expected
    assert policy.offered == ([] if offered is None else [list(offered)])


def test_a_target_whose_epoch_is_excluded_is_not_offered() -> None:
    policy = Patient()
    it = facts(PushMode.WORK, policy)
    booking = it.book(REQUEST, "a", 0.0)
    it.release(booking, 0.0)
    choice = choose(it, REQUEST, 0.0, {booking.epoch})
    assert choice is not None
    assert choice.target_id == "b"
    assert policy.offered == [["b"]]


def test_another_policy_decides_for_the_request_that_names_it() -> None:
    policy = Patient()
    it = facts(PushMode.WORK, policy)
    choice = choose(it, REQUEST, 0.0, policy="least_load")
    assert choice is not None
    assert choice.because != "the first"
    assert policy.offered == []


def test_a_choice_changes_nothing() -> None:
    it = facts(PushMode.WORK, Patient(), "a")
    before = it.version(0.0), it.in_flight, it.stats(0.0, 1.0)
    for _ in range(3):
        choose(it, REQUEST, 0.0)
    assert (it.version(0.0), it.in_flight, it.stats(0.0, 1.0)) == before
    assert audit(it) == []


@pytest.mark.parametrize(
    ("mode", "policy", "expected"),
    [
        (PushMode.WORK, None, True),
        (PushMode.WORK, "round_robin", False),
        (PushMode.FIXED_CAP, None, False),
    ],
    ids=["by work, a policy that waits", "by work, one that does not", "a fixed cap"],
)
def test_who_waits(mode: PushMode, policy: str | None, expected: bool) -> None:
    assert waits(facts(mode, Patient()), policy) is expected


@pytest.mark.parametrize(
    ("mode", "full", "keen", "policy", "expected"),
    [
        pytest.param(PushMode.WORK, "", False, None, True, id="room"),
        pytest.param(PushMode.WORK, "a", False, None, False, id="full"),
        pytest.param(PushMode.WORK, "a", True, None, True, id="full, and the policy sends"),
        pytest.param(PushMode.WORK, "a", True, "round_robin", False, id="full, and another policy decides"),
        pytest.param(PushMode.FIXED_CAP, "a", True, None, False, id="a fixed cap is a fixed cap"),
    ],
)
def test_who_is_ready(mode: PushMode, full: str, keen: bool, policy: str | None, expected: bool) -> None:
    patient = Patient()
    patient.keen = keen
    assert ready(facts(mode, patient, *full), "a", 0.0, policy) is expected


def test_where_room_is_kept_the_policy_decides_although_there_is_some() -> None:
    patient = Patient()
    patient.keeping = True
    it = facts(PushMode.WORK, patient)
    assert not ready(it, "a", 0.0)
    assert ready(it, "a", 0.0, urgent=True)
    choice = choose(it, REQUEST, 0.0)
    assert choice is not None
    assert choice.wait


def test_a_target_that_has_left_is_not_ready_and_not_chosen() -> None:
    it = facts(PushMode.WORK, Patient())
    assert not ready(it, "gone", 0.0)
    assert choose_only(it, REQUEST, "gone", 0.0) is None


def test_the_choice_of_one_target_is_offered_that_one() -> None:
    policy = Patient()
    choice = choose_only(facts(PushMode.WORK, policy, "b"), REQUEST, "b", 0.0)
    assert choice is not None
    assert choice.target_id == "b"
    assert policy.offered == [["b"]]


@pytest.mark.parametrize(
    ("more", "over", "fails", "expected"),
    [
        pytest.param(0, False, False, False, id="in its only place"),
        pytest.param(0, True, False, True, id="over: its place is free"),
        pytest.param(1, True, False, False, id="over, and another one has come"),
        pytest.param(0, True, True, False, id="over, and the target is ejected"),
    ],
)
def test_whether_a_target_takes_another(more: int, over: bool, fails: bool, expected: bool) -> None:
    it = facts(PushMode.FIXED_CAP, Patient())
    booking = it.book(REQUEST, "a", 0.0)
    for _ in range(more):
        it.book(REQUEST, "a", 0.0)
    if fails:
        assert it.failed(booking, Blame.EJECT, 0.0)
    assert takes_another(it, booking, 0.0, over) is expected


def test_failures_fade_before_a_policy_sees_them() -> None:
    policy = Patient()
    it = facts(PushMode.FIXED_CAP, policy, names="a")
    booking = it.book(REQUEST, "a", 0.0)
    it.failed(booking, Blame.TROUBLE, 0.0)
    it.release(booking, 0.0)
    entry = it.entry("a")
    assert entry is not None
    assert entry.view.trouble == 1.0
    choose(it, REQUEST, 10.0)
    assert entry.view.trouble == 0.5
