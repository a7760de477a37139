"""The controller's HTTP API: on a Unix socket in the home, and on a port if configured; a bearer token on every path, JSON.

The kernel's routes are in `routes`; `access` says who may use which route. Parts add theirs.

    GET  /v1/health
    GET  /v1/services            ?all=1 also those that are down   ?ended=1 with replicas that have terminated
    GET  /v1/services/NAME       one of them, with an ETag   ?ended=1
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
    POST /v1/stop
    GET  /livez                  on the port alone, without a token: "ok", for the probes of Kubernetes
    GET  /v1/teams               see `team_rules`
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from aiohttp import web

from skyserve_cli.controller.api.access import OWNER, Caller, StillValid, set_caller
from skyserve_cli.controller.api.route import Route, refuse
from skyserve_cli.controller.rejected import RejectedError

MAX_BODY_BYTES = 8 << 20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Callers(Protocol):
    """Who may call beside the owner; see `part.Parts`."""

    async def caller_of(self, request: web.Request, is_remote: bool) -> tuple[Caller, StillValid] | None: ...


class Api:
    """The application over these routes. `token` is the owner's."""

    def __init__(self, token: str, routes: Sequence[Route], callers: Callers) -> None:
        self._token = token
        self._routes = routes
        self._callers = callers

    def app(self, *, is_remote: bool = False) -> web.Application:
        """Return the API. `is_remote`: for a port, where the owner's token is not accepted, and a proxy may authenticate users."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            if is_remote and request.path == "/livez":
                return web.Response(text="ok\n")
            if not is_remote and self._is_owner(request):
                set_caller(OWNER)
                return await handler(request)
            try:
                found = await self._callers.caller_of(request, is_remote)
            except RejectedError as error:
                return refuse(error.status, str(error))
            if found is None:
                return refuse(401, "the token is missing, wrong or revoked")
            set_caller(*found)
            return await handler(request)

        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard])
        # A page has every path that is no other route's.
        routes = sorted(self._routes, key=lambda one: one.for_proxy)
        app.add_routes([one.definition() for one in routes if is_remote or not one.for_proxy])
        return app

    def _is_owner(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, f"Bearer {self._token}".encode())
