"""Taking a request in: its whole body, within bounds, so that it can be sent more than once."""

from __future__ import annotations

import asyncio
import base64

from aiohttp import web
from yarl import URL

from lb import answers
from lb.headers import wants_websocket
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


def begins_websocket(request: web.BaseRequest, request_id: str) -> bool:
    """Whether the request opens a WebSocket (RFC 6455 §4.1). Raises RefusedError (400) if it wants to, but no hand
    can be shaken: a target would be bothered in vain."""
    headers = request.headers
    if request.method != "GET" or not wants_websocket(headers):
        return False
    try:
        key = base64.b64decode(headers.get("Sec-WebSocket-Key", ""), validate=True)
    except ValueError:
        key = b""
    if len(key) != 16 or headers.get("Sec-WebSocket-Version") != "13":
        text = "A WebSocket needs Sec-WebSocket-Version: 13 and a Sec-WebSocket-Key of 16 bytes in base64."
        raise _refused(400, "malformed_handshake", text, request_id)
    return True


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
        except (web.RequestPayloadError, ConnectionError):  # a connection that ends here: the client has left
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
