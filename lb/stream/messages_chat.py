"""A text under way in a stream of `/v1/messages`, continued as a chat. Pure.

No engine continues a message of Anthropic's API: vLLM takes a last message of the assistant for a turn that is over. But
vLLM answers this API by a chat of its own making, and chats can be continued. So `chat_request` makes the same chat of the
request, as vLLM 0.32 does, with the text so far as its open last message, and `TextBlockMerger` turns the chunks of the
response into the events of the API. What the chat cannot carry, as images, is not continued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from lb.http.sse import ABORT
from lb.stream.resume_request import ResumeRequest
from lb.stream.resume_rules import NotResumable, Reason, settled, whole
from lb.stream.transcript import StreamProgress
from lb.stream.typed_stream import EventShape, TypedMerger, written

_NOTHING: Mapping[str, Any] = {}
_OPEN_TEXT = ("message_start", "content_block_start", "content_block_delta")
_SAME = ("model", "temperature", "top_p", "top_k", "cache_salt", "chat_template_kwargs", "vllm_xargs")
_KNOWN = frozenset(
    {
        *_SAME,
        "messages",
        "system",
        "max_tokens",
        "stop_sequences",
        "stream",
        "tools",
        "tool_choice",
        "metadata",
    }
)
_PROMPT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_NOT_FOR_MODELS = (
    "x-anthropic-billing-header"  # a line of Claude Code's that vLLM leaves out: it differs each time
)


def open_text(sofar: StreamProgress) -> str | None:
    """Return the text of the block under way; None if the message is at another place, or has other blocks before it."""
    kinds = tuple(step.event["type"] for step in sofar.steps)
    if kinds != _OPEN_TEXT or sofar.steps[1].event["content_block"].get("type") != "text":
        return None
    text = sofar.steps[2].text or ""
    return text if settled(text) else None


def chat_request(request: Mapping[str, Any], sofar: StreamProgress, text: str) -> dict[str, Any]:
    """Return the chat that continues the text. Raises NotResumable.

    White space at the end of the text stays back: chat templates may trim it. The engine says it again. The text may have had
    more tokens than events, so this limit is too high by that; the merger ends the message where the engine's counts do.
    """
    if any(value is not None and name not in _KNOWN for name, value in request.items()):
        raise NotResumable(Reason.STRANGE)
    if request.get("stop_sequences"):
        raise NotResumable(Reason.SAMPLED)  # one that begins in front of the seam would not be found
    choice = (request.get("tool_choice") or _NOTHING).get("type", "auto")
    if choice not in ("auto", "none"):
        raise NotResumable(Reason.FORCED_TOOL)
    limit = whole(request.get("max_tokens")) or 0
    if limit <= sofar.tokens:
        raise NotResumable(Reason.ENDED)
    body = {name: request[name] for name in _SAME if request.get(name) is not None}
    try:
        messages = [*_system(request.get("system")), *_messages(request["messages"])]
    except (AttributeError, KeyError, TypeError) as error:
        raise NotResumable(Reason.STRANGE) from error
    if messages and messages[-1]["role"] == "assistant":
        raise NotResumable(Reason.LAST_MESSAGE)
    if tools := request.get("tools"):
        body["tools"] = [_tool(tool) for tool in tools]
        body["tool_choice"] = choice
        if (request.get("tool_choice") or _NOTHING).get("disable_parallel_tool_use"):
            body["parallel_tool_calls"] = False
    body["messages"] = [*messages, {"role": "assistant", "content": settled(text)}]
    body.update(add_generation_prompt=False, continue_final_message=True)
    body.update(max_tokens=limit - sofar.tokens, max_completion_tokens=limit - sofar.tokens)
    body.update(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    return body


def _system(system: Any) -> list[dict[str, Any]]:
    parts = [system] if isinstance(system, str) else [_text(block) for block in system or ()]
    text = "".join(part for part in parts if not part.startswith(_NOT_FOR_MODELS))
    return [{"role": "system", "content": text}] if text else []


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role not in ("user", "assistant"):
            raise TypeError(role)
        if isinstance(content, str):
            made.append({"role": role, "content": content})
            continue
        texts, calls = [], []
        for block in content:
            if block["type"] == "tool_result":
                result = block.get("content") or ""
                text = result if isinstance(result, str) else "\n".join(map(_text, result))
                made.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
            elif block["type"] == "tool_use":
                function = {"name": block["name"], "arguments": orjson.dumps(block["input"]).decode()}
                calls.append({"id": block["id"], "type": "function", "function": function})
            elif text := _text(block):
                texts.append({"type": "text", "text": text})
        made_one: dict[str, Any] = {"role": role}
        if calls:
            made_one["tool_calls"] = calls
        if texts:
            made_one["content"] = texts[0]["text"] if len(texts) == 1 else texts
        if texts or calls:
            made.append(made_one)
    return made


def _text(block: Mapping[str, Any]) -> str:
    if block["type"] != "text" or not isinstance(block["text"], str):
        raise TypeError(block["type"])  # an image, or what the model has thought
    return block["text"]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", **(tool.get("input_schema") or _NOTHING)}
    function = {"name": tool.get("name"), "parameters": schema}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def gives_up(chunk: Mapping[str, Any]) -> bool:
    """Return True for a chunk in which the engine gives a chat up."""
    return "error" in chunk or any(one.get("finish_reason") == ABORT for one in chunk.get("choices") or ())


def _message(chunk: Mapping[str, Any]) -> str:
    error = chunk.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else "The replica has given the request up."


class TextBlockMerger(TypedMerger):
    """The chat that continues a text, as the rest of the client's stream."""

    def __init__(
        self,
        shape: EventShape,
        request: Mapping[str, Any],
        before: StreamProgress,
        resumption: ResumeRequest,
        limit_bytes: int,
    ) -> None:
        """`request` is the client's own, `before` what it has received; see `open_text`."""
        super().__init__(shape, before, limit_bytes, resumption.inexact)
        text = open_text(before) or ""
        self._expected = text[len(settled(text)) :]  # what stayed back
        self._limit_tokens = whole(request.get("max_tokens")) or 0
        self._tokens_before = before.tokens
        start = before.steps[0].event.get("message") or _NOTHING
        self._usage: dict[str, Any] = dict(start.get("usage") or _NOTHING)
        self._prompt_tokens = sum(whole(self._usage.get(name)) or 0 for name in _PROMPT)
        self._index = 0
        self._block = "text"  # the type of the block that is open; empty if none is
        self._has_called = False
        self._finish: str | None = None

    def _passed(self, data: bytes) -> bytes:
        if data == b"[DONE]":
            events = self._ending() if self._finish else None
        else:
            try:
                events = self._events(orjson.loads(data))
            except (orjson.JSONDecodeError, AttributeError, IndexError, KeyError, TypeError):
                events = None
        if events is None:
            self.refused = self.refused or Reason.MISMATCH
            return b""
        return b"".join([self._sent(event) for event in events])

    def _events(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Return what a chunk of the chat means in this API; None if the stream cannot go on with it."""
        if gives_up(chunk):
            self.error = written(
                {"type": "error", "error": {"type": "api_error", "message": _message(chunk)}}
            )
            return []
        if isinstance(usage := chunk.get("usage"), dict):
            # What the prompt has more than the client's is the text; events can only have had more tokens than one.
            before = max(self._tokens_before, usage["prompt_tokens"] - self._prompt_tokens)
            self._usage["output_tokens"] = before + usage["completion_tokens"]
        if not chunk["choices"]:
            return []
        events = self._content(chunk["choices"][0])
        if events is not None and self._usage.get("output_tokens", 0) >= self._limit_tokens:
            self._finish = self._finish or "length"
            ending = self._ending()
            return None if ending is None else [*events, *ending]
        return events

    def _content(self, choice: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        delta = choice["delta"]
        if delta.get("reasoning") or delta.get("reasoning_content"):
            self.refused = Reason.REASONING
            return None
        self._finish = choice.get("finish_reason") or self._finish
        events: list[dict[str, Any]] = []
        if text := delta.get("content"):
            known = min(len(self._expected), len(text))
            if self._expected[:known] != text[:known]:
                return None
            self._expected = self._expected[known:]
            if text[known:]:
                if self._block != "text":
                    events += self._open({"type": "text", "text": ""})
                events.append(self._delta({"type": "text_delta", "text": text[known:]}))
        for call in delta.get("tool_calls") or ():
            if self._expected:
                return None
            function = call.get("function") or _NOTHING
            if call.get("id") and function.get("name"):
                self._has_called = True
                block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
                events += self._open(block)
            if arguments := function.get("arguments"):
                events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the end of the block that is open, and the start of another one."""
        closing = self._closing()
        self._block = block["type"]
        return [*closing, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _closing(self) -> list[dict[str, Any]]:
        self._block = ""
        self._index += 1
        return [{"type": "content_block_stop", "index": self._index - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _ending(self) -> list[dict[str, Any]] | None:
        if self._expected:
            return None
        reason = "end_turn"
        if self._finish == "length":
            reason = "max_tokens"
        elif self._finish == "tool_calls" or self._has_called:
            reason = "tool_use"
        delta = {"stop_reason": reason, "stop_sequence": None}
        stopped = {"type": "message_delta", "delta": delta, "usage": self._usage}
        return [*self._closing(), stopped, {"type": "message_stop"}]

    def _sent(self, event: dict[str, Any]) -> bytes:
        data = written(event)
        self._tally.note(event, len(data))
        return data
