"""A request from its arrival to its one end, with all its parts, between wires and in virtual time."""

from __future__ import annotations

import gc
import json
from typing import Any, cast

import pytest

from lb.config.options import Continuation, Continue, Limits, Pushing, PushMode, Retries
from lb.config.schema import Table, Target
from lb.core.failures import Failure
from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT
from lb.http.error_responses import SERVER
from lb.http.write_batch import JOIN_BELOW_BYTES
from lb.proxy import attempt as attempts
from lb.proxy.attempt import Attempt
from lb.proxy.ending import Outcome
from lb.proxy.faults import Faults
from lb.proxy.placing import Placing
from lb.proxy.request import ProxiedRequest
from lb.proxy.responding import RETRY_AFTER_S, Responding
from lb.proxy.states import TABLE, RequestEvent, State, TransitionError, move
from lb.proxy.sweep import Sweep
from lb.proxy.tunnel import Tunnel
from lb.stream.openai_request import read
from lb.stream.resume_state import ResumeState
from tests.kit.lb_parts import GET, Client, Plane, StepLoop, Wire, steps

ONE_EACH = Pushing(PushMode.FIXED_CAP, 1)
POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"
WEBSOCKET = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
UPGRADED = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def whole(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n%b\r\n%b" % (status, len(body), more, body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return chunk(
        b"data: " + json.dumps({"id": "c", "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"
    )


def client_of(request: ProxiedRequest) -> Client:
    return cast(Client, request.client)


def status_of(request: ProxiedRequest) -> int:
    return int(client_of(request).wire.sent.split()[1])


def placed(plane: Plane, *arguments: Any, **more: Any) -> ProxiedRequest:
    request = plane.request(*arguments, **more)
    request.place()
    plane.loop.settle()
    return request


# --- whole responses


def test_a_response_reaches_the_client_and_all_is_given_back() -> None:
    plane = Plane("a")
    request = placed(plane, POST, b"hello")
    sent = plane.stock.sent("a")
    assert sent.startswith(b"POST /v1/embeddings HTTP/1.1\r\n")
    assert sent.endswith(b"\r\n\r\nhello")
    assert b"content-length: 5\r\n" in sent.lower()
    plane.loop.sleep(2)
    plane.answer("a", whole(b'{"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}'))
    client = client_of(request)
    assert client.wire.sent.startswith(b"HTTP/1.1 200 OK\r\n")
    assert client.events[-1] == "next"
    plane.check()
    (record,) = plane.records
    assert (record.status, record.target_id, record.attempts, record.duration_s) == (200, "a", 1, 2.0)
    assert (record.tokens_in, record.tokens_out, record.bytes_out) == (3, 4, 68)
    assert plane.counts.tokens_out == 4
    assert plane.account.ongoing.mean(2.0, 2.0) == 1.0
    assert plane.account.ongoing.mean(4.0, 2.0) == 0.0
    counts = plane.metrics.of(plane.table.table.targets[0])
    assert (counts.tokens_in, counts.tokens_out, sum(counts.duration.counts)) == (3, 4, 1)
    assert plane.stock.last("a").sink is None


@pytest.mark.parametrize("size", [JOIN_BELOW_BYTES - 1, JOIN_BELOW_BYTES, 3 * JOIN_BELOW_BYTES])
def test_a_response_of_any_size_is_whole(size: int) -> None:
    plane = Plane("a")
    request = placed(plane)
    plane.answer("a", whole(b"x" * size))
    assert client_of(request).wire.sent.endswith(b"\r\n\r\n" + b"x" * size)
    plane.check()


def test_a_response_in_pieces_is_sent_when_it_is_whole() -> None:
    plane = Plane("a")
    request = placed(plane)
    data = whole(b"hello", more=b"X-It: yes\r\n")
    for at in range(len(data)):
        assert client_of(request).wire.sent == b""
        plane.stock.last("a").data_received(data[at : at + 1])
    assert b"X-It: yes\r\n" in client_of(request).wire.sent
    assert client_of(request).wire.sent.endswith(b"hello")
    plane.check()


def test_a_json_response_in_chunks_is_sent_whole() -> None:
    plane = Plane("a")
    request = placed(plane)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    plane.answer("a", head + chunk(b"{"))
    assert client_of(request).wire.sent == b""
    plane.answer("a", chunk(b"}") + b"0\r\n\r\n")
    assert (
        client_of(request).wire.sent.endswith(b"Content-Length: 2\r\n\r\n{}")
        or b"\r\n\r\n{}" in client_of(request).wire.sent
    )
    plane.check()


def test_a_json_response_that_is_too_long_is_relayed_from_its_beginning() -> None:
    plane = Plane("a")
    request = placed(plane)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"x" * (attempts.WHOLE_UP_TO_BYTES // 2)
    for data in (head, chunk(piece), chunk(piece), chunk(b"yy"), b"0\r\n\r\n"):
        plane.answer("a", data)
    body = client_of(request).wire.sent.partition(b"\r\n\r\n")[2]
    assert body.count(b"x") == 2 * len(piece)
    assert body.endswith(b"0\r\n\r\n")
    plane.check()


def test_a_connection_is_used_again() -> None:
    plane = Plane("a")
    for _ in range(3):
        placed(plane)
        plane.answer("a", whole(b"x"))
    assert len(plane.stock.used["a"]) == 1
    placed(plane)
    plane.answer("a", whole(b"x", more=b"Connection: close\r\n"))
    assert plane.stock.last("a").transport.is_closing()


def test_bytes_behind_a_response_end_its_connection() -> None:
    plane = Plane("a")
    request = placed(plane)
    plane.answer("a", whole(b"x") + b"more")
    assert client_of(request).wire.sent.endswith(b"\r\n\r\nx")
    assert plane.stock.last("a").transport.is_closing()


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_a_response_without_a_body_has_none(status: bytes) -> None:
    plane = Plane("a")
    request = placed(plane)
    plane.answer("a", b"HTTP/1.1 %b\r\n\r\n" % status)
    assert client_of(request).wire.sent.startswith(b"HTTP/1.1 " + status)
    assert client_of(request).wire.sent.endswith(b"\r\n\r\n")
    plane.check()


def test_a_client_that_may_have_been_the_last_is_told_so() -> None:
    plane = Plane("a")
    request = placed(plane)
    plane.runtime.close()
    plane.answer("a", whole(b"x"))
    assert b"Connection: close\r\n" in client_of(request).wire.sent
    assert client_of(request).closing


def test_a_model_that_says_nothing_has_not_responded() -> None:
    plane = Plane("a", "b")
    request = placed(plane, POST, b"hello")
    first = next(iter(plane.stock.used))
    plane.answer(first, whole(b""))
    plane.loop.settle()
    assert len(plane.stock.used) == 2
    assert client_of(request).wire.sent == b""


# --- what goes wrong before the first byte


def test_a_dead_target_is_replaced() -> None:
    plane = Plane("a", "b")
    request = placed(plane)
    first = next(iter(plane.stock.used))
    plane.loop.sleep(2)
    plane.stock.last(first).connection_lost(ConnectionResetError())
    plane.loop.settle()
    (second,) = plane.stock.used.keys() - {first}
    plane.answer(second, whole(b"x"))
    assert status_of(request) == 200
    assert plane.records[0].attempts == 2
    plane.check()


@pytest.mark.parametrize(("after_s", "deaths"), [(0.5, 0), (1.5, 1)])
def test_only_a_young_attempt_on_an_old_connection_is_stale(after_s: float, deaths: int) -> None:
    plane = Plane("a", "b")
    request = placed(plane)
    first = next(iter(plane.stock.used))
    plane.loop.sleep(after_s)
    plane.table.eject(cast(Any, plane.table.key(first)), plane.loop.now, 60.0)
    plane.stock.last(first).connection_lost(None)
    failures = plane.metrics.of(next(one for one in plane.table.table.targets if one.id == first)).failures
    assert failures == ({"stale": 1} if not deaths else {"died": 1})
    assert request.state is not None


@pytest.mark.parametrize(
    "data",
    [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, b"HTTP/1.1 100 Continue\r\n\r\n" * 20],
    ids=["no head", "an endless head", "too many interim responses"],
)
def test_a_malformed_response_of_the_only_target_is_a_502(data: bytes) -> None:
    plane = Plane("a")
    request = placed(plane)
    plane.answer("a", data)
    assert status_of(request) == 502
    assert plane.records[0].error == "no_target_answered"
    plane.check()


def test_an_interim_response_is_not_the_response() -> None:
    plane = Plane("a")
    request = placed(plane)
    plane.answer("a", b"HTTP/1.1 100 Continue\r\n\r\n" + whole(b"x"))
    assert status_of(request) == 200


def test_an_error_of_ours_says_when_to_come_back() -> None:
    plane = Plane(limits=Limits(hold_s=0.0))
    request = placed(plane)
    sent = client_of(request).wire.sent
    assert sent.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: %d\r\n" % RETRY_AFTER_S in sent
    assert SERVER.encode() in sent
    assert client_of(request).events == ["next"]
    plane.check()


def test_the_sweep_ends_what_has_waited_for_too_long() -> None:
    plane = Plane("a", limits=Limits(time_to_first_byte_s=10))
    request = placed(plane)
    sweep = Sweep(plane.dispatch)
    plane.loop.sleep(9.9)
    sweep.check()
    assert request.state is State.ATTEMPTING
    plane.loop.sleep(0.1)
    sweep.check()
    assert status_of(request) == 504
    plane.check()


def test_the_sweep_ends_what_is_queued_for_too_long() -> None:
    plane = Plane("a", pushing=ONE_EACH, limits=Limits(hold_s=5))
    other = plane.fill("a")
    request = placed(plane)
    sweep = Sweep(plane.dispatch)
    plane.loop.sleep(4.9)
    sweep.check()
    assert request.state is State.QUEUED
    plane.loop.sleep(0.2)
    sweep.check()
    assert status_of(request) == 503
    plane.table.release(other, 6.0)
    plane.check()


# --- streams


def test_a_stream_passes_as_it_comes() -> None:
    plane = Plane("a")
    request = placed(plane, b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n", b"body")
    plane.loop.sleep(1)
    plane.answer("a", STREAM)
    assert client_of(request).wire.sent == b""  # the head alone is no response
    assert plane.runtime.buffers.taken == 4
    plane.answer("a", event("one"))
    assert plane.runtime.buffers.taken == 0  # it is not sent again
    assert request.state is State.STREAMING
    assert list(plane.registry.relays) == [request.responding]
    assert not plane.registry.waiting
    assert client_of(request).wire.take().endswith(event("one"))
    plane.loop.sleep(1)
    plane.answer("a", event("two") + b"0\r\n\r\n")
    assert client_of(request).wire.take() == event("two") + b"0\r\n\r\n"
    (record,) = plane.records
    assert (record.ttft_s, record.duration_s, record.status) == (1.0, 2.0, 200)
    assert sum(plane.counts.ttft.counts) == 1
    assert sum(plane.metrics.of(plane.table.table.targets[0]).inter_token.counts) == 1
    assert not plane.stock.last("a").transport.is_closing()
    plane.check()


@pytest.mark.parametrize(("version", "how"), [(b"1.1", "hang_up"), (b"1.0", "abort")])
def test_a_stream_that_cannot_go_on_is_cut(version: bytes, how: str) -> None:
    plane = Plane("a", "b")
    request = placed(plane, b"GET /stream HTTP/%b\r\nHost: x\r\n\r\n" % version)
    first = next(iter(plane.stock.used))
    plane.answer(first, STREAM + chunk(b"data: 1\n\n"))
    plane.stock.last(first).connection_lost(ConnectionResetError())
    assert client_of(request).events[-1] == how
    assert plane.counts.cut == 1
    assert plane.records[0].attempts == 1
    assert steps(request)[-1] == "broke"
    plane.check()


def test_a_body_that_ends_with_its_connection_is_whole() -> None:
    plane = Plane("a")
    request = placed(plane)
    plane.answer("a", b"HTTP/1.1 200 OK\r\n\r\n")
    plane.stock.last("a").data_received(b"some")
    plane.stock.last("a").connection_lost(None)
    assert client_of(request).wire.sent.endswith(chunk(b"some") + b"0\r\n\r\n")
    assert client_of(request).events[-1] == "next"
    plane.check()


def chat(plane: Plane, options: Continuation) -> ProxiedRequest:
    asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]}
    body = json.dumps(asked).encode()
    raw = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    return placed(plane, raw, body, resume_state=ResumeState(CHAT, read(body), body, options))


def test_what_is_kept_of_streams_counts_towards_the_budget() -> None:
    plane = Plane("a", "b", kind=EngineKind.VLLM)
    sweep = Sweep(plane.dispatch)
    chat(plane, Continuation(mode=Continue.AUTO))
    (target,) = plane.stock.used
    plane.answer(target, STREAM + event("one"))
    plane.loop.sleep(2)
    sweep.check()
    assert plane.runtime.buffers.streams == plane.registry.stream_bytes() >= len(event("one"))
    plane.answer(target, event("", "stop") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    plane.loop.sleep(2)
    sweep.check()
    assert plane.runtime.buffers.streams == 0
    plane.check()


def test_a_stream_goes_on_from_another_target() -> None:
    plane = Plane("a", "b", kind=EngineKind.VLLM)
    request = chat(plane, Continuation(mode=Continue.AUTO))
    first = next(iter(plane.stock.used))
    plane.answer(first, STREAM + event("one"))
    plane.stock.last(first).connection_lost(ConnectionResetError())
    assert request.state is State.ATTEMPTING
    assert plane.runtime.buffers.taken > 0
    plane.loop.settle()
    (second,) = plane.stock.used.keys() - {first}
    assert b'"content":"one"' in plane.stock.sent(second)
    assert request.placing.tries.failed
    plane.answer(second, STREAM + event(" two"))
    plane.answer(second, event("", "stop") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    sent = client_of(request).wire.sent
    assert sent.count(b"HTTP/1.1 200 OK") == 1
    assert b"one" in sent
    assert b"two" in sent
    assert sent.endswith(b"0\r\n\r\n")
    assert (plane.counts.continued, plane.records[0].continued) == (1, 1)
    plane.check()


def test_a_stream_is_handed_over_when_its_target_is_drained() -> None:
    plane = Plane("a", "b", kind=EngineKind.VLLM)
    request = chat(plane, Continuation(mode=Continue.AUTO))
    first = next(iter(plane.stock.used))
    plane.answer(first, STREAM + event("one "))
    assert request.responding.hand_over()
    assert plane.counts.handed_over == 1
    assert not request.placing.tries.failed
    plane.loop.settle()
    assert len(plane.stock.used) == 2
    assert plane.counts.cut == 0


def test_a_stream_without_another_target_ends_with_an_error_event() -> None:
    plane = Plane("a", kind=EngineKind.VLLM, limits=Limits(hold_s=0.0))
    request = chat(plane, Continuation(mode=Continue.AUTO))
    plane.answer("a", STREAM + event("one "))
    plane.stock.last("a").connection_lost(ConnectionResetError())
    sent = client_of(request).wire.sent
    assert b"data: {" in sent
    assert b'"error"' in sent
    assert sent.endswith(b"0\r\n\r\n")
    assert client_of(request).events[-1] == "next"
    plane.check()


@pytest.mark.parametrize(
    ("silent_s", "state"), [(29.0, State.STREAMING), (31.0, State.DONE)], ids=["not yet", "too long"]
)
def test_a_silent_stream_is_given_up(silent_s: float, state: State) -> None:
    plane = Plane("a", limits=Limits(idle_timeout_s=30, stall_timeout_s=1e4, suspect_after_s=1e4))
    request = placed(plane)
    plane.answer("a", STREAM + chunk(b"data: 1\n\n"))
    sweep = Sweep(plane.dispatch)
    for _ in range(int(silent_s)):
        plane.loop.sleep(1)
        sweep.check()
    plane.loop.sleep(1)
    sweep.check()
    assert request.state is state


def test_a_stream_that_flows_is_not_given_up() -> None:
    plane = Plane("a", limits=Limits(idle_timeout_s=3))
    request = placed(plane)
    plane.answer("a", STREAM)
    sweep = Sweep(plane.dispatch)
    for _ in range(20):
        plane.answer("a", chunk(b"data: 1\n\n"))
        plane.loop.sleep(1)
        sweep.check()
    assert request.state is State.STREAMING


def test_a_client_that_does_not_read_pauses_its_target() -> None:
    plane = Plane("a", limits=Limits(idle_timeout_s=3))
    request = placed(plane)
    plane.answer("a", STREAM + chunk(b"data: 1\n\n"))
    target = cast(Wire, plane.stock.last("a").transport)
    request.client_full()
    assert not target.reading
    assert request.relay is not None
    assert request.relay.blocked
    request.client_drained()
    assert target.reading
    assert not request.relay.blocked
    request.client_full()
    sweep = Sweep(plane.dispatch)
    for _ in range(8):
        plane.loop.sleep(1)
        sweep.check()
    assert client_of(request).wire.aborted  # it has stopped reading for the idle timeout
    assert request.state is State.STREAMING  # until its connection is closed


# --- clients that leave


@pytest.mark.parametrize("data", [b"", STREAM + chunk(b"data: 1\n\n")], ids=["attempting", "streaming"])
def test_a_client_that_leaves_stops_its_target(data: bytes) -> None:
    plane = Plane("a")
    request = placed(plane)
    if data:
        plane.answer("a", data)
    request.client_lost()
    assert cast(Wire, plane.stock.last("a").transport).aborted
    assert plane.counts.client_gone == 1
    assert client_of(request).events[-1:] != ["next"]
    assert plane.records[0].error == "client_gone"
    request.client_lost()  # and nothing more happens
    plane.check()


def test_a_client_that_leaves_the_queue_is_counted_once() -> None:
    plane = Plane("a", pushing=ONE_EACH)
    other = plane.fill("a")
    request = placed(plane)
    plane.loop.sleep(2)
    request.client_lost()
    assert plane.records[0].queued_s == 2.0
    plane.table.release(other, 2.0)
    plane.check()


# --- long bodies


def test_the_rest_of_a_long_body_follows_and_is_not_sent_again() -> None:
    plane = Plane("a", "b")
    client = Client()
    client.body_left, client.length = True, 8
    request = placed(plane, b"PUT /up HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\n", b"1234", client)
    first = next(iter(plane.stock.used))
    assert plane.stock.sent(first).endswith(b"\r\n\r\n1234")
    assert "resume 2" in client.events
    request.more_body(b"5678", last=True)
    assert plane.stock.sent(first) == b"5678"
    assert not request.placing.tries.replayable
    client.body_left = False
    plane.stock.last(first).connection_lost(ConnectionResetError())
    assert status_of(request) == 502
    assert len(plane.stock.used) == 1


def test_more_of_a_body_between_two_attempts_is_kept() -> None:
    plane = Plane("a", pushing=ONE_EACH)
    plane.fill("a")
    request = placed(plane, POST, b"12")
    request.more_body(b"34", last=False)
    assert request.body == b"1234"
    assert request.placing.tries.replayable


@pytest.mark.parametrize("streaming", [False, True])
def test_a_bad_body_is_refused_or_cuts_the_response(streaming: bool) -> None:
    plane = Plane("a")
    request = placed(plane)
    if streaming:
        plane.answer("a", STREAM + chunk(b"data: 1\n\n"))
    request.bad_body(408, "body_timeout", "Too late.")
    if streaming:
        assert client_of(request).events[-1] == "hang_up"
    else:
        assert status_of(request) == 408
    assert plane.records[0].error == "body_timeout"
    plane.check()


# --- tunnels


def tunnel(plane: Plane, client: Client | None = None) -> ProxiedRequest:
    """Return a WebSocket whose target has opened it."""
    request = plane.request(WEBSOCKET, b"", client)
    connection = plane.dispatch.pools.of(plane.table.table.targets[0]).take()
    assert connection is not None
    attempt = request.begin_attempt(
        plane.table.book(request.arrival.view, "a", plane.loop.now), plane.loop.now
    )
    attempt._dialled(connection)  # a WebSocket never has a connection of the pool
    plane.loop.settle()
    plane.answer("a", UPGRADED)
    return request


def test_a_tunnel_passes_bytes_both_ways() -> None:
    plane = Plane("a")
    client = Client()
    client.ahead = b"early"
    request = tunnel(plane, client)
    target = cast(Wire, plane.stock.last("a").transport)
    assert request.state is State.TUNNEL
    assert list(plane.registry.tunnels) == [request.responding]
    assert client.wire.take().startswith(b"HTTP/1.1 101 ")
    assert target.take().endswith(b"early")
    request.client_data(b"\x81\x01a")
    plane.answer("a", b"\x81\x01b")
    assert (target.take(), client.wire.take()) == (b"\x81\x01a", b"\x81\x01b")
    request.client_lost()
    assert target.closed
    assert not target.aborted  # what was written goes first
    assert plane.counts.client_gone == 0
    plane.check()


def test_a_tunnel_that_nothing_passes_is_closed() -> None:
    plane = Plane("a", limits=Limits(idle_timeout_s=30))
    request = tunnel(plane)
    client_of(request).wire.take()
    sweep = Sweep(plane.dispatch)
    plane.loop.sleep(20)
    sweep.check()
    request.client_data(b"\x81\x01a")
    plane.loop.sleep(20)
    sweep.check()
    assert request.state is State.TUNNEL
    plane.loop.sleep(31)
    sweep.check()
    assert plane.records[0].error == "nothing passed within the idle timeout"
    assert client_of(request).wire.sent[:2] == b"\x88\x02"
    plane.check()


def test_a_tunnel_ends_with_its_target() -> None:
    plane = Plane("a")
    request = tunnel(plane)
    plane.stock.last("a").connection_lost(None)
    assert client_of(request).events[-1] == "hang_up"
    plane.check()


def test_a_tunnel_is_closed_when_its_target_has_gone() -> None:
    plane = Plane("a")
    request = tunnel(plane)
    plane.registry.changed()
    assert request.state is State.TUNNEL
    plane.table.apply(Table("service", "2", (Target("b", "http://b.test"),)), 1.0)
    plane.registry.changed()
    assert plane.records[0].error == "its target is gone"
    assert request.state is State.DONE


def test_an_idle_tunnel_knows_since_when() -> None:
    one = Tunnel(cast(Any, Wire()), cast(Any, Wire()), 0.0)
    assert one.idle_s(5.0) == 5.0
    one.from_target(b"x")
    assert (one.idle_s(7.0), one.idle_s(9.0)) == (0.0, 2.0)


def test_a_target_that_switches_unasked_is_malformed() -> None:
    plane = Plane("a")
    request = placed(plane)
    plane.answer("a", UPGRADED)
    assert status_of(request) == 502


# --- the fault barrier


@pytest.mark.parametrize("streaming", [False, True], ids=["before the first byte", "behind it"])
def test_a_crash_ends_the_request_and_nothing_else(streaming: bool) -> None:
    plane = Plane("a")
    request = placed(plane)
    if streaming:
        plane.answer("a", STREAM + chunk(b"data: 1\n\n"))
    request.crashed("test", ZeroDivisionError())
    if streaming:
        assert client_of(request).events[-1] == "hang_up"
    else:
        assert status_of(request) == 500
        assert client_of(request).closing
    assert plane.runtime.faults.total == 1
    plane.runtime.faults = Faults(plane.loop.time)
    plane.check()


class FailingClient(Client):
    def next(self) -> None:
        raise ZeroDivisionError


def test_a_crash_at_the_end_gives_the_connection_up() -> None:
    plane = Plane("a")
    client = FailingClient()
    request = placed(plane, client=client)
    plane.answer("a", whole(b"x"))
    assert client.events[-1] == "abort"
    assert len(plane.records) == 1
    request.crashed("test", ZeroDivisionError())  # and again, when it is over
    assert client.events[-2:] == ["abort", "abort"]
    plane.runtime.faults = Faults(plane.loop.time)
    plane.check()


def test_a_crash_in_the_middle_of_the_end_leaves_nothing() -> None:
    plane = Plane("a")
    failing = iter([True])

    def record(_: Any) -> None:
        if next(failing, False):
            raise ZeroDivisionError

    plane.account._record = record
    request = placed(plane, POST, b"hello")
    plane.answer("a", whole(b"x"))
    assert client_of(request).events[-1] == "abort"
    assert plane.account.ongoing.mean(plane.loop.now + 9.0, 9.0) == 0.0
    plane.runtime.faults = Faults(plane.loop.time)
    plane.check()


def test_a_request_ends_once() -> None:
    plane = Plane("a")
    request = placed(plane)
    plane.answer("a", whole(b"x"))
    with pytest.raises(TransitionError):
        request.end(Outcome.WHOLE)
    called: list[int] = []
    request.guarded(lambda: called.append(1))
    assert called == []
    assert len(plane.records) == 1


def test_a_callback_that_raises_ends_its_request() -> None:
    plane = Plane("a")
    request = placed(plane)

    def raises() -> None:
        raise ZeroDivisionError

    request.call_soon(raises)
    plane.loop.settle()
    assert status_of(request) == 500


def test_a_request_that_is_over_is_no_cycle() -> None:
    plane = Plane("a")
    gc.collect()
    gc.disable()
    try:
        for data in (whole(b"x"), STREAM + chunk(b"data: 1\n\n") + b"0\r\n\r\n"):
            placed(plane, POST, b"hello")
            plane.answer("a", data)
        kinds = (ProxiedRequest, Placing, Responding, Attempt)
        assert [one for one in gc.get_objects() if isinstance(one, kinds)] == []
    finally:
        gc.enable()


def test_retries_are_bounded_in_all() -> None:
    plane = Plane("a", "b", "c", retries=Retries(max_total_retries=1))
    request = placed(plane)
    for _ in range(2):
        request.attempt_failed(Failure.MALFORMED, "nonsense")
        plane.loop.sleep(1)
    assert status_of(request) == 502
    assert plane.records[0].attempts == 2


# --- the table


def test_every_state_but_the_last_ends() -> None:
    for state, row in TABLE.items():
        assert (RequestEvent.ENDED in row) == (state is not State.DONE)
    assert move(State.CHOOSING, RequestEvent.CHOSEN) is State.ATTEMPTING
    with pytest.raises(TransitionError, match="a request that is done cannot be chosen"):
        move(State.DONE, RequestEvent.CHOSEN)


def test_the_loop_of_these_tests_runs_what_is_due() -> None:
    loop, out = StepLoop(), list[str]()
    loop.call_later(2, out.append, "later")
    loop.call_soon(out.append, "soon")
    loop.sleep(1)
    assert out == ["soon"]
    loop.sleep(1)
    assert out == ["soon", "later"]
    assert GET.startswith(b"GET")
