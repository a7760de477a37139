"""`GET /v1/stream`: server-sent events that say that something has changed.

An event has the count of changes as its id and no more than that: a reader gets what it shows from `/v1/services`, which is in
memory with an ETag. A reader whose token is revoked, in whichever controller, is disconnected within a second: what is known of
tokens is read with the count. So a reader that was away misses nothing (`Last-Event-ID` says what it has seen), one that is slow
skips counts instead of filling a queue, and a change costs less than a hundred bytes per reader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from skyserve_cli.controller.api.access import StillValid, still_valid

log = logging.getLogger(__name__)

POLL_S = 0.25
CHECK_EVERY_S = 15.0
HEARTBEAT_S = 15.0
MOST_READERS = 256
#: A reader whose socket takes nothing for so long is disconnected.
SLOW_S = 30.0


class ChangeStream:
    """One per daemon.

    `changes` returns the database's count, `tokens` what differs when a token was revoked. Both are called on a thread while there
    are readers.
    """

    def __init__(
        self,
        changes: Callable[[], int],
        tokens: Callable[[], object] = lambda: None,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self._changes = changes
        self._tokens = tokens
        self._token_state: object = None
        self._poll_s = poll_s
        self._readers = 0
        self._count: int | None = None
        self._changed = asyncio.Condition()
        self._polling: asyncio.Task[None] | None = None

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if self._readers >= MOST_READERS:
            return web.json_response({"error": "too many pages are open"}, status=503)
        seen = _number(request.headers.get("Last-Event-ID"))
        response = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        self._readers += 1
        try:
            await response.prepare(request)
            await self._follow(response, seen, still_valid())
        except (ConnectionError, TimeoutError):
            log.debug("a reader of changes has gone")
        finally:
            self._readers -= 1
        return response

    async def _follow(
        self, response: web.StreamResponse, seen: int | None, is_valid: StillValid | None
    ) -> None:
        """Until the reader goes, or may not read any more."""
        await asyncio.wait_for(response.write(b"retry: 1000\n\n"), SLOW_S)
        clock = asyncio.get_running_loop()
        tokens, check_at = object(), 0.0
        while True:
            count = await self._next(seen, tokens)
            if tokens != self._token_state or clock.time() >= check_at:
                tokens, check_at = self._token_state, clock.time() + CHECK_EVERY_S
                try:
                    if is_valid is not None and await is_valid() is None:
                        return
                except SQLAlchemyError:
                    check_at = clock.time() + self._poll_s
            if count is not None and count == seen:
                continue
            text = ": still here\n\n" if count is None else f'id: {count}\ndata: {{"changes": {count}}}\n\n'
            await asyncio.wait_for(response.write(text.encode()), SLOW_S)
            seen = seen if count is None else count

    async def _next(self, seen: int | None, tokens: object) -> int | None:
        """Return the count as soon as it, or what is known of tokens, is another one than that; None after HEARTBEAT_S."""
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())
        try:
            async with asyncio.timeout(HEARTBEAT_S), self._changed:
                await self._changed.wait_for(
                    lambda: self._count is not None and (self._count, self._token_state) != (seen, tokens)
                )
        except TimeoutError:
            return None
        return self._count

    async def _poll(self) -> None:
        """Until the last reader has gone. While the database does not respond nothing changes."""
        while self._readers:
            with suppress(SQLAlchemyError):
                count, tokens = await asyncio.to_thread(lambda: (self._changes(), self._tokens()))
                if (count, tokens) != (self._count, self._token_state):
                    async with self._changed:
                        self._count, self._token_state = count, tokens
                        self._changed.notify_all()
            await asyncio.sleep(self._poll_s)
        self._count = None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
