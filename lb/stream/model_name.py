"""Which model a request names, where that decides which target it may be sent to. Pure."""

from __future__ import annotations

import re
from itertools import islice

import orjson

from lb.stream.openai_request import ParsedRequest

_MOST_LOOKED_AT = 64  # fields of that name
_IN_JSON = re.compile(rb'"model"\s*:\s*"([^"\\]{1,256})"')
_IN_FORM = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n')


def model_of(parsed: ParsedRequest, body: bytes) -> str:
    """Return the model that a body names; empty if it names none, or that is not certain.

    Bodies that are not parsed, because they are not here as a whole or are no JSON, are searched. A field of that name may be
    another's than the request's: if the search finds two models, among the first few fields, it has found none.
    """
    if parsed.json is not None:
        return parsed.model
    fields = _IN_FORM.finditer(body) if body.startswith(b"--") else _IN_JSON.finditer(body)
    found = {field[1] for field in islice(fields, _MOST_LOOKED_AT)}
    return found.pop().decode("utf-8", "replace") if len(found) == 1 else ""


def names_model(body: bytes, model: str) -> bool:
    """Return True if an error response names the model: then its 404 means the model and not the path."""
    if not model:
        return False
    spellings = {model.encode("utf-8", "replace"), orjson.dumps(model)[1:-1]}
    return any(re.search(rb"(?<!\w)%b(?!\w)" % re.escape(one), body) for one in spellings)
