"""The limits of one API key, or of one of its models, with what is left of them, and what keeps one more request out. Pure; `now` is an argument.

What the limits mean is explained in `lb.core.api_keys`, which opens and settles the accounts of requests.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from lb.config.key_limits import NO_LIMITS, KeyLimits
from lb.core.calendar import Calendar
from lb.core.limit_store import (
    DAY,
    DAY_INPUT,
    DAY_OUTPUT,
    DAY_REQUESTS,
    FILLED_AT,
    FULL,
    IN_FLIGHT,
    INPUT,
    MONTH,
    MONTH_INPUT,
    MONTH_OUTPUT,
    MONTH_USD,
    OUTPUT,
    REQUESTS,
    RESERVED_IN,
    RESERVED_OUT,
    RESERVED_USD,
    TOKENS,
    LimitStore,
    sum_of_cells,
)

_WORDS = {REQUESTS: "requests", TOKENS: "tokens", INPUT: "input tokens", OUTPUT: "output tokens"}
CONCURRENT, USD = "concurrent requests", "USD"
MINUTE, OF_DAY, OF_MONTH = "minute", "day", "month"
_MOMENT_S = 1e-3  # in which nothing that matters fills
ONE = 1.0  # a bucket must hold this much for a request to be let in

_CONCURRENT_RETRY_S = 1.0  # when a request under way will end is not known
_SEPARATOR = "\n"  # names of keys and models have no control characters


class Spending:
    """Tokens of prompts and of responses, and what they cost."""

    __slots__ = ("tokens_in", "tokens_out", "usd")

    def __init__(self, tokens_in: int, tokens_out: int, usd: float = 0.0) -> None:
        self.tokens_in = tokens_in
        self.tokens_out = tokens_out
        self.usd = usd


class Amount(NamedTuple):
    """Requests, and tokens of prompts and responses."""

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0


NOTHING = Amount()


class Limited(NamedTuple):
    """The tenant has used up its limit: 429.

    `what` is CONCURRENT, or what it has `limit` of in each minute, day or month (`span`). After `retry_after_s` one more request
    would be let in if no other came; of CONCURRENT, it is a guess. `model`: the limit is one of this model.
    """

    tenant: str
    what: str
    limit: float
    retry_after_s: float
    span: str = MINUTE
    model: str = ""

    @property
    def message(self) -> str:
        per = "" if self.what == CONCURRENT else f" per {self.span}"
        of = "" if not self.model else f" of the model {self.model!r}"
        return f"The key {self.tenant!r} is limited to {self.limit:g} {self.what}{per}{of}."

    @property
    def reason(self) -> str:
        """The limit, by the name of the option that sets it."""
        if self.what == CONCURRENT:
            return "max_concurrent"
        return f"{self.what.lower().replace(' ', '_')}_per_{self.span}"

    @property
    def is_budget(self) -> bool:
        """Whether trying again soon is of no use."""
        return self.span == OF_MONTH

    @property
    def left(self) -> Left:
        """What is left of it; nothing if no header has it."""
        left = ONE - self.retry_after_s * self.limit / 60.0
        is_requests, is_tokens = (
            self.span == MINUTE and self.what == _WORDS[which] for which in (REQUESTS, TOKENS)
        )
        return self.limit if is_requests else 0.0, left, self.limit if is_tokens else 0.0, left


Left = tuple[float, float, float, float]
"""Requests per minute, and how many are left; tokens per minute, and how many are left. 0 per minute is no limit; a debt is below 0."""
NO_LIMIT: Left = (0.0, 0.0, 0.0, 0.0)


class _Terms:
    """Limits, and what is asked of them for each request."""

    __slots__ = ("buckets", "counts_tokens", "is_limited", "limits", "of_calendar")

    def __init__(self, limits: KeyLimits) -> None:
        self.limits = limits
        per_minute = (
            (REQUESTS, limits.requests_per_minute),
            (TOKENS, limits.tokens_per_minute),
            (INPUT, limits.input_tokens_per_minute),
            (OUTPUT, limits.output_tokens_per_minute),
        )
        self.buckets = tuple(bucket for bucket in per_minute if bucket[1])
        self.of_calendar = limits.of_calendar
        self.counts_tokens = limits.counts_tokens
        self.is_limited = limits != NO_LIMITS


#: Most of 10,000 keys have the same.
_terms_of = lru_cache(maxsize=1024)(_Terms)
_NO_TERMS = _terms_of(NO_LIMITS)


class Quota:
    """The limits in force of a key, or of one of its models, and the numbers behind them.

    Levels may be looked at and changed under the lock of the store only.
    """

    __slots__ = ("_at", "_columns", "_numbers", "_own", "_terms", "model", "name", "tenant")

    def __init__(self, tenant: str, model: str, store: LimitStore) -> None:
        """`model` empty: of the key."""
        self.tenant = tenant
        self.model = model
        self.name = name_of(tenant, model)
        self._numbers, self._at, self._own, self._columns = store.row(self.name)
        self._terms = _NO_TERMS

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return self._terms.is_limited

    @property
    def counts_tokens(self) -> bool:
        """Whether any limit is one of tokens, or of what they cost."""
        return self._terms.counts_tokens

    def change(self, limits: KeyLimits, now: float, today: Calendar) -> None:
        """A new limit keeps the level, debts too; one where none was starts full."""
        terms = _terms_of(limits)
        if self._terms is _NO_TERMS:  # it is new here: another process may have had the same limits until now
            self._terms = terms
        self.fill(now, today, 1.0)
        self._terms = terms
        limited = [which for which, _ in self._terms.buckets]
        for which in (REQUESTS, TOKENS, INPUT, OUTPUT):
            if which not in limited:
                self._numbers[self._at + which] = FULL
        self.fill(now, today, 1.0)

    def fill(self, now: float, today: Calendar, share: float) -> None:
        """Bring the numbers up to now; levels by a share of the limits."""
        numbers, at = self._numbers, self._at
        minutes = share * max(0.0, now - numbers[at + FILLED_AT]) / 60.0
        if minutes:
            numbers[at + FILLED_AT] = now
        for which, per_minute in self._terms.buckets:  # more may have been given back than there is room for
            numbers[at + which] = min(_size(per_minute), numbers[at + which] + minutes * per_minute)
        if self._terms.of_calendar:
            # Processes whose clocks differ by an instant do not begin the old day again; one whose clock was wrong does.
            if not today.day <= numbers[at + DAY] <= today.day + 1:
                numbers[at + DAY] = today.day
                numbers[at + DAY_REQUESTS] = numbers[at + DAY_INPUT] = numbers[at + DAY_OUTPUT] = 0.0
            if not today.month <= numbers[at + MONTH] <= today.month + 1:
                numbers[at + MONTH] = today.month
                numbers[at + MONTH_INPUT] = numbers[at + MONTH_OUTPUT] = numbers[at + MONTH_USD] = 0.0

    def is_filled(self, now: float) -> bool:
        """Return whether nothing that matters would be added now."""
        passed_s: float = now - self._numbers[self._at + FILLED_AT]
        return passed_s < _MOMENT_S

    def exceeded(self, left: Amount, now: float, today: Calendar) -> Limited | None:
        """Return the limit that keeps one more request out. Numbers must have been filled. `left` is for other agents."""
        numbers, at, limits = self._numbers, self._at, self._terms.limits
        if limits.requests_per_minute and numbers[at + REQUESTS] - left.requests < ONE:
            return self._limited(REQUESTS, limits.requests_per_minute, left.requests)
        lacking = self.lacks_tokens(left, now, today)
        if lacking is not None:
            return lacking
        per_day = limits.requests_per_day
        if per_day and numbers[at + DAY_REQUESTS] + left.requests + ONE > per_day:
            return self._over(_WORDS[REQUESTS], per_day, OF_DAY, now, today)
        if limits.max_concurrent and self.in_flight() >= limits.max_concurrent:
            return Limited(
                self.tenant, CONCURRENT, limits.max_concurrent, _CONCURRENT_RETRY_S, MINUTE, self.model
            )
        return None

    def lacks_tokens(self, left: Amount, now: float, today: Calendar) -> Limited | None:
        """As `exceeded`, of tokens, and of what they cost, alone."""
        numbers, at = self._numbers, self._at
        for which, per_minute in self._terms.buckets:
            if which != REQUESTS:
                kept = 0.0 if left is NOTHING else _tokens(which, left.tokens_in, left.tokens_out)
                if numbers[at + which] - kept < ONE:
                    return self._limited(which, per_minute, kept)
        return self._over_budget(left, now, today) if self._terms.of_calendar and self.counts_tokens else None

    def _over_budget(self, left: Amount, now: float, today: Calendar) -> Limited | None:
        numbers, at, limits = self._numbers, self._at, self._terms.limits
        reserved_in, reserved_out = self.reserved()
        reserved_in, reserved_out = reserved_in + left.tokens_in, reserved_out + left.tokens_out
        tokens_in, tokens_out = numbers[at + DAY_INPUT] + reserved_in, numbers[at + DAY_OUTPUT] + reserved_out
        for which, most in (
            (TOKENS, limits.tokens_per_day),
            (INPUT, limits.input_tokens_per_day),
            (OUTPUT, limits.output_tokens_per_day),
        ):
            if most and _tokens(which, tokens_in, tokens_out) + ONE > most:
                return self._over(_WORDS[which], most, OF_DAY, now, today)
        used = numbers[at + MONTH_INPUT] + numbers[at + MONTH_OUTPUT]
        if limits.tokens_per_month and used + reserved_in + reserved_out + ONE > limits.tokens_per_month:
            return self._over(_WORDS[TOKENS], limits.tokens_per_month, OF_MONTH, now, today)
        if limits.usd_per_month and numbers[at + MONTH_USD] + self._sum(RESERVED_USD) >= limits.usd_per_month:
            return self._over(USD, limits.usd_per_month, OF_MONTH, now, today)
        return None

    def _limited(self, which: int, per_minute: float, kept: float) -> Limited:
        wait_s = (ONE + kept - self._numbers[self._at + which]) * 60.0 / per_minute
        return Limited(self.tenant, _WORDS[which], per_minute, wait_s, MINUTE, self.model)

    def _over(self, what: str, most: float, span: str, now: float, today: Calendar) -> Limited:
        ends_at = today.day_ends_at if span == OF_DAY else today.month_ends_at
        return Limited(self.tenant, what, most, max(0.0, ends_at - now), span, self.model)

    # --- one request

    def enter(self) -> None:
        """Take one request, and a place among those under way."""
        self._numbers[self._own + IN_FLIGHT] += ONE
        if self._terms.is_limited:
            self._add_requests(ONE)

    def was_refused(self) -> None:
        """A request that has entered uses none. It is still to leave."""
        if self._terms.is_limited:
            self._add_requests(-ONE)

    def leave(self) -> None:
        """Needs no lock."""
        self._numbers[self._own + IN_FLIGHT] -= ONE

    def reserve(self, wanted: Spending) -> None:
        tokens_in, tokens_out = wanted.tokens_in, wanted.tokens_out
        self._give_back(-tokens_in, -tokens_out)
        numbers, own = self._numbers, self._own
        numbers[own + RESERVED_IN] += tokens_in
        numbers[own + RESERVED_OUT] += tokens_out
        if wanted.usd:
            numbers[own + RESERVED_USD] += wanted.usd

    def settle(self, reserved: Spending | None, spent: Spending) -> None:
        """Replace what was reserved by what was used."""
        held_in = held_out = 0
        if reserved is not None:
            held_in, held_out = reserved.tokens_in, reserved.tokens_out
            numbers, own = self._numbers, self._own
            numbers[own + RESERVED_IN] -= held_in
            numbers[own + RESERVED_OUT] -= held_out
            if reserved.usd:
                numbers[own + RESERVED_USD] -= reserved.usd
        self._give_back(held_in - spent.tokens_in, held_out - spent.tokens_out)
        if self._terms.of_calendar:
            self._use(spent)

    def _give_back(self, tokens_in: int, tokens_out: int) -> None:
        """Return tokens to the levels; where that is more than there is room for, the next `fill` sees to it."""
        numbers, at = self._numbers, self._at
        for which, _ in self._terms.buckets:
            if which == TOKENS:
                numbers[at + TOKENS] += tokens_in + tokens_out
            elif which == INPUT:
                numbers[at + INPUT] += tokens_in
            elif which == OUTPUT:
                numbers[at + OUTPUT] += tokens_out

    # --- agents of other regions

    def charge(self, used: Amount, usd: float, catching_up: bool, is_news: bool) -> None:
        """Drain the buckets by what other agents took; when `catching_up`, of levels above zero. What is no news may be of another day."""
        numbers, at = self._numbers, self._at
        for which, _ in self._terms.buckets:
            taken = used.requests if which == REQUESTS else _tokens(which, used.tokens_in, used.tokens_out)
            level = numbers[at + which]
            numbers[at + which] = max(level - taken, min(0.0, level)) if catching_up else level - taken
        if is_news and self._terms.of_calendar:
            numbers[at + DAY_REQUESTS] = max(0.0, numbers[at + DAY_REQUESTS] + used.requests)
            self._use(Spending(used.tokens_in, used.tokens_out, usd))

    def counted(self, today: Amount, in_month: Amount, usd: float) -> None:
        """All agents together have used this much. What is known here is as much, unless this agent has missed something."""
        if not self._terms.of_calendar:
            return
        numbers, at = self._numbers, self._at
        for which, used in (
            (DAY_REQUESTS, float(today.requests)),
            (DAY_INPUT, float(today.tokens_in)),
            (DAY_OUTPUT, float(today.tokens_out)),
            (MONTH_INPUT, float(in_month.tokens_in)),
            (MONTH_OUTPUT, float(in_month.tokens_out)),
            (MONTH_USD, usd),
        ):
            numbers[at + which] = max(numbers[at + which], used)

    # --- what is left

    def in_flight(self) -> int:
        """Return the requests under way in all processes."""
        return int(self._sum(IN_FLIGHT))

    def reserved(self) -> tuple[int, int]:
        """Return the tokens of prompts and of responses that all processes have reserved."""
        return int(self._sum(RESERVED_IN)), int(self._sum(RESERVED_OUT))

    def _sum(self, which: int) -> float:
        return sum_of_cells(self._numbers, self._own, self._columns, which)

    def left(self) -> Left:
        """Return what is left of the limits of requests and tokens per minute."""
        numbers, at, limits = self._numbers, self._at, self._terms.limits
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        return (
            requests,
            numbers[at + REQUESTS] if requests else 0.0,
            tokens,
            numbers[at + TOKENS] if tokens else 0.0,
        )

    def level(self, which: int) -> float | None:
        """Return the level of a bucket; None where it has no limit."""
        level = self._numbers[self._at + which]
        return None if level == FULL else level

    def used(self) -> tuple[Amount, Amount, float] | None:
        """Return what has been used on this day, in this month, and for how many US dollars; None without limits of days or months."""
        if not self._terms.of_calendar:
            return None
        numbers, at = self._numbers, self._at
        day = Amount(*(int(numbers[at + which]) for which in (DAY_REQUESTS, DAY_INPUT, DAY_OUTPUT)))
        month = Amount(0, int(numbers[at + MONTH_INPUT]), int(numbers[at + MONTH_OUTPUT]))
        return day, month, numbers[at + MONTH_USD]

    def _add_requests(self, count: float) -> None:
        numbers, at = self._numbers, self._at
        numbers[at + REQUESTS] -= count
        if self._terms.of_calendar:
            numbers[at + DAY_REQUESTS] = max(0.0, numbers[at + DAY_REQUESTS] + count)

    def _use(self, spent: Spending) -> None:
        """Peers count reservations first, and give some back, maybe on the next day."""
        numbers, at = self._numbers, self._at
        for which, tokens in (
            (DAY_INPUT, spent.tokens_in),
            (DAY_OUTPUT, spent.tokens_out),
            (MONTH_INPUT, spent.tokens_in),
            (MONTH_OUTPUT, spent.tokens_out),
        ):
            numbers[at + which] = max(0.0, numbers[at + which] + tokens)
        numbers[at + MONTH_USD] += spent.usd


def name_of(tenant: str, model: str) -> str:
    """Return by which name the numbers of a key, or of one of its models, are kept and shared."""
    return f"{tenant}{_SEPARATOR}{model}" if model else tenant


def names_in(name: str) -> tuple[str, str]:
    """Return tenant and model of such a name."""
    tenant, _, model = name.partition(_SEPARATOR)
    return tenant, model


def _tokens(which: int, tokens_in: float, tokens_out: float) -> float:
    """Return how many of these tokens a bucket counts."""
    return tokens_in if which == INPUT else tokens_out if which == OUTPUT else tokens_in + tokens_out


def _size(per_minute: float) -> float:
    """Return how much a bucket holds: one minute's worth, and at least the one request that must fit."""
    return max(ONE, per_minute)
