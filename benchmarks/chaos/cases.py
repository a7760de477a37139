"""Requests, what goes wrong with them, and what becomes of it: one `Case` per request, drawn from a seed.

A case knows its faults beforehand: the n-th target that reads the request does the n-th of them, whichever target it
is. So it is known of every request whether it could have been served, and targets and clients, which share the
case, can say what they have seen of it.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import TypeVar

_C = TypeVar("_C")


class Kind(str, Enum):
    """The request."""

    UNARY = "unary"
    LARGE = "large"  # a response too long to be kept until it is whole
    STREAM = "stream"  # a completion, which any engine that reports its tokens can continue from its text
    CHAT = "chat"  # a chat, which an engine of unknown kind cannot continue


class Fault(str, Enum):
    """What a target does to a request it has read."""

    NONE = "none"
    RESET = "reset before the head"
    RESET_AFTER_HEAD = "reset after the head"
    RESET_IN_BODY = "reset in the body"
    HALF_CHUNK = "half a chunk"
    GARBAGE = "no HTTP"
    UNAVAILABLE = "503"
    EMPTY = "200 with an empty body"
    WRONG_TYPE = "200 with the wrong type"
    STALL = "stall in the body"
    MUTE = "never a head"
    SLOW = "slow"
    CLOSE = "close after the answer"

    @property
    def is_fatal(self) -> bool:
        """Whether the request is not served by who does this."""
        return self not in (Fault.NONE, Fault.WRONG_TYPE, Fault.SLOW, Fault.CLOSE)


class Manner(str, Enum):
    """What a client does."""

    WELL = "well"
    SLOW_HEAD = "its head never ends"
    SLOW_BODY = "its body never ends"
    LEAVES_IN_HEAD = "leaves in its head"
    LEAVES_IN_BODY = "leaves in its body"
    LEAVES_WAITING = "leaves while it waits"
    LEAVES_IN_ANSWER = "leaves in the answer"
    NEVER_READS = "never reads"
    ASKS_AND_NEVER_READS = "asks again and again and never reads"


@dataclass(slots=True)
class Case:
    """One request and its fate. `started`: attempts that a target has read whole, `failed`: those of them that came to
    nothing, `broken`: those that broke off when some of the response had been sent, `responded`: whole responses that were
    given, `odd`: a response was of the wrong type, `mute`: a target never sent a byte."""

    id: str
    kind: Kind
    manner: Manner
    words: int
    pace_s: float
    faults: deque[Fault]
    started: int = 0
    failed: int = 0
    broken: int = 0
    responded: int = 0
    odd: bool = False
    mute: bool = False
    complaints: list[str] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        return f"{self.id}:"

    @property
    def text(self) -> str:
        """What the whole response says."""
        return "".join(word(self.id, number) for number in range(self.words))

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.kind is Kind.CHAT else "/v1/completions"

    def body(self) -> bytes:
        asked: dict[str, object] = {"model": "m", "max_tokens": self.words}
        if self.kind is Kind.CHAT:
            asked["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            asked["prompt"] = self.prompt
        if self.kind in (Kind.STREAM, Kind.CHAT):
            asked["stream"] = True
        return json.dumps(asked).encode()

    def next_fault(self) -> Fault:
        self.started += 1
        return self.faults.popleft() if self.faults else Fault.NONE

    def fails(self, sent_some: bool) -> None:
        """An attempt is lost; `sent_some` of its response has been sent in a form that is passed on at once."""
        if sent_some:
            self.broken += 1
        else:
            self.failed += 1


def word(case_id: str, number: int) -> str:
    return " " + blake2b(f"{case_id}/{number}".encode(), digest_size=3).hexdigest()


_UNARY_FAULTS = {
    Fault.RESET: 4,
    Fault.RESET_AFTER_HEAD: 3,
    Fault.RESET_IN_BODY: 3,
    Fault.GARBAGE: 1,
    Fault.UNAVAILABLE: 4,
    Fault.EMPTY: 2,
    Fault.MUTE: 0.1,
    Fault.SLOW: 3,
    Fault.CLOSE: 4,
}
_LARGE_FAULTS = {Fault.RESET: 3, Fault.RESET_IN_BODY: 3, Fault.UNAVAILABLE: 3, Fault.CLOSE: 3, Fault.SLOW: 2}
_STREAM_FAULTS = {
    **_UNARY_FAULTS,
    Fault.RESET_IN_BODY: 6,
    Fault.HALF_CHUNK: 6,
    Fault.STALL: 2,
    Fault.WRONG_TYPE: 1,
}
_FAULTS: Mapping[Kind, Mapping[Fault, float]] = {
    Kind.UNARY: _UNARY_FAULTS,
    Kind.LARGE: _LARGE_FAULTS,
    Kind.STREAM: _STREAM_FAULTS,
    Kind.CHAT: _STREAM_FAULTS,
}
_KINDS = {Kind.UNARY: 10, Kind.LARGE: 1, Kind.STREAM: 8, Kind.CHAT: 2}
_BAD_MANNERS = {
    Manner.SLOW_HEAD: 1,
    Manner.SLOW_BODY: 1,
    Manner.LEAVES_IN_HEAD: 3,
    Manner.LEAVES_IN_BODY: 3,
    Manner.LEAVES_WAITING: 5,
    Manner.LEAVES_IN_ANSWER: 5,
    Manner.NEVER_READS: 0.5,
    Manner.ASKS_AND_NEVER_READS: 0.3,
}


@dataclass(frozen=True, slots=True)
class Mix:
    """How bad it is: the chance that an attempt has a fault, and that a client is a bad one. Only streams if `streams`,
    of about this number of words, one every `pace_s`."""

    fault: float = 0.3
    bad_client: float = 0.15
    streams: bool = False
    words: int = 16
    pace_s: float = 0.004


def draw(number: int, mix: Mix, rng: random.Random) -> Case:
    """The next case."""
    kind = Kind.STREAM if mix.streams else _pick(_KINDS, rng)
    manner = _pick(_BAD_MANNERS, rng) if rng.random() < mix.bad_client else Manner.WELL
    if manner is Manner.LEAVES_IN_ANSWER:
        kind = Kind.STREAM
    elif manner is Manner.NEVER_READS:
        kind = rng.choice((Kind.LARGE, Kind.STREAM))
    elif manner is Manner.ASKS_AND_NEVER_READS:
        kind = Kind.UNARY
    faults: deque[Fault] = deque()
    while rng.random() < mix.fault:
        faults.append(_pick(_FAULTS[kind], rng))
    words = max(2, round(mix.words * rng.uniform(0.5, 1.5)))
    return Case(f"{kind.value}-{number}", kind, manner, words, mix.pace_s * rng.uniform(0.5, 1.5), faults)


def _pick(weights: Mapping[_C, float], rng: random.Random) -> _C:
    return rng.choices(list(weights), list(weights.values()))[0]
