"""Taking a request in: its whole body, within bounds, so that it can be sent more than once."""

from __future__ import annotations

import asyncio

from aiohttp import web
from yarl import URL

from lb import answers
from lb.wire import Limits


class RefusedError(Exception):
    """The request is answered by us, before any attempt; `response` says how."""

    def __init__(self, response: web.Response) -> None:
        super().__init__(response.status)
        self.response = response


def origin_form(request: web.BaseRequest) -> str | None:
    """The path and query as they were sent; None for targets that are no path (`OPTIONS *`, `CONNECT`)."""
    sent = request.raw_path
    if sent.startswith(("http://", "https://")):
        sent = URL(sent, encoded=True).raw_path_qs
    return sent if sent.startswith("/") else None


async def read_body(request: web.BaseRequest, limits: Limits, request_id: str) -> bytes:
    """The body as it was sent, content encoding and all. Raises RefusedError (400, 408, 413)."""
    if not request.body_exists:
        return b""
    if (request.content_length or 0) > limits.max_body_bytes:
        raise _too_large(limits, request_id)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # aiohttp takes written bytes for a begun answer
    parts: list[bytes] = []
    size = 0
    while not request.content.at_eof():
        try:
            part = await asyncio.wait_for(request.content.readany(), limits.idle_timeout_s)
        except asyncio.TimeoutError:  # noqa: UP041 (not the same in 3.10)
            raise _refused(408, "body_timeout", "The body did not arrive in time.", request_id) from None
        except web.RequestPayloadError:
            raise _refused(400, "malformed_body", "The body is not well-formed.", request_id) from None
        size += len(part)
        if size > limits.max_body_bytes:
            raise _too_large(limits, request_id)
        parts.append(part)
    return b"".join(parts)


def _too_large(limits: Limits, request_id: str) -> RefusedError:
    return _refused(413, "body_too_large", f"The body exceeds {limits.max_body_bytes} bytes.", request_id)


def _refused(status: int, code: str, message: str, request_id: str) -> RefusedError:
    return RefusedError(answers.error(status, code, message, request_id=request_id))
