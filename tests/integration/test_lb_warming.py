"""New replicas are warmed over real sockets: engines with caches, residency, an engine that dies, an agent that drains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine_harness import Engine, serving
from tests.integration.lb_harness import RunningAgent, Seen, ToyTarget, World, until, world

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are a clerk of the harbour office. " * 100}
SECRET = "a-word-that-must-not-leave"
ONE = {"pushing": {"mode": "fixed_cap", "cap": 1}}


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as one:
        yield one


async def ask(
    agent: RunningAgent, text: str, system: dict[str, str] = SYSTEM, key: str = ""
) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {"X-Request-Id": text.replace(" ", "-")}
    body = {"messages": [system, {"role": "user", "content": text}], "max_tokens": 4}
    return await agent.text(CHAT, json=body, headers=headers)


async def sampled(agent: RunningAgent, **more: Any) -> None:
    """Two requests that share a prefix, each of them a sample."""
    assert (await ask(agent, "the first", **more))[0] == 200
    await asyncio.sleep(1.05)
    assert (await ask(agent, "the second", **more))[0] == 200


async def ended(agent: RunningAgent, why: str) -> bool:
    return f'why="{why}"' in await metrics(agent, "warmups")


async def metrics(agent: RunningAgent, family: str) -> str:
    text = await agent.request("GET", "/-/metrics")
    return "\n".join(line for line in text.splitlines() if line.startswith(f"skyserve_lb_{family}_total"))


def row(name: str, engine: Engine) -> dict[str, Any]:
    return {"id": name, "url": engine.url, "health_path": "/health"}


def warmed(target: ToyTarget) -> list[Any]:
    return [body for one in target.seen if (body := json.loads(one.body)).get("max_tokens") == 1]


async def saying(seen: Seen) -> None:
    await seen.answer(b'{"choices": []}', "200 OK", "Content-Type: application/json")


class Slow:
    """An engine whose prefills end when they are let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun = asyncio.Event()

    async def __call__(self, seen: Seen) -> None:
        if json.loads(seen.body).get("max_tokens") == 1:
            self.begun.set()
            await self.go.wait()
        await saying(seen)


async def test_the_first_request_with_a_hot_prefix_is_a_cache_hit(stage: World) -> None:
    async with serving() as old, serving() as new:
        agent = await stage.agent("--policy", "gorgo")
        await agent.push(row("old", old), policy="gorgo")
        await sampled(agent)
        before = await agent.stats(), await metrics(agent, "requests"), await metrics(agent, "input_tokens")
        await agent.push(row("old", old), row("new", new), policy="gorgo", revision="r2")
        await until(lambda: ended(agent, "complete"))
        # It is no request of a client: nothing is counted, for the service or for the target.
        after = await agent.stats()
        assert after["requests"] == before[0]["requests"]
        assert next(one for one in after["targets"] if one["id"] == "new")["requests"] == 0
        assert (await metrics(agent, "requests"), await metrics(agent, "input_tokens")) == before[1:]
        assert await new.metric("vllm:prefix_cache_hits_total") == 0
        computed = await new.metric("vllm:prefix_cache_queries_total")
        await agent.push(row("new", new), policy="gorgo", revision="r3")
        assert (await ask(agent, "the third"))[0] == 200
        hits = await new.metric("vllm:prefix_cache_hits_total")
        assert hits > 0.9 * computed
        story = await agent.request("GET", "/-/explain/the-third")
        assert story["steps"][0]["matched_bytes"] > 3500


async def test_while_it_is_warmed_a_replica_is_passed_over_and_shown_as_such(stage: World) -> None:
    slow = Slow()
    old, new = await stage.target("old", saying), await stage.target("new", slow)
    agent = await stage.agent("--policy", "gorgo")
    await agent.push(old.json, policy="gorgo")
    await sampled(agent)
    await agent.push(old.json, new.json, policy="gorgo", revision="r2")
    await slow.begun.wait()
    assert (await agent.stats())["warming"] == ["new"]
    assert (await agent.stats())["in_flight"] == 0
    for number in range(4):
        assert (await ask(agent, f"now {number}"))[0] == 200
    assert len(old.seen) == 6
    story = await agent.request("GET", "/-/explain/now-3")
    assert ("passed_over", "new") in [(one["event"], one["target"]) for one in story["steps"]]
    assert 'standing="warming"' in await agent.request("GET", "/-/metrics")
    slow.go.set()
    await until(lambda: ended(agent, "complete"))
    assert (await agent.stats()).get("warming") is None
    assert len(warmed(new)) == len(new.seen) == 1
    assert SYSTEM["content"] not in agent.log.read_text()


@pytest.mark.long
async def test_a_request_that_no_other_replica_has_room_for_goes_to_it(stage: World) -> None:
    slow, busy = Slow(), asyncio.Event()

    async def occupied(seen: Seen) -> None:
        if b"stay" in seen.body:
            await busy.wait()
        await saying(seen)

    old, new = await stage.target("old", occupied), await stage.target("new", slow)
    agent = await stage.agent()
    await agent.push(old.json, **ONE)
    await sampled(agent)
    await agent.push(old.json, new.json, revision="r2", **ONE)
    await slow.begun.wait()
    first = asyncio.create_task(ask(agent, "stay"))
    await until(lambda: in_flight(agent, 1))
    assert (await ask(agent, "overflow"))[0] == 200
    assert b"overflow" in new.seen[-1].body
    busy.set()
    slow.go.set()
    assert (await first)[0] == 200
    await until(lambda: ended(agent, "complete"))


async def in_flight(agent: RunningAgent, number: int) -> bool:
    return bool((await agent.stats())["in_flight"] == number)


async def test_with_nothing_to_compute_it_takes_its_share_at_once(stage: World) -> None:
    old, new = await stage.target("old", saying), await stage.target("new", saying)
    agent = await stage.agent("--policy", "round_robin")
    await agent.push(old.json, policy="round_robin")
    assert (await ask(agent, "only one"))[0] == 200
    await agent.push(old.json, new.json, policy="round_robin", revision="r2")
    for number in range(4):
        await ask(agent, f"{number}")
    assert len(new.seen) == 2
    assert await metrics(agent, "warmups") == ""


@pytest.mark.long
async def test_it_can_be_turned_off(stage: World) -> None:
    old, new = await stage.target("old", saying), await stage.target("new", saying)
    agent = await stage.agent()
    off = {"warming": {"seconds": 0}}
    await agent.push(old.json, **off)
    await sampled(agent)
    await agent.push(old.json, new.json, revision="r2", **off)
    assert (await agent.stats()).get("warming") is None
    await asyncio.sleep(0.3)
    assert new.seen == []


@pytest.mark.long
async def test_prompts_of_a_zone_are_sent_to_its_replicas_only(stage: World) -> None:
    keys = [
        {"name": "acme", "sha256": sha256(b"of-acme").hexdigest(), "residency": "eu"},
        {"name": "free", "sha256": sha256(b"of-free").hexdigest()},
    ]
    rest: dict[str, Any] = {"access": {"keys": keys}}
    old, inside, outside = [await stage.target(name, saying) for name in ("old", "inside", "outside")]
    agent = await stage.agent()
    first = old.json | {"zones": ["eu"]}
    await agent.push(first, **rest)
    secret = {"role": "system", "content": SECRET * 200}
    await sampled(agent, system=secret, key="of-acme")
    await asyncio.sleep(1.05)
    await sampled(agent, key="of-free")
    await agent.push(first, inside.json | {"zones": ["eu"]}, outside.json, revision="r2", **rest)
    await until(lambda: both_ended(agent))
    assert {str(one["messages"][0]["content"])[:10] for one in warmed(inside)} == {SECRET[:10], "You are a "}
    assert [one["messages"][0] for one in warmed(outside)] == [SYSTEM]
    assert not any(SECRET.encode() in one.body for one in outside.seen)


async def both_ended(agent: RunningAgent) -> bool:
    return 'why="complete"} 2.0' in await metrics(agent, "warmups")


async def test_an_engine_that_dies_meanwhile_harms_no_request(stage: World) -> None:
    slow = Slow()
    old, new = await stage.target("old", saying), await stage.target("new", slow)
    agent = await stage.agent()
    await agent.push(old.json)
    await sampled(agent)
    await agent.push(old.json, new.json, revision="r2")
    await slow.begun.wait()
    await new.stop()
    await until(lambda: not_warming(agent))
    for number in range(6):
        assert (await ask(agent, f"after {number}"))[0] == 200


async def not_warming(agent: RunningAgent) -> bool:
    return (await agent.stats()).get("warming") is None


async def test_an_agent_that_drains_sends_no_prefix_more(stage: World) -> None:
    slow = Slow()
    old, new = await stage.target("old", saying), await stage.target("new", slow)
    agent = await stage.agent()
    await agent.push(old.json)
    await sampled(agent)
    await agent.push(old.json, new.json, revision="r2")
    await slow.begun.wait()
    await agent.request("POST", "/-/drain")
    await until(lambda: ended(agent, "stopped"))
    assert (await ask(agent, "still served"))[0] == 200


@pytest.mark.long
async def test_an_agent_that_hands_its_ports_over_sends_no_prefix_more(stage: World, tmp_path: Path) -> None:
    left = asyncio.Event()

    async def abandoned(seen: Seen) -> None:
        if json.loads(seen.body).get("max_tokens") == 1:
            await seen.gone()
            left.set()
        else:
            await saying(seen)

    old, new = await stage.target("old", saying), await stage.target("new", abandoned)
    flags = ("--handover-socket", str(tmp_path / "handover"), "--table-file", str(tmp_path / "table.json"))
    first = await stage.agent(*flags, clean_exit=False)
    await first.push(old.json)
    await sampled(first)
    await first.push(old.json, new.json, revision="r2")
    await until(lambda: is_warming(first))
    successor = await stage.agent(*flags)
    await asyncio.wait_for(left.wait(), 10)
    assert (await successor.stats()).get("warming") is None
    for number in range(4):
        assert (await ask(successor, f"after {number}"))[0] == 200


async def is_warming(agent: RunningAgent) -> bool:
    return bool((await agent.stats()).get("warming"))


@pytest.mark.long
async def test_time_is_bounded_and_the_replica_takes_its_share_then(stage: World) -> None:
    slow = Slow()
    old, new = await stage.target("old", saying), await stage.target("new", slow)
    agent = await stage.agent("--policy", "round_robin")
    rest: dict[str, Any] = {"warming": {"seconds": 0.5}, "policy": "round_robin"}
    await agent.push(old.json, **rest)
    await sampled(agent)
    await agent.push(old.json, new.json, revision="r2", **rest)
    await slow.begun.wait()
    await until(lambda: ended(agent, "time"))
    for number in range(4):
        assert (await ask(agent, f"{number}"))[0] == 200
    assert len(new.seen) == 3


@pytest.mark.long
async def test_a_priority_that_an_engine_refuses_is_left_out(stage: World) -> None:
    """vLLM without priority scheduling: each prefix is computed all the same."""

    async def like_vllm(seen: Seen) -> None:
        if "priority" in json.loads(seen.body):
            await seen.answer(b'{"error": {}}', "400 Bad Request", "Content-Type: application/json")
        else:
            await saying(seen)

    page = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"

    async def polled(seen: Seen) -> None:
        await seen.answer(page, "200 OK", "Content-Type: text/plain")

    old, new = await stage.target("old", saying), await stage.target("new", like_vllm)
    old.respond_to_poll = new.respond_to_poll = polled
    agent = await stage.agent()
    await agent.push(old.json)
    await sampled(agent)
    await until(lambda: detected(agent))
    await agent.push(old.json, new.json, revision="r2")
    await until(lambda: ended(agent, "complete"))
    assert ["priority" in one for one in warmed(new)] == [True, False]


async def detected(agent: RunningAgent) -> bool:
    return "kind=vllm" in agent.log.read_text()
