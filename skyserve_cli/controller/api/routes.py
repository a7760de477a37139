"""The routes of the kernel: it reads the store and writes goals; the reconciler does the rest. `http.Api` serves them.

Database work is done on threads, so that a slow disk does not stop the probes on this event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import orjson
from aiohttp import web

from provisioners.port.base import LogSource
from skyserve_cli.controller.api.access import AccessRole, calling, insist_on
from skyserve_cli.controller.api.activity import Activity
from skyserve_cli.controller.api.json_body import json_body, sent_order
from skyserve_cli.controller.api.query import MAX_HISTORY_REPLICAS, since_of
from skyserve_cli.controller.api.route import Route, refuse
from skyserve_cli.controller.api.service import ControllerService
from skyserve_cli.controller.api.snapshot import Rendered, Snapshots, may_be_old, snapshot_response
from skyserve_cli.controller.reconcile.clock import SteadyClock
from skyserve_cli.home import Home
from skyserve_cli.spec import spec_to_json
from skyserve_cli.state.values import NoSuchServiceError

_VIEWER, _OPERATOR = AccessRole.VIEWER, AccessRole.OPERATOR


class Doors(Protocol):
    """What parts add to calls of the kernel; see `part.Parts`. Both are called on a thread."""

    def rows(self) -> Mapping[str, Any]: ...

    def admit(self, spec: Mapping[str, Any]) -> None: ...


class KernelRoutes:
    """`reads` and `acts` give no secret away, so a page may use them too. `stop` ends the daemon."""

    def __init__(
        self,
        service: ControllerService,
        home: Home,
        stop: Callable[[], None],
        doors: Doors,
        activity: Activity,
    ) -> None:
        self._service = service
        self._home = home
        self._stop = stop
        self._doors = doors
        self._activity = activity
        self._snapshots = Snapshots(service.changes, SteadyClock())

    def all(self) -> list[Route]:
        return [
            *self.reads(),
            *self.acts(),
            Route("PUT", "/v1/services/{name}", self._put, _OPERATOR, stores=True),
            Route("POST", "/v1/tidy", self._tidy, _OPERATOR),
            Route("GET", "/v1/logs/controller", self._log_of_controller),
            Route("GET", "/v1/leaks/{cloud}", self._leaks),
            Route("POST", "/v1/leaks/{cloud}/remove", self._remove_leak),
            Route("POST", "/v1/leaks/{cloud}/forget", self._forget_cloud),
            Route("POST", "/v1/stop", self._stop_daemon),
        ]

    def reads(self) -> list[Route]:
        paths = {
            "/v1/health": self._health,
            "/v1/activity": self._activity.respond,
            "/v1/services": self._services,
            "/v1/services/{name}": self._one,
            "/v1/services/{name}/history": self._history,
            "/v1/services/{name}/series": self._series,
            "/v1/services/{name}/usage": self._usage,
            "/v1/events": self._events,
            "/v1/teams": self._teams,
            "/v1/logs/load_balancer/{name}": self._log_of_load_balancer,
            "/v1/logs/replica/{name}/{id:\\d+}": self._log_of_replica,
            "/v1/logs/replica/{name}/{id:\\d+}/{node:\\d+}": self._log_of_replica,
        }
        return [Route("GET", path, handler, _VIEWER) for path, handler in paths.items()]

    def acts(self) -> list[Route]:
        return [
            Route("POST", "/v1/services/{name}/down", self._down, _OPERATOR, stores=True),
            Route("POST", "/v1/services/{name}/replicas/{id:\\d+}/down", self._kill, _OPERATOR, stores=True),
        ]

    async def keep_spare(self) -> None:
        """For as long as this runs, have a list of services in memory for `serve status` while the database is slow."""
        await self._snapshots.keep_spare((False, False, ""), partial(self._all_services, False, False, ""))

    async def _health(self, request: web.Request) -> web.Response:
        rows = await asyncio.to_thread(self._doors.rows)
        return web.json_response({**self._service.health(), **rows})

    async def _services(self, request: web.Request) -> web.StreamResponse:
        name, ended, is_old = request.query.get("name", ""), "ended" in request.query, may_be_old(request)
        try:
            found = await self._listed(False, ended, name, is_old=is_old) if name else None
        except NoSuchServiceError:
            found = None  # the caller learns which there are
        if found is None:
            found = await self._listed("all" in request.query, ended, "", is_old=is_old)
        return await snapshot_response(request, found, self._snapshots.age_s(found))

    async def _listed(self, down: bool, ended: bool, name: str, *, is_old: bool) -> Rendered:
        kind = down, ended, name
        return await self._snapshots.get(kind, partial(self._all_services, *kind), may_be_old=is_old)

    def _all_services(self, down: bool, ended: bool, name: str) -> dict[str, Any]:
        if name:
            return {"services": [self._service.one(name, ended=ended)]}
        return {"services": self._service.services(down=down, ended=ended)}

    async def _one(self, request: web.Request) -> web.StreamResponse:
        name, ended = request.match_info["name"], "ended" in request.query
        found = await self._snapshots.get((name, ended), lambda: self._service.one(name, ended=ended))
        return await snapshot_response(request, found)

    async def _teams(self, request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(self._service.teams.view))

    async def _put(self, request: web.Request) -> web.Response:
        order = await asyncio.to_thread(sent_order, await json_body(request), request.match_info["name"])
        await asyncio.to_thread(self._doors.admit, spec_to_json(order.spec))
        version = await asyncio.to_thread(self._service.put, *order)
        return web.json_response({"name": order.spec.name, "version": version})

    async def _down(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        await asyncio.to_thread(self._service.down, request.match_info["name"], bool(body.get("purge")))
        return web.json_response({})

    async def _kill(self, request: web.Request) -> web.Response:
        name, replica_id = request.match_info["name"], int(request.match_info["id"])
        await asyncio.to_thread(self._service.kill, name, replica_id)
        return web.json_response({})

    async def _history(self, request: web.Request) -> web.Response:
        since = since_of(request)
        most = min(MAX_HISTORY_REPLICAS, max(1, int(request.query.get("most", MAX_HISTORY_REPLICAS))))
        history = await asyncio.to_thread(
            self._service.history, request.match_info["name"], since=since, most=most
        )
        return web.json_response(history)

    async def _series(self, request: web.Request) -> web.Response:
        since = since_of(request) if "since" in request.query else None
        replica_id = max(0, int(request.query.get("replica", 0)))
        name = request.match_info["name"]
        found = await asyncio.to_thread(self._service.series, name, since=since, replica_id=replica_id)
        return web.json_response(found, dumps=lambda content: orjson.dumps(content).decode())

    async def _usage(self, request: web.Request) -> web.Response:
        from skyserve_cli.controller.api.usage_view import usage_question  # rarely needed

        question = usage_question(request.query)
        found = await asyncio.to_thread(self._service.usage, request.match_info["name"], question)
        return web.json_response(found, dumps=lambda content: orjson.dumps(content).decode())

    async def _events(self, request: web.Request) -> web.Response:
        query = request.query
        insist_on(calling(), [query["service"]] if "service" in query else [])
        events = await asyncio.to_thread(
            self._service.events,
            query.get("service"),
            after=min(2**62, max(0, int(query.get("after", 0)))),
            limit=min(10_000, max(0, int(query.get("limit", 1000)))),
            newest="newest" in query,
        )
        return web.json_response({"events": events})

    async def _log_of_controller(self, request: web.Request) -> web.Response:
        return await file_response(request, self._home.controller_log)

    async def _log_of_load_balancer(self, request: web.Request) -> web.Response:
        path = self._home.load_balancer_log(request.match_info["name"])
        return await file_response(request, path)

    async def _log_of_replica(self, request: web.Request) -> web.Response:
        name, replica_id = request.match_info["name"], int(request.match_info["id"])
        node = int(request.match_info.get("node", 0))
        source, instance, lives = await asyncio.to_thread(self._service.instance, name, replica_id, node)
        kept = await asyncio.to_thread(self._service.log_archive.find, name, replica_id, node)
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
                self._service.log_archive.times(name, replica_id, node),
            )
        if lives or instance is not None:
            return await log_response(request, lambda offset, most: b"")  # not yet, or never a word
        return refuse(404, f"replica {replica_id} of {name} has no log that is still kept")

    async def _tidy(self, request: web.Request) -> web.Response:
        names = [str(name) for name in (await json_body(request))["services"]]
        insist_on(calling(), names)
        return web.json_response(await asyncio.to_thread(self._service.tidy, names))

    async def _leaks(self, request: web.Request) -> web.Response:
        look = await asyncio.to_thread(self._service.garbage_collector.inspect, request.match_info["cloud"])
        return web.json_response(look.view())

    async def _remove_leak(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        key = request.match_info["cloud"], str(body["kind"]), str(body["id"]), str(body["region"])
        refusal = await asyncio.to_thread(self._service.garbage_collector.remove, key)
        return web.json_response(refusal.view())

    async def _forget_cloud(self, request: web.Request) -> web.Response:
        problems = await asyncio.to_thread(
            self._service.garbage_collector.forget, request.match_info["cloud"]
        )
        return web.json_response({"problems": list(problems)})

    async def _stop_daemon(self, request: web.Request) -> web.Response:
        self._stop()
        return web.json_response({"pid": os.getpid()})


MAX_LOG_BYTES = 1 << 20


async def log_response(
    request: web.Request,
    read: Callable[[int, int], bytes],
    first_kept: int = 0,
    end: int = 0,
    times: Callable[[float, int], bytes] | None = None,
) -> web.Response:
    """A negative offset counts from the `end`. `times` reads marks of the log (see `host_agent.log_times`); a log without any is shown whole."""
    asked = int(request.query.get("offset", 0))
    asked += end if asked < 0 else 0
    if "since" in request.query and times is not None:
        since = float(request.query["since"])
        from provisioners.remote.host_agent.log_times import offset_since  # rarely needed

        found = await asyncio.to_thread(offset_since, times, since)
        asked = asked if found is None else end if found < 0 else found
    offset = min(2**62, max(first_kept, asked))
    content = await asyncio.to_thread(read, offset, _most(request))
    return web.Response(body=content, headers={"X-Next-Offset": str(offset + len(content))})


async def file_response(request: web.Request, path: Path) -> web.Response:
    asked = min(2**62, max(0, int(request.query.get("offset", 0))))
    content, end = await asyncio.to_thread(_read_cut, path, asked, _most(request))
    return web.Response(body=content, headers={"X-Next-Offset": str(end)})


def _read_cut(path: Path, offset: int, most: int) -> tuple[bytes, int]:
    """Read a log that is cut when it is large. An offset beyond its end is from before the cut: read from the beginning."""
    if path.exists() and offset > path.stat().st_size:
        offset = 0
    content = read_file(path, offset, most)
    return content, offset + len(content)


def _most(request: web.Request) -> int:
    return min(MAX_LOG_BYTES, max(0, int(request.query.get("max", MAX_LOG_BYTES))))


def read_file(path: Path, offset: int, most: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(most)
