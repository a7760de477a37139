"""The fault barrier: whatever of the proxy's code raises, one request ends of it, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import lb.proxy.request
from lb.config.options import Limits, Pushing, PushMode, Retries
from lb.config.schema import Table, Target
from lb.core import scheduler
from lb.core.api_keys import ApiKeyStore
from lb.core.scheduler import Scheduler
from lb.core.targets import TargetTable
from lb.engines.kinds import EngineKind
from lb.proxy.account import Account
from lb.proxy.attempt import Attempt
from lb.proxy.downstream import ClientConnection
from lb.proxy.placing import Placing
from lb.proxy.relay import PlainRelay
from lb.proxy.request import ProxiedRequest
from lb.proxy.responding import Responding
from lb.proxy.resumable_relay import ResumableRelay
from lb.proxy.states import TABLE, RequestEvent, State, TransitionError, move
from lb.stream.resume_state import ResumeState
from policies.routing.round_robin import RoundRobin

from .lb_wires import DIES, Bench, Peer, Seen, plainly, run, settle

GET = b"GET /plain HTTP/1.1\r\nHost: x\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def post(path: bytes, body: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path, len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str, finish: str = "null") -> bytes:
    return chunk(
        b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":%b}]}\n\n'
        % (text.encode(), finish.encode())
    )


CHAT = post(
    b"/v1/chat/completions", b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}'
)
DONE = event("", '"stop"') + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Scenario:
    """Requests of every kind, each on a connection of its own: what a target does follows from the path."""

    def __init__(self) -> None:
        limits = Limits(hold_s=5, max_held=1, time_to_first_byte_s=20, buffer_bytes=1000, idle_timeout_s=10)
        table = Table(
            "service",
            "r1",
            tuple(Target(f"t{number}", f"http://192.0.2.9:{8000 + number}") for number in range(2)),
            policy="round_robin",
            limits=limits,
            retries=Retries(max_total_retries=2),
            pushing=Pushing(PushMode.FIXED_CAP, cap=2),
        )
        self.bench = Bench(self.behave, table=table, kind=EngineKind.VLLM)
        self.bench.on_head = self.on_head
        self.died: set[bytes] = set()
        self.bench.watch()
        self.chats = 0

    def on_head(self, peer: Peer, seen: Seen) -> None:
        if seen.target == b"/dies" and seen.target not in self.died:
            self.died.add(seen.target)
            peer.wire.feed(DIES)

    def behave(self, seen: Seen) -> list[bytes]:
        if seen.target.startswith(b"/v1/"):
            self.chats += 1
            if self.chats == 1:
                return [STREAM_HEAD + event("one"), event("two"), DIES]
            return [STREAM_HEAD + event("three"), DONE]
        if seen.target == b"/busy":
            return [plainly(b"busy", status=b"503 Service Unavailable")]
        if seen.target == b"/stream":
            return [STREAM_HEAD, chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n"), b"0\r\n\r\n"]
        if seen.target in (b"/never", b"/half"):
            return [STREAM_HEAD + chunk(b"data: 1\n\n")] if seen.target == b"/half" else []
        return [plainly(b"well")]

    async def play(self) -> None:
        """Every way that a request can take."""
        for data in (GET, CHAT):
            await self._one(data)
        for path in (b"/dies", b"/busy", b"/stream"):
            await self._one(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        upload = self.bench.client()
        data = post(b"/upload", b"x" * 5000)
        await upload.send_slowly(data[:2000], data[2000:3000], data[3000:])
        upload.wire.take()
        upload.wire.feed(DIES)
        leaves = self.bench.client()
        await leaves.send_slowly(b"GET /half HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(3)
        leaves.wire.feed(DIES)
        await settle()
        waiting = [
            self.bench.client() for _ in range(6)
        ]  # four fill the targets, one waits, one is turned away
        for client in waiting:
            client.send(b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(1)
        waiting[0].wire.feed(DIES)  # makes room for the one that waits
        await asyncio.sleep(1)
        late = self.bench.client()
        waiting.append(late)
        late.send(b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n")  # and waits in vain
        await asyncio.sleep(30)
        for client in waiting:
            client.wire.feed(DIES)
        await settle()

    async def _one(self, data: bytes) -> None:
        client = self.bench.client()
        client.send(data)
        await asyncio.sleep(3)
        client.wire.take()
        client.wire.feed(DIES)
        await settle()

    async def still_serves(self) -> None:
        await asyncio.sleep(120)  # ejections run out
        for _ in range(4):
            client = self.bench.client()
            client.send(GET)
            await settle()
            assert [(got.status, got.body) for got in client.answers(b"GET")] == [(200, b"well")]
            client.wire.feed(DIES)
            await settle()
        self.bench.check()
        assert not self.bench.runtime.clients


replaces_methods = pytest.mark.skipif(
    lb.proxy.request.__file__.endswith(".so"),
    reason="a compiled class calls its own methods, not those put in their place",
)


ENTRANCES: list[tuple[type | ModuleType, str]] = [
    *((ProxiedRequest, name) for name in ("place", "responded_whole", "client_lost", "more_body", "end")),
    *(
        (Placing, name)
        for name in ("place", "admitted", "expired", "outgoing", "attempt_failed", "goes_on", "out_of_time")
    ),
    *((Responding, name) for name in ("send_whole", "begin_relay", "relayed", "broke")),
    *((Attempt, name) for name in ("start", "target_data", "target_lost", "give_back", "drop")),
    *((PlainRelay, name) for name in ("__init__", "data", "pulse")),
    *((ResumableRelay, name) for name in ("__init__", "data", "resume", "next_leg", "tokens", "halt")),
    *((ResumeState, name) for name in ("outgoing", "merger")),
    *((ClientConnection, name) for name in ("_take_head", "_take_body", "_begin", "next", "send_soon")),
    *((TargetTable, name) for name in ("book", "responded", "failed", "release", "outlook")),
    (scheduler, "choose"),
    *((Scheduler, name) for name in ("place", "enqueue", "let_in")),
    *((ApiKeyStore, name) for name in ("admit_head", "settle")),
    *((Account, name) for name in ("spent", "ended")),
    (RoundRobin, "choose"),
]


@replaces_methods
@pytest.mark.parametrize(("owner", "name"), ENTRANCES, ids=lambda one: getattr(one, "__name__", one))
def test_an_exception_ends_one_request_and_nothing_else(
    owner: type | ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        scenario = Scenario()
        raised = 0
        original: Callable[..., Any] = getattr(owner, name)

        def raises_once(*arguments: Any, **keywords: Any) -> Any:
            nonlocal raised
            if not raised:
                raised += 1
                raise ZeroDivisionError("on purpose")
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, raises_once)
        await scenario.play()
        monkeypatch.setattr(owner, name, original)
        assert raised == 1, "the scenario does not come here"
        assert scenario.bench.runtime.faults.total >= 1
        await scenario.still_serves()

    run(story())


@replaces_methods
def test_a_client_is_told_of_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        scenario = Scenario()

        def raises(*_: Any) -> Any:
            raise ZeroDivisionError

        monkeypatch.setattr(RoundRobin, "choose", raises)
        client = scenario.bench.client()
        client.send(GET)
        await settle()
        (got,) = client.answers(b"GET")
        assert (got.status, b"internal_error" in got.body) == (500, True)
        assert scenario.bench.runtime.faults.total == 1
        monkeypatch.undo()
        await scenario.still_serves()

    run(story())


@replaces_methods
def test_a_begun_stream_ends_with_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        scenario = Scenario()
        scenario.chats = 1
        pieces = [STREAM_HEAD + event("one"), event("two"), DONE]
        scenario.bench.behave = lambda seen: pieces
        walk, calls = ResumableRelay.data, 0

        def raises_second(relay: ResumableRelay, data: bytes) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise ZeroDivisionError
            walk(relay, data)

        monkeypatch.setattr(ResumableRelay, "data", raises_second)
        client = scenario.bench.client()
        client.send(CHAT)
        await asyncio.sleep(1)
        (got,) = client.answers(b"POST")
        assert (got.status, got.whole) == (200, True)
        assert b'"one"' in got.body
        assert b"internal_error" in got.body
        assert b"[DONE]" not in got.body
        scenario.bench.check()

    run(story())


def test_one_kind_of_error_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        bench = Bench()
        for _ in range(5):
            try:
                raise ZeroDivisionError
            except ZeroDivisionError as error:
                bench.runtime.faults.report("test", error)
        assert bench.runtime.faults.total == 5
        assert len(caplog.records) == 1
        await asyncio.sleep(61)

    run(story())


def test_the_table_of_states() -> None:
    assert move(State.QUEUED, RequestEvent.CHOSEN) is State.ATTEMPTING
    assert all(
        row.get(RequestEvent.ENDED) is State.DONE for state, row in TABLE.items() if state is not State.DONE
    )
    assert not TABLE[State.DONE]
    with pytest.raises(TransitionError, match="done cannot be ended"):
        move(State.DONE, RequestEvent.ENDED)


def test_every_state_can_be_reached_and_left() -> None:
    reached = {after for row in TABLE.values() for after in row.values()}
    assert reached == set(State)
