"""From a begun answer to the client, with back-pressure, until either side ends it.

A write waits until the client has room, so a slow client slows its engine's connection and not the agent. If
the target breaks off in the midst of an answer, the client's connection is closed without the end mark of the
body: what was sent stays sent, and the client sees an error instead of a short success.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from aiohttp import web
from aiohttp.http import HttpVersion11
from multidict import CIMultiDict

from lb import answers
from lb.upstream import Answer, Failure, UpstreamError


class Sent(NamedTuple):
    """How the relay of a stream ended: whole, broken off by the target, or left by the client."""

    response: web.StreamResponse
    broken: UpstreamError | None = None
    client_gone: bool = False


def send_whole(answer: Answer, request_id: str) -> web.Response:
    """The answer is in memory: one response with its length."""
    headers = _response_headers(answer, request_id)
    if answer.first:
        headers.popall("Content-Length", None)
    return web.Response(
        status=answer.status, reason=answer.reason, headers=headers, body=answer.first or None
    )


async def send_stream(
    request: web.BaseRequest,
    answer: Answer,
    request_id: str,
    *,
    idle_timeout_s: float,
    heard: Callable[[], None],
) -> Sent:
    """Pass chunk after chunk; `heard` is called with each that comes from the target. If the target breaks
    off, the client's connection has been closed when this returns."""
    response = web.StreamResponse(
        status=answer.status, reason=answer.reason, headers=_response_headers(answer, request_id)
    )
    watch = _IdleWatch(request, answer, idle_timeout_s)
    try:
        await response.prepare(request)
        chunk = answer.first
        while chunk:
            watch.wait_for_client()
            await response.write(chunk)
            watch.wait_for_target()
            chunk = await answer.next_chunk()
            heard()
        watch.wait_for_client()
        await response.write_eof()
        return Sent(response)
    except UpstreamError as error:
        _break_off(request)
        return Sent(response, broken=error)
    except ConnectionError:
        return Sent(response, client_gone=True)
    finally:
        watch.stop()
        answer.close()


class _IdleWatch:
    """One timer per stream, not one per chunk: it looks at when the present wait began, and goes on waiting."""

    def __init__(self, request: web.BaseRequest, answer: Answer, idle_timeout_s: float) -> None:
        self._request = request
        self._answer = answer
        self._idle_timeout_s = idle_timeout_s
        self._loop = asyncio.get_running_loop()
        self._on_target = False
        self._since = self._loop.time()
        self._timer = self._loop.call_later(idle_timeout_s, self._look)

    def wait_for_target(self) -> None:
        self._on_target, self._since = True, self._loop.time()

    def wait_for_client(self) -> None:
        self._on_target, self._since = False, self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        ends_at = self._since + self._idle_timeout_s
        if self._loop.time() < ends_at:
            self._timer = self._loop.call_at(ends_at, self._look)
        elif self._on_target:
            self._answer.interrupt(UpstreamError(Failure.IDLE, "no byte within the idle timeout"))
        elif self._request.transport is not None:
            self._request.transport.abort()  # the client has stopped reading


def _break_off(request: web.BaseRequest) -> None:
    transport = request.transport
    if transport is None:
        return
    if request.version >= HttpVersion11:
        transport.close()  # flushes what was written; the missing end mark is the error
    else:
        transport.abort()  # HTTP/1.0 ends a body by closing: only a reset tells failure from success


def _response_headers(answer: Answer, request_id: str) -> CIMultiDict[str]:
    headers = answer.headers
    headers.setdefault("X-Request-Id", request_id)
    headers.setdefault("Server", answers.SERVER)
    return headers
