"""What the client of a stream has received: kept as bytes while all is well, read when it breaks.

A running stream must cost next to nothing, so `Transcript.add` keeps what came, packed if it can (`lb.stream.kept_events`),
and counts it. Only when the target is lost are the events parsed, into a `StreamProgress`: who the stream claims to be, its
text, its tokens, how far it got. When the bytes, counted as they came, outgrow half of their limit the oldest are parsed,
some at a time as new ones come, and dropped; the part left of an event then is its text and its token ids. So the limit
bounds what has to be parsed when a target is lost. The memory held by packed events is about a fifteenth of it.

The transcript is given what the engine said, of which the client has seen every whole event (see `lb.http.sse.EventBuffer`), with
or without the token ids it did not request. The beginning of an event at the end is not part of the transcript.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import orjson

from lb.http.body_framing import ChunkedDecoder, FramingError
from lb.http.sse import ABORT, EventReader
from lb.stream.kept_events import KeptEvents, PlainEvents

_BYTES_PER_NUMBER = 8
_KEPT_NUMBERS = 3 * 256  # of the positions at the ends of the last events
# Within a text the quotation marks would be escaped.
_FINISH = re.compile(rb'"finish_reason":\s*"(?!abort")')
SPEECH = ("reasoning_content", "reasoning")
CALLS = ("tool_calls", "function_call")
_KNOWN = frozenset({"role", "content", "refusal", *SPEECH, *CALLS})


class Position(NamedTuple):
    """A place in a response: when `tokens` of it had been made, its visible text had `chars` characters.

    `whole`: no character is known to be half made there. Tokens of byte level end within characters, and an event shows no
    text for the beginning of one: only an event of one token whose text has grown surely ends with a whole character.
    """

    tokens: int
    chars: int
    whole: bool


START = Position(0, 0, True)


class Step(NamedTuple):
    """One typed event, or several deltas of the same text in a row: `event` is the first of them, `text` all they add.

    Steps of two streams with equal keys do the same, under other ids. See `lb.stream.typed_stream`.
    """

    key: tuple[object, ...]
    event: Mapping[str, Any]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """How far a stream has come.

    `context_ids` are the tokens the engine was given, `output_ids` those it made after them; None where it did not
    show. They begin at `base`, which is the start of the response, or that of a leg that went on from text; so
    `len(output_ids) == tokens - base.tokens`. `tokens` of the response have been made: as many as there are ids, or as the engine counts, or else at least
    one for each event with content; only the last is a guess, and then the stream is not `counted`. Of `sent_tokens` the client
    may have been sent the ids: more than `tokens` while some are made again. `positions` are those at
    the ends of its last events, three numbers each (see `last_positions`). `prompt_tokens` and `cached_tokens` are those of the
    client's own prompt. `usage_reported` is the count that closes a stream, `usage` the last one there was.

    A stream is `strange` if it has events that cannot be read or are not known here, `failed` if the engine itself has
    reported an error, `lost` if it has outgrown its journal.
    """

    id: str = ""
    created: int = 0
    model: str = ""
    system_fingerprint: str | None = None
    role_sent: bool = False
    text: str = ""
    reasoning: bool = False
    tool_call: bool = False
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    usage_reported: bool = False
    done: bool = False
    events: int = 0
    tokens: int = 0
    sent_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    context_ids: Sequence[int] | None = None
    output_ids: Sequence[int] | None = ()
    counted: bool = True
    base: Position = START
    positions: Sequence[int] | None = None
    strange: bool = False
    failed: bool = False
    lost: bool = False
    steps: Sequence[Step] = ()
    sequence: int = 0
    size_bytes: int = 0
    diverged: bool = False

    @property
    def silent(self) -> bool:
        """Return whether nothing of the response itself has come: at most the role."""
        return not (self.text or self.reasoning or self.tool_call or self.finish_reason or self.strange)


def last_positions(sofar: StreamProgress) -> Iterator[Position]:
    """Yield the positions of a stream from the last one to the first."""
    numbers = sofar.positions or ()
    for at in range(len(numbers) - 3, -1, -3):
        yield Position(numbers[at], numbers[at + 1], bool(numbers[at + 2]))


class Tally(Protocol):
    """A `StreamProgress` in the making."""

    strange: bool

    @property
    def size_bytes(self) -> int:
        """About what it keeps."""
        ...

    def event(self, data: bytes) -> None:
        """Take note of the data of one event."""
        ...

    def progress(self) -> StreamProgress:
        """Return all of it, as a value."""
        ...


class ProgressTally:
    """A `StreamProgress` in the making: takes note of one chunk after the other, over all the targets of a stream."""

    def __init__(
        self, before: StreamProgress | None = None, kept: Position | None = None, *, from_text: bool = False
    ) -> None:
        """Goes on where `before` stopped, or from its position `kept`: what was made behind it is made again.

        `from_text`: the next engine reads the text into tokens of its own, so the ids known do not go on (see `proved`).
        """
        before = before or StreamProgress()
        kept = kept or Position(before.tokens, len(before.text), True)
        self.id = before.id
        self.created = before.created
        self.model = before.model
        self.system_fingerprint = before.system_fingerprint
        self.role_sent = before.role_sent
        self.reasoning = before.reasoning
        self.tool_call = before.tool_call
        self.finish_reason = before.finish_reason
        self.usage: Mapping[str, Any] | None = None
        self.usage_reported = before.usage_reported
        self.done = before.done
        self.events = before.events
        self.prompt_tokens = before.prompt_tokens
        self.cached_tokens = before.cached_tokens
        self.context_ids = None if from_text else before.context_ids
        self.strange = before.strange
        self.failed = before.failed
        self.lost = before.lost
        self._text = [before.text]
        self._text_bytes = len(before.text)
        self._base = kept if from_text or not kept.tokens else before.base
        ids = () if from_text else before.output_ids
        self._ids = None if ids is None else array("q", ids[: kept.tokens - self._base.tokens])
        self._positions = array("q")
        for position in last_positions(before):
            if position.tokens <= kept.tokens and position.chars <= kept.chars:
                numbers = before.positions or ()
                self._positions = array("q", numbers[: _count_up_to(numbers, position)])
                break
        self._chars = kept.chars  # of the visible text, up to where this leg has come
        self._tokens_before = kept.tokens
        self._sent_before = max(before.sent_tokens, before.tokens)
        self._counted_before = before.counted or not kept.tokens
        self._listed: int | None = 0  # ids of this leg; None once an event with content had none
        self._text_events = 0  # events of this leg with content
        self._usage_is_fresh = True  # no event with content has come since the last usage

    @property
    def size_bytes(self) -> int:
        """About what it keeps."""
        return self._text_bytes + _BYTES_PER_NUMBER * (len(self._ids or ()) + len(self.context_ids or ()))

    @property
    def tokens(self) -> int:
        if self._listed is not None:
            return self._tokens_before + self._listed
        counted = self.usage.get("completion_tokens") if self.usage else None
        return counted if isinstance(counted, int) else self._tokens_before + self._text_events

    @property
    def counted(self) -> bool:
        """Whether `tokens` is a count and not a guess."""
        if self._listed is not None:
            return self._counted_before
        counted = self.usage.get("completion_tokens") if self.usage else None
        return self._counted_before and self._usage_is_fresh and isinstance(counted, int)

    def proved(self, before: StreamProgress, kept: int) -> None:
        """The next engine has read the text into the context and the first `kept` ids of `before`. Called before its first chunk."""
        self.context_ids = before.context_ids
        self._base = before.base
        self._ids = array("q", (before.output_ids or ())[:kept])
        self._tokens_before = before.base.tokens + kept

    def event(self, data: bytes) -> None:
        """Take note of the data of one event."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            chunk = None
        if isinstance(chunk, dict):
            self.chunk(chunk)
        else:
            self.strange = True

    def chunk(self, chunk: Mapping[str, Any], repeated: int = 0) -> None:
        """Take note of one parsed chunk, of chat or completions.

        `repeated` characters of its text, which the client has already, have been taken off.
        """
        self.events += 1
        self._chars += repeated
        try:
            self._read(chunk, repeated)
        except (AttributeError, KeyError, TypeError, OverflowError):  # an object where a list should be
            self.strange = True

    def _read(self, chunk: Mapping[str, Any], repeated: int) -> None:
        if "error" in chunk:
            self.failed = True
            return
        if self.events == 1:
            self._introduce(chunk)
        choices: list[Any] = chunk.get("choices") or []
        ids = chunk.get("prompt_token_ids")
        if len(choices) == 1 and choices[0].get("index", 0) == 0:
            self._choice(choices[0], repeated)
            ids = ids or choices[0].get("prompt_token_ids")
        elif choices:
            self.strange = True
        if ids and self.context_ids is None:
            self.context_ids = array("q", ids)
            if self.prompt_tokens is None:
                self.prompt_tokens = len(ids)
        if isinstance(usage := chunk.get("usage"), dict):
            self._count(usage, final=not choices)
        if choices and not self.strange:
            self._mark(choices[0], repeated)

    def _mark(self, choice: Mapping[str, Any], repeated: int) -> None:
        """Remember the position at the end of an event with text."""
        if _text_of(choice) or repeated:
            ids = choice.get("token_ids")
            whole = ids is None or len(ids) == 1
            self._positions.extend((self.tokens, self._chars, whole))
            if len(self._positions) > 2 * _KEPT_NUMBERS:
                del self._positions[:-_KEPT_NUMBERS]

    def progress(self) -> StreamProgress:
        """Return all of it, as a value."""
        return StreamProgress(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.system_fingerprint,
            role_sent=self.role_sent,
            text="".join(self._text),
            reasoning=self.reasoning,
            tool_call=self.tool_call,
            finish_reason=self.finish_reason,
            usage=self.usage,
            usage_reported=self.usage_reported,
            done=self.done,
            events=self.events,
            tokens=self.tokens,
            sent_tokens=max(self._sent_before, self.tokens),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            context_ids=self.context_ids,
            output_ids=self._ids,
            counted=self.counted,
            base=self._base,
            positions=self._positions,
            strange=self.strange,
            failed=self.failed,
            lost=self.lost,
        )

    def _introduce(self, chunk: Mapping[str, Any]) -> None:
        self.id = str(chunk.get("id") or "")
        created = chunk.get("created")
        self.created = created if isinstance(created, int) else 0
        self.model = str(chunk.get("model") or "")
        fingerprint = chunk.get("system_fingerprint")
        self.system_fingerprint = fingerprint if isinstance(fingerprint, str) else None

    def _choice(self, choice: Mapping[str, Any], repeated: int) -> None:
        delta = choice.get("delta") or {}
        text = _text_of(choice)
        if not isinstance(text, str):
            self.strange = True
            return
        self._text.append(text)
        self._text_bytes += len(text)
        self._chars += len(text)
        self.role_sent = self.role_sent or bool(delta.get("role"))
        reasoned = any(delta.get(name) for name in SPEECH)
        called = any(delta.get(name) for name in CALLS)
        self.reasoning = self.reasoning or reasoned
        self.tool_call = self.tool_call or called
        self.strange = self.strange or any(value and name not in _KNOWN for name, value in delta.items())
        finish = choice.get("finish_reason")
        self.failed = self.failed or finish == ABORT
        self.finish_reason = finish or self.finish_reason
        has_content = bool(text or repeated or reasoned or called)
        if has_content:
            self._text_events += 1
            self._usage_is_fresh = False
        ids = choice.get("token_ids")
        if ids:
            if self._ids is not None:
                self._ids.extend(ids)
            if self._listed is not None:
                self._listed += len(ids)
        elif has_content:
            self._ids = self._listed = None  # from here on they cannot be known

    def _count(self, usage: Mapping[str, Any], *, final: bool) -> None:
        self.usage = usage
        self._usage_is_fresh = True
        self.usage_reported = self.usage_reported or final
        if self.prompt_tokens is None and isinstance(prompt := usage.get("prompt_tokens"), int):
            self.prompt_tokens = prompt
        details = usage.get("prompt_tokens_details")
        if self.cached_tokens is None and isinstance(details, dict):
            cached = details.get("cached_tokens")
            self.cached_tokens = cached if isinstance(cached, int) else None


def _text_of(choice: Mapping[str, Any]) -> Any:
    return (choice.get("delta") or {}).get("content") or choice.get("text") or ""


def _count_up_to(numbers: Sequence[int], position: Position) -> int:
    """Return how many of the numbers belong to positions up to this one."""
    at = len(numbers)
    while at > 0 and (numbers[at - 3], numbers[at - 2]) != (position.tokens, position.chars):
        at -= 3
    return at


def has_finished(events: bytes) -> bool:
    """Return whether one of these events has a finish reason. The bytes may begin within an event, and be chunk-framed."""
    return any(_FINISH.search(line) for line in events.splitlines() if line.startswith(b"data:"))


class Transcript:
    """The first leg of one stream."""

    __slots__ = ("_bytes", "_chunked", "_half", "_kept", "_reading", "_tally", "lost")

    def __init__(
        self,
        chunked: bool,
        limit_bytes: int,
        tally: Callable[[], Tally] = ProgressTally,
        kept: KeptEvents | None = None,
    ) -> None:
        """`chunked`: the added bytes are the body with its HTTP chunk framing, from its first byte on.

        About `limit_bytes`, as they came, are kept in `kept`; a longer stream is `lost`. `tally` makes what reads the events
        (`Dialect.tally`).
        """
        self.lost = False
        self._chunked = chunked
        self._tally = tally
        self._half = limit_bytes // 2
        self._kept: KeptEvents = PlainEvents() if kept is None else kept
        self._bytes = 0  # in `_kept`, as they came
        self._reading: _Reading | None = None  # most streams end unread

    def add(self, data: bytes) -> None:
        """The next bytes of the body."""
        if self.lost:
            return
        self._kept.add(data)
        self._bytes += len(data)
        if self._bytes > self._half:
            self._read_oldest(self._half)

    def join(self, events: KeptEvents) -> None:
        """The next bytes of the body, kept elsewhere until now."""
        if self.lost:
            return
        self._bytes += events.raw_bytes
        self._kept.join(events)
        if self._bytes > self._half:
            self._read_oldest(self._half)

    @property
    def held_bytes(self) -> int:
        """About how many bytes of memory it takes."""
        return self._kept.held_bytes + (0 if self._reading is None else self._reading.size_bytes)

    def read(self) -> StreamProgress:
        """Return how far the stream has come. More may be added afterwards."""
        if self.lost:
            return StreamProgress(lost=True)
        reading = self._read_oldest(0)
        return StreamProgress(lost=True) if self.lost else reading.tally.progress()

    def _read_oldest(self, leave_bytes: int) -> _Reading:
        """Read the oldest bytes until no more than `leave_bytes` are left unread."""
        reading = self._reading = self._reading or _Reading(self._chunked, self._tally())
        while self._bytes > leave_bytes and not self.lost:
            part = self._kept.pop()
            self._bytes -= len(part)
            reading.take(part)
            self.lost = reading.size_bytes > self._half
        if self.lost:
            self._bytes = 0
            self._kept.clear()
            self._reading = None
        return reading


class _Reading:
    """The part of a transcript that has been read."""

    __slots__ = ("_decoder", "_payloads", "_reader", "tally")

    def __init__(self, chunked: bool, tally: Tally) -> None:
        self._payloads: list[bytes] = []
        self._decoder = ChunkedDecoder(self._payloads) if chunked else None
        self._reader = EventReader()
        self.tally = tally

    @property
    def size_bytes(self) -> int:
        return self.tally.size_bytes + self._reader.held_bytes

    def take(self, part: bytes) -> None:
        payloads = [part]
        if self._decoder is not None:
            try:
                self._decoder.feed(part)
            except FramingError:
                self.tally.strange = True
            payloads = self._payloads.copy()
            self._payloads.clear()
        for payload in payloads:
            for data in self._reader.feed(payload):
                self.tally.event(data)
