"""`GET /metrics`, and those of load balancer agents, on a TCP port, of loopback by default, because Prometheus cannot scrape a Unix socket.

It has a token of its own, which reads numbers and nothing else: a Prometheus never holds the token of the API. A port
that another program has does not stop the controller; the endpoint is tried again until the port is free.

Agents listen on ports that change, with tokens of their own. `GET /metrics/agents/SERVICE/NUMBER` passes on what one of them
exposes, and `GET /metrics/agents` lists these paths in the format of Prometheus' HTTP service discovery.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from skyserve_cli.controller.metrics.families import OF_CONTROLLER, OF_SERVICE, OF_TEAM, Family, View

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
TRY_AGAIN_S = 10.0


class Agents(Protocol):
    """What this needs of `balancers.agent_reader.AgentReader`."""

    def numbers(self, service: str) -> list[int]: ...

    async def read_one(self, service: str, agent: int, path: str) -> bytes | None: ...


class MetricsEndpoint:
    """One per daemon. `health`, `services` and `teams` return views of the API; the last two are called on a thread."""

    def __init__(
        self,
        token: str,
        health: Callable[[], Mapping[str, Any]],
        services: Callable[[], Sequence[Mapping[str, Any]]],
        agents: Agents | None = None,
        *,
        teams: Callable[[], Sequence[Mapping[str, Any]]] | None = None,
        try_again_s: float = TRY_AGAIN_S,
    ) -> None:
        self._expected = f"Bearer {token}".encode()
        self._health = health
        self._services = services
        self._agents = agents
        self._teams = teams
        self._try_again_s = try_again_s
        self._one_at_a_time = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._opening: asyncio.Task[None] | None = None

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/metrics/agents", self._agent_targets)
        app.router.add_get(r"/metrics/agents/{service}/{agent:\d+}", self._agent_metrics)
        return app

    def start(self, port: int, host: str = HOST) -> None:
        """Open the port, now or as soon as it is free."""
        self._opening = asyncio.create_task(self._open(host, port))

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            with suppress(asyncio.CancelledError):
                await self._opening
        if self._runner is not None:
            await self._runner.cleanup()

    async def _open(self, host: str, port: int) -> None:
        self._runner = web.AppRunner(self.app(), access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        said = ""
        while True:
            try:
                await web.TCPSite(self._runner, host, port).start()
            except OSError as error:
                if str(error) != said:
                    said = str(error)
                    log.error("controller.metrics_port: %d: %s; trying again", port, said)
                await asyncio.sleep(self._try_again_s)
            else:
                log.info("metrics are at http://%s:%d/metrics", host, port)
                return

    def _refusal(self, request: web.Request) -> web.Response | None:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if hmac.compare_digest(given, self._expected):
            return None
        return web.Response(status=401, text="the token of metrics is missing or wrong\n")

    async def _agent_targets(self, request: web.Request) -> web.Response:
        if (refused := self._refusal(request)) is not None:
            return refused
        names = [str(view["name"]) for view in await asyncio.to_thread(self._services)]
        found = [
            {
                "targets": [request.host],
                "labels": {
                    "__metrics_path__": f"/metrics/agents/{name}/{number}",
                    "agent": str(number),
                },
            }
            for name in names
            for number in ([] if self._agents is None else self._agents.numbers(name))
        ]
        return web.json_response(found)

    async def _agent_metrics(self, request: web.Request) -> web.Response:
        if (refused := self._refusal(request)) is not None:
            return refused
        name, number = request.match_info["service"], int(request.match_info["agent"])
        body = None if self._agents is None else await self._agents.read_one(name, number, "/-/metrics")
        if body is None:
            return web.Response(status=404, text="no such load balancer responds\n")
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _metrics(self, request: web.Request) -> web.Response:
        if (refused := self._refusal(request)) is not None:
            return refused
        async with self._one_at_a_time:
            services: Sequence[Mapping[str, Any]] | None
            teams: Sequence[Mapping[str, Any]] | None
            try:
                services = await asyncio.to_thread(self._services)
                teams = None if self._teams is None else await asyncio.to_thread(self._teams)
            except SQLAlchemyError:  # the health gives the reason
                services = teams = None
            health = dict(self._health())
            if services is None:
                health["store"] = {**health["store"], "ok": False}
            body = await asyncio.to_thread(exposition, health, services, teams)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


_KINDS: Mapping[str, type[GaugeMetricFamily] | type[CounterMetricFamily]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
}


class _Once(Collector):
    """A collector of families that are there already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(health: View, services: Sequence[View] | None, teams: Sequence[View] | None = None) -> bytes:
    """Return the text. `services` and `teams` None: they cannot be read, so their families are not exposed.

    Absent series are better than old ones: Prometheus marks them stale, and `absent()` and
    `skyserve_controller_store_ok == 0` raise an alert.
    """
    families = [_family(each, [((), health)]) for each in OF_CONTROLLER]
    if services is not None:
        views = [((view["name"],), view) for view in services]
        families += [_family(each, views) for each in OF_SERVICE]
    if teams is not None:
        views = [((view["name"],), view) for view in teams]
        families += [_family(each, views) for each in OF_TEAM]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(families))
    return generate_latest(registry)


def _family(family: Family, views: Iterable[tuple[tuple[str, ...], View]]) -> Metric:
    found = _KINDS[family.type](family.name, family.help, labels=family.labels)
    for labels, value in _samples(family, views):
        found.add_metric(labels, value)
    return found


def _samples(
    family: Family, views: Iterable[tuple[tuple[str, ...], View]]
) -> Iterator[tuple[tuple[str, ...], float]]:
    for first, view in views:
        for rest, value in family.read(view):
            yield (*first, *rest), value
