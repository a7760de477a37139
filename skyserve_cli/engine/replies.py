"""What clients get back: text per choice, and the JSON of OpenAI's responses and stream chunks.

Token ids come in vLLM's shape: `prompt_token_ids` at the top of a chat response (first chunk of a stream) and in
each choice of a completion, `token_ids` in each choice (per delta in a stream).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from skyserve_cli.engine.api import Generation, Kind
from skyserve_cli.engine.errors import ApiError
from skyserve_cli.engine.model import FinishReason, TokenOutput
from skyserve_cli.engine.text import decode


class Delta(NamedTuple):
    """What a client may see now and did not see before."""

    text: str
    token_ids: tuple[int, ...]


class ReplyTranscript:
    """The text of one choice as it grows, watched for stop strings.

    What could still turn out to be the beginning of a stop string is held back, in whole tokens: text and
    token ids that were sent always end at the same place, so either can be continued elsewhere.
    """

    def __init__(self, generation: Generation) -> None:
        self.tokens = 0  # seen, the end token included
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None  # what matched, in vLLM's field of that name
        self.cached_tokens = 0
        self._generation = generation
        self._held: list[tuple[int, str]] = []

    def feed(self, output: TokenOutput) -> bool:
        """Take one token. True if the client's own stop condition is met: the engine need not go on."""
        if self.finish is not None:  # tokens made before the engine knew that a stop string was met
            return False
        self.tokens += 1
        self.cached_tokens = output.cached_tokens
        self._held.append((output.token, decode((output.token,), skip_special=True)))
        if self.tokens > self._generation.min_tokens and self._meets_stop(output.token):
            self.finish = FinishReason.STOP
            return output.finish is None
        self.finish = output.finish
        return False

    def take(self) -> Delta:
        """Return everything that can be shown by now; all of it once the choice is finished."""
        count = len(self._held) if self.finish is not None else self._certain()
        shown, self._held = self._held[:count], self._held[count:]
        return Delta("".join(text for _, text in shown), tuple(token for token, _ in shown))

    def _meets_stop(self, token: int) -> bool:
        if token in self._generation.stop_token_ids:
            self.stop_reason = token
            if not self._generation.include_stop:
                self._held[-1] = (token, "")
            return True
        text = "".join(piece for _, piece in self._held)
        # A match must end in this token: one that `min_tokens` has let pass stays passed, whether or not it has been
        # taken by now, so that the response does not depend on when it is read.
        before = len(text) - len(self._held[-1][1])
        found = [
            (at, stop)
            for stop in self._generation.stop
            if (at := text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if not found:
            return False
        at, self.stop_reason = min(found)
        keep = text[: at + len(self.stop_reason)] if self._generation.include_stop else text[:at]
        # The ids stay whole (they were generated), the text ends where the stop string says.
        self._held = [(token, "") for token, _ in self._held]
        self._held[0] = (self._held[0][0], keep)
        return True

    def _certain(self) -> int:
        """Return how many held tokens cannot be part of a stop string."""
        stops = self._generation.stop
        if not stops:
            return len(self._held)
        text = "".join(piece for _, piece in self._held)
        longest = min(len(text), max(map(len, stops)) - 1)
        open_from = next(
            (
                len(text) - length
                for length in range(longest, 0, -1)
                if any(stop.startswith(text[-length:]) for stop in stops)
            ),
            len(text),
        )
        end = 0
        for count, (_, piece) in enumerate(self._held):
            end += len(piece)
            if end > open_from:
                return count
        return len(self._held)


@dataclass(frozen=True, slots=True)
class Reply:
    """The envelope of one call: its id, its time (Unix seconds) and its choices."""

    id: str
    created: int
    generation: Generation
    transcripts: tuple[ReplyTranscript, ...]

    def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        asked = self.generation
        choices = [self._choice(index, transcript) for index, transcript in enumerate(self.transcripts)]
        body = self._envelope("chat.completion" if asked.kind is Kind.CHAT else "text_completion", choices)
        if asked.return_token_ids and asked.kind is Kind.CHAT:
            body["prompt_token_ids"] = asked.prompts[0]
        return body | {"usage": self.usage()}

    def opening(self) -> bytes:
        """Return the events before any token: nothing."""
        return b""

    def first_chunk(self, index: int) -> bytes:
        """Return what precedes the first token of a choice: a chat's role, a completion's echo; else nothing."""
        asked = self.generation
        if asked.kind is Kind.CHAT:
            choice: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
            chunk = self._chunk(index, choice)
            if asked.return_token_ids:
                chunk["prompt_token_ids"] = asked.prompts[0]
            return event(chunk)
        if not asked.echo and not asked.return_token_ids:
            return b""
        choice = {"text": self._echo(index)}
        if asked.return_token_ids:
            choice |= {"prompt_token_ids": self._prompt(index), "token_ids": []}
        return event(self._chunk(index, choice))

    def chunk(self, index: int, delta: Delta) -> bytes:
        """Return the next part of a choice, or nothing while all of it is held back."""
        asked, transcript = self.generation, self.transcripts[index]
        if not delta.token_ids and transcript.finish is None:
            return b""
        choice: dict[str, Any] = (
            {"delta": {"content": delta.text}} if asked.kind is Kind.CHAT else {"text": delta.text}
        )
        if asked.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return event(self._chunk(index, choice, transcript))

    def last_chunks(self) -> bytes:
        """Return the usage, if requested, and the end of the stream."""
        usage = b""
        if self.generation.include_usage:
            usage = event(self._envelope(self._chunk_object, []) | {"usage": self.usage()})
        return usage + b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that cannot go on."""
        return event(error.body())

    def usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, for any `n`."""
        prompt = sum(map(len, self.generation.prompts))
        completion = sum(transcript.tokens for transcript in self.transcripts)
        cached = sum(transcript.cached_tokens for transcript in self.transcripts[:: self.generation.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.generation.kind is Kind.CHAT else "text_completion"

    def _choice(self, index: int, transcript: ReplyTranscript) -> dict[str, Any]:
        asked = self.generation
        delta = transcript.take()
        choice: dict[str, Any] = {"index": index, "logprobs": None} | _ending(transcript)
        if asked.kind is Kind.CHAT:
            choice["message"] = {
                "role": "assistant",
                "content": delta.text,
                "refusal": None,
                "tool_calls": [],
            }
        else:
            choice["text"] = self._echo(index) + delta.text
        if asked.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if asked.kind is Kind.COMPLETION:
                choice["prompt_token_ids"] = self._prompt(index)
        return choice

    def _chunk(
        self, index: int, choice: dict[str, Any], ending: ReplyTranscript | None = None
    ) -> dict[str, Any]:
        end = _ending(ending) if ending is not None else {"finish_reason": None}
        chunk = self._envelope(self._chunk_object, [{"index": index, "logprobs": None} | choice | end])
        if self.generation.continuous_usage:
            chunk["usage"] = self.usage()
        return chunk

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.generation.model,
            "choices": choices,
        }

    def _prompt(self, index: int) -> tuple[int, ...]:
        return self.generation.prompts[index // self.generation.n]

    def _echo(self, index: int) -> str:
        return decode(self._prompt(index)) if self.generation.echo else ""


def event(chunk: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _ending(transcript: ReplyTranscript) -> dict[str, Any]:
    if transcript.finish is None:
        return {"finish_reason": None}
    return {"finish_reason": transcript.finish.value, "stop_reason": transcript.stop_reason}
