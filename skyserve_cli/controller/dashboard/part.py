"""The dashboard as a part of the controller.

POST /v1/dashboard    {"port": null or which} -> {"url", "port", "expires_s"}: the page, with a code that works once
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from aiohttp import web

from skyserve_cli.controller.api.access import OWNER, AccessRole, ForbiddenError, calling
from skyserve_cli.controller.api.json_body import json_body
from skyserve_cli.controller.api.route import Route, refuse
from skyserve_cli.controller.dashboard.chat_route import ChatRoute
from skyserve_cli.controller.dashboard.endpoint import Dashboard, OfPage
from skyserve_cli.controller.dashboard.page_routes import PageRoutes
from skyserve_cli.controller.part import Kernel, Part

MOST_PORT = 65_535


class DashboardPart(Part):
    """Serves the page on a port of its own, its routes in the API, and, where a proxy authenticates users, both on the port."""

    name = "dashboard"

    def __init__(self, kernel: Kernel) -> None:
        service, listen = kernel.service, kernel.config.controller.listen
        self._reads = PageRoutes(service, kernel.agents, kernel.parts.callers_revision).routes()
        self._sends = ChatRoute(lambda name: service.one(name, ended=False)).routes()
        self._page = Dashboard(
            kernel.home.dashboard,
            kernel.clock.now,
            lambda: secrets.token_urlsafe(32),
            OfPage([*kernel.routes.reads(), *self._reads], kernel.routes.acts(), self._sends),
            kernel.config.dashboard,
            kernel.parts.named,
        )
        self._is_proxied = listen is not None and listen.trusted_proxy is not None

    async def start(self) -> None:
        await self._page.resume()

    async def stop(self) -> None:
        await self._page.close()

    def routes(self) -> Sequence[Route]:
        opened = Route("POST", "/v1/dashboard", self._open, AccessRole.VIEWER)
        proxied = self._page.for_proxy() if self._is_proxied else []
        return [opened, *self._reads, *self._sends, *proxied]

    async def _open(self, request: web.Request) -> web.Response:
        """Raise RejectedError."""
        port = (await json_body(request)).get("port")
        if calling().by_proxy:
            raise ForbiddenError("the page is at the address of the proxy; open that in a browser")
        if port is not None and calling() != OWNER:
            raise ForbiddenError(
                "the page's port is the owner's to choose, for all who use it; leave --port out"
            )
        if port is not None and not (type(port) is int and 1 <= port <= MOST_PORT):
            return refuse(400, f"port: must be null or a whole number from 1 to {MOST_PORT}")
        return web.json_response(await self._page.code(port))
