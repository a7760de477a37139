"""Statements about what the requests of API keys have used: a row per service, day, key, model and source.

A source is the counters of one host of load balancer agents. Its row has the sum of the day so far, which only grows, so a report that
comes twice, late, or to another controller changes nothing. Sums over sources are made when they are read. Once no agent reports a
day any more, the rows of its sources are folded into one. Every function runs in a transaction of its caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from lb.config.usage import DAY_S, KEPT_DAYS
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
    """What the requests of a group have used. `day`, `key` and `model` are None where the group is over all of them."""

    day: int | None
    key: str | None
    model: str | None
    requests: int
    tokens_in: int
    tokens_out: int


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


def total(c: Connection, name: str, since: int, until: int) -> tuple[int, int, int]:
    """Return requests, tokens in and tokens out of the days [since, until]."""
    sums = [sa.func.coalesce(sa.func.sum(_U[number]), 0) for number in _NUMBERS]
    requests, tokens_in, tokens_out = c.execute(sa.select(*sums).where(_of(name, since, until))).one()
    return int(requests), int(tokens_in), int(tokens_out)


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


def _raised(dialect: str) -> sa.Insert:
    insert = sqlite.insert(t.usage) if dialect == "sqlite" else postgresql.insert(t.usage)
    larger = sa.func.max if dialect == "sqlite" else sa.func.greatest
    raised = {number: larger(_U[number], insert.excluded[number]) for number in _NUMBERS}
    keys = [column.name for column in t.usage.primary_key]
    return insert.on_conflict_do_update(index_elements=keys, set_=raised)


_RAISE = {dialect: _raised(dialect) for dialect in ("sqlite", "postgresql")}
