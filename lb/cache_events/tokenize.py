"""Requests for the tokens of a conversation, and their responses: `/tokenize`, as vLLM has it. Pure.

The conversation is that of a request, with the response to it where that is known. So one request gives the tokens of the prompt, which
are the first ones, and those by which the next turn of the conversation begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from lb.stream.openai_request import MAX_PROMPT_BYTES, prompt_of

PATH: Final = "/tokenize"
MOST_TOKENS: Final = 2**20
_KEPT: Final = ("model", "chat_template", "chat_template_kwargs", "tools")
_PLAIN: Final = frozenset({"role", "content", "name"})


class Conversation(NamedTuple):
    """A conversation: the `body` of its request to `/tokenize`, and its texts in the form that routing compares.

    `prompt` is the text of the prompt, `whole` that of prompt and response; empty if the response is not known.
    """

    body: bytes
    prompt: bytes
    whole: bytes


def conversation(path: bytes, body: bytes, prompt: bytes, reply: str) -> Conversation | None:
    """Return the conversation of a request and of `reply`, the text of its response; that is empty if it is not known.

    None for what `/tokenize` does not read as the engine does: media, other APIs, several prompts in one. The conversation's
    body is empty if it cannot be written.
    """
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(request, dict) or len(prompt) >= MAX_PROMPT_BYTES or "cache_salt" in request:
        return None
    if path.endswith(b"/chat/completions"):
        return _chat(request, prompt, reply)
    text = request.get("prompt")
    if not path.endswith(b"/completions") or not isinstance(text, str):
        return None
    if request.get("echo"):
        reply = ""  # the response begins with the prompt, so its text does not follow the prompt
    asked = {"model": request.get("model"), "prompt": text + reply}
    if request.get("add_special_tokens") is False:
        asked["add_special_tokens"] = False
    return Conversation(_written(asked), prompt, prompt + reply.encode("utf-8", "surrogatepass"))


def _chat(request: Mapping[str, Any], prompt: bytes, reply: str) -> Conversation | None:
    messages = request.get("messages")
    if not isinstance(messages, list) or not all(map(_is_text, messages)):
        return None
    asked = {name: request[name] for name in _KEPT if request.get(name) is not None}
    if not reply:
        return Conversation(_written({**asked, "messages": messages}), prompt, b"")
    said = {"role": "assistant", "content": reply}
    whole = prompt + prompt_of({"messages": [said]}, b"")
    body = _written({**asked, "messages": [*messages, said], "add_generation_prompt": False})
    return Conversation(body, prompt, whole)


def _is_text(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("content"), str) and message.keys() <= _PLAIN


def _written(asked: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(asked)
    except TypeError:  # half of a surrogate pair, which orjson reads and does not write
        return b""


def tokens_of(response: bytes) -> list[int] | None:
    """Return the tokens in a response of `/tokenize`; None if it has no list of them."""
    try:
        tokens = orjson.loads(response)["tokens"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MOST_TOKENS:
        return None
    return tokens if all(type(one) is int for one in tokens) else None


def text_of(body: bytes) -> str:
    """Return the text of a response that is no stream; empty if it has none, several, or more than a text."""
    try:
        (choice,) = orjson.loads(body)["choices"]
        message = choice.get("message")
        if message is None:
            text = choice["text"]
        else:
            text = "" if message.get("tool_calls") or message.get("reasoning_content") else message["content"]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
        return ""
    return text if isinstance(text, str) else ""
