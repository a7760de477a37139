"""What requests share: who is blamed and counted, what may be tried again, and what wakes the queue."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lb.config.options import Limits, Pushing, PushMode
from lb.config.options import Retries as Rules
from lb.config.regions import PeerAgent, Regions
from lb.config.schema import Table, Target
from lb.core.admission import EngineLoad
from lb.core.api_keys import Admission
from lb.core.failures import Failure
from lb.core.forwarding import Forwarding
from lb.core.hop import RequestHop
from lb.core.peers import RegionReport
from lb.core.retry import RetryHistory, RetryVerdict, Tries
from lb.core.sliding_window import WindowCounter
from lb.core.targets import Health, TargetTable
from lb.core.warming import PromptSamples
from lb.engines.kinds import EngineKind, Fetched, common_kind
from lb.http.api_paths import CHAT
from lb.http.request_head import read_request
from lb.proxy.account import Account
from lb.proxy.dispatch import Dispatch, Retries
from lb.proxy.ending import ChargeReason, Ending, Outcome, TokensSpent
from lb.proxy.registry import RequestRegistry, Waiting
from lb.proxy.runtime import Runtime
from lb.proxy.warmer import Warmer
from lb.stream.token_usage import Tokens
from policies.routing.base import RequestView
from tests.kit.lb_parts import GET, Plane

HOP = RequestHop(0.5, 7.0, 1.0, "team", frozenset(), None)._replace(peer="p")
PEER = PeerAgent("p", "cloud/p", "https://p.test", "p")


class Waits:
    """A request without a first byte, as far as the registry asks it."""

    def __init__(self, until: float = 0.0) -> None:
        self.booking = None
        self._until = until

    def waits_until(self) -> float:
        return self._until


def with_peer(table: TargetTable) -> Forwarding:
    return Forwarding(table, Regions("me", "here", peers=(PEER,)), 0.0)


# --- dispatch


def test_a_failing_target_is_ejected_and_the_queue_is_looked_at_again() -> None:
    plane = Plane("a", "b")
    booking = plane.fill("a")
    plane.registry.waiting[cast(Waiting, Waits())] = None
    plane.dispatch.failed(booking, Failure.UNREACHABLE, "refused", 0.0)
    assert plane.table.health(booking.key, 0.0) is Health.EJECTED
    counts = plane.account.counts_of(booking)
    assert (counts.failures, counts.ejections) == ({"unreachable": 1}, 1)
    assert plane.loop.turn() == 1  # what waits in vain is called back
    assert plane.loop.turn() == 0


def test_a_target_that_responds_again_is_readmitted() -> None:
    plane = Plane("a", "b")
    booking = plane.fill("a")
    plane.dispatch.failed(booking, Failure.UNREACHABLE, "refused", 0.0)
    plane.loop.settle()
    plane.dispatch.responded(booking, 1.0, True)
    assert plane.table.health(booking.key, 1.0) is Health.GOOD
    assert plane.loop.turn() == 1


def test_trouble_of_this_host_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    plane = Plane("a")
    for now in (0.0, 5.0, 9.9, 10.0):
        plane.dispatch.local_trouble("no ports", now)
    assert len(caplog.records) == 2
    assert plane.counts.local_failures == 4


def test_the_kind_of_an_engine_is_known_by_target_and_by_booking() -> None:
    plane = Plane("a", kind=EngineKind.VLLM, forwarding=with_peer)
    assert plane.dispatch.kind_of_id("a") is EngineKind.VLLM
    assert plane.dispatch.kind_of_id("none") is EngineKind.UNKNOWN
    assert plane.dispatch.kind_of_booking(plane.fill("a")) is EngineKind.VLLM


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ((), EngineKind.UNKNOWN),
        (("vllm", "", "vllm"), EngineKind.VLLM),
        (("vllm", "sglang"), EngineKind.UNKNOWN),
        (("of tomorrow",), EngineKind.UNKNOWN),
    ],
)
def test_a_kind_is_common_if_all_that_are_known_are_it(names: tuple[str, ...], kind: EngineKind) -> None:
    assert common_kind(names) is kind


def test_a_request_of_a_peer_waits_only_where_it_starts_soon() -> None:
    plane = Plane("a", forwarding=with_peer, pushing=Pushing(PushMode.FIXED_CAP, 1))
    waiter = cast(Any, SimpleNamespace(view=RequestView("x", "GET", "/"), tried=()))
    assert plane.dispatch.may_wait(waiter, HOP, 0.0)
    plane.table.apply(Table("service", "2"), 1.0)
    policy_cares = plane.dispatch.may_wait(waiter, HOP, 1.0)
    assert plane.metrics.peers.of("p").refusals == (not policy_cares)


# --- the registry


def test_who_waits_is_overdue_at_its_time_and_not_before() -> None:
    plane = Plane("a")
    registry = RequestRegistry(plane.table, None, plane.runtime)
    first, second = cast(Waiting, Waits(5.0)), cast(Waiting, Waits(8.0))
    registry.wait(second, 8.0)
    registry.wait(first, 5.0)
    assert registry.overdue(4.9) == []
    assert registry.overdue(5.0) == [first]
    del registry.waiting[first]
    assert registry.overdue(7.9) == []
    assert registry.overdue(8.0) == [second]
    del registry.waiting[second]
    assert registry.overdue(1e9) == []


def test_the_queue_is_let_in_once_in_a_turn() -> None:
    plane = Plane("a")
    plane.registry.let_in_soon()
    plane.registry.let_in_soon()
    plane.registry.changed_soon()
    plane.registry.changed_soon()
    assert plane.loop.turn() == 2
    plane.registry.let_in_soon()
    assert plane.loop.turn() == 1


def test_a_change_lets_the_queue_in() -> None:
    plane = Plane("a", pushing=Pushing(PushMode.FIXED_CAP, 1))
    other = plane.fill("a")
    request = plane.request()
    request.place()
    assert plane.registry.queued == 1
    plane.table.release(other, 0.0)
    plane.stock.fill(plane.table.table.targets)
    plane.registry.changed()
    plane.loop.settle()
    assert plane.registry.queued == 0
    assert list(plane.registry.explanations()) == [request.arrival.explanation]


def test_credit_of_a_peer_is_used_once_in_a_turn_and_only_by_a_queue() -> None:
    plane = Plane("a", pushing=Pushing(PushMode.FIXED_CAP, 1), forwarding=with_peer)
    plane.registry.credit_came()
    assert plane.loop.turn() == 0
    plane.fill("a")
    plane.request().place()
    plane.loop.settle()
    plane.registry.credit_came()
    plane.registry.credit_came()
    assert plane.loop.turn() == 1


def test_a_request_is_forwarded_to_a_peer_with_room_and_comes_back() -> None:
    plane = Plane(forwarding=with_peer)
    forwarding = plane.forwarding
    assert forwarding is not None
    forwarding.receive_report("p", RegionReport(1, 1, 0, 0.0, 0.0, 0.0), 0.01, 0.5, 0.0)
    plane.stock.fill(forwarding.peer_table.table.targets)
    request = plane.request()
    request.place()
    plane.loop.settle()
    assert request.booking is not None
    assert forwarding.owns(request.booking)
    assert plane.registry.table_of(request.booking) is forwarding.peer_table
    assert b"x-skyserve-hop: " in plane.stock.sent("p").lower()
    assert plane.metrics.peers.of("p").forwards == {"arrival": 1}
    full = b'{"error":{"code":"region_full"}}'
    plane.answer("p", b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n%b" % (len(full), full))
    assert plane.metrics.peers.of("p").returned == 1
    assert plane.registry.queued == 1  # at its old place
    assert request.placing.has_priority
    assert forwarding.peer_table.in_flight == 0


# --- the account


def ended(plane: Plane, outcome: Outcome, *, status: int = 200, error: str = "", **more: Any) -> Account:
    ending = Ending()
    ending.error, ending.bytes_out = error, 5
    request = SimpleNamespace(
        arrival=plane.arrival(GET, **more), ending=ending, relay=None, status=status, attempts=1
    )
    spent = TokensSpent(3, 4, ChargeReason.REPORTED)
    plane.account.ended(cast(Any, request), outcome, spent, plane.loop.now)
    return plane.account


@pytest.mark.parametrize(
    ("outcome", "gone", "cut"),
    [
        (Outcome.WHOLE, 0, 0),
        (Outcome.REFUSED, 0, 0),
        (Outcome.ERROR_EVENT, 0, 1),
        (Outcome.CUT, 0, 1),
        (Outcome.CLIENT_GONE, 1, 0),
    ],
)
def test_each_end_is_counted_as_what_it_is(outcome: Outcome, gone: int, cut: int) -> None:
    plane = Plane("a")
    ended(plane, outcome, error="why")
    counts = plane.counts
    assert (counts.client_gone, counts.cut, counts.errors) == (gone, cut, {"why": 1})
    assert (counts.tokens_in, counts.tokens_out, counts.bytes_out) == (3, 4, 5)
    assert plane.records[0].tokens_out == 4


def test_what_a_peer_forwarded_is_no_demand_here() -> None:
    plane = Plane("a")
    ended(plane, Outcome.WHOLE, hop=HOP, admission=Admission.of_peer(HOP))
    assert plane.metrics.peers.of("p").sent_bytes == 5
    assert plane.account.usage.take() == []


def test_a_tenant_sees_why_it_was_refused() -> None:
    plane = Plane("a")
    admission = Admission(None, ())
    admission.tenant = "team"
    ended(plane, Outcome.REFUSED, status=429, error="queue_full", admission=admission)
    assert plane.metrics.of_key("team").refusals == {"queue_full": 1}
    assert [used[:3] for used in plane.account.usage.take()] == [("team", "", 1)]


def test_a_request_is_settled_once() -> None:
    account = Plane("a").account
    admission = Admission(None, ())
    account.abandoned(admission, 0.0)
    account.abandoned(admission, 0.0)
    assert admission.settled


REPORT = b'{"text":"hello","usage":{"prompt_tokens":11,"completion_tokens":13}}'
WITHOUT = b'{"text":"' + b"y" * 389 + b'"}'  # 400 bytes


def relay_of(tokens: Tokens | None, generated: int = 0) -> Any:
    return SimpleNamespace(tokens=lambda: tokens, generated=lambda: generated)


@pytest.mark.parametrize(
    ("path", "status", "sent", "relay", "body", "spent"),
    [
        # what the engine reports
        (CHAT, 200, True, None, REPORT, (11, 13, "reported")),
        (CHAT, 200, True, relay_of(Tokens(11, 13), 9), None, (11, 13, "reported")),
        (b"/own", 200, True, None, REPORT, (11, 13, "reported")),
        # what it does not
        (CHAT, 200, True, relay_of(None, 7), None, (25, 7, "counted")),
        (CHAT, 200, True, None, WITHOUT, (25, 100, "counted")),
        (b"/v1/embeddings", 200, True, None, WITHOUT, (25, 0, "counted")),
        (b"/tokenize", 200, True, None, WITHOUT, (0, 0, "no_tokens")),
        (b"/own", 200, True, None, WITHOUT, (0, 0, "no_tokens")),
        # what was not served
        (CHAT, 500, True, None, REPORT, (0, 0, "refused")),
        (CHAT, 404, True, None, WITHOUT, (0, 0, "refused")),
        (CHAT, 503, False, None, None, (0, 0, "refused")),
        # what the client did not wait for
        (CHAT, 0, False, None, None, (0, 0, "not_sent")),
        (CHAT, 0, True, None, None, (25, 0, "estimated")),
        (b"/own", 0, True, None, None, (0, 0, "no_tokens")),
    ],
)
def test_what_a_request_has_cost(
    path: bytes, status: int, sent: bool, relay: Any, body: bytes | None, spent: tuple[int, int, str]
) -> None:
    plane = Plane("a")
    view = plane.arrival().view
    view.prompt = b"x" * 100
    ending = Ending()
    ending.sent_at = plane.loop.now if sent else None
    head = read_request(b"POST %b HTTP/1.1\r\nHost: x\r\n\r\n" % path, 10)
    arrival = plane.arrival(view=view)
    arrival.head = head
    request = SimpleNamespace(arrival=arrival, relay=relay, status=status, ending=ending)
    found = plane.account.spent(cast(Any, request), body, plane.loop.now + 1.0)
    assert (found.prompt, found.out, found.reason.value) == spent


def _tokens(plane: Plane, request: Any, after_s: float) -> tuple[int, int]:
    spent = plane.account.spent(request, None, plane.loop.now + after_s)
    return spent.prompt, spent.out


def test_a_response_that_nobody_waited_for_costs_what_its_engine_has_made_by_its_pace() -> None:
    plane = Plane("a")
    admission = Admission(None, ())
    admission.prompt_tokens, admission.reserved, admission.most_out = 10, 10 + 300, 500
    head = read_request(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n", 10)
    arrival = plane.arrival(admission=admission)
    arrival.head = head
    ending = Ending()
    ending.sent_at = plane.loop.now
    left = cast(Any, SimpleNamespace(arrival=arrival, relay=None, status=0, ending=ending))
    assert _tokens(plane, left, 1.0) == (10, 300)  # all of it, for all we know
    done = cast(Any, SimpleNamespace(arrival=arrival, relay=None, status=200, ending=ending))
    usage = b'{"usage":{"prompt_tokens":10,"completion_tokens":200}}'
    plane.account.spent(done, usage, plane.loop.now + 2.0)  # a token every 10 ms
    assert _tokens(plane, left, 1.0) == (10, 100)
    assert _tokens(plane, left, 9.0) == (10, 500)
    left.relay, left.status = relay_of(None), 200  # it has got the beginning of a long one
    assert _tokens(plane, left, 1.0) == (10, 100)


# --- retries


def history(**more: Any) -> RetryHistory:
    return RetryHistory(**{"started": 2, "on_target": 1, "reached": True, "longest_s": 0.1, **more})


def retries(rules: Rules) -> Retries:
    table = Plane("a", "b", retries=rules).table
    return Retries(table, WindowCounter(), random.Random(1), lambda key: None)


def test_a_body_that_is_gone_is_not_sent_again() -> None:
    some = retries(Rules())
    assert some.verdict(history(), (), True, 0.0) is RetryVerdict.ELSEWHERE
    assert some.verdict(history(), (), False, 0.0) is RetryVerdict.NOT_REPEATABLE


def test_the_budget_is_for_what_has_cost_an_engine_something() -> None:
    some = retries(Rules(budget_ratio=0.0, budget_floor_per_s=0.0))
    assert some.verdict(history(), (), True, 0.0) is RetryVerdict.OVER_BUDGET
    assert some.refused == 1
    assert some.verdict(history(reached=False), (), True, 0.0) is RetryVerdict.ELSEWHERE
    assert some.verdict(history(started=1, died=True), (), True, 0.0) is RetryVerdict.ELSEWHERE


def test_a_target_that_is_tried_again_is_no_longer_barred() -> None:
    tries = Tries(True, 10.0, 10.0)
    tries.begin(7)
    some = retries(Rules(jitter=0.0, backoff_s=0.5))
    assert some.delay_s(RetryVerdict.ELSEWHERE, tries, 7) == 0.0
    assert tries.epochs == (7,)
    tries.executions = 2
    assert some.delay_s(RetryVerdict.SAME_TARGET, tries, 7) == 0.5
    assert tries.epochs == ()
    tries.epochs = (6, 7, 7)
    tries.resume(60.0, 60.0)
    tries.begin(7)
    some.delay_s(RetryVerdict.SAME_TARGET, tries, 7)
    assert tries.epochs == ()  # for the rest of a stream all targets may be tried again


# --- the warmer


async def _post(target: Target, path: str, body: bytes, timeout_s: float) -> Fetched:
    raise OSError


def test_a_replica_that_joins_alone_is_not_warmed() -> None:
    plane = Plane("a")
    warmer = Warmer(plane.dispatch, PromptSamples(plane.table.table), plane.metrics, _post, lambda: False)
    before = plane.table.table
    changes = plane.table.apply(Table("service", "2", (*before.targets, Target("b", "http://b.test"))), 1.0)
    warmer.applied(before, changes)
    assert list(plane.table.warming) == []
    warmer.close()


def test_the_runtime_says_whether_the_agent_is_leaving() -> None:
    plane = Plane("a", limits=Limits())
    assert isinstance(plane.dispatch, Dispatch)
    runtime = Runtime(cast(Any, plane.loop), plane.loop.time, 100)
    assert (runtime.buffers.limit, runtime.closing, runtime.draining) == (100, False, False)
    runtime.close()
    assert runtime.closing
    assert EngineLoad is not None
