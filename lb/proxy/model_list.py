"""`GET /v1/models` where the targets serve different models: then the load balancer responds, with the models of all."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

from lb.core.models import ModelDirectory
from lb.http import error_responses
from lb.http.messages import RequestHead

_LIST = b"/v1/models"
_ONE = b"/v1/models/"


def response(head: RequestHead, models: ModelDirectory, more_lines: bytes) -> bytes | None:
    """Return a whole response; None if a target has to respond.

    That is so if the request is for something else, or for a model that a target might serve although none lists it. `more_lines`
    are header lines, each with its CRLF.
    """
    path = head.path
    if head.method not in (b"GET", b"HEAD") or not (path == _LIST or path.startswith(_ONE)):
        return None
    if path == _LIST:
        return _json(models.merged(), head, more_lines)
    name = unquote_to_bytes(path[len(_ONE) :]).decode("utf-8", "replace")
    entry = models.entry(name)
    if entry is not None:
        return _json(entry, head, more_lines)
    if not models.missing(name):
        return None
    return error_responses.raw_error(
        404,
        "model_not_found",
        f"The model {name!r} does not exist.",
        request_id=head.request_id,
        head_only=head.method == b"HEAD",
        more_lines=more_lines,
    )


def _json(body: bytes, head: RequestHead, more_lines: bytes) -> bytes:
    request_id = b"X-Request-Id: %b\r\n" % head.request_id if head.request_id else b""
    lines = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nServer: %b\r\n%b%b\r\n"
        % (
            len(body),
            error_responses.SERVER.encode(),
            request_id,
            more_lines,
        )
    )
    return lines if head.method == b"HEAD" else lines + body
