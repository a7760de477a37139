"""Which model a request names, where that decides which target it may be sent to. Pure."""

from __future__ import annotations

import re

import orjson

from lb.stream.openai_request import ParsedRequest, for_model

# Besides those of `openai_request.for_model`, whose bodies are prompts.
_PATHS = frozenset(
    {
        b"/v1/rerank",
        b"/v2/rerank",
        b"/rerank",
        b"/v1/score",
        b"/score",
        b"/pooling",
        b"/classify",
        b"/tokenize",
        b"/detokenize",
        b"/v1/moderations",
        b"/v1/images/generations",
        b"/v1/images/edits",
        b"/v1/audio/speech",
        b"/v1/audio/transcriptions",
        b"/v1/audio/translations",
        b"/v1/messages/count_tokens",
        b"/api/embed",
        b"/api/embeddings",
    }
)
_IN_JSON = re.compile(rb'"model"\s*:\s*"([^"\\]{1,256})"')
_IN_FORM = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n')


def names_a_model(path: bytes) -> bool:
    """Return True if bodies of requests to this path name a model."""
    return for_model(path) or path in _PATHS


def model_of(parsed: ParsedRequest, body: bytes) -> str:
    """Return the model that a body names; empty if it names none, or that is not certain.

    Bodies that are not parsed, because they are not here as a whole or are no JSON, are searched. A field of that name may be
    another's than the request's: if the search finds two models it has found none.
    """
    if parsed.json is not None:
        return parsed.model
    found = set(_IN_FORM.findall(body)) if body.startswith(b"--") else set(_IN_JSON.findall(body))
    return found.pop().decode("utf-8", "replace") if len(found) == 1 else ""


def names_model(body: bytes, model: str) -> bool:
    """Return True if an error response names the model: then its 404 means the model and not the path."""
    if not model:
        return False
    spellings = {model.encode("utf-8", "replace"), orjson.dumps(model)[1:-1]}
    return any(re.search(rb"(?<!\w)%b(?!\w)" % re.escape(one), body) for one in spellings)
