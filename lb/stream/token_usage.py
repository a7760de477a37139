"""How many tokens an answer was long, as its engine says: read off the end of its JSON without parsing the rest."""

from __future__ import annotations

import re
from typing import NamedTuple

_TAIL_BYTES = 2048  # `usage` is the last field of engines' answers, or nearly so
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,12})\b')
_OUT = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,12})\b')


class Tokens(NamedTuple):
    """Of one request: its prompt's and its answer's."""

    prompt: int
    out: int


def usage_of(body: bytes) -> Tokens | None:
    """The `usage` at the end of an answer, or of the last event of a stream; None if there is none."""
    start = body.find(b'"usage"', max(0, len(body) - _TAIL_BYTES))
    if start < 0:
        return None
    prompt = _PROMPT.search(body, start)
    out = _OUT.search(body, start)
    if prompt is None and out is None:
        return None
    return Tokens(int(prompt[1]) if prompt else 0, int(out[1]) if out else 0)
