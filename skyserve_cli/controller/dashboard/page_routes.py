"""What the page needs beside the kernel's routes: services in brief, the account of one, and why requests went where they went.

GET  /v1/fleet                    all services in brief, with an ETag; see `fleet_view`
GET  /v1/services/NAME/report     ?since= UNIX seconds    figures of `serve report`, and curves of spending
GET  /v1/services/NAME/explain    ?limit=    the last requests with their candidates
GET  /v1/stream                   server-sent events; see `change_stream`
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson
from aiohttp import web

from skyserve_cli.account.service_history import NoHistoryError, service_history
from skyserve_cli.account.view import curves_view, report_view
from skyserve_cli.controller.api.access import AccessRole
from skyserve_cli.controller.api.query import MAX_HISTORY_REPLICAS, since_of
from skyserve_cli.controller.api.route import Route
from skyserve_cli.controller.api.service import ControllerService
from skyserve_cli.controller.api.snapshot import Snapshots, snapshot_response
from skyserve_cli.controller.dashboard.change_stream import ChangeStream
from skyserve_cli.controller.reconcile.clock import Clock, SteadyClock, SystemClock
from skyserve_cli.state.values import NoSuchServiceError

MOST_EXPLAINED = 100


class AdminReader(Protocol):
    """What this needs of `balancers.agent_reader.AgentReader`."""

    async def read(self, service: str, path: str) -> dict[int, bytes]: ...


class PageRoutes:
    """`callers_revision` returns what differs once a caller may call no more; it is called on a thread."""

    def __init__(
        self, service: ControllerService, agents: AdminReader, callers_revision: Callable[[], object]
    ) -> None:
        self._service = service
        self._agents = agents
        self._snapshots = Snapshots(service.changes, SteadyClock())
        self._stream = ChangeStream(service.changes, callers_revision)
        self._fleet_view = FleetView(
            lambda: service.services(down=False, ended=False),
            lambda name, since: service.series(name, since=since, replica_id=0)["total"],
            SystemClock(),
        )

    def routes(self) -> list[Route]:
        paths = {
            "/v1/fleet": self._fleet,
            "/v1/services/{name}/report": self._report,
            "/v1/services/{name}/explain": self._explain,
            "/v1/stream": self._stream.serve,
        }
        return [Route("GET", path, handler, AccessRole.VIEWER) for path, handler in paths.items()]

    async def _fleet(self, request: web.Request) -> web.StreamResponse:
        return await snapshot_response(request, await self._snapshots.get("fleet", self._fleet_view.content))

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
        found = await self._agents.read(name, f"/-/explain?limit={limit}")
        requests = [
            {**each, "agent": number}
            for number, content in sorted(found.items())
            for each in orjson.loads(content)["requests"]
        ]
        return web.Response(body=orjson.dumps({"requests": requests}), content_type="application/json")


TRAFFIC_S = 900.0
#: Numbers over time are stored every ten seconds.
TRAFFIC_EVERY_S = 10.0
_LEFT_OUT = frozenset({"replicas", "load_balancers"})

View = Mapping[str, Any]


class FleetView:
    """`services` returns the views of all services, `traffic` what was counted of one since an instant of `clock`, or None.

    `traffic` raises NoSuchServiceError. For one caller at a time.
    """

    def __init__(
        self,
        services: Callable[[], Sequence[View]],
        traffic: Callable[[str, float], View | None],
        clock: Clock,
    ) -> None:
        self._services = services
        self._traffic = traffic
        self._clock = clock
        self._read_at = float("-inf")
        self._known: dict[str, View | None] = {}

    def content(self) -> dict[str, Any]:
        """Return {"services", "traffic_s"}; `traffic` of a service is over the last `traffic_s` seconds, null without any."""
        views = self._services()
        now = self._clock.now()
        if not 0.0 <= now - self._read_at < TRAFFIC_EVERY_S:
            self._known, self._read_at = {}, now
        for view in views:
            if view["name"] not in self._known:
                self._known[view["name"]] = self._of(view["name"], now)
        return {
            "traffic_s": TRAFFIC_S,
            "services": [
                {key: value for key, value in view.items() if key not in _LEFT_OUT}
                | {"traffic": self._known[view["name"]]}
                for view in views
            ],
        }

    def _of(self, name: str, now: float) -> View | None:
        try:
            return self._traffic(name, now - TRAFFIC_S)
        except NoSuchServiceError:  # it has gone since
            return None
