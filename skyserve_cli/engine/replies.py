"""What clients get back: text per choice, and the JSON of OpenAI's responses and stream chunks.

The shapes are vLLM's, field by field (recorded streams of it are in `tests/unit/data/vllm_chats.json`): `prompt_token_ids` is at the
top of a chat response (first chunk of a stream) and in each choice of a completion (first chunk), `token_ids` in each
choice; both are null unless they are requested. A chat's choice has a `stop_reason` when it is finished, a completion's
always.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from skyserve_cli.engine.api import Generation, Kind
from skyserve_cli.engine.errors import ApiError
from skyserve_cli.engine.model import FinishReason, TokenOutput
from skyserve_cli.engine.style import AS_GENERATED, Style
from skyserve_cli.engine.text import decode


class Delta(NamedTuple):
    """What a client may see now and did not see before."""

    text: str
    token_ids: tuple[int, ...]


class ReplyTranscript:
    """The text of one choice as it grows, watched for stop strings.

    What could still turn out to be the beginning of a stop string is held back. By default whole tokens are: text and
    token ids that were sent always end at the same place, so either can be continued elsewhere. `Style.holds_text` sends
    ids at once and holds back as much text as the longest stop string could need.
    """

    def __init__(self, generation: Generation, style: Style = AS_GENERATED) -> None:
        self.tokens = 0  # seen, the end token included
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None  # what matched, in vLLM's field of that name
        self.cached_tokens = 0
        self._generation = generation
        self._style = style
        self._fresh = 0  # tokens since the last event
        self._held: list[tuple[int | None, str]] = []  # None: text whose ids have been sent

    def feed(self, output: TokenOutput) -> bool:
        """Take one token. True if the client's own stop condition is met: the engine need not go on."""
        if self.finish is not None:  # tokens made before the engine knew that a stop string was met
            return False
        self.tokens += 1
        self._fresh += 1
        self.cached_tokens = output.cached_tokens
        self._held.append((output.token, decode((output.token,), skip_special=True)))
        if self.tokens > self._generation.min_tokens and self._meets_stop(output.token):
            self.finish = FinishReason.STOP
            return output.finish is None
        self.finish = output.finish
        return False

    def take(self) -> Delta:
        """Return everything that can be shown by now; all of it once the choice is finished."""
        if self.finish is None and self._fresh < self._style.tokens_per_event:
            return Delta("", ())
        self._fresh = 0
        if self.finish is None and self._style.holds_text:
            return self._take_ids()
        count = len(self._held) if self.finish is not None else self._certain()
        shown, self._held = self._held[:count], self._held[count:]
        ids = tuple(token for token, _ in shown if token is not None)
        return Delta("".join(text for _, text in shown), ids)

    def _take_ids(self) -> Delta:
        """Return all ids, and the text but for what the longest stop string could need."""
        text = "".join(piece for _, piece in self._held)
        asked = self._generation
        hold = 0 if asked.include_stop else max((len(stop) for stop in asked.stop), default=1) - 1
        shown = text[: max(0, len(text) - hold)]
        ids = tuple(token for token, _ in self._held if token is not None)
        self._held = [(None, text[len(shown) :])]
        return Delta(shown, ids)

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


# What a message of a chat can have beside its text, and never has here.
_NOT_SAID = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))


@dataclass(slots=True)
class Reply:
    """The envelope of one call: its id, its time (Unix seconds) and its choices."""

    id: str
    created: int
    generation: Generation
    transcripts: tuple[ReplyTranscript, ...]
    _begun: set[int] = field(default_factory=set)  # choices that have had an event

    def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        asked = self.generation
        choices = [self._choice(index, transcript) for index, transcript in enumerate(self.transcripts)]
        body = self._envelope("chat.completion" if asked.kind is Kind.CHAT else "text_completion", choices)
        body["usage"] = self.usage()
        if asked.kind is Kind.CHAT:
            body["prompt_token_ids"] = asked.prompts[0] if asked.return_token_ids else None
        return body

    def opening(self) -> bytes:
        """Return the events before any token: nothing."""
        return b""

    def first_chunk(self, index: int) -> bytes:
        """Return what precedes the first token of a choice: the roles of a chat, of all choices at once; else nothing."""
        asked = self.generation
        if asked.kind is not Kind.CHAT or self._begun:
            return b""
        self._begun.update(range(len(self.transcripts)))
        ids = asked.prompts[0] if asked.return_token_ids else None
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            event(
                self._chunk({"index": choice, "delta": delta, "logprobs": None, "finish_reason": None})
                | {"prompt_token_ids": ids, "prompt_text": None}
            )
            for choice in range(len(self.transcripts))
        )

    def chunk(self, index: int, delta: Delta) -> bytes:
        """Return the next part of a choice, or nothing while all of it is held back."""
        asked, transcript = self.generation, self.transcripts[index]
        if not delta.token_ids and transcript.finish is None:
            return b""
        ids = delta.token_ids if asked.return_token_ids else None
        end = {"finish_reason": None} if transcript.finish is None else _ending(transcript)
        choice: dict[str, Any]
        if asked.kind is Kind.CHAT:
            said = {"content": delta.text} if delta.text else {}
            choice = {"index": index, "delta": said, "logprobs": None, **end, "token_ids": ids}
        else:
            first = index not in self._begun
            self._begun.add(index)
            text = (self._echo(index) if first else "") + delta.text
            choice = {"index": index, "text": text, "logprobs": None, **end}
            choice.setdefault("stop_reason")
            tells_prompt = first and (asked.return_token_ids or asked.echo)
            choice |= {"prompt_token_ids": self._prompt(index) if tells_prompt else None, "token_ids": ids}
        return event(self._chunk(choice))

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
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.generation.kind is Kind.CHAT else "text_completion"

    def _choice(self, index: int, transcript: ReplyTranscript) -> dict[str, Any]:
        asked = self.generation
        delta = transcript.take()
        ids = delta.token_ids if asked.return_token_ids else None
        end = {"logprobs": None, **_ending(transcript), "token_ids": ids}
        if asked.kind is Kind.CHAT:
            message = {"role": "assistant", "content": delta.text, **_NOT_SAID}
            return {"index": index, "message": message, **end}
        prompt = self._prompt(index) if asked.return_token_ids else None
        return {"index": index, "text": self._echo(index) + delta.text, **end, "prompt_token_ids": prompt}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._envelope(self._chunk_object, [choice])
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
    assert transcript.finish is not None  # noqa: S101 (for the type checker)
    return {"finish_reason": transcript.finish.value, "stop_reason": transcript.stop_reason}
