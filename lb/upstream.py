"""One attempt on one target: send the request, come back with the first byte of the answer or with why not.

An answer *begins* with the first byte of its body, not with its head: engines send the head at once and think
afterwards, and as long as nothing has been passed on, the request can go to another target. An answer whose
length is known and small is read whole for the same reason, so a unary answer is never cut. The head of an
answer with an empty body is its first byte.
"""

from __future__ import annotations

import asyncio
import io
from enum import Enum
from types import SimpleNamespace
from typing import Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from lb.headers import end_to_end, without_handshake
from lb.wire import Target

WHOLE_UP_TO_BYTES = 256 * 1024
RETRY_STATUSES = frozenset({502, 503, 504})
MAX_LINE_BYTES = 16 * 1024
# Shorter than the 5 s after which common servers (uvicorn) drop an idle connection, so that a pooled connection
# is seldom closed under a request.
POOL_KEEPALIVE_S = 4.0
_WARN_FREE_BYTES = 512 * 1024  # aiohttp wants larger bodies as files


class Failure(str, Enum):
    """How an attempt failed, by what follows from it."""

    UNREACHABLE = "unreachable"  # no connection: the request has run nowhere
    STALE = "stale"  # a reused connection ended before the first byte: the target may be well
    DIED = "died"  # a connection of our own ended before the answer had begun (or, if small, ended)
    IDLE = "idle"  # no byte for too long in the midst of an answer
    MALFORMED = "malformed"  # this request cannot be put on the wire


class UpstreamError(Exception):
    """An attempt failed before, or a stream after, its first byte."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class Answer:
    """A begun answer. `first` has been read already; if `whole`, it is the entire body."""

    __slots__ = ("_response", "first", "headers", "reason", "status", "whole")

    def __init__(self, response: aiohttp.ClientResponse, first: bytes, whole: bool) -> None:
        self._response = response
        self.status = response.status
        self.reason = response.reason or ""
        self.headers = end_to_end(response.headers)
        self.first = first
        self.whole = whole

    async def next_chunk(self) -> bytes:
        """The bytes that came since the last call; empty at the end. Raises UpstreamError."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(Failure.DIED, _sentence(error)) from error

    def interrupt(self, error: UpstreamError) -> None:
        """Make the pending `next_chunk` raise `error`."""
        self._response.content.set_exception(error)

    def close(self) -> None:
        """Close the connection unless the answer has been read to its end (then it is back in the pool)."""
        self._response.close()


class Upstream:
    """The outgoing side of the proxy: two unbounded connection pools, one of which never reuses.

    No cap on connections: a queue hidden in a pool would be invisible to the policies. Redirects, cookies,
    compression and proxies from the environment are the client's and the target's business, not ours.
    """

    def __init__(self) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        self._pooled = _session(aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_KEEPALIVE_S), trace)
        self._fresh = _session(aiohttp.TCPConnector(limit=0, force_close=True), trace)

    async def close(self) -> None:
        await self._pooled.close()
        await self._fresh.close()

    async def open(
        self,
        target: Target,
        method: str,
        raw_path: str,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        connect_timeout_s: float,
        fresh: bool = False,
    ) -> Answer:
        """Begin an answer. Waits as long as it takes: the caller has the clock. Raises UpstreamError."""
        session = self._fresh if fresh else self._pooled
        mark = SimpleNamespace(reused=False)
        try:
            response = await session.request(
                method,
                _url(target, raw_path),
                headers=_for_target(target, headers),
                data=(body if len(body) < _WARN_FREE_BYTES else io.BytesIO(body)) or None,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
                trace_request_ctx=mark,
            )
            try:
                return await _begin(response, method)
            except BaseException:
                response.close()
                raise
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamError(Failure.UNREACHABLE, _sentence(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            failure = Failure.STALE if mark.reused else Failure.DIED
            raise UpstreamError(failure, _sentence(error)) from error
        except ValueError as error:
            raise UpstreamError(Failure.MALFORMED, "the request has a header that cannot be sent") from error

    async def open_websocket(
        self, target: Target, raw_path: str, headers: CIMultiDict[str], *, max_bytes: int
    ) -> aiohttp.ClientWebSocketResponse:
        """Shake hands with the target. Raises UpstreamError; a refusal in HTTP is WSServerHandshakeError."""
        protocols = [p.strip() for p in headers.get("Sec-WebSocket-Protocol", "").split(",") if p.strip()]
        try:
            return await self._fresh.ws_connect(
                _url(target, raw_path),
                headers=_for_target(target, without_handshake(headers)),
                protocols=protocols,
                autoping=False,
                autoclose=False,
                max_msg_size=max_bytes,
            )
        except aiohttp.WSServerHandshakeError:
            raise
        except aiohttp.ClientConnectorError as error:
            raise UpstreamError(Failure.UNREACHABLE, _sentence(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(Failure.DIED, _sentence(error)) from error

    async def alive(self, target: Target, timeout_s: float) -> bool:
        """Whether the target gives a sign of life: an answer below 500 on its health path, else a connection."""
        try:
            return await asyncio.wait_for(self._sign_of_life(target), timeout_s)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError):  # noqa: UP041 (not the same in 3.10)
            return False

    async def _sign_of_life(self, target: Target) -> bool:
        url = _url(target, target.health_path or "/")
        if target.health_path is None:
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.close()
            return True
        async with self._fresh.get(url, allow_redirects=False) as response:
            return response.status < 500


def close_websocket(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Drop a WebSocket on which nobody has begun to talk, without the courtesy of a closing handshake."""
    socket._response.close()


async def _begin(response: aiohttp.ClientResponse, method: str) -> Answer:
    content = response.content
    if not content.is_eof():
        _end_with_connection(response)
    length = response.content_length
    small = length is not None and length <= WHOLE_UP_TO_BYTES
    refusal = response.status in RETRY_STATUSES  # wanted whole: it is kept while another target is tried
    first = await content.readany() if method != "HEAD" else b""
    if first and (small or refusal):
        parts = [first]
        size = len(first)
        while size <= WHOLE_UP_TO_BYTES:
            part = await content.readany()
            if not part:
                break
            parts.append(part)
            size += len(part)
        first = b"".join(parts)
    return Answer(response, first, whole=method == "HEAD" or not first or content.at_eof())


def _end_with_connection(response: aiohttp.ClientResponse) -> None:
    """aiohttp hangs up on a body with a malformed chunk, but tells only who waits for a head: without this, the
    reader of the body would wait for the idle timeout."""
    content = response.content
    protocol = response.connection.protocol if response.connection is not None else None
    closed = protocol.closed if protocol is not None else None

    def ended(_: object) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the body is malformed"))

    def forget() -> None:  # the connection outlives the answer
        if closed is not None:
            closed.remove_done_callback(ended)

    if closed is None:
        ended(closed)
    else:
        closed.add_done_callback(ended)
        content.on_eof(forget)


def _session(connector: aiohttp.TCPConnector, trace: aiohttp.TraceConfig) -> aiohttp.ClientSession:
    session = aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        trust_env=False,
        trace_configs=[trace],
        max_line_size=MAX_LINE_BYTES,
        max_field_size=MAX_LINE_BYTES,
    )
    # aiohttp silently sends GET and its like a second time to the same host; where a retry goes is our decision.
    session._retry_connection = False
    return session


async def _note_reuse(_session: aiohttp.ClientSession, context: Any, _params: Any) -> None:
    mark = context.trace_request_ctx
    if mark is not None:
        mark.reused = True


def _url(target: Target, raw_path: str) -> URL:
    return URL(target.url.rstrip("/") + raw_path, encoded=True)


def _for_target(target: Target, headers: CIMultiDict[str]) -> CIMultiDict[str]:
    if not target.url.startswith("https:"):
        return headers
    own = headers.copy()
    own.popall("Host", None)
    return own


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
