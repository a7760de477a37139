"""The chat of the page: it streams what the endpoint responds, or reports the reason in a sentence."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from skyserve_cli.controller.dashboard.chat_route import KEY_HEADER, MOST_TOKENS, ChatRoute

TALK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 10**9}


class World:
    """An endpoint, and the route in front of it."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.asked: list[tuple[str, Any]] = []
        self.breaks_off = False
        self.models: Any = {"data": [{"id": "tiny"}]}
        self.runners: list[web.AppRunner] = []
        self.url = ""

    async def start(self) -> None:
        served = web.Application()
        served.router.add_get("/v1/models", self._models)
        served.router.add_post("/v1/chat/completions", self._complete)
        self.endpoint = await self._listen(served)
        app = web.Application()
        routes = ChatRoute(lambda name: {"endpoint": self.endpoint}).routes()
        app.add_routes([route.definition() for route in routes])
        self.url = await self._listen(app) + "/v1/services/small/chat"

    async def _listen(self, app: web.Application) -> str:
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.headers.get("Authorization", ""), await request.json()))
        response = web.StreamResponse(headers={"X-Request-Id": "r1", "Set-Cookie": "a=b"})
        response.content_type = "text/event-stream"
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        if self.breaks_off:
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write(b"data: [DONE]\n\n")
        return response

    async def send(self, **headers: str) -> tuple[int, dict[str, str], str]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url, json=TALK, headers=headers) as r,
        ):
            return r.status, {name.lower(): value for name, value in r.headers.items()}, await r.text()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.start()
    yield world
    for runner in world.runners:
        await runner.cleanup()


async def test_the_response_is_passed_on_and_nothing_of_the_page_reaches_the_endpoint(world: World) -> None:
    status, headers, text = await world.send(**{KEY_HEADER: "k", "Cookie": "skyserve_1=secret"})
    assert (status, text) == (200, "data: one\n\ndata: [DONE]\n\n")
    assert headers["x-request-id"] == "r1"
    assert "set-cookie" not in headers
    ((authorization, asked),) = world.asked
    assert authorization == "Bearer k"
    assert asked == {"messages": TALK["messages"], "max_tokens": MOST_TOKENS, "stream": True, "model": "tiny"}


@pytest.mark.parametrize("models", [{"data": []}, {"data": None}, [], {}])
async def test_an_endpoint_that_lists_no_model_is_asked_without(world: World, models: Any) -> None:
    world.models = models
    assert (await world.send())[0] == 200
    assert "model" not in world.asked[0][1]
    assert world.asked[0][0] == ""


async def test_a_response_that_breaks_off_ends_with_an_event(world: World) -> None:
    world.breaks_off = True
    status, _, text = await world.send()
    assert status == 200
    assert text.endswith('data: {"error": {"message": "the response has broken off"}}\n\n')


async def test_an_endpoint_that_is_away_is_a_sentence(world: World) -> None:
    await world.runners[0].cleanup()
    status, _, text = await world.send()
    assert status == 502
    assert "the endpoint does not respond" in text
    world.endpoint = ""
    assert (await world.send())[0] == 409
