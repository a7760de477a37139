"""How many tokens a response has: what the engine reports in its JSON, or else a count of what its events carry.

Both are found by patterns in the bytes: in the text of a response quotation marks are escaped, so `"usage":` is always a key.
"""

from __future__ import annotations

import re
from typing import Final

from lb.http.digits import end_of_digits, number_in

_TAIL_BYTES: Final = 2048  # `usage` is the last field of a response, or nearly so
_PROMPT: Final = re.compile(rb'"(?:prompt_tokens|input_tokens|prompt_eval_count)"\s*:\s*(\d{1,12})\b')
_OUT: Final = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count)"\s*:\s*(\d{1,12})\b')
# The fields that hold the two: of OpenAI and Anthropic, of SGLang's /generate, of Ollama.
_REPORTS: Final = (b'"usage"', b'"meta_info"', b'"prompt_eval_count"')

# How most engines and OpenAI write the field; engines have the total between the two, OpenAI behind them.
_USUAL: Final = b'"usage":{"prompt_tokens":'
_USUAL_TOTAL: Final = b',"total_tokens":'
_USUAL_OUT: Final = b',"completion_tokens":'
_MOST_DIGITS: Final = 12
_ENDS: Final = b",}"

_IDS: Final = re.compile(rb'"token_ids":\[([0-9,]+)\]')
# A field that carries text and is not empty, and the rest of its line: one match for an event. `_fast_path.c` has the same.
_CONTENT: Final = re.compile(
    rb'"(?:content|text|delta|reasoning_content|reasoning|thinking|partial_json|arguments|response)": ?"[^"][^\n]*'
)


class Tokens:
    """Of one request: its prompt's and its response's."""

    __slots__ = ("out", "prompt")

    def __init__(self, prompt: int, out: int) -> None:
        self.prompt = prompt
        self.out = out


def usage_of(body: bytes) -> Tokens | None:
    """Return the last report of tokens at the end of a response, or of a stream; None if there is none."""
    start = max(0, len(body) - _TAIL_BYTES)
    end = len(body)
    if body[:1] == b"{":  # a response that is not a stream, in the form that nearly all have
        at = body.rfind(_REPORTS[0], start)
        usual = _usual_at(body, at) if at >= 0 else None
        if usual is not None:
            return usual
        if at >= 0:
            prompt, out = _PROMPT.search(body, at), _OUT.search(body, at)
            if prompt is not None and out is not None:
                return Tokens(int(prompt[1]), int(out[1]))
    while (at := max(body.rfind(report, start, end) for report in _REPORTS)) >= 0:
        end = at
        if b'"message_start"' in body[body.rfind(b"\n", 0, at) + 1 : at]:
            continue  # Anthropic's first event counts a response that has not started
        prompt = _PROMPT.search(body, at)
        out = _OUT.search(body, at)
        if prompt is not None or out is not None:
            return Tokens(int(prompt[1]) if prompt else 0, int(out[1]) if out else 0)
    return None


def _usual_at(body: bytes, at: int) -> Tokens | None:
    """Return the report that begins there if it has the usual form. Regular expressions take four times as long for it."""
    if not body.startswith(_USUAL, at):
        return None
    prompt_at = at + len(_USUAL)
    prompt_end = end = end_of_digits(body, prompt_at, _MOST_DIGITS)
    if body[end : end + len(_USUAL_TOTAL)] == _USUAL_TOTAL:
        end = end_of_digits(body, end + len(_USUAL_TOTAL), _MOST_DIGITS)
    out_at = end + len(_USUAL_OUT)
    if body[end:out_at] != _USUAL_OUT:
        return None
    end = end_of_digits(body, out_at, _MOST_DIGITS)
    if prompt_end == prompt_at or end == out_at or end == len(body) or body[end] not in _ENDS:
        return None
    return Tokens(number_in(body, prompt_at, prompt_end), number_in(body, out_at, end))


def prompt_tokens_in(events: bytes) -> int:
    """Return the tokens of the prompt as the first events of a stream report them (Anthropic's `message_start`); 0 if they do not."""
    found = _PROMPT.search(events)
    return int(found[1]) if found else 0


class OutputCounter:
    """Counts the tokens of a stream's response: exactly where the events list their ids, else one for each event that carries text.

    `ids` and `events` may be increased from outside, by what `_fast_path.c` has counted.
    """

    __slots__ = ("events", "ids")

    def __init__(self) -> None:
        self.ids = 0
        self.events = 0

    def add(self, events: bytes) -> None:
        """Whole events, chunk-framed or not."""
        self.events += len(_CONTENT.findall(events))
        if b'"token_ids":[' in events:
            self.ids += sum(ids.count(b",") + 1 for ids in _IDS.findall(events))

    @property
    def tokens(self) -> int:
        return self.ids or self.events
