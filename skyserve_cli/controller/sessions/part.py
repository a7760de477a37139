"""The routes of commands and shells on replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from skyserve_cli.controller.api.access import AccessRole, calling
from skyserve_cli.controller.api.route import Route
from skyserve_cli.controller.part import Kernel, Part
from skyserve_cli.controller.sessions.place import Place
from skyserve_cli.controller.sessions.relay import Sessions
from skyserve_cli.state.values import EventRecord

_REPLICA = "/v1/services/{name}/replicas/{id:\\d+}"


class SessionsPart(Part):
    """Lets operators of a service run commands on its machines."""

    name = "sessions"

    def __init__(self, kernel: Kernel) -> None:
        self._service = kernel.service
        self._store, self._clock = kernel.store, kernel.clock
        self._sessions = Sessions(self._record)

    def routes(self) -> Sequence[Route]:
        return [
            Route("GET", f"{_REPLICA}/access", self._access, AccessRole.OPERATOR),
            Route("GET", f"{_REPLICA}/session", self._session, AccessRole.OPERATOR),
        ]

    def row(self) -> Mapping[str, Any]:
        left = self._service.machines_with_older_keys()
        return {} if not left else {"machine keys": f"{left} not replaced yet, or not connected to yet"}

    async def _access(self, request: web.Request) -> web.Response:
        return web.json_response((await self._place(request)).view())

    async def _session(self, request: web.Request) -> web.StreamResponse:
        self._service.refuse_unless_leading()
        return await self._sessions.serve(request, await self._place(request))

    async def _place(self, request: web.Request) -> Place:
        name, replica_id = request.match_info["name"], int(request.match_info["id"])
        node = int(request.query.get("node", 0))
        source, instance, lives = await asyncio.to_thread(self._service.instance, name, replica_id, node)
        return Place(name, replica_id, node, source, instance if lives else None)

    def _record(self, place: Place, sentence: str) -> None:
        record = EventRecord("session", sentence, place.replica_id, author=calling().name)
        self._store.append_event(record, now=self._clock.now(), service=place.service)
