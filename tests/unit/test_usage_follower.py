"""Totals that an agent gets: what has changed, whole keys, and again whatever it may have missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lb.agent.usage_file import UsageFile
from lb.config.usage import DAY_S, KeyTotal, UsageReport, UsageRow, UsageTotals
from lb.observe.key_usage import KeyUsage
from skyserve_cli.controller.balancers import usage_follower
from skyserve_cli.controller.balancers.usage_follower import AGAIN_S, ALL_AGAIN_S, EVERY_S, UsageFollower
from skyserve_cli.controller.reconcile.traffic_buffer import TrafficBuffer
from skyserve_cli.controller.reconcile.usage_buffer import service_totals

TODAY = 20_000


class Agent:
    """An agent with limits of days. `refuses` is the status of its response to totals, if it is not 200."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.source = "s1"
        self.wants = True
        self.refuses = 0
        self.is_slow = False
        self.reports = 0
        self.got: list[UsageTotals] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/-/usage", self.usage), web.post("/-/usage/totals", self.totals)])
        return app

    async def usage(self, request: web.Request) -> web.Response:
        self.reports += 1
        row = UsageRow(TODAY, "ada", "m", self.reports, 1, 1)
        report = UsageReport(self.source, self.reports, False, (row,), self.wants)
        return web.json_response(report.to_json())

    async def totals(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer of-the-agent"
        if self.is_slow:
            await asyncio.sleep(60)
        if self.refuses:
            return web.Response(status=self.refuses)
        self.got.append(UsageTotals.from_json(await request.json()))
        return web.json_response({})

    def rows(self) -> list[tuple[str, int]]:
        """Return key and requests of what has come since the last call."""
        taken, self.got = self.got, []
        return [(row.key, row.requests_today) for message in taken for row in message.rows]


class Bench:
    def __init__(self, agent: Agent, follower: UsageFollower, buffer: TrafficBuffer, url: str) -> None:
        self.agent = agent
        self.follower = follower
        self.buffer = buffer
        self.url = url
        self.session = aiohttp.ClientSession()

    def put(self, *rows: tuple[str, int], day: int = TODAY, models: int = 1) -> None:
        totals = [KeyTotal(key, f"m{n:04}", used, 1, 1, 2, 2) for key, used in rows for n in range(models)]
        self.buffer.usage.put_totals("chat", service_totals(day, totals))

    async def turn(self, seconds: float = EVERY_S) -> list[tuple[str, int]]:
        self.agent.now += seconds
        await self.follower.follow(self.session, self.url, {"Authorization": "Bearer of-the-agent"})
        return self.agent.rows()


@asynccontextmanager
async def following() -> AsyncIterator[Bench]:
    agent, buffer = Agent(), TrafficBuffer()
    async with TestServer(agent.app()) as server:
        follower = UsageFollower("chat", buffer, lambda: agent.now)
        bench = Bench(agent, follower, buffer, str(server.make_url("")).rstrip("/"))
        async with bench.session:
            yield bench


async def test_an_agent_gets_what_has_changed_since_it_got_totals() -> None:
    async with following() as bench:
        assert await bench.turn() == []
        assert bench.buffer.usage.take_wanting() == {"chat"}
        bench.put(("bob", 1), ("ada", 2))
        assert await bench.turn() == [("ada", 2), ("bob", 1)]
        assert await bench.turn() == []
        bench.put(("ada", 2), ("bob", 5), ("eve", 1))
        assert await bench.turn() == [("bob", 5), ("eve", 1)]
        assert bench.agent.reports == 4


async def test_an_agent_without_limits_of_days_gets_none() -> None:
    async with following() as bench:
        bench.agent.wants = False
        bench.put(("ada", 1))
        assert await bench.turn() == []
        assert bench.buffer.usage.take_wanting() == set()
        bench.agent.wants = True
        assert await bench.turn() == [("ada", 1)]


async def test_everything_is_sent_to_new_counters_on_a_new_day_and_now_and_then() -> None:
    async with following() as bench:
        bench.put(("ada", 2), ("bob", 1))
        assert await bench.turn() == [("ada", 2), ("bob", 1)]
        bench.agent.source = "s2"
        assert await bench.turn() == [("ada", 2), ("bob", 1)]
        bench.put(("ada", 2), ("bob", 1), day=TODAY + 1)
        assert await bench.turn() == [("ada", 2), ("bob", 1)]
        assert await bench.turn() == []
        assert await bench.turn(ALL_AGAIN_S) == [("ada", 2), ("bob", 1)]
        bench.url = bench.url.replace("127.0.0.1", "localhost")
        assert await bench.turn() == [("ada", 2), ("bob", 1)]


@pytest.mark.parametrize("status", [500, 503, 400])
async def test_what_an_agent_does_not_take_is_sent_again_and_its_usage_is_read(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with following() as bench:
        bench.put(("ada", 1))
        bench.agent.refuses = status
        for _ in range(3):
            assert await bench.turn() == []
        assert caplog.text.count("takes no totals") == 1
        assert [row.requests for row in bench.buffer.usage.take(9).values()] == [3]
        bench.agent.refuses = 0
        assert await bench.turn() == [("ada", 1)]


async def test_an_agent_that_is_slow_to_take_them_delays_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_follower, "SEND_TIMEOUT_S", 0.05)
    async with following() as bench:
        bench.put(("ada", 1))
        bench.agent.is_slow = True
        assert await bench.turn() == []
        assert await bench.turn() == []
        assert bench.agent.reports == 2
        bench.agent.is_slow = False
        assert await bench.turn() == [("ada", 1)]


async def test_an_earlier_agent_gets_no_more() -> None:
    async with following() as bench:
        bench.put(("ada", 1))
        bench.agent.refuses = 404
        await bench.turn()
        bench.agent.refuses = 0
        assert await bench.turn() == []
        assert await bench.turn(AGAIN_S) == [("ada", 1)]


async def test_an_agent_that_is_leaving_gets_none() -> None:
    async with following() as bench:
        bench.put(("ada", 1))
        headers = {"Authorization": "Bearer of-the-agent"}
        await bench.follower.follow(bench.session, bench.url, headers, is_leaving=True)
        assert bench.agent.rows() == []


async def test_what_an_agent_left_is_counted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counted, buffer = KeyUsage(), TrafficBuffer()
    counted.add("ada", "m", True, 1, 1)
    UsageFile(tmp_path / "left", counted, lambda: TODAY * float(DAY_S), lambda used: None).close()
    follower = UsageFollower("chat", buffer, lambda: 0.0)
    for name in ("left", "left", "none"):
        await follower.read_left(tmp_path / name)
    assert [row.requests for row in buffer.usage.take(9).values()] == [1]
    (tmp_path / "none").mkdir()
    await follower.read_left(tmp_path / "none")
    assert "usage of service chat since the last report is lost" in caplog.text


async def test_messages_have_whole_keys_and_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_follower, "SENT_ROWS", 5)
    monkeypatch.setattr(usage_follower, "MOST_MESSAGES", 2)
    async with following() as bench:
        bench.put(*((f"k{number}", 1) for number in range(5)), models=2)
        found: list[list[str]] = []
        for _ in range(3):
            bench.agent.now += EVERY_S
            await bench.follower.follow(bench.session, bench.url, {"Authorization": "Bearer of-the-agent"})
            found += [[row.key for row in message.rows] for message in bench.agent.got]
            bench.agent.got = []
        assert found == [["k0", "k0", "k1", "k1"], ["k2", "k2", "k3", "k3"], ["k4", "k4"]]
