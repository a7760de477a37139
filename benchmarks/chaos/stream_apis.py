"""Four APIs that stream text (chat completions, completions, Responses, Messages): request bodies, and what a client
makes of the events. Pure.

`Received.event` takes the events of a stream one by one; what breaks a rule of the API (a sequence number left out, a
second role, text after the end) is a problem on record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Api(str, Enum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Api.CHAT else f"/v1/{self.value}"


Turn = tuple[str, str]
"""Role and text."""

_WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Mapping[Api, list[Any]] = {
    Api.CHAT: [{"type": "function", "function": {"name": "weather", "parameters": _WEATHER}}],
    Api.RESPONSES: [{"type": "function", "name": "weather", "parameters": _WEATHER, "strict": False}],
    Api.MESSAGES: [{"name": "weather", "description": "The weather.", "input_schema": _WEATHER}],
}
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def request(api: Api, turns: Sequence[Turn], tokens: int, *, usage: bool) -> dict[str, Any]:
    """Return the body of a streamed greedy request. `usage`: ask for it, where it does not come unasked."""
    body: dict[str, Any] = {"model": "tiny", "temperature": 0, "stream": True}
    if usage and api in (Api.CHAT, Api.COMPLETIONS):
        body["stream_options"] = {"include_usage": True}
    messages = [{"role": role, "content": text} for role, text in turns]
    if api is Api.CHAT:
        return body | {"messages": messages, "max_tokens": tokens}
    if api is Api.COMPLETIONS:
        return body | {"prompt": " ".join(text for _, text in turns), "max_tokens": tokens}
    system = " ".join(text for role, text in turns if role == "system")
    others = [message for message in messages if message["role"] != "system"]
    if api is Api.RESPONSES:
        items = [_item(number, message) for number, message in enumerate(others)]
        body |= {"input": items, "max_output_tokens": tokens, "store": False}
        return body | ({"instructions": system} if system else {})
    body |= {"messages": others, "max_tokens": tokens}
    return body | ({"system": system} if system else {})


def _item(number: int, message: dict[str, str]) -> dict[str, Any]:
    """Return a message as the Responses API has it: what the assistant has said is an output item."""
    if message["role"] != "assistant":
        return message
    part = {"type": "output_text", "text": message["content"], "annotations": []}
    item = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed"}
    return {**item, "content": [part]}


def with_image(api: Api, body: dict[str, Any]) -> dict[str, Any]:
    """Return the request with an image of one pixel in its last message."""
    url = f"data:image/png;base64,{_PIXEL}"
    if api is Api.CHAT:
        part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    elif api is Api.RESPONSES:
        part = {"type": "input_image", "image_url": url, "detail": "auto"}
    else:
        part = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _PIXEL}}
    name = "input" if api is Api.RESPONSES else "messages"
    text = {
        "type": "input_text" if api is Api.RESPONSES else "text",
        "text": body[name][-1]["content"],
    }
    return body | {name: [*body[name][:-1], {"role": "user", "content": [text, part]}]}


@dataclass(slots=True)
class Received:
    """What a client has of one stream. `error` is the API's own error event, or an HTTP status with its body."""

    api: Api
    text: str = ""
    finish: str | None = None
    stop_reason: Any = None
    usage: tuple[int, int] | None = None
    error: str | None = None
    status: int = 200
    ended: bool = False
    fault: str | None = None  # of the connection
    ids: set[str] = field(default_factory=set)
    token_ids: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)
    within_character: list[int] = field(
        default_factory=list
    )  # numbers of events behind which the text lacks bytes
    _sequence: int = 0
    _open: bool = False
    _roles: int = 0

    def event(self, data: str) -> None:
        """Take the data of one event."""
        self.raw.append(data)
        if self.ended:
            if data != "[DONE]":  # vLLM sends it behind the last event of a Messages stream
                self.problems.append(f"an event behind the end: {data[:80]}")
            return
        if data == "[DONE]":
            self._done()
            return
        event = json.loads(data)
        if event.get("error") and event.get("type", "error") == "error":
            self.error = json.dumps(event["error"])
            self.ended = True
            return
        _READ[self.api](self, event)

    def _done(self) -> None:
        if self.api in (Api.CHAT, Api.COMPLETIONS):
            self.ended = True
            if self.finish is None:
                self.problems.append("[DONE] without a finish reason")
            if self.api is Api.CHAT and self._roles != 1:
                self.problems.append(f"{self._roles} roles")

    def _openai(self, event: dict[str, Any]) -> None:
        self.ids.add(event["id"])
        if usage := event.get("usage"):
            self.usage = (usage["prompt_tokens"], usage["completion_tokens"])
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            said = delta.get("content") or choice.get("text") or ""
            if not said and not delta.get("role") and not choice.get("finish_reason"):
                self.within_character.append(len(self.raw))
            if said and self.finish:
                self.problems.append("text behind the finish reason")
            self._roles += bool(delta.get("role"))
            self.text += said
            self.token_ids += choice.get("token_ids") or []
            if delta.get("tool_calls"):
                self.text += json.dumps(delta["tool_calls"])
            if choice.get("finish_reason"):
                self.finish, self.stop_reason = choice["finish_reason"], choice.get("stop_reason")

    def _responses(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if event.get("sequence_number", self._sequence) != self._sequence:  # llama.cpp does not number events
            self.problems.append(f"{kind} has number {event['sequence_number']}, not {self._sequence}")
        self._sequence += 1
        if kind == "response.output_text.delta":
            self.text += event["delta"]
        elif kind == "response.output_text.done" and event["text"] != self.text:
            self.problems.append("output_text.done has another text than its deltas")
        elif kind == "response.failed":
            self.error, self.ended = json.dumps(event["response"].get("error")), True
        response = event.get("response")
        if response is None:
            return
        self.ids.add(response["id"])
        if kind in ("response.completed", "response.incomplete"):
            self.ended = True
            self.finish = response["status"]
            self.stop_reason = (response.get("incomplete_details") or {}).get("reason")
            usage = response["usage"]
            self.usage = (usage["input_tokens"], usage["output_tokens"])
            said = "".join(
                part.get("text") or ""
                for item in response["output"]
                if item["type"] == "message"
                for part in item["content"]
            )
            if said != self.text:
                self.problems.append(f"{kind} has another text than the deltas")

    def _messages(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "message_start":
            self.ids.add(event["message"]["id"])
            self._roles += 1
            self.usage = (_prompt_tokens(event["message"]["usage"]) or 0, 0)
        elif kind == "content_block_start":
            if self._open:
                self.problems.append("a block begins within another")
            self._open = True
        elif kind == "content_block_delta":
            if not self._open:
                self.problems.append("a delta outside of a block")
            self.text += event["delta"].get("text") or ""
        elif kind == "content_block_stop":
            self._open = False
        elif kind == "message_delta":
            self.finish = event["delta"]["stop_reason"]
            self.stop_reason = event["delta"].get("stop_sequence")
            usage = event["usage"]
            prompt = _prompt_tokens(usage) or (self.usage or (0, 0))[0]
            self.usage = (prompt, usage["output_tokens"])
        elif kind == "message_stop":
            self.ended = True
            if self._open or self._roles != 1:
                self.problems.append(f"the message ends with {self._roles} starts, block open: {self._open}")

    def differences(self, undisturbed: Received) -> list[str]:
        """Return in what the text, its end or the counts differ from those of the undisturbed stream."""
        found = list(self.problems)
        if self.text != undisturbed.text:
            at = common_length(self.text, undisturbed.text)
            found.append(
                f"text differs from character {at} on ({len(self.text)} characters, {len(undisturbed.text)} undisturbed)"
            )
        for name in ("finish", "stop_reason", "usage"):
            mine, its = getattr(self, name), getattr(undisturbed, name)
            if mine != its:
                found.append(f"{name} {mine}, undisturbed {its}")
        if len(self.ids) > 1:
            found.append(f"{len(self.ids)} ids")
        return found


def _prompt_tokens(usage: Mapping[str, int]) -> int | None:
    """Return how long the prompt is. The API counts what was in the cache by itself, which depends on the replica."""
    fresh = usage.get("input_tokens")
    return None if fresh is None else fresh + (usage.get("cache_read_input_tokens") or 0)


_READ: Mapping[Api, Callable[[Received, dict[str, Any]], None]] = {
    Api.CHAT: Received._openai,
    Api.COMPLETIONS: Received._openai,
    Api.RESPONSES: Received._responses,
    Api.MESSAGES: Received._messages,
}


def common_length(one: str, other: str) -> int:
    """Return how many characters two texts have in common from their beginnings."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
