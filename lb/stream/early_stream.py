"""What a client reads of a streamed response before its target has sent anything: a head, comments, and failures as events. Pure.

Proxies on the way cut connections on which nothing comes for a minute. A head commits to a stream of events with status 200, so
whatever fails afterwards is an event in the form of the API. Comments are no events: clients skip them (WHATWG, Server-sent events).
"""

from __future__ import annotations

import orjson

from lb.http.messages import ResponseHead, read_response
from lb.stream.dialects import DIALECTS

KEEP_ALIVE = b": keep-alive\n\n"

_MOST_BYTES = 2000  # of an error text that is passed on


def early_head() -> ResponseHead:
    """Return the head that is sent ahead of a target's. Proxies are to pass on what comes as it comes."""
    lines = (
        b"HTTP/1.1 200 OK",
        b"Content-Type: text/event-stream; charset=utf-8",
        b"Cache-Control: no-cache",
        b"X-Accel-Buffering: no",
    )
    return read_response(b"\r\n".join((*lines, b"", b"")), len(lines))


def failure_of(path: bytes, status: int, body: bytes) -> bytes:
    """Return the event that stands for an error response of a target."""
    code, message = f"http_status_{status}", body[:_MOST_BYTES].decode("utf-8", "replace")
    try:
        error = orjson.loads(body)
    except orjson.JSONDecodeError:
        error = None
    if isinstance(error, dict):
        inner = error.get("error")
        named = inner if isinstance(inner, dict) else error
        text = inner if isinstance(inner, str) else named.get("message") or named.get("detail")
        message = text[:_MOST_BYTES] if isinstance(text, str) else message
        code = str(named.get("code") or code)
    return DIALECTS[path].error_event(code, message, None)


def whole(body: bytes) -> bytes:
    """Return the events of a response that is here from its first byte to its last, but is no stream of events."""
    return b"".join(b"data: %b\n" % line for line in body.splitlines()) + b"\n"
