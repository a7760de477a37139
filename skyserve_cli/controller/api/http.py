"""The controller's HTTP API: on a Unix socket in the home, and on a port if configured; a bearer token on every path, JSON.

It reads the store and writes goals; the reconciler does the rest. `access` says who may use which route. Database work is done on threads, so that a
slow disk does not stop the probes on this event loop.

    GET  /v1/health
    GET  /v1/services            ?all=1 also those that are down   ?ended=1 with replicas that have terminated
    POST /v1/services/NAME/chat  see `chat_route`
    PUT  /v1/services/NAME       {"spec", "secrets", "mode": null | "rolling" | "blue_green"} -> {"version"}
    POST /v1/services/NAME/down  {"purge"}
    POST /v1/services/NAME/replicas/ID/down
    GET  /v1/services/NAME/replicas/ID/access    ?node=    how to run commands there, with a private key
    GET  /v1/services/NAME/history    ?since= UNIX seconds   &most= replicas
    GET  /v1/services/NAME/series     ?since= UNIX seconds   &replica= id    what load balancers counted over time
    GET  /v1/services/NAME/usage      ?since= day   &until= day   &by= key,model,day   &top= rows    see `usage_view`
    POST /v1/plan                {"spec", "secrets", "mode": of an update, null for that of the spec}
    GET  /v1/events              ?service= &after= &limit= &newest=1
    GET  /v1/logs/controller | /v1/logs/load_balancer/NAME | /v1/logs/replica/NAME/ID[/NODE]    ?offset= &max=
                                 ?since= UNIX seconds: from the first line of a replica written then, in place of offset
    POST /v1/tidy                {"services"} -> {"removed", "waiting", "problems"}
    GET  /v1/leaks/CLOUD
    POST /v1/leaks/CLOUD/remove  {"kind", "id", "region"} -> {"why": "" or why not, "passes"}
    POST /v1/leaks/CLOUD/forget  -> {"problems"}
    POST /v1/dashboard           {"port": null or which} -> {"url", "port", "expires_s"}: the page, with a code that works once
    POST /v1/stop
    GET  /livez                  on the port alone, without a token: "ok", for the probes of Kubernetes
    GET  /v1/teams               see `team_rules`
    GET  /v1/tokens | POST /v1/tokens | POST /v1/tokens/NAME/revoke    see `team`
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from provisioners.port.base import LogSource
from skyserve_cli.controller.api.access import (
    OWNER,
    Caller,
    ForbiddenError,
    StillValid,
    calling,
    insist_on,
    set_caller,
    valid_for,
    visible,
)
from skyserve_cli.controller.api.chat_route import ChatRoute
from skyserve_cli.controller.api.errors import failures, refuse, with_errors, with_json_errors
from skyserve_cli.controller.api.json_body import json_body, sent_order
from skyserve_cli.controller.api.log_responses import file_response, log_response, read_file
from skyserve_cli.controller.api.page_routes import AdminReader, PageRoutes
from skyserve_cli.controller.api.proxy_login import LOGIN_S, LoginRefusedError, ProxyLogin
from skyserve_cli.controller.api.query import MAX_HISTORY_REPLICAS, since_of
from skyserve_cli.controller.api.service import ControllerService
from skyserve_cli.controller.api.shells import NoAccessError, access_to
from skyserve_cli.controller.api.snapshot import Rendered, Snapshots, rendered
from skyserve_cli.controller.api.team import Team
from skyserve_cli.controller.api.upload_routes import UploadRoutes
from skyserve_cli.controller.api.usage_view import usage_question
from skyserve_cli.controller.reconcile.clock import SteadyClock
from skyserve_cli.controller.uploads.content_store import ContentStore
from skyserve_cli.spec import spec_to_json

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
PIECE_BYTES = 64 * 1024
MOST_PORT = 65_535

OpenPage = Callable[[int | None], Awaitable[dict[str, Any]]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PageClosedError(Exception):
    """The port of the page cannot be opened; the text names it and the reason."""


class Api:
    """Routes to the office, and from its errors to status codes."""

    def __init__(
        self,
        controller_service: ControllerService,
        token: str,
        controller_log: Path,
        stop: Callable[[], None],
        agents: AdminReader | None = None,
        team: Team | None = None,
        uploads: ContentStore | None = None,
    ) -> None:
        """`token` is the owner's, `agents` reads admin ports of load balancers, `team` has others' tokens, `uploads` sent files."""
        self._team = team
        leads = controller_service.refuse_unless_leading
        self._uploads = None if uploads is None else UploadRoutes(uploads, leads)
        self._open_page: OpenPage | None = None
        self._notifications: Callable[[], dict[str, Any]] = dict
        self._controller_service = controller_service
        self._token = token
        self._controller_log = controller_log
        self._stop = stop
        self._snapshots = Snapshots(controller_service.changes, SteadyClock())
        self._chat = ChatRoute(lambda name: controller_service.one(name, ended=False))
        self._pages = PageRoutes(controller_service, self._snapshots, _snapshot_response, agents)

    def opens(self, page: OpenPage) -> None:
        """From now on `POST /v1/dashboard` calls `page` with a port or None, and responds with what it returns."""
        self._open_page = page

    def shows(self, notifications: Callable[[], dict[str, Any]]) -> None:
        """From now on `GET /v1/health` has what `notifications` returns, which is called on a thread."""
        self._notifications = notifications

    def app(
        self,
        *,
        is_remote: bool = False,
        login: ProxyLogin | None = None,
        page: Sequence[web.RouteDef] = (),
    ) -> web.Application:
        """Return the API. `is_remote`: for a port, where the owner's token is not accepted.

        `login` accepts users whom a proxy has authenticated; `page` are further routes for them.
        """

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            if is_remote and request.path == "/livez":
                return web.Response(text="ok\n")
            try:
                caller = None if login is None else login.of(request)
            except LoginRefusedError as error:
                return refuse(error.status, str(error))
            check = None if caller is None else valid_for(LOGIN_S)
            if caller is None:
                caller, check = await self._holder(request, is_remote)
            if caller is None:
                return refuse(401, "the token is missing, wrong or revoked")
            set_caller(caller, check)
            if caller.by_proxy and not request.path.startswith("/v1/"):
                return await handler(request)
            return await with_errors(request, handler)

        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[failures, guard])
        app.add_routes([*self._shown(), *self._chat.routes(), *self._actions(), *self._own(), *page])
        return app

    def for_page(self) -> tuple[list[web.RouteDef], list[web.RouteDef], list[web.RouteDef]]:
        """Return the routes that read, those that act, and those that send requests to services, for a page.

        Their errors are responses. None gives a secret away.
        """
        kinds = (self._shown(), self._actions(), self._chat.routes())
        reads, acts, sends = ([with_json_errors(route) for route in routes] for routes in kinds)
        return reads, acts, sends

    def _shown(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/health", self._health),
            web.get("/v1/services", self._services),
            web.get("/v1/services/{name}/history", self._history),
            web.get("/v1/services/{name}/series", self._series),
            web.get("/v1/services/{name}/usage", self._usage),
            web.get("/v1/events", self._events),
            web.get("/v1/teams", self._teams),
            web.get("/v1/logs/load_balancer/{name}", self._log_of_load_balancer),
            web.get("/v1/logs/replica/{name}/{id:\\d+}", self._log_of_replica),
            web.get("/v1/logs/replica/{name}/{id:\\d+}/{node:\\d+}", self._log_of_replica),
            *self._pages.routes(),
        ]

    def _actions(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/services/{name}/down", self._down),
            web.post("/v1/services/{name}/replicas/{id:\\d+}/down", self._kill),
        ]

    def _own(self) -> list[web.RouteDef]:
        return [
            web.put("/v1/services/{name}", self._put),
            web.get("/v1/services/{name}/replicas/{id:\\d+}/access", self._access),
            web.post("/v1/plan", self._plan),
            web.get("/v1/logs/controller", self._log_of_controller),
            web.post("/v1/tidy", self._tidy),
            web.get("/v1/leaks/{cloud}", self._leaks),
            web.post("/v1/leaks/{cloud}/remove", self._remove_leak),
            web.post("/v1/leaks/{cloud}/forget", self._forget_cloud),
            web.post("/v1/dashboard", self._dashboard),
            web.post("/v1/stop", self._stop_daemon),
            *([] if self._team is None else self._team.routes()),
            *([] if self._uploads is None else self._uploads.routes()),
        ]

    async def _holder(self, request: web.Request, is_remote: bool) -> tuple[Caller | None, StillValid | None]:
        """Return whose token the request has (None: it is unknown or revoked), and how to look that up again."""
        given = request.headers.get("Authorization", "")
        owners = f"Bearer {self._token}".encode()
        if not is_remote and hmac.compare_digest(given.encode("utf-8", "surrogateescape"), owners):
            return OWNER, None
        kind, _, token = given.partition(" ")
        if self._team is None or kind != "Bearer" or not token:
            return None, None
        look_up = partial(self._team.holder_of, token)
        return await look_up(), look_up

    async def _health(self, request: web.Request) -> web.Response:
        notifications = await asyncio.to_thread(self._notifications)
        return web.json_response({**self._controller_service.health(), "notifications": notifications})

    async def _services(self, request: web.Request) -> web.StreamResponse:
        everything, ended = "all" in request.query, "ended" in request.query
        content = partial(self._controller_service.services, down=everything, ended=ended)
        found = await self._snapshots.get((everything, ended), lambda: {"services": content()})
        return await _snapshot_response(request, found)

    async def _teams(self, request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(self._controller_service.teams.view))

    async def _put(self, request: web.Request) -> web.Response:
        order = await asyncio.to_thread(sent_order, await json_body(request), request.match_info["name"])
        if self._uploads is not None:
            await self._uploads.insist_on(spec_to_json(order.spec))
        version = await asyncio.to_thread(self._controller_service.put, *order)
        return web.json_response({"name": order.spec.name, "version": version})

    async def _down(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        await asyncio.to_thread(
            self._controller_service.down, request.match_info["name"], bool(body.get("purge"))
        )
        return web.json_response({})

    async def _kill(self, request: web.Request) -> web.Response:
        name, replica_id = request.match_info["name"], int(request.match_info["id"])
        await asyncio.to_thread(self._controller_service.kill, name, replica_id)
        return web.json_response({})

    async def _access(self, request: web.Request) -> web.Response:
        name, replica_id = request.match_info["name"], int(request.match_info["id"])
        node = int(request.query.get("node", 0))
        source, instance, lives = await asyncio.to_thread(
            self._controller_service.instance, name, replica_id, node
        )
        try:
            place = await asyncio.to_thread(access_to, source, instance if lives else None, node)
        except NoAccessError as error:
            return refuse(409, f"replica {replica_id} of {name} {error}")
        return web.json_response(place, headers={"Cache-Control": "no-store"})

    async def _history(self, request: web.Request) -> web.Response:
        since = since_of(request)
        most = min(MAX_HISTORY_REPLICAS, max(1, int(request.query.get("most", MAX_HISTORY_REPLICAS))))
        history = await asyncio.to_thread(
            self._controller_service.history, request.match_info["name"], since=since, most=most
        )
        return web.json_response(history)

    async def _series(self, request: web.Request) -> web.Response:
        since = since_of(request) if "since" in request.query else None
        replica_id = max(0, int(request.query.get("replica", 0)))
        name = request.match_info["name"]
        found = await asyncio.to_thread(
            self._controller_service.series, name, since=since, replica_id=replica_id
        )
        return web.json_response(found, dumps=lambda content: orjson.dumps(content).decode())

    async def _usage(self, request: web.Request) -> web.Response:
        question = usage_question(request.query)
        found = await asyncio.to_thread(self._controller_service.usage, request.match_info["name"], question)
        return web.json_response(found, dumps=lambda content: orjson.dumps(content).decode())

    async def _plan(self, request: web.Request) -> web.Response:
        order = await asyncio.to_thread(sent_order, await json_body(request))
        insist_on(calling(), [order.spec.name])
        return web.json_response(await asyncio.to_thread(self._controller_service.plan, *order))

    async def _events(self, request: web.Request) -> web.Response:
        query = request.query
        insist_on(calling(), [query["service"]] if "service" in query else [])
        events = await asyncio.to_thread(
            self._controller_service.events,
            query.get("service"),
            after=min(2**62, max(0, int(query.get("after", 0)))),
            limit=min(10_000, max(0, int(query.get("limit", 1000)))),
            newest="newest" in query,
        )
        return web.json_response({"events": events})

    async def _log_of_controller(self, request: web.Request) -> web.Response:
        return await file_response(request, self._controller_log)

    async def _log_of_load_balancer(self, request: web.Request) -> web.Response:
        path = self._controller_service.load_balancer_log(request.match_info["name"])
        return await file_response(request, path)

    async def _log_of_replica(self, request: web.Request) -> web.Response:
        name, replica_id = request.match_info["name"], int(request.match_info["id"])
        node = int(request.match_info.get("node", 0))
        source, instance, lives = await asyncio.to_thread(
            self._controller_service.instance, name, replica_id, node
        )
        kept = await asyncio.to_thread(self._controller_service.log_archive.find, name, replica_id, node)
        is_whole = kept is not None and kept[1] == 0  # no need to call a machine that may be dying
        if instance is not None and isinstance(source, LogSource) and not is_whole:
            first, end = await asyncio.to_thread(source.log_window, instance, node)
            if end:
                return await log_response(
                    request,
                    lambda offset, most: source.read_log(instance, offset, most, node),
                    first,
                    end,
                    lambda after, most: source.log_times(instance, after, 0, most, node),
                )
        if kept is not None:
            path, first = kept
            return await log_response(
                request,
                lambda offset, most: read_file(path, offset - first, most),
                first,
                first + path.stat().st_size,
                self._controller_service.log_archive.times(name, replica_id, node),
            )
        if lives or instance is not None:
            return await log_response(request, lambda offset, most: b"")  # not yet, or never a word
        return refuse(404, f"replica {replica_id} of {name} has no log that is still kept")

    async def _tidy(self, request: web.Request) -> web.Response:
        names = [str(name) for name in (await json_body(request))["services"]]
        insist_on(calling(), names)
        return web.json_response(await asyncio.to_thread(self._controller_service.tidy, names))

    async def _leaks(self, request: web.Request) -> web.Response:
        look = await asyncio.to_thread(
            self._controller_service.garbage_collector.inspect, request.match_info["cloud"]
        )
        return web.json_response(look.view())

    async def _remove_leak(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        key = request.match_info["cloud"], str(body["kind"]), str(body["id"]), str(body["region"])
        refusal = await asyncio.to_thread(self._controller_service.garbage_collector.remove, key)
        return web.json_response(refusal.view())

    async def _forget_cloud(self, request: web.Request) -> web.Response:
        problems = await asyncio.to_thread(
            self._controller_service.garbage_collector.forget, request.match_info["cloud"]
        )
        return web.json_response({"problems": list(problems)})

    async def _dashboard(self, request: web.Request) -> web.Response:
        port = (await json_body(request)).get("port")
        if calling().by_proxy:
            raise ForbiddenError("the page is at the address of the proxy; open that in a browser")
        if port is not None and calling() != OWNER:
            raise ForbiddenError(
                "the page's port is the owner's to choose, for all who use it; leave --port out"
            )
        if port is not None and not (type(port) is int and 1 <= port <= MOST_PORT):
            return refuse(400, f"port: must be null or a whole number from 1 to {MOST_PORT}")
        if self._open_page is None:
            return refuse(404, "this controller has no page")
        try:
            return web.json_response(await self._open_page(port))
        except PageClosedError as error:
            return refuse(409, str(error))

    async def _stop_daemon(self, request: web.Request) -> web.Response:
        self._stop()
        return web.json_response({"pid": os.getpid()})


async def _snapshot_response(request: web.Request, found: Rendered) -> web.StreamResponse:
    if calling().services is not None and request.match_info.get("name") is None:
        found = await asyncio.to_thread(lambda: rendered(visible(found.body), found.changes, found.at))
    headers = {"ETag": found.etag, "Cache-Control": "no-cache"}
    if found.etag in (tag.strip() for tag in request.headers.get("If-None-Match", "").split(",")):
        return web.Response(status=304, headers=headers)
    if len(found.body) <= PIECE_BYTES:
        return web.Response(body=found.body, content_type="application/json", headers=headers)
    # Written at once, asyncio would move the rest of it after each piece that the socket takes.
    response = web.StreamResponse(headers=headers)
    response.content_type, response.content_length = "application/json", len(found.body)
    await response.prepare(request)
    for start in range(0, len(found.body), PIECE_BYTES):
        await response.write(found.body[start : start + PIECE_BYTES])
    await response.write_eof()
    return response
