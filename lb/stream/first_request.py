"""What the first request of a stream requests from its engine, so that the stream can be resumed. Pure.

Engines return token ids or running counts only where a request names them. A client that did not request them must not see
them: `Preparation.strip` is what to remove (`lb.stream.stream_merge.stripper`, and `lb/proxy/_fast_path.c`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson

from lb.config.options import Continue
from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT, COMPLETIONS
from lb.stream.resume_rules import NotResumable, Reason, refusal


class Strip(str, Enum):
    """What a response contains only because we requested it, and the client must not see."""

    NOTHING = "nothing"
    IDS = "ids"
    COUNTS = "counts"  # the usage of each chunk, but not the one at the end
    USAGE = "usage"  # all of it


@dataclass(frozen=True, slots=True)
class Preparation:
    """Fields to add to the body of the first request, and what to strip from the response then.

    `refused` is why the stream will not be resumed (it may still be restarted).
    """

    fields: Mapping[str, Any]
    strip: Strip = Strip.NOTHING
    refused: Reason | None = None


_WITH_IDS: Mapping[EngineKind, frozenset[bytes]] = {
    EngineKind.VLLM: frozenset({CHAT, COMPLETIONS}),
    EngineKind.SKYSERVE: frozenset({CHAT, COMPLETIONS}),
    EngineKind.SGLANG: frozenset({COMPLETIONS}),  # a streamed chat that requests them is refused
}
TAKES_FLAGS = frozenset({EngineKind.VLLM, EngineKind.SGLANG, EngineKind.SKYSERVE})
_COUNTS = TAKES_FLAGS  # the tokens of each chunk, if requested
ASK_IDS: Mapping[str, Any] = {"return_token_ids": True}
_COUNTING: Mapping[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
_NONE: Mapping[str, Any] = {}
_LONG_BYTES = 64 * 1024
_FLAT_VALUE = re.compile(rb'\s*:\s*(true|false|null|\{[\w\s",:]*\})')


def prepare(
    path: bytes, request: Mapping[str, Any], kind: EngineKind, mode: Continue = Continue.AUTO
) -> Preparation:
    """Return what to request from an engine of this kind: its token ids, or else their number."""
    refused = Reason.OFF if mode is Continue.OFF else refusal(path, request)
    if refused is not None or kind not in _COUNTS:
        return Preparation(_NONE, refused=refused)
    if reports_ids(path, kind):
        is_set = request.get("return_token_ids") is True
        return Preparation(_NONE) if is_set else Preparation(ASK_IDS, Strip.IDS)
    options = request.get("stream_options") or {}
    if not isinstance(options, Mapping) or (
        options.get("continuous_usage_stats") and options.get("include_usage")
    ):
        return Preparation(_NONE)
    counting = {"stream_options": {**options, **_COUNTING}}
    return Preparation(counting, Strip.COUNTS if options.get("include_usage") is True else Strip.USAGE)


def with_fields(body: bytes, request: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes:
    """Return the body with the fields of a Preparation; `request` is the parsed body.

    Raises NotResumable if the request cannot be written again.
    """
    if not fields:
        return body
    closing = body.rstrip()
    if not request or not closing.endswith(b"}"):
        return written({**request, **fields})
    if any(name in request for name in fields):
        replaced = _replaced(body, request, fields) if len(body) > _LONG_BYTES else None
        return written({**request, **fields}) if replaced is None else replaced
    added = b"," + orjson.dumps(fields)[1:]
    if len(closing) <= _LONG_BYTES:
        return closing[:-1] + added
    return b"".join((memoryview(closing)[:-1], added))  # copies it once


def _replaced(body: bytes, request: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes | None:
    """Return the body with other values of fields that it has; None if it is not certain where in the text they are.

    To write a long body again takes as long as to parse it. Text that quotes a field is not taken for it, as its quotes are
    escaped.
    """
    for name, value in fields.items():
        mark = b'"%b"' % name.encode()
        at = body.find(mark)
        if at < 0 or body.find(mark, at + 1) >= 0:
            return None
        found = _FLAT_VALUE.match(body, at + len(mark))
        if found is None or orjson.loads(found[1]) != request.get(name):
            return None
        view = memoryview(body)
        body = b"".join((view[: found.start(1)], orjson.dumps(value), view[found.end(1) :]))
    return body


def written(body: Mapping[str, Any]) -> bytes:
    """Return the JSON of a request. orjson parses 1,024 levels and writes 254: a client can send what it refuses to write."""
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise NotResumable(Reason.STRANGE) from error


def reports_ids(path: bytes, kind: EngineKind) -> bool:
    """Return whether an engine of this kind reports the ids of prompt and response if it is asked for them.

    They are worth it also where the text has to be given back: they show whether it was read into the same tokens.
    """
    return path in _WITH_IDS.get(kind, ())


def continues_by_ids(path: bytes, request: Mapping[str, Any], kind: EngineKind) -> bool:
    """Return whether an engine of this kind would continue the request by tokens if their ids were known."""
    if not reports_ids(path, kind):
        return False
    if path == COMPLETIONS:
        return True
    offers_tools = bool(request.get("tools")) and request.get("tool_choice") != "none"
    return not (offers_tools or request.get("functions")) and _is_text(request.get("messages"))


def _is_text(messages: Any) -> bool:
    """Return whether the messages hold nothing but text."""
    if not isinstance(messages, list):
        return False
    parts = [
        part
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    ]
    return all(isinstance(part, str) or (isinstance(part, dict) and "text" in part) for part in parts)
