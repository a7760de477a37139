"""Statements about what services were asked for: minutes for two weeks, then means of ten minutes for two months.

Every function runs in a transaction of its caller. Folding takes whole tens of minutes, and reads and removes them in one
transaction, so a process that is killed leaves each minute in exactly one row.
"""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from skyserve_cli.state import statements as q
from skyserve_cli.state import tables as t
from skyserve_cli.state.values import DemandRow

MINUTE, FOLDED = 1, 10  # spans
KEEP_MINUTES = 14 * 1440
KEEP_FOLDED_MINUTES = 56 * 1440
STEP_MINUTES = 600  # that one transaction folds

_D = t.demand.c
_VALUES = (_D.requests, _D.prompt_tokens, _D.response_tokens, _D.late, _D.ready)


def write(c: Connection, name: str, rows: Iterable[DemandRow], span: int = MINUTE) -> None:
    """Insert rows, or overwrite those that exist."""
    found = [{"service": name, "span": span, **row._asdict()} for row in rows]
    if found:
        c.execute(q.UPSERT[t.demand.name, c.dialect.name], found)


def read(c: Connection, name: str, since: int, span: int = MINUTE) -> list[DemandRow]:
    """Return the rows from minute `since` on, in order."""
    query = sa.select(_D.minute, *_VALUES).where(_D.service == name, _D.span == span, _D.minute >= since)
    return [DemandRow(*row) for row in c.execute(query.order_by(_D.minute))]


def drop(c: Connection, name: str, since: int) -> None:
    """Remove the minutes from `since` on."""
    c.execute(t.demand.delete().where(_D.service == name, _D.span == MINUTE, _D.minute >= since))


def names(c: Connection) -> list[str]:
    return list(c.execute(sa.select(_D.service).distinct().order_by(_D.service)).scalars())


def fold(c: Connection, name: str, now_minute: int) -> int:
    """Fold the oldest minutes that are due, at most STEP_MINUTES of them, and delete older ones.

    Returns how many rows were removed.
    """
    before = (now_minute - KEEP_MINUTES) // FOLDED * FOLDED
    minutes = sa.and_(_D.service == name, _D.span == MINUTE, _D.minute < before)
    first = c.execute(sa.select(sa.func.min(_D.minute)).where(minutes)).scalar()
    dropped = 0
    if first is not None:
        end = min(before, first // FOLDED * FOLDED + STEP_MINUTES)
        due = sa.and_(minutes, _D.minute < end)
        tens: dict[int, list[DemandRow]] = {}
        for row in c.execute(sa.select(_D.minute, *_VALUES).where(due)):
            tens.setdefault(row.minute // FOLDED * FOLDED, []).append(DemandRow(*row))
        write(c, name, [_mean(start, rows) for start, rows in tens.items()], FOLDED)
        dropped += c.execute(t.demand.delete().where(due)).rowcount
    old = sa.and_(_D.service == name, _D.span == FOLDED, _D.minute < now_minute - KEEP_FOLDED_MINUTES)
    return dropped + c.execute(t.demand.delete().where(old)).rowcount


def _mean(start: int, rows: list[DemandRow]) -> DemandRow:
    """Return the mean of the minutes that are known."""
    means = (sum(column) / len(rows) for column in list(zip(*rows, strict=True))[1:])
    return DemandRow(start, *means)
