"""The death of an agent, with agents of three regions and engines as processes, and no controller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.lb_harness import World, until, world
from tests.integration.region_world import LinkedAgents, Row
from tests.integration.test_lb_streams import Engine, Told, told

pytestmark = pytest.mark.long

CHAT = "/v1/chat/completions"
STREAMS = 6


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as one:
        yield one


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    # Equal seeds: all engines send the same text.
    started = [await Engine.start("--speed", "1") for _ in range(2)]
    try:
        yield started
    finally:
        for engine in started:
            await engine.end()


@pytest.mark.parametrize("goes_on", ["us", "asia"])
async def test_streams_of_a_dead_peer_go_on_token_by_token(
    stage: World, tmp_path: Path, engines: list[Engine], goes_on: str
) -> None:
    """Streams from us run at eu, whose agent crashes: they go on at home, or at asia if us has no replica."""
    agents = await LinkedAgents.start(stage, tmp_path, "us", "eu", "asia", mortal=("eu",))
    others = {
        name: [agents.row("other", name, engines[1].url)] if name == goes_on else []
        for name in ("us", "asia")
    }
    await agents.own("us")
    await agents.own("asia")
    await agents.own("eu", agents.row("first", "eu", engines[0].url))
    await agents.fresh()

    async def engine_is_known() -> bool:
        return bool((await agents.peer("us", "eu"))["engine"] == "skyserve")

    await until(engine_is_known)
    async with aiohttp.ClientSession() as http:
        under_way: set[int] = set()

        async def stream(number: int, url: str) -> Told:
            async def runs() -> None:
                under_way.add(number)

            messages = [{"role": "user", "content": f"story {number}"}]
            return await told(http, url, CHAT, after=10, then=runs, messages=messages, max_tokens=300)

        running = [asyncio.create_task(stream(number, agents["us"].url)) for number in range(STREAMS)]

        async def all_run() -> bool:
            return len(under_way) == STREAMS

        await until(all_run)
        for name in ("us", "asia"):
            await agents.own(name, *others[name])
        agents["eu"].process.kill()
        found = await asyncio.gather(*running)
        expected = await asyncio.gather(*(stream(number, engines[1].url) for number in range(STREAMS)))
    for one, whole in zip(found, expected, strict=True):
        assert one.errors == []
        assert (one.text, one.done, one.finish) == (whole.text, 1, ["length"])
        assert one.usage[-1]["completion_tokens"] == whole.usage[-1]["completion_tokens"]
    assert await agents.metric("us", r"continuations_total\{.*\}") == STREAMS


async def test_the_backup_takes_over_without_a_controller_and_hands_back(
    stage: World, tmp_path: Path
) -> None:
    agents = await LinkedAgents.start(stage, tmp_path, "us", "eu", "asia", mortal=("eu",))
    targets = {name: await stage.target(name) for name in ("us", "eu", "asia")}
    rows: dict[str, Row] = {name: agents.row(name, name, one.url) for name, one in targets.items()}
    await agents.own("us", rows["us"], standby={"eu": [rows["eu"]]})
    await agents.own("eu", rows["eu"])
    await agents.own("asia", rows["asia"])
    await agents.fresh()
    agents["eu"].process.kill()

    async def targets_of(name: str) -> list[str]:
        return [one["id"] for one in (await agents[name].stats())["targets"]]

    async def taken_over() -> bool:
        return (await agents.regions("us"))["taken_over"] == ["cloud/eu"]

    await until(taken_over, tries=2000)
    assert await targets_of("us") == ["us", "eu"]
    assert await targets_of("asia") == ["asia"]
    assert "take over region=cloud/eu" in agents["us"].log.read_text()
    # The controller pushes another table: what was taken over stays.
    await agents.own("us", standby={"eu": [rows["eu"]]})
    assert await targets_of("us") == ["eu"]
    assert {await chat(agents, number) for number in range(5)} == {(200, "eu")}


async def chat(agents: LinkedAgents, number: int) -> tuple[int, str]:
    body: Any = {"messages": [{"role": "user", "content": f"number {number}"}]}
    return await agents["us"].text(CHAT, json=body)
