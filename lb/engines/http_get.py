"""Small requests of the agent's own: health probes, polls of engines' loads, prompts to be cached. Bounded in size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lb.config.schema import Target
from lb.core.failures import is_local
from lb.engines.kinds import Fetched
from lb.http.body_framing import (
    BodyDecoder,
    ChunkedDecoder,
    CloseDelimitedDecoder,
    FramingError,
    LengthDecoder,
)
from lb.http.messages import END, HeadError, read_response
from lb.http.upstream import Pools, TargetConnection

MAX_BODY_BYTES = 1024 * 1024
_MAX_HEAD_BYTES = 64 * 1024
_MAX_HEADERS = 256


class HttpGetter:
    """Sends requests to targets over connections of its own, so that users' requests never wait behind a probe."""

    def __init__(self, pools: Pools, clock: Callable[[], float]) -> None:
        self._pools = pools
        self._clock = clock

    async def fetch(self, target: Target, path: str, timeout_s: float, *, fresh: bool = False) -> Fetched:
        """Raise OSError (also for a response that is not HTTP, or too long) or asyncio.TimeoutError."""
        return await asyncio.wait_for(self._fetch(target, path, timeout_s, fresh), timeout_s)

    async def look(self, target: Target, path: str, timeout_s: float, lines: bytes) -> Fetched:
        """Send these header lines along; of a success return the status alone. Raises as `fetch`."""

        async def looked() -> Fetched:
            connection = await self._pools.of(target).connect(timeout_s)
            return await self._request(connection, path, True, None, lines)

        return await asyncio.wait_for(looked(), timeout_s)

    async def post(
        self, target: Target, path: str, body: bytes, timeout_s: float, lines: bytes | None = None
    ) -> Fetched:
        """Send JSON, on a connection of its own; with header `lines` of a success return the status alone. Raises as `fetch`."""

        async def posted() -> Fetched:
            connection = await self._pools.of(target).connect(timeout_s)
            return await self._request(connection, path, True, body, lines)

        return await asyncio.wait_for(posted(), timeout_s)

    async def alive(self, target: Target, timeout_s: float) -> bool:
        """Probe a target: True for a response below 500 on its health path, or without a path for a connection.

        A connect that fails because this host lacks a resource does not count against the target.
        """
        try:
            if target.health_path is not None:
                response = await self.fetch(target, target.health_path, timeout_s, fresh=True)
                return response.status < 500
            connection = await self._pools.of(target).dial(timeout_s)
            connection.drop()
            return True
        except (OSError, asyncio.TimeoutError) as error:  # noqa: UP041 (not the same in 3.10)
            return is_local(error)

    def expire(self) -> None:
        """Close connections that have been idle for too long."""
        self._pools.expire(self._clock())

    def retain(self, urls: set[str]) -> None:
        self._pools.retain(urls)

    def set_authority(self, ca: str) -> None:
        self._pools.set_authority(ca)

    def close(self) -> None:
        self._pools.close()

    async def _fetch(self, target: Target, path: str, timeout_s: float, fresh: bool) -> Fetched:
        pool = self._pools.of(target)
        connection = None if fresh else pool.take()
        if connection is not None:
            try:
                return await self._request(connection, path, fresh)
            except OSError:
                pass  # it had gone stale
        return await self._request(await pool.connect(timeout_s), path, fresh)

    async def _request(
        self,
        connection: TargetConnection,
        path: str,
        fresh: bool,
        body: bytes | None = None,
        lines: bytes | None = None,
    ) -> Fetched:
        """With header `lines` of the caller the body of a success is not read."""
        call = _Fetch(asyncio.get_running_loop(), reads_success=lines is None)
        connection.sink = call
        pool = connection.pool
        ending = (b"Connection: close\r\n" if fresh else b"") + (lines or b"")
        method = b"GET" if body is None else b"POST"
        if body is not None:
            ending += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
        connection.transport.write(
            b"%b %b%b HTTP/1.1\r\nHost: %b\r\nUser-Agent: skyserve-lb\r\nAccept: */*\r\n%b\r\n%b"
            % (method, pool.base_path, path.encode(), pool.address, ending, body or b"")
        )
        done = False
        try:
            response = await call.response
            done = True
        finally:
            if done and call.reusable and not fresh:
                pool.give(connection, self._clock())
            else:
                connection.drop()
        return response


class _Fetch:
    """Has a connection until the response is whole."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reads_success: bool = True) -> None:
        self._reads_success = reads_success
        self.response: asyncio.Future[Fetched] = loop.create_future()
        self.reusable = False
        self._buffer = b""
        self._status = 0
        self._decoder: BodyDecoder | None = None
        self._keep_alive = True
        self._parts: list[bytes] = []
        self._size = 0

    def target_data(self, data: bytes) -> None:
        try:
            if self._decoder is None:
                self._take_head(self._buffer + data)
            else:
                self._take_body(data)
        except (HeadError, FramingError) as error:
            self._fail(str(error))

    def _take_head(self, data: bytes) -> None:
        while True:
            end = data.find(END)
            if end < 0:
                self._buffer = data
                if len(data) > _MAX_HEAD_BYTES:
                    self._fail("the head is too long")
                return
            head = read_response(data[: end + 4], _MAX_HEADERS)
            rest, self._buffer = data[end + 4 :], b""
            if head.status >= 200:
                break
            if head.status == 101:
                self._fail("it switches protocols")
                return
            data = rest
        self._status, self._keep_alive = head.status, head.keep_alive
        if head.status < 300 and not self._reads_success:
            self._finish()
            return
        if head.status in (204, 304):
            self._decoder = LengthDecoder(0)
        elif head.length is not None:
            self._decoder = LengthDecoder(head.length)
        else:
            self._decoder = ChunkedDecoder(self._parts) if head.chunked else CloseDelimitedDecoder()
        self._take_body(rest)

    def _take_body(self, data: bytes) -> None:
        decoder = self._decoder
        assert decoder is not None  # noqa: S101 (for the type checker)
        end = decoder.feed(data)
        if not isinstance(decoder, ChunkedDecoder):
            self._parts.append(data if end < 0 else data[:end])
        self._size += len(data)
        if self._size > MAX_BODY_BYTES:
            self._fail("the response is too long")
        elif end >= 0:
            self.reusable = self._keep_alive and end == len(data)
            self._finish()

    def target_lost(self, error: Exception | None) -> None:
        if error is None and isinstance(self._decoder, CloseDelimitedDecoder):
            self._finish()
        else:
            self._fail("the connection ended")

    def target_full(self) -> None: ...

    def target_drained(self) -> None: ...

    def crashed(self, error: Exception) -> None:
        self._fail(f"{type(error).__name__} while reading the response")

    def _finish(self) -> None:
        if not self.response.done():
            self.response.set_result(Fetched(self._status, b"".join(self._parts)))

    def _fail(self, why: str) -> None:
        if not self.response.done():
            self.response.set_exception(OSError(why))
