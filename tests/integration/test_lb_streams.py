"""Streams that outlive their target, with real engine processes: the client sees one stream."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.clouds.schedules import only_long
from tests.integration.lb_harness import RunningAgent, Seen, World, until, world

pytestmark = pytest.mark.long

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


class Engine:
    """One engine process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    @classmethod
    async def start(cls, *arguments: str) -> Engine:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "skyserve_cli.engine", "--port", "0", "--model", "m", "--profile", "a100-7b",
            *arguments, stderr=asyncio.subprocess.PIPE, env=ENVIRONMENT,
        )  # fmt: skip
        assert process.stderr is not None
        said = (await asyncio.wait_for(process.stderr.readline(), 30)).decode()
        found = re.search(r"http://\S+", said)
        assert found, said
        return cls(process, found.group())

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    # Equal seeds: all engines send the same text. Slow enough to be killed in the middle of a response.
    started = await asyncio.gather(*(Engine.start("--speed", "1") for _ in range(3)))
    try:
        yield started
    finally:
        for engine in started:
            await engine.end()


class Told:
    """What a client has received in one stream."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: set[str] = set()
        self.created: set[int] = set()
        self.roles = 0
        self.finish: list[str] = []
        self.usage: list[Any] = []
        self.done = 0
        self.errors: list[Any] = []
        self.keys: set[str] = set()

    def event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done += 1
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        self.ids.add(chunk["id"])
        self.created.add(chunk["created"])
        if chunk.get("usage"):
            self.usage.append(chunk["usage"])
        self.keys |= chunk.keys()
        for choice in chunk["choices"]:
            self.keys |= choice.keys()
            delta = choice.get("delta", {})
            self.roles += "role" in delta
            self.text += delta.get("content") or choice.get("text") or ""
            if choice.get("finish_reason"):
                self.finish.append(choice["finish_reason"])


def body(path: str, **more: Any) -> dict[str, Any]:
    asked = {"model": "m", "stream": True, "max_tokens": 120, "seed": 7, "ignore_eos": True}
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Tell me of the sea."}]}
        if path.endswith("chat/completions")
        else {"prompt": "The sea"}
    )
    return asked | prompt | {"stream_options": {"include_usage": True}} | more


async def told(
    http: aiohttp.ClientSession, url: str, path: str, after: int = 0, then: Any = None, **more: Any
) -> Told:
    """Read one stream; after a number of events do something."""
    headers = more.pop("headers", {})
    one = Told()
    async with http.post(url + path, json=body(path, **more), headers=headers) as response:
        assert response.status == 200, await response.text()
        count = 0
        async for line in response.content:
            if line.startswith(b"data: "):
                one.event(line[6:].strip())
                count += 1
                if count == after and then is not None:
                    await then()
    return one


async def serving(agent: RunningAgent) -> str:
    """The id of the target that has the only request."""
    (busy,) = (one["id"] for one in (await agent.stats())["targets"] if one["in_flight"])
    return str(busy)


PATHS = ["/v1/chat/completions", "/v1/completions"]
# A completion of an engine of unknown kind, which reports no tokens, is continued if it has no limit.
UNCOUNTED: dict[str, Any] = {"stream_options": None, "max_tokens": None}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--continue", "auto"), id="by tokens"),
        pytest.param(("--continue", "auto", "--no-pump"), id="by tokens, chunks moved by Python"),
        pytest.param(("--continue", "exact"), id="only exactly", marks=only_long),
    ],
)
async def test_a_stream_goes_on_when_its_engine_is_killed_twice(
    w: World, engines: list[Engine], path: str, options: tuple[str, ...]
) -> None:
    agent = await w.agent(*options, *(f"--target={engine.url}" for engine in engines))
    await until(lambda: identified(agent))
    undisturbed = await told(agent.http, engines[0].url, path)

    async def kill() -> None:
        target = await serving(agent)
        (engine,) = (one for one in engines if one.url == target)
        engine.process.send_signal(signal.SIGKILL)

    one = Told()
    async with agent.http.post(agent.url + path, json=body(path)) as response:
        count = 0
        async for line in response.content:
            if line.startswith(b"data: "):
                one.event(line[6:].strip())
                count += 1
                if count in (20, 60):
                    await kill()
    assert one.errors == []
    assert one.text == undisturbed.text
    assert len(one.ids) == len(one.created) == one.done == 1
    assert one.roles == undisturbed.roles
    assert one.finish == undisturbed.finish
    assert one.keys <= undisturbed.keys  # nothing that the client has not asked for
    (usage,), (expected,) = one.usage, undisturbed.usage
    assert usage["completion_tokens"] == expected["completion_tokens"] == 120
    assert usage["prompt_tokens"] == expected["prompt_tokens"]
    metrics = await agent.request("GET", "/-/metrics")
    assert re.search(r"skyserve_lb_continuations_total\{.*\} 2\.0", metrics)
    assert (await agent.stats())["in_flight"] == 0


@pytest.mark.parametrize("options", [(), ("--no-pump",)], ids=["fast path", "chunks moved by Python"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_that_is_not_resumed_passes_as_it_comes_and_is_counted(
    w: World, engines: list[Engine], path: str, options: tuple[str, ...]
) -> None:
    agent = await w.agent("--continue", "off", *options, f"--target={engines[0].url}")
    await until(lambda: identified(agent, 1))
    direct, passed = Told(), Told()
    for url, one in ((engines[0].url, direct), (agent.url, passed)):
        async with agent.http.post(url + path, json=body(path)) as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    one.event(line[6:].strip())
    assert (passed.text, passed.finish, passed.keys, passed.done) == (
        direct.text,
        direct.finish,
        direct.keys,
        1,
    )
    (usage,) = passed.usage
    metrics = await agent.request("GET", "/-/metrics")
    assert re.search(rf"skyserve_lb_output_tokens_total\{{.*\}} {usage['completion_tokens']}\.0", metrics)


async def identified(agent: RunningAgent, engines: int = 3) -> bool:
    return agent.log.read_text().count("kind=skyserve") >= engines


async def test_a_draining_target_hands_its_stream_over_before_its_deadline(
    w: World, engines: list[Engine]
) -> None:
    path = PATHS[0]
    targets = [{"id": str(n), "url": engine.url} for n, engine in enumerate(engines)]
    agent = await w.agent()
    await agent.push(*targets, continuation={"handover_s": 30.0})
    await until(lambda: identified(agent))
    undisturbed = await told(agent.http, engines[0].url, path)

    async def drain() -> None:
        busy = await serving(agent)
        draining = [
            {**one, "state": "draining", "drain_deadline_s": 20.0} if one["id"] == busy else one
            for one in targets
        ]
        await agent.push(*draining, revision="r2", continuation={"handover_s": 30.0})

    one = await told(agent.http, agent.url, path, after=10, then=drain)
    assert (one.text, one.finish, one.done, one.errors) == (undisturbed.text, undisturbed.finish, 1, [])
    assert re.search(r"skyserve_lb_handovers_total\{.*\} 1\.0", await agent.request("GET", "/-/metrics"))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        pytest.param({"headers": {"X-SkyServe-Continue": "off"}}, "off", id="the client opts out"),
        pytest.param({"n": 2}, "several_choices", id="two choices"),
    ],
)
async def test_what_must_not_be_continued_ends_with_an_error_event(
    w: World, engines: list[Engine], more: dict[str, Any], reason: str
) -> None:
    agent = await w.agent(*(f"--target={engine.url}" for engine in engines[:2]))

    async def kill() -> None:
        target = await serving(agent)
        (engine,) = (one for one in engines if one.url == target)
        engine.process.send_signal(signal.SIGKILL)

    one = Told()
    with_error = None
    try:
        one = await told(agent.http, agent.url, PATHS[0], after=10, then=kill, **more)
    except aiohttp.ClientPayloadError as error:
        with_error = error
    if reason == "off":
        assert with_error is not None  # passed as it comes, and cut as it was
    else:
        (error,) = one.errors
        assert error["code"] == "stream_interrupted"
        assert reason in error["message"]
        assert one.done == 0


@pytest.mark.parametrize("how", ["it dies", "its machine vanishes"])
async def test_a_stream_whose_last_words_are_lost_is_closed_without_another_engine(
    w: World, how: str
) -> None:
    said = asyncio.Event()

    async def nearly(seen: Seen) -> None:
        await seen.begin_stream()
        envelope = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        for choice in (
            {"index": 0, "delta": {"role": "assistant", "content": "Hi"}, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": "stop"},
        ):
            await seen.chunk(b"data: " + json.dumps(envelope | {"choices": [choice]}).encode() + b"\n\n")
        said.set()
        if how == "it dies":
            seen.die()
        else:
            await seen.gone()

    target = await w.target("only", nearly)
    agent = await w.agent()
    await agent.push(target.json, limits={"suspect_after_s": 0.2, "probe_timeout_s": 0.2})
    telling = asyncio.create_task(told(agent.http, agent.url, PATHS[0], stream_options=None))
    await said.wait()
    target.frozen = how != "it dies"
    one = await asyncio.wait_for(telling, 20)
    assert (one.text, one.finish, one.done, one.errors) == ("Hi", ["stop"], 1, [])


@pytest.mark.parametrize("told_by", ["probes", "table"])
async def test_a_stream_is_continued_when_its_machine_vanishes_without_a_word(w: World, told_by: str) -> None:
    """No connection is closed: only probes tell, or the controller, long before it counts as a stall."""
    begun = asyncio.Event()

    async def speak(seen: Seen) -> None:
        asked = json.loads(seen.body)
        await seen.begin_stream()
        if asked["prompt"] == "The sea":
            await seen.chunk(event("one "))
            begun.set()
            await seen.gone()
            return
        assert asked["prompt"] == "The seaone "
        await seen.chunk(event("two", "stop"))
        await seen.chunk(b"data: [DONE]\n\n")
        await seen.send(b"0\r\n\r\n")

    targets = [await w.target("a", speak), await w.target("b", speak)]
    agent = await w.agent()
    limits = {"suspect_after_s": 0.2, "probe_timeout_s": 0.2 if told_by == "probes" else 20.0}
    await agent.push(*(one.json for one in targets), limits=limits)
    telling = asyncio.create_task(told(agent.http, agent.url, PATHS[1], **UNCOUNTED))
    await begun.wait()
    (there,) = (one for one in targets if one.seen)
    there.frozen = True
    if told_by == "table":
        left = [one.json for one in targets if one is not there]
        await agent.push(*left, revision="r2", limits=limits)
    one = await asyncio.wait_for(telling, 20)
    assert (one.text, one.finish, one.done, one.errors) == ("one two", ["stop"], 1, [])
    assert re.search(
        r"skyserve_lb_stalled_streams_total\{.*\} 0\.0", await agent.request("GET", "/-/metrics")
    )


async def test_half_an_answer_waits_longer_for_a_target_than_a_request_that_has_none(w: World) -> None:
    async def begin(seen: Seen) -> None:
        await seen.begin_stream()
        await seen.chunk(event("one "))
        seen.die()

    async def finish(seen: Seen) -> None:
        await seen.begin_stream()
        await seen.chunk(event("two", "stop"))
        await seen.chunk(b"data: [DONE]\n\n")
        await seen.send(b"0\r\n\r\n")

    first, last = await w.target("first", begin), await w.target("last", finish)
    limits = {"hold_s": 0.2}
    agent = await w.agent()
    await agent.push(first.json, limits=limits)
    telling = asyncio.create_task(told(agent.http, agent.url, PATHS[1], **UNCOUNTED))

    async def held() -> bool:
        return (await agent.stats())["queued"] == 1

    await first.arrived.wait()
    await agent.push(revision="r2", limits=limits)
    await until(held)
    status, _ = await agent.text()  # comes later, and is turned away sooner
    assert status == 503
    assert not telling.done()
    await agent.push(last.json, revision="r3", limits=limits)
    one = await asyncio.wait_for(telling, 20)
    assert (one.text, one.finish, one.done, one.errors) == ("one two", ["stop"], 1, [])


def event(text: str, finish: str | None = None) -> bytes:
    envelope = {"id": "c1", "object": "text_completion", "created": 1, "model": "m"}
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps(envelope | {"choices": [choice]}).encode() + b"\n\n"


async def test_a_stream_that_stalls_is_continued_although_comments_keep_coming(w: World) -> None:
    async def stall(seen: Seen) -> None:
        await seen.begin_stream()
        envelope = {"id": "c1", "object": "text_completion", "created": 1, "model": "m"}
        choice = {"index": 0, "text": "one ", "finish_reason": None}
        await seen.chunk(b"data: " + json.dumps(envelope | {"choices": [choice]}).encode() + b"\n\n")
        while True:
            await seen.chunk(b": still here\n\n")
            await asyncio.sleep(0.05)

    async def finish(seen: Seen) -> None:
        asked = json.loads(seen.body)
        if asked["prompt"] != "The sea" + "one ":
            return await stall(seen)
        await seen.begin_stream()
        envelope = {"id": "c2", "object": "text_completion", "created": 2, "model": "m"}
        choice = {"index": 0, "text": "two", "finish_reason": "stop"}
        await seen.chunk(b"data: " + json.dumps(envelope | {"choices": [choice]}).encode() + b"\n\n")
        await seen.chunk(b"data: [DONE]\n\n")
        await seen.send(b"0\r\n\r\n")

    targets = [await w.target("a", finish), await w.target("b", finish)]
    agent = await w.agent()
    await agent.push(*(one.json for one in targets), limits={"stall_timeout_s": 0.5})
    one = await told(agent.http, agent.url, PATHS[1], **UNCOUNTED)
    assert (one.text, one.finish, one.done, one.errors) == ("one two", ["stop"], 1, [])
    assert one.ids == {"c1"}
    assert re.search(
        r"skyserve_lb_stalled_streams_total\{.*\} 1\.0", await agent.request("GET", "/-/metrics")
    )
