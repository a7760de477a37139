"""What the load balancer itself answers, in the shape OpenAI's clients parse:
`{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from http import HTTPStatus

import orjson
from aiohttp import web

SERVER = "skyserve"


def raw_error(
    status: int,
    code: str,
    message: str,
    *,
    request_id: bytes = b"",
    retry_after_s: int | None = None,
    close: bool = False,
    head_only: bool = False,
) -> bytes:
    """A whole answer on the wire. `retry_after_s` becomes a `Retry-After` header: the client may try again then."""
    body = error_body(status, code, message)
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"Server: {SERVER}",
    ]
    if request_id:
        lines.append(f"X-Request-Id: {request_id.decode('latin-1')}")
    if retry_after_s is not None:
        lines.append(f"Retry-After: {retry_after_s}")
    if status == HTTPStatus.UNAUTHORIZED:
        lines.append("WWW-Authenticate: Bearer")
    if close:
        lines.append("Connection: close")
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
    return head if head_only else head + body


def error(status: int, code: str, message: str, *, request_id: str = "") -> web.Response:
    """The same for the admin port."""
    headers = {"Server": SERVER}
    if request_id:
        headers["X-Request-Id"] = request_id
    body = error_body(status, code, message)
    return web.Response(status=status, headers=headers, body=body, content_type="application/json")


def error_body(status: int, code: str, message: str) -> bytes:
    """The JSON alone."""
    return orjson.dumps({"error": {"message": message, "type": kind(status), "param": None, "code": code}})


def kind(status: int) -> str:
    """OpenAI's name for what a status means."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    if status == HTTPStatus.UNAUTHORIZED:
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "server_error"
