"""The limits of one tenant, and what keeps one more of its requests out. Pure; `now` is an argument.

What the limits mean is explained in `lb.core.api_keys`, which opens and settles the accounts of requests.
"""

from __future__ import annotations

from typing import NamedTuple

from lb.config.options import ApiKey
from lb.core.limit_store import FULL, LimitStore

REQUESTS, TOKENS, CONCURRENT = "requests", "tokens", "concurrent requests"
_OPTIONS = {REQUESTS: "requests_per_minute", TOKENS: "tokens_per_minute", CONCURRENT: "max_concurrent"}
ONE = 1.0  # a bucket must hold this much for a request to be let in

_CONCURRENT_RETRY_S = 1.0  # when a request under way will end is not known

# What a request is expected to generate at least: short requests, of which anybody can send many, do not lower it further.
LEAST_EXPECTED = 256
_REMEMBERED = 64  # responses
_QUANTILE = 0.9
_RANK_EVERY = 8  # responses: ranking costs microseconds


class Limited(NamedTuple):
    """The tenant has used up its limit: 429.

    `what` is REQUESTS or TOKENS, of which it has `limit` per minute, or CONCURRENT. After `retry_after_s` one more request
    would be let in if no other came; of CONCURRENT, it is a guess.
    """

    tenant: str
    what: str
    limit: float
    retry_after_s: float

    @property
    def message(self) -> str:
        per_minute = "" if self.what == CONCURRENT else " per minute"
        return f"The key {self.tenant!r} is limited to {self.limit:g} {self.what}{per_minute}."

    @property
    def reason(self) -> str:
        """The limit, by the name of the option that sets it."""
        return _OPTIONS[self.what]

    @property
    def allowance(self) -> Allowance | None:
        """What is left of the limit; None if it is not one per minute."""
        if self.what == CONCURRENT:
            return None
        return Allowance(self.what, self.limit, ONE - self.retry_after_s * self.limit / 60.0)


class Allowance(NamedTuple):
    """What is left of a limit per minute, which fills evenly. `left` is below zero for a debt."""

    what: str
    per_minute: float
    left: float


class PastResponses:
    """How many tokens each choice of the last responses had."""

    __slots__ = ("_counts", "_oldest", "_unranked", "expected")

    def __init__(self) -> None:
        self.expected = (
            LEAST_EXPECTED  # tokens that nine of ten responses do not exceed, and never less than the least
        )
        # The last ones, in a ring: an empty deque has room for 64, which is 7 MiB of 10,000 keys.
        self._counts: list[int] = []
        self._oldest = 0
        self._unranked = 0

    def add(self, tokens: int) -> None:
        if len(self._counts) < _REMEMBERED:
            self._counts.append(tokens)
        else:
            self._counts[self._oldest] = tokens
            self._oldest = (self._oldest + 1) % _REMEMBERED
        self._unranked += 1
        if self._unranked >= _RANK_EVERY or tokens > self.expected:
            self._unranked = 0
            ranked = sorted(self._counts)
            self.expected = max(LEAST_EXPECTED, ranked[int(_QUANTILE * (len(ranked) - 1))])


class Tenant:
    """The owner of one or several API keys: the limits in force, the numbers behind them, and its account.

    Levels may be looked at and changed under the lock of the store only.
    """

    __slots__ = ("admitted", "key", "limited", "past", "row", "used", "zones")

    def __init__(self, key: ApiKey, limits: LimitStore) -> None:
        self.key = key
        self.zones = zones_of(key)
        self.row = limits.row(key.name)
        self.admitted = 0
        self.limited = 0
        self.used = 0
        self.past = PastResponses()

    @property
    def is_limited(self) -> bool:
        key = self.key
        return bool(key.requests_per_minute or key.tokens_per_minute or key.max_concurrent)

    def allowances(self) -> tuple[Allowance, ...]:
        """Return what is left of each limit per minute."""
        row, key = self.row, self.key
        left = []
        if key.requests_per_minute:
            left.append(Allowance(REQUESTS, key.requests_per_minute, row.requests))
        if key.tokens_per_minute:
            left.append(Allowance(TOKENS, key.tokens_per_minute, row.tokens))
        return tuple(left)

    def fill(self, now: float, share: float = 1.0) -> None:
        """Bring the levels up to now, by a share of the limits."""
        row, key = self.row, self.key
        minutes = share * max(0.0, now - row.filled_at) / 60.0
        if minutes:
            row.filled_at = now
        if key.requests_per_minute:
            level = row.requests + minutes * key.requests_per_minute
            row.requests = min(_size(key.requests_per_minute), level)
        if key.tokens_per_minute:
            level = row.tokens + minutes * key.tokens_per_minute
            row.tokens = min(_size(key.tokens_per_minute), level)

    def charge(self, requests: int, tokens: int, catching_up: bool) -> None:
        """Drain the buckets by what other agents took; when `catching_up`, of levels above zero."""
        row = self.row
        levels = row.requests - requests, row.tokens - tokens
        if catching_up:
            levels = max(levels[0], min(0.0, row.requests)), max(levels[1], min(0.0, row.tokens))
        row.requests, row.tokens = levels

    def change(self, key: ApiKey, now: float) -> None:
        """A new limit keeps the level, debts too; one where none was starts full."""
        self.fill(now)
        self.key = key
        self.zones = zones_of(key)
        if not key.requests_per_minute:
            self.row.requests = FULL
        if not key.tokens_per_minute:
            self.row.tokens = FULL
        self.fill(now)

    def exceeded(self, requests_left: float = 0.0, tokens_left: float = 0.0) -> Limited | None:
        """Return the limit that keeps one more request out. Levels must have been filled.

        So many requests and tokens are to be left in the buckets.
        """
        row, key = self.row, self.key
        if key.requests_per_minute and row.requests - requests_left < ONE:
            wait_s = (ONE + requests_left - row.requests) * 60.0 / key.requests_per_minute
            return Limited(key.name, REQUESTS, key.requests_per_minute, wait_s)
        lacking = self.lacks_tokens(tokens_left)
        if lacking is not None:
            return lacking
        if key.max_concurrent and row.in_flight() >= key.max_concurrent:
            return Limited(key.name, CONCURRENT, key.max_concurrent, _CONCURRENT_RETRY_S)
        return None

    def lacks_tokens(self, tokens_left: float = 0.0) -> Limited | None:
        """As `exceeded`, of tokens alone."""
        row, key = self.row, self.key
        if not key.tokens_per_minute or row.tokens - tokens_left >= ONE:
            return None
        wait_s = (ONE + tokens_left - row.tokens) * 60.0 / key.tokens_per_minute
        return Limited(key.name, TOKENS, key.tokens_per_minute, wait_s)


def zones_of(key: ApiKey) -> frozenset[str]:
    """Return the residency zones of the key's requests."""
    return frozenset({key.residency}) if key.residency else frozenset()


def _size(per_minute: float) -> float:
    """Return how much a bucket holds: one minute's worth, and at least the one request that must fit."""
    return max(ONE, per_minute)
