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
from typing import Any, NamedTuple

import orjson

MAX_PROMPT_BYTES = 256 * 1024  # of a prompt are read: prefixes beyond it are the same to us
MAX_SESSION_BYTES = 256

_DENSE_ABOVE_BYTES = 256 * 1024
_DENSE_FACTOR = 3
_MEDIA_BYTES = 2048  # 512 tokens
_LIMITS = (b"max_completion_tokens", b"max_tokens", b"max_output_tokens")
_MOST_LOOKED_AT = 64  # fields of one name
_TEXT_VALUE = re.compile(rb'\s*:\s*"([^"\\]{1,256})"')
_NUMBER = re.compile(rb"\s*:\s*(\d{1,9})\b")
_TRUE = re.compile(rb"\s*:\s*(true)\b")

_FIELD = b"\x1f"
_MESSAGE = b"\x1e"

CHAT = b"/v1/chat/completions"
COMPLETIONS = b"/v1/completions"
RESPONSES = b"/v1/responses"
MESSAGES = b"/v1/messages"
_MODEL_PATHS = frozenset(
    {
        CHAT,
        COMPLETIONS,
        RESPONSES,
        MESSAGES,
        b"/v1/embeddings",
        b"/generate",
        b"/api/chat",
        b"/api/generate",
    }
)


class ParsedRequest(NamedTuple):
    """A parsed body. `json` is None if it is not an object, or not one for a model."""

    json: dict[str, Any] | None
    model: str = ""
    max_tokens: int = 0
    stream: bool = False
    choices: int = 1

    @property
    def most_tokens(self) -> int | None:
        """The client's limit on generated tokens, over all choices; None if it sets none."""
        return self.max_tokens * self.choices or None


NOT_PARSED = ParsedRequest(None)


def for_model(path: bytes) -> bool:
    """Return whether requests to this path carry prompts."""
    return path in _MODEL_PATHS


def is_dense(body: bytes, parsed: int) -> bool:
    """Return True if a large body consists of many small values, so that parsing it would multiply its memory.

    `parsed` is its `parsed_bytes`.
    """
    return len(body) > _DENSE_ABOVE_BYTES and parsed > _DENSE_FACTOR * len(body)


def scan(body: bytes) -> ParsedRequest:
    """Read what routing needs off the text of a body that is not parsed.

    A field of the same name deeper down may be taken for the request's own; text never is, as quotes in it are escaped.
    """
    model = _field(body, b'"model"', _TEXT_VALUE)
    limits = (_field(body, b'"%b"' % name, _NUMBER) for name in _LIMITS)
    return ParsedRequest(
        None,
        model.decode("utf-8", "replace"),
        int(next(filter(None, limits), 0)),
        bool(_field(body, b'"stream"', _TRUE)),
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
    """Parse a body of a model's API."""
    try:
        json = orjson.loads(body)
    except orjson.JSONDecodeError:
        return NOT_PARSED
    if type(json) is not dict:
        return NOT_PARSED
    model = json.get("model")
    limit = json.get("max_completion_tokens") or json.get("max_tokens") or json.get("max_output_tokens") or 0
    choices = json.get("n")
    return ParsedRequest(
        json,
        model if type(model) is str else "",
        limit if type(limit) is int and 0 < limit < 2**31 else 0,
        json.get("stream") is True,
        choices if type(choices) is int and 1 <= choices <= 1024 else 1,
    )


def prompt_of(json: Mapping[str, Any] | None, body: bytes) -> bytes:
    """Return the prompt in its canonical form, at most MAX_PROMPT_BYTES of it."""
    if json is None:
        return body[:MAX_PROMPT_BYTES]
    try:
        return _canonical(json, body)
    except (
        TypeError,
        RecursionError,
    ):  # nested more deeply than orjson or Python writes, which is less than orjson reads
        return body[:MAX_PROMPT_BYTES]


def _canonical(json: Mapping[str, Any], body: bytes) -> bytes:
    parts: list[bytes] = []
    tools = json.get("tools")
    if tools:
        parts.append(orjson.dumps(tools))
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
            return body[:MAX_PROMPT_BYTES]
        if type(prompt) is list and prompt and type(prompt[0]) is dict:
            _write_messages(parts, prompt)
        else:
            _write(parts, prompt)
    return b"".join(parts)[:MAX_PROMPT_BYTES]


def _write_messages(parts: list[bytes], messages: list[Any]) -> None:
    simple = _simple(messages)
    if simple is not None:
        parts.append(simple)
        return
    room = MAX_PROMPT_BYTES
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
            return


def _simple(messages: list[Any]) -> bytes | None:
    """Return the same in one piece, and much faster, for messages that are nothing but a role and a text, as nearly all are."""
    try:
        texts = [f"{one['role']}\x1f{one['content']}\x1e" for one in messages if type(one["content"]) is str]
    except (KeyError, TypeError):
        return None
    if len(texts) < len(messages) or sum(map(len, messages)) > 2 * len(messages):
        return None
    return "".join(texts).encode("utf-8", "surrogatepass")


def _write(parts: list[bytes], value: Any) -> None:
    if type(value) is str:
        parts.append(value.encode("utf-8", "surrogatepass"))
    elif type(value) is list and value and type(value[0]) is dict:
        for part in value:  # content in parts
            text = part.get("text") if type(part) is dict else None
            parts.append(
                text.encode("utf-8", "surrogatepass") if type(text) is str else _media(orjson.dumps(part))
            )
    elif value is not None:
        parts.append(orjson.dumps(value))


def _media(part: bytes) -> bytes:
    """Return a part that is no text.

    An image or a sound has nothing to share but all of it, and costs an engine hundreds of tokens rather than one for each
    four bytes; so a long one is its digest, in as many bytes as those tokens.
    """
    if len(part) <= _MEDIA_BYTES:
        return part
    digest = hashlib.blake2b(part, digest_size=32).hexdigest().encode()
    return digest * (_MEDIA_BYTES // len(digest))
