"""Our engine's chats and completions have the shape of those of a real vLLM, which `tests/engines/record.py` recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lb.engines.kinds import EngineKind
from skyserve_cli.engine.api import Generation, Kind, parse_generation
from skyserve_cli.engine.model import FinishReason, TokenOutput
from skyserve_cli.engine.replies import Reply, ReplyTranscript
from skyserve_cli.engine.style import Style
from skyserve_cli.engine.text import EOS, Language, decode
from tests.unit import stream_engines

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "vllm_chats.json").read_text(encoding="utf-8")
)
STREAMS = [name for name, case in RECORDED.items() if "events" in case]
LOGPROBS = [name for name in STREAMS if "logprobs" in name]
# What vLLM says of itself beside the response, and the count of cached tokens that it sends if it is started so.
NOT_OURS = {
    "completion_tokens_details", "ec_transfer_params", "kv_transfer_params", "metrics", "prompt_logprobs",
    "prompt_text", "prompt_tokens_details", "routed_experts", "service_tier", "system_fingerprint",
}  # fmt: skip
LITERAL = {"object", "finish_reason", "role"}


def shape(value: Any, name: str = "") -> Any:
    """Names in their order, and the kinds of values; literals where the API defines them."""
    if isinstance(value, dict):
        if name == "delta" and not value:
            return [("content", "str")]  # no text yet: see `test_an_event_without_text_has_an_empty_delta`
        return [(key, shape(one, key)) for key, one in value.items() if key not in NOT_OURS]
    if isinstance(value, list):
        return ["int"] if value and isinstance(value[0], int) else [shape(one) for one in value]
    if name in LITERAL or value is None:
        return value
    return type(value).__name__


def shapes(events: list[str], choice: int) -> list[Any]:
    """The shapes of a choice's events, and of those that belong to none, each run of equal ones once."""
    found: list[Any] = []
    for data in events:
        event = data if data == "[DONE]" else json.loads(data)
        if event != "[DONE]" and any(one["index"] != choice for one in event["choices"]):
            continue
        now = event if event == "[DONE]" else shape(event)
        if not found or found[-1] != now:
            found.append(now)
    return found


def ours(case: dict[str, Any]) -> tuple[Generation, Reply, bytes]:
    """Our engine's response to a recorded request, its stream included."""
    kind = Kind.CHAT if "messages" in case["request"] else Kind.COMPLETION
    asked = parse_generation(case["request"], kind, "tiny", 1000)
    style = Style(holds_text=True)
    reply = Reply("id", 1, asked, tuple(ReplyTranscript(asked, style) for _ in range(asked.choices)))
    language, stream = Language(seed=7), b""
    requests = asked.requests("r")
    contexts = [language.read(one.prompt, one.seed) for one in requests]
    for made in range(1, requests[0].max_tokens + 1):
        for index, (request, context) in enumerate(zip(requests, contexts, strict=True)):
            transcript = reply.transcripts[index]
            if transcript.finish is not None:
                continue
            token = language.next(context, may_end=False)
            context.extend((token,))
            last = made == request.max_tokens
            transcript.feed(TokenOutput(request.id, token, FinishReason.LENGTH if last else None, 0))
            if asked.stream:
                stream += reply.first_chunk(index) + reply.chunk(index, transcript.take())
    return asked, reply, stream + reply.last_chunks()


def with_stops_of_ours(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """The recorded request, with stop strings and tokens that our engine meets where vLLM met its own."""
    request = case["request"]
    if "stop_token_ids" not in request and name.rpartition("_")[2] not in ("met", "kept"):
        return case
    free = {key: value for key, value in request.items() if not key.startswith("stop") or key == "stream"}
    _, _, stream = ours({"request": {**free, "return_token_ids": True}})
    ids = [
        token
        for data in data_of(stream)
        if data != "[DONE]"
        for choice in json.loads(data)["choices"]
        for token in choice.get("token_ids") or []
    ]
    if "stop_token_ids" in request:
        return {"request": {**free, "stop_token_ids": [ids[2]]}}
    return {"request": {**free, "stop": ["zqzqzq", decode(ids[2:3])[:3]]}}


def data_of(stream: bytes) -> list[str]:
    return [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("name", [name for name in STREAMS if name not in LOGPROBS])
def test_a_stream_has_the_events_of_vllm(name: str) -> None:
    case = RECORDED[name]
    _, reply, stream = ours(with_stops_of_ours(name, case))
    for choice in range(len(reply.transcripts)):
        mine, its = shapes(data_of(stream), choice), shapes(case["events"], choice)
        if len(its) < len(mine):  # vLLM has put all tokens of a choice into one event
            assert len(mine) - len(its) == 1
            mine = [one for one in mine if one in its]
        assert mine == its


@pytest.mark.parametrize("name", [name for name, case in RECORDED.items() if "body" in case])
def test_a_whole_response_has_the_fields_of_vllm(name: str) -> None:
    case = RECORDED[name]
    _, reply, _ = ours(case)
    mine, its = json.loads(json.dumps(reply.whole())), json.loads(case["body"])
    assert fields(mine) == fields(its)


def fields(value: Any) -> Any:
    """As `shape`, in any order."""
    shaped = dict(shape(value))
    (choice,) = value["choices"]
    return {
        **shaped,
        "choices": dict(shape(choice)) | {"message": dict(shape(choice.get("message", {})))},
        "usage": dict(shaped["usage"]),
    }


def test_an_event_without_text_has_an_empty_delta() -> None:
    for events in (
        RECORDED["chat_stop_unmet"]["events"],
        data_of(ours(RECORDED["chat_stop_unmet"])[2]),
    ):
        choices = [choice for data in events[1:-1] for choice in json.loads(data)["choices"]]
        assert choices[0]["delta"] == {}
        assert choices[0]["token_ids"]
        assert choices[-1]["delta"]["content"]


@pytest.mark.parametrize(
    "name", [name for name in STREAMS if name.partition("_")[2] in ("plain", "usage", "counted", "ids")]
)
def test_the_double_of_vllm_has_its_shapes(name: str) -> None:
    case = RECORDED[name]
    events = stream_engines.stream(
        EngineKind.VLLM,
        case["path"].encode(),
        {**case["request"], "ignore_eos": True},
        1,
    )
    assert shapes(data_of(b"".join(events)), 0) == shapes(case["events"], 0)


def test_the_end_token_has_ids_and_no_text() -> None:
    asked = parse_generation(
        {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}, Kind.CHAT, "tiny", 1000
    )
    transcript = ReplyTranscript(asked)
    transcript.feed(TokenOutput("r", EOS, FinishReason.STOP, 0))
    reply = Reply("id", 1, asked, (transcript,))
    (choice,) = json.loads(reply.chunk(0, transcript.take())[6:])["choices"]
    assert (choice["delta"], choice["token_ids"], choice["stop_reason"]) == ({}, [EOS], None)
