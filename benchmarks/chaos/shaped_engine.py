"""An engine that speaks as vLLM, SGLang, llama.cpp or TGI do, over a socket, at a pace: to be killed in mid-stream.

    python -m benchmarks.chaos.shaped_engine --kind vllm --port 8001 [--pace 0.1]

The text and its shapes are those of `tests/unit/stream_engines.py`: replicas of one model, whose next token depends on
all tokens before it. This module adds what an agent recognises an engine by, its load, and time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools

import uvloop
from aiohttp import web

from lb.engines.kinds import EngineKind
from skyserve_cli.engine.errors import BadRequest
from tests.unit.stream_engines import stream

KINDS = (EngineKind.VLLM, EngineKind.SGLANG, EngineKind.LLAMACPP, EngineKind.TGI)


class ShapedEngine:
    """One engine. Streams only: other requests can be retried."""

    def __init__(self, kind: EngineKind, pace_s: float) -> None:
        self._kind = kind
        self._pace_s = pace_s
        self._legs = itertools.count(1)
        self._running = 0

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.post("/v1/completions", self._generate),
                web.post("/v1/chat/completions", self._generate),
                *self._signs(),
            ]
        )
        return app

    def _signs(self) -> list[web.RouteDef]:
        """Path of the load metrics, by which the kind of engine is recognized."""
        if self._kind is EngineKind.VLLM:
            return [web.get("/metrics", self._vllm_metrics)]
        if self._kind is EngineKind.SGLANG:
            return [web.get("/v1/loads", self._sglang_loads)]
        if self._kind is EngineKind.LLAMACPP:
            return [web.get("/slots", self._llamacpp_slots)]
        return [web.get("/info", self._tgi_info), web.get("/metrics", self._tgi_metrics)]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _vllm_metrics(self, request: web.Request) -> web.Response:
        text = f"vllm:num_requests_running {self._running}\nvllm:num_requests_waiting 0\n"
        return web.Response(text=text)

    async def _sglang_loads(self, request: web.Request) -> web.Response:
        load = {"num_running_reqs": self._running, "num_waiting_reqs": 0, "token_usage": 0.0}
        return web.json_response({"loads": [load]})

    async def _llamacpp_slots(self, request: web.Request) -> web.Response:
        return web.json_response([{"is_processing": number < self._running} for number in range(256)])

    async def _tgi_info(self, request: web.Request) -> web.Response:
        return web.json_response({"max_best_of": 2, "max_concurrent_requests": 256})

    async def _tgi_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f"tgi_batch_current_size {self._running}\ntgi_queue_size 0\n")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            events = stream(self._kind, request.path.encode(), await request.json(), next(self._legs))
        except BadRequest as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self._running += 1
        try:
            for event in events:
                await asyncio.sleep(self._pace_s)
                await answer.write(event)
        except ConnectionError:
            return answer  # the client has left
        finally:
            self._running -= 1
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description="An engine in another engine's shapes.")
    parser.add_argument("--kind", choices=[kind.value for kind in KINDS], required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pace", type=float, default=0.1, help="seconds between two events")
    given = parser.parse_args()
    engine = ShapedEngine(EngineKind(given.kind), given.pace)
    loop = uvloop.new_event_loop()
    web.run_app(
        engine.application(), host="127.0.0.1", port=given.port, loop=loop, print=None, access_log=None
    )


if __name__ == "__main__":
    main()
