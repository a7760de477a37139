"""The admin port: how a controller, an operator or a scraper talks to an agent. Never on the data port.

Every path needs `Authorization: Bearer TOKEN`, compared in constant time (`--open-probes` excepts live and ready). Bodies are bounded, and read as
strictly as tables: a problem is named with its path, and changes nothing.

| | |
|---|---|
| `GET /-/live`, `GET /-/ready` | 200; ready is 503 while no target is healthy, or the agent drains or closes; with `?table` while it has no table, healthy targets or not |
| `GET /-/targets`, `PUT /-/targets` | the table (`lb.config.schema.Table`); a push returns `{"revision": ...}` |
| `GET /-/options`, `PATCH /-/options` | policy, limits, retries, breaker, pushing, continuation, access, cors, trusted_proxies, session, listen, metrics: those given change |
| `POST /-/drain?target=ID&deadline_s=`, `POST /-/undrain?target=ID` | one target; without `target` the agent itself, which goes on serving and is not ready |
| `GET /-/stats?window_s=60` | demand and load (`lb.config.schema.Stats`); with `build=1` also how the agent runs, with `health=1` how its targets work |
| `GET /-/demand?since=` | demand of each minute from that one on (`lb.config.demand.Demand`) |
| `GET /-/totals` | counters since the start, in total and by target (`lb.config.totals.Totals`) |
| `GET /-/usage?source=&since=` | what requests of each key and model have used, by day (`lb.config.usage.UsageReport`); of that source only what has changed since that mark |
| `POST /-/usage/totals` | what all agents have counted today and in this month, of some keys (`lb.config.usage.UsageTotals`); for an agent whose report of usage has `totals` |
| `GET /-/metrics` | Prometheus |
| `GET /-/regions` | the state of the agents of other regions |
| `GET /-/keys` | what the owner of each API key has used, has reserved and in flight, and has left |
| `GET /-/explain/ID`, `GET /-/explain?limit=20` | why one of the last requests went where it went; the latest ones |
| `GET /workers`, `POST /workers`, `GET`/`PUT`/`PATCH`/`DELETE /workers/ID` | as SGLang's gateway has them |
| `POST /add_worker?url=`, `POST /remove_worker?url=`, `GET /list_workers` | as SGLang's router has them |

Every change of the table is stored in the agent's table file before it is in force, and is in force when the response is sent. A
controller takes an edited table for a stale one and pushes its own again.
"""

from __future__ import annotations

import asyncio
import hmac
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, Protocol

from aiohttp import web
from aiohttp.typedefs import Middleware

from lb.agent.admin_requests import Rejected, error_response, read_json, read_number
from lb.agent.data_port import CannotListenError
from lb.agent.worker_api import WorkerApi
from lb.config import edits as config_edits
from lb.config.demand import Demand
from lb.config.edits import KnownWorkerError, UnknownWorkerError
from lb.config.schema import Build, EarlierEpochError, RetiredError, Stats, Table, WireError
from lb.config.totals import Totals
from lb.config.usage import UsageReport, UsageTotals
from lb.core.api_keys import Usage
from lb.core.sliding_window import MAX_WINDOW_S
from lb.core.targets import TargetTable
from lb.observe.explain import KEPT_REQUESTS, Explanation, Explanations
from lb.observe.metrics import CONTENT_TYPE
from policies.routing.registry import UnknownPolicyError

_PROBES = ("/-/live", "/-/ready")
MAX_PUSH_BYTES = 16 * 1024 * 1024
LONGEST_DRAIN_S = 1e9

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Administered(Protocol):
    """What this port needs of an agent (`lb.agent.agent.Agent`)."""

    targets: TargetTable

    @property
    def explanations(self) -> Explanations: ...

    @property
    def table(self) -> Table: ...

    def apply(self, table: Table) -> object:
        """Store the table and act on it.

        Raises RetiredError, UnknownPolicyError, EarlierEpochError, CannotListenError or OSError; then nothing has changed.
        """
        ...

    def ready(self) -> bool: ...

    def has_table(self) -> bool: ...

    def drain(self, *, on: bool) -> None:
        """Serve on, but be not ready, until called again with `on` False."""
        ...

    def stats(self, window_s: float) -> Stats: ...

    @property
    def build(self) -> Build: ...

    def demand(self, since: int) -> Demand: ...

    def totals(self) -> Totals: ...

    def used_since(self, source: str, mark: int) -> UsageReport:
        """Return what requests of each key and model have used. Raises sqlite3.Error."""
        ...

    @property
    def wants_totals(self) -> bool:
        """Whether a key has limits of days or months."""
        ...

    def counted(self, totals: UsageTotals) -> None:
        """Take what all agents have counted of some keys. Totals that are lower than known ones, or of another day, are old."""
        ...

    def exposition(self) -> bytes: ...

    def regions(self) -> dict[str, Any]:
        """Return the state of agents of other regions."""
        ...

    async def explained(self, explanation: Explanation) -> dict[str, Any]:
        """Return an explanation as JSON, with what peers say of the request."""
        ...

    def usage(self) -> Iterable[Usage]:
        """Return the accounts of the owners of API keys (`lb.core.api_keys.ApiKeyStore.usage`)."""
        ...


def admin_app(agent: Administered, token: str, *, open_probes: bool = False) -> web.Application:
    """Return the admin port's application.

    `token` must not be empty. With `open_probes` GET /-/live and /-/ready
    need no token. Needs a running event loop, whose clock is the agent's.
    """
    if not token:
        raise ValueError("the admin port needs a token")
    control = _AgentControl(agent)
    workers = WorkerApi(control)
    app = web.Application(
        middlewares=[_bearer(token, _PROBES if open_probes else ()), _rejections],
        client_max_size=MAX_PUSH_BYTES,
    )
    app.add_routes(
        [
            web.get("/-/live", control.live),
            web.get("/-/ready", control.ready),
            web.get("/-/targets", control.get_targets),
            web.put("/-/targets", control.put_targets),
            web.get("/-/options", control.get_options),
            web.patch("/-/options", control.patch_options),
            web.post("/-/drain", control.drain),
            web.post("/-/undrain", control.undrain),
            web.get("/-/stats", control.stats),
            web.get("/-/demand", control.demand),
            web.get("/-/totals", control.totals),
            web.get("/-/usage", control.used),
            web.post("/-/usage/totals", control.counted),
            web.get("/-/metrics", control.metrics),
            web.get("/-/keys", control.keys),
            web.get("/-/regions", control.regions),
            web.get("/-/explain", control.latest),
            web.get("/-/explain/{request_id}", control.explain),
            web.get("/workers", workers.list),
            web.post("/workers", workers.add),
            web.get("/workers/{id}", workers.get, name="worker"),
            web.put("/workers/{id}", workers.replace),
            web.patch("/workers/{id}", workers.change),
            web.delete("/workers/{id}", workers.remove),
            web.post("/add_worker", workers.add_worker),
            web.post("/remove_worker", workers.remove_worker),
            web.get("/list_workers", workers.list_workers),
        ]
    )
    return app


class _AgentControl:
    """The agent behind the admin API: the only code that replaces its table."""

    def __init__(self, agent: Administered) -> None:
        self.agent = agent
        self._clock = asyncio.get_running_loop().time
        self._pushed_at = self._clock()

    # --- the table

    @property
    def targets(self) -> TargetTable:
        return self.agent.targets

    @property
    def table(self) -> Table:
        """The table as it would have to be pushed now to change nothing: its deadlines are nearer than when it was pushed."""
        return config_edits.aged(self.agent.table, self._clock() - self._pushed_at)

    def apply(self, table: Table) -> None:
        """Put a table in force. Raises Rejected if something is wrong with it; then nothing has changed."""
        serves = self.agent.table.service
        if table.service != serves:
            raise Rejected(409, "wrong_service", f"this agent serves {serves!r}, not {table.service!r}")
        try:
            self.agent.apply(table)
        except RetiredError as error:
            refused = Rejected(503, "retired", str(error))
            refused.response.force_close()  # the next connection is the successor's
            raise refused from error
        except UnknownPolicyError as error:
            raise Rejected(400, "unknown_policy", str(error)) from error
        except EarlierEpochError as error:
            raise Rejected(409, "earlier_epoch", str(error)) from error
        except CannotListenError as error:
            raise Rejected(409, "cannot_listen", str(error.strerror)) from error
        except OSError as error:
            why = f"the table could not be stored: {error.strerror}"
            raise Rejected(500, "not_stored", why) from error
        self._pushed_at = self._clock()

    async def get_targets(self, request: web.Request) -> web.Response:
        return web.json_response(self.agent.table.to_json())

    async def put_targets(self, request: web.Request) -> web.Response:
        table = Table.from_json(await read_json(request))
        self.apply(table)
        return web.json_response({"revision": table.revision})

    async def get_options(self, request: web.Request) -> web.Response:
        return web.json_response(config_edits.options(self.agent.table))

    async def patch_options(self, request: web.Request) -> web.Response:
        change = await read_json(request)  # first, for while it comes others may edit the table
        self.apply(config_edits.with_options(self.table, change))
        return await self.get_options(request)

    # --- live, ready and draining

    async def live(self, request: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def ready(self, request: web.Request) -> web.Response:
        ready = self.agent.has_table() if "table" in request.query else self.agent.ready()
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def drain(self, request: web.Request) -> web.Response:
        target_id = request.query.get("target")
        deadline_s = read_number(request, "deadline_s", None, 0.0, LONGEST_DRAIN_S)
        if target_id is None and deadline_s is not None:
            raise Rejected(400, "bad_deadline_s", "deadline_s goes with a target")
        if target_id is None:
            self.agent.drain(on=True)
        else:
            self.apply(config_edits.drained(self.table, target_id, deadline_s))
        return web.json_response({"draining": target_id or "the agent", "deadline_s": deadline_s})

    async def undrain(self, request: web.Request) -> web.Response:
        target_id = request.query.get("target")
        if target_id is None:
            self.agent.drain(on=False)
        else:
            self.apply(config_edits.undrained(self.table, target_id))
        return web.json_response({"draining": None})

    # --- reports

    async def stats(self, request: web.Request) -> web.Response:
        window_s = read_number(request, "window_s", 60.0, 1.0, MAX_WINDOW_S)
        stats = self.agent.stats(window_s)
        # An older controller, which does not ask, rejects statistics with an unknown key.
        if "build" in request.query:
            stats = replace(stats, build=self.agent.build)
        if "health" not in request.query:
            stats = replace(stats, targets=tuple(replace(one, health=None) for one in stats.targets))
        return web.json_response(stats.to_json())

    async def demand(self, request: web.Request) -> web.Response:
        since = read_number(request, "since", 0.0, 0.0, 1e9)
        return web.json_response(self.agent.demand(int(since)).to_json())

    async def totals(self, request: web.Request) -> web.Response:
        return web.json_response(self.agent.totals().to_json())

    async def used(self, request: web.Request) -> web.Response:
        since = int(read_number(request, "since", 0.0, 0.0, 2.0**53))
        try:
            report = self.agent.used_since(request.query.get("source", ""), since)
        except sqlite3.Error as error:
            raise Rejected(503, "not_readable", f"the usage cannot be read: {error}") from error
        return web.json_response(replace(report, totals=self.agent.wants_totals).to_json())

    async def counted(self, request: web.Request) -> web.Response:
        totals = UsageTotals.from_json(await read_json(request))
        self.agent.counted(totals)
        return web.json_response({"rows": len(totals.rows)})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.agent.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def regions(self, request: web.Request) -> web.Response:
        return web.json_response(self.agent.regions())

    async def keys(self, request: web.Request) -> web.Response:
        return web.json_response({"keys": [usage._asdict() for usage in self.agent.usage()]})

    async def explain(self, request: web.Request) -> web.Response:
        explanation = self.agent.explanations.find(request.match_info["request_id"])
        if explanation is None:
            raise Rejected(404, "not_found", "no such request among the last ones")
        return web.json_response(await self.agent.explained(explanation))

    async def latest(self, request: web.Request) -> web.Response:
        limit = int(read_number(request, "limit", 20.0, 0.0, KEPT_REQUESTS))
        latest = self.agent.explanations.latest(limit)
        return web.json_response({"requests": [explanation.to_json() for explanation in latest]})


@web.middleware
async def _rejections(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Rejected as rejected:
        return rejected.response
    except WireError as error:
        return error_response(400, "bad_request", str(error))
    except KnownWorkerError as error:
        return error_response(409, "worker_exists", str(error))
    except UnknownWorkerError as error:
        return error_response(404, "worker_not_found", str(error))
    except web.HTTPException as error:
        return error_response(error.status, "http_error", error.reason)


def _bearer(token: str, free: Collection[str]) -> Middleware:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.method == "GET" and request.path in free:
            return await handler(request)
        if not hmac.compare_digest(given, expected):
            rejection = error_response(401, "unauthorized", "The admin port needs its bearer token.")
            rejection.headers["WWW-Authenticate"] = "Bearer"
            return rejection
        return await handler(request)

    return check
