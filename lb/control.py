"""The admin port: how a controller, an operator or a scraper talks to an agent. Never on the data port.

Every path needs `Authorization: Bearer TOKEN`, compared in constant time.

| | |
|---|---|
| `GET /-/live`, `GET /-/ready` | 200; ready is 503 while no target is in good standing or the agent is closing |
| `GET /-/targets`, `PUT /-/targets` | the table (`lb.wire.Table`); a push answers `{"revision": ...}` |
| `GET /-/stats?window_s=60` | demand and load (`lb.wire.Stats`) |
| `GET /-/metrics` | Prometheus |
| `GET /-/explain/ID` | why one of the last requests went where it went |
| `POST /add_worker?url=`, `POST /remove_worker?url=`, `GET /list_workers` | as SGLang's router has them |
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

from aiohttp import web
from aiohttp.typedefs import Middleware

from lb import answers
from lb.agent import Agent, WrongServiceError
from lb.window import MAX_WINDOW_S
from lb.wire import Table, Target, WireError, url_problem
from policies.routing.registry import UnknownPolicyError

MAX_PUSH_BYTES = 16 * 1024 * 1024

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def admin_app(agent: Agent, token: str) -> web.Application:
    """The admin port's application. `token` must not be empty."""
    if not token:
        raise ValueError("the admin port needs a token")
    control = _Control(agent)
    app = web.Application(middlewares=[_bearer(token)], client_max_size=MAX_PUSH_BYTES)
    app.router.add_get("/-/live", control.live)
    app.router.add_get("/-/ready", control.ready)
    app.router.add_get("/-/targets", control.get_targets)
    app.router.add_put("/-/targets", control.put_targets)
    app.router.add_get("/-/stats", control.stats)
    app.router.add_get("/-/metrics", control.metrics)
    app.router.add_get("/-/explain/{request_id}", control.explain)
    app.router.add_post("/add_worker", control.add_worker)
    app.router.add_post("/remove_worker", control.remove_worker)
    app.router.add_get("/list_workers", control.list_workers)
    return app


class _Control:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def live(self, request: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def ready(self, request: web.Request) -> web.Response:
        ready = self._agent.ready()
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def get_targets(self, request: web.Request) -> web.Response:
        return web.json_response(self._agent.table.to_json())

    async def put_targets(self, request: web.Request) -> web.Response:
        try:
            table = Table.from_json(json.loads(await request.read()))
        except WireError as error:
            return answers.error(400, "bad_table", str(error))
        except (ValueError, RecursionError):
            return answers.error(400, "bad_table", "the body is not JSON")
        return self._apply(table) or web.json_response({"revision": table.revision})

    async def stats(self, request: web.Request) -> web.Response:
        try:
            window_s = float(request.query.get("window_s", "60"))
        except ValueError:
            window_s = math.nan
        if not 1.0 <= window_s <= MAX_WINDOW_S:
            return answers.error(400, "bad_window", f"window_s must be between 1 and {MAX_WINDOW_S:g}")
        return web.json_response(self._agent.stats(window_s).to_json())

    async def metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._agent.exposition(), headers=headers)

    async def explain(self, request: web.Request) -> web.Response:
        story = self._agent.proxy.explanations.find(request.match_info["request_id"])
        if story is None:
            return answers.error(404, "not_found", "no such request among the last ones")
        return web.json_response(story.to_json())

    async def add_worker(self, request: web.Request) -> web.Response:
        url = request.query.get("url", "")
        problem = url_problem(url)
        if problem is not None:
            return web.Response(status=400, text=f"url {problem}")
        targets = self._agent.table.targets
        if any(target.url == url for target in targets):
            return web.Response(status=400, text=f"Worker {url} already exists")
        refused = self._apply(self._with((*targets, Target(id=url, url=url, health_path="/health"))))
        return refused or web.Response(text=f"Successfully added worker: {url}")

    async def remove_worker(self, request: web.Request) -> web.Response:
        url = request.query.get("url", "")
        targets = self._agent.table.targets
        left = tuple(target for target in targets if target.url != url)
        if len(left) == len(targets):
            return web.Response(status=404, text=f"Worker {url} not found")
        return self._apply(self._with(left)) or web.Response(text=f"Successfully removed worker: {url}")

    async def list_workers(self, request: web.Request) -> web.Response:
        return web.json_response({"urls": [target.url for target in self._agent.table.targets]})

    def _with(self, targets: tuple[Target, ...]) -> Table:
        """The table with other targets, under a revision that says by whom and is the same for the same table."""
        names = json.dumps([target.to_json() for target in targets]).encode()
        return replace(
            self._agent.table,
            targets=targets,
            revision=f"worker-api-{hashlib.sha256(names).hexdigest()[:12]}",
        )

    def _apply(self, table: Table) -> web.Response | None:
        """None if the table is in force now, else the refusal."""
        try:
            self._agent.apply(table)
        except WrongServiceError as error:
            return answers.error(409, "wrong_service", str(error))
        except UnknownPolicyError as error:
            return answers.error(400, "unknown_policy", str(error))
        except OSError as error:
            return answers.error(500, "not_stored", f"the table could not be stored: {error.strerror}")
        return None


def _bearer(token: str) -> Middleware:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, expected):
            refusal = answers.error(401, "unauthorized", "The admin port needs its bearer token.")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        try:
            return await handler(request)
        except web.HTTPException as error:
            return answers.error(error.status, "http_error", error.reason)

    return check
