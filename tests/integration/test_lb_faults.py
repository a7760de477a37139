"""Hundreds of requests through an agent while targets fail and clients misbehave. With figures, and many more of them:
benchmarks/chaos/faults.py and streams.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.chaos import faults, streams
from benchmarks.chaos.cases import Manner, Mix
from tests.clouds.schedules import only_long
from tests.integration.lb_harness import Seen, until, world

pytestmark = pytest.mark.long


async def test_no_request_is_lost_or_answered_twice() -> None:
    report = await faults.run(faults.Plan(requests=400, seed=11, at_once=80))
    assert report.broken == []
    good = [outcome.good for case, outcome in report.cases if case.manner is Manner.WELL]
    assert sum(good) > 0.9 * len(good) > 0
    assert report.counters["retries_total"] > 0
    assert report.counters["continuations_total"] > 0
    assert {case.manner for case, _ in report.cases} >= {Manner.LEAVES_WAITING, Manner.LEAVES_IN_ANSWER}


@only_long
async def test_memory_does_not_grow_with_the_streams_that_have_been() -> None:
    mix = Mix(fault=0.05, bad_client=0.0, streams=True, words=200, pace_s=0.0)
    few = await faults.run(faults.Plan(requests=100, seed=1, at_once=50, calm_s=60.0, mix=mix))
    many = await faults.run(faults.Plan(requests=500, seed=1, at_once=50, calm_s=60.0, mix=mix))
    assert few.broken == many.broken == []
    # A stream's journal is some 20 kB here: 400 more of them would be 8 MiB.
    assert many.samples[-1].rss_mib < few.samples[-1].rss_mib + 4.0


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        pytest.param("skyserve", "auto", id="our engine, by tokens", marks=only_long),
        pytest.param("vllm", "auto", id="vLLM's shapes, by tokens"),
        pytest.param("sglang", "auto", id="SGLang's shapes", marks=only_long),
        pytest.param("llamacpp", "auto", id="llama.cpp's shapes, by text"),
        pytest.param("tgi", "auto", id="TGI's shapes, by text", marks=only_long),
    ],
)
async def test_streams_of_killed_engines_say_what_undisturbed_ones_say(kind: str, mode: str) -> None:
    report = await streams.run(streams.Plan(kind, mode, streams=24, kills=2, tokens=40, pace_s=0.05))
    assert report.broken == []
    assert report.continued >= 2
    assert report.seams_ms
    assert len(report.killed) == 2


_SAYS_NOTHING = {
    "a length of none": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 0\r\n\r\n",
    "no chunk": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an end": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("said", _SAYS_NOTHING.values(), ids=_SAYS_NOTHING)
@pytest.mark.parametrize("body", [b"{}", b'{"stream": true, "prompt": "x"}'], ids=["at once", "a stream"])
async def test_a_model_that_says_nothing_has_not_answered(tmp_path: Path, said: bytes, body: bytes) -> None:
    async def say_nothing(seen: Seen) -> None:
        await seen.send(said)
        if b"Connection: close" in said:
            seen.writer.close()

    async with world(tmp_path) as w:
        mute, well = await w.target("mute", say_nothing), await w.target("well")
        agent = await w.agent(f"--target={mute.url}", f"--target={well.url}")
        for _ in range(4):
            assert await agent.text("/v1/completions", data=body) == (200, "well")
        assert mute.seen


async def test_other_paths_may_be_answered_with_nothing(tmp_path: Path) -> None:
    async def say_nothing(seen: Seen) -> None:
        await seen.answer()

    async with world(tmp_path) as w:
        agent = await w.agent(f"--target={(await w.target('mute', say_nothing)).url}")
        assert await agent.text("/flush_cache", data=b"") == (200, "")


async def test_one_death_does_not_move_the_others_who_wait(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def behave(seen: Seen) -> None:
        if seen.body == b"die":
            seen.die()
        else:
            await go.wait()
            await seen.answer(b"waited")

    async with world(tmp_path) as w:
        one, other = await w.target("one", behave), await w.target("other")
        agent = await w.agent()
        await agent.push(one.json)
        waiting = asyncio.create_task(agent.text(data=b"wait"))
        await one.arrived.wait()
        await agent.push(one.json, other.json, revision="r2", policy="round_robin")
        while len(one.seen) < 2:
            assert await agent.text(data=b"die") == (200, "other")

        async def ejected() -> bool:
            return any(target["ejected"] for target in (await agent.stats())["targets"])

        await until(ejected)
        go.set()
        assert await waiting == (200, "waited")
        assert [seen.body for seen in other.seen].count(b"wait") == 0
