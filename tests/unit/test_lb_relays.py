"""Relays without sockets: when a stream is complete, what it is charged, and how often a verdict is worked out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lb.config.options import Continuation, Continue
from lb.core.failures import Failure
from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT
from lb.http.body_framing import LAST_CHUNK, ChunkedDecoder, CloseDelimitedDecoder, chunk
from lb.http.messages import RequestHead, ResponseHead, response_bytes
from lb.http.upstream import Pool, TargetConnection
from lb.proxy.fast_path import FastPath, StopReason
from lb.proxy.forwarded_relay import ForwardedRelay
from lb.proxy.ports import RelayHost
from lb.proxy.relay import PlainRelay
from lb.proxy.resumable_relay import ResumableRelay
from lb.stream.kept_events import KeptEvents, PlainEvents
from lb.stream.openai_request import read
from lb.stream.resume_rules import Reason
from lb.stream.resume_state import ResumeState

DONE = b"data: [DONE]\n\n"


class Host:
    """A request that notes what its relay reports."""

    def __init__(self, *kinds: EngineKind) -> None:
        self.sent = b""
        self.events: list[Any] = []
        self.kinds: set[EngineKind] = set(kinds)
        self.status = 0
        self.continues = True
        self.is_early = False
        self.fast_path = None
        self.connection: Any = None
        self.head = RequestHead()
        self.request_id = b"r"
        self.client = SimpleNamespace(transport=self, closing=False)

    def write(self, data: bytes) -> None:
        self.sent += data

    def call_soon(self, callback: Callable[[], None]) -> None:
        raise AssertionError("there is no fast path")

    def response_head(self, response: ResponseHead, framing: bytes) -> bytes:
        return response_bytes(response, self.request_id, framing)

    def connection_line(self) -> bytes:
        return b""

    def relayed(self, rest: bool, reusable: bool = True) -> None:
        self.events.append("relayed")

    def broke(self, failure: Failure, why: str) -> None:
        self.events.append(failure)

    def cut(self, why: str) -> None:
        self.events.append("cut")

    def ended_early(self) -> None:
        self.events.append("ended_early")

    def ended_in_error(self, code: str) -> None:
        self.events.append(code)

    def kinds_elsewhere(self, *, now_or_later: bool) -> set[EngineKind]:
        return self.kinds

    def crashed(self, entrance: str, error: Exception) -> None:
        self.events.append(error)

    def not_resumed(self, reason: Reason) -> None:
        self.events.append(reason)

    def resumed_inexactly(self, reason: Reason) -> None:
        self.events.append(("inexact", reason))


def response(content_type: bytes = b"text/event-stream") -> ResponseHead:
    head = ResponseHead()
    head.status, head.lines, head.content_type = 200, b"HTTP/1.1 200 OK", content_type
    return head


def event(text: str = "", finish: str | None = None, ids: list[int] | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    whole = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(whole | more, separators=(",", ":")).encode() + b"\n\n"


def resumable(
    host: Host,
    *,
    chunked: bool = True,
    kind: EngineKind = EngineKind.VLLM,
    mode: Continue = Continue.AUTO,
    **request: Any,
) -> ResumableRelay:
    asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}], **request}
    body = json.dumps(asked).encode()
    state = ResumeState(CHAT, read(body), body, Continuation(mode=mode))
    state.outgoing(kind)
    decoder = ChunkedDecoder() if chunked else CloseDelimitedDecoder()
    return ResumableRelay(cast(RelayHost, host), state, response(), decoder)


def body_of(host: Host) -> bytes:
    payloads: list[bytes] = []
    ChunkedDecoder(payloads).feed(host.sent.partition(b"\r\n\r\n")[2])
    return b"".join(payloads)


HELLO, STOP = event("Hello"), event("", "stop")
TALK = event("the mark is data: [DONE]\n\n and [DONE]")


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(
    ("events", "missing"),
    [
        pytest.param([HELLO, STOP, DONE], b"", id="an end mark"),
        pytest.param([HELLO, STOP, DONE, b": bye\n\n"], b"", id="a comment after the end mark"),
        pytest.param([HELLO, STOP], DONE, id="a finish reason"),
        pytest.param([HELLO, STOP, b"data: [DONE]\n"], DONE, id="an end mark without its empty line"),
        pytest.param([HELLO, STOP, b"data: [DO"], DONE, id="half an end mark"),
        pytest.param([HELLO], None, id="text"),
        pytest.param([HELLO, TALK], None, id="text that speaks of end marks"),
        pytest.param([HELLO[:60]], None, id="half of the first event"),
        pytest.param([HELLO, TALK[:-30]], None, id="half of a later event"),
        pytest.param([b": still here\n\n"], None, id="a comment"),
    ],
)
def test_a_stream_is_complete_if_its_last_event_says_so(
    chunked: bool, events: list[bytes], missing: bytes | None
) -> None:
    host = Host()
    relay = resumable(host, chunked=chunked)
    for one in events:
        relay.data(chunk(one) if chunked else one)
    if chunked:
        relay.data(LAST_CHUNK)
    else:
        assert relay.ended()
    if missing is None:
        assert host.events == [Failure.SHORT]
        assert not host.sent.endswith(LAST_CHUNK)
    else:
        assert host.events == ["relayed"]
        whole = [one for one in events if one.endswith(b"\n\n")]
        assert body_of(host) == b"".join(whole) + missing
        assert host.sent.endswith(LAST_CHUNK)


def test_a_stream_that_ends_after_its_finish_reason_gets_the_usage_that_its_client_wants() -> None:
    host = Host()
    relay = resumable(host, stream_options={"include_usage": True})
    first = event("Hel", ids=[5], prompt_token_ids=[1, 2, 3])
    for one in (first, event("lo", ids=[6, 7]), event("", "stop", ids=[])):
        relay.data(chunk(one))
    relay.data(LAST_CHUNK)
    *_, usage, done, _ = body_of(host).split(b"\n\n")
    assert json.loads(usage[6:])["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert done == b"data: [DONE]"
    assert b"token_ids" not in body_of(host)


@pytest.mark.parametrize("mode", [Continue.AUTO, Continue.EXACT])
def test_a_usage_that_no_engine_has_reported_is_reported_as_lost(mode: Continue) -> None:
    host = Host()
    wants = {"stream_options": {"include_usage": True}}
    relay = resumable(host, kind=EngineKind.LLAMACPP, mode=mode, **wants)
    for one in (event("Hel"), event("lo"), event("", "stop")):
        relay.data(chunk(one))
    goes_on = mode is Continue.EXACT  # to where it is refused: there is nothing left to be made
    assert relay.resume("died") is goes_on
    assert body_of(host).endswith(b"data: [DONE]\n\n") is not goes_on
    assert (("inexact", Reason.USAGE) in host.events) is not goes_on


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("mode", [Continue.AUTO, Continue.EXACT])
def test_a_usage_that_a_closed_stream_lacks_is_reported_as_lost_also_where_nothing_could_be_continued(
    mode: Continue, chunked: bool
) -> None:
    host = Host()
    wants = {"stream_options": {"include_usage": True}, "frequency_penalty": 0.5}
    relay = resumable(host, chunked=chunked, kind=EngineKind.LLAMACPP, mode=mode, **wants)
    for one in (event("Hel"), event("lo"), event("", "stop")):
        relay.data(chunk(one) if chunked else one)
    if chunked:
        relay.data(LAST_CHUNK)
    else:
        assert relay.ended()
    lost = [("inexact", Reason.USAGE), "relayed"] if mode is Continue.AUTO else [Failure.SHORT]
    assert host.events == lost
    assert body_of(host).endswith(b"data: [DONE]\n\n") is (mode is Continue.AUTO)


@pytest.mark.parametrize("way", ["by ids", "by usage", "by events"])
def test_the_tokens_of_a_stream_are_counted_and_not_its_reads(way: str) -> None:
    more: dict[str, Any] = (
        {"tools": [{"type": "function", "function": {"name": "f"}}]} if way == "by usage" else {}
    )
    relay = resumable(Host(), kind=EngineKind.UNKNOWN if way == "by events" else EngineKind.VLLM, **more)
    events = b""
    for made in range(2, 202, 2):
        says: dict[str, Any] = {}
        if way == "by ids":
            says["ids"] = [made, made + 1]
        if way == "by usage":
            says["usage"] = {"prompt_tokens": 9, "completion_tokens": made, "total_tokens": 9 + made}
        events += chunk(event(" ab", **says))
    relay.data(chunk(event("", **({"ids": []} if way == "by ids" else {}))) + events)
    assert relay.chunks == 1
    assert relay.generated() == (100 if way == "by events" else 200)


ANTHROPIC = [
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":50,"output_tokens":1}}}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"t"}}\n\n'
    * 3,
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":12}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
]
RESPONSES = [
    b'data: {"type":"response.created","response":{"usage":null}}\n\n',
    b'data: {"type":"response.output_text.delta","delta":"t"}\n\n' * 3,
    b'data: {"type":"response.completed","response":{"output":[],"usage":{"input_tokens":50,"output_tokens":12,'
    b'"output_tokens_details":{"reasoning_tokens":4}},"user":null}}\n\n',
]
SGLANG = [
    b'data: {"text":"%s","meta_info":{"id":"x","prompt_tokens":50,"completion_tokens":%d}}\n\n' % (b"t" * n, 4 * n)
    for n in (1, 2, 3)
]  # fmt: skip
OLLAMA = [
    b'{"message":{"content":"t"},"done":false}\n' * 3,
    b'{"done":true,"prompt_eval_count":50,"eval_count":12}\n',
]


@pytest.mark.parametrize(
    ("events", "content_type", "counted"),
    [
        pytest.param(ANTHROPIC, b"text/event-stream; charset=utf-8", 3, id="/v1/messages"),
        pytest.param(RESPONSES, b"text/event-stream", 3, id="/v1/responses"),
        pytest.param(SGLANG, b"text/event-stream", 4, id="/generate"),
        pytest.param(OLLAMA, b"application/x-ndjson", 3, id="/api/chat"),
    ],
)
def test_streams_of_other_apis_are_counted(events: list[bytes], content_type: bytes, counted: int) -> None:
    host = Host()
    relay = PlainRelay(cast(RelayHost, host), response(content_type), ChunkedDecoder())
    relay.data(b"".join(map(chunk, events[:1])))
    if events in (ANTHROPIC, RESPONSES):  # which begin with an event of another kind
        relay.data(chunk(events[1]))
    assert relay.generated() == counted
    relay.data(
        b"".join(map(chunk, events[1:])) + LAST_CHUNK
    )  # some events once more; the report at the end is exact
    tokens = relay.tokens()
    assert tokens is not None
    assert (tokens.prompt, tokens.out, relay.generated()) == (50, 12, 12)
    assert host.events == ["relayed"]


def test_other_bodies_are_not_counted() -> None:
    relay = PlainRelay(cast(RelayHost, Host()), response(b"application/octet-stream"), ChunkedDecoder())
    relay.data(chunk(HELLO))
    assert (relay.generated(), relay.tokens()) == (0, None)


class Kinds(set[EngineKind]):
    """Kinds of engines that count how often a verdict asks for them."""

    asked = 0

    def __iter__(self) -> Iterator[EngineKind]:
        self.asked += 1
        return super().__iter__()


def test_a_verdict_on_a_silent_stream_is_worked_out_once_for_each_circumstance() -> None:
    host = Host()
    host.kinds = vllm = Kinds({EngineKind.VLLM})
    relay = resumable(host)
    relay.data(chunk(event("Hello", ids=[5], prompt_token_ids=[1])))
    assert [relay.may_continue() for _ in range(5)] == [True] * 5
    host.kinds = nothing = Kinds()
    assert [relay.may_continue() for _ in range(5)] == [False] * 5
    relay.data(chunk(STOP))
    assert [relay.may_continue() for _ in range(5)] == [True] * 5  # only the end mark is missing
    assert (vllm.asked, nothing.asked) == (1, 1)


def test_an_event_that_is_passed_in_pieces_makes_a_stream_that_cannot_be_resumed() -> None:
    host = Host(EngineKind.VLLM)
    relay = resumable(host)
    relay.data(chunk(event("a" * 300_000)[:-100]))
    assert not relay.may_continue()


def test_what_orjson_does_not_write_is_sent_as_it_came_and_not_resumed() -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    host = Host(EngineKind.VLLM)
    body = json.dumps(
        {
            "stream": True,
            "messages": [{"role": "user", "content": "x"}],
            "return_token_ids": False,
            "zzz": deep,
        }
    ).encode()
    state = ResumeState(CHAT, read(body), body, Continuation())
    assert state.outgoing(EngineKind.VLLM) == (None, body)
    relay = ResumableRelay(cast(RelayHost, host), state, response(), ChunkedDecoder())
    relay.data(chunk(HELLO))
    assert not relay.may_continue()


def connected(transport: Any) -> TargetConnection:
    connection = TargetConnection(Pool("http://192.0.2.9:80", None, {}))
    connection.transport = transport
    return connection


class Forwarding:
    """One that has passed what it is given."""

    def __init__(self, passed: bytes = b"") -> None:
        self.passed = passed

    def stop(self) -> None: ...
    def take(self) -> bytes:
        passed, self.passed = self.passed, b""
        return passed

    def take_packed(self) -> KeptEvents:
        events = PlainEvents()
        events.add(self.take())
        return events

    def held_bytes(self) -> int:
        return len(self.passed)

    def pulse(self) -> bool:
        return False

    def counts(self) -> tuple[int, int, int, int]:
        return 0, 0, 0, 0


def test_an_exception_behind_a_forwarding_ends_its_request_and_leaves_the_others_alone() -> None:
    host = Host()
    host.connection = connected(SimpleNamespace(resume_reading=lambda: 1 / 0))
    relay = resumable(host)
    relay._forwarding = Forwarding()
    relay.forwarding_stopped(StopReason.IRREGULAR, chunk(HELLO))
    (error,) = host.events
    assert isinstance(error, ZeroDivisionError)


class Wire:
    """A plain connection, and whether the event loop reads it. `waiting` bytes are not written yet."""

    def __init__(self, descriptor: int, waiting: int = 0) -> None:
        self.descriptor, self.waiting = descriptor, waiting
        self.sent = b""
        self.reads = True

    def get_extra_info(self, name: str) -> Any:
        return SimpleNamespace(fileno=lambda: self.descriptor) if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.sent += data

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Helper:
    """The fast path's helper: notes the forwardings that it opens, and returns what a test says has stopped."""

    def __init__(self) -> None:
        self.opened: list[Forwarding] = []
        self.stopped: list[tuple[ForwardedRelay, int, bytes]] = []
        self.turn: Callable[[], None] = lambda: None

    def add_reader(self, descriptor: int, callback: Callable[[], None]) -> None:
        self.turn = callback

    def fileno(self) -> int:
        return 0

    def forwarding(self, source: int, sink: int, limit_bytes: int, owner: object, mode: int) -> Forwarding:
        self.opened.append(Forwarding())
        return self.opened[-1]

    def run(self) -> list[tuple[ForwardedRelay, int, bytes]]:
        stopped, self.stopped = self.stopped, []
        return stopped


class ForwardingHost(Host):
    """A request whose stream goes through a forwarding."""

    def __init__(self, helper: Helper, fast_path: FastPath) -> None:
        super().__init__(EngineKind.VLLM)
        self.fast_path: Any = fast_path
        self.sink, self.source = Wire(4), Wire(5)
        self.client = SimpleNamespace(transport=self.sink, closing=False, body_left=False)
        self.connection = connected(self.source)
        self.relay = resumable(self)
        self.relay.data(chunk(event("Hello", ids=[5], prompt_token_ids=[1])))
        self.forwarding = helper.opened[-1]
        self.sink.sent = b""

    def call_soon(self, callback: Callable[[], None]) -> None:
        callback()


class ResumingHost(ForwardingHost):
    """A request at whose end the stream of another one has to go on elsewhere."""

    def __init__(self, helper: Helper, fast_path: FastPath, other: ForwardingHost) -> None:
        super().__init__(helper, fast_path)
        self.other = other

    def relayed(self, rest: bool, reusable: bool = True) -> None:
        self.other.relay.resume("its target is gone")


@pytest.fixture
def helper() -> Helper:
    return Helper()


@pytest.fixture
def fast_path(helper: Helper) -> FastPath:
    return FastPath(helper, cast(Any, helper))


def test_a_forwarding_that_is_full_is_followed_by_another(helper: Helper, fast_path: FastPath) -> None:
    host = ForwardingHost(helper, fast_path)
    helper.opened[0].passed = chunk(HELLO)
    helper.stopped = [(host.relay, StopReason.FULL, b"")]
    helper.turn()
    assert (host.events, len(helper.opened), host.source.reads) == ([], 2, False)


def test_the_event_loop_reads_where_a_client_is_too_slow_for_another(
    helper: Helper, fast_path: FastPath
) -> None:
    host = ForwardingHost(helper, fast_path)
    host.sink.waiting = 1
    helper.stopped = [(host.relay, StopReason.FULL, b"")]
    helper.turn()
    assert (host.events, len(helper.opened), host.source.reads) == ([], 1, True)


def test_what_is_unsent_goes_to_its_client_before_another_stream_can_end_the_forwarding(
    helper: Helper, fast_path: FastPath
) -> None:
    """The client gets all that the transcript has, and then what continues it."""
    second = ForwardingHost(helper, fast_path)
    first = ResumingHost(helper, fast_path, second)
    passed = chunk(event(" world", ids=[6])) + chunk(event("", "stop", ids=[]))
    second.forwarding.passed = passed
    helper.stopped = [
        (first.relay, StopReason.IRREGULAR, chunk(STOP) + chunk(DONE) + LAST_CHUNK),
        (second.relay, StopReason.UNSENT, passed[20:]),
    ]
    helper.turn()
    assert second.events == ["ended_early"]
    assert second.sink.sent == passed[20:] + chunk(DONE) + LAST_CHUNK


def test_what_was_read_for_a_forwarding_that_is_given_up_is_not_taken_for_the_next_response(
    helper: Helper, fast_path: FastPath
) -> None:
    second = ForwardingHost(helper, fast_path)
    first = ResumingHost(helper, fast_path, second)
    helper.stopped = [
        (first.relay, StopReason.IRREGULAR, chunk(STOP) + chunk(DONE) + LAST_CHUNK),
        (second.relay, StopReason.IRREGULAR, chunk(event(" world", ids=[6])) + chunk(DONE)),
    ]
    helper.turn()
    assert (second.events, second.sink.sent, second.source.reads) == ([], b"", False)


def test_an_error_in_one_chunk_with_a_token_is_the_failure_of_the_engine() -> None:
    host = Host(EngineKind.VLLM)
    relay = resumable(host, kind=EngineKind.UNKNOWN)
    relay.data(chunk(HELLO + b'data: {"error":{"message":"died"}}\n\n'))
    assert host.events == [Failure.GAVE_UP]
    assert body_of(host) == HELLO


def test_a_stream_that_advances_may_break_often_and_one_that_does_not_ends() -> None:
    host = Host(EngineKind.VLLM)
    relay = resumable(host)
    relay.data(chunk(event("Hello", ids=[1], prompt_token_ids=[9])))
    state = relay._resume_state
    for leg in range(10):
        assert relay.resume("it broke")
        state.outgoing(EngineKind.VLLM)
        relay.next_leg(ChunkedDecoder())
        choice = {"index": 0, "text": " more", "finish_reason": None, "token_ids": [2 + leg]}
        relay.data(chunk(b"data: " + json.dumps({"id": "y", "choices": [choice]}).encode() + b"\n\n"))
    for _ in range(state.options.max_breaks):
        assert relay.resume("it broke")
        state.outgoing(EngineKind.VLLM)
        relay.next_leg(ChunkedDecoder())
    assert host.events == []
    assert not relay.resume("it broke")
    assert host.events == [Reason.TOO_OFTEN, "stream_interrupted"]
    assert b"(broken_too_often)" in host.sent


def test_a_leg_that_does_not_continue_the_stream_ends_it_with_an_error() -> None:
    host = Host(EngineKind.VLLM)
    relay = resumable(host, seed=3)
    relay.data(chunk(event("Hello", ids=[1], prompt_token_ids=[9])))
    assert relay.resume("it broke")
    relay._resume_state.outgoing(EngineKind.VLLM)
    relay.next_leg(ChunkedDecoder())
    choice = {"index": 0, "text": "Good evening", "finish_reason": None, "prompt_token_ids": [9]}
    relay.data(chunk(b"data: " + json.dumps({"id": "y", "choices": [choice]}).encode() + b"\n\n"))
    assert host.events == [("inexact", Reason.SEED), Reason.MISMATCH, "stream_interrupted"]
    assert b"Good evening" not in host.sent
    assert b"(mismatch)" in host.sent
