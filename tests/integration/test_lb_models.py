"""Requests go where their model is served: through a real agent, to toy engines that know one model each."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clouds.schedules import examples
from tests.integration.lb_harness import RunningAgent, Seen, ToyTarget, World, until, world

CHAT = "/v1/chat/completions"
CLIENTS = 50


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as one:
        yield one


class Engine:
    """A toy engine that serves some models, and responds as vLLM to requests for others."""

    def __init__(self, *models: str, lists: bool = True) -> None:
        self.models = models
        self.lists = lists
        self.slow: asyncio.Event | None = None  # if set, generations wait for it
        self.asked: Counter[str] = Counter()
        self.listed = 0
        self.target: ToyTarget

    async def behave(self, seen: Seen) -> None:
        if seen.method == "GET":
            await self.list_models(seen)
            return
        if "lora_adapter" in seen.path:
            await self.change_adapter(seen)
            return
        model = json.loads(seen.body)["model"]
        self.asked[model] += 1
        if model not in self.models:
            error = {"error": {"message": f"The model `{model}` does not exist.", "code": 404}}
            await _reply(seen, error, "404 Not Found")
            return
        if self.slow is not None:
            await self.slow.wait()
        await _reply(seen, {"model": model, "by": self.target.name})

    async def change_adapter(self, seen: Seen) -> None:
        name, loads = json.loads(seen.body)["lora_name"], "/load" in seen.path
        if loads is (name in self.models):
            await seen.answer(b"", "400 Bad Request")
            return
        self.models = (*self.models, name) if loads else tuple(one for one in self.models if one != name)
        await seen.answer(b"Success")

    async def list_models(self, seen: Seen) -> None:
        if not self.lists:
            await seen.answer(b"", "404 Not Found")
            return
        self.listed += 1
        data = [{"id": one, "object": "model", "owned_by": self.target.name} for one in self.models]
        await _reply(seen, {"object": "list", "data": data})


async def _reply(seen: Seen, body: Any, status: str = "200 OK") -> None:
    await seen.answer(json.dumps(body).encode(), status, "Content-Type: application/json")


async def start(w: World, name: str, engine: Engine) -> Engine:
    engine.target = await w.target(name, engine.behave)
    engine.target.list_models = engine.list_models
    return engine


async def ask(agent: RunningAgent, model: str, path: str = CHAT) -> tuple[int, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    async with agent.http.post(agent.url + path, json=body) as response:
        return response.status, await response.json(content_type=None)


async def get(agent: RunningAgent, path: str = "/v1/models", **kwargs: Any) -> tuple[int, Any]:
    async with agent.http.get(agent.url + path, **kwargs) as response:
        return response.status, await response.json(content_type=None)


async def names(agent: RunningAgent) -> list[str]:
    return sorted(one["id"] for one in (await get(agent))[1]["data"])


def listing(agent: RunningAgent, *models: str) -> Callable[[], Any]:
    async def check() -> bool:
        return await names(agent) == sorted(models)

    return check


async def known(agent: RunningAgent, *models: str) -> None:
    """Until the agent has the lists of all targets."""
    await until(listing(agent, *models))


def flags(*engines: Engine) -> list[str]:
    return [
        flag
        for one in engines
        for flag in ("--target", f"{one.target.url},id={one.target.name},health_path=/health")
    ]


async def two(w: World) -> tuple[RunningAgent, Engine, Engine]:
    """An agent with an engine of model `a` and one of `b`, both known."""
    one, other = await start(w, "one", Engine("a")), await start(w, "other", Engine("b"))
    agent = await w.agent()
    await agent.push(one.target.json, other.target.json)
    await known(agent, "a", "b")
    return agent, one, other


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "requests"), [("cache_aware", examples(10_000)), ("least_load", examples(2_000))]
)
async def test_mixed_requests_get_no_wrong_404(w: World, policy: str, requests: int) -> None:
    """From the first request on: also before the agent has the lists."""
    one, other = await start(w, "one", Engine("a")), await start(w, "other", Engine("b"))
    agent = await w.agent()
    await agent.push(one.target.json, other.target.json, policy=policy)
    got: Counter[tuple[str, int, str]] = Counter()
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            model = "ab"[number * 7 % 3 % 2]
            status, body = await ask(agent, model)
            got[model, status, body.get("by", "")] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    assert set(got) == {("a", 200, "one"), ("b", 200, "other")}, got
    assert got.total() == requests
    wrong = one.asked["b"] + other.asked["a"]  # what an engine was asked in vain, before it was polled
    assert wrong < 2 * CLIENTS


async def test_requests_go_only_where_their_model_is_served(w: World) -> None:
    agent, one, other = await two(w)
    for path in (CHAT, "/v1/completions", "/v1/embeddings", "/v1/rerank"):
        for model, by in (("a", "one"), ("b", "other")):
            for _ in range(4):
                assert await ask(agent, model, path) == (200, {"model": model, "by": by})
    assert (one.asked["b"], other.asked["a"]) == (0, 0)


async def test_a_body_that_is_passed_on_as_it_comes_goes_where_its_model_is_served(w: World) -> None:
    agent, one, _ = await two(w)
    long = {"model": "b", "input": "x" * (12 * 1024 * 1024)}
    for _ in range(3):
        async with agent.http.post(agent.url + "/v1/embeddings", json=long) as response:
            assert (response.status, (await response.json())["by"]) == (200, "other")
    assert one.asked["b"] == 0


async def test_a_model_that_no_target_serves_is_a_404_of_the_load_balancer(w: World) -> None:
    agent, one, other = await two(w)
    one.slow = asyncio.Event()  # it would be a long wait, were it sent there or queued
    status, body = await ask(agent, "nope")
    assert status == 404
    assert body["error"]["code"] == "model_not_found"
    assert body["error"]["type"] == "invalid_request_error"
    assert "'nope'" in body["error"]["message"]
    assert one.asked["nope"] + other.asked["nope"] == 0


async def test_where_all_serve_the_same_the_engine_decides(w: World) -> None:
    one, other = await start(w, "one", Engine("a")), await start(w, "other", Engine("a"))
    agent = await w.agent()
    await agent.push(one.target.json, other.target.json)
    await until(listing(agent, "a"))
    status, body = await ask(agent, "nope")
    assert (status, body["error"]["code"]) == (404, 404)  # as the engine sends it
    assert one.asked["nope"] + other.asked["nope"] == 1


async def test_engines_that_list_no_models_are_asked_as_ever(w: World) -> None:
    one, other = await start(w, "one", Engine("a")), await start(w, "other", Engine("b", lists=False))
    agent = await w.agent()
    await agent.push(one.target.json, other.target.json, policy="round_robin")
    await until(lambda: asked_for(one))
    assert await ask(agent, "a") in [(200, {"model": "a", "by": "one"}), (404, UNKNOWN_A)]
    assert await ask(agent, "b") == (200, {"model": "b", "by": "other"})
    status, body = await ask(agent, "nope")
    assert (status, body["error"]["code"]) == (404, 404)
    assert one.asked["nope"] + one.asked["b"] == 0
    assert other.asked["nope"] == 1


UNKNOWN_A = {"error": {"message": "The model `a` does not exist.", "code": 404}}


async def asked_for(engine: Engine) -> bool:
    return engine.listed > 0


async def test_a_404_that_does_not_mean_the_model_is_passed_on(w: World) -> None:
    async def no_such_path(seen: Seen) -> None:
        if seen.method == "GET":
            await one.list_models(seen)
        else:
            await seen.answer(b'{"detail":"Not Found"}', "404 Not Found")

    one, other = await start(w, "one", Engine("a")), await start(w, "other", Engine("a", "b"))
    one.target.behave = no_such_path
    other.target.behave = no_such_path
    agent = await w.agent()
    await agent.push(one.target.json, other.target.json)
    await known(agent, "a", "b")
    assert await ask(agent, "a") == (404, {"detail": "Not Found"})
    assert sum(seen.method == "POST" for seen in (*one.target.seen, *other.target.seen)) == 1


# --- /v1/models


async def test_the_list_of_models_is_the_union(w: World) -> None:
    agent, _, _ = await two(w)
    status, body = await get(agent)
    assert (status, body["object"]) == (200, "list")
    assert {one["id"]: one["owned_by"] for one in body["data"]} == {"a": "one", "b": "other"}
    assert await get(agent, "/v1/models/b") == (200, {"id": "b", "object": "model", "owned_by": "other"})
    status, body = await get(agent, "/v1/models/nope")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    async with agent.http.head(agent.url + "/v1/models") as response:
        assert (response.status, await response.read()) == (200, b"")
        assert int(response.headers["Content-Length"]) > 100


async def test_a_name_with_a_slash_is_found_however_it_is_written(w: World) -> None:
    one, other = await start(w, "one", Engine("org/a")), await start(w, "other", Engine("b"))
    agent = await w.agent()
    await agent.push(one.target.json, other.target.json)
    await known(agent, "b", "org/a")
    for path in ("/v1/models/org/a", "/v1/models/org%2Fa"):
        async with agent.http.get(agent.url + path) as response:
            assert (response.status, (await response.json())["id"]) == (200, "org/a")


async def test_where_all_list_the_same_a_target_responds(w: World) -> None:
    one, other = await start(w, "one", Engine("a")), await start(w, "other", Engine("a"))
    agent = await w.agent()
    await agent.push(one.target.json, other.target.json)
    await until(lambda: asked_for(other))
    status, body = await get(agent)
    assert (status, len(body["data"])) == (200, 1)
    assert any(seen.path == "/v1/models" for seen in (*one.target.seen, *other.target.seen))


async def test_the_list_needs_a_key_as_all_else(w: World) -> None:
    agent, one, other = await two(w)
    key = "sk-only-for-this-test-0123456789"
    digest = hashlib.sha256(key.encode()).hexdigest()
    access = {"keys": [{"name": "team", "sha256": digest}]}
    await agent.push(one.target.json, other.target.json, revision="r2", access=access)
    status, body = await get(agent)
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    status, body = await get(agent, headers={"Authorization": f"Bearer {key}"})
    assert (status, len(body["data"])) == (200, 2)


# --- changes


@pytest.mark.long
async def test_a_rolling_rename_answers_each_name_while_a_replica_of_it_is_up(w: World) -> None:
    """Two replicas of the old name are replaced by two of the new one, with at most one more at a time."""
    old = [await start(w, f"old{n}", Engine("first")) for n in range(2)]
    new = [await start(w, f"new{n}", Engine("second")) for n in range(2)]
    agent = await w.agent()
    up: list[Engine] = list(old)
    phases = iter(range(1000))

    async def push(draining: Engine | None = None) -> None:
        targets = [one.target.json for one in up]
        if draining is not None:
            targets.append({**draining.target.json, "state": "draining", "drain_deadline_s": 30})
        await agent.push(*targets, revision=f"p{next(phases)}")

    failed: list[tuple[str, int, Any]] = []
    served: Counter[str] = Counter()
    wanted = {"first"}
    stopping = False

    async def client() -> None:
        while not stopping:
            for model in sorted(wanted):
                status, body = await ask(agent, model)
                served[model] += 1
                if status != 200:
                    failed.append((model, status, body))

    async def more() -> None:
        """Let the clients send many requests in this phase."""
        goal = served.total() + 300
        await until(lambda: enough(goal), tries=2000)

    async def enough(goal: int) -> bool:
        return served.total() >= goal

    await push()
    clients = [asyncio.create_task(client()) for _ in range(10)]
    await more()
    up.append(new[0])
    await push()
    wanted.add("second")
    await more()
    up.remove(old[0])
    await push(draining=old[0])
    await more()
    await old[0].target.stop()
    up.append(new[1])
    await push()
    await more()
    wanted.discard("first")  # from here on no replica of the name is up
    await more()  # and what was under way with it has ended
    up.remove(old[1])
    await push(draining=old[1])
    await more()
    await old[1].target.stop()
    await push()
    await more()
    stopping = True
    await asyncio.gather(*clients)
    assert failed == []
    assert min(served["first"], served["second"]) > 500
    status, _ = await ask(agent, "first")
    assert status == 404


async def test_an_engine_that_was_renamed_in_place_is_found_out_by_its_404(w: World) -> None:
    agent, one, other = await two(w)
    one.models, other.models = ("b",), ("a",)
    # The lists are wrong now; the first 404 has both polled again.
    await ask(agent, "a")
    await until(lambda: serves(agent, "a", "other"))
    await until(lambda: serves(agent, "b", "one"))


async def serves(agent: RunningAgent, model: str, by: str) -> bool:
    return await ask(agent, model) == (200, {"model": model, "by": by})


async def test_a_full_queue_of_one_model_does_not_hold_up_another(w: World) -> None:
    one, other = await start(w, "one", Engine("a")), await start(w, "other", Engine("b"))
    one.slow = asyncio.Event()
    agent = await w.agent()
    pushing = {"mode": "fixed_cap", "cap": 2}
    await agent.push(one.target.json, other.target.json, pushing=pushing)
    await known(agent, "a", "b")
    waiting = [asyncio.create_task(ask(agent, "a")) for _ in range(20)]
    await until(lambda: queued(agent, 18))
    for _ in range(50):
        assert await ask(agent, "b") == (200, {"model": "b", "by": "other"})
    assert (await agent.stats())["queued"] == 18
    one.slow.set()
    assert {status for status, _ in await asyncio.gather(*waiting)} == {200}
    assert other.asked["a"] == 0


async def queued(agent: RunningAgent, number: int) -> bool:
    return (await agent.stats())["queued"] == number


async def test_a_queue_full_of_requests_for_one_model_has_places_for_another(w: World) -> None:
    one, other = await start(w, "one", Engine("a")), await start(w, "other", Engine("b"))
    agent = await w.agent()
    other.slow = one.slow = asyncio.Event()
    await agent.push(
        one.target.json,
        other.target.json,
        limits={"max_held": 6, "hold_s": 60.0},
        pushing={"mode": "fixed_cap", "cap": 1},
    )
    await until(listing(agent, "a", "b"))

    async def queued() -> int:
        return int((await agent.stats())["queued"])

    async def held(count: int) -> None:
        async def check() -> bool:
            return await queued() == count

        await until(check)

    for_a = [asyncio.create_task(ask(agent, "a")) for _ in range(7)]
    await held(6)  # and one runs
    assert (await ask(agent, "a"))[0] == 429
    for_b = [asyncio.create_task(ask(agent, "b")) for _ in range(4)]  # one of them runs at once
    done, _ = await asyncio.wait(for_a, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    assert {one.result()[0] for one in done} == {429}

    async def shared() -> bool:
        return sum(task.done() for task in for_a) == 3

    await until(shared)
    assert await queued() == 6
    one.slow.set()
    assert [status for status, _ in await asyncio.gather(*for_b)] == [200] * 4
    assert sorted(status for status, _ in await asyncio.gather(*for_a)) == [200] * 4 + [429] * 3


async def test_an_adapter_loaded_through_the_endpoint_is_on_all_replicas_and_on_new_ones(w: World) -> None:
    engines = [await start(w, name, Engine("a")) for name in ("one", "other", "new")]
    foreign = await start(w, "foreign", Engine("z"))
    rows = [one.target.json for one in (*engines, foreign)]
    agent = await w.agent()
    await agent.push(rows[0], rows[1], rows[3], policy="round_robin")
    await known(agent, "a", "z")

    async def change(verb: str) -> int:
        body = {"lora_name": "sql", "lora_path": "/adapters/sql", "model": "a"}
        async with agent.http.post(f"{agent.url}/v1/{verb}_lora_adapter", json=body) as response:
            return response.status

    async def on_all(*where: Engine) -> bool:
        return all("sql" in one.models for one in where)

    async def on_none() -> bool:
        return not any("sql" in one.models for one in engines)

    assert await change("load") == 200
    await until(lambda: on_all(*engines[:2]))
    await known(agent, "a", "sql", "z")
    by = {(await ask(agent, "sql"))[1]["by"] for _ in range(4)}
    assert by == {"one", "other"}
    await agent.push(*rows, revision="r2", policy="round_robin")
    await until(lambda: on_all(*engines))
    assert await change("unload") == 200
    await until(on_none)
    assert foreign.models == ("z",)
