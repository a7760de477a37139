"""The limits of one API key, or of one of its models, with what is left of them, and what keeps one more request out. Pure; `now` is an argument.

What the limits mean is explained in `lb.core.api_keys`, which opens and settles the accounts of requests.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import Any, Final, NamedTuple

from lb.config.key_limits import NO_LIMITS, KeyLimits
from lb.core.calendar import Calendar
from lb.core.limit_store import (
    CALENDAR_SIZE,
    DAY,
    FILLED_AT,
    FULL,
    IN_FLIGHT,
    LEVELS_SIZE,
    NUMBER_BYTES,
    RESERVED_IN,
    RESERVED_OUT,
    RESERVED_USD,
    LimitStore,
    sum_of_cells,
)

REQUESTS, TOKENS, INPUT, OUTPUT = "requests", "tokens", "input tokens", "output tokens"
CONCURRENT, USD = "concurrent requests", "USD"
MINUTE, OF_DAY, OF_MONTH = "minute", "day", "month"
_MOMENT_S: Final = 1e-3  # in which nothing that matters fills
ONE: Final = 1.0  # a bucket must hold this much for a request to be let in

_CONCURRENT_RETRY_S: Final = 1.0  # when a request under way will end is not known
_SEPARATOR: Final = "\n"  # names of keys and models have no control characters


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


NOTHING: Final = Amount()


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
        is_requests, is_tokens = (self.span == MINUTE and self.what == what for what in (REQUESTS, TOKENS))
        return self.limit if is_requests else 0.0, left, self.limit if is_tokens else 0.0, left


Left = tuple[float, float, float, float]
"""Requests per minute, and how many are left; tokens per minute, and how many are left. 0 per minute is no limit; a debt is below 0."""
NO_LIMIT: Left = (0.0, 0.0, 0.0, 0.0)


class _Terms:
    """Limits, and what is asked of them for each request."""

    __slots__ = (
        "counts_tokens",
        "input",
        "is_limited",
        "limits",
        "of_calendar",
        "output",
        "requests",
        "tokens",
    )

    def __init__(self, limits: KeyLimits) -> None:
        self.limits = limits
        self.requests = float(limits.requests_per_minute)  # 0: no limit; so are the others
        self.tokens = float(limits.tokens_per_minute)
        self.input = float(limits.input_tokens_per_minute)
        self.output = float(limits.output_tokens_per_minute)
        self.of_calendar = limits.of_calendar
        self.counts_tokens = limits.counts_tokens
        self.is_limited = limits != NO_LIMITS


#: Most of 10,000 keys have the same.
_terms_of = lru_cache(maxsize=1024)(_Terms)
_NO_TERMS: Final = _terms_of(NO_LIMITS)

_LEVELS, _CALENDAR = Struct(f"{LEVELS_SIZE}d"), Struct(f"{CALENDAR_SIZE}d")


class Quota:
    """The limits in force of a key, or of one of its models, and the numbers behind them.

    Numbers are looked at and changed under the lock of the store only, after `load` and before `save`; what others do to them
    meanwhile is not seen. Levels are what is left: below zero is a debt, FULL where there is no limit.
    """

    __slots__ = (
        "_at",
        "_columns",
        "_numbers",
        "_own",
        "_stamp",
        "_terms",
        "day",
        "day_input",
        "day_output",
        "day_requests",
        "filled_at",
        "input",
        "model",
        "month",
        "month_input",
        "month_output",
        "month_usd",
        "name",
        "output",
        "requests",
        "tenant",
        "tokens",
    )

    def __init__(self, tenant: str, model: str, store: LimitStore) -> None:
        """`model` empty: of the key."""
        self.tenant = tenant
        self.model = model
        self.name = name_of(tenant, model)
        numbers, self._at, self._own, self._columns = store.row(self.name)
        self._numbers: Any = numbers
        self._stamp = -1  # of the last `load`
        self._terms = _NO_TERMS
        self.filled_at = 0.0  # the instant for which levels hold
        self.requests = self.tokens = self.input = self.output = FULL
        self.day = self.day_requests = self.day_input = self.day_output = 0.0
        self.month = self.month_input = self.month_output = self.month_usd = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return self._terms.is_limited

    @property
    def counts_tokens(self) -> bool:
        """Whether any limit is one of tokens, or of what they cost."""
        return self._terms.counts_tokens

    def load(self, stamp: int) -> None:
        """Read the numbers, unless the store's stamp is that of the last time: then no other user has changed them."""
        if stamp == self._stamp:
            return
        self._stamp = stamp
        numbers, at = self._numbers, NUMBER_BYTES * self._at
        levels = _LEVELS.unpack_from(numbers, at + NUMBER_BYTES * FILLED_AT)
        self.filled_at, self.requests, self.tokens, self.input, self.output = levels
        used = _CALENDAR.unpack_from(numbers, at + NUMBER_BYTES * DAY)
        self.day, self.day_requests, self.day_input, self.day_output = used[:4]
        self.month, self.month_input, self.month_output, self.month_usd = used[4:]

    def save(self) -> None:
        """Write the numbers: others can see them, and they outlive this process."""
        numbers, at = self._numbers, NUMBER_BYTES * self._at
        _LEVELS.pack_into(
            numbers,
            at + NUMBER_BYTES * FILLED_AT,
            self.filled_at,
            self.requests,
            self.tokens,
            self.input,
            self.output,
        )
        if self._terms.of_calendar:
            _CALENDAR.pack_into(
                numbers,
                at + NUMBER_BYTES * DAY,
                self.day,
                self.day_requests,
                self.day_input,
                self.day_output,
                self.month,
                self.month_input,
                self.month_output,
                self.month_usd,
            )

    def change(self, limits: KeyLimits, now: float, today: Calendar) -> None:
        """A new limit keeps the level, debts too; one where none was starts full."""
        terms = _terms_of(limits)
        if self._terms is _NO_TERMS:  # it is new here: another process may have had the same limits until now
            self._terms = terms
        self.fill(now, today, 1.0)
        self._terms = terms
        self.requests = self.requests if terms.requests else FULL
        self.tokens = self.tokens if terms.tokens else FULL
        self.input = self.input if terms.input else FULL
        self.output = self.output if terms.output else FULL
        self.fill(now, today, 1.0)

    def fill(self, now: float, today: Calendar, share: float) -> None:
        """Bring the numbers up to now; levels by a share of the limits."""
        terms = self._terms
        minutes = share * max(0.0, now - self.filled_at) / 60.0
        if minutes:
            self.filled_at = now
        if terms.requests:  # more may have been given back than there is room for
            self.requests = _filled(self.requests, minutes, terms.requests)
        if terms.tokens:
            self.tokens = _filled(self.tokens, minutes, terms.tokens)
        if terms.input:
            self.input = _filled(self.input, minutes, terms.input)
        if terms.output:
            self.output = _filled(self.output, minutes, terms.output)
        if terms.of_calendar:
            # Processes whose clocks differ by an instant do not begin the old day again; one whose clock was wrong does.
            if not today.day <= self.day <= today.day + 1:
                self.day = float(today.day)
                self.day_requests = self.day_input = self.day_output = 0.0
            if not today.month <= self.month <= today.month + 1:
                self.month = float(today.month)
                self.month_input = self.month_output = self.month_usd = 0.0

    def is_filled(self, now: float) -> bool:
        """Return whether nothing that matters would be added now."""
        return now - self.filled_at < _MOMENT_S

    def exceeded(self, left: Amount, now: float, today: Calendar) -> Limited | None:
        """Return the limit that keeps one more request out. Numbers must have been filled. `left` is for other agents."""
        terms = self._terms
        if terms.requests and self.requests - left.requests < ONE:
            return self._limited(REQUESTS, terms.requests, self.requests - left.requests)
        lacking = self.lacks_tokens(left, now, today)
        if lacking is not None:
            return lacking
        limits = terms.limits
        per_day = limits.requests_per_day
        if per_day and self.day_requests + left.requests + ONE > per_day:
            return self._over(REQUESTS, per_day, OF_DAY, now, today)
        if limits.max_concurrent and self.in_flight() >= limits.max_concurrent:
            return Limited(
                self.tenant, CONCURRENT, limits.max_concurrent, _CONCURRENT_RETRY_S, MINUTE, self.model
            )
        return None

    def lacks_tokens(self, left: Amount, now: float, today: Calendar) -> Limited | None:
        """As `exceeded`, of tokens, and of what they cost, alone."""
        terms = self._terms
        kept_in = kept_out = 0.0
        if left is not NOTHING:
            kept_in, kept_out = float(left.tokens_in), float(left.tokens_out)
        if terms.tokens and self.tokens - (kept_in + kept_out) < ONE:
            return self._limited(TOKENS, terms.tokens, self.tokens - (kept_in + kept_out))
        if terms.input and self.input - kept_in < ONE:
            return self._limited(INPUT, terms.input, self.input - kept_in)
        if terms.output and self.output - kept_out < ONE:
            return self._limited(OUTPUT, terms.output, self.output - kept_out)
        return self._over_budget(left, now, today) if terms.of_calendar and terms.counts_tokens else None

    def _over_budget(self, left: Amount, now: float, today: Calendar) -> Limited | None:
        limits = self._terms.limits
        reserved_in, reserved_out = self.reserved()
        reserved_in, reserved_out = reserved_in + left.tokens_in, reserved_out + left.tokens_out
        tokens_in, tokens_out = self.day_input + reserved_in, self.day_output + reserved_out
        for what, used, most in (
            (TOKENS, tokens_in + tokens_out, limits.tokens_per_day),
            (INPUT, tokens_in, limits.input_tokens_per_day),
            (OUTPUT, tokens_out, limits.output_tokens_per_day),
        ):
            if most and used + ONE > most:
                return self._over(what, most, OF_DAY, now, today)
        used = self.month_input + self.month_output
        if limits.tokens_per_month and used + reserved_in + reserved_out + ONE > limits.tokens_per_month:
            return self._over(TOKENS, limits.tokens_per_month, OF_MONTH, now, today)
        if limits.usd_per_month and self.month_usd + self._sum(RESERVED_USD) >= limits.usd_per_month:
            return self._over(USD, limits.usd_per_month, OF_MONTH, now, today)
        return None

    def _limited(self, what: str, per_minute: float, left: float) -> Limited:
        wait_s = (ONE - left) * 60.0 / per_minute
        return Limited(self.tenant, what, per_minute, wait_s, MINUTE, self.model)

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
        terms = self._terms
        if terms.tokens:
            self.tokens += tokens_in + tokens_out
        if terms.input:
            self.input += tokens_in
        if terms.output:
            self.output += tokens_out

    # --- agents of other regions

    def charge(self, used: Amount, usd: float, catching_up: bool, is_news: bool) -> None:
        """Drain the buckets by what other agents took; when `catching_up`, of levels above zero. What is no news may be of another day."""
        terms = self._terms
        if terms.requests:
            self.requests = _drained(self.requests, used.requests, catching_up)
        if terms.tokens:
            self.tokens = _drained(self.tokens, used.tokens_in + used.tokens_out, catching_up)
        if terms.input:
            self.input = _drained(self.input, used.tokens_in, catching_up)
        if terms.output:
            self.output = _drained(self.output, used.tokens_out, catching_up)
        if is_news and terms.of_calendar:
            self.day_requests = max(0.0, self.day_requests + used.requests)
            self._use(Spending(used.tokens_in, used.tokens_out, usd))

    def counted(self, today: Amount, in_month: Amount, usd: float) -> None:
        """All agents together have used this much. What is known here is as much, unless this agent has missed something."""
        if not self._terms.of_calendar:
            return
        self.day_requests = max(self.day_requests, float(today.requests))
        self.day_input = max(self.day_input, float(today.tokens_in))
        self.day_output = max(self.day_output, float(today.tokens_out))
        self.month_input = max(self.month_input, float(in_month.tokens_in))
        self.month_output = max(self.month_output, float(in_month.tokens_out))
        self.month_usd = max(self.month_usd, usd)

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
        terms = self._terms
        requests, tokens = terms.requests, terms.tokens
        return requests, self.requests if requests else 0.0, tokens, self.tokens if tokens else 0.0

    def levels(self) -> tuple[float | None, float | None, float | None, float | None]:
        """Return what is left of requests, tokens, input and output tokens per minute; None where there is no limit."""
        terms = self._terms
        return (
            self.requests if terms.requests else None,
            self.tokens if terms.tokens else None,
            self.input if terms.input else None,
            self.output if terms.output else None,
        )

    def used(self) -> tuple[Amount, Amount, float] | None:
        """Return what has been used on this day, in this month, and for how many US dollars; None without limits of days or months."""
        if not self._terms.of_calendar:
            return None
        day = Amount(int(self.day_requests), int(self.day_input), int(self.day_output))
        return day, Amount(0, int(self.month_input), int(self.month_output)), self.month_usd

    def _add_requests(self, count: float) -> None:
        self.requests -= count
        if self._terms.of_calendar:
            self.day_requests = max(0.0, self.day_requests + count)

    def _use(self, spent: Spending) -> None:
        """Peers count reservations first, and give some back, maybe on the next day."""
        self.day_input = max(0.0, self.day_input + spent.tokens_in)
        self.day_output = max(0.0, self.day_output + spent.tokens_out)
        self.month_input = max(0.0, self.month_input + spent.tokens_in)
        self.month_output = max(0.0, self.month_output + spent.tokens_out)
        self.month_usd += spent.usd


def name_of(tenant: str, model: str) -> str:
    """Return by which name the numbers of a key, or of one of its models, are kept and shared."""
    return f"{tenant}{_SEPARATOR}{model}" if model else tenant


def names_in(name: str) -> tuple[str, str]:
    """Return tenant and model of such a name."""
    tenant, _, model = name.partition(_SEPARATOR)
    return tenant, model


def _filled(level: float, minutes: float, per_minute: float) -> float:
    """Return the level after a time. A bucket holds one minute's worth, and at least the one request that must fit."""
    return min(max(ONE, per_minute), level + minutes * per_minute)


def _drained(level: float, taken: float, catching_up: bool) -> float:
    return max(level - taken, min(0.0, level)) if catching_up else level - taken
