"""Streams of `/v1/responses` and `/v1/messages`, recorded from vLLM 0.32 and cut at every event."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lb.config.options import Continue
from lb.engines.kinds import EngineKind
from lb.http.api_paths import MESSAGES, RESPONSES
from lb.http.sse import EventBuffer
from lb.stream.dialect import Dialect, Merger
from lb.stream.dialects import DIALECTS
from lb.stream.resume_request import ResumeMethod, ResumeRequest
from lb.stream.resume_rules import NotResumable, Reason
from lb.stream.transcript import StreamProgress, Transcript
from tests.clouds.schedules import examples

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "vllm_streams.json").read_text()
)
VLLM = EngineKind.VLLM
LIMIT = 1 << 20
ID = re.compile(r'"((?:resp|msg|rs|fc|call|chatcmpl|chatcmpl-tool)[-_])(?:other)?([0-9a-f]+)"')
EVERY_STREAM = pytest.mark.parametrize("name", RECORDED)


def events_of(stream: str) -> list[str]:
    return [event + "\n\n" for event in stream.split("\n\n") if event.strip()]


def data_of(stream: str) -> list[dict[str, Any]]:
    return [json.loads(event.split("data: ", 1)[1]) for event in events_of(stream)]


def folded(stream: str) -> list[Any]:
    """The events, with deltas in a row as one, without numbers, and with ids by their first appearance: items have those of the leg
    that opened them."""
    steps: list[Any] = []
    names: dict[str, str] = {}
    for event in data_of(ID.sub(lambda id: names.setdefault(id[0], f'"id-{len(names)}"'), stream)):
        event.pop("sequence_number", None)
        if "delta" in event:
            event.pop("logprobs", None)
        delta = event.get("delta")
        text = delta if isinstance(delta, str) else None
        if isinstance(delta, dict) and event["type"] == "content_block_delta":
            field = next(name for name in delta if name != "type")
            text = delta.pop(field)
        elif text is not None:
            event["delta"] = ""
        if text is not None and steps and isinstance(steps[-1], tuple) and steps[-1][0] == event:
            steps[-1] = (event, steps[-1][1] + text)
        else:
            steps.append(event if text is None else (event, text))
    return steps


def numbers(stream: str) -> list[int]:
    return [event["sequence_number"] for event in data_of(stream) if "sequence_number" in event]


def other_leg(stream: str, together: int = 1) -> str:
    """The same response as another engine would send it: with other ids, and with several deltas in one event."""
    renamed = ID.sub(r'"\1other\2"', stream)
    numbered = re.sub(r'"created_at":\d+', '"created_at":7', renamed)
    groups: list[list[dict[str, Any]]] = []
    for event in data_of(numbered):
        text = event.get("delta")
        same = groups and _place(groups[-1][0]) == _place(event) and len(groups[-1]) < together
        if isinstance(text, str) and same:
            groups[-1].append(event)
        else:
            groups.append([event])
    joined = [
        group[0]
        if len(group) == 1
        else {
            **group[0],
            "delta": "".join(one["delta"] for one in group),
            "logprobs": [token for one in group for token in one.get("logprobs", ())],
        }
        for group in groups
    ]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in joined)


def _place(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["type"], event.get("output_index"), event.get("content_index")


def progress(dialect: Dialect, stream: str) -> StreamProgress:
    transcript = Transcript(False, LIMIT, dialect.tally)
    transcript.add(stream.encode())
    return transcript.read()


def leg(dialect: Dialect, request: dict[str, Any], sofar: StreamProgress) -> tuple[ResumeRequest, Merger]:
    resumption = dialect.resume(request, sofar, VLLM, Continue.AUTO)
    return resumption, dialect.merger(request, sofar, resumption, LIMIT)


def cuts(stream: str) -> Iterator[tuple[str, str]]:
    events = events_of(stream)
    for at in range(len(events)):
        yield "".join(events[:at]), "".join(events[at:])


def fed(merger: Merger, stream: str, step: int = 1 << 20) -> str:
    data = stream.encode()
    return b"".join(merger.feed(data[at : at + step]) for at in range(0, len(data), step)).decode()


@EVERY_STREAM
def test_what_was_packed_is_read_as_what_was_not(name: str) -> None:
    packed_events = pytest.importorskip(
        "lb.proxy._fast_path", reason="the helper is not built: no C compiler at installation"
    ).PackedEvents
    dialect, stream = DIALECTS[RECORDED[name]["path"].encode()], RECORDED[name]["stream"]
    transcript, shown = Transcript(False, LIMIT, dialect.tally, packed_events()), ""
    for event in events_of(stream):
        transcript.add(event.encode())
        shown += event
        if len(shown) % 5 == 0:
            assert transcript.read() == progress(dialect, shown)
    assert transcript.read() == progress(dialect, stream)


@pytest.mark.parametrize("together", [1, 3])
@EVERY_STREAM
def test_a_stream_cut_anywhere_is_the_undisturbed_one(name: str, together: int) -> None:
    recorded = RECORDED[name]
    dialect, request, whole = DIALECTS[recorded["path"].encode()], recorded["request"], recorded["stream"]
    other = other_leg(whole, together)
    for before, _ in cuts(whole):
        resumption, merger = leg(dialect, request, progress(dialect, before))
        assert resumption.inexact is None
        got = before + fed(merger, other, 50)
        assert folded(got) == folded(whole if before else other)
        assert numbers(got) == list(range(len(numbers(got))))
        assert merger.over
        assert not merger.error
        usage = merger.usage
        assert usage is not None
        assert usage.out == merger.tokens > 0
        assert merger.progress().done


@EVERY_STREAM
def test_a_stream_is_cut_more_than_once(name: str) -> None:
    recorded = RECORDED[name]
    dialect, request, whole = DIALECTS[recorded["path"].encode()], recorded["request"], recorded["stream"]
    events = events_of(whole)
    got = "".join(events[: len(events) // 3])
    sofar = progress(dialect, got)
    for part in (len(events) // 2, len(events) - 2, len(events)):
        _, merger = leg(dialect, request, sofar)
        got += fed(merger, "".join(events_of(other_leg(whole))[:part]))
        sofar = merger.progress()
    assert folded(got) == folded(whole)
    assert numbers(got) == list(range(len(numbers(got))))


@EVERY_STREAM
def test_another_response_is_not_passed_on(name: str) -> None:
    recorded = RECORDED[name]
    dialect, request, whole = DIALECTS[recorded["path"].encode()], recorded["request"], recorded["stream"]
    events = events_of(whole)
    at = next(at for at, event in enumerate(events) if "_delta" in event or ".delta" in event)
    for cut in range(at + 1, len(events)):
        _, merger = leg(dialect, request, progress(dialect, "".join(events[:cut])))
        spoilt = re.sub(r'("(?:delta|text|thinking|partial_json)":)"[^"]', r'\1"§', whole)
        assert fed(merger, spoilt) == ""
        assert merger.over
        (failed,) = data_of(merger.error.decode())
        assert failed["type"] in ("response.failed", "error")
        assert merger.progress().diverged


# --- a message that goes on by its text

PLAIN = RECORDED["responses plain"]
SAMPLED = {key: value for key, value in PLAIN["request"].items() if key != "max_output_tokens"} | {
    "temperature": 0.7
}
OPENING = 4  # events in front of the first delta


def text_of(stream: str) -> str:
    return "".join(event["delta"] for event in data_of(stream) if event["type"].endswith("output_text.delta"))


def rest_leg(stream: str, given: str, *, cached: int = 0) -> str:
    """What vLLM responds to a request that gives `given` back of this response: its rest, as a response of its own."""
    events: list[dict[str, Any]] = []
    rest = text_of(stream).removeprefix(given)
    for event in data_of(other_leg(stream)):
        event = json.loads(
            json.dumps(event).replace(json.dumps(text_of(stream))[1:-1], json.dumps(rest)[1:-1])
        )
        if event["type"] == "response.output_text.delta":
            if events[-1]["type"] != event["type"]:
                events.append({**event, "delta": rest[:9]})
                events.append({**event, "delta": rest[9:]})
        elif event["type"] == "response.completed":
            usage = {"input_tokens": 6 + cached, "output_tokens": 40 - cached, "total_tokens": 46}
            events.append(
                {**event, "response": {**event["response"], "max_output_tokens": 3, "usage": usage}}
            )
        else:
            events.append(event)
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


def test_a_message_goes_on_by_its_text() -> None:
    dialect, whole = DIALECTS[RESPONSES], PLAIN["stream"]
    deltas = sum("output_text.delta" in event for event in events_of(whole)) // 2
    for count in range(1, deltas):
        before = "".join(events_of(whole)[: OPENING + count])
        resumption, merger = leg(dialect, SAMPLED, progress(dialect, before))
        assert resumption.way is ResumeMethod.TEXT
        sent = json.loads(resumption.body)
        given = sent["input"][-1]
        assert sent["input"][:-1] == [{"type": "message", "role": "user", "content": "Hi there"}]
        assert (given["status"], given["role"]) == ("in_progress", "assistant")
        text = given["content"][0]["text"]
        assert text == text_of(before).rstrip()
        got = before + fed(merger, rest_leg(whole, text, cached=count), 60)
        assert numbers(got) == list(range(len(numbers(got))))
        expected = folded(whole)
        assert _without_usage(folded(got)) == _without_usage(expected)
        usage = data_of(got)[-1]["response"]["usage"]
        assert usage == {"input_tokens": 6, "output_tokens": 40, "total_tokens": 46}


def _without_usage(steps: list[Any]) -> list[Any]:
    """Without the logprobs, too: a text in two legs has null or none."""
    return json.loads(
        re.sub(r', "(usage|logprobs)": (null|\[\]|\{.*?\}(?=, "user))', "", json.dumps(steps)),
        object_hook=dict,
    )


def _leg_of(*events: dict[str, Any]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


ITEM = {"type": "message", "id": "msg_b", "role": "assistant", "status": "in_progress", "content": []}
CALL = {"type": "function_call", "id": "fc_b", "call_id": "call_b", "name": "f", "arguments": ""}
BEFORE = "".join(events_of(PLAIN["stream"])[: OPENING + 2])


def test_a_call_behind_the_text_is_the_next_item() -> None:
    dialect = DIALECTS[RESPONSES]
    _, merger = leg(dialect, SAMPLED, progress(dialect, BEFORE))
    got = fed(
        merger,
        _leg_of(
            {"type": "response.created", "sequence_number": 0, "response": {"id": "resp_b"}},
            {"type": "response.output_item.added", "sequence_number": 1, "output_index": 0, "item": CALL},
            {"type": "response.output_item.done", "sequence_number": 2, "output_index": 0, "item": CALL},
            {
                "type": "response.completed",
                "sequence_number": 3,
                "response": {"id": "resp_b", "output": [CALL], "usage": None},
            },
        ),
    )
    found = data_of(got)
    assert [event["type"].removeprefix("response.") for event in found] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "output_item.done",
        "completed",
    ]
    assert [event["output_index"] for event in found[:-1]] == [0, 0, 0, 1, 1]
    output = found[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call"]
    assert output[0]["content"][0]["text"] == text_of(BEFORE)
    assert found[-1]["response"]["id"] == data_of(BEFORE)[0]["response"]["id"]


def test_a_message_that_is_over_is_closed() -> None:
    dialect = DIALECTS[RESPONSES]
    _, merger = leg(dialect, SAMPLED, progress(dialect, BEFORE))
    got = data_of(fed(merger, _leg_of({"type": "response.completed", "response": {"output": []}})))
    assert [event["type"].removeprefix("response.") for event in got] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert merger.progress().done


@pytest.mark.parametrize(
    ("said", "is_right"),
    [(["  ", "x"], True), ([" ", " x"], True), ([" x"], False), (["x"], False), (["  "], True)],
)
def test_white_space_that_stayed_back_is_said_again(said: list[str], is_right: bool) -> None:
    dialect = DIALECTS[RESPONSES]
    spaced = "".join(events_of(PLAIN["stream"])[: OPENING + 1]).replace('"delta":"', '"delta":"a  ~')
    spaced = re.sub(r'"delta":"a  ~[^"]*"', '"delta":"a  "', spaced)
    resumption, merger = leg(dialect, SAMPLED, progress(dialect, spaced))
    assert json.loads(resumption.body)["input"][-1]["content"][0]["text"] == "a"
    place = {"output_index": 0, "content_index": 0, "item_id": "msg_b"}
    added = {"type": "response.output_item.added", "output_index": 0, "item": ITEM}
    deltas = [{"type": "response.output_text.delta", **place, "delta": delta} for delta in said]
    got = spaced + fed(merger, _leg_of(added, *deltas))
    assert (merger.refused is None) is is_right
    assert text_of(got) == "a  " + ("".join(said).removeprefix("  ") if is_right else "")


# --- what is decided by the request and by the stream

FUNCTION = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (RESPONSES, {"previous_response_id": "resp_1"}, Reason.ENGINE_STATE),
        (RESPONSES, {"conversation": "conv_1"}, Reason.ENGINE_STATE),
        (RESPONSES, {"background": True}, Reason.ENGINE_STATE),
        (RESPONSES, {"kv_transfer_params": {"a": 1}}, Reason.KV_TRANSFER),
        (RESPONSES, {"tools": [FUNCTION, {"type": "code_interpreter"}]}, Reason.ENGINE_TOOLS),
        (RESPONSES, {"tools": [FUNCTION, {"type": "custom", "name": "g"}]}, None),
        (RESPONSES, {"store": True}, None),
        (MESSAGES, {"mcp_servers": [{"url": "x"}]}, Reason.ENGINE_STATE),
        (MESSAGES, {"ec_transfer_params": {"a": 1}}, Reason.KV_TRANSFER),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, Reason.ENGINE_TOOLS),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}, {"type": "bash_20250124"}]}, None),
    ],
)
def test_what_another_engine_must_not_get(path: bytes, fields: dict[str, Any], reason: Reason | None) -> None:
    dialect = DIALECTS[path]
    assert dialect.refusal(fields) is reason
    assert dialect.prepare(fields, VLLM, Continue.AUTO).refused is reason
    if reason is not None:
        with pytest.raises(NotResumable) as refused:
            dialect.resume(fields, StreamProgress(), VLLM, Continue.AUTO)
        assert refused.value.reason is reason


def begun(name: str, kind: str) -> StreamProgress:
    """The progress of a recorded stream behind its last event of this type."""
    recorded = RECORDED[name]
    events = events_of(recorded["stream"])
    last = max(at for at, event in enumerate(events) if kind in event.partition("\n")[0])
    return progress(DIALECTS[recorded["path"].encode()], "".join(events[: last + 1]))


GREEDY, CHANCE, SEED = {"temperature": 0}, {"temperature": 0.5}, {"temperature": 0.5, "seed": 1}


@pytest.mark.parametrize(
    ("name", "kind", "fields", "engine", "way"),
    [
        ("responses plain", "in_progress", CHANCE, VLLM, ResumeMethod.RESTART),
        ("responses plain", "part.added", CHANCE, VLLM, ResumeMethod.RESTART),
        ("messages plain", "block_start", CHANCE, VLLM, ResumeMethod.RESTART),
        ("responses plain", "text.delta", GREEDY, VLLM, ResumeMethod.REPLAY),
        ("responses plain", "text.delta", {"top_k": 1}, EngineKind.SGLANG, ResumeMethod.REPLAY),
        ("responses plain", "text.delta", SEED, EngineKind.UNKNOWN, ResumeMethod.REPLAY),
        ("responses plain", "text.delta", CHANCE, EngineKind.SKYSERVE, ResumeMethod.REPLAY),
        ("responses plain", "text.delta", CHANCE, VLLM, ResumeMethod.TEXT),
        ("responses plain", "text.delta", {}, VLLM, ResumeMethod.TEXT),
        ("responses plain", "text.delta", CHANCE, EngineKind.SGLANG, Reason.ENGINE),
        ("responses plain", "text.delta", {**CHANCE, "stop": ["x"]}, VLLM, Reason.SAMPLED),
        ("responses plain", "text.delta", {**CHANCE, "text": {"format": {"type": "json_object"}}}, VLLM, Reason.GRAMMAR),
        ("responses plain", "text.delta", {**CHANCE, "tool_choice": "required"}, VLLM, Reason.FORCED_TOOL),
        ("responses plain", "text.delta", {**CHANCE, "presence_penalty": 0.1}, VLLM, Reason.PENALTIES),
        ("responses plain", "text.delta", {**CHANCE, "truncation": "auto"}, VLLM, Reason.TRUNCATED_PROMPT),
        ("responses plain", "text.delta", {**CHANCE, "max_output_tokens": 99}, VLLM, Reason.UNCOUNTED),
        ("responses plain", "text.delta", {**CHANCE, "input": [{"role": "assistant", "status": "in_progress"}]}, VLLM, Reason.LAST_MESSAGE),
        ("responses plain", "text.done", CHANCE, VLLM, Reason.SAMPLED),
        ("responses plain", "completed", GREEDY, VLLM, Reason.ENDED),
        ("responses tools", "arguments.delta", CHANCE, VLLM, Reason.TOOL_CALL),
        ("responses tools", "arguments.delta", GREEDY, VLLM, ResumeMethod.REPLAY),
        ("responses reasoning", "reasoning_text.delta", CHANCE, VLLM, Reason.REASONING),
        ("responses reasoning", "output_text.delta", CHANCE, VLLM, Reason.REASONING),
        ("responses reasoning", "output_text.delta", GREEDY, VLLM, ResumeMethod.REPLAY),
        ("messages plain", "message_start", CHANCE, VLLM, ResumeMethod.RESTART),
        ("messages plain", "block_delta", GREEDY, VLLM, ResumeMethod.REPLAY),
        ("messages plain", "block_delta", {**CHANCE, "max_tokens": 99}, VLLM, ResumeMethod.TEXT),
        ("messages plain", "block_delta", CHANCE, EngineKind.LLAMACPP, Reason.ENGINE),
        ("messages plain", "block_stop", CHANCE, VLLM, Reason.SAMPLED),
        ("messages tools", "block_delta", CHANCE, VLLM, Reason.TOOL_CALL),
        ("messages thinking", "block_delta", CHANCE, VLLM, Reason.REASONING),
    ],
)  # fmt: skip
def test_how_a_stream_goes_on(
    name: str, kind: str, fields: dict[str, Any], engine: EngineKind, way: ResumeMethod | Reason
) -> None:
    recorded = RECORDED[name]
    dialect, sofar = DIALECTS[recorded["path"].encode()], begun(name, kind)
    chosen = ("temperature", "text", "tool_choice", "max_output_tokens")
    request = {key: value for key, value in recorded["request"].items() if key not in chosen}
    try:
        found: ResumeMethod | Reason = dialect.resume(request | fields, sofar, engine, Continue.AUTO).way
    except NotResumable as refused:
        found = refused.reason
    assert found is way
    with pytest.raises(NotResumable):
        dialect.resume(request | fields, sofar, engine, Continue.OFF)
    if way is ResumeMethod.TEXT:
        with pytest.raises(NotResumable) as exact:
            dialect.resume(request | fields, sofar, engine, Continue.EXACT)
        assert exact.value.reason is Reason.SAMPLED


def test_the_id_of_a_response_goes_with_its_request() -> None:
    """So that vLLM stores it under the id that the client knows."""
    sofar = begun("responses plain", "text.delta")
    resumption = DIALECTS[RESPONSES].resume(PLAIN["request"], sofar, VLLM, Continue.AUTO)
    known = data_of(PLAIN["stream"])[0]["response"]["id"]
    assert json.loads(resumption.body) == PLAIN["request"] | {"request_id": known}


def test_a_message_goes_on_by_its_text_when_the_same_request_has_got_another_response() -> None:
    dialect, sofar = DIALECTS[RESPONSES], begun("responses plain", "text.delta")
    _, merger = leg(dialect, PLAIN["request"], sofar)
    spoilt = re.sub(r'("delta": ?")', r"\1§", PLAIN["stream"])
    assert fed(merger, spoilt) == ""
    assert dialect.resume(SAMPLED, merger.progress(), VLLM, Continue.AUTO).way is ResumeMethod.TEXT


@EVERY_STREAM
def test_a_stream_that_fails_ends_with_the_event_of_its_api(name: str) -> None:
    recorded = RECORDED[name]
    dialect = DIALECTS[recorded["path"].encode()]
    for before, _ in cuts(recorded["stream"]):
        sofar = progress(dialect, before)
        (failed,) = data_of(dialect.error_event("stream_interrupted", "It is lost.", sofar).decode())
        if dialect is DIALECTS[MESSAGES]:
            assert failed == {"type": "error", "error": {"type": "api_error", "message": "It is lost."}}
        elif not before:
            assert failed["type"] == "error"
            assert failed["message"] == "It is lost."
        else:
            response = data_of(recorded["stream"])[0]["response"]
            assert failed["sequence_number"] == len(data_of(before))
            assert failed["type"] == "response.failed"
            assert failed["response"]["error"] == {"code": "server_error", "message": "It is lost."}
            done = [
                event["item"] for event in data_of(before) if event["type"] == "response.output_item.done"
            ]
            assert failed["response"] == response | {
                "status": "failed",
                "output": done,
                "error": failed["response"]["error"],
            }


@EVERY_STREAM
def test_only_the_last_event_ends_a_stream(name: str) -> None:
    recorded = RECORDED[name]
    dialect, request = DIALECTS[recorded["path"].encode()], recorded["request"]
    for before, rest in cuts(recorded["stream"]):
        assert not dialect.is_over(before.encode()[-2048:])
        sofar = progress(dialect, before)
        missing = dialect.closing(request, sofar, VLLM)
        assert missing is None or folded(before + missing.decode()) == folded(recorded["stream"])
        assert (missing is None) is ("message_delta" in rest or dialect is DIALECTS[RESPONSES])
    assert dialect.is_over(recorded["stream"].encode()[-2048:])
    assert dialect.closing(request, progress(dialect, recorded["stream"]), VLLM) == b""


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_done_ends_a_stream_whatever_was_in_it(path: bytes) -> None:
    """An engine without these APIs may respond as to a chat."""
    dialect = DIALECTS[path]
    chunk = b'data: {"object":"chat.completion.chunk","choices":[]}\n\n'
    assert not dialect.is_over(chunk)
    assert dialect.is_over(chunk + b"data: [DONE]\n\n")


@EVERY_STREAM
def test_only_single_deltas_pass_unread(name: str) -> None:
    recorded = RECORDED[name]
    dialect = DIALECTS[recorded["path"].encode()]
    for event in events_of(recorded["stream"]):
        data = f"{len(event):x}\r\n{event}\r\n".encode()
        kind = json.loads(event.split("data: ", 1)[1])["type"]
        assert dialect.may_pass(data) is (kind.endswith("delta") and kind != "message_delta")
        assert not dialect.may_pass(data + data)


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (
            MESSAGES,
            'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n',
        ),
        (RESPONSES, 'event: error\ndata: {"type":"error","code":"server_error","message":"x"}\n\n'),
        (RESPONSES, 'event: response.failed\ndata: {"type":"response.failed","response":{"id":"r"}}\n\n'),
    ],
)
def test_an_engine_that_gives_up_is_not_passed_on(path: bytes, event: str) -> None:
    dialect = DIALECTS[path]
    gate = EventBuffer(1000, dialect.gives_up)
    assert gate.feed(b"event: ping\ndata: {}\n\n" + event.encode()) == b"event: ping\ndata: {}\n\n"
    assert gate.error == event.encode()
    request: dict[str, Any] = {"temperature": 0, "input": "x"}
    _, merger = leg(dialect, request, StreamProgress())
    assert merger.feed(event.encode()) == b""
    assert merger.error
    assert merger.over


# --- a message that goes on as a chat

MESSAGE = RECORDED["messages plain"]
BY_CHANCE = {**MESSAGE["request"], "temperature": 0.7}


PROMPT = data_of(MESSAGE["stream"])[0]["message"]["usage"]["input_tokens"]


def chat_leg(*choices: dict[str, Any], usage: int = 0, given: int = 1, end: bool = True) -> str:
    """What a chat responds: deltas, or a finish reason. Its prompt has `given` tokens of the text."""
    chunks = [
        {"choices": [{"index": 0, "delta": one, "finish_reason": one.pop("finish_reason", None)}]}
        for one in choices
    ]
    if usage:
        chunks.append({"choices": [], "usage": {"prompt_tokens": PROMPT + given, "completion_tokens": usage}})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + ("data: [DONE]\n\n" if end else "")


def test_a_message_goes_on_as_a_chat() -> None:
    dialect, whole = DIALECTS[MESSAGES], MESSAGE["stream"]
    deltas = [event["delta"]["text"] for event in data_of(whole) if event["type"] == "content_block_delta"]
    for count in range(1, len(deltas)):
        before = "".join(events_of(whole)[: 2 + count])
        resumption, merger = leg(dialect, BY_CHANCE, progress(dialect, before))
        assert (resumption.way, resumption.path) == (ResumeMethod.TEXT, b"/v1/chat/completions")
        body = json.loads(resumption.body)
        text = "".join(deltas[:count])
        assert body["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi there"},
            {"role": "assistant", "content": text.rstrip()},
        ]
        assert body["max_tokens"] == 40 - count
        more = "".join(deltas).removeprefix(text.rstrip())
        said = [
            {"role": "assistant"},
            {"content": more[:5]},
            {"content": more[5:], "finish_reason": "length"},
        ]
        got = before + fed(merger, chat_leg(*said, usage=40 - count, given=count), 30)
        assert folded(got) == folded(whole)
        assert merger.progress().done
        assert merger.usage is not None
        assert merger.usage.out == 40


@pytest.mark.parametrize(
    ("said", "blocks", "reason"),
    [
        ([{"content": "x", "finish_reason": "stop"}], [("text", "ax")], "end_turn"),
        (
            [
                {"tool_calls": [{"index": 0, "id": "t1", "function": {"name": "f", "arguments": "{"}}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
                {"tool_calls": [{"index": 1, "id": "t2", "function": {"name": "g", "arguments": "{}"}}]},
                {"content": " z", "finish_reason": "tool_calls"},
            ],
            [("text", "a"), ("tool_use", "{}"), ("tool_use", "{}"), ("text", " z")],
            "tool_use",
        ),
        ([{"content": "x", "finish_reason": "abort"}], None, None),
        ([{"reasoning": "hm"}], None, Reason.REASONING),
        ([{"content": "x"}], None, Reason.MISMATCH),
    ],
    ids=["text", "calls", "aborted", "reasoning", "no end"],
)
def test_what_a_chat_says_is_a_message(said: list[Any], blocks: Any, reason: Any) -> None:
    dialect = DIALECTS[MESSAGES]
    first = re.sub(r'"text":"[^"]+"', '"text":"a"', "".join(events_of(MESSAGE["stream"])[:3]))
    _, merger = leg(dialect, BY_CHANCE, progress(dialect, first))
    got = data_of(first + fed(merger, chat_leg(*said, usage=3)))
    if blocks is None:
        assert merger.refused is reason
        assert bool(merger.error) is (reason is None)
        assert merger.over
        assert got[-1]["type"] == "content_block_delta"
        return
    found: list[tuple[str, str]] = []
    for event in got:
        if event["type"] == "content_block_start":
            assert event["index"] == len(found)
            found.append((event["content_block"]["type"], ""))
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(found) - 1
            delta = event["delta"]
            found[-1] = (found[-1][0], found[-1][1] + delta.get("text", "") + delta.get("partial_json", ""))
    assert found == blocks
    assert sum(event["type"] == "content_block_stop" for event in got) == len(blocks)
    assert got[-2]["delta"] == {"stop_reason": reason, "stop_sequence": None}
    assert got[-2]["usage"] == data_of(first)[0]["message"]["usage"] | {"output_tokens": 4}
    assert got[-1] == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("given", "said", "reason"),
    [(2, "xyz", "end_turn"), (37, "xyz", "end_turn"), (38, "xy", "max_tokens"), (39, "x", "max_tokens")],
)
def test_a_text_of_more_tokens_than_events_ends_at_the_limit(given: int, said: str, reason: str) -> None:
    dialect = DIALECTS[MESSAGES]
    first = "".join(events_of(MESSAGE["stream"])[:4])
    _, merger = leg(dialect, BY_CHANCE, progress(dialect, first))
    chunks = [
        {
            "choices": [{"delta": {"content": text}, "finish_reason": "stop" if text == "z" else None}],
            "usage": {"prompt_tokens": PROMPT + given, "completion_tokens": tokens},
        }
        for tokens, text in enumerate("xyz", 1)
    ]
    got = data_of(fed(merger, "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"))
    assert "".join(event["delta"]["text"] for event in got if event["type"] == "content_block_delta") == said
    assert got[-2]["delta"]["stop_reason"] == reason
    assert got[-2]["usage"]["output_tokens"] == min(40, given + 3)
    assert merger.over


USER = {"role": "user", "content": "Hi"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, Reason.STRANGE),
        ({"messages": [USER, {"role": "assistant", "content": "{"}]}, Reason.LAST_MESSAGE),
        ({"output_config": {"format": {"type": "json_schema"}}}, Reason.STRANGE),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, Reason.STRANGE),
        ({"stop_sequences": ["x"]}, Reason.SAMPLED),
        ({"tool_choice": {"type": "any"}}, Reason.FORCED_TOOL),
        ({"max_tokens": 3}, Reason.ENDED),
    ],
)
def test_what_a_chat_does_not_carry(fields: dict[str, Any], reason: Reason) -> None:
    dialect = DIALECTS[MESSAGES]
    request = BY_CHANCE | {"max_tokens": 99} | fields
    with pytest.raises(NotResumable) as refused:
        dialect.resume(request, begun("messages plain", "block_delta"), VLLM, Continue.AUTO)
    assert refused.value.reason is reason


def test_a_conversation_with_tools_is_the_chat_that_vllm_makes_of_it() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "There"}]}
    request = {
        "model": "tiny",
        "max_tokens": 400,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: 1"},
            {"type": "text", "text": "Be "},
            {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "text", "text": "Let me see"}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"properties": {}}, "strict": True}],
    }
    sofar = begun("messages plain", "block_delta")
    body = json.loads(DIALECTS[MESSAGES].resume(request, sofar, VLLM, Continue.AUTO).body)
    function = {"name": "f", "arguments": '{"a":1}'}
    calls = [{"id": "t1", "type": "function", "function": function}]
    assert body["messages"][:-1] == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Let me see", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "There"},
        {"role": "user", "content": "And?"},
    ]
    parameters = {"type": "object", "properties": {}}
    assert body["tools"] == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "strict": True, "parameters": parameters},
        }
    ]
    assert body["tool_choice"] == "auto"
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from(sorted(RECORDED)),
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 5)), max_size=4),
    st.booleans(),
)
def test_a_client_reads_the_undisturbed_response_or_that_it_failed(
    name: str, legs: list[tuple[float, int]], spoilt: bool
) -> None:
    """Cut several times at any byte, with tokens together as it comes, and perhaps by an engine that responds otherwise."""
    recorded = RECORDED[name]
    dialect, request, whole = DIALECTS[recorded["path"].encode()], recorded["request"], recorded["stream"]
    sofar, got = StreamProgress(), ""
    for share, together in legs:
        _, merger = leg(dialect, request, sofar)
        sent = other_leg(whole, together).encode()
        got += merger.feed(sent[: int(len(sent) * share)]).decode()
        sofar = merger.progress()
        if sofar.done:
            break
    said_before = said(got)
    if not sofar.done:
        other = other_leg(whole)
        if spoilt:
            other = re.sub(r'("(?:delta|text|thinking|partial_json)": ")', r"\1§", other)
        _, merger = leg(dialect, request, sofar)
        more = fed(merger, other)
        if merger.error:
            assert spoilt
            assert more == ""
            got += merger.error.decode()
        else:
            got += more
    assert numbers(got) == list(range(len(numbers(got))))
    if data_of(got)[-1]["type"] not in ("response.failed", "error") and not spoilt:
        assert _but_created(got) == _but_created(whole)
    elif got_text := said(got):
        assert spoilt
        assert said(whole).startswith(got_text) or not said_before


def said(stream: str) -> str:
    """All that the deltas of a stream add up to."""
    return "".join(step[1] for step in folded(stream) if isinstance(step, tuple))


def _but_created(stream: str) -> list[Any]:
    return folded(re.sub(r'"created_at": ?\d+', '"created_at":0', stream))
