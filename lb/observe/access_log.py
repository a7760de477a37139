"""The record of a request that is over, and its line in the access log.

Records are made once per request, and only if a log or a trace is enabled. No prompt, no response, no header value but the
request's id and its place in a trace, no query: those may carry secrets.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson


class RequestRecord(NamedTuple):
    """One request, over. Times are in seconds since its arrival, or lengths.

    `path` is without query. `status` is what the client was sent, 0 if it left before it was sent any. `target_id`
    is the last target it was on. `queued_s` is how long it waited for targets in all, `ttft_s` when the first byte
    of the response's body was sent, None if none was. `continued` counts the times its stream went on on another
    target, `inexact` is how the last of these may differ from an undisturbed stream ("seed", "retokenized"), empty if none does.
    Tokens are None if no engine reported them. `reserved` are the tokens that were taken from those of the key when the request
    was let in, `charged` what it cost in the end, and `charge` says where that comes from ("reported", "counted", "estimated",
    "refused", "not_sent", "no_tokens"), empty without a key. `error` names in a word what went wrong, empty if nothing did
    ("client_gone", "no_target_ready", "cut" ...).

    `traceparent` is the client's (W3C Trace Context), `span` what `lb.observe.tracing.Tracing.begin` made of it; empty if
    there is none.
    """

    id: str
    method: str
    path: str
    status: int
    duration_s: float
    tenant: str = ""
    model: str = ""
    policy: str = ""
    target_id: str = ""
    attempts: int = 0
    continued: int = 0
    inexact: str = ""
    queued_s: float = 0.0
    ttft_s: float | None = None
    bytes_out: int = 0
    tokens_in: int | None = None
    tokens_out: int | None = None
    reserved: int = 0
    charged: int = 0
    charge: str = ""
    traceparent: str = ""
    span: str = ""
    error: str = ""


class AccessLog:
    """One line of JSON per request, with the time of its end in seconds since 1970."""

    def __init__(
        self,
        wall: Callable[[], float],
        write: Callable[[bytes], object],
        later: Callable[[Callable[[], None]], object],
    ) -> None:
        """`later` calls a function soon: the lines until then are written in one piece."""
        self._wall = wall
        self._write = write
        self._later = later
        self._lines: list[bytes] = []

    def add(self, facts: RequestRecord) -> None:
        """Write its line soon."""
        if not self._lines:
            self._later(self._flush)
        self._lines.append(self.line(facts))

    def _flush(self) -> None:
        lines = b"".join(self._lines)
        self._lines.clear()
        self._write(lines)

    def line(self, facts: RequestRecord) -> bytes:
        """Return the line with its end. All that is not ASCII is escaped, so one request is one line."""
        return _line(
            {
                "time": round(self._wall(), 3),
                "id": facts.id,
                "method": facts.method,
                "path": without_query(facts.path),
                "status": facts.status,
                "error": facts.error or None,
                "tenant": facts.tenant or None,
                "model": facts.model or None,
                "target": facts.target_id or None,
                "attempts": facts.attempts,
                "continued": facts.continued,
                "inexact": facts.inexact or None,
                "ms": _ms(facts.duration_s),
                "queued_ms": _ms(facts.queued_s),
                "ttft_ms": None if facts.ttft_s is None else _ms(facts.ttft_s),
                "bytes": facts.bytes_out,
                "tokens_in": facts.tokens_in,
                "tokens_out": facts.tokens_out,
                "reserved": facts.reserved or None,
                "charged": facts.charged or None,
                "charge": facts.charge or None,
            }
        )


def _line(facts: dict[str, Any]) -> bytes:
    try:
        line = orjson.dumps(facts, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # half of a surrogate pair
        return _escaped(facts)
    return line if line.isascii() else _escaped(facts)


def _escaped(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts).encode() + b"\n"


def without_query(path: str) -> str:
    """Return the path alone: callers promise it, but a query may hold a key, and logs are kept long."""
    return path.partition("?")[0]


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 2)


def both(
    one: Callable[[RequestRecord], None] | None, other: Callable[[RequestRecord], None] | None
) -> Callable[[RequestRecord], None] | None:
    """Return a function that passes a record to both; the one there is, if the other is None."""
    if one is None or other is None:
        return one or other
    first, second = one, other

    def pass_on(record: RequestRecord) -> None:
        first(record)
        second(record)

    return pass_on
