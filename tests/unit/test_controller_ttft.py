"""The times to first token of one agent in the last minute, from what it has counted."""

from __future__ import annotations

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from lb.config.totals import Tally, Totals
from skyserve_cli.controller.balancers.totals_follower import EVERY_S, RECENT_S, TotalsFollower
from skyserve_cli.controller.reconcile.traffic_buffer import TrafficBuffer
from skyserve_cli.state.samples import BOUNDS_S


class Counting:
    """An agent: `seen[i]` streams have had their first token within the i-th bound."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.seen = [0] * (len(BOUNDS_S) + 1)

    async def totals(self, request: web.Request) -> web.Response:
        tally = Tally(0, 0, sum(self.seen), 0, 0, 0, 0, 0, tuple(self.seen))
        return web.json_response(Totals(self.now, BOUNDS_S, tally).to_json())


async def test_quantiles_are_those_of_the_last_minute() -> None:
    agent, buffer = Counting(), TrafficBuffer()
    follower = TotalsFollower("chat", 1, buffer, lambda: agent.now)
    app = web.Application()
    app.router.add_get("/-/totals", agent.totals)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:

        async def after(seconds: float, fast: int = 0, slow: int = 0) -> tuple[float | None, float | None]:
            agent.now += seconds
            agent.seen[BOUNDS_S.index(0.25)] += fast
            agent.seen[BOUNDS_S.index(2.5)] += slow
            await follower.follow(session, str(server.make_url("")).rstrip("/"), {})
            return follower.ttft_s

        assert await after(0.0, fast=1000) == (None, None), "counted before we were there"
        p50, p90 = await after(EVERY_S, fast=80, slow=20)
        assert p50 is not None
        assert p90 is not None
        assert 0.1 < p50 <= 0.25
        assert 1.0 < p90 <= 2.5
        p50, p90 = await after(RECENT_S + EVERY_S, fast=100)
        assert p90 is not None
        assert p90 <= 0.25, "the slow ones are more than a minute old"
        assert await after(RECENT_S + EVERY_S) == (None, None), "no stream at all"
