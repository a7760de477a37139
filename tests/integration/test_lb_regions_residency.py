"""Requests of a residency zone, with agents of three regions as processes: they wait, and nothing of them is sent elsewhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.integration.lb_harness import Seen, ToyTarget, World, until, world
from tests.integration.region_world import LinkedAgents

CHAT = "/v1/chat/completions"
ZONES = {"eu": ["eu"], "north": ["eu"]}
SECRET = "a-word-that-must-not-leave"
LIMITS = {"hold_s": 0.5}
KEYS = {
    "keys": [
        {"name": "acme", "sha256": sha256(b"of-acme").hexdigest(), "residency": "eu"},
        {"name": "free", "sha256": sha256(b"of-free").hexdigest()},
    ]
}


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as one:
        yield one


async def linked(stage: World, folder: Path, *names: str) -> LinkedAgents:
    return await LinkedAgents.start(stage, folder, *names, zones=ZONES)


async def ask(agents: LinkedAgents, name: str, key: str = "", text: str = SECRET) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"messages": [{"role": "user", "content": text}]}
    return await agents[name].text(CHAT, json=body, headers=headers)


def code(response: tuple[int, str]) -> tuple[int, str]:
    return response[0], json.loads(response[1])["error"]["code"]


def heard(target: ToyTarget) -> list[bytes]:
    return [one.body for one in target.seen if one.path == CHAT]


async def test_a_pinned_key_is_served_in_its_zone_only(stage: World, tmp_path: Path) -> None:
    agents = await linked(stage, tmp_path, "us", "eu")
    here, there = await stage.targets("here", "there")
    await agents.own("us", agents.row("here", "us", here.url), access=KEYS, limits=LIMITS)
    await agents.own("eu", agents.row("there", "eu", there.url), access=KEYS, limits=LIMITS)
    await agents.fresh()
    assert await ask(agents, "us", "of-acme") == (200, "there")  # forwarded, although `here` is idle
    assert await ask(agents, "us", "of-free", "hello") == (200, "here")
    assert await ask(agents, "eu", "of-acme") == (200, "there")
    assert not any(SECRET.encode() in body for body in heard(here))


@pytest.mark.long
async def test_a_pinned_key_without_a_replica_in_its_zone_gets_503(stage: World, tmp_path: Path) -> None:
    agents = await linked(stage, tmp_path, "us", "eu")
    here = await stage.target("here")
    await agents.own("us", agents.row("here", "us", here.url), access=KEYS, limits=LIMITS)
    await agents.own("eu", access=KEYS, limits=LIMITS)
    await agents.fresh()
    for name in ("us", "eu"):
        assert code(await ask(agents, name, "of-acme")) == (503, "residency")
        assert await agents.metric(name, r'residency_denied_total\{.*zone="eu"\}') == 1
    assert await ask(agents, "eu", "of-free") == (200, "here")
    assert len(heard(here)) == 1


@pytest.mark.long
async def test_what_enters_in_a_zone_stays_in_it_also_while_it_is_full(stage: World, tmp_path: Path) -> None:
    """eu has no room, us is idle and asia's replica is in eu's own table: neither gets a byte."""
    agents = await linked(stage, tmp_path, "us", "eu")
    release = asyncio.Event()

    async def slowly(seen: Seen) -> None:
        await release.wait()
        await seen.answer(b"busy")

    here, adopted = await stage.targets("here", "adopted")
    busy = await stage.target("busy", slowly)
    rest: dict[str, Any] = {"limits": LIMITS, "pushing": {"mode": "fixed_cap", "cap": 1}}
    await agents.own("us", agents.row("here", "us", here.url), **rest)
    rows = [agents.row("busy", "eu", busy.url), agents.row("adopted", "asia", adopted.url)]
    await agents.own("eu", *rows, residency=["eu"], **rest)
    await agents.fresh()
    first = asyncio.create_task(ask(agents, "eu"))
    await busy.arrived.wait()
    refused = await asyncio.gather(*(ask(agents, "eu") for _ in range(4)))
    assert [code(one) for one in refused] == [(503, "residency")] * 4
    release.set()
    assert await first == (200, "busy")
    assert heard(here) == heard(adopted) == []
    assert (await agents.peer("eu", "us"))["forwarded_out"] == 0


@pytest.mark.long
async def test_a_peer_of_the_zone_may_have_it_and_obeys_as_well(stage: World, tmp_path: Path) -> None:
    """eu forwards to north, which has a replica of us in its table, too, and uses only its own."""
    agents = await linked(stage, tmp_path, "us", "eu", "north")
    foreign, there = await stage.targets("foreign", "there")
    await agents.own("us")
    await agents.own("eu", residency=["eu"])
    rows = [agents.row("foreign", "us", foreign.url), agents.row("there", "north", there.url)]
    await agents.own("north", *rows)
    await agents.fresh()
    for number in range(8):
        assert await ask(agents, "eu", text=f"{SECRET} {number}") == (200, "there")
    assert heard(foreign) == []


async def test_a_request_that_waits_obeys_a_table_that_comes_meanwhile(stage: World, tmp_path: Path) -> None:
    agents = await linked(stage, tmp_path, "eu")
    foreign = await stage.target("foreign")
    limits = {"limits": {"hold_s": 5.0}}
    await agents.own("eu", residency=["eu"], **limits)
    waiting = asyncio.create_task(ask(agents, "eu"))

    async def queued() -> bool:
        return bool((await agents["eu"].stats())["queued"] == 1)

    await until(queued)
    await agents.own("eu", agents.row("foreign", "us", foreign.url), residency=["eu"], **limits)
    there = await stage.target("there")
    rows = [agents.row("foreign", "us", foreign.url), agents.row("there", "eu", there.url)]
    await agents.own("eu", *rows, residency=["eu"], **limits)
    assert await waiting == (200, "there")
    assert heard(foreign) == []


async def test_a_failed_replica_of_the_zone_is_not_replaced_by_one_outside(
    stage: World, tmp_path: Path
) -> None:
    agents = await linked(stage, tmp_path, "eu")

    async def dies(seen: Seen) -> None:
        seen.die()

    foreign, bad = await stage.target("foreign"), await stage.target("bad", dies)
    rows = [agents.row("foreign", "us", foreign.url), agents.row("bad", "eu", bad.url)]
    await agents.own("eu", *rows, residency=["eu"], limits=LIMITS)
    status, _ = await ask(agents, "eu")
    assert status in (502, 503)
    assert heard(foreign) == []
