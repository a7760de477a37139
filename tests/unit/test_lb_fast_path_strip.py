"""What the helper in C removes and counts is what Python removes and counts, on the streams of every engine and on noise."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT, COMPLETIONS
from lb.http.body_framing import ChunkedDecoder, chunk
from lb.proxy.fast_path import ForwardingMode, StopReason
from lb.stream.first_request import Strip, prepare
from lb.stream.stream_merge import stripper
from lb.stream.token_usage import OutputCounter
from tests.unit.stream_engines import MODEL, stream

native = pytest.importorskip(
    "lb.proxy._fast_path", reason="the helper is not built: no C compiler at installation"
)

MODES = {
    Strip.NOTHING: ForwardingMode.EVENTS,
    Strip.IDS: ForwardingMode.WITHOUT_IDS,
    Strip.COUNTS: ForwardingMode.WITHOUT_USAGE,
    Strip.USAGE: ForwardingMode.WITHOUT_USAGE,
}


class Passed:
    """What came out of one read: `payload` is None if it went back to Python."""

    def __init__(self, payload: bytes | None, counts: tuple[int, int, int, int], kept: bytes) -> None:
        self.payload = payload
        self.counts = counts
        self.kept = kept


@pytest.fixture(scope="module")
def wires() -> Iterator[Any]:
    """Sends one read through a forwarding of its own."""
    engine, source = socket.socketpair()
    sink, client = socket.socketpair()
    for one in (engine, source, sink, client):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    fast_path = native.FastPath()

    def send(data: bytes, mode: ForwardingMode) -> Passed:
        forwarding = fast_path.forwarding(source.fileno(), sink.fileno(), 1 << 20, None, mode)
        engine.sendall(data)
        stopped = fast_path.run()
        counts, kept = forwarding.counts(), forwarding.take()
        forwarding.stop()
        if stopped:
            assert stopped == [(None, StopReason.IRREGULAR, data)]
            assert (counts, kept) == ((0, 0, 0, 0), b"")
            return Passed(None, counts, kept)
        received = client.recv(1 << 20)
        assert counts[1] == len(received)
        return Passed(unframed(received), counts, kept)

    yield send
    for one in (engine, source, sink, client):
        one.close()


def unframed(data: bytes) -> bytes:
    payloads: list[bytes] = []
    assert ChunkedDecoder(payloads).feed(data) == -1
    return b"".join(payloads)


def check(wires: Any, payloads: list[bytes], strip: Strip) -> bool:
    """Whether the payloads, as chunks of one read, have passed; then they must be what Python makes of them."""
    events, data = b"".join(payloads), b"".join(map(chunk, payloads))
    passed = wires(data, MODES[strip])
    if passed.payload is None:
        return False
    python = stripper(strip)
    assert passed.payload == (events if python is None else python(events))
    counter = OutputCounter()
    counter.add(events)
    assert passed.counts == (len(payloads), passed.counts[1], counter.events, counter.ids)
    assert passed.kept == data
    return True


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.SGLANG, EngineKind.SKYSERVE])
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="plain"),
        pytest.param({"tools": [{"type": "function", "function": {"name": "f"}}]}, id="with tools"),
        pytest.param({"stream_options": {"include_usage": True}}, id="usage at the end"),
        pytest.param({"return_token_ids": True}, id="the client wants ids"),
        pytest.param({"stop": ["zz"]}, id="with a stop string"),
    ],
)
@pytest.mark.parametrize(("together", "burst"), [(1, 1), (3, 1), (2, 4)])
def test_engines(
    wires: Any, kind: EngineKind, path: bytes, more: dict[str, Any], together: int, burst: int
) -> None:
    prompt = {"messages": [{"role": "user", "content": "Hello"}]} if path == CHAT else {"prompt": "Hello"}
    request = {"model": MODEL, "stream": True, "max_tokens": 24, "ignore_eos": True, **prompt, **more}
    if kind is EngineKind.SGLANG and path == CHAT:
        request.pop("return_token_ids", None)  # it would refuse
    ready = prepare(path, request, kind)
    events = stream(kind, path, {**request, **ready.fields}, 0, burst)
    reads = [events[at : at + together] for at in range(0, len(events), together)]
    passed = sum(check(wires, read, ready.strip) for read in reads)
    # What ends a stream goes back to Python: the end mark, and the usage, which has no choices.
    assert passed >= len(reads) - 2


PIECES = st.sampled_from(
    [
        b'"id":"x"', b'"choices":[]', b'"choices":[{"delta":{"content":"a"}}]', b'"choices":[{"text":""}]',
        b'"token_ids":[1,2,3]', b'"token_ids":[]', b'"token_ids":null', b'"token_ids": [1]', b'"token_ids":[1, 2]',
        b'"token_ids":[-1]', b'"token_ids":{}', b'"prompt_token_ids":[7]', b'"prompt_token_ids":null',
        b'"other_token_ids":[1]', b'"text":"\\",\\"token_ids\\":[1]"', b'"token_ids":[',
        b'"usage":null', b'"usage":{}', b'"usage":{"a":1}', b'"usage":{"a":{"b":2},"c":{}}', b'"usage": {"a":1}',
        b'"usage":{"a":{"b":{}}}', b'"usage":{"a":"}"}', b'"usage":{"a":"{"}', b'"usage":3', b'"usage" :{}',
        b'"text":"\\",\\"usage\\":{}"', b'"usage":{', b'"text":"a"', b'"text": "a"', b'"text":""', b'"text" :"a"',
        b'"content":"\xe6\xbc\xa2"', b'"delta":"a"', b'"response":"', b'"mytext":"a"', b'text":"a"',
        b'"arguments":"{"', b'"finish_reason":"stop"', b"}", b"{", b'"',
    ]
)  # fmt: skip
JOINTS = st.sampled_from([b",", b",", b",", b"", b"\n", b"\ndata: ", b"\n\n", b" "])


@given(
    st.lists(st.lists(st.tuples(JOINTS, PIECES), max_size=6), min_size=1, max_size=3),
    st.sampled_from(list(Strip)),
)
def test_noise(wires: Any, parts: list[list[tuple[bytes, bytes]]], strip: Strip) -> None:
    payloads = [b'data: {"a":1' + b"".join(j + p for j, p in part) + b"}\n\n" for part in parts]
    check(wires, payloads, strip)


def test_the_fields_that_were_removed_are_gone_and_the_rest_is_framed_again(wires: Any) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"token_ids":[5,6]}],"prompt_token_ids":null}\n\n'
    passed = wires(chunk(event) + chunk(b": still here\n\n"), ForwardingMode.WITHOUT_IDS)
    assert passed.payload == (b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n: still here\n\n')
    assert passed.counts[2:] == (1, 2)


def test_a_chunk_with_very_many_fields_goes_back_to_python(wires: Any) -> None:
    assert check(wires, [b'data: {"a":1' + b',"token_ids":[1]' * 64 + b"}\n\n"], Strip.IDS)
    assert not check(wires, [b'data: {"a":1' + b',"token_ids":[1]' * 65 + b"}\n\n"], Strip.IDS)
