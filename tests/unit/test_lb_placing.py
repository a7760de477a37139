"""Where a request goes, and when it stops trying: its placing alone, on a real table, with a double for the request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from lb.config.options import Continuation, Limits, Pushing, PushMode, Retries
from lb.config.schema import Table
from lb.core.api_keys import Admission
from lb.core.failures import Failure
from lb.core.hop import NO_REPORT, RequestHop
from lb.core.retry import Tries
from lb.core.targets import Booking, Health
from lb.http.api_paths import CHAT
from lb.http.messages import ResponseHead
from lb.proxy.ending import Ending
from lb.proxy.placing import PlacedRequest, Placing
from lb.proxy.registry import LET_IN_AT_ONCE
from lb.proxy.states import RequestEvent, State, move
from lb.stream.openai_request import read
from lb.stream.resume_rules import NotResumable
from lb.stream.resume_state import ResumeState
from lb.stream.transcript import StreamProgress
from tests.kit.lb_parts import Client, Plane

ONE_EACH = Pushing(PushMode.FIXED_CAP, 1)
HOP = RequestHop(0.5, 7.0, 1.0, "", frozenset(), None)


class Attempt:
    def __init__(self, booking: Booking, now: float) -> None:
        self.booking = booking
        self.since = now
        self.sent = True
        self.response = ResponseHead()
        self.calls: list[Any] = []

    def start(self, fresh: bool) -> None:
        self.calls.append(("start", fresh))

    def drop(self) -> None:
        self.calls.append("drop")


class Request:
    """A request that notes what its placing has it do."""

    def __init__(self, plane: Plane, *, repeatable: bool = True, body: bytes = b"", **more: Any) -> None:
        self.plane = plane
        self.arrival = plane.arrival(**more)
        self.client = Client()
        self.ending = Ending()
        self.state = State.CHOOSING
        self.attempt: Attempt | None = None
        self.attempts: list[Attempt] = []
        self.relay: Any = None
        self.resume_state: Any = None
        self.body = body
        self.out: list[Any] = []  # what the client got
        self.errors: list[Exception] = []
        self.elsewhere: list[bool] = []
        self.ends_stream = True
        self.room: list[str] = []
        limits = plane.limits
        tries = Tries(repeatable, limits.time_to_first_byte_s, limits.hold_s)
        self.placing = Placing(cast(PlacedRequest, self), plane.dispatch, plane.account, self.arrival, tries)

    @property
    def tries(self) -> Tries:
        return self.placing.tries

    @property
    def booking(self) -> Booking | None:
        return None if self.attempt is None else self.attempt.booking

    @property
    def where(self) -> str:
        """The target of the attempt; empty without one."""
        return "" if self.attempt is None else self.attempt.booking.key.id

    @property
    def code(self) -> tuple[int, str]:
        ((status, code),) = self.out
        return status, code

    @property
    def steps(self) -> list[str]:
        return [step["event"] for step in self.arrival.explanation.to_json()["steps"]]

    def move(self, event: RequestEvent) -> None:
        self.state = move(self.state, event)

    def begin_attempt(self, booking: Booking, now: float) -> Attempt:
        self.move(RequestEvent.CHOSEN)
        self.attempt = Attempt(booking, now)
        self.attempts.append(self.attempt)
        return self.attempt

    def drop_attempt(self, now: float) -> None:
        self.plane.registry.waiting.pop(self.placing, None)
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            self.plane.dispatch.release(attempt.booking, now)
            self.placing.released(attempt.booking)

    def respond(self, status: int, code: str, message: str) -> None:
        self._end((status, code))

    def send_whole(self, response: ResponseHead, body: bytes) -> None:
        self._end((response.status, body.decode()))

    def _end(self, what: Any) -> None:
        self.out.append(what)
        self.move(RequestEvent.ENDED)
        self.drop_attempt(self.plane.loop.now)

    def refuse_to_resume(self, error: NotResumable, *, elsewhere: bool) -> bool:
        self.elsewhere.append(elsewhere)
        return self.ends_stream

    def offer_room(self) -> None:
        self.room.append("offered")

    def keep_room(self) -> None:
        self.room.append("kept")

    def guarded(self, callback: Callable[[], None]) -> None:
        if self.state is not State.DONE:
            callback()

    def crashed(self, entrance: str, error: Exception) -> None:
        self.errors.append(error)


def response(status: int) -> ResponseHead:
    head = ResponseHead()
    head.status = status
    return head


def placed(plane: Plane, **more: Any) -> Request:
    request = Request(plane, **more)
    request.placing.place()
    return request


def test_a_request_goes_to_a_target_with_room() -> None:
    plane = Plane("a")
    request = placed(plane)
    assert (request.where, request.state, request.ending.last_target) == ("a", State.ATTEMPTING, "a")
    assert request.attempts[0].calls == [("start", False)]
    assert request.steps == ["chose"]
    assert list(plane.registry.waiting) == [request.placing]
    assert plane.counts.retries == 0
    assert plane.account.counts_of(request.attempts[0].booking).attempts == 1
    assert request.placing.waits_until() == plane.limits.time_to_first_byte_s


def test_what_may_not_run_twice_goes_on_a_new_connection() -> None:
    assert placed(Plane("a"), repeatable=False).attempts[0].calls == [("start", True)]


def test_a_prompt_counts_with_what_the_target_has_of_it() -> None:
    plane = Plane("a")
    view = plane.arrival().view
    view.prompt = b"tell me"
    placed(plane, view=view)
    assert (plane.counts.prompt_bytes, plane.counts.matched_bytes) == (7, 0)


def test_without_room_a_request_waits_and_goes_when_there_is() -> None:
    plane = Plane("a", pushing=ONE_EACH)
    other = plane.fill("a")
    request = placed(plane)
    assert (request.state, request.steps, plane.registry.queued) == (State.QUEUED, ["held"], 1)
    assert (plane.counts.queued_total, request.tries.was_queued) == (1, True)
    plane.loop.sleep(3)
    plane.dispatch.release(other, 3.0)
    plane.loop.settle()
    assert (request.where, request.steps) == ("a", ["held", "chose"])
    assert (request.ending.queued_s, request.tries.queue_left_s) == (3.0, plane.limits.hold_s - 3.0)
    assert sum(plane.counts.queue_wait.counts) == 1
    plane.registry.let_in()
    assert len(request.attempts) == 1


@pytest.mark.parametrize(
    ("act", "code"),
    [
        pytest.param(lambda one: one.expired(2.0), (503, "queue_timeout"), id="too late"),
        pytest.param(lambda one: one.evicted(2.0), (429, "queue_full"), id="pushed out"),
    ],
)
def test_a_request_that_leaves_the_queue_in_vain_is_turned_away(act: Any, code: tuple[int, str]) -> None:
    plane = Plane("a", pushing=ONE_EACH)
    plane.fill("a")
    request = placed(plane)
    plane.loop.sleep(2)
    plane.registry.queue.clear()
    act(request.placing)
    assert request.code == code
    assert request.ending.queued_s == 2.0
    assert plane.counts.rejected == 1
    assert plane.account.rejections.count(2.0, 10.0) == 1


def test_a_queued_body_can_be_refused_until_a_target_may_have_it() -> None:
    plane = Plane("a", pushing=ONE_EACH)
    other = plane.fill("a")
    request = placed(plane)
    assert request.room == ["offered"]
    plane.table.release(other, 0.0)
    plane.registry.let_in()
    assert request.room == ["offered", "kept"]
    request.placing.attempt_failed(Failure.DIED, "it died")
    plane.loop.settle()
    assert (request.state, request.tries.executions) == (State.QUEUED, 1)
    assert request.room == ["offered", "kept"]  # it may have run


def test_a_queued_request_that_loses_its_room_is_refused() -> None:
    plane = Plane("a", pushing=ONE_EACH)
    plane.fill("a")
    request = placed(plane)
    request.placing.room_lost()
    assert request.code == (503, "out_of_memory")
    assert plane.registry.queued == 0


@pytest.mark.parametrize(
    ("held", "queueing", "code"),
    [(0, True, "queue_timeout"), (1, True, "queue_full"), (1, False, "queue_timeout")],
    ids=["no places at all", "all places taken", "no longer queueing"],
)
def test_without_a_place_in_the_queue_a_request_is_turned_away_at_once(
    held: int, queueing: bool, code: str
) -> None:
    plane = Plane("a", pushing=ONE_EACH, limits=Limits(max_held=held))
    plane.fill("a")
    if held:
        assert placed(plane).state is State.QUEUED
    if not queueing:
        plane.registry.stop_queueing()
    assert placed(plane).out[0][1] == code


def test_without_any_target_the_client_is_told_so() -> None:
    plane = Plane(limits=Limits(hold_s=0.0))
    assert placed(plane).code == (503, "no_target_ready")


def test_a_residency_zone_without_a_replica_is_named() -> None:
    plane = Plane("a", limits=Limits(hold_s=0.0))
    request = placed(plane, zones=frozenset({"eu"}))
    assert request.code == (503, "residency")
    assert plane.counts.residency_denied == {"eu": 1}
    assert plane.counts.rejected == 1
    assert request.attempts == []


# --- before the first byte


def test_a_failed_request_goes_to_another_target_and_never_back() -> None:
    plane = Plane("a", "b")
    request = placed(plane)
    first = request.where
    request.placing.attempt_failed(Failure.DIED, "gone")
    assert request.where not in ("", first)
    assert request.steps == ["chose", "failed", "chose"]
    assert request.attempts[0].calls[-1] == "drop"
    assert plane.counts.retries == 1
    assert plane.account.counts_of(request.attempts[0].booking).failures == {"died": 1}
    assert request.tries.executions == 1
    assert plane.table.in_flight == 1


def test_a_target_that_could_not_be_reached_has_not_run_the_request() -> None:
    plane = Plane("a", "b")
    request = placed(plane)
    request.placing.attempt_failed(Failure.UNREACHABLE, "refused")
    assert request.tries.executions == 0
    assert request.tries.deaths == 0
    assert request.where


def test_the_time_to_first_byte_is_that_of_all_attempts() -> None:
    plane = Plane("a", "b", limits=Limits(time_to_first_byte_s=10))
    request = placed(plane)
    plane.loop.sleep(4)
    request.placing.attempt_failed(Failure.UNREACHABLE, "refused")
    assert request.placing.waits_until() == 10.0
    assert request.tries.wait_left_s == 6.0


def test_two_dead_targets_of_one_request_blame_the_request() -> None:
    plane = Plane("a", "b", "c", retries=Retries(max_total_retries=5, max_worker_retries=3))
    request = placed(plane)
    request.placing.attempt_failed(Failure.DIED, "gone")
    second = request.attempts[1].booking
    request.placing.attempt_failed(Failure.DIED, "gone")
    assert request.code == (502, "request_kills_engines")
    assert request.steps[-1] == "no_retry"
    assert plane.account.counts_of(second).failures == {"stale": 1}  # and not the second target as well
    assert plane.table.health(second.key, 0.0) is Health.GOOD


def test_a_stream_that_kills_its_targets_is_given_up() -> None:
    plane = Plane("a", "b", "c", retries=Retries(max_total_retries=5, max_worker_retries=3))
    request = placed(plane)
    request.relay = object()
    request.placing.attempt_failed(Failure.DIED, "gone")
    request.placing.attempt_failed(Failure.DIED, "gone")
    assert request.code == (502, "no_target_answered")


def test_a_retry_waits_when_it_is_not_the_first() -> None:
    plane = Plane("a", "b", "c", retries=Retries(backoff_s=0.8, jitter=0.0, max_total_retries=5))
    request = placed(plane)
    request.placing.attempt_failed(Failure.MALFORMED, "nonsense")
    assert request.where
    request.placing.attempt_failed(Failure.MALFORMED, "nonsense")
    assert (request.state, request.where) == (State.BACKING_OFF, "")
    plane.loop.sleep(0.7)
    assert request.state == State.BACKING_OFF
    plane.loop.sleep(0.2)
    assert (request.state, len(request.attempts)) == (State.ATTEMPTING, 3)


def test_a_malformed_response_of_the_only_target_is_the_end() -> None:
    request = placed(Plane("a"))
    request.placing.attempt_failed(Failure.MALFORMED, "nonsense")
    assert request.code == (502, "no_target_answered")


def test_what_may_not_be_repeated_is_not() -> None:
    plane = Plane("a", "b")
    request = placed(plane, repeatable=False)
    request.placing.attempt_failed(Failure.DIED, "gone")
    assert request.code == (502, "no_target_answered")
    assert len(request.attempts) == 1


def test_a_body_that_is_partly_gone_is_not_sent_again() -> None:
    plane = Plane("a", "b")
    request = placed(plane)
    request.tries.replayable = False
    request.placing.attempt_failed(Failure.UNREACHABLE, "refused")
    assert request.code == (502, "no_target_answered")


def test_a_stale_connection_is_replaced_once() -> None:
    plane = Plane("a")
    request = placed(plane)
    request.placing.attempt_failed(Failure.STALE, "closed")
    assert (request.where, request.attempts[1].calls) == ("a", [("start", True)])
    assert (request.tries.executions, request.tries.deaths, request.tries.stale) == (0, 0, True)
    request.placing.attempt_failed(Failure.STALE, "closed")
    assert request.tries.deaths == 1
    assert request.where == "" or request.attempts[-1].calls == [("start", False)]


def test_trouble_of_this_host_blames_no_target() -> None:
    plane = Plane("a")
    request = placed(plane)
    request.placing.attempt_failed(Failure.LOCAL, "no ports")
    assert request.code == (503, "out_of_resources")
    assert plane.counts.local_failures == 1
    key = plane.table.key("a")
    assert key is not None
    assert plane.table.health(key, 0.0) is Health.GOOD


def test_trouble_of_this_host_is_met_by_another_target_if_there_is_one() -> None:
    request = placed(Plane("a", "b"))
    request.placing.attempt_failed(Failure.LOCAL, "no ports")
    assert request.where


# --- whole responses


@pytest.mark.parametrize("status", [200, 400, 404, 500])
def test_a_response_is_the_clients(status: int) -> None:
    request = placed(Plane("a", "b"))
    assert not request.placing.goes_on(response(status), b"x")
    assert len(request.attempts) == 1


def test_a_refusal_is_kept_and_sent_if_no_target_has_better() -> None:
    plane = Plane("a", "b")
    request = placed(plane)
    assert request.placing.goes_on(response(503), b"first")
    assert request.where
    assert request.placing.goes_on(response(502), b"second")
    plane.loop.sleep(1)
    assert request.code == (502, "second")
    assert request.tries.executions == 2
    assert plane.table.in_flight == 0


def test_a_refusal_of_what_may_not_be_repeated_is_the_clients() -> None:
    request = placed(Plane("a", "b"), repeatable=False)
    assert not request.placing.goes_on(response(503), b"busy")


def test_a_refusal_is_forgotten_with_a_response() -> None:
    plane = Plane("a", "b", "c")
    request = placed(plane)
    assert request.placing.goes_on(response(503), b"busy")
    booking = request.booking
    assert booking is not None
    request.placing.responded(booking, 200, 1.0)
    request.placing.attempt_failed(Failure.DIED, "gone")
    while request.attempt is not None:
        request.placing.attempt_failed(Failure.MALFORMED, "nonsense")
        plane.loop.sleep(60)
    assert request.code != (503, "busy")


def test_a_404_for_a_model_that_another_target_serves_moves_the_request() -> None:
    plane = Plane("a", "b")
    body = b'{"error":{"message":"The model `m` does not exist.","code":"model_not_found"}}'
    request = placed(plane, model="m")
    first = request.attempts[0].booking
    request.placing.goes_on(response(404), body)
    assert plane.wrong == [first.key]


# --- the first byte


def test_a_first_byte_ends_the_wait() -> None:
    plane = Plane("a")
    request = placed(plane)
    booking = request.booking
    assert booking is not None
    request.tries.deaths = 1
    request.placing.responded(booking, 200, 2.0)
    assert not plane.registry.waiting
    assert (request.tries.executions, request.tries.deaths) == (1, 0)
    assert request.steps[-1] == "answered"
    assert sum(plane.account.counts_of(booking).ttfb.counts) == 1
    assert booking.responded


def test_a_first_byte_lets_the_queue_in() -> None:
    plane = Plane("a", pushing=ONE_EACH)
    first = placed(plane)
    second = placed(plane)
    assert second.state is State.QUEUED
    first.drop_attempt(1.0)
    plane.loop.settle()
    assert second.where == "a"


def test_a_stream_that_lost_its_target_waits_from_the_beginning() -> None:
    limits = Limits(time_to_first_byte_s=10, hold_s=5, idle_timeout_s=40)
    plane = Plane("a", "b", limits=limits)
    request = placed(plane)
    lost = request.booking
    assert lost is not None
    request.tries.executions = 3
    request.tries.wait_left_s = 1.0
    request.placing.responded(lost, 200, 1.0)
    request.move(RequestEvent.FIRST_BYTE)
    request.move(RequestEvent.BROKEN)
    request.placing.lost(lost, failed=True)
    assert request.tries.failed
    request.drop_attempt(1.0)
    request.placing.place_rest()
    assert request.where != lost.key.id
    assert (request.tries.executions, request.tries.wait_left_s, request.tries.queue_left_s) == (0, 10, 40)


def test_a_target_that_is_drained_is_not_to_blame() -> None:
    request = placed(Plane("a", "b"))
    booking = request.booking
    assert booking is not None
    request.placing.lost(booking, failed=False)
    assert not request.tries.failed
    assert booking.epoch in request.placing.tried


# --- waiting in vain


def test_a_request_is_called_back_from_a_target_that_is_gone() -> None:
    plane = Plane("a", "b")
    request = placed(plane)
    gone = request.where
    left = tuple(one for one in plane.table.table.targets if one.id != gone)
    plane.loop.now = 3.0
    plane.table.apply(Table("service", "2", left, policy="round_robin"), 3.0)
    plane.registry.changed()
    assert request.where not in ("", gone)
    assert request.steps == ["chose", "moved", "chose"]
    assert plane.counts.moves == 1
    assert request.tries.wait_left_s == plane.limits.time_to_first_byte_s - 3.0


def test_a_request_on_a_fine_target_stays() -> None:
    plane = Plane("a", "b")
    request = placed(plane)
    plane.registry.changed()
    assert len(request.attempts) == 1


@pytest.mark.parametrize(
    ("repeatable", "sent", "replayable", "moves"),
    [
        (True, True, True, True),
        (False, True, True, False),
        (False, False, True, True),
        (True, True, False, False),
    ],
)
def test_only_what_may_run_twice_is_called_back(
    repeatable: bool, sent: bool, replayable: bool, moves: bool
) -> None:
    request = placed(Plane("a", "b"), repeatable=repeatable)
    assert request.attempt is not None
    request.attempt.sent = sent
    request.tries.replayable = replayable
    request.placing.call_back("for a test")
    assert len(request.attempts) == 1 + moves


def test_a_doubtful_target_is_left_only_so_often() -> None:
    request = placed(Plane("a", "b", "c", "d"))
    request.placing.leave_doubtful(1)
    assert (len(request.attempts), request.tries.executions) == (2, 1)
    request.placing.leave_doubtful(1)
    assert (len(request.attempts), request.tries.executions) == (2, 1)


@pytest.mark.parametrize(("waited_s", "blamed"), [(10.0, True), (4.0, False)])
def test_a_target_is_to_blame_for_silence_if_it_had_its_share(waited_s: float, blamed: bool) -> None:
    plane = Plane("a", limits=Limits(time_to_first_byte_s=10))
    request = placed(plane)
    booking = request.booking
    assert booking is not None
    request.placing.out_of_time(waited_s)
    assert request.code == (504, "time_to_first_byte")
    assert plane.account.counts_of(booking).failures == ({"silent": 1} if blamed else {})


def test_without_an_attempt_no_time_runs_out() -> None:
    plane = Plane("a", pushing=ONE_EACH)
    plane.fill("a")
    request = placed(plane)
    assert request.placing.waits_until() == float("inf")
    request.placing.out_of_time(1e6)
    assert request.out == []


# --- streams between two targets


def test_what_is_sent_is_the_request_as_it_came() -> None:
    request = placed(Plane("a"), body=b"hello")
    assert request.placing.outgoing() == (b"/plain", b"hello")


def cannot_go_on() -> ResumeState:
    """Return the state of a stream that no engine continues: it is amid a tool call."""
    body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}'
    state = ResumeState(CHAT, read(body), body, Continuation())
    state.progress = StreamProgress(text="Hello", tool_call=True)
    return state


@pytest.mark.parametrize("ends", [True, False])
def test_a_target_that_cannot_go_on_is_left(ends: bool) -> None:
    plane = Plane("a", "b")
    request = placed(plane)
    request.resume_state, request.ends_stream = cannot_go_on(), ends
    assert request.placing.outgoing() is None
    assert request.elsewhere == [True]
    assert (len(request.attempts), plane.table.in_flight) == ((1, 0) if ends else (2, 1))


def test_one_that_comes_back_has_priority() -> None:
    request = placed(Plane("a"))
    assert not request.placing.has_priority
    request.relay = object()
    assert request.placing.has_priority
    request.relay = None
    request.tries.executions = 1
    assert request.placing.has_priority


# --- many at once


def test_the_queue_is_let_in_by_and_by() -> None:
    plane = Plane("a", pushing=Pushing(PushMode.FIXED_CAP, 100))
    blocked = [plane.fill("a") for _ in range(100)]
    requests = [placed(plane) for _ in range(LET_IN_AT_ONCE + 3)]
    for booking in blocked:
        plane.table.release(booking, 0.0)
    plane.registry.let_in_soon()
    plane.registry.let_in_soon()
    assert plane.loop.turn() == 1
    assert sum(one.where == "a" for one in requests) == LET_IN_AT_ONCE
    plane.loop.turn()
    assert all(one.where == "a" for one in requests)


def test_a_request_of_a_peer_is_refused_where_it_would_wait() -> None:
    admission = Admission.of_peer(HOP)
    plane = Plane("a", pushing=ONE_EACH)
    plane.fill("a")
    assert (
        placed(plane, hop=HOP, admission=admission).state is State.QUEUED
    )  # without peers there is no report
    assert NO_REPORT is not None
