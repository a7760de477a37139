"""`GET /v1/services` as bytes: rendered once for all concurrent requests.

A request with `Cache-Control: max-stale` gets the last ones while the database responds slowly, with their age in `Age`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from skyserve_cli.controller.api.access import calling, visible
from skyserve_cli.controller.reconcile.clock import Clock

PIECE_BYTES = 64 * 1024
OLDEST_S = 1.0  # loads, ages and costs change without a change in the database
SLOW_S = 1.0  # a rendering that takes longer is not waited for by who takes an old one
SPARE_EVERY_S = 60.0  # one is made that no command has requested, for the time when the database is slow


class Rendered(NamedTuple):
    """One snapshot. `changes` is the database's count of changes that it was rendered after, `at` when."""

    body: bytes
    etag: str
    changes: int
    at: float


class Snapshots:
    """The last one of each kind, and at most one rendering of each under way. `changes` counts those of the database."""

    def __init__(self, changes: Callable[[], int], clock: Clock) -> None:
        self._changes = changes
        self._clock = clock
        self._last: dict[Hashable, Rendered] = {}
        self._locks: dict[Hashable, asyncio.Lock] = {}
        self._under_way: dict[Hashable, tuple[asyncio.Task[Rendered], float]] = {}  # the oldest of each kind

    async def get(self, kind: Hashable, content: Callable[[], Any], *, may_be_old: bool = False) -> Rendered:
        """Return the snapshot, at most OLDEST_S old and never older than the last change; `content` is called on a thread.

        `may_be_old`: the last one, however old, if a new one takes more than SLOW_S. While one does, no other one starts.
        """
        if not may_be_old or kind not in self._last:
            return await self._fresh(kind, content)
        oldest, began = self._under_way.get(kind, (None, 0.0))
        is_under_way = oldest is not None and not oldest.done()
        if is_under_way and self._clock.now() - began >= SLOW_S:
            return self._last[kind]
        task = asyncio.create_task(self._fresh(kind, content))
        task.add_done_callback(
            lambda one: one.cancelled() or one.exception()
        )  # it may be that none waits for it
        if not is_under_way:
            self._under_way[kind] = task, self._clock.now()
        await asyncio.wait({task}, timeout=SLOW_S)
        return task.result() if task.done() else self._last[kind]

    async def keep_spare(self, kind: Hashable, content: Callable[[], Any]) -> None:
        """Make one every SPARE_EVERY_S, if no command has, for as long as this runs."""
        while True:
            last = self._last.get(kind)
            if last is None or self.age_s(last) >= SPARE_EVERY_S:
                with suppress(Exception):  # the next one is another chance
                    await self._fresh(kind, content)
            await asyncio.sleep(SPARE_EVERY_S)

    def age_s(self, found: Rendered) -> float:
        return self._clock.now() - found.at

    async def _fresh(self, kind: Hashable, content: Callable[[], Any]) -> Rendered:
        lock = self._locks.setdefault(kind, asyncio.Lock())
        asked_after = await asyncio.to_thread(self._changes) if lock.locked() else None
        async with lock:
            try:
                # One turn of a thread, where it can be: each waits for the loop, which probes thousands of replicas.
                found = await asyncio.to_thread(self._follow, self._last.get(kind), asked_after, content)
            except BaseException:
                if kind not in self._last:  # what is not there takes no place
                    self._locks.pop(kind, None)
                raise
            self._last[kind] = found
            return found

    def _follow(self, last: Rendered | None, asked_after: int | None, content: Callable[[], Any]) -> Rendered:
        """Return the last one if it may be shown after so many changes (None: all that there are now), or a new one."""
        changes, at = self._changes(), self._clock.now()
        due = changes if asked_after is None else asked_after
        if last is not None and last.changes >= due and 0 <= at - last.at < OLDEST_S:
            return last
        return rendered(orjson.dumps(content()), changes, at)


def rendered(body: bytes, changes: int, at: float) -> Rendered:
    """Return the body with its ETag."""
    return Rendered(body, f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"', changes, at)


def may_be_old(request: web.Request) -> bool:
    return "max-stale" in request.headers.get("Cache-Control", "")


async def snapshot_response(request: web.Request, found: Rendered, age_s: float = 0.0) -> web.StreamResponse:
    if calling().services is not None and request.match_info.get("name") is None:
        found = await asyncio.to_thread(lambda: rendered(visible(found.body), found.changes, found.at))
    headers = {"ETag": found.etag, "Cache-Control": "no-cache", "Age": str(int(age_s))}
    if found.etag in (tag.strip() for tag in request.headers.get("If-None-Match", "").split(",")):
        return web.Response(status=304, headers=headers)
    if len(found.body) <= PIECE_BYTES:
        return web.Response(body=found.body, content_type="application/json", headers=headers)
    # Written at once, asyncio would move the rest of it after each piece that the socket takes.
    response = web.StreamResponse(headers=headers)
    response.content_type, response.content_length = "application/json", len(found.body)
    await response.prepare(request)
    for start in range(0, len(found.body), PIECE_BYTES):
        await response.write(found.body[start : start + PIECE_BYTES])
    await response.write_eof()
    return response
