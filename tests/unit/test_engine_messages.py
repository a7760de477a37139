"""The Messages API's events: their order, and the text they add up to."""

from __future__ import annotations

from typing import Any

import pytest

from skyserve_cli.engine.api import Kind, parse_generation
from skyserve_cli.engine.errors import BadRequest, EngineDown
from skyserve_cli.engine.messages import MessageReply
from skyserve_cli.engine.model import FinishReason, TokenOutput
from skyserve_cli.engine.text import decode, encode
from tests.unit.engine_events import events, feed

USER = {"role": "user", "content": "Hello"}


def parsed(**body: Any) -> Any:
    return parse_generation({"messages": [USER], "max_tokens": 9} | body, Kind.MESSAGE, "llama", 1000)


@pytest.mark.parametrize(
    ("finish", "stops", "reason", "matched", "text"),
    [
        (FinishReason.STOP, [], "end_turn", None, " lake and sea."),
        (FinishReason.LENGTH, [], "max_tokens", None, " lake and sea."),
        (None, ["sea"], "stop_sequence", "sea", " lake and "),
    ],
)
def test_a_stream_adds_up(
    finish: FinishReason | None, stops: list[str], reason: str, matched: str | None, text: str
) -> None:
    one = MessageReply("1", parsed(stop_sequences=stops))
    raw = one.opening() + one.first_chunk(0) + feed(one, " lake") + feed(one, " and sea.", finish)
    found = events(raw + one.last_chunks())
    assert [event["type"] for event in found if event["type"] != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event["delta"].get("text", "") for event in found if "delta" in event) == text
    prompt = len(parsed().prompts[0])
    assert found[0]["message"]["usage"] == {"input_tokens": prompt, "output_tokens": 0}
    assert found[-2]["delta"] == {"stop_reason": reason, "stop_sequence": matched}
    assert found[-2]["usage"]["output_tokens"] >= len(encode(text.rstrip()))


def test_a_whole_message_says_the_same() -> None:
    one = MessageReply("1", parsed())
    one.transcripts[0].feed(TokenOutput("1", encode(" lake")[0], FinishReason.LENGTH, 0))
    assert one.whole() == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "llama",
        "content": [{"type": "text", "text": decode((encode(" lake")[0],))}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {"input_tokens": len(parsed().prompts[0]), "output_tokens": 1},
    }


def test_a_stream_that_cannot_go_on_ends_with_an_error() -> None:
    one = MessageReply("1", parsed())
    failed = events(one.opening() + one.failure(EngineDown("it died")))[-1]
    assert failed == {"type": "error", "error": {"type": "api_error", "message": "it died"}}


def test_the_system_speaks_first() -> None:
    blocks = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    assert parsed(system="Be brief.").prompts == parsed(system=blocks).prompts
    assert decode(parsed(system="Be brief.").prompts[0]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": None}, {"messages": "x"}, {"tool_choice": {"type": "any"}}, {"stop_sequences": [1]}],
    ids=str,
)
def test_what_is_wrong_is_named(wrong: dict[str, Any]) -> None:
    (field,) = wrong
    with pytest.raises(BadRequest) as refused:
        parsed(**wrong)
    assert refused.value.param in (field, "stop")


def test_a_response_goes_on_with_its_open_message() -> None:
    def prompt(**last: Any) -> str:
        items = [USER, {"type": "message", "role": "assistant", "content": "Once"} | last]
        body = {"input": items, "max_output_tokens": 9}
        return decode(parse_generation(body, Kind.RESPONSE, "llama", 1000).prompts[0])

    assert prompt(status="in_progress").endswith("<|im_start|>assistant\nOnce")
    assert prompt(status="completed").endswith("Once<|im_end|>\n<|im_start|>assistant\n")
