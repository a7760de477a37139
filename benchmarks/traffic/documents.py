"""Questions about shared documents: long prompts whose common part is long as well, asked by an open loop.

Each question carries the whole text of one document, and documents are asked about by a Zipf distribution: manuals,
contracts, code, what an assistant has retrieved. A hit saves seconds of prefill, and no client waits for a response before
asking the next question. So a fleet that loses its hits has several times the work to do and gets no less of it, which
is the load under which a router can collapse. What the defaults come from:

    document_tokens   median 12,000, ninetieth percentile 26,000, between 8,000 and 40,000: assumed
    documents         500 with a popularity of 1 / rank: the ideal hit rate of a few minutes is then 0.6 to 0.75
    question_tokens   40 and 160 at the median and the ninetieth percentile, as of messages in `chat`
    answer_tokens     as of `chat`
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from benchmarks.traffic.chat import ANSWER_TOKENS, MESSAGE_TOKENS
from benchmarks.traffic.workloads import (
    ANSWER_BEGIN,
    Arrival,
    Call,
    Passage,
    Prose,
    Spread,
    exponential,
    join,
    message,
    passage,
    spoken,
)

DOCUMENT_TOKENS = Spread(12_000, 26_000, 8_000, 40_000)
_SECTION_TOKENS = 4_000
_SECTION = passage("\n\n")


@dataclass(frozen=True, slots=True)
class Library:
    """The questions, and their documents. Lengths are in tokens."""

    documents: int = 500
    popularity: float = 1.0  # the n-th document has n^-popularity times the questions of the first
    document_tokens: Spread = DOCUMENT_TOKENS
    question_tokens: Spread = MESSAGE_TOKENS
    response_tokens: Spread = ANSWER_TOKENS


class Documents:
    """Questions by a Poisson process of `questions_per_s` for `length_s`. Same arguments, same questions; more of
    them per second are the same questions sooner, and more."""

    name = "documents"

    def __init__(
        self, questions_per_s: float, length_s: float, seed: int, library: Library | None = None
    ) -> None:
        self._rate = questions_per_s
        self._length_s = length_s
        self._seed = seed
        self._library = library = library or Library()
        weights = [(rank + 1) ** -library.popularity for rank in range(library.documents)]
        self._shares = list(accumulate(weights))

    def opening(self) -> Iterator[Arrival]:
        arrivals = random.Random(self._seed)
        number, now = 0, 0.0
        while True:
            now += exponential(arrivals, 1 / self._rate)
            if now >= self._length_s:
                return
            yield Arrival(now, self._question(number))
            number += 1

    def ended(self, call: Call, now: float) -> Iterable[Arrival]:
        return ()

    def _question(self, number: int) -> Call:
        rng = random.Random(f"{self._seed}/{number}")
        prose = Prose(rng)
        which = bisect_right(self._shares, rng.random() * self._shares[-1])
        question = prose.passage(round(self._library.question_tokens.draw(rng)))
        answer = prose.passage(round(self._library.response_tokens.draw(rng)))
        document = _document(self._seed, which, self._library.document_tokens)
        return Call(
            id=f"question-{number}",
            prompt=join((document, message("user", question), ANSWER_BEGIN)),
            answer=spoken(answer),
            scope=self.name,
            session=f"document-{which}",
        )


@lru_cache(maxsize=256)
def _document(seed: int, which: int, document_tokens: Spread) -> Passage:
    """A message of the system. Its length is no evidence about its rank."""
    rng = random.Random(f"{seed}/document/{which}")
    prose = Prose(rng)
    left = round(document_tokens.draw(rng))
    sections = []
    while left > 0:
        sections += [prose.passage(min(left, _SECTION_TOKENS)), _SECTION]
        left -= _SECTION_TOKENS
    return message("system", join(sections))
