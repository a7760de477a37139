"""An engine behind a real port, and the clients that test it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from openai import AsyncOpenAI

from skyserve_cli.engine.profiles import L4_8B
from skyserve_cli.engine.server import Settings, create_runner, publish_cache_events

USER: Any = {"role": "user", "content": "Tell me about the lake."}


@dataclass(frozen=True, slots=True)
class Engine:
    url: str
    http: aiohttp.ClientSession
    openai: AsyncOpenAI

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body, **more) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream; it must end with [DONE]."""
        async with self.http.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        async with self.http.get(self.url + "/metrics") as response:
            text = await response.text()
        values = [float(line.split()[-1]) for line in text.splitlines() if line.split("{")[0] == name]
        assert values, f"{name} is not in /metrics"
        return sum(values)


@asynccontextmanager
async def serving(*, cache_events: bool = False, **changes: Any) -> AsyncIterator[Engine]:
    settings = Settings(
        **({"profile": L4_8B, "model": "llama", "speed": 200.0, "mean_output_tokens": 30} | changes)
    )
    runner = create_runner(settings, grace_s=0.1)
    await runner.setup()
    port = await _started(runner, cache_events)
    url = f"http://127.0.0.1:{port}"
    try:
        async with (
            aiohttp.ClientSession() as http,
            AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as openai,
        ):
            yield Engine(url, http, openai)
    finally:
        await runner.cleanup()


async def _started(runner: web.AppRunner, cache_events: bool) -> int:
    """Take a port, with those of events above it if they are published; try others where one of them is in use."""
    for _ in range(20):
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = int(runner.addresses[0][1])
        if not cache_events:
            return port
        try:
            publish_cache_events(runner, "127.0.0.1", port)
            return port
        except OSError:
            await site.stop()
    raise AssertionError("no three ports are free")
