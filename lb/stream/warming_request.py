"""The request that has an engine compute the beginning of a prompt, from the request of a client that had it. Pure.

Kept are the fields that an engine's template reads; what concerns the response is left out. The message in which the beginning
ends is cut there: the engine's blocks before the cut are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT, COMPLETIONS
from lb.stream.openai_request import prompt_of

PATHS = frozenset({CHAT, COMPLETIONS})
_KEPT = (
    "model",
    "tools",
    "functions",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "mm_processor_kwargs",
    "add_special_tokens",
    "cache_salt",  # of vLLM: prompts with different ones share no cache
)
_CHOICES_OF_TOOLS = ("auto", "none")  # others force a call, which is more than one token
_ONE_TOKEN: dict[str, Any] = {"max_tokens": 1, "stream": False, "temperature": 0}
# vLLM handles lower numbers first, and 0 is usual; TensorRT-LLM's go from 0 to 1, and higher ones first. SGLang takes a request
# without a priority for the lowest.
_LOWEST_PRIORITY: Mapping[EngineKind, float] = {EngineKind.VLLM: 1_000_000, EngineKind.TRTLLM: 0.0}


def warming_body(
    path: bytes, body: bytes, length: int, kind: EngineKind = EngineKind.UNKNOWN
) -> bytes | None:
    """Return a body whose prompt is the first `length` bytes of that of `body`; None if there is no such body.

    It has the lowest priority, if engines of that kind have priorities.
    """
    json = orjson.loads(body)
    first = _cut_chat(json, length) if path == CHAT else _cut_text(json, length)
    if first is None:
        return None
    kept = {name: json[name] for name in _KEPT if name in json}
    if json.get("tool_choice") in _CHOICES_OF_TOOLS:
        kept["tool_choice"] = json["tool_choice"]
    priority = _LOWEST_PRIORITY.get(kind)
    return orjson.dumps(kept | first | _ONE_TOKEN | ({} if priority is None else {"priority": priority}))


def has_priority(kind: EngineKind) -> bool:
    """Return whether requests to engines of that kind carry a priority, which they may refuse if it is not enabled there."""
    return kind in _LOWEST_PRIORITY


def _cut_text(json: Mapping[str, Any], length: int) -> dict[str, Any] | None:
    prompt = json.get("prompt")
    if type(prompt) is not str:
        return None
    text = _cut(prompt, length)
    return {"prompt": text} if text else None


def _cut_chat(json: Mapping[str, Any], length: int) -> dict[str, Any] | None:
    messages = json.get("messages")
    if type(messages) is not list:
        return None
    left = length - len(prompt_of({**json, "messages": []}, b""))
    first: list[Any] = []
    for message in messages:
        size = len(prompt_of({"messages": [message]}, b""))
        if size <= left:
            first.append(message)
            left -= size
            continue
        part = _cut_message(message, left)
        if part is not None:
            first.append(part)
        break
    return {"messages": first} if first else None


def _cut_message(message: Any, length: int) -> dict[str, Any] | None:
    """Return the message with its text cut; one character of it at least, since some templates want a user to say something."""
    if type(message) is not dict or message.keys() != {"role", "content"}:
        return None
    role, content = message["role"], message["content"]
    if type(role) is not str or type(content) is not str:
        return None
    left = length - len(role.encode("utf-8", "surrogatepass")) - 1
    text = (_cut(content, left) or content[:1]) if left >= 0 else ""
    return {"role": role, "content": text} if text else None


def _cut(text: str, length: int) -> str:
    """Return the whole characters of the first `length` bytes."""
    return text.encode("utf-8", "surrogatepass")[: max(0, length)].decode("utf-8", "ignore")
