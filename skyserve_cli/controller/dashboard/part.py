"""The dashboard as a part of the controller.

POST /v1/dashboard    {"port": null or which} -> {"url", "port", "expires_s"}: the page, with a code that works once
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from aiohttp import web

from skyserve_cli.controller.api.access import AccessRole, ForbiddenError, calling
from skyserve_cli.controller.api.route import Route
from skyserve_cli.controller.dashboard.chat_route import ChatRoute
from skyserve_cli.controller.dashboard.endpoint import Dashboard, OfPage
from skyserve_cli.controller.dashboard.page_routes import PageRoutes
from skyserve_cli.controller.part import Kernel, Part


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
        body = await request.json() if request.can_read_body else {}
        port = dict(body).get("port")
        if calling().by_proxy:
            raise ForbiddenError("the page is at the address of the proxy; open that in a browser")
        if port is not None and calling().role is not AccessRole.ADMIN:
            raise ForbiddenError("choosing the port of the page needs the role admin; leave --port out")
        return web.json_response(await self._page.code(None if port is None else int(port)))
