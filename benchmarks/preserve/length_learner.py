"""Response lengths learned online: from similar requests, and from the words of the prompt. Standard library only.

Two guesses are learned side by side, and each scope (model and tenant) is given the one that has been closer to its responses:

- *Similar requests.* The median of the last lengths of the same scope and size of prompt (powers of two); of the scope while too few
  are known; of all requests while that is new. Who sends a request predicts the length of the response better than its text does.
- *Words.* A linear model of the logarithm of the length over hashed words of the prompt, each counted once, its size and its scope,
  in a table of fixed size. It learns by AdaGrad from clipped errors, so a long response teaches little, and a word that is seen
  often settles. Only policies that read prompts pass them. Without tenants it distinguishes them by what they write.

*Mean.* Lengths are long-tailed, so typical ones add up to too little. `mean` is the guess times the ratio of what responses of the
scope have summed up to over what was guessed of them; for sums of load.

PreServe (section 4.2) fine-tunes a DistilBERT, which costs 36 ms a request; this costs about 50 microseconds.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from math import exp, log, sqrt
from zlib import crc32

from policies.routing.base import RequestView
from policies.routing.response_length import (
    DEFAULT_TOKENS,
    ENOUGH,
    MAX_SCOPES,
    WINDOW,
    Window,
    capped,
)

BUCKETS = 1 << 15
RATE = 0.1
CLIPPED = 0.3  # errors of the logarithm that teach no more than this
FIRST_SQUARES = 0.05
MOST_WORDS = 96
READ_BYTES = 500  # from either end of a prompt: what it is for, and its last turn
USUAL_TOKENS = 100.0  # that the words' model starts from
MOST_LOG = 4.5  # 100 tokens to 9000, or to one
NEWEST_SHARE = 0.02  # of a response in the errors and the ratio of a scope
MOST_RATIO = 16.0

_WORD = re.compile(rb"[A-Za-z0-9']+|[^\sA-Za-z0-9']")


class LengthLearner:
    """See the top of this file. At most `max_scopes` scopes, and as many sizes of prompts in scopes, are remembered."""

    def __init__(self, default: int = DEFAULT_TOKENS, max_scopes: int = MAX_SCOPES) -> None:
        self._default = default
        self._max_scopes = max_scopes
        self._all = Window(WINDOW)
        self._sizes = _Recent(max_scopes)
        self._scopes = _Recent(max_scopes)
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._weights = array("f", [0.0]) * BUCKETS
        self._squares = array("f", [FIRST_SQUARES]) * BUCKETS

    def predict(self, request: RequestView) -> int:
        """Return the expected tokens, at least 1."""
        return capped(self._guess(request), request)

    def mean(self, request: RequestView) -> float:
        """Return the expected tokens for a sum: as `predict`, corrected by what the scope's responses have summed up to."""
        record = self._records.get(request.scope)
        ratio = 1.0 if record is None else record.ratio
        return float(capped(round(self._guess(request) * ratio), request))

    def learn(self, request: RequestView, tokens: int) -> None:
        """Learn from a response that is whole and `tokens` long."""
        record = self._records.pop(request.scope, None) or _Record()
        self._records[request.scope] = record
        if len(self._records) > self._max_scopes:
            self._records.popitem(last=False)
        median, words = self._median(request), self._words(request)
        by_words = self._by_words(words) if words else median
        scope = self._scopes.of(request.scope)
        if len(scope) >= ENOUGH:  # before, the median is that of other tenants
            record.settle(tokens, median, by_words)
        if words:
            self._teach(words, tokens)
        self._all.add(tokens)
        scope.add(tokens)
        self._sizes.of(_size(request)).add(tokens)

    def _guess(self, request: RequestView) -> int:
        record = self._records.get(request.scope)
        if record is not None and record.prefers_words:
            words = self._words(request)
            if words:
                return self._by_words(words)
        return self._median(request)

    def _median(self, request: RequestView) -> int:
        for lengths in (self._sizes.get(_size(request)), self._scopes.get(request.scope), self._all):
            if lengths is not None and len(lengths) >= ENOUGH:
                return lengths.median()
        return self._default

    def _by_words(self, words: list[int]) -> int:
        return max(1, round(USUAL_TOKENS * exp(self._log(words))))

    def _log(self, words: list[int]) -> float:
        weights = self._weights
        found = sum([weights[word] for word in words]) / sqrt(len(words))
        return min(MOST_LOG, max(-MOST_LOG, found))

    def _teach(self, words: list[int], tokens: int) -> None:
        error = log(max(1, tokens) / USUAL_TOKENS) - self._log(words)
        step = min(CLIPPED, max(-CLIPPED, error))
        square = step * step
        weights, squares = self._weights, self._squares
        for word in words:
            squares[word] += square
            weights[word] += RATE * step / sqrt(squares[word])

    def _words(self, request: RequestView) -> list[int]:
        """Return the places of the prompt's words in the table, each once, those of its size and of its scope."""
        prompt = request.prompt
        if not prompt:
            return []
        if len(prompt) > 2 * READ_BYTES:
            prompt = prompt[:READ_BYTES] + b" " + prompt[-READ_BYTES:]
        words = set(_WORD.findall(prompt.lower()))
        if len(words) > MOST_WORDS:
            words = set(sorted(words)[:MOST_WORDS])
        scope = crc32(request.scope.encode())
        places = [crc32(word, scope) % BUCKETS for word in words]
        return [*places, crc32(_size(request).encode()) % BUCKETS, scope % BUCKETS]


class _Record:
    """How close both guesses have been to the responses of one scope, and the sum of these over that of the guesses."""

    __slots__ = ("by_median", "by_words", "ratio")

    def __init__(self) -> None:
        self.by_median = 0.0
        self.by_words = 0.0
        self.ratio = 1.0

    @property
    def prefers_words(self) -> bool:
        return self.by_words < self.by_median

    def settle(self, tokens: int, median: int, by_words: int) -> None:
        guess = by_words if self.prefers_words else median
        found = min(MOST_RATIO, tokens / max(1, guess))
        self.ratio += NEWEST_SHARE * (found - self.ratio)
        self.by_median += NEWEST_SHARE * (abs(tokens - median) - self.by_median)
        self.by_words += NEWEST_SHARE * (abs(tokens - by_words) - self.by_words)


class _Recent:
    """Windows by name; those used longest ago are forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._windows: OrderedDict[str, Window] = OrderedDict()

    def get(self, name: str) -> Window | None:
        return self._windows.get(name)

    def of(self, name: str) -> Window:
        found = self._windows.get(name)
        if found is None:
            found = self._windows[name] = Window(WINDOW)
            if len(self._windows) > self._most:
                self._windows.popitem(last=False)
        else:
            self._windows.move_to_end(name)
        return found


def _size(request: RequestView) -> str:
    size = len(request.prompt) if request.prompt is not None else request.body_bytes
    return f"{size.bit_length()} {request.scope}"
