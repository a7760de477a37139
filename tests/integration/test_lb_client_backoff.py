"""The official clients wait for as long as a 429 of ours requires, and do not try again where that is in vain."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import openai
import pytest

from tests.integration.lb_harness import RunningAgent, Seen, World, world

PROMPT_TOKENS = {1: 20, 2: 630, 3: 3000}  # by max_tokens
SAID = {"role": "user", "content": "hi"}


async def engine(seen: Seen) -> None:
    prompt_tokens = PROMPT_TOKENS[json.loads(seen.body)["max_tokens"]]
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "total_tokens": prompt_tokens + 1}
    message = {"role": "assistant", "content": "hello"}
    data: dict[str, object] = {
        "id": "c1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }  # fmt: skip
    if seen.path == "/v1/messages":
        data = {
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn",
            "content": [{"type": "text", "text": "hello"}], "usage": {"input_tokens": prompt_tokens, "output_tokens": 1},
        }  # fmt: skip
    await seen.answer(json.dumps(data).encode(), "200 OK", "Content-Type: application/json")


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as found:
        yield found


async def agent_for(w: World, **limits: float) -> RunningAgent:
    agent = await w.agent("--hold", "0", "--target", (await w.target("engine", engine)).url)
    key = {"name": "team", "sha256": hashlib.sha256(b"key").hexdigest(), **limits}
    await agent.request("PATCH", "/-/options", json={"access": {"keys": [key]}})
    return agent


async def test_clients_wait_until_a_request_is_let_in(w: World) -> None:
    agent = await agent_for(w, tokens_per_minute=600)  # ten a second
    ours = openai.AsyncOpenAI(base_url=agent.url + "/v1", api_key="key", max_retries=3)
    theirs = anthropic.AsyncAnthropic(base_url=agent.url, api_key="key", max_retries=3)
    async with ours, theirs:
        got = await ours.chat.completions.with_raw_response.create(model="m", messages=[SAID], max_tokens=2)
        assert got.headers["x-ratelimit-limit-tokens"] == "600"
        hasty = ours.with_options(max_retries=0)
        with pytest.raises(openai.RateLimitError) as limited:
            await hasty.chat.completions.create(model="m", messages=[SAID], max_tokens=1)
        assert limited.value.code == "rate_limit_exceeded"
        assert 1 <= int(limited.value.response.headers["retry-after"]) <= 5
        assert limited.value.response.headers["x-ratelimit-remaining-tokens"] == "0"
        answer = await ours.chat.completions.create(model="m", messages=[SAID], max_tokens=1)
        assert answer.choices[0].message.content == "hello"
        said = await theirs.messages.create(model="m", max_tokens=1, messages=[SAID])
        assert said.content[0].text == "hello"
    counts = (await agent.request("GET", "/-/keys"))["keys"][0]
    assert counts["admitted"] == 3
    assert counts["limited"] <= 3  # none had to wait twice


async def test_clients_give_up_a_request_that_would_wait_for_minutes(w: World) -> None:
    agent = await agent_for(w, tokens_per_minute=600)
    ours = openai.AsyncOpenAI(base_url=agent.url + "/v1", api_key="key", max_retries=5)
    theirs = anthropic.AsyncAnthropic(base_url=agent.url, api_key="key", max_retries=5)
    async with ours, theirs:
        await ours.chat.completions.create(model="m", messages=[SAID], max_tokens=3)  # a debt of minutes
        with pytest.raises(openai.RateLimitError) as limited:
            await ours.chat.completions.create(model="m", messages=[SAID], max_tokens=1)
        assert int(limited.value.response.headers["retry-after"]) > 60
        with pytest.raises(anthropic.RateLimitError) as refused:
            await theirs.messages.create(model="m", max_tokens=5, messages=[SAID])
        assert refused.value.body["error"]["type"] == "rate_limit_error"
    admitted = (await agent.request("GET", "/-/keys"))["keys"][0]
    assert (admitted["admitted"], admitted["limited"]) == (1, 2)
