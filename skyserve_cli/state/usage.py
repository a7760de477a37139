"""Statements about what the requests of API keys have used: a row per service, day, key, model and source.

A source is the counters of one host of load balancer agents. Its row has the sum of the day so far, which only grows, so a report that
comes twice, late, or to another controller changes nothing. Sums over sources are made when they are read. Once no agent reports a
day any more, the rows of its sources are folded into one. Every function runs in a transaction of its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from lb.config.usage import DAY_S, KEPT_DAYS, MOST_COUNT, KeyTotal, first_day, month_of
from skyserve_cli.state import tables as t

KEPT = 400  # days
#: Days that rows may be of, back from today: an agent's clock may be a day behind or ahead.
OPEN_DAYS = KEPT_DAYS + 1
FOLDED = ""

_U = t.usage.c
_NUMBERS = ("requests", "tokens_in", "tokens_out")
GROUPS = ("day", "key", "model")


class StoredUsage(NamedTuple):
    """A row to store."""

    service: str
    day: int
    key: str
    model: str
    source: str
    requests: int
    tokens_in: int
    tokens_out: int


class UsageTotal(NamedTuple):
    """What the requests of a group have used. `day`, `key` and `model` are None where the group is over all of them.

    `usd` is what the tokens cost; None without prices.
    """

    day: int | None
    key: str | None
    model: str | None
    requests: int
    tokens_in: int
    tokens_out: int
    usd: float | None = None


#: Returns the US dollars of the tokens of a model: of prompts and of responses.
UsdOf = Callable[[str, int, int], float]


def day_of(now: float) -> int:
    """Return the day, counted from 1970-01-01 (UTC), of an instant in UNIX seconds."""
    return int(now // DAY_S)


def is_open(day: int, now: float) -> bool:
    """Return whether rows of this day are still taken. Those of an earlier day may have been folded, so they would count twice."""
    return -OPEN_DAYS < day - day_of(now) <= 1


def write(c: Connection, rows: Iterable[StoredUsage]) -> None:
    """Insert rows, or raise the numbers of those that exist. Numbers that are lower than the stored ones are of an older report."""
    found = [row._asdict() for row in rows]
    if found:
        c.execute(_RAISE[c.dialect.name], found)


def read(
    c: Connection, name: str, since: int, until: int, by: Sequence[str], most: int, *, top: bool
) -> list[UsageTotal]:
    """Return at most `most` sums of the days [since, until], by some of GROUPS.

    They are in the order of these groups, or, with `top`, those with the most tokens come first.
    """
    groups = [_U[group] for group in by]
    sums = [sa.func.sum(_U[number]).label(number) for number in _NUMBERS]
    tokens = sa.func.sum(_U.tokens_in + _U.tokens_out)
    query = sa.select(*groups, *sums).where(_of(name, since, until)).group_by(*groups)
    order = [tokens.desc(), *groups] if top else groups
    rows = c.execute(query.order_by(*order).limit(most)).mappings()
    return [_total(row) for row in rows if row["requests"] is not None]


def total(c: Connection, name: str, since: int, until: int) -> UsageTotal:
    """Return the sum of the days [since, until]."""
    sums = [sa.func.coalesce(sa.func.sum(_U[number]), 0) for number in _NUMBERS]
    requests, tokens_in, tokens_out = c.execute(sa.select(*sums).where(_of(name, since, until))).one()
    return UsageTotal(None, None, None, int(requests), int(tokens_in), int(tokens_out))


def read_priced(
    c: Connection, name: str, since: int, until: int, by: Sequence[str], most: int, *, top: bool, usd: UsdOf
) -> tuple[list[UsageTotal], UsageTotal]:
    """Return what `read` returns, with `usd`, and the sum of all groups.

    Each model has its own price, so the database adds up each group by model, and the models are added up here.
    """
    groups = [_U[group] for group in dict.fromkeys((*by, "model"))]
    sums = [sa.func.sum(_U[number]).label(number) for number in _NUMBERS]
    query = sa.select(*groups, *sums).where(_of(name, since, until)).group_by(*groups).order_by(*groups)
    found: dict[tuple[Any, ...], UsageTotal] = {}
    total = UsageTotal(None, None, None, 0, 0, 0, 0.0)
    for row in c.execute(query).mappings():
        numbers = [int(row[number]) for number in _NUMBERS]
        cost = usd(row["model"], *numbers[1:])
        day, key, model = group = tuple(row[one] if one in by else None for one in GROUPS)
        total = _plus(total, numbers, cost)
        found[group] = _plus(found.get(group) or UsageTotal(day, key, model, 0, 0, 0, 0.0), numbers, cost)
    rows = list(found.values())
    if top:
        rows.sort(
            key=lambda row: -(row.tokens_in + row.tokens_out)
        )  # stable: by group where tokens are equal
    return rows[:most], total


def totals(c: Connection, name: str, today: int, most: int) -> list[KeyTotal]:
    """Return at most `most` sums by key and model, over all sources, of the month of `today`; the models of a key follow each other."""
    of_today = [sa.func.sum(sa.case((_U.day == today, _U[number]), else_=0)) for number in _NUMBERS]
    of_month = [sa.func.sum(_U[number]) for number in _NUMBERS[1:]]
    query = (
        sa.select(_U.key, _U.model, *of_today, *of_month)
        .where(_of(name, first_day(month_of(today)), today))
        .group_by(_U.key, _U.model)
        .order_by(_U.key, _U.model)
        .limit(most)
    )
    return [
        KeyTotal(row[0], row[1], *(min(MOST_COUNT, int(one)) for one in row[2:])) for row in c.execute(query)
    ]


def unfolded(c: Connection, now: float) -> list[tuple[str, int]]:
    """Return (service, day) of all that can be folded."""
    query = sa.select(_U.service, _U.day).where(_U.source != FOLDED, _U.day <= day_of(now) - OPEN_DAYS)
    return [(row.service, row.day) for row in c.execute(query.distinct().order_by(_U.service, _U.day))]


def fold(c: Connection, name: str, day: int) -> None:
    """Make one row per key and model of a day that is over everywhere."""
    of_day = sa.and_(_U.service == name, _U.day == day)
    sums = [sa.func.sum(_U[number]).label(number) for number in _NUMBERS]
    rows = c.execute(sa.select(_U.key, _U.model, *sums).where(of_day).group_by(_U.key, _U.model)).all()
    c.execute(t.usage.delete().where(of_day))
    write(c, (StoredUsage(name, day, row[0], row[1], FOLDED, *map(int, row[2:])) for row in rows))


def old(c: Connection, now: float) -> list[tuple[str, int]]:
    """Return (service, day) of all that is too old to be kept."""
    query = sa.select(_U.service, _U.day).where(_U.day <= day_of(now) - KEPT)
    return [(row.service, row.day) for row in c.execute(query.distinct())]


def drop(c: Connection, name: str, day: int) -> None:
    c.execute(t.usage.delete().where(_U.service == name, _U.day == day))


def _of(name: str, since: int, until: int) -> sa.ColumnElement[bool]:
    return sa.and_(_U.service == name, _U.day >= since, _U.day <= until)


def _total(row: Any) -> UsageTotal:
    return UsageTotal(*(row.get(group) for group in GROUPS), *(int(row[number]) for number in _NUMBERS))


def _plus(total: UsageTotal, numbers: Sequence[int], usd: float) -> UsageTotal:
    requests, tokens_in, tokens_out = numbers
    return total._replace(
        requests=total.requests + requests,
        tokens_in=total.tokens_in + tokens_in,
        tokens_out=total.tokens_out + tokens_out,
        usd=(total.usd or 0.0) + usd,
    )


def _raised(dialect: str) -> sa.Insert:
    insert = sqlite.insert(t.usage) if dialect == "sqlite" else postgresql.insert(t.usage)
    larger = sa.func.max if dialect == "sqlite" else sa.func.greatest
    raised = {number: larger(_U[number], insert.excluded[number]) for number in _NUMBERS}
    keys = [column.name for column in t.usage.primary_key]
    return insert.on_conflict_do_update(index_elements=keys, set_=raised)


_RAISE = {dialect: _raised(dialect) for dialect in ("sqlite", "postgresql")}
