"""How the bench of real engines cuts a stream, and how it judges one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.chaos.real_streams import Ending, judge
from benchmarks.chaos.relay import Cut
from benchmarks.chaos.stream_apis import Api, Received

STREAM = b"head\r\n\r\n5\r\ndata: a\n\n\r\n5\r\ndata: bcde\n\n\r\n"


@pytest.mark.parametrize(
    ("cut", "passing"),
    [
        pytest.param(Cut(0), b"", id="before the first byte"),
        pytest.param(Cut(0, share=0.5), STREAM[:10], id="within the first event"),
        pytest.param(Cut(1), b"head\r\n\r\n5\r\ndata: a\n\n", id="behind an event"),
        pytest.param(Cut(1, share=0.5), STREAM[:28], id="within the second event"),
        pytest.param(Cut(3), None, id="behind what has come"),
    ],
)
def test_a_cut_lets_so_many_events_and_a_part_of_the_next_one_pass(cut: Cut, passing: bytes | None) -> None:
    assert cut.passing(0, STREAM) == passing


def test_a_cut_counts_the_events_that_have_passed_before() -> None:
    assert Cut(5).passing(4, STREAM) == Cut(1).passing(0, STREAM)


def test_a_cut_at_the_end_of_what_has_come_waits_for_the_next_bytes() -> None:
    assert Cut(1).passing(0, b"data: a\n\n") is None
    assert Cut(1).passing(1, b"data: b\n\n") == b""


def received(text: str, **more: Any) -> Received:
    """A complete chat, with other fields where they are given."""
    one = Received(Api.CHAT)
    chunk = {"id": "1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": text}}]}
    one.event(json.dumps(chunk))
    end = {"id": "1", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    one.event(json.dumps(end | {"usage": {"prompt_tokens": 2, "completion_tokens": 3}}))
    one.event("[DONE]")
    for name, value in more.items():
        setattr(one, name, value)
    return one


@pytest.mark.parametrize(
    ("got", "steps", "ending"),
    [
        pytest.param(received("abc"), [], Ending.EXACT, id="the same"),
        pytest.param(received("abd"), [], Ending.OTHER, id="another text"),
        pytest.param(received("abcabc"), [], Ending.OTHER, id="more text"),
        pytest.param(received("abc", finish="stop"), [], Ending.OTHER, id="another finish reason"),
        pytest.param(received("abc", usage=(2, 4)), [], Ending.OTHER, id="other counts"),
        pytest.param(received("abc", problems=["two roles"]), [], Ending.OTHER, id="a broken rule"),
        pytest.param(
            received("abd"), [{"event": "inexact", "why": "seed"}], Ending.INEXACT, id="another text that is reported"
        ),
        pytest.param(received("ab", error="{}"), [], Ending.ERROR, id="a prefix and an error"),
        pytest.param(received("b", error="{}"), [], Ending.OTHER, id="no prefix and an error"),
        pytest.param(received("abc", ended=False), [], Ending.BROKEN, id="no end"),
        pytest.param(received("", status=503), [], Ending.BROKEN, id="refused by the agent"),
    ],
)  # fmt: skip
def test_a_stream_is_judged_by_an_undisturbed_one(
    got: Received, steps: list[dict[str, Any]], ending: Ending
) -> None:
    assert judge(got, received("abc"), steps)[0] is ending


def test_what_the_engine_refuses_is_to_be_refused_alike() -> None:
    refused = received("", status=400)
    assert judge(received("", status=400), refused, [])[0] is Ending.EXACT
    assert judge(received("", status=502), refused, [])[0] is Ending.OTHER


def messages(*events: dict[str, Any]) -> Received:
    one = Received(Api.MESSAGES)
    for event in events:
        one.event(json.dumps(event))
    return one


def test_a_message_is_read_block_by_block() -> None:
    start = {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 4}}}
    one = messages(
        start,
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "ab"}},
        {"type": "content_block_stop"},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    )
    assert (one.text, one.finish, one.usage, one.ended, one.problems) == (
        "ab",
        "max_tokens",
        (4, 2),
        True,
        [],
    )
    again = messages(start, start, {"type": "message_stop"})
    assert again.problems


def test_a_response_has_its_numbers_in_order() -> None:
    one = Received(Api.RESPONSES)
    for number in (0, 2):
        one.event(json.dumps({"type": "response.in_progress", "sequence_number": number}))
    assert one.problems == ["response.in_progress has number 2, not 1"]


@pytest.mark.parametrize(
    ("api", "event"),
    [
        (Api.CHAT, {"error": {"message": "gone"}}),
        (Api.MESSAGES, {"type": "error", "error": {"type": "api_error", "message": "gone"}}),
        (
            Api.RESPONSES,
            {"type": "response.failed", "sequence_number": 0, "response": {"id": "r", "error": {"message": "gone"}}},
        ),
    ],
    ids=["chat", "messages", "responses"],
)  # fmt: skip
def test_each_api_has_an_error_event_of_its_own(api: Api, event: dict[str, Any]) -> None:
    one = Received(api)
    one.event(json.dumps(event))
    assert one.ended
    assert "gone" in (one.error or "")
