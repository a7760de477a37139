"""Events come out whole, in order and once, whatever the bytes are cut into."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.http.sse import EventBuffer, EventReader, ends_with_done, error_event, is_data, is_readable

LIMIT = 1 << 20


def read(*pieces: bytes) -> list[bytes]:
    reader = EventReader()
    return [data for piece in pieces for data in reader.feed(piece)]


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        pytest.param(b"data: a\n\ndata: b\n\n", [b"a", b"b"], id="two events"),
        pytest.param(b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"], id="CR LF"),
        pytest.param(b"data:a\n\n", [b"a"], id="no space"),
        pytest.param(b"data:  a\n\n", [b" a"], id="only one space is taken"),
        pytest.param(b"data: {\ndata: }\n\n", [b"{\n}"], id="several lines"),
        pytest.param(b"data:\n\n", [b""], id="empty data"),
        pytest.param(b": ping\n\ndata: a\n\n", [b"a"], id="a comment of its own"),
        pytest.param(b": ping\ndata: a\n\n", [b"a"], id="a comment in front"),
        pytest.param(b"event: x\nid: 3\ndata: a\nretry: 9\n\n", [b"a"], id="other fields"),
        pytest.param(b"data: a\n\n\n\ndata: b\n\n", [b"a", b"b"], id="more empty lines"),
        pytest.param(b"\xef\xbb\xbfdata: a\n\n", [b"a"], id="a byte order mark"),
        pytest.param(b"data: a\n\ndata: b\n", [b"a"], id="the last one has not ended"),
        pytest.param(b"datum: a\n\n", [], id="another field"),
        pytest.param(b"", [], id="nothing"),
    ],
)
def test_events(stream: bytes, data: list[bytes]) -> None:
    assert read(stream) == data
    assert read(*(stream[at : at + 1] for at in range(len(stream)))) == data


EVENTS = st.lists(
    st.sampled_from(
        [
            b"data: one\n\n",
            b"data:two\r\n\r\n",
            b": ping\n\n",
            b"data: a\ndata: b\n\n",
            b"event: e\r\ndata: x\r\n\r\n",
        ]
    ),
    max_size=8,
)


@given(EVENTS, st.data())
def test_the_gate_lets_whole_events_pass_and_loses_nothing(events: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    gate, passed = EventBuffer(LIMIT), b""
    ends = {len(b"".join(events[:count])) for count in range(len(events) + 1)}
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        passed += gate.feed(stream[start:end])
        assert len(passed) in ends
        assert len(passed) == max(at for at in ends if at <= end), "nothing is held longer than it must be"
    assert passed == stream


def test_the_gate_passes_the_same_bytes_on() -> None:
    event = b"data: {}\n\n"
    assert EventBuffer(LIMIT).feed(event) is event


@pytest.mark.parametrize("size", [1, 5, 1000], ids=lambda size: f"{size} bytes at a time")
@pytest.mark.parametrize(
    "last",
    [
        pytest.param(b'data: {"error": {"message": "engine died"}}\n\n', id="an error"),
        pytest.param(b'data: {"id":"x","choices":[{"finish_reason":"abort"}]}\n\n', id="an abort"),
    ],
)
def test_an_engine_that_gives_up_is_held_back(last: bytes, size: int) -> None:
    before = b'data: {"text":"{\\"error\\" \\"finish_reason\\":\\"abort\\""}\n\n'
    stream = before + last + b"data: [DONE]\n\n"
    gate, passed = EventBuffer(LIMIT), b""
    for at in range(0, len(stream), size):
        passed += gate.feed(stream[at : at + size])
    assert passed == before
    assert gate.error == last + b"data: [DONE]\n\n"


def test_an_endless_event_is_let_through_in_pieces() -> None:
    gate = EventBuffer(limit_bytes=10)
    assert gate.feed(b"data: 12") == b""
    assert gate.feed(b"34567") == b"data: 1234567"
    assert gate.torn
    assert gate.feed(b"8") == b"8"


def test_what_never_ended_can_be_sent_at_last() -> None:
    gate = EventBuffer(LIMIT)
    assert gate.feed(b"data: a\n\ndata: b") == b"data: a\n\n"
    assert gate.rest() == b"data: b"
    assert gate.rest() == b""


@pytest.mark.parametrize(
    ("payload", "alive"),
    [
        pytest.param(b"data: {}\n\n", True, id="an event"),
        pytest.param(b"data:{}\n\n", True, id="without space"),
        pytest.param(b": ping\n\ndata: {}\n\n", True, id="behind a comment"),
        pytest.param(b"event: x\r\ndata: {}\r\n\r\n", True, id="behind another field"),
        pytest.param(b"1a\r\ndata: {}\n\n\r\n", True, id="in a chunk"),
        pytest.param(b": ping\n\n", False, id="a comment"),
        pytest.param(b":\n\n", False, id="an empty comment"),
        pytest.param(b": data: {}\n\n", False, id="a comment that talks of data"),
        pytest.param(b"8\r\n: ping\n\n\r\n", False, id="a comment in a chunk"),
        pytest.param(b"", False, id="nothing"),
    ],
)
def test_only_data_is_a_sign_of_life(payload: bytes, alive: bool) -> None:
    assert is_data(payload) is alive


@pytest.mark.parametrize(
    ("kind", "encoding", "readable"),
    [
        pytest.param(b"text/event-stream", b"", True, id="plain"),
        pytest.param(b"Text/Event-Stream; charset=utf-8", b"identity", True, id="with a charset"),
        pytest.param(b"text/event-stream", b"gzip", False, id="compressed"),
        pytest.param(b"application/json", b"", False, id="not a stream"),
        pytest.param(b"", b"", False, id="unsaid"),
    ],
)
def test_which_answers_can_be_read(kind: bytes, encoding: bytes, readable: bool) -> None:
    assert is_readable(kind, encoding) is readable


def test_the_final_error_is_one_openais_clients_raise() -> None:
    event = error_event("tool_call", "the stream broke in a tool call")
    (data,) = read(event)
    assert json.loads(data)["error"] == {
        "message": "the stream broke in a tool call",
        "type": "server_error",
        "param": None,
        "code": "tool_call",
    }


@pytest.mark.parametrize(
    ("events", "done"),
    [
        (b"data: {}\n\ndata: [DONE]\n\n", True),
        (b"data:[DONE]\r\n\r\n", True),
        (b"data: [DONE]\n\n: bye\n\n", True),
        (b"e\r\ndata: [DONE]\n\n\r\n", True),
        (b"data: [DONE]\n\ndata: {}\n\n", False),
        (b'data: {"text":"data: [DONE]"}\n\n', False),
        (b'[DONE]\\n"}\n\n', False),
        (b": [DONE]\n\n", False),
        (b"", False),
    ],
)
def test_the_end_mark_is_a_line_of_its_own(events: bytes, done: bool) -> None:
    assert ends_with_done(events) is done


def test_a_long_event_is_held_in_parts_and_joined_once() -> None:
    reader = EventReader()
    for _ in range(1000):
        assert reader.feed(b"data: " if not reader.held_bytes else b"x" * 1000) == []
    assert reader.held_bytes == 6 + 999_000
    (data,) = reader.feed(b"\n") + reader.feed(b"\ndata")
    assert (len(data), reader.held_bytes) == (999_000, 4)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CR LF", "CR"])
def test_all_line_ends_that_the_standard_allows(end: bytes, size: int) -> None:
    events = end.join([b": hi", b"", b"data: a", b"data: b", b"", b"data: [DONE]", b"", b""])
    reader, gate = EventReader(), EventBuffer(1 << 20)
    pieces = [events[at : at + size] for at in range(0, len(events), size)]
    assert [data for piece in pieces for data in reader.feed(piece)] == [b"a\nb", b"[DONE]"]
    assert b"".join(map(gate.feed, pieces)) == events
    assert ends_with_done(events)
    assert is_data(events)
