"""Streams of `/v1/responses`: what their events mean, and how one that broke goes on. Pure.

    response.created  response.in_progress                     the opening, which repeats the request
    response.output_item.added                                 for each item: a message, reasoning, a call of a tool
      response.content_part.added                                for each part of a message
        response.output_text.delta …  response.output_text.done
      response.content_part.done
    response.output_item.done
    response.completed | response.incomplete | response.failed the whole response once more, with its usage

Events are numbered from zero by `sequence_number`. vLLM ends a response that has reached its limit with
`response.completed` as well, with the status `incomplete` in it.

A stream goes on by the same request (`lb.stream.typed_stream`) if its response does not depend on chance. Otherwise a text
that is under way goes on, if it is the first item: vLLM continues a last message whose status is `in_progress`.
`MessageMerger` then makes one message of the two parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lb.config.options import Continue
from lb.engines.kinds import EngineKind
from lb.http.api_paths import RESPONSES
from lb.http.sse import ends_with_done
from lb.stream.dialect import Merger
from lb.stream.first_request import Preparation
from lb.stream.first_request import written as written_body
from lb.stream.resume_request import ResumeMethod, ResumeRequest
from lb.stream.resume_rules import NotResumable, Reason, settled, whole
from lb.stream.token_usage import Tokens
from lb.stream.transcript import StreamProgress
from lb.stream.typed_stream import (
    Key,
    ReplayMerger,
    TypedMerger,
    TypedTally,
    check,
    event_types,
    is_one_delta,
    is_the_same_again,
    is_unsaid,
    parsed,
    with_names,
    written,
)

_OPENING = frozenset({"response.created", "response.in_progress", "response.queued"})
_ENDS = frozenset({"response.completed", "response.incomplete"})
_FAILS = frozenset({"response.failed", "error"})
_ITEM_ADDED, _PART_ADDED = "response.output_item.added", "response.content_part.added"
_TEXT, _TEXT_DONE = "response.output_text.delta", "response.output_text.done"
_PART_DONE, _ITEM_DONE = "response.content_part.done", "response.output_item.done"
_OPEN_TEXT = (_ITEM_ADDED, _PART_ADDED, _TEXT)
_CONTINUES_MESSAGES = frozenset({EngineKind.VLLM, EngineKind.SKYSERVE})
# State that only one engine has.
_STATE = ("previous_response_id", "conversation", "background")
_OWN_TOOLS = frozenset({"function", "custom", "namespace"})  # that the client runs
_SERVER_ERROR = "server_error"
_NOTHING: Mapping[str, Any] = {}


class ResponseEvents:
    """The shape of the events; see `lb.stream.typed_stream.EventShape`."""

    def key(self, event: Mapping[str, Any]) -> Key | None:
        kind = event["type"]
        if not kind.startswith("response."):
            return None
        item, part = event.get("item") or _NOTHING, event.get("part") or _NOTHING
        places = (event.get("output_index"), event.get("content_index"), event.get("summary_index"))
        return (kind, *places, item.get("type"), item.get("name"), part.get("type"))

    def delta(self, event: Mapping[str, Any]) -> str | None:
        delta = event.get("delta") if event["type"].endswith(".delta") else None
        return delta if isinstance(delta, str) else None

    def with_delta(self, event: Mapping[str, Any], text: str) -> dict[str, Any]:
        return {**event, "delta": text, **_cut_logprobs(event, text)}

    def parts(self, event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [event, event.get("item") or _NOTHING, event.get("response") or _NOTHING]

    def renamed(
        self, event: Mapping[str, Any], names: Mapping[str, str], first: Mapping[str, Any]
    ) -> dict[str, Any]:
        signed = with_names(event, names)
        if event.get("item"):
            signed["item"] = with_names(event["item"], names)
        if (response := event.get("response")) and (known := first.get("response")):
            output = [with_names(item, names) for item in response.get("output") or ()]
            same = {field: known[field] for field in ("id", "created_at", "model") if field in known}
            signed["response"] = {**response, **same, "output": output}
        return signed

    def ends(self, event: Mapping[str, Any]) -> bool:
        return event["type"] in _ENDS

    def fails(self, event: Mapping[str, Any]) -> bool:
        return event["type"] in _FAILS

    def usage(self, event: Mapping[str, Any]) -> Tokens | None:
        usage = (event.get("response") or _NOTHING).get("usage") or _NOTHING
        prompt, out = whole(usage.get("input_tokens")), whole(usage.get("output_tokens"))
        return None if prompt is None or out is None else Tokens(prompt, out)


EVENTS = ResponseEvents()


class Responses:
    """The dialect of the API; see `lb.stream.dialect.Dialect`."""

    __slots__ = ()

    @property
    def end_mark(self) -> bytes:
        return b""

    @property
    def gives_up(self) -> tuple[bytes, ...]:
        return (b"event: error\n", b"event: response.failed\n")

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
        silent = is_unsaid(sofar)
        if silent or (is_the_same_again(request, kind) and not sofar.diverged):
            way = ResumeMethod.RESTART if silent else ResumeMethod.REPLAY
            return ResumeRequest(way, RESPONSES, written_body(_again(request, sofar, kind)))
        if mode is Continue.EXACT:
            raise NotResumable(Reason.DIVERGED if sofar.diverged else _under_way(sofar))
        body = written_body(_continued(request, sofar, kind))
        return ResumeRequest(ResumeMethod.TEXT, RESPONSES, body, inexact=Reason.RETOKENIZED)

    def merger(
        self, request: Mapping[str, Any], before: StreamProgress, resumption: ResumeRequest, limit_bytes: int
    ) -> Merger:
        if resumption.way is ResumeMethod.TEXT:
            return MessageMerger(before, resumption, limit_bytes)
        return ReplayMerger(EVENTS, before, failure, limit_bytes)

    def closing(self, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind) -> bytes | None:
        return b"" if sofar.done else None

    def error_event(self, code: str, message: str, sofar: StreamProgress | None) -> bytes:
        return failure(sofar or StreamProgress(), message, code)

    def is_over(self, events: bytes) -> bool:
        # Only the last event has a usage, and it may be longer than what is kept of the end.
        types = event_types(events)
        if ends_with_done(events):
            return True
        return types[-1].decode("latin-1") in _ENDS if types else b'"usage":{"input_tokens":' in events

    def has_finished(self, events: bytes) -> bool:
        return self.is_over(events)

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
        isinstance(tool, dict) and tool.get("type", "function") in _OWN_TOOLS for tool in tools
    ):
        return Reason.ENGINE_TOOLS
    return None


def _again(request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind) -> dict[str, Any]:
    """Return the request once more. vLLM takes the id of the response with it, and stores the response under that if it does."""
    body = dict(request)
    response_id = _opened(sofar).get("id")
    if kind is EngineKind.VLLM and isinstance(response_id, str):
        body["request_id"] = response_id
    return body


def _continued(request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind) -> dict[str, Any]:
    """Return the request that continues the message under way. Raises NotResumable.

    White space at the end of the text stays back: chat templates may trim it. The engine says it again.
    """
    text = open_text(sofar)
    if text is None:
        raise NotResumable(Reason.DIVERGED if sofar.diverged else _under_way(sofar))
    if kind not in _CONTINUES_MESSAGES:
        raise NotResumable(Reason.ENGINE)
    shape = (request.get("text") or _NOTHING).get("format")
    if request.get("structured_outputs") or (shape and shape.get("type") != "text"):
        raise NotResumable(Reason.GRAMMAR)
    if request.get("tool_choice") not in (None, "none", "auto"):
        raise NotResumable(Reason.FORCED_TOOL)
    if request.get("stop"):
        raise NotResumable(Reason.SAMPLED)  # one that begins in front of the seam would not be found
    if request.get("presence_penalty") or request.get("frequency_penalty"):
        raise NotResumable(Reason.PENALTIES)
    if request.get("truncation") not in (None, "disabled"):
        raise NotResumable(Reason.TRUNCATED_PROMPT)
    if request.get("max_output_tokens") is not None:
        raise NotResumable(Reason.UNCOUNTED)  # an event may have several tokens, and no event counts them
    items = request.get("input")
    if isinstance(items, str):
        items = [{"type": "message", "role": "user", "content": items}]
    if not isinstance(items, list) or (items and items[-1].get("status") in ("in_progress", "incomplete")):
        raise NotResumable(Reason.LAST_MESSAGE)
    body = _again(request, sofar, kind)
    part = {"type": "output_text", "text": settled(text), "annotations": []}
    item_id = str(sofar.steps[-1].event.get("item_id") or "")
    open_item = {"type": "message", "role": "assistant", "status": "in_progress", "id": item_id}
    body["input"] = [*items, {**open_item, "content": [part]}]
    return body


def open_text(sofar: StreamProgress) -> str | None:
    """Return the text of the message under way; None if the response is at another place, or has other items before it."""
    steps = [step for step in sofar.steps if step.event["type"] not in _OPENING]
    kinds = tuple(step.event["type"] for step in steps)
    if kinds != _OPEN_TEXT or (steps[0].event.get("item") or _NOTHING).get("type") != "message":
        return None
    text = steps[2].text or ""
    return text if settled(text) else None


def _under_way(sofar: StreamProgress) -> Reason:
    """Return what is under way that no engine takes back."""
    kinds = [str(step.key) for step in sofar.steps]
    if any("reasoning" in kind for kind in kinds):
        return Reason.REASONING
    return Reason.TOOL_CALL if any("_call" in kind for kind in kinds) else Reason.SAMPLED


def failure(sofar: StreamProgress, message: str, code: str = _SERVER_ERROR) -> bytes:
    """Return the event that ends a stream which cannot go on. A response that has failed has one of few codes: no other than ours fits."""
    opened = _opened(sofar)
    if not opened:
        event = {"type": "error", "code": code, "message": message, "param": None}
        return written({**event, "sequence_number": sofar.sequence})
    error = {"code": _SERVER_ERROR, "message": message}
    output = [step.event["item"] for step in sofar.steps if step.event["type"] == _ITEM_DONE]
    response = {**opened, "status": "failed", "error": error, "output": output}
    return written({"type": "response.failed", "sequence_number": sofar.sequence, "response": response})


def _opened(sofar: StreamProgress) -> Mapping[str, Any]:
    """Return the response as the client's first event describes it."""
    response = sofar.steps[0].event.get("response") if sofar.steps else None
    return response if isinstance(response, dict) else _NOTHING


class MessageMerger(TypedMerger):
    """The response that continues a message under way, as the rest of the client's stream."""

    def __init__(self, before: StreamProgress, resumption: ResumeRequest, limit_bytes: int) -> None:
        """`before` is what the client has received; see `open_text`."""
        super().__init__(EVENTS, before, limit_bytes, resumption.inexact)
        text = open_text(before) or ""
        self._text = text
        self._expected = text[len(settled(text)) :]  # what stayed back
        added, part = (
            step.event for step in before.steps if step.event["type"] in (_ITEM_ADDED, _PART_ADDED)
        )
        self._item: Mapping[str, Any] = added.get("item") or _NOTHING
        self._part: Mapping[str, Any] = part.get("part") or _NOTHING
        self._place = {"item_id": self._item.get("id"), "output_index": 0, "content_index": 0}
        self._is_joined = False  # this leg has opened a message of its own
        self._is_closed = False
        self._shift = 0  # of the items behind the message

    def _passed(self, data: bytes) -> bytes:
        event = parsed(data)
        if event is None:
            return b""
        if EVENTS.fails(event):
            self.error = written(event)
            return b""
        try:
            events = self._events(event)
        except (AttributeError, KeyError, TypeError, IndexError):
            self.refused = Reason.MISMATCH
        return b"" if self.refused is not None else b"".join(map(self._sent, events))

    def _events(self, event: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """Return what an event of this leg means to the client."""
        kind = event["type"]
        if kind in _OPENING or not kind.startswith("response."):
            return ()
        if EVENTS.ends(event):
            return [*self._closing(), {**event, "response": self._whole(event["response"])}]
        if kind == _ITEM_ADDED and event["output_index"] == 0:
            self._is_joined = event["item"].get("type") == "message"
            if self._is_joined:
                return ()
            self._shift = 1
        if not self._is_joined or event["output_index"] != 0:
            return [*self._closing(), {**event, "output_index": event["output_index"] + self._shift}]
        if kind == _TEXT:
            more = self._after_expected(event["delta"])
            self._text += more
            return [{**event, **self._place, "delta": more, **_cut_logprobs(event, more)}] if more else ()
        if kind == _ITEM_DONE:
            return self._closing(event["item"].get("status", "completed"))
        if kind in (_PART_ADDED, _TEXT_DONE, _PART_DONE):
            return ()
        return [{**event, **self._place}]  # annotations, for instance

    def _after_expected(self, delta: str) -> str:
        """Return what is new of a delta: it begins with what stayed back."""
        known = min(len(self._expected), len(delta))
        if self._expected[:known] != delta[:known]:
            self.refused = Reason.MISMATCH
        self._expected = self._expected[known:]
        return delta[known:]

    def _closing(self, status: str = "completed") -> list[dict[str, Any]]:
        """Return the end of the message; nothing if it is closed already."""
        if self._is_closed:
            return []
        self._is_closed = True
        if self._expected:
            self.refused = Reason.MISMATCH
        done = {"text": self._text, "logprobs": []}
        return [
            {"type": _TEXT_DONE, "sequence_number": 0, **self._place, **done},
            {"type": _PART_DONE, "sequence_number": 0, **self._place, "part": self._whole_part()},
            {"type": _ITEM_DONE, "sequence_number": 0, "output_index": 0, "item": self._message(status)},
        ]

    def _whole_part(self) -> dict[str, Any]:
        return {**self._part, "text": self._text}

    def _message(self, status: str) -> dict[str, Any]:
        return {**self._item, "status": status, "content": [self._whole_part()]}

    def _whole(self, response: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole response, as if one engine had made it."""
        output = list(response.get("output") or ())
        status = output.pop(0).get("status", "completed") if output and self._is_joined else "completed"
        known = _opened(self._before)
        same = {
            name: known[name] for name in ("id", "created_at", "model", "max_output_tokens") if name in known
        }
        merged = {**response, **same, "output": [self._message(status), *output]}
        if isinstance(usage := response.get("usage"), dict):
            merged["usage"] = self._usage(usage)
        return merged

    def _usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tokens of all legs; those of the prompt without the text that was given back."""
        before = self._before.tokens
        prompt = max(0, (usage.get("input_tokens") or 0) - before)
        out = (usage.get("output_tokens") or 0) + before
        return {**usage, "input_tokens": prompt, "output_tokens": out, "total_tokens": prompt + out}

    def _sent(self, event: dict[str, Any]) -> bytes:
        signed = {**event, "sequence_number": self._tally.sequence}
        data = written(signed)
        self._tally.note(signed, len(data))
        return data


def _cut_logprobs(event: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return the logprobs of the tokens at the end of a delta that make `text`."""
    logprobs = event.get("logprobs")
    if not isinstance(logprobs, list) or not logprobs or len(text) == len(str(event.get("delta"))):
        return {}
    kept: list[Any] = []
    for one in reversed(logprobs):
        if sum(len(str(token.get("token", ""))) for token in kept) >= len(text):
            break
        kept.insert(0, one)
    return {"logprobs": kept}
