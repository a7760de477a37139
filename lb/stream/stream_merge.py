"""One stream for the client, made of the responses of several targets. Pure.

    stripper   removes from an engine's events what we requested and the client did not
    StreamMerger   turns the response to a `lb.stream.resume_request.ResumeRequest` into the rest of the stream that broke
    closing    ends a stream whose response was complete when its target was lost

What the client sees has one `id`, `created`, `model` and `system_fingerprint`, the role once, one `finish_reason`, one
`[DONE]`, and a `usage` as if one engine had done it all: the prompt of the first request, the tokens of all legs.

The invariant of a seam: **the client reads a prefix of what one engine would have said.** So the prompt ids that the engine reports
are those it was given, the leg begins with the text that it has to repeat, no leg makes more tokens than were left, and the
text that was sent is the text of the journal. A leg that breaks it is `refused`, and the stream ends as an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT
from lb.http.sse import ABORT, DONE, EventReader, error_event, event
from lb.stream.first_request import Strip
from lb.stream.resume_request import (
    ResumeMethod,
    ResumeRequest,
    holds_text,
    is_counted,
    left,
    stop_length,
)
from lb.stream.resume_rules import NEVER, Reason, refusal, whole
from lb.stream.token_usage import Tokens
from lb.stream.transcript import CALLS, SPEECH, ProgressTally, StreamProgress

Change = Callable[[dict[str, Any]], bool]  # of a parsed chunk, in place; False: leave it out

# Within a text a quotation mark is escaped, so these bytes are always a key and its value.
_IDS = re.compile(rb',"(?:prompt_)?token_ids":(?:\[[0-9,]*\]|null)')
_USAGE = re.compile(rb',"usage":\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}')
_ID_KEYS = ("token_ids", "prompt_token_ids")
_TELLING = ("finish_reason", *_ID_KEYS)
_CHAT_CHUNK = "chat.completion.chunk"
_TEXT_CHUNK = "text_completion"


def stripper(strip: Strip) -> Callable[[bytes], bytes] | None:
    """Return what takes whole events as they came and returns them as the client may see them; None if that is the same.

    The transcript keeps them as they came. `lb/proxy/_fast_path.c` does the same for events of the regular shape.
    """
    return _STRIPPERS[strip]


def _without_ids(events: bytes) -> bytes:
    if b'token_ids"' not in events:
        return events
    stripped = _IDS.sub(b"", events)
    return stripped if b'token_ids"' not in stripped else _rewritten(stripped, _drop_ids)


def _without_counts(events: bytes) -> bytes:
    return _without_usage(events, _drop_counts)


def _without_usage(events: bytes, drop: Change | None = None) -> bytes:
    if b'"usage"' not in events:
        return events
    if b'"choices":[]' not in events:
        stripped = _USAGE.sub(b',"usage":null', events)
        if b'"usage":{' not in stripped and b'"usage": ' not in stripped:
            return stripped
    return _rewritten(events, drop or _drop_usage)


def _rewritten(events: bytes, change: Change) -> bytes:
    """Return the slow way: for events without choices, and for JSON with spaces in it or keys in another order."""
    lines = events.split(b"\n")
    for at, line in enumerate(lines):
        if not line.startswith(b"data:"):
            continue
        try:
            chunk = orjson.loads(line[5:])
        except orjson.JSONDecodeError:  # the end mark, or part of an event
            continue
        if isinstance(chunk, dict):
            lines[at] = b"data: " + orjson.dumps(chunk) if change(chunk) else b""
    left_over = b"\n".join(lines)
    return left_over if left_over.strip() else b""


def _drop_ids(chunk: dict[str, Any]) -> bool:
    for part in (chunk, *(chunk.get("choices") or ())):
        for key in _ID_KEYS:
            part.pop(key, None)
    return True


def _drop_counts(chunk: dict[str, Any]) -> bool:
    """Return the usage that comes with something else."""
    if chunk.get("choices") and chunk.get("usage"):
        chunk["usage"] = None
    return True


def _drop_usage(chunk: dict[str, Any]) -> bool:
    """Remove all of it; False if nothing else is left."""
    return _drop_counts(chunk) and bool(chunk.get("choices") or not chunk.get("usage"))


_STRIPPERS: Mapping[Strip, Callable[[bytes], bytes] | None] = {
    Strip.NOTHING: None,
    Strip.IDS: _without_ids,
    Strip.COUNTS: _without_counts,
    Strip.USAGE: _without_usage,
}
_DROPS: Mapping[Strip, Change] = {Strip.COUNTS: _drop_counts, Strip.USAGE: _drop_usage}


class StreamMerger:
    """One further leg of a stream.

    `feed` takes the bytes of the new response, without chunk framing, and gives whole events for the client. If this
    leg breaks as well, `sofar` has how far the stream has come by then, over all legs, for the next `resume`.
    An event in which the engine gives up is not passed on but kept in `error`: the leg is broken. So it is if one event
    is longer than the limit. `refused` is why the leg is no continuation, `inexact` how the rest may differ.
    """

    def __init__(
        self,
        path: bytes,
        request: Mapping[str, Any],
        before: StreamProgress,
        resumption: ResumeRequest,
        limit_bytes: int,
    ) -> None:
        """`path` and `request` are the client's own.

        A stream of more than about `limit_bytes` can be stitched to its end, but not be continued once more.
        """
        way = resumption.way
        self.error = b""
        self.refused: Reason | None = None
        self.inexact = None if resumption.proof else resumption.inexact
        self._request = request
        self._before = before
        self._resumption = resumption
        self._limit = limit_bytes
        self._is_chat = path == CHAT
        self._path = path
        self._reshapes = self._is_chat and resumption.path != CHAT
        self._asked_ids = request.get("return_token_ids") is True
        self._keeps_prompt_ids = (
            self._asked_ids and way is ResumeMethod.RESTART and before.context_ids is None
        )
        self._tokens_before = resumption.kept.tokens
        self._drop = _DROPS.get(resumption.strip)
        self._goes_on = way is not ResumeMethod.RESTART
        self._reader = EventReader()
        self._tally = ProgressTally(before, resumption.kept, from_text=way is ResumeMethod.TEXT)
        self._expected = resumption.repeated  # what is left of it
        self._is_first = True  # no text has come yet
        self._checks_ids = resumption.given_ids is not None or resumption.proof
        self._ids_sent = 0  # of those that this leg has, the client was sent so many already
        if way is not ResumeMethod.TEXT:
            self._skip_ids()
        self._sent_chars = 0
        # A stop string across the seam of a leg that goes on from text: no engine sees both of its parts.
        seen = stop_length(request) - 1
        self._edge = before.text[-seen:] if way is ResumeMethod.TEXT and seen > 0 else ""
        self._edge_text = ""  # of this leg, as long as a stop string may begin before it
        self._met_stop = False
        most = resumption.most_tokens
        self._most = None if most is None else resumption.kept.tokens + most  # over all legs

    @property
    def over(self) -> bool:
        """The stream is complete, or broken: nothing more will be passed on."""
        return self._tally.done or bool(self.error) or self.refused is not None

    def feed(self, payload: bytes) -> bytes:
        """Return the events for the client that these bytes complete; possibly none."""
        passed = b"".join([self._passed(data) for data in self._reader.feed(payload)])
        if self._reader.held_bytes > self._limit and not self.over:
            self.error = error_event("event_too_long", "An event of the replica is too long.")
        return passed

    @property
    def tokens(self) -> int:
        """Of the response, over all legs."""
        return self._tally.tokens

    @property
    def usage(self) -> Tokens | None:
        """The last that an engine has reported, over all legs."""
        usage = self._tally.usage
        if usage is None:
            return None
        return Tokens(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))

    def progress(self) -> StreamProgress:
        """Return how far the stream has come, with all of its legs."""
        if self._tally.size_bytes > self._limit:
            self._tally.lost = True
        sofar = self._tally.progress()
        if len(sofar.text) != len(self._before.text) + self._sent_chars:
            self.refused = Reason.MISMATCH
        return sofar

    def _passed(self, data: bytes) -> bytes:
        if self.over:
            return b""
        if data == b"[DONE]":
            self._tally.done = True
            return DONE
        try:
            chunk = orjson.loads(data)
            gives_up = "error" in chunk or any(
                choice.get("finish_reason") == ABORT for choice in chunk.get("choices") or ()
            )
            has_content = not gives_up and self._rewrite(chunk)
        except (orjson.JSONDecodeError, AttributeError, TypeError):  # the client may know any of it
            self._tally.strange = True
            return b"data: " + data + b"\n\n"
        if gives_up:
            self.error = b"data: " + data + b"\n\n"
            return b""
        if self.refused is not None:
            return b""
        passed = event(chunk) if has_content else b""
        return passed + self._ended_early() if self._met_stop else passed

    def _rewrite(self, chunk: dict[str, Any]) -> bool:
        """Make it a chunk of the first stream and take note of it; False if nothing is left of it, or the leg is refused."""
        self._sign(chunk)
        repeated = 0
        self._check_prompt(chunk)
        for choice in chunk.get("choices") or ():
            if self._reshapes:
                choice["delta"] = {"content": choice.pop("text", "")}
            repeated = self._take_repeated(choice)
            if self._is_chat:
                self._settle_role(choice.get("delta"))
        if isinstance(usage := chunk.get("usage"), dict):
            chunk["usage"] = self._usage(usage)
        if self.refused is not None:
            return False
        self._tally.chunk(chunk, repeated)
        if self._most is not None and self._tally.counted and self._tally.tokens > self._most:
            self.refused = Reason.MISMATCH
            return False
        if self._drop is not None and not self._drop(chunk):
            return False
        has_content = bool(chunk.get("usage"))
        for part in (chunk, *(chunk.get("choices") or ())):
            if not self._keeps_prompt_ids:
                part.pop("prompt_token_ids", None)
                part.pop("prompt_text", None)
            if not self._asked_ids:
                part.pop("token_ids", None)
            elif self._ids_sent and (ids := part.get("token_ids")):
                part["token_ids"] = ids[self._ids_sent :]
                self._ids_sent = max(0, self._ids_sent - len(ids))
            delta = part.get("delta") or {"text": part.get("text")}
            has_content |= bool(any(delta.values()) or any(part.get(key) for key in _TELLING))
        return has_content

    def _check_prompt(self, chunk: Mapping[str, Any]) -> None:
        """Compare the ids of the prompt that the engine reports with those that it should have."""
        if not self._checks_ids:
            return
        choices: list[Any] = chunk.get("choices") or []
        ids = chunk.get("prompt_token_ids") or (choices[0].get("prompt_token_ids") if choices else None)
        if not ids:
            return
        self._checks_ids = False
        given, before = self._resumption.given_ids, self._before
        if given is not None:
            if list(given) != ids:
                self.refused = Reason.MISMATCH
            return
        context, output = before.context_ids or (), before.output_ids or ()
        kept = len(ids) - len(context)
        if kept >= 0 and ids == [*context, *output[:kept]]:
            self._tally.proved(before, kept)
            self._tokens_before = before.base.tokens + kept
            self._skip_ids()
            if self._most is not None and self._tokens_before != self._resumption.kept.tokens:
                # Text that is held back for stop strings is behind its tokens: the leg was asked for too few or too many.
                self.refused = Reason.UNCOUNTED
        else:
            self._not_proved()

    def _skip_ids(self) -> None:
        """Leave out the ids that the client has been sent: the leg goes on behind `_tokens_before`."""
        if self._asked_ids:
            sent = max(self._before.sent_tokens, self._before.tokens)
            self._ids_sent = max(0, sent - self._tokens_before)

    def _not_proved(self) -> None:
        """The engine has not read the text into the tokens that made it, or does not report it."""
        self._checks_ids = False
        if self._resumption.must_prove:
            self.refused = Reason.RETOKENIZED
        else:
            self.inexact = self._resumption.inexact

    def _take_repeated(self, choice: dict[str, Any]) -> int:
        """Take off what the client has of the text of a choice. Returns how many characters that were."""
        fields = choice.get("delta") if self._is_chat else choice
        name = "content" if self._is_chat else "text"
        text = fields.get(name) if isinstance(fields, dict) else None
        if not text or not isinstance(text, str) or fields is None:
            if self._expected and (choice.get("finish_reason") or _says_more(fields)):
                self.refused = (
                    Reason.MISMATCH
                )  # it ends, or says something else, before it has come to what is new
            return 0
        if self._is_first:
            self._is_first = False
            text = self._without_prompt(text)
            if self._checks_ids and self._resumption.proof:
                self._not_proved()
        count = min(len(text), len(self._expected))
        if text[:count] != self._expected[:count]:
            self.refused = Reason.MISMATCH
            return 0
        self._expected = self._expected[count:]
        if self._expected and choice.get("finish_reason"):
            self.refused = Reason.MISMATCH
            return 0
        text = text[count:]
        if self._edge:
            text = self._cut_at_stop(text, choice)
        fields[name] = text
        self._sent_chars += len(text)
        return count

    def _without_prompt(self, text: str) -> str:
        """Return the first text of a leg without the prompt, which vLLM sends with it if the prompt ends within a character."""
        if self._resumption.is_whole:
            return text
        known, expected = self._before.text[: self._resumption.kept.chars], self._expected
        at = text.find(known)
        while at >= 0:
            rest = text[at + len(known) :]
            if rest.startswith(expected) or expected.startswith(rest):
                return rest
            at = text.find(known, at + 1)
        return text

    def _cut_at_stop(self, text: str, choice: dict[str, Any]) -> str:
        """Return the text up to a stop string that begins before the seam, with which the response ends."""
        seam = len(self._edge)
        window = self._edge + self._edge_text + text
        least = whole(self._request.get("min_tokens")) or 0
        stop = self._request.get("stop")
        stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
        found = [
            (at + len(one), one)
            for one in stops
            if isinstance(one, str) and one and 0 <= (at := window.find(one)) < seam < at + len(one)
        ]
        if found and self._tally.tokens >= least:
            end, one = min(found)
            self._met_stop = True
            choice["finish_reason"] = "stop"
            choice["stop_reason"] = one
            keeps = self._request.get("include_stop_str_in_output") is True
            return text[: max(0, end - seam - len(self._edge_text))] if keeps else ""
        self._edge_text += text
        if len(self._edge_text) >= seam:
            self._edge = ""
        return text

    def _ended_early(self) -> bytes:
        """Return the end of a response that has met a stop string across the seam."""
        end = closing(self._path, self._request, self._tally.progress(), EngineKind.UNKNOWN)
        self._tally.done = True
        return end or DONE

    def _sign(self, chunk: dict[str, Any]) -> None:
        before = self._before
        if not before.events:
            return
        chunk["id"] = before.id
        chunk["object"] = _CHAT_CHUNK if self._is_chat else _TEXT_CHUNK
        chunk["created"] = before.created
        chunk["model"] = before.model
        if before.system_fingerprint is not None:
            chunk["system_fingerprint"] = before.system_fingerprint
        else:
            chunk.pop("system_fingerprint", None)

    def _settle_role(self, delta: dict[str, Any] | None) -> None:
        """The role is sent once, whether the engine sends it never, once or always."""
        if delta is None:
            return
        if self._tally.role_sent:
            delta.pop("role", None)
        elif self._reshapes:
            delta["role"] = "assistant"

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return what the engine has counted, as if it had done the whole response."""
        if not self._goes_on:
            return usage
        here = usage.get("completion_tokens") or 0
        given = usage.get("prompt_tokens") or 0
        known = self._tally.prompt_tokens
        prompt = max(0, given - self._tokens_before) if known is None else known
        stitched = {
            **usage,
            "prompt_tokens": prompt,
            "completion_tokens": self._tokens_before + here,
            "total_tokens": prompt + self._tokens_before + here,
        }
        # What this engine found in its cache includes the response, and not the first prompt alone.
        cached = self._tally.cached_tokens
        if usage.get("prompt_tokens_details"):
            stitched["prompt_tokens_details"] = None if cached is None else {"cached_tokens": cached}
        if usage.get("completion_tokens_details"):
            stitched["completion_tokens_details"] = None
        return stitched


def _says_more(delta: Mapping[str, Any] | None) -> bool:
    """Return whether a delta has content besides text."""
    return delta is not None and any(delta.get(name) for name in (*SPEECH, *CALLS))


def closing(path: bytes, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind) -> bytes | None:
    """Return the end of a broken stream whose response is complete.

    Its finish reason has been seen, or it has got all the tokens it was allowed. None if something is left to be generated,
    or it cannot be known.

    `kind` is that of the engine that was lost.
    """
    refused = refusal(path, request)
    if sofar.strange or sofar.failed or sofar.lost or refused in NEVER:
        return None
    if sofar.done:
        return b""
    events = []
    if sofar.finish_reason is None:
        if sofar.silent or refused is not None or left(path, request, sofar, kind) != 0:
            return None
        if holds_text(request, kind) or not is_counted(sofar, kind):
            return None  # text of the last tokens may not have been sent, or there may be more of them
        content: dict[str, Any] = {"delta": {}} if path == CHAT else {"text": ""}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
        events.append(event({**_envelope(path, sofar), "choices": [choice]}))
    if _owes_usage(request, sofar) and (usage := _final_usage(sofar)) is not None:
        events.append(event({**_envelope(path, sofar), "choices": [], "usage": usage}))
    return b"".join([*events, DONE])


def loses_usage(request: Mapping[str, Any], sofar: StreamProgress) -> bool:
    """Return whether `closing` leaves out a usage that the client has asked for, because no engine has reported it."""
    return _owes_usage(request, sofar) and _final_usage(sofar) is None


def _owes_usage(request: Mapping[str, Any], sofar: StreamProgress) -> bool:
    options = request.get("stream_options")
    wanted = isinstance(options, Mapping) and options.get("include_usage") is True
    return wanted and not sofar.usage_reported and not sofar.done


def _final_usage(sofar: StreamProgress) -> Mapping[str, Any] | None:
    """Return the usage that was not sent any more, if it is known."""
    if sofar.usage is not None:
        return sofar.usage
    if sofar.prompt_tokens is None or not sofar.output_ids:
        return None
    return {
        "prompt_tokens": sofar.prompt_tokens,
        "completion_tokens": sofar.tokens,
        "total_tokens": sofar.prompt_tokens + sofar.tokens,
    }


def _envelope(path: bytes, sofar: StreamProgress) -> dict[str, Any]:
    kind = _CHAT_CHUNK if path == CHAT else _TEXT_CHUNK
    envelope = {"id": sofar.id, "object": kind, "created": sofar.created, "model": sofar.model}
    if sofar.system_fingerprint is not None:
        envelope["system_fingerprint"] = sofar.system_fingerprint
    return envelope
