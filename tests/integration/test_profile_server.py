"""`serve profile`'s client against an engine, and against servers that are no use to it. Rates are not asserted: time is real here."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from lb.config.options import Slo
from skyserve_cli.profile import prompts
from skyserve_cli.profile.load import Flight
from skyserve_cli.profile.measure import Limits, Measured, Measurement
from skyserve_cli.profile.prompts import Shape
from skyserve_cli.profile.server import RejectedError, Server, ServerError, connected
from tests.integration.engine_harness import serving

SLO = Slo(ttft_s=30.0)


async def one() -> int:
    return 1


def measurement(server: Server, **changes: Any) -> Measurement:
    rng = random.Random(1)
    given: dict[str, Any] = {
        "slo": SLO,
        "attainment": 0.9,
        "shapes": prompts.drawn(rng, 60, 12),
        "limits": Limits(60.0, 40, 0.2, 100),
        "replicas": one,
        "rng": rng,
        "progress": lambda _: None,
        "first": 50.0,
    }
    return Measurement(server, **(given | changes))


@asynccontextmanager
async def answering(respond: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[Server]:
    """A server with a model `m` and this response to chats."""
    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", respond)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with connected(
            f"http://127.0.0.1:{runner.addresses[0][1]}/v1/", None, "sk-1", random.Random(0)
        ) as server:
            yield server
    finally:
        await runner.cleanup()


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


async def test_an_engine_is_measured_with_whole_responses_and_its_own_counts() -> None:
    async with serving() as engine, connected(engine.url, None, None, random.Random(0)) as server:
        assert server.model == "llama"
        seen: list[Measured | float] = []
        found = measurement(server, progress=seen.append)
        await found.run()
        assert await engine.metric("vllm:num_requests_running") == 0
    assert found.stopped == "requests"
    assert found.sent == 40
    assert found.finished > 0
    assert found.response_tokens >= 2 * found.finished
    assert 30 * found.finished < found.prompt_tokens < 200 * found.finished
    assert [one for one in seen if isinstance(one, Measured)] == found.steps
    assert all(step.failed == 0 for step in found.steps)


async def test_responses_are_as_long_as_asked_for_where_the_engine_allows_it() -> None:
    async with (
        serving(mean_output_tokens=3) as engine,
        connected(engine.url, None, None, random.Random(0)) as server,
    ):
        flight = await server.first(Shape(20, 37))
    assert (flight.tokens, server.whole) == (37, True)
    assert flight.first_at is not None


async def test_a_strict_server_is_asked_without_ignore_eos() -> None:
    bodies = []

    async def respond(request: web.Request) -> web.StreamResponse:
        bodies.append(body := await request.json())
        assert request.headers["Authorization"] == "Bearer sk-1"
        if "ignore_eos" in body:
            return web.json_response({"error": {"message": "unknown field ignore_eos"}}, status=400)
        return web.Response(
            text='data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"choices":[]}\n\ndata: [DONE]\n\n'
        )

    async with answering(respond) as server:
        flight = await server.first(Shape(5, 7))
    assert (flight.tokens, flight.prompt_tokens, server.whole) == (2, 5, False)
    assert ["ignore_eos" in body for body in bodies] == [True, False]
    assert bodies[1]["max_tokens"] == 7


async def test_a_model_that_is_not_there_ends_it_with_the_servers_words() -> None:
    async with serving() as engine, connected(engine.url, "other", None, random.Random(0)) as server:
        with pytest.raises(RejectedError, match=r"HTTP 404.*other"):
            await server.first(Shape(5, 7))


async def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ServerError, match=r"cannot reach http://127\.0\.0\.1:1"):
        async with connected("http://127.0.0.1:1", None, None, random.Random(0)):
            raise AssertionError("it is not there")


@pytest.mark.parametrize(
    ("status", "text"),
    [(429, "slow down"), (503, '{"error": {"message": "queue is full"}}'), (200, "data: {}\n\n")],
)
async def test_a_busy_or_broken_response_counts_as_late(status: int, text: str) -> None:
    async def respond(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text)

    async with answering(respond) as server:
        flight = Flight(Shape(5, 7), 0.0)
        await server.send(flight)
    assert flight.late(SLO, 0.0)
    assert flight.error is not None
    expected = {429: "slow down", 503: "queue is full", 200: "broke off"}[status]
    assert expected in flight.error


async def test_steps_in_which_the_service_was_scaled_do_not_count() -> None:
    ready = itertools.chain([1, 2, 2, 2], itertools.repeat(2))

    async def changing() -> int:
        return next(ready)

    async with serving() as engine, connected(engine.url, None, None, random.Random(0)) as server:
        found = measurement(server, replicas=changing)
        await found.run()
    assert found.steps[0].replicas is None
    assert len(found.counted) == len(found.steps) - 1
    assert found.steps[1].load == found.steps[0].load


async def test_an_interrupted_measurement_keeps_what_it_knows_and_leaves_no_request() -> None:
    async with serving(speed=1.0) as engine, connected(engine.url, None, None, random.Random(0)) as server:
        stepping = asyncio.Event()
        found = measurement(
            server,
            limits=Limits(600.0, 500, 60.0, 100),
            shapes=itertools.repeat(Shape(10, 2)),
            progress=lambda _: stepping.set(),
        )
        task = asyncio.create_task(found.run())
        await stepping.wait()
        task.cancel()
        await task
        assert found.stopped == "interrupted"
        for _ in range(1000):
            if not await engine.metric("vllm:num_requests_running") + await engine.metric(
                "vllm:num_requests_waiting"
            ):
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("requests are left")
