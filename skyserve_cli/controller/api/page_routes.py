"""What the page needs beside the CLI's routes: one service, its account, and why requests went where they went.

GET  /v1/fleet                    all services in brief, with an ETag; see `fleet_view`
GET  /v1/services/NAME            one service as in /v1/services, with an ETag
GET  /v1/services/NAME/report     ?since= UNIX seconds    figures of `serve report`, and curves of spending
GET  /v1/services/NAME/explain    ?limit=    the last requests with their candidates
GET  /v1/stream                   server-sent events; see `change_stream`
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import orjson
from aiohttp import web

from skyserve_cli.account.service_history import NoHistoryError, service_history
from skyserve_cli.account.view import curves_view, report_view
from skyserve_cli.controller.api.change_stream import ChangeStream
from skyserve_cli.controller.api.fleet_view import FleetView
from skyserve_cli.controller.api.query import MAX_HISTORY_REPLICAS, since_of
from skyserve_cli.controller.api.service import ControllerService
from skyserve_cli.controller.api.snapshot import Rendered, Snapshots
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.state.values import NoSuchServiceError

MOST_EXPLAINED = 100


class AdminReader(Protocol):
    """What this needs of `balancers.agent_reader.AgentReader`."""

    async def read(self, service: str, path: str) -> dict[int, bytes]: ...


class PageRoutes:
    """Called by the routes of `http.Api`, which turns errors into status codes."""

    def __init__(
        self,
        service: ControllerService,
        snapshots: Snapshots,
        respond: Callable[[web.Request, Rendered], Any],
        agents: AdminReader | None,
    ) -> None:
        self._service = service
        self._snapshots = snapshots
        self._respond = respond
        self._agents = agents
        self._stream = ChangeStream(service.changes, service.token_changes)
        self._fleet_view = FleetView(
            lambda: service.services(down=False, ended=False),
            lambda name, since: service.series(name, since=since, replica_id=0)["total"],
            SystemClock(),
        )

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/fleet", self._fleet),
            web.get("/v1/services/{name}", self._one),
            web.get("/v1/services/{name}/report", self._report),
            web.get("/v1/services/{name}/explain", self._explain),
            web.get("/v1/stream", self._stream.serve),
        ]

    async def _fleet(self, request: web.Request) -> web.StreamResponse:
        found = await self._snapshots.get("fleet", self._fleet_view.content)
        response: web.StreamResponse = await self._respond(request, found)
        return response

    async def _one(self, request: web.Request) -> web.StreamResponse:
        name, ended = request.match_info["name"], "ended" in request.query
        if not await asyncio.to_thread(self._service.has, name):
            raise NoSuchServiceError(name)  # before it takes a place among the snapshots

        def content() -> dict[str, Any]:
            return self._service.one(name, ended=ended)

        response: web.StreamResponse = await self._respond(
            request, await self._snapshots.get((name, ended), content)
        )
        return response

    async def _report(self, request: web.Request) -> web.Response:
        name, since = request.match_info["name"], since_of(request)
        found = await asyncio.to_thread(self._account, name, since)
        return web.Response(body=found, content_type="application/json")

    def _account(self, name: str, since: float) -> bytes:
        history = self._service.history(name, since=since, most=MAX_HISTORY_REPLICAS)
        try:
            account = service_history(history)
        except NoHistoryError as error:
            return orjson.dumps({"name": name, "figures": None, "curves": None, "why": str(error)})
        figures, curves = report_view(account, history), curves_view(account)
        return orjson.dumps({"name": name, "figures": figures, "curves": curves, "why": ""})

    async def _explain(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        limit = min(MOST_EXPLAINED, max(1, int(request.query.get("limit", 20))))
        if not await asyncio.to_thread(self._service.has, name):
            raise NoSuchServiceError(name)
        found = {} if self._agents is None else await self._agents.read(name, f"/-/explain?limit={limit}")
        requests = [
            {**each, "agent": number}
            for number, content in sorted(found.items())
            for each in orjson.loads(content)["requests"]
        ]
        return web.Response(body=orjson.dumps({"requests": requests}), content_type="application/json")
