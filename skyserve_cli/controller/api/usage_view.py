"""What the requests of API keys have used, as JSON: pure functions of stored sums.

    {"name", "since", "until", "by": ["key", "model"],
     "rows": [{"key", "model", "requests", "tokens_in", "tokens_out"}, ...],
     "total": {"requests", "tokens_in", "tokens_out"}}

Where the service has prices of tokens, rows and the total have "usd" too: what the tokens cost at these prices, which are those of today for
earlier days as well. Days are dates in UTC, both included. A row has the groups of `by` only. `key` is "" where no key was needed, `model` is "" for requests
that named none, or one that no engine has served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from typing import Any, NamedTuple

from lb.config.key_limits import Prices, price_of
from skyserve_cli.state.usage import GROUPS, UsageTotal, UsdOf

MOST_ROWS = 100_000
USUAL_DAYS = 30
_EPOCH = date(1970, 1, 1)
_USUAL_GROUPS = ("key", "model")


class UsageOfDays(NamedTuple):
    """Days [since, until], counted from 1970-01-01, and how they are summed."""

    since: int
    until: int
    by: tuple[str, ...]
    top: int | None


class UsageQuestion(NamedTuple):
    """What a caller has asked for. Days are counted from 1970-01-01."""

    since: int | None
    until: int | None
    by: tuple[str, ...]
    top: int | None

    def on(self, today: int) -> UsageOfDays:
        """Return the question with its days. Raises ValueError if the last day is before the first."""
        until = today if self.until is None else self.until
        since = until - USUAL_DAYS + 1 if self.since is None else self.since
        if since > until:
            raise ValueError(f"until: {text_of(until)} is before {text_of(since)}")
        return UsageOfDays(since, until, self.by, self.top)


def usage_question(query: Mapping[str, str]) -> UsageQuestion:
    """Raise ValueError."""
    groups = tuple(filter(None, query.get("by", ",".join(_USUAL_GROUPS)).split(",")))
    if not set(groups) <= set(GROUPS) or len(set(groups)) < len(groups):
        raise ValueError(f"by: {query['by']!r} is not some of {', '.join(GROUPS)}, each once")
    since, until = (_day(query, name) for name in ("since", "until"))
    top = None if "top" not in query else min(MOST_ROWS, max(1, int(query["top"])))
    return UsageQuestion(since, until, groups, top)


def usd_of(prices: Prices) -> UsdOf:
    """Return the function that prices the tokens of a model."""
    by_model = dict(prices)
    return lambda model, tokens_in, tokens_out: price_of(by_model, model).usd(tokens_in, tokens_out)


def usage_view(
    name: str, asked: UsageOfDays, rows: Sequence[UsageTotal], total: UsageTotal
) -> dict[str, Any]:
    """Raise ValueError if there are more than MOST_ROWS rows."""
    if len(rows) > MOST_ROWS:
        raise ValueError(
            f"there are more than {MOST_ROWS} rows: ask for fewer days, fewer groups, or the top ones"
        )
    return {
        "name": name,
        "since": text_of(asked.since),
        "until": text_of(asked.until),
        "by": list(asked.by),
        "rows": [{group: _shown(row, group) for group in asked.by} | _numbers(row) for row in rows],
        "total": _numbers(total),
    }


def text_of(day: int) -> str:
    """Return the date of a day that is counted from 1970-01-01."""
    return (_EPOCH + timedelta(days=day)).isoformat()


def _shown(row: UsageTotal, group: str) -> str | None:
    return text_of(row.day) if group == "day" and row.day is not None else getattr(row, group)


def _numbers(row: UsageTotal) -> dict[str, Any]:
    numbers = {"requests": row.requests, "tokens_in": row.tokens_in, "tokens_out": row.tokens_out}
    return numbers if row.usd is None else numbers | {"usd": round(row.usd, 6)}


def _day(query: Mapping[str, str], name: str) -> int | None:
    """Return a day of the query; None without one."""
    text = query.get(name)
    if text is None:
        return None
    try:
        return (date.fromisoformat(text) - _EPOCH).days
    except ValueError:
        raise ValueError(f"{name}: {text!r} is no date such as 2026-11-27") from None
