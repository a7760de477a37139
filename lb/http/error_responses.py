"""Responses of the load balancer itself.

Errors in the shape OpenAI's clients parse, `{"error": {"message", "type", "param", "code"}}`, or, of the Messages API, Anthropic's; and
short texts.
"""

from __future__ import annotations

from http import HTTPStatus

import orjson

from lb.http.api_paths import MESSAGES

SERVER = "skyserve"
# Clients of OpenAI and Anthropic wait for `Retry-After`: older ones if it is at most so many seconds, and otherwise try again within
# seconds; newer ones however long it is, in silence. Beyond it this header makes them report the error.
MOST_WAITED_S = 60
_FORBIDS_RETRY = b"X-Should-Retry: false\r\n"
#: The code, and the type, of a budget that is used up, for which OpenAI's clients need not try again.
USED_UP = "insufficient_quota"
_MESSAGE_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def raw_error(
    status: int,
    code: str,
    message: str,
    *,
    request_id: bytes = b"",
    retry_after_s: int | None = None,
    close: bool = False,
    head_only: bool = False,
    more_lines: bytes = b"",
    path: bytes = b"",
) -> bytes:
    """Return a whole response on the wire, in the form of the API at `path`.

    `retry_after_s` becomes a `Retry-After` header: the client may try again then. `more_lines` are header lines, each with
    its CRLF.
    """
    body = message_error_body(status, message) if path == MESSAGES else error_body(status, code, message)
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
        if retry_after_s > MOST_WAITED_S:
            more_lines += _FORBIDS_RETRY
    if status == HTTPStatus.UNAUTHORIZED:
        lines.append("WWW-Authenticate: Bearer")
    if close:
        lines.append("Connection: close")
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n" + more_lines + b"\r\n"
    return head if head_only else head + body


def raw_text(status: int, text: str, *, head_only: bool = False, more_lines: bytes = b"") -> bytes:
    """Return a whole response on the wire with a short text; without one there is no body at all.

    For `more_lines` see `raw_error`.
    """
    body = text.encode()
    lines = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nServer: {SERVER}\r\n"
    if body:
        lines += f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        lines += "Cache-Control: no-store\r\n"
    head = lines.encode("latin-1") + more_lines + b"\r\n"
    return head if head_only else head + body


def raw_json(value: object, more_lines: bytes = b"") -> bytes:
    """Return a whole response on the wire. For `more_lines` see `raw_error`."""
    body = orjson.dumps(value)
    lines = f"HTTP/1.1 200 OK\r\nServer: {SERVER}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return lines.encode() + more_lines + b"\r\n" + body


def closing(response: bytes) -> bytes:
    """Return the same response with the announcement that the connection closes after it."""
    return response.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)


def error_body(status: int, code: str, message: str) -> bytes:
    """Return the JSON alone."""
    what = USED_UP if code == USED_UP else kind(status)
    return orjson.dumps({"error": {"message": message, "type": what, "param": None, "code": code}})


def message_error_body(status: int, message: str) -> bytes:
    """Return the JSON alone, as Anthropic's clients parse it."""
    error = {"type": _MESSAGE_ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")}
    return orjson.dumps({"type": "error", "error": {**error, "message": message}})


def kind(status: int) -> str:
    """OpenAI's name for what a status means."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    if status == HTTPStatus.UNAUTHORIZED:
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "server_error"
