"""Finds the target that has a resource: as it was learned from a response, or by a look at all targets.

What made a resource is known from its response (`lb.core.homes`), unless the agent was started since, or the response passed
another process. Then every target of the table, draining ones included, gets a GET of the resource at the same time, and has
LOOKUP_S to respond; only the status of a success is read. The result is remembered, and requests that wait for the same
resource share one look. The GET has the credentials that targets get with the request itself.

What targets respond decides what becomes of a request for a resource that none of them is known to have:

    a target has it                            the request goes there
    all say in the API's words that they       404, at once
      have not, or cannot be connected to
    some do not respond in time                503: one of them may have it
    some do not know the path, or respond      the request goes anywhere: the engine knows more of this than we do
      with another error
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import NamedTuple, Protocol

from lb.config.schema import Target
from lb.core.api_keys import Admission
from lb.core.failures import is_local
from lb.core.homes import Absence, Found, Homes
from lb.core.residency import Zones, may_have
from lb.core.targets import TargetTable
from lb.engines.kinds import Fetched
from lb.http.key_carriers import lines_of
from lb.http.messages import RequestHead
from lb.stream import resources
from lb.stream.resources import Resource

LOOKUP_S = 0.5
MOST_AT_ONCE = 64  # looks under way; for more the request goes anywhere
MOST_TARGETS = 512  # that one look asks

_NOT_FOUND = (404, 410)


class Look(Protocol):
    """Gets a path of a target."""

    def __call__(self, target: Target, path: str, timeout_s: float, lines: bytes) -> Awaitable[Fetched]:
        """Return the response to a GET with these header lines, without the body of one of 2xx.

        Raises OSError, or asyncio.TimeoutError.
        """
        ...


class Naming(Protocol):
    """A request that names a resource, or makes one."""

    @property
    def admission(self) -> Admission: ...
    @property
    def head(self) -> RequestHead: ...
    @property
    def resource(self) -> Resource | None: ...
    @property
    def zones(self) -> Zones:
        """Those of its residency."""
        ...


class _Verdict(Enum):
    HAS = "has"
    HAS_NOT = "has_not"
    SILENT = "silent"
    UNKNOWN = "unknown"


class _Search(NamedTuple):
    """What a look is for. Two requests with an equal one share it."""

    tenant: str
    resource: Resource
    zones: Zones
    lines: bytes


Done = Callable[[Found], None]


class HomeFinder:
    """Shared by all requests of one agent."""

    def __init__(self, table: TargetTable, look: Look, clock: Callable[[], float]) -> None:
        self._table = table
        self._look = look
        self._clock = clock
        self._homes = Homes()
        self._waiting: dict[_Search, list[Done]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def known(self, arrival: Naming) -> str | None:
        """Return the target that has the resource of the request, which may have left; None if that is not known."""
        resource = arrival.resource
        if resource is None:
            return None
        return self._homes.find(arrival.admission.tenant, resource.id, self._clock())

    def learn(self, arrival: Naming, target_id: str, resource_id: str) -> None:
        """The response to the request was of a resource with this id."""
        self._homes.learn(arrival.admission.tenant, resource_id, target_id, self._clock())

    def search(self, arrival: Naming, done: Done) -> bool:
        """Look at all targets, and call `done` later. Returns False if there are too many looks under way."""
        resource = arrival.resource
        assert resource is not None  # noqa: S101 (for the type checker)
        lines = lines_of(
            one for one in arrival.head.credentials if one[0] not in arrival.admission.carried_by
        )
        search = _Search(arrival.admission.tenant, resource, arrival.zones, lines)
        waiting = self._waiting.get(search)
        if waiting is not None:
            waiting.append(done)
            return True
        if len(self._waiting) >= MOST_AT_ONCE:
            return False
        self._waiting[search] = [done]
        task = asyncio.get_running_loop().create_task(self._search(search))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _search(self, search: _Search) -> None:
        found: Found = Absence.UNKNOWN
        try:
            found = await self._found(search)
            if isinstance(found, str):
                self._homes.learn(search.tenant, search.resource.id, found, self._clock())
        finally:
            for done in self._waiting.pop(search):
                done(found)

    async def _found(self, search: _Search) -> Found:
        targets = [
            target for target, _, _ in self._table.rows(self._clock()) if may_have(target.zones, search.zones)
        ]
        asked = [asyncio.ensure_future(self._verdict(one, search)) for one in targets[:MOST_TARGETS]]
        verdicts = set[_Verdict]()
        try:
            for one in asyncio.as_completed(asked):
                target_id, verdict = await one
                if verdict is _Verdict.HAS:
                    return target_id
                verdicts.add(verdict)
        finally:
            for task in asked:
                task.cancel()
        if _Verdict.SILENT in verdicts:
            return Absence.SILENT
        return Absence.UNKNOWN if _Verdict.UNKNOWN in verdicts else Absence.GONE

    async def _verdict(self, target: Target, search: _Search) -> tuple[str, _Verdict]:
        try:
            response = await self._look(target, search.resource.path, LOOKUP_S, search.lines)
        except (asyncio.TimeoutError, TimeoutError):  # noqa: UP041 (not the same in 3.10)
            return target.id, _Verdict.SILENT
        except OSError as error:
            return target.id, _Verdict.UNKNOWN if is_local(error) else _Verdict.HAS_NOT
        if 200 <= response.status < 300:
            return target.id, _Verdict.HAS
        if response.status in _NOT_FOUND and resources.is_api_error(response.body):
            return target.id, _Verdict.HAS_NOT
        return target.id, _Verdict.UNKNOWN
