"""What a workload is: calls that come by themselves, and calls that the end of another one sets off.

Two parties look at one prompt. The balancer sees bytes and has no tokenizer; the engine sees tokens. A `Passage`
is a piece of text as both, cut where the engine's tokenizer would cut anyway, so that joining passages and
tokenizing the joined text give the same tokens. The engine's response is part of the workload, since the
next prompt of a conversation contains it word for word.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, chain
from math import ceil, log
from statistics import NormalDist
from typing import NamedTuple, Protocol

from skyserve_cli.engine.text import EOS, Language, encode, token_bytes

_PAGE_TOKENS = 1 << 15
_P90 = 1.2815515655446004  # the normal quantile at 90 %


class Passage(NamedTuple):
    """A piece of a prompt, for the balancer and for the engine."""

    text: bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One request. `answer` is what the engine will say to it, at least one token; `scope`, `session` and `ttft_s` are as
    in `policies.routing.base.RequestView`, `tenant` is the owner of its API key."""

    id: str
    prompt: Passage
    answer: tuple[int, ...]
    scope: str = ""
    session: str = ""
    tenant: str = ""
    ttft_s: float = 0.0


class Arrival(NamedTuple):
    """A call and the instant at which it reaches the balancer, in seconds from the start."""

    at_s: float
    call: Call


class Workload(Protocol):
    """Where calls come from. It remembers the calls under way, so an instance is used up by one run."""

    name: str

    def opening(self) -> Iterator[Arrival]:
        """The calls that depend on no other, in order of time. Read as time goes by, so it may be long."""
        ...

    def ended(self, call: Call, now: float) -> Iterable[Arrival]:
        """What the end of `call` at `now` sets off, each at `now` or later. Asked once for every call."""
        ...


def walk(workload: Workload) -> Iterator[Call]:
    """Every call, in the order of an engine that responds at once."""
    opening = workload.opening()
    pending: list[tuple[float, int, Call]] = []
    coming = next(opening, None)
    serial = 0
    while coming is not None or pending:
        if coming is not None and (not pending or coming.at_s <= pending[0][0]):
            at_s, call = coming
            coming = next(opening, None)
        else:
            at_s, _, call = heappop(pending)
        yield call
        for later in workload.ended(call, at_s):
            serial += 1
            heappush(pending, (later.at_s, serial, later.call))


# --- text ---------------------------------------------------------------------------------------------------


def passage(text: str) -> Passage:
    return Passage(text.encode(), tuple(encode(text)))


def join(passages: Iterable[Passage]) -> Passage:
    """One passage of several. They must meet where the tokenizer cuts: at a marker, a line end or a space."""
    parts = list(passages)
    return Passage(
        b"".join(part.text for part in parts), tuple(chain.from_iterable(part.tokens for part in parts))
    )


def message(role: str, content: Passage) -> Passage:
    """A message as the engine's chat template writes it."""
    return join((passage(f"<|im_start|>{role}\n"), content, MESSAGE_END))


MESSAGE_END = passage("<|im_end|>\n")
ANSWER_BEGIN = passage("<|im_start|>assistant\n")


def spoken(content: Passage) -> tuple[int, ...]:
    """`content` as an engine says it: with the end token, which the template repeats in the next prompt."""
    return (*content.tokens, EOS)


class Prose:
    """Words without meaning, as many tokens as asked for: stretches of one long page, cut at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def passage(self, tokens: int) -> Passage:
        page, ends, text = _page()
        start = int(self._rng.random() * (len(page) - tokens))
        return Passage(text[ends[start] : ends[start + tokens]], page[start : start + tokens])


@lru_cache(maxsize=1)
def _page() -> tuple[tuple[int, ...], tuple[int, ...], bytes]:
    """The tokens, where each begins in the text (and where the last ends), and the text."""
    language = Language(seed=1)
    context = language.read(())
    tokens = []
    for _ in range(_PAGE_TOKENS):
        tokens.append(language.next(context, may_end=False))
        context.extend(tokens[-1:])
    pieces = [token_bytes(token) for token in tokens]
    return tuple(tokens), tuple(accumulate(map(len, pieces), initial=0)), b"".join(pieces)


# --- chance: only `random()` of a generator, the method whose numbers Python promises to keep ---------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """A log-normal quantity, given by its median and its ninetieth percentile, kept between `low` and `high`."""

    median: float
    p90: float
    low: float = 1.0
    high: float = float("inf")

    def draw(self, rng: random.Random) -> float:
        drawn: float = self.median * (self.p90 / self.median) ** (_NORMAL.inv_cdf(_open(rng)) / _P90)
        return min(max(drawn, self.low), self.high)


_NORMAL = NormalDist()


def exponential(rng: random.Random, mean: float) -> float:
    return -log(_open(rng)) * mean


def geometric(rng: random.Random, mean: float) -> int:
    """1, 2, ... with a constant chance to stop after each."""
    return 1 if mean <= 1 else ceil(log(_open(rng)) / log(1 - 1 / mean))


def shuffled(rng: random.Random, count: int) -> list[int]:
    return sorted(range(count), key=[rng.random() for _ in range(count)].__getitem__)


def _open(rng: random.Random) -> float:
    """Uniform, and neither 0 nor 1."""
    return min(max(rng.random(), 1e-12), 1 - 1e-12)
