"""The JSON of OpenAI's Responses API: one message of plain text, whole or as a stream of typed events.

    response.created  response.in_progress                     when the request is accepted
    response.output_item.added  response.content_part.added    before the first token
    response.output_text.delta                                 per step
    response.output_text.done  response.content_part.done  response.output_item.done
    response.completed | response.incomplete | response.failed

The last event has the usage. A response that reaches its limit is `incomplete`, as with OpenAI. Nothing is stored,
so a response cannot be fetched, deleted or continued by its id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from skyserve_cli.engine.api import Generation
from skyserve_cli.engine.chat import json_text
from skyserve_cli.engine.errors import ApiError
from skyserve_cli.engine.model import FinishReason
from skyserve_cli.engine.replies import Delta, ReplyTranscript

# What a response repeats of its request, and what it says where the request says nothing.
_REPEATED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
}


class ResponseReply:
    """One response as it grows. `whole` or the stream's methods in order: opening, first_chunk, chunk, last_chunks."""

    def __init__(self, id_suffix: str, created: int, generation: Generation, body: Mapping[str, Any]) -> None:
        """`created` is in Unix seconds. Raises BadRequest for a body that cannot be repeated."""
        self.transcripts = (ReplyTranscript(generation),)
        self._id = f"resp_{id_suffix}"
        self._item_id = f"msg_{id_suffix}"
        self._created = created
        self._generation = generation
        self._repeated = {
            name: default if body.get(name) is None else body[name] for name, default in _REPEATED.items()
        }
        json_text(self._repeated, "the body")
        self._text = ""
        self._events = 0

    def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        self._text = self._transcript.take().text
        return self._response(self._status(), usage=True)

    def opening(self) -> bytes:
        """Return the events before any token."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def first_chunk(self, _: int) -> bytes:
        """Return what precedes the first token."""
        item = self._item("in_progress") | {"content": []}
        added = self._event("response.output_item.added", output_index=0, item=item)
        return added + self._part_event("response.content_part.added", part=self._part())

    def chunk(self, _: int, delta: Delta) -> bytes:
        """Return the next part of the text, or nothing while all of it is held back."""
        if not delta.text:
            return b""
        self._text += delta.text
        return self._part_event("response.output_text.delta", delta=delta.text, logprobs=[])

    def last_chunks(self) -> bytes:
        """Return the whole text, and the end of the stream."""
        status = self._status()
        return b"".join(
            (
                self._part_event("response.output_text.done", text=self._text, logprobs=[]),
                self._part_event("response.content_part.done", part=self._part()),
                self._event("response.output_item.done", output_index=0, item=self._item(status)),
                self._event(f"response.{status}", response=self._response(status, usage=True)),
            )
        )

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that cannot go on."""
        failed = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._event("response.failed", response=failed)

    @property
    def _transcript(self) -> ReplyTranscript:
        return self.transcripts[0]

    def _status(self) -> str:
        return "incomplete" if self._transcript.finish is FinishReason.LENGTH else "completed"

    def _response(self, status: str, *, usage: bool = False) -> dict[str, Any]:
        ended = status in ("completed", "incomplete")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._generation.model,
            "output": [self._item(status)] if ended else [],
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": self._usage() if usage else None,
        } | self._repeated

    def _usage(self) -> dict[str, Any]:
        prompt, tokens = len(self._generation.prompts[0]), self._transcript.tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": self._transcript.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + tokens,
        }

    def _item(self, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [self._part()],
        }

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._events} | fields)
        self._events += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
