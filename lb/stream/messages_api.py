"""Streams of `/v1/messages`, Anthropic's API: what their events mean, and how one that broke goes on. Pure.

    message_start                                        the message without content, and the tokens of the prompt
    content_block_start                                  for each block: text, thinking, a use of a tool
      content_block_delta …
    content_block_stop
    message_delta                                        why it stopped, and the usage
    message_stop

`ping` events may occur anywhere, and `error` ends a stream that fails. Events have no numbers; blocks have an `index`.

A stream goes on by the same request (`lb.stream.typed_stream`) if its response does not depend on chance. Otherwise a text
that is under way goes on, if it is the first block, as the chat that vLLM makes of the request (`lb.stream.messages_chat`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lb.config.options import Continue
from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT, MESSAGES
from lb.http.sse import ends_with_done
from lb.stream.dialect import Merger
from lb.stream.first_request import Preparation
from lb.stream.first_request import written as written_body
from lb.stream.messages_chat import TextBlockMerger, chat_request, open_text
from lb.stream.resume_request import ResumeMethod, ResumeRequest
from lb.stream.resume_rules import NotResumable, Reason, whole
from lb.stream.token_usage import Tokens
from lb.stream.transcript import StreamProgress
from lb.stream.typed_stream import (
    Key,
    ReplayMerger,
    TypedTally,
    check,
    event_types,
    is_one_delta,
    is_the_same_again,
    is_unsaid,
    with_names,
    written,
)

_DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
}  # a signature is another each time
_STATE = ("container", "mcp_servers")
_CLIENT_TOOLS = ("custom", "bash_", "text_editor_", "computer_", "memory_")  # the rest run on the server
_ANSWERS_BY_CHATS = frozenset({EngineKind.VLLM, EngineKind.SKYSERVE})
_NOTHING: Mapping[str, Any] = {}
_STOP = written({"type": "message_stop"})


class MessageEvents:
    """The shape of the events; see `lb.stream.typed_stream.EventShape`."""

    def key(self, event: Mapping[str, Any]) -> Key | None:
        kind = event["type"]
        if kind == "ping":
            return None
        block, delta = event.get("content_block") or _NOTHING, event.get("delta") or _NOTHING
        return (kind, event.get("index"), block.get("type"), block.get("name"), delta.get("type"))

    def delta(self, event: Mapping[str, Any]) -> str | None:
        delta = event.get("delta") or _NOTHING
        text = delta.get(_DELTAS.get(delta.get("type", ""), ""))
        return text if event["type"] == "content_block_delta" and isinstance(text, str) else None

    def with_delta(self, event: Mapping[str, Any], text: str) -> dict[str, Any]:
        delta = event["delta"]
        return {**event, "delta": {**delta, _DELTAS[delta["type"]]: text}}

    def parts(self, event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [event.get("content_block") or _NOTHING]

    def renamed(
        self, event: Mapping[str, Any], names: Mapping[str, str], first: Mapping[str, Any]
    ) -> dict[str, Any]:
        block = event.get("content_block")
        return {**event, "content_block": with_names(block, names)} if block else dict(event)

    def ends(self, event: Mapping[str, Any]) -> bool:
        return bool(event["type"] == "message_stop")

    def fails(self, event: Mapping[str, Any]) -> bool:
        return bool(event["type"] == "error")

    def usage(self, event: Mapping[str, Any]) -> Tokens | None:
        usage = event.get("usage") or _NOTHING
        prompt, out = whole(usage.get("input_tokens")), whole(usage.get("output_tokens"))
        return Tokens(prompt or 0, out) if event["type"] == "message_delta" and out is not None else None


EVENTS = MessageEvents()


class Messages:
    """The dialect of the API; see `lb.stream.dialect.Dialect`."""

    __slots__ = ()

    @property
    def end_mark(self) -> bytes:
        return _STOP

    @property
    def gives_up(self) -> tuple[bytes, ...]:
        return (b"event: error\n",)

    def refusal(self, request: Mapping[str, Any]) -> Reason | None:
        return _refusal(request)

    def prepare(self, request: Mapping[str, Any], kind: EngineKind, mode: Continue) -> Preparation:
        return Preparation(_NOTHING, refused=Reason.OFF if mode is Continue.OFF else _refusal(request))

    def tally(self) -> TypedTally:
        return TypedTally(EVENTS)

    def resume(
        self, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind, mode: Continue
    ) -> ResumeRequest:
        check(sofar, _refusal(request), mode)
        if is_unsaid(sofar):
            return ResumeRequest(ResumeMethod.RESTART, MESSAGES, written_body(request))
        if is_the_same_again(request, kind) and not sofar.diverged:
            return ResumeRequest(ResumeMethod.REPLAY, MESSAGES, written_body(request))
        text = open_text(sofar)
        if text is None:
            raise NotResumable(Reason.DIVERGED if sofar.diverged else _under_way(sofar))
        if kind not in _ANSWERS_BY_CHATS:
            raise NotResumable(Reason.ENGINE)
        if mode is Continue.EXACT:
            raise NotResumable(Reason.DIVERGED if sofar.diverged else Reason.SAMPLED)
        body = written_body(chat_request(request, sofar, text))
        return ResumeRequest(ResumeMethod.TEXT, CHAT, body, inexact=Reason.RETOKENIZED)

    def merger(
        self, request: Mapping[str, Any], before: StreamProgress, resumption: ResumeRequest, limit_bytes: int
    ) -> Merger:
        if resumption.way is ResumeMethod.TEXT:
            return TextBlockMerger(EVENTS, request, before, resumption, limit_bytes)
        return ReplayMerger(EVENTS, before, failure, limit_bytes)

    def closing(self, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind) -> bytes | None:
        if sofar.done:
            return b""
        last = sofar.steps[-1].event if sofar.steps else _NOTHING
        stopped = last.get("type") == "message_delta" and (last.get("delta") or _NOTHING).get("stop_reason")
        return _STOP if stopped else None

    def error_event(self, code: str, message: str, sofar: StreamProgress | None) -> bytes:
        return failure(sofar or StreamProgress(), message)

    def is_over(self, events: bytes) -> bool:
        types = event_types(events)
        return (bool(types) and types[-1] == b"message_stop") or ends_with_done(events)

    def has_finished(self, events: bytes) -> bool:
        return b"message_delta" in event_types(events)

    def may_pass(self, data: bytes) -> bool:
        return is_one_delta(data)


def _refusal(request: Mapping[str, Any]) -> Reason | None:
    """Return why a stream with this request is never sent to another target; None if it may be."""
    if any(request.get(field) for field in _STATE):
        return Reason.ENGINE_STATE
    if request.get("kv_transfer_params") or request.get("ec_transfer_params"):
        return Reason.KV_TRANSFER
    tools = request.get("tools")
    if isinstance(tools, list) and not all(
        isinstance(tool, dict) and str(tool.get("type") or "custom").startswith(_CLIENT_TOOLS)
        for tool in tools
    ):
        return Reason.ENGINE_TOOLS
    return None


def _under_way(sofar: StreamProgress) -> Reason:
    """Return what is under way that no engine takes back."""
    blocks = {step.key[2] for step in sofar.steps}
    if "tool_use" in blocks:
        return Reason.TOOL_CALL
    return Reason.REASONING if "thinking" in blocks else Reason.SAMPLED


def failure(sofar: StreamProgress, message: str) -> bytes:
    """Return the event that ends a stream which cannot go on."""
    return written({"type": "error", "error": {"type": "api_error", "message": message}})
