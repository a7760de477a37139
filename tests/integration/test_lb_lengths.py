"""What a policy that predicts the length of responses learns from the requests that pass: `preserve` shows its guess as
`decode_tokens`, and the length of the prompt as `prefill_tokens`, in each explanation."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.integration.lb_harness import RunningAgent, Seen, World, until, world

CHAT = "/v1/chat/completions"
LENGTHS = {"short": 12, "long": 350}


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


async def write(seen: Seen) -> None:
    """An engine of an unknown kind: as many tokens as `LENGTHS` has for the model, in a stream without any usage, or in one
    piece with it."""
    asked = json.loads(seen.body)
    count = min(LENGTHS[asked["model"]], asked.get("max_tokens") or 10_000)
    if asked.get("stream"):
        await seen.begin_stream()
        for number in range(count):
            event = {"choices": [{"index": 0, "delta": {"content": f" {number}"}, "finish_reason": None}]}
            await seen.chunk(f"data: {json.dumps(event)}\n\n".encode())
        await seen.chunk(b"data: [DONE]\n\n")
        await seen.send(b"0\r\n\r\n")
    else:
        usage = {"prompt_tokens": 3, "completion_tokens": count}
        await seen.answer(json.dumps({"choices": [], "usage": usage}).encode())


def body(model: str = "short", content: Any = "hello there", **rest: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **rest}


class Asker:
    """Sends requests and reads what the policy thought of them."""

    def __init__(self, agent: RunningAgent) -> None:
        self.agent = agent
        self._count = 0

    async def terms(self, asked: dict[str, Any], key: str = "") -> dict[str, float]:
        self._count += 1
        headers = {"X-Request-Id": f"r{self._count}"} | ({"Authorization": f"Bearer {key}"} if key else {})
        status, _ = await self.agent.text(CHAT, json=asked, headers=headers)
        assert status == 200

        async def ended() -> bool:
            return bool((await self.agent.stats())["in_flight"] == 0)

        await until(ended)
        story = await self.agent.request("GET", f"/-/explain/r{self._count}")
        (candidates,) = [step["candidates"] for step in story["steps"] if step["candidates"]]
        return dict(candidates[0]["terms"])

    async def guess(self, asked: dict[str, Any], key: str = "") -> float:
        return (await self.terms(asked, key))["decode_tokens"]


@pytest.fixture(params=["preserve"])
async def asker(w: World, request: pytest.FixtureRequest) -> Asker:
    target = await w.target("engine", write)
    agent = await w.agent("--policy", request.param)
    keys = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("alice", "bob")]
    await agent.push(target.json, policy=request.param, access={"keys": keys})
    return Asker(agent)


async def test_streams_that_report_no_usage_teach_how_long_responses_are(asker: Asker) -> None:
    assert await asker.guess(body(stream=True), "alice") == 200  # nothing is known yet
    for _ in range(4):
        await asker.guess(body(stream=True), "alice")
    assert await asker.guess(body(stream=True), "alice") == LENGTHS["short"]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one piece"])
async def test_lengths_are_learned_by_model_and_by_tenant(asker: Asker, stream: bool) -> None:
    asked = {model: body(model, stream=True) if stream else body(model) for model in LENGTHS}
    for _ in range(6):
        for key in ("alice", "bob"):
            for model in LENGTHS:
                await asker.guess({**asked[model], "max_tokens": 5} if key == "bob" else asked[model], key)
    assert {model: await asker.guess(asked[model], "alice") for model in LENGTHS} == LENGTHS
    assert {await asker.guess(asked[model], "bob") for model in LENGTHS} == {5}


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "in one piece"])
@pytest.mark.parametrize("keys", [True, False], ids=["with keys", "without keys"])
async def test_max_tokens_bounds_the_guess(w: World, stream: bool, keys: bool, asker: Asker) -> None:
    if not keys:
        table = await asker.agent.request("GET", "/-/targets")
        await asker.agent.request("PUT", "/-/targets", json={**table, "access": {}, "revision": "open"})
    asked = body(max_tokens=10, **({"stream": True} if stream else {}))
    assert await asker.guess(asked, "alice" if keys else "") == 10


async def test_without_keys_lengths_are_learned_by_model(w: World) -> None:
    target = await w.target("engine", write)
    agent = await w.agent("--policy", "preserve", "--target", target.url)
    asker = Asker(agent)
    for _ in range(6):
        for model in LENGTHS:
            await asker.guess(body(model))
    assert {model: await asker.guess(body(model)) for model in LENGTHS} == LENGTHS


async def test_prompts_are_measured_without_the_json_around_them_and_images_by_what_they_cost(
    asker: Asker,
) -> None:
    words = "hello there"
    told = await asker.terms(body(content=words, metadata={"x": "y" * 4000}), "alice")
    assert len(words) / 4 <= told["prefill_tokens"] <= len(words) / 4 + 3
    image = {"url": "data:image/png;base64," + base64.b64encode(bytes(300_000)).decode()}
    parts = [{"type": "text", "text": words}, {"type": "image_url", "image_url": image}]
    told = await asker.terms(body(content=parts), "alice")
    assert 512 <= told["prefill_tokens"] <= 520


class TestTwelveStreams:
    """What most clients send: streams without `include_usage`, and no limit on their length."""

    USUAL: ClassVar[dict[str, int]] = {"alice": 20, "bob": 400}  # tokens
    SPREAD = (0.8, 0.9, 1.0, 1.1, 1.2, 1.0)  # of the usual, one response after another

    async def test_each_tenant_is_guessed_within_a_tenth(self, w: World) -> None:
        target = await w.target("engine", self.write)
        agent = await w.agent("--policy", "preserve")
        keys = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in self.USUAL]
        await agent.push(target.json, policy="preserve", access={"keys": keys})
        asker = Asker(agent)
        for number in range(12):
            for name, usual in self.USUAL.items():
                length = round(usual * self.SPREAD[number % len(self.SPREAD)])
                await asker.terms(body(content=f"{length} words please", stream=True), name)
        for name, usual in self.USUAL.items():
            assert await asker.guess(body(content="20 words please", stream=True), name) == pytest.approx(
                usual, rel=0.1
            )

    @staticmethod
    async def write(seen: Seen) -> None:
        """As many tokens as the prompt requests, one per event, and never a word about usage."""
        asked = json.loads(seen.body)
        assert asked["stream"]
        await seen.begin_stream()
        for number in range(int(asked["messages"][0]["content"].split()[0])):
            event = {"choices": [{"index": 0, "delta": {"content": f" {number}"}, "finish_reason": None}]}
            await seen.chunk(f"data: {json.dumps(event)}\n\n".encode())
        await seen.chunk(b"data: [DONE]\n\n")
        await seen.send(b"0\r\n\r\n")
