"""The worker APIs of SGLang's gateway and, before it, router: both edit the targets of the agent's table."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from aiohttp import web

from lb.agent.admin_requests import read_json
from lb.config import edits as config_edits
from lb.config.edits import KnownWorkerError, UnknownWorkerError
from lb.config.schema import Table, Target, WireError, url_problem
from lb.core.targets import Health, TargetTable


class Control(Protocol):
    """The owner of the agent's table."""

    @property
    def targets(self) -> TargetTable: ...

    @property
    def table(self) -> Table:
        """As it would have to be pushed now to change nothing."""
        ...

    def apply(self, table: Table) -> None:
        """The table is in force afterwards, or what was wrong with it is raised."""
        ...


class WorkerApi:
    """The worker APIs of SGLang's gateway and, before it, router: both edit the table's targets."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def list(self, request: web.Request) -> web.Response:
        workers = list(self._all().values())
        return web.json_response(
            {
                "workers": workers,
                "total": len(workers),
                "stats": {
                    "total_workers": len(workers),
                    "healthy_workers": sum(worker["is_healthy"] for worker in workers),
                    "total_models": 0,  # each serves any model that a request names
                    "total_load": sum(worker["load"] for worker in workers),
                    "by_type": {"regular": len(workers), "prefill": 0, "decode": 0},
                },
            }
        )

    async def get(self, request: web.Request) -> web.Response:
        worker = self._all().get(request.match_info["id"])
        if worker is None:
            raise UnknownWorkerError(request.match_info["id"])
        return web.json_response(worker)

    async def add(self, request: web.Request) -> web.Response:
        target = config_edits.worker(await read_json(request))
        self._control.apply(config_edits.with_target(self._control.table, target))
        return _accepted(request, target.id, "added", url=target.url)

    async def replace(self, request: web.Request) -> web.Response:
        target = config_edits.worker(await read_json(request), request.match_info["id"])
        self._control.apply(config_edits.with_changed(self._control.table, target))
        return _accepted(request, target.id, "replaced")

    async def change(self, request: web.Request) -> web.Response:
        change = await read_json(request)
        table = self._control.table
        target = config_edits.changed_worker(config_edits.find(table, request.match_info["id"]), change)
        self._control.apply(config_edits.with_changed(table, target))
        return _accepted(request, target.id, "changed")

    async def remove(self, request: web.Request) -> web.Response:
        target_id = request.match_info["id"]
        self._control.apply(config_edits.without_target(self._control.table, target_id))
        return _accepted(request, target_id, "removed")

    # --- the older API: texts instead of JSON, and URLs instead of ids

    async def add_worker(self, request: web.Request) -> web.Response:
        url = request.query.get("url", "")
        problem = url_problem(url)
        if problem is not None:
            return web.Response(status=400, text=f"url {problem}")
        try:
            table = config_edits.with_target(
                self._control.table, config_edits.worker({"url": url, "id": url})
            )
        except (KnownWorkerError, WireError) as error:
            return web.Response(status=400, text=str(error))
        self._control.apply(table)
        return web.Response(text=f"Successfully added worker: {url}")

    async def remove_worker(self, request: web.Request) -> web.Response:
        url = request.query.get("url", "")
        gone = next((target for target in self._control.table.targets if target.url == url), None)
        if gone is None:
            return web.Response(status=404, text=f"Worker {url} not found")
        self._control.apply(config_edits.without_target(self._control.table, gone.id))
        return web.Response(text=f"Successfully removed worker: {url}")

    async def list_workers(self, request: web.Request) -> web.Response:
        return web.json_response({"urls": [target.url for target in self._control.table.targets]})

    def _all(self) -> dict[str, dict[str, Any]]:
        now = asyncio.get_running_loop().time()
        rows = self._control.targets.rows(now)
        return {target.id: _worker(target, health, in_flight) for target, health, in_flight in rows}


def _worker(target: Target, health: Health, in_flight: int) -> dict[str, Any]:
    return {
        **target.to_json(),
        "worker_type": "regular",
        "connection_mode": "http",
        "is_healthy": health.is_good,
        "standing": health.value,
        "load": in_flight,
    }


def _accepted(request: web.Request, worker_id: str, done: str, **more: str) -> web.Response:
    """Return 202 as SGLang's gateway does, whose changes happen later; ours has happened."""
    location = str(request.app.router["worker"].url_for(id=worker_id))
    body = {"status": "accepted", "worker_id": worker_id, **more, "location": location, "message": done}
    return web.json_response(body, status=202, headers={"Location": location})
