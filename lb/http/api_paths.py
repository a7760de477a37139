"""Which API of an engine a path is. Pure.

Decided on the path as the engine's server will understand it: servers decode `%73`, and some take `//`, a slash at the end, `.` and
`..`, `;x` or capital letters for nothing. A path that means one of these APIs is rewritten to its plain spelling, so that what was
decided about it holds for what the engine gets (see `lb.http.request_head`).
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final
from urllib.parse import unquote_to_bytes

CHAT: Final = b"/v1/chat/completions"
COMPLETIONS: Final = b"/v1/completions"
RESPONSES: Final = b"/v1/responses"
MESSAGES: Final = b"/v1/messages"
ADAPTERS: Final = frozenset({b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"})


class Work(Enum):
    """What a request makes an engine do."""

    GENERATES = "generates"  # it reads a prompt in JSON and writes a response
    READS = "reads"  # it reads a prompt in JSON: embeddings, scores
    MEDIA = "media"  # it hears, speaks, or draws
    NONE = "none"  # nothing that counts as tokens


_WORK: Final = {
    CHAT: Work.GENERATES,
    COMPLETIONS: Work.GENERATES,
    RESPONSES: Work.GENERATES,
    MESSAGES: Work.GENERATES,
    b"/v1/responses/compact": Work.GENERATES,
    b"/generate": Work.GENERATES,
    b"/api/chat": Work.GENERATES,
    b"/api/generate": Work.GENERATES,
    b"/v1/embeddings": Work.READS,
    b"/api/embed": Work.READS,
    b"/api/embeddings": Work.READS,
    b"/v1/rerank": Work.READS,
    b"/v2/rerank": Work.READS,
    b"/rerank": Work.READS,
    b"/v1/score": Work.READS,
    b"/score": Work.READS,
    b"/pooling": Work.READS,
    b"/classify": Work.READS,
    b"/v1/moderations": Work.READS,
    b"/v1/audio/transcriptions": Work.MEDIA,
    b"/v1/audio/translations": Work.MEDIA,
    b"/v1/audio/speech": Work.MEDIA,
    b"/v1/images/generations": Work.MEDIA,
    b"/v1/images/edits": Work.MEDIA,
    b"/tokenize": Work.NONE,
    b"/detokenize": Work.NONE,
    b"/v1/messages/count_tokens": Work.NONE,
    b"/v1/responses/input_tokens": Work.NONE,
}
_PROMPTS: Final = frozenset(path for path, work in _WORK.items() if work in (Work.GENERATES, Work.READS))
_OF_ONE_RESOURCE: Final = re.compile(  # what exists is read, changed, cancelled, or deleted
    rb"/v1/(?:responses/[^/]+(?:/cancel)?|conversations(?:/.+)?|batches/[^/]+/cancel|files(?:/.+)?)"
)
_PLAIN: Final = re.compile(rb"(?:/[a-z0-9_-]+)+")  # nothing in it that a server could read in another way
_ROUNDS: Final = 3  # of decoding: a proxy beside the engine may decode, too


def for_model(path: bytes) -> bool:
    """Return whether requests to this path carry prompts in JSON."""
    return path in _PROMPTS


def names_a_model(path: bytes) -> bool:
    """Return whether bodies of requests to this path name a model."""
    return path in _WORK or path in ADAPTERS


def work_of(path: bytes) -> Work | None:
    """Return what a POST to this path makes an engine do; None if that is not known."""
    work = _WORK.get(path)
    if work is None and _OF_ONE_RESOURCE.fullmatch(path):
        return Work.NONE
    return work


def plain_path(path: bytes) -> bytes:
    """Return the plain spelling of a path that means one of the APIs of engines; any other path as it is."""
    if path in _WORK or _PLAIN.fullmatch(path):
        return path
    meant = _as_servers_read(path)
    return meant if meant in _WORK else path


def _as_servers_read(path: bytes) -> bytes:
    """Return the path as the most lenient of servers would understand it."""
    for _ in range(_ROUNDS):
        decoded = unquote_to_bytes(path)
        if decoded == path:
            break
        path = decoded
    kept: list[bytes] = []
    for segment in path.replace(b"\\", b"/").lower().split(b"/"):
        name = segment.partition(b";")[0].strip()
        if name == b"..":
            del kept[-1:]
        elif name not in (b"", b"."):
            kept.append(name)
    return b"/" + b"/".join(kept)
