"""What the load balancer itself answers, in the shape OpenAI's clients parse:
`{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json

from aiohttp import web

SERVER = "skyserve"


def error(
    status: int, code: str, message: str, *, request_id: str = "", retry_after_s: int | None = None
) -> web.Response:
    """`retry_after_s` becomes a `Retry-After` header: the client may try again then."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    headers = {"Server": SERVER}
    if request_id:
        headers["X-Request-Id"] = request_id
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return web.Response(
        status=status, headers=headers, body=json.dumps(body).encode(), content_type="application/json"
    )
