"""The page's port over HTTP: who gets in, who may act, and what others get."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from skyserve_cli.config import DashboardConfig
from skyserve_cli.controller.api.route import Route
from skyserve_cli.controller.dashboard.change_stream import ChangeStream
from skyserve_cli.controller.dashboard.endpoint import ACTION_HEADER, Dashboard, OfPage

SAME = {"Sec-Fetch-Site": "same-origin"}


class World:
    """A dashboard over routes that count their calls, and a browser's cookie jar."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "dashboard.json"
        self.time = 1000.0
        self.killed = 0
        self.count = 1
        self.numbers = itertools.count()
        self.pages: list[Dashboard] = []
        self.browser = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))

    async def secret(self, request: web.Request) -> web.Response:
        return web.json_response({"services": []})

    async def kill(self, request: web.Request) -> web.Response:
        self.killed += 1
        return web.json_response({})

    def page(self, **options: Any) -> Dashboard:
        stream = ChangeStream(lambda: self.count, poll_s=0.01)
        reads = [Route("GET", "/v1/services", self.secret), Route("GET", "/v1/stream", stream.serve)]
        acts = [Route("POST", "/v1/services/{name}/down", self.kill)]
        sends = [Route("POST", "/v1/services/{name}/chat", self.secret)]
        draw = lambda: f"drawn-{next(self.numbers)}-{'x' * 20}"  # noqa: E731
        settings, offered = DashboardConfig(**options), OfPage(reads, acts, sends)
        self.pages.append(Dashboard(self.file, lambda: self.time, draw, offered, settings))
        return self.pages[-1]

    async def get(self, url: str, **headers: str) -> tuple[int, dict[str, str]]:
        async with self.browser.get(url, headers=headers) as response:
            return response.status, dict(response.headers)

    async def post(self, url: str, body: object, headers: dict[str, str]) -> aiohttp.ClientResponse:
        async with self.browser.post(url, json=body, headers=headers) as response:
            await response.read()
            return response


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await world.browser.close()
    for page in world.pages:
        await page.close()


async def entered(world: World, page: Dashboard) -> str:
    base, code = (await page.code(None))["url"].split("/#")
    response = await world.post(f"{base}/session", {"code": code}, SAME)
    assert response.status == 204
    return str(base)


async def test_a_code_opens_a_session_once(world: World) -> None:
    page = world.page()
    base, code = (await page.code(None))["url"].split("/#")
    assert (await world.get(f"{base}/v1/services"))[0] == 401
    assert (await world.post(f"{base}/session", {"code": code}, {})).status == 403
    first = await world.post(f"{base}/session", {"code": code}, SAME)
    cookie = first.headers["Set-Cookie"]
    assert all(flag in cookie for flag in ("HttpOnly", "SameSite=Strict", "Path=/", "Max-Age=43200"))
    assert (await world.get(f"{base}/v1/services"))[0] == 200
    assert (await world.post(f"{base}/session", {"code": code}, SAME)).status == 401


async def test_a_page_of_another_name_gets_nothing(world: World) -> None:
    base = await entered(world, world.page())
    for path in ("/", "/app.js", "/session", "/v1/services"):
        assert (await world.get(base + path, Host="evil.example"))[0] == 421


async def test_every_response_has_the_policy(world: World) -> None:
    base = await entered(world, world.page())
    for path in ("/", "/s/chat", "/v1/services", "/v1/none", "/session"):
        _, headers = await world.get(base + path)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/../endpoint.py", "/%2e%2e/endpoint.py", "/vendor/../../endpoint.py", "/no.js"]
)
async def test_only_files_of_the_page_are_served(world: World, path: str) -> None:
    base = await entered(world, world.page())
    host, port = base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert (await reader.read()).split(b" ", 2)[1] == b"404"
    writer.close()


async def test_the_page_only_reads_unless_it_may_act(world: World) -> None:
    base = await entered(world, world.page())
    response = await world.post(f"{base}/v1/services/chat/down", {}, {**SAME, ACTION_HEADER: "x"})
    assert (response.status, world.killed) == (403, 0)


async def test_an_action_needs_the_token_of_the_session_and_the_page_itself(world: World) -> None:
    base = await entered(world, world.page(actions=True))
    async with world.browser.get(f"{base}/session") as response:
        token = (await response.json())["token"]
    url = f"{base}/v1/services/chat/down"
    assert (await world.post(url, {}, SAME)).status == 403
    cross = {"Sec-Fetch-Site": "cross-site", ACTION_HEADER: token}
    assert (await world.post(url, {}, cross)).status == 403
    assert world.killed == 0
    assert (await world.post(url, {}, {**SAME, ACTION_HEADER: token})).status == 200
    assert world.killed == 1


async def test_a_session_goes_on_after_the_controller_was_killed(world: World) -> None:
    first = world.page()
    base = await entered(world, first)
    await first.close()  # as far as the port goes; nothing else is saved on the way out
    await world.page().resume()
    assert (await world.get(f"{base}/v1/services"))[0] == 200
    world.time += 13 * 3600
    assert (await world.get(f"{base}/v1/services"))[0] == 401


async def test_without_a_session_no_port_is_opened_again(world: World) -> None:
    first = world.page()
    base = (await first.code(None))["url"].split("/#")[0]
    await first.close()
    await world.page().resume()
    with pytest.raises(aiohttp.ClientConnectorError):
        await world.get(base)


async def test_changes_are_streamed_and_resumed(world: World) -> None:
    base = await entered(world, world.page())

    async def lines(response: aiohttp.ClientResponse, count: int) -> list[str]:
        found: list[str] = []
        async for line in response.content:
            if line.startswith(b"id:"):
                found.append(line.decode().strip())
                if len(found) == count:
                    break
                world.count += 1
        return found

    async with world.browser.get(f"{base}/v1/stream") as response:
        assert response.content_type == "text/event-stream"
        assert await lines(response, 3) == ["id: 1", "id: 2", "id: 3"]
    world.count = 7
    async with world.browser.get(f"{base}/v1/stream", headers={"Last-Event-ID": "3"}) as response:
        assert await lines(response, 1) == ["id: 7"]


async def test_a_chat_needs_a_session_and_the_page_itself(world: World) -> None:
    page = world.page()
    base = (await page.code(None))["url"].split("/#")[0]
    url = f"{base}/v1/services/chat/chat"
    assert (await world.post(url, {}, SAME)).status == 401
    await entered(world, page)
    assert (await world.post(url, {}, {"Sec-Fetch-Site": "cross-site"})).status == 403
    assert (await world.post(url, {}, SAME)).status == 200
