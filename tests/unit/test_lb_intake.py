"""What clients' connections may do, and how a request begins: connections on wires, in virtual time."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from dataclasses import replace
from typing import Any, cast

import pytest

from lb.config.cors import Cors
from lb.config.options import Access, ApiKey, CookieMode, Limits, Pushing, PushMode, Session
from lb.config.regions import Regions
from lb.config.schema import Table, Target
from lb.core.api_keys import Admission
from lb.core.byte_budget import ByteBudget
from lb.core.forwarding import Forwarding
from lb.core.hop import RequestHop
from lb.core.models import read_models
from lb.core.tenant import LEAST_EXPECTED
from lb.http.api_paths import CHAT
from lb.http.http2 import Http2Request, http_1_1_required
from lb.http.messages import Reader
from lb.proxy import model_list
from lb.proxy.downstream import MAX_AHEAD_BYTES, PAUSE_TARGET, ClientConnection
from lb.proxy.entrance import RequestAdmission
from lb.proxy.intake import Intake
from lb.proxy.peer_entrance import CAME, EXPLAIN, PeerEntrance
from lb.proxy.rejections import HTTP_2, NO_ROOM, TOO_MANY_CONNECTIONS, Rejection
from lb.proxy.request import ProxiedRequest
from lb.proxy.runtime import Runtime
from lb.proxy.states import State
from lb.proxy.sweep import Sweep
from lb.proxy.upload import TinyChunksError, Upload, refusal_of
from policies.routing.base import RequestView
from policies.routing.request_work import BYTES_PER_TOKEN, prompt_bytes
from tests.kit.api_keys import api_key
from tests.kit.lb_parts import GET, Client, Plane, Wire

KEY = "sk-of-a-test"
TWICE = b"Idempotency-Key: 1\r\n"  # it may be sent again, so that a connection of the pool will do


def keys(**more: Any) -> Access:
    return Access((api_key("team", KEY, **more),))


class Door:
    """An intake, and connections of clients to it."""

    def __init__(self, *targets: str, max_clients: int | None = None, **more: Any) -> None:
        self.plane = Plane(*targets, **more)
        self.intake = Intake(self.plane.dispatch, self.plane.account, "id", None, max_clients)

    @property
    def gate(self) -> RequestAdmission:
        return self.intake.gate

    def connect(self, peer: str = "192.0.2.7") -> tuple[ClientConnection, Wire]:
        self.plane.stock.fill(self.plane.table.table.targets)
        connection, wire = ClientConnection(self.intake), Wire(peer)
        connection.connection_made(cast(Any, wire))
        return connection, wire

    def send(self, data: bytes) -> tuple[ClientConnection, Wire]:
        connection, wire = self.connect()
        connection.data_received(data)
        self.plane.loop.settle()
        return connection, wire

    def status(self, data: bytes) -> int:
        _, wire = self.send(data)
        return int(wire.sent.split()[1]) if wire.sent else 0


def post(path: str, body: bytes, more: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n%b" % (
        path.encode(),
        len(body),
        more,
        body,
    )


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


# --- connections


def test_a_connection_serves_one_request_after_the_other() -> None:
    door = Door("a")
    connection, wire = door.connect()
    for number in range(3):
        connection.data_received(GET)
        door.plane.loop.settle()
        assert connection.request is not None
        door.plane.answer("a", whole(b"%d" % number))
        door.plane.loop.settle()
        assert wire.take().endswith(b"\r\n\r\n%d" % number)
        assert connection.request is None
    assert door.plane.counts.requests == 3
    assert door.plane.account.arrivals.count(0.0, 10.0) == 3
    door.plane.check()


def test_what_is_sent_ahead_waits_for_its_turn() -> None:
    door = Door("a")
    connection, wire = door.connect()
    connection.data_received(GET + GET)
    door.plane.loop.settle()
    assert len(door.plane.stock.used["a"]) == 1
    door.plane.answer("a", whole(b"1"))
    door.plane.loop.settle()
    assert connection.request is not None
    door.plane.answer("a", whole(b"2"))
    door.plane.loop.settle()
    assert wire.sent.count(b"HTTP/1.1 200") == 2
    door.plane.check()


def test_a_client_that_sends_too_far_ahead_is_cut_off() -> None:
    door = Door("a")
    connection, wire = door.send(GET)
    connection.data_received(b"x" * MAX_AHEAD_BYTES)
    assert not wire.closed
    connection.data_received(b"x")
    assert wire.aborted


def test_a_client_that_does_not_read_is_not_read_from() -> None:
    door = Door("a")
    connection, wire = door.connect()
    connection.pause_writing()
    assert not wire.reading
    connection.resume_writing()
    assert wire.reading
    connection.data_received(GET)
    door.plane.loop.settle()
    connection.pause_writing()
    assert not cast(Wire, door.plane.stock.last("a").transport).reading
    connection.resume_writing()
    assert cast(Wire, door.plane.stock.last("a").transport).reading


def test_a_client_that_leaves_takes_its_request_along() -> None:
    door = Door("a")
    connection, _ = door.send(GET)
    connection.connection_lost(None)
    assert not door.plane.runtime.clients
    assert door.plane.counts.client_gone == 1
    door.plane.check()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"y" * 70_000, 431),
        (b"GET /-/healthz HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /-/ready HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"POST /-/ready HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 405),
        (b"GET /-/else HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"\r\nGET /-/healthz HTTP/1.1\r\nHost: x\r\n\r\n", 200),
    ],
)
def test_a_head_alone_decides(data: bytes, status: int) -> None:
    assert Door("a").status(data) == status


@pytest.mark.parametrize("overrides", [False, True])
def test_a_client_names_a_policy_only_where_the_operator_lets_it(overrides: bool) -> None:
    door = Door("a", access=Access(overrides=overrides))
    named = b"GET / HTTP/1.1\r\nHost: x\r\nX-SkyServe-Policy: %b\r\n\r\n"
    assert door.status(named % b"nonsense") == (400 if overrides else 0)
    connection, _ = door.send(named % b"round_robin")
    request = connection.request
    assert isinstance(request, ProxiedRequest)
    assert request.arrival.policy == ("round_robin" if overrides else None)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HTTP_2_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
HTTP_2_REQUEST = b"\x00\x00\x03\x01\x05\x00\x00\x00\x07\x82\x84\x86"  # on stream 7: GET / by http


@pytest.mark.parametrize("cut", range(1, 45, 4))
def test_a_client_that_begins_with_http_2_is_told_to_use_http_1_1(cut: int) -> None:
    door = Door("a")
    sent = PREFACE + HTTP_2_SETTINGS + HTTP_2_REQUEST
    connection, wire = door.connect()
    connection.data_received(sent[:cut])
    assert len(PREFACE) > cut or wire.sent == HTTP_2_SETTINGS, "clients of gRPC wait for it"
    connection.data_received(sent[cut:])
    assert wire.sent == HTTP_2_SETTINGS + http_1_1_required(Http2Request(7, False), HTTP_2.message)
    assert door.plane.counts.errors == {"unsupported_version": 1}
    door.plane.loop.sleep(3)
    assert wire.aborted


def test_a_client_of_http_2_that_sends_no_request_is_sent_away() -> None:
    door = Door("a", limits=Limits(max_head_bytes=1000, head_timeout_s=5))
    connection, wire = door.connect()
    connection.data_received(PREFACE)
    for _ in range(200):
        connection.data_received(HTTP_2_SETTINGS)
    assert wire.sent.startswith(HTTP_2_SETTINGS)
    assert wire.sent.endswith(b"does not speak HTTP/2 or gRPC.")
    _, slow = door.send(PREFACE)
    door.plane.loop.sleep(8)
    assert slow.aborted


def test_a_health_check_is_no_demand() -> None:
    door = Door("a")
    door.status(b"GET /-/healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert door.plane.counts.requests == 0


@pytest.mark.parametrize("targets", [(), ("a",)])
def test_readiness_is_that_of_a_target(targets: tuple[str, ...]) -> None:
    door = Door(*targets)
    assert door.intake.ready() == bool(targets)
    door.plane.runtime.drain(on=True)
    assert not door.intake.ready()
    door.plane.runtime.drain(on=False)
    assert door.intake.ready() == bool(targets)
    door.plane.runtime.close()
    assert not door.intake.ready()


def test_connections_beyond_the_limit_are_refused() -> None:
    door = Door("a", max_clients=2)
    _, first = door.connect()
    _, second = door.connect()
    _, third = door.connect()
    assert (first.sent, second.sent) == (b"", b"")
    assert third.sent.startswith(b"HTTP/1.1 503 ")
    assert third.closed
    assert door.plane.counts.errors == {TOO_MANY_CONNECTIONS.code: 1}
    assert door.intake.gauges()["max_client_connections"] == 2
    assert door.intake.gauges()["client_connections"] == 3


def test_who_sends_no_head_in_time_gets_a_408() -> None:
    door = Door("a", limits=Limits(head_timeout_s=5))
    connection, wire = door.connect()
    connection.data_received(b"GET / HT")
    door.plane.loop.sleep(4.9)
    assert wire.sent == b""
    door.plane.loop.sleep(0.2)
    assert wire.sent.startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_is_closed() -> None:
    door = Door("a", limits=Limits(keepalive_s=10, head_timeout_s=5))
    _, wire = door.send(GET)
    door.plane.answer("a", whole(b"x"))
    door.plane.loop.sleep(9)
    assert not wire.closed
    door.plane.loop.sleep(2)
    assert wire.closed


# --- keys


@pytest.mark.parametrize(
    ("target", "lines", "sent"),
    [
        ("/x", ["Authorization: Bearer KEY"], "/x"),
        ("/x", ["Authorization: Basic BASIC"], "/x"),
        ("/x?api_key=KEY&a=1", [], "/x?a=1"),
        ("/x?a=1&api%5Fkey=KEY", [], "/x?a=1"),
        ("/x?api_key=KEY&a=1", ["Authorization: Bearer KEY"], "/x?a=1"),
        ("/x", ["Sec-WebSocket-Protocol: a, openai-insecure-api-key.KEY"], "/x"),
    ],
)
def test_a_known_key_reaches_no_target_wherever_it_stands(target: str, lines: list[str], sent: str) -> None:
    door = Door("a", access=replace(keys(), keys_in_query=True))
    basic = base64.b64encode(f"anyone:{KEY}".encode()).decode()
    head = (
        "\r\n".join([f"GET {target} HTTP/1.1", "Host: x", *lines]).replace("BASIC", basic).replace("KEY", KEY)
    )
    door.send(f"{head}\r\n\r\n".encode())
    got = cast(Wire, door.plane.stock.last("a").transport).sent
    assert got.startswith(f"GET {sent} HTTP/1.1\r\n".encode())
    assert KEY.encode() not in got
    assert basic.encode() not in got
    assert (b"Sec-WebSocket-Protocol: a\r\n" in got) == ("Sec-WebSocket" in head)


def test_a_key_in_the_query_counts_only_where_that_is_turned_on() -> None:
    request = f"GET /x?api_key={KEY} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    assert Door("a", access=keys()).status(request) == 401
    assert (
        Door("a", access=replace(keys(), keys_in_query=True)).status(request) == 0
    )  # it waits for its target
    assert (
        Door("a", access=replace(keys(), keys_in_query=True)).status(request.replace(b"=sk", b"=no")) == 401
    )


def test_without_keys_all_that_may_be_one_passes() -> None:
    door = Door("a", access=Access(keys_in_query=True))
    lines = b"Sec-WebSocket-Protocol: a, openai-insecure-api-key.k\r\n"
    door.send(b"GET /x?api_key=k HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
    got = cast(Wire, door.plane.stock.last("a").transport).sent
    assert got.startswith(b"GET /x?api_key=k HTTP/1.1\r\n")
    assert lines in got


# --- closing


def test_a_retired_agent_serves_the_last_request_of_each_client() -> None:
    door = Door("a", limits=Limits(head_timeout_s=5, keepalive_s=100))
    used, wire = door.send(GET)
    door.plane.answer("a", whole(b"1"))
    door.plane.loop.settle()
    _, fresh = door.connect()
    busy, busy_wire = door.send(GET)
    door.intake.retire(2.0)
    assert door.plane.runtime.closing
    door.plane.loop.sleep(1)
    door.plane.stock.fill(door.plane.table.table.targets)
    used.data_received(GET)
    door.plane.loop.sleep(2)
    assert not wire.closed
    assert not fresh.closed  # it has sent none yet, and has the time for a head
    assert busy.request is not None
    assert not busy_wire.closed
    door.plane.loop.sleep(3)
    assert fresh.closed


def test_a_closing_agent_turns_the_queue_away() -> None:
    door = Door("a", pushing=Pushing(PushMode.FIXED_CAP, 1))
    door.plane.fill("a")
    _, wire = door.send(GET)
    assert door.plane.registry.queued == 1
    door.intake.close(1.0)
    assert wire.sent.startswith(b"HTTP/1.1 503 ")
    assert door.plane.registry.queued == 0
    assert door.status(GET) == 503


# --- bodies


def test_a_body_is_collected_and_its_bytes_are_counted_once() -> None:
    door = Door("a")
    data = post("/up", b"x" * 1000, TWICE)
    connection, _ = door.connect()
    connection.data_received(data[:500])
    assert 0 < door.plane.runtime.buffers.taken < 1000
    assert connection.request is None
    connection.data_received(data[500:])
    door.plane.loop.settle()
    assert door.plane.runtime.buffers.taken == 1000
    assert door.plane.stock.sent("a").endswith(b"x" * 1000)
    door.plane.answer("a", whole(b"x"))
    door.plane.check()


def test_a_body_exactly_as_long_as_it_may_be_is_taken() -> None:
    limits = Limits(max_body_bytes=2000, buffer_bytes=2000)
    body = b'{"input":"%b"}'
    assert Door("a", limits=limits).status(post("/v1/embeddings", body % (b"x" * 1988))) == 0
    assert Door("a", limits=limits).status(post("/v1/embeddings", body % (b"x" * 1989))) == 413
    assert (
        Door("a", limits=limits).status(post("/up", b"x" * 2001, TWICE)) == 0
    )  # not parsed, and passed on as it comes


# --- what a key with a limit of tokens may send

BEARER = b"Authorization: Bearer ka\r\n"
PROMPT = b'{"model":"m","prompt":"hello","max_tokens":5}'
HANDSHAKE = (
    b"GET %b HTTP/1.1\r\nHost: x\r\n" + BEARER + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)


def limited(strict_json: bool = True, **limits: Any) -> Door:
    key = api_key("a", "ka", **{"tokens_per_minute": 1000.0, **limits})
    access = Access((key,), strict_json=strict_json)
    return Door("a", access=access)


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (post("/v1/completions", PROMPT, BEARER), ""),
        (post("/v1/completions", PROMPT[:-1] + b',"x":NaN}', BEARER), "invalid_json"),
        (post("/v1/completions", b"\xef\xbb\xbf" + PROMPT, BEARER), "invalid_json"),
        (post("/v1/completions", PROMPT.decode().encode("utf-16"), BEARER), "invalid_json"),
        (post("/v1/completions", PROMPT[:-1] + b',"x":"\\ud800"}', BEARER), "invalid_json"),
        (post("/v1/completions", b"[1]", BEARER), "invalid_json"),
        (
            post("/v1/completions", gzip.compress(PROMPT), BEARER + b"Content-Encoding: gzip\r\n"),
            "unsupported_content_encoding",
        ),
        (post("/v1/completions", PROMPT[:-1] + b',"max_tokens":9}', BEARER), "duplicate_fields"),
        (post("/v1/completions", PROMPT[:-1] + b',"metadata":{"max_tokens":9}}', BEARER), ""),
        (post("/v1/rerank", b'{"query":"a","documents":["b"]}', BEARER), ""),
        (post("/tokenize", PROMPT, BEARER + TWICE), ""),
        (post("/own", PROMPT, BEARER), "path_not_allowed"),
        (post("/v1/batches", PROMPT, BEARER), "path_not_allowed"),
        (b"GET /own HTTP/1.1\r\nHost: x\r\n" + BEARER + b"\r\n", ""),
        (b"DELETE /v1/files HTTP/1.1\r\nHost: x\r\n" + BEARER + TWICE + b"\r\n", ""),
        (b"DELETE /own HTTP/1.1\r\nHost: x\r\n" + BEARER + b"\r\n", "path_not_allowed"),
        (HANDSHAKE % b"/v1/realtime", "path_not_allowed"),
        (
            b"PUT /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n" + BEARER + b"\r\n",
            "path_not_allowed",
        ),
        (post("/v1/files/../batches", PROMPT, BEARER), "dot_segments"),
        (post("/v1/files/%2e%2e%2fbatches", PROMPT, BEARER), "dot_segments"),
    ],
)
def test_a_limited_key_may_send_what_can_be_counted(request_bytes: bytes, code: str) -> None:
    door = limited()
    _, wire = door.send(request_bytes)
    assert (code.encode() in wire.sent) if code else not wire.sent
    assert bool(door.plane.stock.used.get("a")) is not bool(code)


@pytest.mark.parametrize(
    ("paths", "path", "allowed"),
    [
        (("/own",), "/own", True),
        (("/own",), "/own/more", False),
        (("/own/*",), "/own/more", True),
        (("/own/*",), "/other", False),
        (("/own/*",), "/own/../other", False),
        (("*",), "/any", True),
    ],
)
def test_other_paths_are_allowed_one_by_one(paths: tuple[str, ...], path: str, allowed: bool) -> None:
    door = limited(paths=paths)
    assert door.status(post(path, b"x", BEARER + TWICE)) in ((0,) if allowed else (400, 403))


def test_a_key_without_a_limit_of_tokens_may_use_any_path() -> None:
    assert limited(tokens_per_minute=0.0).status(post("/own", b"x", BEARER + TWICE)) == 0


@pytest.mark.parametrize("paths", [(), ("/v1/load_lora_adapter",)])
def test_a_key_loads_adapters_for_all_only_where_its_paths_say_so(paths: tuple[str, ...]) -> None:
    door = limited(tokens_per_minute=0.0, paths=paths)
    assert door.status(post("/v1/unload_lora_adapter", b"x", BEARER + TWICE)) == 403
    assert door.status(post("/v1/load_lora_adapter", b"x", BEARER + TWICE)) == (0 if paths else 403)
    assert Door("a").status(post("/v1/load_lora_adapter", b"x", TWICE)) == 0  # without keys it is everybody's


def test_a_body_that_our_parser_refuses_passes_if_the_operator_says_so() -> None:
    door = limited(strict_json=False)
    _, wire = door.send(post("/v1/completions", PROMPT[:-1] + b',"x":NaN}', BEARER))
    assert not wire.sent
    (usage,) = door.plane.account.api_keys.usage(0.0)
    assert usage.reserved > LEAST_EXPECTED


def test_a_body_that_is_not_read_as_a_whole_cannot_be_counted() -> None:
    door = limited()
    long = b'{"prompt":"' + b"x" * door.intake.limits.buffer_bytes + b'"}'
    assert door.status(post("/v1/completions", long, BEARER)[:-1]) == 413
    door.plane.check()


def test_a_long_body_is_passed_on_as_the_target_takes_it() -> None:
    door = Door("a", limits=Limits(buffer_bytes=1000))
    data = post("/up", b"x" * 3000, TWICE)
    connection, wire = door.connect()
    connection.data_received(data[:1500])
    connection.data_received(data[1500:1600])
    door.plane.loop.settle()
    assert door.plane.stock.sent("a").count(b"x") > 1000
    connection.data_received(data[1600:])
    assert not connection.body_left
    door.plane.answer("a", whole(b"done"))
    door.plane.loop.settle()
    assert wire.sent.endswith(b"done")
    door.plane.check()


def test_a_body_for_which_there_is_no_memory_is_refused() -> None:
    door = Door("a")
    taken = door.plane.runtime.buffers.limit
    assert door.plane.runtime.buffers.take(taken)
    _, wire = door.send(post("/up", b"x"))
    assert wire.sent.startswith(b"HTTP/1.1 %d " % NO_ROOM.status)
    door.plane.runtime.buffers.give_back(taken)
    door.plane.check()


def test_a_body_that_needs_room_takes_it_from_the_tenant_with_most_uploads() -> None:
    teams = [api_key(name, name, max_concurrent=9) for name in ("a", "b")]
    door = Door("a", access=Access(tuple(teams)))
    door.plane.runtime.buffers.limit = 3000
    of_a = post("/up", b"x" * 1500, TWICE + b"Authorization: Bearer a\r\n")
    of_b = post("/up", b"y" * 1200, TWICE + b"Authorization: Bearer b\r\n")
    older, younger = door.connect(), door.connect()
    for connection, _ in (older, younger):
        connection.data_received(of_a[:-1])
    own, own_wire = door.connect()
    own.data_received(of_b[:1000])
    door.plane.loop.settle()
    refused = younger[1].sent
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b'"out_of_memory"' in refused
    assert b"\r\nRetry-After: " in refused
    assert younger[1].eof  # and what its client still sends is read and dropped, until it closes
    younger[0].data_received(b"x")
    own.data_received(of_b[1000:])
    door.plane.loop.settle()
    door.plane.answer("a", whole(b"done"))
    door.plane.loop.settle()
    assert own_wire.sent.endswith(b"done")
    assert older[1].sent == b""
    older[0].data_received(b"x")
    door.plane.loop.settle()
    door.plane.answer("a", whole(b"done"))
    door.plane.loop.settle()
    assert older[1].sent.endswith(b"done")
    assert door.plane.counts.errors == {"out_of_memory": 1}
    assert door.plane.metrics.of_key("a").refusals == {"out_of_memory": 1}
    assert door.intake.gauges()["evicted_bodies"] == 1
    assert all(usage.in_flight == 0 for usage in door.plane.account.api_keys.usage(0.0))
    door.plane.check()


def test_a_request_that_has_begun_is_not_refused_for_the_room_of_another() -> None:
    teams = [ApiKey(name, hashlib.sha256(name.encode()).hexdigest()) for name in ("a", "b")]
    door = Door("a", access=Access(tuple(teams)))
    door.plane.runtime.buffers.limit = 3000
    _, wire = door.send(post("/up", b"x" * 3000, TWICE + b"Authorization: Bearer a\r\n"))
    assert door.status(post("/up", b"y", TWICE + b"Authorization: Bearer b\r\n")) == 503
    assert door.plane.metrics.of_key("b").refusals == {"out_of_memory": 1}
    assert door.status(GET.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer b\r\n\r\n")) == 0  # it needs none
    assert wire.sent == b""


def test_a_queued_body_makes_room_until_a_target_has_it() -> None:
    teams = [ApiKey(name, hashlib.sha256(name.encode()).hexdigest()) for name in ("a", "b")]
    door = Door("a", access=Access(tuple(teams)), pushing=Pushing(PushMode.FIXED_CAP, 1))
    door.plane.runtime.buffers.limit = 300_000
    other = door.plane.fill("a")
    of_a = post("/up", b"x" * 100_000, TWICE + b"Authorization: Bearer a\r\n")
    of_b = post("/up", b"y" * 50_000, TWICE + b"Authorization: Bearer b\r\n")
    first, second, third = door.send(of_a), door.send(of_a), door.send(of_a)
    assert door.plane.registry.queued == 3
    own, own_wire = door.send(of_b)
    assert b'"out_of_memory"' in third[1].take()
    assert door.plane.registry.queued == 3
    assert door.plane.runtime.buffers.held() == {"a": 200_000, "b": 50_000}
    third[0].data_received(GET)  # its connection serves on
    door.plane.table.release(other, 0.0)
    door.plane.registry.let_in()
    door.plane.loop.settle()
    assert isinstance(first[0].request, ProxiedRequest)
    assert first[0].request.state is State.ATTEMPTING
    door.plane.runtime.buffers.limit = 200_000
    _, wire = door.send(of_b)  # the first can no longer be refused, and the second is enough
    assert b'"out_of_memory"' in second[1].sent
    assert (wire.sent, first[1].sent, own_wire.sent) == (b"", b"", b"")
    assert door.plane.metrics.of_key("a").refusals == {"out_of_memory": 2}
    assert own.request is not None
    for client in list(door.plane.runtime.clients):
        cast(ClientConnection, client).connection_lost(None)
    door.plane.loop.settle()
    door.plane.check()


def test_a_client_that_stops_in_its_body_gets_a_408_and_is_settled() -> None:
    door = Door("a", limits=Limits(idle_timeout_s=5), access=keys(max_concurrent=1))
    bearer = TWICE + b"Authorization: Bearer %b\r\n" % KEY.encode()
    data = post("/up", b"x" * 100, bearer)
    connection, wire = door.connect()
    connection.data_received(data[:-10])
    assert door.status(post("/up", b"x", bearer)) == 429
    door.plane.loop.sleep(11)
    assert wire.sent.startswith(b"HTTP/1.1 408 ")
    assert door.plane.runtime.buffers.taken == 0
    assert door.status(post("/up", b"x", bearer)) == 0  # there is room for another one


@pytest.mark.parametrize(
    ("least", "first", "per_s", "refused_at"),
    [
        pytest.param(100, 100, 100, None, id="as fast as it must be"),
        pytest.param(100, 100, 90, 30, id="too slow from the start"),
        pytest.param(100, 10_000, 90, 60, id="what came fast at first does not count for ever"),
        pytest.param(0, 100, 1, None, id="any rate"),
    ],
)
@pytest.mark.parametrize("is_kept", [True, False], ids=["collected", "passed on"])
def test_a_body_must_arrive_at_a_rate(
    least: int, first: int, per_s: int, refused_at: int | None, is_kept: bool
) -> None:
    limits = Limits(min_upload_bytes_per_s=least, buffer_bytes=100_000 if is_kept else 50)
    door = Door("a", limits=limits, access=keys(max_concurrent=1))
    sweep = Sweep(door.plane.dispatch)
    data = post("/up", b"x" * 90_000, TWICE + b"Authorization: Bearer %b\r\n" % KEY.encode())
    sent = data.find(b"\r\n\r\n") + 4 + first
    connection, wire = door.connect()
    connection.data_received(data[:sent])
    at = None
    for second in range(1, 100):
        door.plane.loop.sleep(1)
        connection.data_received(data[sent : sent + per_s])
        sent += per_s
        sweep.check()
        door.plane.loop.settle()
        if wire.sent:
            at = second
            break
    if refused_at is not None and not is_kept:
        refused_at = 30  # its time begins when a target takes it, and the beginning is gone by then
    assert at == refused_at
    assert (connection.request is None) is (refused_at is not None or is_kept)
    if refused_at is not None:
        assert wire.sent.startswith(b"HTTP/1.1 408 ")
        assert b"less than 100 bytes per second (load_balancer.min_upload_bytes_per_second)" in wire.sent
        assert door.plane.counts.errors == {"upload_too_slow": 1}
    connection.connection_lost(None)
    assert not door.plane.runtime.uploading
    assert all(usage.in_flight == 0 for usage in door.plane.account.api_keys.usage(0.0))
    door.plane.check()


def test_a_client_is_not_blamed_for_a_target_that_does_not_take_its_body() -> None:
    door = Door("a", limits=Limits(min_upload_bytes_per_s=100, buffer_bytes=50))
    sweep = Sweep(door.plane.dispatch)
    data = post("/up", b"x" * 90_000, TWICE)
    connection, wire = door.connect()
    connection.data_received(data[:1000])
    door.plane.loop.settle()
    connection.pause_reading(PAUSE_TARGET)
    for _ in range(50):
        door.plane.loop.sleep(1)
        sweep.check()
    connection.resume_reading(PAUSE_TARGET)
    door.plane.loop.sleep(2)
    sweep.check()
    assert wire.sent == b""
    door.plane.loop.sleep(40)
    sweep.check()
    assert wire.sent.startswith(b"HTTP/1.1 408 ")


def test_an_upload_is_bounded() -> None:
    budget = ByteBudget(10)
    upload = Upload(20, False, budget.open(lambda: None), 0.0, True)
    assert upload.feed(b"12345") == (b"12345", -1)
    assert upload.keep(b"12345")
    assert not upload.keep(b"1234567")
    assert upload.take() == b"12345"
    upload.release()
    upload.release()
    assert budget.taken == 0
    assert upload.feed(b"x" * 15 + b"GET") == (b"x" * 15, 15)


def long_chat(size: int = 3 * 1024 * 1024) -> bytes:
    asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x" * size}]}
    return post(CHAT.decode(), json.dumps(asked).encode())


def test_to_copy_to_parse_and_to_send_a_long_body_get_a_turn_each() -> None:
    door = Door("a")
    data = long_chat()
    connection, wire = door.connect()
    connection.data_received(data[:1_000_000])
    connection.data_received(data[1_000_000:])
    assert connection.request is None
    assert not wire.reading
    door.plane.loop.turn()
    request = connection.request
    assert isinstance(request, ProxiedRequest)
    assert request.state is State.CHOOSING
    assert wire.reading
    assert len(request.arrival.view.prompt or b"") <= 256 * 1024
    door.plane.loop.turn()
    assert request.state is State.ATTEMPTING
    connection.data_received(GET)  # ahead of its response
    door.plane.loop.settle()
    assert door.plane.stock.sent("a").endswith(data[-1000:])
    door.plane.answer("a", whole(b"done"))
    door.plane.loop.settle()
    assert wire.take().endswith(b"done")
    door.plane.answer("a", whole(b"next"))
    door.plane.loop.settle()
    assert wire.take().endswith(b"next")
    door.plane.check()


@pytest.mark.parametrize("turns", [0, 1])
def test_a_client_may_leave_before_its_long_body_has_had_its_turns(turns: int) -> None:
    door = Door("a", access=keys(max_concurrent=1))
    data = long_chat().replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer %b\r\n\r\n" % KEY.encode(), 1)
    connection, _ = door.send(data[:-1])
    connection.data_received(data[-1:])
    for _ in range(turns):
        door.plane.loop.turn()
    connection.connection_lost(None)
    door.plane.loop.settle()
    assert door.plane.counts.client_gone == 1
    assert not door.plane.stock.used
    assert all(usage.in_flight == 0 for usage in door.plane.account.api_keys.usage(0.0))
    door.plane.check()


def test_a_long_body_may_lose_its_room_before_its_turn() -> None:
    teams = [ApiKey(name, hashlib.sha256(name.encode()).hexdigest()) for name in ("a", "b")]
    door = Door("a", access=Access(tuple(teams)))
    data = long_chat()
    door.plane.runtime.buffers.limit = len(data)
    connection, wire = door.send(data[:-1].replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer a\r\n\r\n", 1))
    connection.data_received(data[-1:])
    own, _ = door.connect()
    own.data_received(post("/up", b"y" * 10_000, b"Authorization: Bearer b\r\n")[:-1])
    door.plane.loop.settle()
    assert wire.sent.startswith(b"HTTP/1.1 503 ")
    assert connection.request is None
    assert wire.reading  # and drops what still comes
    own.connection_lost(None)
    door.plane.check()


def test_the_first_part_of_a_longer_body_gets_its_turns_and_the_rest_follows() -> None:
    door = Door("a", limits=Limits(buffer_bytes=2 * 1024 * 1024))
    data = long_chat(4 * 1024 * 1024)
    connection, wire = door.connect()
    connection.data_received(data[: 3 * 1024 * 1024])
    assert not wire.reading
    door.plane.loop.settle()
    assert wire.reading  # a target has the beginning
    connection.data_received(data[3 * 1024 * 1024 :])
    door.plane.loop.settle()
    assert door.plane.stock.sent("a").endswith(data[data.find(b"\r\n\r\n") + 4 :])
    door.plane.answer("a", whole(b"done"))
    door.plane.loop.settle()
    assert wire.take().endswith(b"done")
    door.plane.check()


def test_an_upload_in_tiny_chunks_is_refused() -> None:
    upload = Upload(-1, True, ByteBudget(10).open(lambda: None), 0.0, False)
    with pytest.raises(TinyChunksError) as caught:
        upload.feed(b"1\r\nx\r\n" * 5000)
    assert refusal_of(caught.value).code == "tiny_chunks"


# --- keys, cookies and what a request is


def test_without_a_key_no_request_enters() -> None:
    door = Door("a", access=keys())
    assert door.status(GET) == 401
    assert door.status(GET.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer wrong\r\n\r\n")) == 401
    assert door.plane.counts.unauthorized == 2
    assert door.status(GET.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer %b\r\n\r\n" % KEY.encode())) == 0
    assert b"authorization" not in door.plane.stock.sent("a").lower()  # it was for us


def test_the_limits_of_a_key_hold() -> None:
    door = Door("a", access=keys(requests_per_minute=1.0))
    data = GET.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer %b\r\n\r\n" % KEY.encode())
    assert door.status(data) == 0
    assert door.status(data) == 429
    assert door.plane.counts.limited == 1


def test_tokens_are_reserved_before_the_request() -> None:
    door = Door("a", access=keys(tokens_per_minute=100.0))
    body = json.dumps({"prompt": "x" * 400, "max_tokens": 50}).encode()
    data = post("/v1/completions", body, b"Authorization: Bearer %b\r\n" % KEY.encode())
    assert door.status(data) == 0
    (usage,) = door.plane.account.api_keys.usage(0.0)
    assert usage.reserved > 50
    assert door.status(data) == 429  # the first took what there was


def admitted(
    door: Door, data: bytes, hop: RequestHop | None = None, *, body_left: bool = False
) -> ProxiedRequest:
    head, length = Reader().request(data[: data.find(b"\r\n\r\n") + 4], 100)
    admission = Admission(None, ()) if hop is None else Admission.of_peer(hop)
    client = Client()
    client.body_left = body_left
    body = data[-length:] if length > 0 else b""
    request = door.intake.begin(client, head, body, admission)
    assert isinstance(request, ProxiedRequest)
    return request


def chat(**more: Any) -> bytes:
    asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}], **more}
    return post(CHAT.decode(), json.dumps(asked).encode())


HOP = RequestHop(0.5, 7.0, 1.0, "team", frozenset({"eu"}), 1)._replace(peer="p")


def test_a_stream_can_be_resumed_unless_its_client_or_its_body_forbids() -> None:
    door = Door("a")
    assert admitted(door, chat()).arrival.resume_state is not None
    assert admitted(door, chat(stream=False)).arrival.resume_state is None
    assert admitted(door, chat(), body_left=True).arrival.resume_state is None
    off = chat().replace(b"\r\n\r\n", b"\r\nX-SkyServe-Continue: off\r\n\r\n", 1)
    assert admitted(door, off).arrival.resume_state is None
    assert not admitted(door, off).arrival.continues


def test_a_request_of_a_peer_has_the_time_that_is_left() -> None:
    limits = Limits(time_to_first_byte_s=100, hold_s=50)
    door = Door("a", limits=limits)
    request = admitted(door, chat(), HOP)
    tries = request.placing.tries
    assert (tries.wait_left_s, tries.queue_left_s) == (7.0, 7.0)
    assert request.arrival.zones == frozenset({"eu"})
    assert request.arrival.resume_state is not None
    assert request.arrival.resume_state.breaks == door.plane.table.table.continuation.max_breaks - 1
    assert door.plane.account.ongoing.mean(1.0, 1.0) == 0.0  # it is counted where it entered
    own = admitted(door, chat())
    assert (own.placing.tries.wait_left_s, own.placing.tries.queue_left_s) == (100, 50)


@pytest.mark.parametrize(
    ("data", "repeatable"),
    [
        (GET, True),
        (post("/up", b"x"), False),
        (post("/up", b"x", b"Idempotency-Key: 1\r\n"), True),
        (chat(), True),
    ],
)
def test_what_may_run_twice_is_known_at_the_beginning(data: bytes, repeatable: bool) -> None:
    assert admitted(Door("a"), data).placing.tries.repeatable is repeatable


def test_a_session_cookie_is_set_once_and_not_for_peers() -> None:
    door = Door("a", session=Session(CookieMode.AUTO))
    request = admitted(door, GET)
    assert request.arrival.lines.startswith(b"Set-Cookie: ")
    assert request.arrival.view.session
    named = GET.replace(b"\r\n\r\n", b"\r\nX-SkyServe-Session: s\r\n\r\n")
    assert (admitted(door, named).arrival.lines, admitted(door, named).arrival.view.session) == (
        b"",
        "s",
    )
    assert admitted(door, GET, HOP).arrival.lines == b""


def test_a_session_may_stand_in_the_body() -> None:
    door = Door("a", table=Table("s", "1", (Target("a", "http://a.test"),), policy="consistent_hash"))
    assert admitted(door, chat(user="ada", stream=False)).arrival.view.session == "ada"
    assert admitted(door, chat(prompt_cache_key="k")).arrival.view.session == ""
    door = Door("a", table=Table("s", "1", (Target("a", "http://a.test"),), policy="gorgo"))
    asked = [
        admitted(door, chat(**more))
        for more in ({"user": "ada"}, {"prompt_cache_key": "k", "session_id": "s"})
    ]
    assert [(one.arrival.view.session, one.arrival.policy) for one in asked] == [("", None), ("k", None)]


def test_pages_of_other_sites_may_call_if_they_are_allowed() -> None:
    door = Door("a", cors=Cors(origins=("https://page.test",)))
    allowed = b"OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nOrigin: https://page.test\r\nAccess-Control-Request-Method: GET\r\n\r\n"
    _, wire = door.send(allowed)
    assert wire.sent.startswith(b"HTTP/1.1 204 ")
    assert b"https://page.test" in wire.sent
    assert door.plane.counts.requests == 0


def test_dots_are_refused_below_a_base_path_only() -> None:
    dots = b"GET /a/%2e%2e/b HTTP/1.1\r\nHost: x\r\n\r\n"
    assert Door("a").status(dots) == 0
    table = Table("s", "1", (Target("a", "http://a.test/base"),))
    assert Door(table=table).status(dots) == 400


def test_who_is_trusted_is_written_in_the_table() -> None:
    table = Table("s", "1", trusted_proxies=("10.0.0.0/8",))
    gate = Door(table=table).gate
    assert [gate.is_trusted_proxy(one) for one in ("10.1.2.3", "::ffff:10.1.2.3", "11.0.0.1", "unknown")] == [
        True,
        True,
        False,
        False,
    ]
    assert not Door("a").gate.is_trusted_proxy("10.1.2.3")


def test_a_new_table_is_in_force_for_all() -> None:
    door = Door("a", limits=Limits(max_body_bytes=10))
    _, wire = door.connect()
    table = Table(
        "service", "2", (Target("b", "http://b.test"),), limits=Limits(max_body_bytes=20), access=keys()
    )
    heads = door.intake.heads
    door.plane.table.apply(table, 1.0)
    door.intake.applied()
    assert door.intake.limits.max_body_bytes == door.plane.dispatch.limits.max_body_bytes == 20
    assert door.intake.heads is not heads
    assert door.status(GET) == 401
    assert wire.sent == b""


# --- models


def test_the_models_of_all_targets_are_listed_here() -> None:
    door = Door("a", "b")
    for name in ("a", "b"):
        key = door.plane.table.key(name)
        assert key is not None
        door.plane.table.listed(
            key, read_models(json.dumps({"object": "list", "data": [{"id": f"m-{name}"}]}).encode())
        )
    _, wire = door.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    listed = json.loads(wire.sent.partition(b"\r\n\r\n")[2])
    assert sorted(one["id"] for one in listed["data"]) == ["m-a", "m-b"]
    assert door.status(b"GET /v1/models/m-a HTTP/1.1\r\nHost: x\r\n\r\n") == 200
    assert door.status(b"GET /v1/models/none HTTP/1.1\r\nHost: x\r\n\r\n") == 404
    head, _ = Reader().request(GET, 100)
    assert model_list.response(head, door.plane.table.models, b"") is None
    asked = post("/v1/completions", b'{"model":"none","prompt":"x"}')
    _, wire = door.send(asked)
    assert b"model_not_found" in wire.sent
    assert door.plane.missing == 1


# --- peers


def peer_door() -> tuple[Door, PeerEntrance]:
    door = Door("a", forwarding=lambda table: Forwarding(table, Regions("me", "here"), 0.0))
    forwarding = door.plane.forwarding
    assert forwarding is not None
    return door, PeerEntrance(door.intake, door.plane.account, forwarding, "p")


def test_a_peer_forwards_requests_and_nothing_else() -> None:
    door, entrance = peer_door()
    refused = entrance.check(Reader().request(GET, 100)[0])
    assert isinstance(refused, Rejection)
    assert refused.code == "no_hop"
    entrance.arrived()
    assert door.plane.forwarding is not None
    assert door.plane.forwarding.forwarded_in["p"] == 1
    assert door.plane.metrics.peers.of("p").requests == 1
    assert door.plane.counts.requests == 0
    assert entrance.cors is None
    assert entrance.is_trusted_proxy("anyone")
    assert isinstance(entrance.runtime, Runtime)


def test_a_peer_may_ask_what_became_of_its_requests() -> None:
    door, entrance = peer_door()
    head, _ = Reader().request(GET, 100)
    request = entrance.begin(Client(), head, b"", Admission.of_peer(HOP))
    assert isinstance(request, ProxiedRequest)
    assert request.arrival.explanation.targets_of(CAME) == ["p"]
    request_id = request.arrival.request_id.decode()
    asked, _ = Reader().request(b"GET %b%b HTTP/1.1\r\nHost: x\r\n\r\n" % (EXPLAIN, request_id.encode()), 100)
    found = entrance.check(asked)
    assert isinstance(found, bytes)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert door.plane.forwarding is not None
    other = PeerEntrance(door.intake, door.plane.account, door.plane.forwarding, "q").check(asked)
    assert isinstance(other, bytes)
    assert other.startswith(b"HTTP/1.1 404 ")
    entrance.refused(NO_ROOM)
    entrance.client_gone()
    assert (door.plane.counts.errors[NO_ROOM.code], door.plane.counts.client_gone) == (1, 1)
    assert request.state is State.CHOOSING


# --- what routing policies learn


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Lessons:
    """A door whose routing policy notes what is reported to it: each request, and the tokens of its response."""

    def __init__(self, **more: Any) -> None:
        table = Table("service", "1", (Target("a", "http://a.test:80"),), policy="gorgo", **more)
        self.door = Door(table=table)
        self.seen: list[tuple[RequestView, int | None]] = []
        self.door.plane.table.policies.on_ended.append(
            lambda view, _target, _now, tokens: self.seen.append((view, tokens))
        )

    def of(self, asked: dict[str, Any], key: str = "", tokens: int = 1) -> RequestView:
        """Send a chat that an engine of an unknown kind answers: a stream has no usage, a whole response has."""
        bearer = f"Authorization: Bearer {key}\r\n".encode() if key else b""
        self.door.send(post(CHAT.decode(), json.dumps(asked).encode(), bearer))
        if asked.get("stream"):
            event = b'data: {"choices":[{"index":0,"delta":{"content":" x"}}]}\n\n'
            chunks = [
                b"%x\r\n%b\r\n" % (len(data), data) for data in (*[event] * tokens, b"data: [DONE]\n\n", b"")
            ]
            response = STREAM + b"".join(chunks)
        else:
            usage = {"prompt_tokens": 3, "completion_tokens": tokens}
            response = whole(json.dumps({"choices": [], "usage": usage}).encode())
        self.door.plane.answer("a", response)
        self.door.plane.loop.settle()
        return self.seen[-1][0]


def asks(model: str = "m", content: Any = "hello there", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **more}


@pytest.mark.parametrize("stream", [True, False], ids=["streamed without usage", "in one piece"])
def test_policies_learn_how_long_a_response_was(stream: bool) -> None:
    lessons = Lessons()
    for tokens in (12, 350):
        lessons.of(asks(stream=stream), tokens=tokens)
    assert [tokens for _, tokens in lessons.seen] == [12, 350]


def test_policies_know_of_whom_and_of_which_model_a_response_was_and_the_clients_limit() -> None:
    lessons = Lessons(access=Access((api_key("alice", "ka"), api_key("bob", "kb"))))
    same = [lessons.of(asks(model), key) for model in ("short", "long") for key in ("ka", "kb")]
    assert len({view.scope for view in same}) == 4
    assert lessons.of(asks("short"), "ka").scope == same[0].scope
    assert [lessons.of(asks(**more), "ka").max_tokens for more in ({}, {"max_tokens": 10})] == [0, 10]


def test_without_keys_policies_know_the_model() -> None:
    lessons = Lessons()
    assert len({lessons.of(asks(model)).scope for model in ("short", "long", "short")}) == 2


def test_prompts_are_measured_without_the_json_around_them_and_images_by_what_they_cost() -> None:
    lessons, words = Lessons(), "hello there"
    size = prompt_bytes(lessons.of(asks(content=words, metadata={"x": "y" * 4000})))
    assert len(words) <= size <= len(words) + 12
    image = {"url": "data:image/png;base64," + base64.b64encode(bytes(300_000)).decode()}
    parts = [{"type": "text", "text": words}, {"type": "image_url", "image_url": image}]
    assert 512 * BYTES_PER_TOKEN <= prompt_bytes(lessons.of(asks(content=parts))) <= 520 * BYTES_PER_TOKEN
