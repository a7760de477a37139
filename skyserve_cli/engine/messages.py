"""The JSON of Anthropic's Messages API: one block of plain text, whole or as a stream of typed events.

    message_start  content_block_start      before the first token; the tokens of the prompt
    content_block_delta                     per step
    content_block_stop  message_delta       why it stopped, and the usage
    message_stop

As with vLLM, a last message of the assistant is a turn that is over: the model begins another one.
"""

from __future__ import annotations

from typing import Any

import orjson

from skyserve_cli.engine.api import Generation
from skyserve_cli.engine.errors import ApiError
from skyserve_cli.engine.model import FinishReason
from skyserve_cli.engine.replies import Delta, ReplyTranscript


class MessageReply:
    """One message as it grows. `whole` or the stream's methods in order: opening, first_chunk, chunk, last_chunks."""

    def __init__(self, id_suffix: str, generation: Generation) -> None:
        self.transcripts = (ReplyTranscript(generation),)
        self._id = f"msg_{id_suffix}"
        self._generation = generation

    def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        text = self._transcript.take().text
        return self._message([{"type": "text", "text": text}]) | self._stop() | {"usage": self._usage()}

    def opening(self) -> bytes:
        """Return the events before any token."""
        none = {"stop_reason": None, "stop_sequence": None}
        prompt = {"input_tokens": len(self._generation.prompts[0]), "output_tokens": 0}
        return _event("message_start", message=self._message([]) | none | {"usage": prompt})

    def first_chunk(self, _: int) -> bytes:
        """Return what precedes the first token."""
        return _event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def chunk(self, _: int, delta: Delta) -> bytes:
        """Return the next part of the text, or nothing while all of it is held back."""
        if not delta.text:
            return b""
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text})

    def last_chunks(self) -> bytes:
        """Return why the message ends, and the end of the stream."""
        return b"".join(
            (
                _event("content_block_stop", index=0),
                _event("message_delta", delta=self._stop(), usage=self._usage()),
                _event("message_stop"),
            )
        )

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that cannot go on."""
        return _event("error", error={"type": "api_error", "message": error.message})

    @property
    def _transcript(self) -> ReplyTranscript:
        return self.transcripts[0]

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        model = self._generation.model
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": model,
        }

    def _stop(self) -> dict[str, Any]:
        matched = self._transcript.stop_reason
        if self._transcript.finish is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        return {"input_tokens": len(self._generation.prompts[0]), "output_tokens": self._transcript.tokens}


def _event(kind: str, **fields: Any) -> bytes:
    data = orjson.dumps({"type": kind} | fields)
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
