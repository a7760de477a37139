"""The controller's HTTP API: on a Unix socket in the home, and on a port if configured; a bearer token on every path, JSON.

The kernel's routes are in `routes`, parts add theirs; each names the role that it needs. docs/reference/controller-api.md describes all of
them, but for `GET /livez`: on the port alone, without a token, it responds "ok" to the probes of Kubernetes.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from aiohttp import web

from skyserve_cli.controller.api.access import OWNER, Caller, StillValid, set_caller
from skyserve_cli.controller.api.route import Route, failures, refuse
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

        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[failures, guard])
        # A page has every path that is no other route's.
        routes = sorted(self._routes, key=lambda one: one.for_proxy)
        app.add_routes([one.definition() for one in routes if is_remote or not one.for_proxy])
        return app

    def _is_owner(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, f"Bearer {self._token}".encode())
