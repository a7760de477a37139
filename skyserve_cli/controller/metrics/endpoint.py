"""`GET /metrics` on a TCP port of loopback, because Prometheus cannot scrape a Unix socket.

It has a token of its own, which reads numbers and nothing else: a Prometheus never holds the token of the API. A port
that another program has does not stop the controller; the endpoint is tried again until the port is free.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError

from skyserve_cli.controller.metrics.exposition import exposition

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
TRY_AGAIN_S = 10.0


class MetricsEndpoint:
    """One per daemon. `health` and `services` return views of the API; `services` is called on a thread."""

    def __init__(
        self,
        token: str,
        health: Callable[[], Mapping[str, Any]],
        services: Callable[[], Sequence[Mapping[str, Any]]],
        *,
        try_again_s: float = TRY_AGAIN_S,
    ) -> None:
        self._expected = f"Bearer {token}".encode()
        self._health = health
        self._services = services
        self._try_again_s = try_again_s
        self._one_at_a_time = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._opening: asyncio.Task[None] | None = None

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        return app

    def start(self, port: int) -> None:
        """Open the port, now or as soon as it is free."""
        self._opening = asyncio.create_task(self._open(port))

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            with suppress(asyncio.CancelledError):
                await self._opening
        if self._runner is not None:
            await self._runner.cleanup()

    async def _open(self, port: int) -> None:
        self._runner = web.AppRunner(self.app(), access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        said = ""
        while True:
            try:
                await web.TCPSite(self._runner, HOST, port).start()
            except OSError as error:
                if str(error) != said:
                    said = str(error)
                    log.error("controller.metrics_port: %d: %s; trying again", port, said)
                await asyncio.sleep(self._try_again_s)
            else:
                log.info("metrics are at http://%s:%d/metrics", HOST, port)
                return

    async def _metrics(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._expected):
            return web.Response(status=401, text="the token of metrics is missing or wrong\n")
        async with self._one_at_a_time:
            try:
                services = await asyncio.to_thread(self._services)
            except SQLAlchemyError:  # the health says why
                services = None
            health = dict(self._health())
            if services is None:
                health["store"] = {**health["store"], "ok": False}
            body = await asyncio.to_thread(exposition, health, services)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
