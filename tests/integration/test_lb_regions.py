"""Two agents of two regions as processes: requests that leave, come back, stay; what a data port does not believe."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from policies.routing.cache_digest import MARK_BYTES, PLACES
from tests.integration.lb_harness import RunningAgent, Seen, ToyTarget, World, until, world
from tests.integration.region_links import identity

CHAT = "/v1/chat/completions"


class Pair:
    """The agents of us and eu, linked, with the targets they own."""

    def __init__(self, agents: dict[str, RunningAgent]) -> None:
        self.agents = agents
        self.us, self.eu = agents["us"], agents["eu"]

    async def own(
        self,
        name: str,
        *targets: ToyTarget,
        revision: str = "r1",
        accelerators: tuple[str, ...] = (),
        **rest: Any,
    ) -> None:
        other = "eu" if name == "us" else "us"
        peer = {
            "id": f"cloud/{other}#1",
            "region": f"cloud/{other}",
            "url": f"https://127.0.0.1:{self.agents[other].peers_port}",
            "tls_name": other,
            "egress_usd_per_gb": 0.02,
        }
        regions = {"agent": f"cloud/{name}#1", "here": f"cloud/{name}", "peers": [peer]}
        rows = [{"id": one.name, "url": one.url, "region": f"cloud/{name}"} for one in targets]
        for row, accelerator in zip(rows, accelerators, strict=False):
            row["accelerator"] = accelerator
        await self.agents[name].push(*rows, revision=revision, regions=regions, **rest)

    async def row(self, name: str) -> Any:
        return (await self.agents[name].request("GET", "/-/regions"))["peers"][0]

    async def fresh(self) -> None:
        async def heard() -> bool:
            return all([(await self.row(name))["rtt_ms"] is not None for name in self.agents])

        await until(heard)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as one:
        yield one


async def linked(stage: World, folder: Path, mortal: str = "") -> Pair:
    """Start both agents; the one named `mortal` may be killed."""
    agents = {}
    for name in ("us", "eu"):
        known = identity(folder / name, name)
        files = ("--peers-certfile", str(known.own), "--peers-cafile", str(known.authority))
        words = ("--region", f"cloud/{name}", "--policy", "gorgo", *files)
        agents[name] = await stage.agent(*words, clean_exit=name != mortal)
    return Pair(agents)


@pytest.fixture
async def pair(stage: World, tmp_path: Path) -> Pair:
    return await linked(stage, tmp_path)


async def chat(agent: RunningAgent, **headers: str) -> tuple[int, str]:
    return await agent.text(CHAT, json={"messages": [{"role": "user", "content": "hello"}]}, headers=headers)


async def explanation(agent: RunningAgent, name: str) -> Any:
    return await agent.request("GET", f"/-/explain/{name}")


async def test_a_region_without_a_replica_is_served_by_its_peer(stage: World, pair: Pair) -> None:
    there = await stage.target("there")
    await pair.own("us")
    await pair.own("eu", there)
    await pair.fresh()
    status, text = await chat(pair.us, **{"X-Request-Id": "far", "X-Forwarded-For": "203.0.113.9"})
    assert (status, text) == (200, "there")
    assert (await pair.row("us"))["forwarded_out"] == 1
    assert (await pair.row("eu"))["forwarded_in"] == 1
    seen = there.seen[-1]
    assert seen.header("X-SkyServe-Hop") is None
    assert seen.header("X-Request-Id") == "far"
    assert seen.header("X-Forwarded-For") == "127.0.0.1, 127.0.0.1"  # what a client claims is not believed
    step = next(one for one in (await explanation(pair.us, "far"))["steps"] if one["event"] == "forwards")
    assert step["target"] == "cloud/eu#1"
    assert {one["target"] for one in step["candidates"]} == {"", "cloud/eu#1"}
    (peer,) = (await explanation(pair.us, "far"))["peers"]
    assert (peer["peer"], peer["request_id"]) == ("cloud/eu#1", "far")
    assert [one["event"] for one in peer["steps"]] == ["came_from", "chose", "answered"]
    assert [one["target"] for one in peer["steps"]] == ["cloud/us#1", "there", "there"]
    assert (await pair.row("eu"))["forwarded_in"] == 1, "a question is no request"
    # It was demand where it entered, and there alone.
    assert (await pair.us.stats())["requests"] == 1
    assert (await pair.eu.stats())["requests"] == 0


async def test_a_peer_reports_each_kind_of_its_replicas(stage: World, pair: Pair) -> None:
    await pair.own("us")
    await pair.own("eu", await stage.target("slow"), await stage.target("fast"), accelerators=("L4", "A100"))

    async def heard() -> bool:
        return len((await pair.row("us"))["classes"]) == 2

    await until(heard)
    assert [one["available"] for one in (await pair.row("us"))["classes"]] == [1, 1]
    assert (await pair.row("eu"))["classes"] == []


@pytest.mark.long
async def test_metrics_tell_what_went_to_and_came_from_each_peer(stage: World, pair: Pair) -> None:
    there = await stage.target("there")
    await pair.own("us")
    await pair.own("eu", there)
    await pair.fresh()
    assert await chat(pair.us) == (200, "there")

    async def samples(agent: RunningAgent) -> dict[tuple[str, str], float]:
        """By name and reason."""
        found = {}
        for family in text_string_to_metric_families(await agent.request("GET", "/-/metrics")):
            for one in family.samples:
                if "peer" in one.labels:
                    found[one.name.removeprefix("skyserve_lb_"), one.labels.get("reason", "")] = one.value
        return found

    us, eu = await samples(pair.us), await samples(pair.eu)
    assert us["forwards_total", "arrival"] == 1
    assert us["returned_forwards_total", ""] == 0
    assert us["peer_sent_bytes_total", ""] > len("hello")
    assert us["peer_egress_usd_total", ""] == pytest.approx(us["peer_sent_bytes_total", ""] * 0.02 / 1e9)
    assert 0 <= us["peer_round_trip_seconds", ""] < 1
    assert 0 <= us["peer_silent_seconds", ""] < 5
    assert eu["peer_requests_total", ""] == 1
    assert eu["peer_refusals_total", ""] == 0
    assert eu["peer_sent_bytes_total", ""] == len("there")


async def test_two_agents_of_one_region_know_what_each_has_sent_where(stage: World, pair: Pair) -> None:
    targets = await stage.targets("a", "b")
    rows = [{"id": one.name, "url": one.url, "region": "cloud/us"} for one in targets]
    for name, other in (("us", "eu"), ("eu", "us")):
        url = f"https://127.0.0.1:{pair.agents[other].peers_port}"
        sibling = {"id": f"{other}#1", "region": "cloud/us", "url": url, "tls_name": other}
        regions = {"agent": f"{name}#1", "here": "cloud/us", "siblings": [sibling]}
        await pair.agents[name].push(*rows, revision="r1", regions=regions, policy="gorgo")

    async def digests(name: str) -> Any:
        return (await pair.agents[name].request("GET", "/-/regions"))["digests"][0]

    async def ask(agent: RunningAgent, subject: str) -> str:
        body = {"messages": [{"role": "user", "content": f"{subject} " * 400}]}
        status, text = await agent.text(CHAT, json=body)
        assert status == 200
        return text

    places = {subject: await ask(pair.us, subject) for subject in ("whales", "rain", "tea", "chess", "law")}
    assert set(places.values()) == {"a", "b"}
    marks = sum(place <= 400 * len(f"{subject} ") for subject in places for place in PLACES)

    async def sent() -> bool:
        return bool((await digests("us"))["sent_bytes"] >= MARK_BYTES * marks)

    await until(sent)  # which is in the other's socket then
    assert {subject: await ask(pair.eu, subject) for subject in reversed(places)} == places
    assert (await digests("eu"))["age_s"] is not None
    shown = await pair.us.request("GET", "/-/metrics")
    (value,) = re.findall(
        r'^skyserve_lb_cache_digest_sent_bytes_total{.*peer="eu#1".*} (\S+)', shown, re.MULTILINE
    )
    assert float(value) >= MARK_BYTES * marks
    assert (await pair.us.request("GET", "/-/regions"))["peers"] == []


async def test_an_idle_region_keeps_its_requests(stage: World, pair: Pair) -> None:
    here, there = await stage.targets("here", "there")
    await pair.own("us", here)
    await pair.own("eu", there)
    await pair.fresh()
    for _ in range(20):
        assert await chat(pair.us) == (200, "here")
    assert (await pair.row("us"))["forwarded_out"] == 0


@pytest.mark.long
async def test_connections_to_a_peer_are_kept(stage: World, pair: Pair) -> None:
    await pair.own("us")
    await pair.own("eu", await stage.target("there"))
    await pair.fresh()
    before = len(pair.eu.log.read_text())  # which refused the first one if its table came later
    for _ in range(10):
        assert (await chat(pair.us))[0] == 200
    log = pair.eu.log.read_text()[before:]
    assert (await pair.row("eu"))["forwarded_in"] == 10
    assert "refuse connection" not in log


async def test_a_hop_is_not_believed_on_the_data_port(stage: World, pair: Pair) -> None:
    here = await stage.target("here")
    await pair.own("us", here)
    await pair.own("eu")
    forged = {"X-SkyServe-Hop": "age=0;left=5;weight=1000;tenant=boss"}
    assert await chat(pair.us, **forged) == (200, "here")
    assert here.seen[-1].header("X-SkyServe-Hop") is None
    metrics = await pair.us.request("GET", "/-/metrics")
    counted = [line for line in metrics.splitlines() if 'code="forged_hop"' in line]
    assert [line.rpartition(" ")[2] for line in counted] == ["1.0"]


@pytest.mark.long
async def test_keys_are_checked_and_charged_where_a_request_enters(stage: World, pair: Pair) -> None:
    from hashlib import sha256

    key = {"name": "acme", "sha256": sha256(b"secret").hexdigest(), "requests_per_minute": 2}
    there = await stage.target("there")
    await pair.own("us", access={"keys": [key]})
    await pair.own("eu", there, access={"keys": [key]})
    await pair.fresh()
    answers = [(await chat(pair.us, Authorization="Bearer secret"))[0] for _ in range(3)]
    assert answers == [200, 200, 429]
    assert (await chat(pair.us))[0] == 401
    assert there.seen[-1].header("Authorization") is None
    # The limit holds over both agents; nothing is charged twice.

    async def refused_there() -> bool:
        return (await chat(pair.eu, Authorization="Bearer secret"))[0] == 429

    await until(refused_there, tries=100)


async def test_a_peer_that_dies_before_the_first_byte_costs_no_request(stage: World, tmp_path: Path) -> None:
    pair = await linked(stage, tmp_path, mortal="eu")
    arrived = asyncio.Event()

    async def never(seen: Seen) -> None:
        arrived.set()
        await seen.gone()

    here = await stage.target("here")
    await pair.own("us")
    await pair.own("eu", await stage.target("there", never))
    await pair.fresh()
    waiting = asyncio.create_task(chat(pair.us))
    await arrived.wait()
    await pair.own("us", here, revision="r2")
    pair.eu.process.kill()
    assert await waiting == (200, "here")


@pytest.mark.long
async def test_what_a_full_peer_returns_waits_at_home(stage: World, pair: Pair) -> None:
    """More requests than eu has room for, and none here: each is served once, by eu, in its turn."""
    release = asyncio.Event()

    async def slowly(seen: Seen) -> None:
        await release.wait()
        await seen.answer(b"there")

    there = await stage.target("there", slowly)
    pushing = {"mode": "fixed_cap", "cap": 1}
    await pair.own("us", pushing=pushing)
    await pair.own("eu", there, pushing=pushing)
    await pair.fresh()
    async with aiohttp.ClientSession() as http:

        async def ask(number: int) -> str:
            body = json.dumps({"messages": [{"role": "user", "content": f"number {number}"}]})
            async with http.post(pair.us.url + CHAT, data=body) as response:
                return f"{response.status} {await response.text()}"

        asking = [asyncio.create_task(ask(number)) for number in range(6)]

        async def all_are_somewhere() -> bool:
            us, eu = await pair.us.stats(), await pair.eu.stats()
            return bool(us["queued"] + eu["queued"] + eu["in_flight"] == 6)

        await until(all_are_somewhere)
        await there.arrived.wait()
        assert len([one for one in there.seen if one.path == CHAT]) == 1
        release.set()
        assert await asyncio.gather(*asking) == ["200 there"] * 6
    bodies = [one.body for one in there.seen if one.path == CHAT]
    assert len(bodies) == len(set(bodies)) == 6


@pytest.mark.long
async def test_the_port_for_peers_takes_no_request_without_a_hop(
    stage: World, pair: Pair, tmp_path: Path
) -> None:
    from lb.regions.identity import REQUESTS

    await pair.own("us")
    await pair.own("eu", await stage.target("there"))
    tls = identity(tmp_path / "us", "us").client(REQUESTS)
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", pair.eu.peers_port, ssl=tls, server_hostname="eu"
    )
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: eu\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_a_peer_explains_only_what_was_forwarded_to_it(
    stage: World, pair: Pair, tmp_path: Path
) -> None:
    from lb.regions.identity import REQUESTS

    await pair.own("us")
    await pair.own("eu", await stage.target("there"))
    assert (await chat(pair.eu, **{"X-Request-Id": "own"}))[0] == 200
    tls = identity(tmp_path / "us", "us").client(REQUESTS)
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", pair.eu.peers_port, ssl=tls, server_hostname="eu"
    )
    writer.write(b"GET /-/explain/own HTTP/1.1\r\nHost: eu\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
    writer.close()


@pytest.mark.long
async def test_a_response_says_whether_another_request_may_come(
    stage: World, pair: Pair, tmp_path: Path
) -> None:
    """On the port for peers, once a report has gone out; a client sees nothing of it."""
    from lb.regions.identity import REQUESTS

    begun, go_on = asyncio.Event(), asyncio.Event()

    async def streams(seen: Seen) -> None:
        if b"stream" not in seen.body:
            await seen.answer(b"there")
            return
        await seen.begin_stream()
        await seen.chunk(b"data: x\n\n")
        begun.set()
        await go_on.wait()
        await seen.chunk(b"")

    there = await stage.target("there", streams)
    pushing = {"mode": "fixed_cap", "cap": 1}
    await pair.own("us", pushing=pushing)
    await pair.own("eu", there, pushing=pushing)
    await pair.fresh()
    tls = identity(tmp_path / "us", "us").client(REQUESTS)

    async def forward(body: bytes) -> bytes:
        """The head of the response."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", pair.eu.peers_port, ssl=tls, server_hostname="eu"
        )
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: eu\r\nX-SkyServe-Hop: age=0;left=5;weight=1;tenant=\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return head

    assert b"X-SkyServe-Credit: " in await forward(b'{"messages": []}')
    # A stream has the only place until its end.
    assert b"X-SkyServe-Credit" not in await forward(b'{"messages": [], "stream": true}')
    go_on.set()
    async with (
        aiohttp.ClientSession() as http,
        http.post(pair.us.url + CHAT, json={"messages": []}) as response,
    ):
        assert response.status == 200
        assert "X-SkyServe-Credit" not in response.headers


@pytest.mark.long
async def test_more_requests_than_reports_are_forwarded(stage: World, pair: Pair) -> None:
    """A peer that takes one at a time: each response brings the credit for the next request."""
    there = await stage.target("there")
    pushing = {"mode": "fixed_cap", "cap": 1}
    await pair.own("us", pushing=pushing)
    await pair.own("eu", there, pushing=pushing)
    await pair.fresh()
    before = (await pair.row("us"))["reports"]
    answers = await asyncio.gather(*(chat(pair.us) for _ in range(100)))
    assert answers == [(200, "there")] * 100
    reports = (await pair.row("us"))["reports"] - before
    assert reports < 25, reports


async def test_clients_can_ask_where_the_agents_are(stage: World, pair: Pair) -> None:
    """Without a key. An agent whose table has no endpoints leaves the path to its targets."""
    from hashlib import sha256

    here = await stage.target("here")
    key = {"name": "acme", "sha256": sha256(b"secret").hexdigest()}
    endpoints = [
        {"region": "cloud/us", "url": pair.us.url},
        {"region": "cloud/eu", "url": pair.eu.url, "zones": ["eu"]},
    ]
    regions = {"agent": "cloud/us#1", "here": "cloud/us", "endpoints": endpoints}
    row = {"id": "here", "url": here.url}
    await pair.us.push(row, revision="r1", regions=regions, access={"keys": [key]})
    status, text = await pair.us.text("/.well-known/skyserve", method="GET")
    assert status == 200
    assert json.loads(text) == {
        "service": "default",
        "endpoints": [
            {"url": pair.us.url, "region": "cloud/us", "zones": []},
            {"url": pair.eu.url, "region": "cloud/eu", "zones": ["eu"]},
        ],
    }
    assert (await pair.us.text("/.well-known/other", method="GET"))[0] == 401
    await pair.own("eu", await stage.target("there"))
    assert await pair.eu.text("/.well-known/skyserve", method="GET") == (200, "there")
