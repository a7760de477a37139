"""Resources that stay on the replica that made them: which one a request names, and which ones a response brings. Pure.

Of the APIs of OpenAI these are stored responses, conversations, batches, files, and the sessions and calls of the realtime
API. An id is read where it stands in the path (`GET /v1/responses/resp_1`) or in one of a few fields of the body
(`previous_response_id`). Ids are data of clients: what is longer than MAX_ID_BYTES, or has characters that no API uses, is no
id, and routed as any request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from lb.http.api_paths import RESPONSES

MAX_ID_BYTES = 200
BATCHES = b"/v1/batches"
SEEN_BYTES = 64 * 1024  # of a stream are searched for the id of its response
_PARSED_BYTES = 1024 * 1024  # of a response, at most, whose id is not its first field

_NOUNS = {
    "responses": "Response",
    "conversations": "Conversation",
    "batches": "Batch",
    "files": "File",
    "realtime/sessions": "Session",
    "realtime/calls": "Call",
}
_ID = rf"[A-Za-z0-9_][A-Za-z0-9_.:-]{{0,{MAX_ID_BYTES - 1}}}"  # never `..`, as it becomes part of a path
_IS_ID = re.compile(_ID)
PREFIXES = (
    b"/v1/responses",
    b"/v1/conversations",
    b"/v1/batches",
    b"/v1/files",
    b"/v1/realtime/",
)  # of all their paths
_KINDS = "|".join(_NOUNS)
_RESOURCE = re.compile(rf"/v1/({_KINDS})/({_ID})(?:/.*)?".encode())
_MAKERS = re.compile(rf"/v1/(?:{_KINDS})(?:/{_ID}(?:/cancel)?)?".encode())
_NO_IDS = frozenset({b"render", b"compact", b"input_tokens"})  # operations of /v1/responses
_NAMES_IN_BODY = (b'"previous_response_id"', b'"conversation"')
_PREVIOUS = re.compile(rb'"previous_response_id"\s*:\s*"(%b)"' % _ID.encode())
_IN_STREAM = re.compile(rb'"response"\s*:\s*\{\s*"id"\s*:\s*"(%b)"' % _ID.encode())
_FIRST_ID = re.compile(rb'\s*\{\s*"id"\s*:\s*"(%b)"' % _ID.encode())
_OF_BATCH = ("input_file_id", "output_file_id", "error_file_id")


class Resource(NamedTuple):
    """A resource by its kind, as paths write it, and its id."""

    kind: str
    id: str

    @property
    def noun(self) -> str:
        """What the API calls it."""
        return _NOUNS[self.kind]

    @property
    def path(self) -> str:
        """Where a target that has it serves it."""
        return f"/v1/{self.kind}/{self.id}"


def in_path(path: bytes) -> Resource | None:
    """Return the resource whose id stands in the path; None if there is none."""
    found = _RESOURCE.fullmatch(path)
    if found is None or found[2] in _NO_IDS:
        return None
    return Resource(found[1].decode("ascii"), found[2].decode("ascii"))


def may_name(path: bytes, body: bytes) -> bool:
    """Return whether the body has to be parsed to know which resource the request names."""
    if path == RESPONSES:
        return any(name in body for name in _NAMES_IN_BODY)
    return path == BATCHES


def in_body(path: bytes, json: Mapping[str, Any]) -> Resource | None:
    """Return the resource that the body of a POST names; None if there is none."""
    if path == RESPONSES:
        conversation = json.get("conversation")
        if isinstance(conversation, dict):
            conversation = conversation.get("id")
        return _resource("responses", json.get("previous_response_id")) or _resource(
            "conversations", conversation
        )
    if path == BATCHES:
        return _resource("files", json.get("input_file_id"))
    return None


def in_text(path: bytes, body: bytes) -> Resource | None:
    """Return the resource that a body names which is not parsed, or of which a part is here; None if there is none.

    Text is never taken for a field, as quotes in it are escaped.
    """
    found = _PREVIOUS.search(body) if path == RESPONSES else None
    return None if found is None else Resource("responses", found[1].decode("ascii"))


def makes_some(path: bytes) -> bool:
    """Return whether responses to this path bring ids."""
    return _MAKERS.fullmatch(path) is not None


def made(body: bytes) -> list[str]:
    """Return the ids that a whole JSON response brings: its own, and of a batch those of its files."""
    first = _FIRST_ID.match(body)
    if first is not None and b"_file_id" not in body:
        return [first[1].decode("ascii")]
    if len(body) > _PARSED_BYTES:
        return []
    try:
        json = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    if not isinstance(json, dict):
        return []
    ids = [json.get("id"), *(json.get(name) for name in _OF_BATCH)]
    return [one for one in ids if isinstance(one, str) and _IS_ID.fullmatch(one)]


def made_at_first(begin: bytes) -> list[str]:
    """Return the id of the response that `begin` is the beginning of, if it stands there: a stream of events, or long JSON."""
    found = _FIRST_ID.match(begin) or _IN_STREAM.search(begin, 0, SEEN_BYTES)
    return [] if found is None else [found[1].decode("ascii")]


def is_api_error(body: bytes) -> bool:
    """Return whether the body of a 404 is the API's own: the path is known, and the resource is not.

    A server that does not have the path responds in another form (`{"detail": "Not Found"}`).
    """
    try:
        json = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(json, dict) and (isinstance(json.get("error"), dict) or json.get("object") == "error")


def _resource(kind: str, value: object) -> Resource | None:
    return Resource(kind, value) if isinstance(value, str) and _IS_ID.fullmatch(value) else None
