"""Recorded conversations by user and place: files of WildChat and of Chatbot Arena, which are not part of this project.

A file is JSON lines, plain or packed by gzip, with the fields as published:

    wildchat  `conversation` (a list of `role`, `content`), `country` and `hashed_ip`, of the line or of its first message
              (Zhao et al., 2024)
    arena     `conversation_a`, or `conversation`, and the user as `judge` (Zheng et al., 2023); no place

A client of a region takes the next conversation of that region when its last one has ended, and does not pause. Who a
conversation belongs to is its session, by which consistent hashing works. Users of Arena are spread evenly over the regions.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import orjson

from benchmarks.traffic.workloads import (
    ANSWER_BEGIN,
    Arrival,
    Call,
    Passage,
    join,
    message,
    passage,
    spoken,
)
from skyserve_cli.engine.text import token_bytes

START_S = 5.0  # in which clients begin
LONGEST_RESPONSE_TOKENS = 2000
_CONVERSATION = {"wildchat": "conversation", "arena": "conversation_a"}


class Conversation(NamedTuple):
    """What a user has said and what was responded, turn by turn. `country` is empty where it is not known."""

    user: str
    country: str
    turns: tuple[tuple[str, str], ...]


def load_conversations(path: Path, form: str, limit: int | None = None) -> list[Conversation]:
    """Returns the conversations of a file. Raises OSError, and ValueError, which names the line."""
    if form not in _CONVERSATION:
        raise ValueError(f"format: unknown format {form!r}; known: {', '.join(_CONVERSATION)}")
    found: list[Conversation] = []
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(found) >= limit:
                break
            try:
                found.append(_conversation(orjson.loads(line), form, number))
            except (AttributeError, KeyError, IndexError, TypeError, ValueError):
                raise ValueError(f"{path}: line {number} is no conversation of {form}") from None
    return found


def _conversation(row: Mapping[str, Any], form: str, number: int) -> Conversation:
    messages = row.get(_CONVERSATION[form]) or row["conversation"]
    first = messages[0]
    user = row.get("hashed_ip") or first.get("hashed_ip") or row.get("judge") or f"line-{number}"
    country = row.get("country") or first.get("country") or ""
    texts = [(one["role"], str(one["content"])) for one in messages]
    turns = [
        (said, response)
        for (role, said), (other, response) in pairwise(texts)
        if (role, other) == ("user", "assistant")
    ]
    return Conversation(str(user), str(country), tuple(turns))


class _Talk:
    """A conversation under way; a client of `region` has it."""

    __slots__ = ("about", "past", "region", "turn")

    def __init__(self, about: Conversation, region: str) -> None:
        self.about = about
        self.region = region
        self.past = Passage(b"", ())
        self.turn = 0


class Recorded:
    """Closed loop over a file: `clients` per region. `countries` are those of each region; conversations of others are left out.

    A conversation ends before it is longer than `longest_tokens`. A region begins again when it has had all of its own.
    """

    def __init__(
        self,
        regions: Mapping[str, int],
        seed: int,
        *,
        path: str,
        format: str,  # as the scenario's key is named
        clients: Mapping[str, int],
        countries: Mapping[str, Iterable[str]] | None = None,
        length_s: float = 300.0,
        limit: int | None = None,
        longest_tokens: int = 6000,
    ) -> None:
        self._seed = seed
        self._clients = clients
        self._length_s = length_s
        self._longest_tokens = longest_tokens
        self._number = 0
        self._open: dict[str, _Talk] = {}
        names = list(regions)
        place = {country: region for region, those in (countries or {}).items() for country in those}
        self._by_region: dict[str, list[Conversation]] = {name: [] for name in names}
        for one in load_conversations(Path(path), format, limit):
            region = place.get(one.country) if place else names[crc32(one.user.encode()) % len(names)]
            if region is not None and one.turns and self._fits(Passage(b"", ()), one.turns[0]):
                self._by_region[region].append(one)
        for name, count in clients.items():
            if count and not self._by_region.get(name):
                raise ValueError(f"clients.{name}: {path} has no conversation of this region")
            random.Random(f"{seed}/{name}").shuffle(self._by_region[name])
        self._next = dict.fromkeys(names, 0)

    def opening(self) -> Iterator[Arrival]:
        rng = random.Random(f"{self._seed}/starts")
        starts = sorted(
            (rng.random() * START_S, region) for region, n in self._clients.items() for _ in range(n)
        )
        for at_s, region in starts:
            yield Arrival(at_s, self._begin(region))

    def ended(self, call: Call, now: float) -> Iterable[Arrival]:
        talk = self._open.pop(call.id)
        talk.past = _said(talk.past, talk.about.turns[talk.turn])
        talk.turn += 1
        if talk.turn < len(talk.about.turns) and self._fits(talk.past, talk.about.turns[talk.turn]):
            return (Arrival(now, self._turn(talk)),)
        return (Arrival(now, self._begin(talk.region)),) if now < self._length_s else ()

    def region_of(self, call: Call) -> str:
        return self._open[call.id].region

    def _begin(self, region: str) -> Call:
        those = self._by_region[region]
        about = those[self._next[region] % len(those)]
        self._next[region] += 1
        return self._turn(_Talk(about, region))

    def _turn(self, talk: _Talk) -> Call:
        said, response = talk.about.turns[talk.turn]
        self._number += 1
        call = Call(
            id=f"{talk.region}-{self._number}",
            prompt=join((talk.past, message("user", _text(said)), ANSWER_BEGIN)),
            answer=spoken(_response(response)),
            session=talk.about.user,
        )
        self._open[call.id] = talk
        return call

    def _fits(self, past: Passage, turn: tuple[str, str]) -> bool:
        return len(_said(past, turn).tokens) <= self._longest_tokens


def _said(past: Passage, turn: tuple[str, str]) -> Passage:
    """Returns the conversation with one turn more."""
    said, response = turn
    return join((past, message("user", _text(said)), message("assistant", _response(response))))


def _text(text: str) -> Passage:
    """Returns a text without the marks of a chat template."""
    return passage(text.replace("<|", "< |").encode("utf-8", "replace").decode())


def _response(text: str) -> Passage:
    whole = _text(text)
    if len(whole.tokens) <= LONGEST_RESPONSE_TOKENS:
        return whole
    tokens = whole.tokens[:LONGEST_RESPONSE_TOKENS]
    return Passage(b"".join(map(token_bytes, tokens)), tokens)
