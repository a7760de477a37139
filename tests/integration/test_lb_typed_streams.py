"""Streams of `/v1/responses` and `/v1/messages` whose target dies, as the official clients read them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.integration.lb_harness import Behaviour, RunningAgent, Seen, World, world

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "unit" / "data" / "vllm_streams.json").read_text()
)
RESPONSES = [name for name in RECORDED if name.startswith("responses")]
MESSAGES = [name for name in RECORDED if name.startswith("messages")]


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


def playing(name: str, events: int | None = None, pause: bool = False) -> Behaviour:
    """A target that plays a recorded stream, and dies behind so many events."""

    async def play(seen: Seen) -> None:
        await seen.begin_stream()
        parts = [part + "\n\n" for part in RECORDED[name]["stream"].split("\n\n") if part.strip()]
        for part in parts[:events]:
            await seen.chunk(part.encode())
            if pause:
                await asyncio.sleep(0)
        if events is None:
            await seen.send(b"0\r\n\r\n")
        else:
            seen.die()

    return play


async def cut_agent(w: World, name: str, share: float) -> tuple[RunningAgent, list[Any]]:
    """An agent in front of targets that play the same stream; the first request is cut in the middle."""
    recorded = RECORDED[name]["stream"].count("data: ")
    seen: list[Any] = []
    first, whole = playing(name, max(1, int(recorded * share))), playing(name)

    async def behave(one: Seen) -> None:
        seen.append(json.loads(one.body))
        await (first if len(seen) == 1 else whole)(one)

    targets = [await w.target(label, behave) for label in ("a", "b")]
    agent = await w.agent(*(part for target in targets for part in ("--target", target.url)))
    return agent, seen


def clients(agent: RunningAgent) -> tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]:
    return (
        openai.AsyncOpenAI(base_url=agent.url + "/v1", api_key="x", max_retries=0),
        anthropic.AsyncAnthropic(base_url=agent.url, api_key="x", max_retries=0),
    )


def request(name: str, **changes: Any) -> dict[str, Any]:
    """The recorded request, as arguments of a client's method."""
    fields = RECORDED[name]["request"] | changes
    fields.pop("ignore_eos", None)
    if name in RESPONSES:
        return fields
    del fields["stream"]
    return fields | {"extra_body": {"temperature": fields.pop("temperature")}}


def last_event(name: str, kind: str) -> dict[str, Any]:
    found = [line[6:] for line in RECORDED[name]["stream"].split("\n") if line.startswith("data: ")]
    return next(event for event in map(json.loads, reversed(found)) if event["type"] == kind)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("name", RESPONSES)
async def test_openais_client_reads_one_response(w: World, name: str, share: float) -> None:
    agent, seen = await cut_agent(w, name, share)
    client, _ = clients(agent)
    numbers, final = [], None
    async with client:
        async for event in await client.responses.create(**request(name)):
            numbers.append(event.sequence_number)
            if event.type == "response.completed":
                final = event.response
    assert numbers == list(range(len(numbers)))
    assert final is not None
    expected = last_event(name, "response.completed")["response"]
    assert json.loads(final.model_dump_json())["usage"]["output_tokens"] == expected["usage"]["output_tokens"]
    assert [item.type for item in final.output] == [item["type"] for item in expected["output"]]
    assert final.output_text == "".join(
        part["text"] for item in expected["output"] if item["type"] == "message" for part in item["content"]
    )
    assert len(seen) == 2
    assert seen[0] == seen[1]


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("name", MESSAGES)
async def test_anthropics_client_reads_one_message(w: World, name: str, share: float) -> None:
    agent, seen = await cut_agent(w, name, share)
    _, client = clients(agent)
    async with client, client.messages.stream(**request(name)) as stream:
        message = await stream.get_final_message()
    expected = last_event(name, "message_delta")
    assert message.usage.output_tokens == expected["usage"]["output_tokens"]
    assert message.stop_reason == expected["delta"]["stop_reason"]
    texts = [line[6:] for line in RECORDED[name]["stream"].split("\n") if line.startswith("data: ")]
    said = [event["delta"] for event in map(json.loads, texts) if event["type"] == "content_block_delta"]
    assert "".join(block.text for block in message.content if block.type == "text") == "".join(
        delta.get("text", "") for delta in said
    )
    assert len(seen) == 2


async def test_openais_client_reads_that_a_response_failed(w: World) -> None:
    agent, seen = await cut_agent(w, "responses tools", 0.5)
    client, _ = clients(agent)
    async with client:
        events = [
            event
            async for event in await client.responses.create(**request("responses tools", temperature=0.7))
        ]
    assert events[-1].type == "response.failed"
    response = events[-1].response
    assert response.status == "failed"
    assert response.id == events[0].response.id
    assert response.error is not None
    assert "tool_call" in response.error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len(seen) == 1


async def test_anthropics_client_raises_that_a_message_failed(w: World) -> None:
    agent, seen = await cut_agent(w, "messages plain", 0.5)
    _, client = clients(agent)
    with pytest.raises(anthropic.APIStatusError, match="engine"):
        async with client, client.messages.stream(**request("messages plain", temperature=0.7)) as stream:
            await stream.get_final_message()
    assert len(seen) == 1


async def test_what_is_stored_on_the_engine_ends_as_failed(w: World) -> None:
    agent, seen = await cut_agent(w, "responses plain", 0.5)
    client, _ = clients(agent)
    async with client:
        events = [
            event
            async for event in await client.responses.create(
                **request("responses plain", previous_response_id="r")
            )
        ]
    assert events[-1].type == "response.failed"
    assert "engine_state" in events[-1].response.error.message
    assert len(seen) == 1
