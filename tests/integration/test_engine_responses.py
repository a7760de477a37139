"""The engine's Responses API, by OpenAI's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from tests.integration.engine_harness import USER, Engine, serving


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with serving() as one:
        yield one


async def test_a_response_says_what_the_chat_says(engine: Engine) -> None:
    system = {"role": "system", "content": "Be brief."}
    chat = await engine.openai.chat.completions.create(model="llama", messages=[system, USER])  # type: ignore[list-item]
    response = await engine.openai.responses.create(
        model="llama", input=USER["content"], instructions="Be brief."
    )
    assert response.output_text == chat.choices[0].message.content != ""
    assert response.status == "completed"
    assert response.usage is not None
    assert chat.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
        chat.usage.total_tokens,
    )
    assert response.instructions == "Be brief."


async def test_a_response_at_its_limit_is_incomplete(engine: Engine) -> None:
    more = {"ignore_eos": True}
    response = await engine.openai.responses.create(
        model="llama", input=[USER], max_output_tokens=3, extra_body=more
    )
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == response.max_output_tokens == 3


@pytest.mark.parametrize("limit", [None, 2], ids=["completed", "incomplete"])
async def test_a_streamed_response_is_the_whole_one(engine: Engine, limit: int | None) -> None:
    body: dict[str, Any] = {"model": "llama", "input": [USER], "max_output_tokens": limit}
    whole = await engine.openai.responses.create(**body)
    kinds, text = [], ""
    async for event in await engine.openai.responses.create(**body, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == whole.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == event.type == f"response.{whole.status}"
    assert event.response.usage is not None
    assert whole.usage is not None
    assert event.response.usage.output_tokens == whole.usage.output_tokens
    assert event.response.output_text == text


async def test_the_clients_own_accumulator_reads_the_stream(engine: Engine) -> None:
    async with engine.openai.responses.stream(model="llama", input="Tell me about the lake.") as stream:
        final = await stream.get_final_response()
    whole = await engine.openai.responses.create(model="llama", input="Tell me about the lake.")
    assert final.output_text == whole.output_text != ""


async def test_a_conversation_goes_on_with_the_output_as_input(engine: Engine) -> None:
    first = await engine.openai.responses.create(model="llama", input=[USER], max_output_tokens=4)
    history: Any = [USER, *(item.model_dump() for item in first.output), {"role": "user", "content": "More."}]
    second = await engine.openai.responses.create(model="llama", input=history)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens


async def test_errors_are_the_apis_own(engine: Engine) -> None:
    with pytest.raises(NotFoundError, match="'gpt'") as missing:
        await engine.openai.responses.create(model="gpt", input="Hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(BadRequestError, match="maximum context length") as too_long:
        await engine.openai.responses.create(model="llama", input="word " * 20_000, stream=True)
    assert too_long.value.param == "input"
    with pytest.raises(BadRequestError, match="stores nothing"):
        await engine.openai.responses.create(model="llama", input="Hi", previous_response_id="resp_1")
