"""The Responses API's events: their order, their numbers, and the text they add up to."""

from __future__ import annotations

from typing import Any

import pytest

from skyserve_cli.engine.api import Kind, parse_generation
from skyserve_cli.engine.errors import BadRequest, EngineDown
from skyserve_cli.engine.model import FinishReason
from skyserve_cli.engine.responses import ResponseReply
from skyserve_cli.engine.text import encode
from tests.unit import engine_events
from tests.unit.engine_events import feed


def reply(**body: Any) -> ResponseReply:
    body = {"input": "Hello"} | body
    return ResponseReply("1", 1700000000, parse_generation(body, Kind.RESPONSE, "llama", 1000), body)


def events(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream, which are numbered."""
    found = engine_events.events(raw)
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


@pytest.mark.parametrize(
    ("finish", "status", "details"),
    [
        (FinishReason.STOP, "completed", None),
        (FinishReason.LENGTH, "incomplete", {"reason": "max_output_tokens"}),
    ],
    ids=["stopped", "at its limit"],
)
def test_a_stream_adds_up(finish: FinishReason, status: str, details: Any) -> None:
    one = reply(instructions="Be brief.", metadata={"a": "b"}, temperature=None)
    raw = one.opening() + one.first_chunk(0) + feed(one, " lake") + feed(one, " and sea.", finish)
    found = events(raw + one.last_chunks())
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        status,
    ]
    assert [event["delta"] for event in found[4:6]] == [" lake", " and sea."]
    assert found[2]["item"]["content"] == []
    assert found[3]["part"]["text"] == ""
    assert found[6]["text"] == found[7]["part"]["text"] == " lake and sea."
    last = found[-1]["response"]
    assert last["output"] == [found[8]["item"]]
    assert last["output"][0]["status"] == last["status"] == status
    assert last["incomplete_details"] == details
    assert last["usage"]["output_tokens"] == len(encode(" lake and sea."))
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert last["usage"]["total_tokens"] == last["usage"]["input_tokens"] + last["usage"]["output_tokens"]
    for event in (found[0], found[1], found[-1]):
        assert event["response"]["instructions"] == "Be brief."
        assert event["response"]["metadata"] == {"a": "b"}
        assert event["response"]["temperature"] == 1.0, "null means the default"
    assert found[0]["response"]["usage"] is None
    assert found[0]["response"]["output"] == []
    assert {event["item_id"] for event in found if "item_id" in event} == {found[2]["item"]["id"]}


def test_a_stream_that_cannot_go_on_ends_with_failed() -> None:
    one = reply()
    raw = one.opening() + one.first_chunk(0) + feed(one, " lake") + one.failure(EngineDown("it died"))
    failed = events(raw)[-1]
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "it died"}


def test_a_body_that_cannot_be_repeated_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    with pytest.raises(BadRequest, match="nested too deeply"):
        reply(metadata=deep)
