"""Habits in which real engines differ from each other, as options of this one: for tests of what has to cope with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Style:
    """What the engine does with white space, stop strings and events.

    `trims`: the chat template removes white space around each message, as that of Llama 3 does, so that an unfinished
    message loses its last space.
    `holds_text`: token ids are sent at once, but with stop strings the last `max(len(stop)) - 1` characters of the text
    are held back until the response ends, as vLLM does. Otherwise text and ids end at the same place, and only
    what may become a stop string is held back.
    `tokens_per_event`: how many tokens an event of a stream has, the last one excepted. vLLM puts several into one
    when clients read more slowly than it generates.
    """

    trims: bool = False
    holds_text: bool = False
    tokens_per_event: int = 1

    def __post_init__(self) -> None:
        if self.tokens_per_event < 1:
            raise ValueError(f"tokens_per_event must be at least 1 (got {self.tokens_per_event})")

    def read(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the request as the chat template of this style reads it."""
        if not self.trims:
            return body
        return {
            name: [_trimmed(message) for message in value]
            if name in ("messages", "input") and isinstance(value, list)
            else value
            for name, value in body.items()
        }


def _trimmed(message: Any) -> Any:
    if not isinstance(message, Mapping) or "content" not in message:
        return message
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content.strip()}
    if isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content]
        if all(isinstance(text, str) for text in texts):
            return {**message, "content": "".join(map(str, texts)).strip()}
    return message


AS_GENERATED = Style()
