"""The content of a request to a model: the prompt in bytes that can be compared, and the little else routing requests.

Two requests share a prefix for the engine if their messages do, independent of the whitespace, escapes and key order of
the JSON around them. So the JSON is parsed and written again in one form: tools first, as templates put them,
then role and text of each message, each ended by a byte that valid text does not contain. No tokenizer: bytes are enough
to find out who has seen what (SGLang's router over HTTP and SkyWalker do the same with characters).

Bodies that are none of the known shapes are compared as they are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from json import JSONDecoder
from typing import Any, Final

import orjson

MAX_PROMPT_BYTES: Final = 256 * 1024  # of a prompt are read: prefixes beyond it are the same to us
MAX_SESSION_BYTES: Final = 256

_DENSE_ABOVE_BYTES: Final = 256 * 1024
_DENSE_FACTOR: Final = 3
_MOST_STRUCTURE_BYTES: Final = 2 * 1024 * 1024  # of objects and lists, in about 30 ms of parsing
_WRITTEN_AT_ONCE: Final = 512  # messages or tools
_MEDIA_BYTES: Final = 2048  # 512 tokens
_DATA_DEPTH: Final = (
    1  # in which objects the base64 of a part is looked for: {"type": "image_url", "image_url": {"url": ...}}
)
_MOST_FIELDS: Final = 64  # of a part whose data is looked for
_LONG_DATA: Final = 1024 * 1024
_SAMPLES, _SAMPLE_BYTES = 16, 32 * 1024
# Of OpenAI's APIs; llama.cpp's; and within the fields of others: SGLang, TGI, Ollama.
_LIMITS: Final = (
    "max_completion_tokens",
    "max_tokens",
    "max_output_tokens",
    "n_predict",
    "max_new_tokens",
    "num_predict",
)
_NESTED: Final = ("sampling_params", "parameters", "options")
_MOST_TOKENS: Final = 2**31
_MOST_CHOICES: Final = 1 << 20
_MOST_LOOKED_AT: Final = 64  # fields of one name
_SPACE: Final = 32
_TEXT_VALUE: Final = re.compile(rb'\s*:\s*"([^"\\]{1,256})"')
_NUMBER: Final = re.compile(rb"\s*:\s*(\d{1,9})\b")
_TRUE: Final = re.compile(rb"\s*:\s*(true)\b")

_loads: Final = orjson.loads
_dumps: Final = orjson.dumps
_FIELD: Final = b"\x1f"
_MESSAGE: Final = b"\x1e"


class ParsedRequest:
    """A parsed body. `json` is None if it is not an object, or not one for a model."""

    __slots__ = ("choices", "json", "max_tokens", "model", "stream")

    def __init__(
        self,
        json: dict[str, Any] | None,
        model: str = "",
        max_tokens: int = 0,
        stream: bool = False,
        choices: int = 1,
    ) -> None:
        self.json = json
        self.model = model
        self.max_tokens = max_tokens
        self.stream = stream
        self.choices = choices

    @property
    def most_tokens(self) -> int | None:
        """The client's limit on generated tokens, over all choices; None if it sets none."""
        return self.max_tokens * self.choices or None


NOT_PARSED: Final = ParsedRequest(None)
UNREADABLE: Final = ParsedRequest(None, stream=False)  # by our parser; others may read it


def is_dense(body: bytes, parsed: int) -> bool:
    """Return True if a large body has so many values that parsing it would multiply its memory, or stop the loop for long.

    `parsed` is its `parsed_bytes`.
    """
    size = len(body)
    if size <= _DENSE_ABOVE_BYTES:
        return False
    return parsed > _DENSE_FACTOR * size or parsed - size > _MOST_STRUCTURE_BYTES


def scan(body: bytes) -> ParsedRequest:
    """Read what routing needs off the text of a body that is not parsed.

    A field of the same name deeper down may be taken for the request's own; text never is, as quotes in it are escaped.
    """
    model = _field(body, b'"model"', _TEXT_VALUE)
    limits = (_field(body, b'"%b"' % name.encode(), _NUMBER) for name in _LIMITS)
    return ParsedRequest(
        None,
        model.decode("utf-8", "replace"),
        max(int(limit or b"0") for limit in limits),
        bool(_field(body, b'"stream"', _TRUE)),
        max(1, int(_field(body, b'"n"', _NUMBER) or b"1")),
    )


def _field(body: bytes, name: bytes, value: re.Pattern[bytes]) -> bytes:
    """Return the value of the first field of this name that has one of this form; empty if there is none among the first few."""
    at = body.find(name)
    for _ in range(_MOST_LOOKED_AT):
        if at < 0:
            break
        found = value.match(body, at + len(name))
        if found is not None:
            return found[1]
        at = body.find(name, at + len(name))
    return b""


def read(body: bytes) -> ParsedRequest:
    """Parse a body of a model's API. Numbers are read as engines read them: as text, too, and with a fraction of zero."""
    try:
        json = _loads(body)
    except orjson.JSONDecodeError:
        return NOT_PARSED
    if type(json) is not dict:
        return NOT_PARSED
    model = json.get("model")
    limit, choices = _limit_of(json), leniently_whole(json.get("n")) if "n" in json else 1
    for name in _NESTED:
        if type(json.get(name)) is dict:
            nested = json[name]
            limit = max(limit, _limit_of(nested))
            choices = max(choices, leniently_whole(nested.get("n")))
    if "best_of" in json:
        choices *= max(1, leniently_whole(json["best_of"]))
    batch = json.get("prompt", json.get("text", json.get("inputs")))
    if type(batch) is list and batch and type(batch[0]) is not int:
        choices *= len(batch)
    return ParsedRequest(
        json,
        model if type(model) is str else "",
        limit if 0 < limit < _MOST_TOKENS else 0,
        json.get("stream") is True,
        min(_MOST_CHOICES, max(1, choices)),
    )


def _limit_of(json: Mapping[str, Any]) -> int:
    """Return the largest of the fields that limit a response; 0 if there is none."""
    limit = 0
    for name in _LIMITS:
        if name in json:
            limit = max(limit, leniently_whole(json[name]))
    return limit


def leniently_whole(value: Any) -> int:
    """Return the whole number that engines take this value for, as pydantic does; 0 if it is none."""
    if type(value) is int:
        return value
    try:
        if isinstance(value, str):
            value = float(value)
        return int(value) if isinstance(value, (bool, float)) and value == int(value) else 0
    except (ValueError, OverflowError):
        return 0


def is_ambiguous(json: Mapping[str, Any], body: bytes) -> bool:
    """Return whether a name is there twice in an object of the body of `json`: which of the two holds is up to the parser.

    Long bodies are not searched, which would stop the loop: nearly all parsers take the last one, as ours does, or refuse both.
    """
    if len(body) > _DENSE_ABOVE_BYTES:
        return False
    # Whether a client writes a space behind names shows at the first one.
    if body[body.find(b":") + 1] != _SPACE and _is_written_so(json, body):
        return False
    # What a parser drops has quotation marks, so the body has more of them than what it has kept.
    escapes = body.find(b"\\") >= 0  # `in` is slow: it takes the bytes for a number first
    if body.count(b'"') == _quotes_in(json, escapes) and not (escapes and b"\\u0022" in body):
        return False
    try:
        JSONDecoder(object_pairs_hook=_once).decode(body.decode())
    except (ValueError, RecursionError):
        return True
    return False


def _is_written_so(json: Mapping[str, Any], body: bytes) -> bool:
    """Return whether the body is what orjson writes, which has each name once: many clients write their bodies without spaces, too."""
    try:
        return _dumps(json) == body
    except TypeError:  # nested more deeply than it writes
        return False


def _quotes_in(json: Mapping[str, Any], escapes: bool) -> int:
    """Return how many quotation marks a body at least has that is parsed to this; those within text, too, if it `escapes` any."""
    texts = inner = 0
    left: list[Any] = [json]
    while left:
        one = left.pop()
        kind = type(one)
        if kind is str:
            texts += 1
            if escapes:
                inner += one.count('"')
        elif kind is dict:
            texts += len(one)
            for name, value in one.items():
                if escapes:
                    inner += name.count('"')
                if type(value) is str:
                    texts += 1
                    if escapes:
                        inner += value.count('"')
                else:
                    left.append(value)
        elif kind is list and one and type(one[0]) is not int:  # not of token ids
            left += one
    return 2 * texts + inner


def _once(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name is there twice")


def prompt_of(json: Mapping[str, Any] | None, body: bytes) -> bytes:
    """Return the prompt in its canonical form, at most MAX_PROMPT_BYTES of it."""
    if json is None:
        return _first(body)
    try:
        return _canonical(json, body)
    except (
        TypeError,
        RecursionError,
    ):  # nested more deeply than orjson or Python writes, which is less than orjson reads
        return _first(body)


def _first(prompt: bytes) -> bytes:
    """Return at most MAX_PROMPT_BYTES. A slice would be a copy, even of the whole."""
    return prompt if len(prompt) <= MAX_PROMPT_BYTES else prompt[:MAX_PROMPT_BYTES]


def _canonical(json: Mapping[str, Any], body: bytes) -> bytes:
    parts: list[bytes] = []
    tools = json.get("tools")
    if tools:
        is_long = type(tools) is list and len(tools) > _WRITTEN_AT_ONCE
        parts.append(_first_tools(tools) if is_long else orjson.dumps(tools))
        parts.append(_MESSAGE)
    for key in ("instructions", "system"):
        if key in json:
            _write(parts, json[key])
            parts.append(_MESSAGE)
    messages = json.get("messages")
    if type(messages) is list:
        _write_messages(parts, messages)
    else:
        prompt = next((json[key] for key in ("prompt", "input", "input_ids", "text") if key in json), None)
        if prompt is None:
            return _first(body)
        if type(prompt) is list and prompt and type(prompt[0]) is dict:
            _write_messages(parts, prompt)
        else:
            _write(parts, prompt)
    return _first(b"".join(parts))


def _first_tools(tools: list[Any]) -> bytes:
    """Return the tools as JSON, at most about MAX_PROMPT_BYTES of them."""
    written, room = [], MAX_PROMPT_BYTES
    for tool in tools:
        written.append(orjson.dumps(tool))
        room -= len(written[-1])
        if room <= 0:
            break
    return b"[" + b",".join(written) + b"]"


def _write_messages(parts: list[bytes], messages: list[Any]) -> None:
    room = MAX_PROMPT_BYTES
    if len(messages) <= _WRITTEN_AT_ONCE:
        _write_some(parts, messages, room)
        return
    for first in range(0, len(messages), _WRITTEN_AT_ONCE):
        room = _write_some(parts, messages[first : first + _WRITTEN_AT_ONCE], room)
        if room <= 0:
            return


def _write_some(parts: list[bytes], messages: list[Any], room: int) -> int:
    """Write messages until `room` is used up. Returns what is left of it."""
    simple = _simple(messages)
    if simple is not None:
        parts.append(simple)
        return room - len(simple)
    for message in messages:
        if type(message) is not dict:
            _write(parts, message)
            continue
        before = len(parts)
        for key, value in message.items():
            if key == "role":
                parts.insert(before, str(value).encode("utf-8", "surrogatepass"))
                parts.insert(before + 1, _FIELD)
            elif key == "content":
                _write(parts, value)
            elif value is not None:  # tool calls, names, reasoning: part of the prompt as well
                parts.append(_FIELD)
                parts.append(key.encode())
                _write(parts, value)
        parts.append(_MESSAGE)
        room -= sum(map(len, parts[before:]))
        if room <= 0:
            break
    return room


def _simple(messages: list[Any]) -> bytes | None:
    """Return the same in one piece, and much faster, for messages that are nothing but a role and a text, as nearly all are."""
    try:
        texts = [f"{one['role']}\x1f{one['content']}\x1e" for one in messages if type(one["content"]) is str]
    except (KeyError, TypeError):
        return None
    if len(texts) < len(messages) or sum(map(len, messages)) > 2 * len(messages):
        return None
    return _encoded("".join(texts))


def _write(parts: list[bytes], value: Any) -> None:
    if type(value) is str:
        parts.append(_encoded(value))
    elif type(value) is list and value and type(value[0]) is dict:
        for part in value:  # content in parts
            text = part.get("text") if type(part) is dict else None
            parts.append(_encoded(text) if type(text) is str else _media(part))
    elif value is not None:
        parts.append(orjson.dumps(value))


def _encoded(text: str) -> bytes:
    if len(text) > MAX_PROMPT_BYTES:
        text = text[:MAX_PROMPT_BYTES]  # a character is at least one byte
    return text.encode("utf-8", "surrogatepass")


def _media(part: Any) -> bytes:
    """Return a part that is no text.

    An image or a sound has nothing to share but all of it, and costs an engine hundreds of tokens rather than one for each
    four bytes; so a long one is its digest, in as many bytes as those tokens.
    """
    written = orjson.dumps(_without_data(part, _DATA_DEPTH))
    if len(written) <= _MEDIA_BYTES:
        return written
    digest = hashlib.blake2b(written, digest_size=32).hexdigest().encode()
    return digest * (_MEDIA_BYTES // len(digest))


def _without_data(part: Any, depth: int) -> Any:
    """Return the part with long texts, which are data, replaced by what they begin with, and more that distinguishes them."""
    if type(part) is not dict or len(part) > _MOST_FIELDS:
        return part
    shorter: dict[str, Any] | None = None
    short: Any
    for key, value in part.items():
        if type(value) is str:
            short = value if len(value) <= _LONG_DATA else _sample(value)
        elif type(value) is dict and depth:
            short = _without_data(value, depth - 1)
        else:
            continue
        if short is not value:
            shorter = dict(part) if shorter is None else shorter
            shorter[key] = short
    return part if shorter is None else shorter


def _sample(data: str) -> str:
    """Return the length of the data, and some of it from the beginning to the end.

    To write megabytes of base64 and to hash them takes long, and compressed images and sounds differ everywhere.
    """
    step = (len(data) - _SAMPLE_BYTES) // (_SAMPLES - 1)
    pieces = [data[at * step : at * step + _SAMPLE_BYTES] for at in range(_SAMPLES - 1)]
    return "".join((str(len(data)), *pieces, data[-_SAMPLE_BYTES:]))
