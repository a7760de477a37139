"""Streams of typed events, as `/v1/responses` and `/v1/messages` send them: how far one has come, and how it goes on. Pure.

Such a stream is a row of events that open and close items, and of deltas that fill them. A `Step` is one event of the first
sort, or all deltas in a row that fill the same text: engines put several tokens into one delta when they are busy, so that
the deltas of two equal responses need not be cut at the same places.

These APIs send no token ids, and most of their items cannot be given back to an engine half done. But a request whose
response does not depend on chance gets the same response again. So it is sent again to another engine, and `ReplayMerger`
compares the response, step by step, with what the client has received. What is equal is left out, what follows is passed on
with the ids and the numbers of the first stream. If it differs, nothing has been sent of it, and the stream cannot go on
this way. A stream that goes on is therefore exactly what one engine has said, whatever it consists of: text, reasoning,
tool calls, JSON, logprobs, stop strings and usage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import orjson

from lb.config.options import Continue
from lb.engines.kinds import EngineKind
from lb.http.sse import EventReader
from lb.stream.resume_rules import NotResumable, Reason
from lb.stream.token_usage import Tokens
from lb.stream.transcript import Step, StreamProgress

_OPENS = ("created", "in_progress", "queued", ".added", "_start")
Key = tuple[object, ...]
Failure = Callable[[StreamProgress, str], bytes]
DIVERGED = "The replica was lost before the end of its response, and another has responded otherwise."


class EventShape(Protocol):
    """What an API's events mean. None of its methods changes an event."""

    def key(self, event: Mapping[str, Any]) -> Key | None:
        """Return what the event does, without ids and text; None if it does nothing, as a ping."""
        ...

    def delta(self, event: Mapping[str, Any]) -> str | None:
        """Return the text that the event adds; None if it is not a delta."""
        ...

    def with_delta(self, event: Mapping[str, Any], text: str) -> dict[str, Any]:
        """Return the event with only the end of its delta."""
        ...

    def parts(self, event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the objects in the event that may carry ids, always in the same order."""
        ...

    def renamed(
        self, event: Mapping[str, Any], names: Mapping[str, str], first: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the event with other ids, and with what all events share with the `first` one of the client's stream."""
        ...

    def ends(self, event: Mapping[str, Any]) -> bool:
        """Return True for the last event of a stream whose response is complete."""
        ...

    def fails(self, event: Mapping[str, Any]) -> bool:
        """Return True for an event in which the engine gives the request up."""
        ...

    def usage(self, event: Mapping[str, Any]) -> Tokens | None:
        """Return the tokens of the prompt and of the response, if the event counts a whole response."""
        ...


class TypedTally:
    """A `StreamProgress` in the making: takes note of one event after the other, over all legs of a stream."""

    def __init__(self, shape: EventShape, before: StreamProgress | None = None) -> None:
        before = before or StreamProgress()
        self._shape = shape
        self._steps: list[Step] = list(before.steps)
        self._texts: list[str] = []  # of the last step, if it is one of deltas
        if self._steps and self._steps[-1].text is not None:
            self._texts.append(self._steps[-1].text)
        self._bytes = before.size_bytes
        self.sequence = before.sequence
        self.tokens = before.tokens
        self.usage: Tokens | None = None
        self.done = before.done
        self.strange = before.strange
        self.failed = before.failed
        self.lost = before.lost

    @property
    def size_bytes(self) -> int:
        """About what it keeps."""
        return self._bytes

    def event(self, data: bytes) -> None:
        """Take note of the data of one event."""
        event = parsed(data)
        if event is not None:
            self.note(event, len(data))
        elif data != b"[DONE]":  # some engines end every stream with it
            self.strange = True

    def note(self, event: Mapping[str, Any], size_bytes: int) -> None:
        """Take note of one event of this API; `size_bytes` is about its size."""
        shape = self._shape
        try:
            if shape.fails(event):
                self.failed = True
                return
            key, delta, counted = shape.key(event), shape.delta(event), shape.usage(event)
        except (AttributeError, KeyError, TypeError):  # an object where a list should be
            self.strange = True
            return
        number = event.get("sequence_number")
        if isinstance(number, int):
            self.sequence = number + 1
        if counted is not None:
            self.usage, self.tokens = counted, counted.out
        self.done = self.done or shape.ends(event)
        if key is None:
            return
        if delta is None:
            self._add(Step(key, event), size_bytes)
            return
        if not delta:
            return
        self.tokens += 1
        if self._texts and self._steps[-1].key == key:
            self._texts.append(delta)
            self._bytes += len(delta)
            return
        self._add(Step(key, event, delta), size_bytes)
        self._texts.append(delta)

    def progress(self) -> StreamProgress:
        """Return all of it, as a value."""
        self._close_text()
        if self._steps and (text := self._steps[-1].text) is not None:
            self._texts.append(text)
        return StreamProgress(
            text="".join([step.text for step in self._steps if step.text is not None]),
            steps=tuple(self._steps),
            sequence=self.sequence,
            size_bytes=self._bytes,
            tokens=self.tokens,
            done=self.done,
            strange=self.strange,
            failed=self.failed,
            lost=self.lost,
        )

    def _add(self, step: Step, size_bytes: int) -> None:
        self._close_text()
        self._steps.append(step)
        self._bytes += size_bytes

    def _close_text(self) -> None:
        if self._texts:
            self._steps[-1] = self._steps[-1]._replace(text="".join(self._texts))
            self._texts = []


class TypedMerger:
    """What all mergers of typed streams do; see `lb.stream.dialect.Merger`. Each of them has `_passed`."""

    def __init__(
        self, shape: EventShape, before: StreamProgress, limit_bytes: int, inexact: Reason | None = None
    ) -> None:
        """`before` is what the client has received."""
        self.error = b""
        self.refused: Reason | None = None
        self.inexact = inexact
        self._before = before
        self._has_diverged = before.diverged
        self._limit = limit_bytes
        self._reader = EventReader()
        self._tally = TypedTally(shape, before)

    @property
    def over(self) -> bool:
        """The stream is complete, or broken: nothing more will be passed on."""
        return self._tally.done or bool(self.error) or self.refused is not None

    @property
    def tokens(self) -> int:
        """Of the response, over all legs."""
        return self._tally.tokens

    @property
    def usage(self) -> Tokens | None:
        """The last report of an engine, over all legs."""
        return self._tally.usage

    def feed(self, payload: bytes) -> bytes:
        """Return the events for the client that these bytes complete; possibly none."""
        return b"".join([b"" if self.over else self._passed(data) for data in self._reader.feed(payload)])

    def progress(self) -> StreamProgress:
        """Return how far the stream has come, as the client sees it."""
        if self._tally.size_bytes > self._limit:
            self._tally.lost = True
        return replace(self._tally.progress(), diverged=self._has_diverged)

    def _passed(self, data: bytes) -> bytes:
        """Return what the data of an event of this leg means to the client."""
        raise NotImplementedError


class ReplayMerger(TypedMerger):
    """The response to the same request, sent again: what the client has not received of it yet.

    A response that differs from what the client has is an `error`: nothing of it has been sent,
    so that the stream may still go on in another way.
    """

    def __init__(self, shape: EventShape, before: StreamProgress, failure: Failure, limit_bytes: int) -> None:
        """`failure` makes the event that ends the stream as an error."""
        super().__init__(shape, before, limit_bytes)
        self._failure = failure
        self._usage: Tokens | None = None
        self._shape = shape
        self._names: dict[str, str] = {}  # the client's name for an id of this leg
        self._at = 0  # the step that is expected next
        self._seen = 0  # characters of it that have come, if it is one of deltas
        self._has_caught_up = not before.steps

    @property
    def usage(self) -> Tokens | None:
        """The last report of an engine, whether the client has it already or not."""
        return self._usage

    def _passed(self, data: bytes) -> bytes:
        event = parsed(data)
        if event is None:
            return b""
        try:
            if self._shape.fails(event):
                self.error = written(event)
                return b""
            key, delta = self._shape.key(event), self._shape.delta(event)
            self._usage = self._shape.usage(event) or self._usage
            if key is None:
                return written(event)
            if self._has_caught_up:
                return self._sent(event)
            rest = self._after(event, key, delta)
        except (AttributeError, KeyError, TypeError):
            self._diverge()
            return b""
        return b"" if rest is None else self._sent(rest)

    def _after(self, event: Mapping[str, Any], key: Key, delta: str | None) -> Mapping[str, Any] | None:
        """Compare an event with the steps that the client has. Returns what of it is new."""
        steps = self._before.steps
        if delta is None:
            if (text := steps[self._at].text) is not None:
                if self._seen < len(text):
                    self._diverge()
                    return None
                self._next()
            step = steps[self._at]
            if step.key != key:
                self._diverge()
                return None
            self._learn(step.event, event)
            self._next()
            return None
        if not delta:
            return None
        if (text := steps[self._at].text) is not None and self._seen == len(text):
            self._next()
        step = steps[self._at]
        expected = step.text or ""
        common = min(len(expected) - self._seen, len(delta))
        more = delta[common:]
        is_last = self._at == len(steps) - 1
        if (
            step.text is None
            or step.key != key
            or not expected.startswith(delta[:common], self._seen)
            or (more and not is_last)
        ):
            self._diverge()
            return None
        self._learn(step.event, event)
        self._seen += common
        if is_last and self._seen == len(step.text):
            self._has_caught_up = True
        return self._shape.with_delta(event, more) if more else None

    def _diverge(self) -> None:
        self._has_diverged = True
        self.error = self._failure(self._before, DIVERGED)

    def _next(self) -> None:
        self._at += 1
        self._seen = 0
        self._has_caught_up = self._at == len(self._before.steps)

    def _learn(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        """Note the client's names for the ids of an event that does the same as one it has."""
        for known, other in zip(self._shape.parts(theirs), self._shape.parts(ours), strict=False):
            for name in ID_FIELDS:
                was, now = known.get(name), other.get(name)
                if isinstance(was, str) and isinstance(now, str) and was != now:
                    self._names[now] = was

    def _sent(self, event: Mapping[str, Any]) -> bytes:
        steps = self._before.steps
        signed = self._shape.renamed(event, self._names, steps[0].event if steps else event)
        if "sequence_number" in signed:
            signed["sequence_number"] = self._tally.sequence
        data = written(signed)
        self._tally.note(signed, len(data))
        return data


ID_FIELDS = ("id", "item_id", "call_id")


def with_names(part: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return an object with the client's names for its ids."""
    renamed = dict(part)
    for field in ID_FIELDS:
        value = renamed.get(field)
        if isinstance(value, str) and value in names:
            renamed[field] = names[value]
    return renamed


def parsed(data: bytes) -> dict[str, Any] | None:
    """Return the JSON of an event that names its type; None for any other."""
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("type"), str) else None


def written(event: Mapping[str, Any]) -> bytes:
    """Return the bytes of an event, under its type."""
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


def event_types(events: bytes) -> list[bytes]:
    """Return the types of these events, chunk-framed or not, as their `event:` lines name them; the first may be torn."""
    return [line[6:].strip() for line in events.split(b"\n") if line.startswith(b"event:")]


def is_one_delta(data: bytes) -> bool:
    """Return True if these bytes, chunk-framed or not, are one event, and a delta: in a text line ends are escaped."""
    return data.count(b"event: ") == 1 and b"delta\ndata: " in data and b"event: message_delta" not in data


def is_the_same_again(request: Mapping[str, Any], kind: EngineKind) -> bool:
    """Return True if the response to this request does not depend on chance. That of our own engine never does.

    Two engines may still round otherwise: the response is compared as far as the client knows it.
    """
    temperature, seed = request.get("temperature"), request.get("seed")
    is_greedy = (
        isinstance(temperature, (int, float)) and not isinstance(temperature, bool) and temperature == 0
    )
    return (
        kind is EngineKind.SKYSERVE
        or is_greedy
        or (isinstance(seed, int) and not isinstance(seed, bool))
        or request.get("top_k") == 1
    )


def is_unsaid(sofar: StreamProgress) -> bool:
    """Return True if the client has no content yet, only what opens it: then any response will do that opens the same way."""
    return all(step.event["type"].endswith(_OPENS) for step in sofar.steps)


def check(sofar: StreamProgress, refused: Reason | None, mode: Continue) -> None:
    """Raise NotResumable if the stream cannot go on, whatever the engine."""
    for reason, holds in (
        (Reason.OFF, mode is Continue.OFF),
        (refused or Reason.OFF, refused is not None),
        (Reason.LOST, sofar.lost),
        (Reason.FAILED, sofar.failed),
        (Reason.STRANGE, sofar.strange),
        (Reason.ENDED, sofar.done),
    ):
        if holds:
            raise NotResumable(reason)
