"""Which model a request names, where that decides which target it may be sent to. Pure."""

from __future__ import annotations

import re

import orjson

from lb.stream.openai_request import ParsedRequest

_IN_JSON = re.compile(rb'"model"\s*:\s*"([^"\\]{1,256})"')
_IN_FORM = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n')


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
