"""`GET /v1/models` where the targets serve different models: then the load balancer responds, with the models of all."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from lb.core.models import ModelDirectory
from lb.http import error_responses
from lb.http.messages import RequestHead

_LIST = b"/v1/models"
_ONE = b"/v1/models/"


class Listed(NamedTuple):
    """A whole response, and its status."""

    status: int
    data: bytes


def response(head: RequestHead, models: ModelDirectory) -> Listed | None:
    """Returns the response; None if the request is for something else, or for a model of a target that lists none."""
    path = head.path
    if head.method not in (b"GET", b"HEAD") or not (path == _LIST or path.startswith(_ONE)):
        return None
    head_only = head.method == b"HEAD"
    if path == _LIST:
        return Listed(200, _json(models.merged(), head, head_only))
    name = unquote_to_bytes(path[len(_ONE) :]).decode("utf-8", "replace")
    entry = models.entry(name)
    if entry is not None:
        return Listed(200, _json(entry, head, head_only))
    if not models.missing(name):
        return None
    text = f"The model {name!r} does not exist."
    error = error_responses.raw_error(
        404, "model_not_found", text, request_id=head.request_id, head_only=head_only
    )
    return Listed(404, error)


def _json(body: bytes, head: RequestHead, head_only: bool) -> bytes:
    request_id = b"X-Request-Id: %b\r\n" % head.request_id if head.request_id else b""
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nServer: %b\r\n%b\r\n%b"
        % (
            len(body),
            error_responses.SERVER.encode(),
            request_id,
            b"" if head_only else body,
        )
    )
