"""Removal of old rows in small steps, so that no other writer waits for long.

What to remove is found while reading, which blocks no writer in WAL mode or on PostgreSQL. Each step then removes at most
STEP_ROWS rows by primary key in a transaction of its own, and `pause` is called between steps, outside of transactions. A
process that is killed between two steps leaves a consistent database and the rest for the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import sqlalchemy as sa

from policies.model import ReplicaState
from skyserve_cli.state import tables as t
from skyserve_cli.state.costs import spent_columns
from skyserve_cli.state.database import Database

STEP_ROWS = 500


def archive_replicas(database: Database, before: float, keep: int, pause: Callable[[], None]) -> int:
    """See `Store.archive_replicas`."""
    r = t.replicas.c
    dropped = 0
    for name in _column(database, sa.select(t.services.c.name)):
        gone = sa.and_(r.service == name, r.state == ReplicaState.GONE.value)
        newest = sa.select(r.id).where(gone).order_by(r.id.desc()).offset(keep).limit(1)
        last = next(iter(_column(database, newest)), None)
        if last is None:
            continue
        old = _column(database, sa.select(r.id).where(gone, r.id <= last, r.ended_at < before).order_by(r.id))
        for ids in _steps(old):
            step = sa.and_(gone, r.id.in_(ids))
            with database.writing() as c:
                usd, on_demand = c.execute(sa.select(*spent_columns(before)).where(step)).one()
                s = t.services.c
                folded = {
                    "folded_usd": s.folded_usd + (usd or 0.0),
                    "folded_on_demand_usd": s.folded_on_demand_usd + (on_demand or 0.0),
                }
                c.execute(t.services.update().where(s.name == name).values(folded))
                dropped += c.execute(t.replicas.delete().where(step)).rowcount
            pause()
    return dropped


def prune_events(database: Database, before: float, keep: int, pause: Callable[[], None]) -> int:
    """See `Store.prune_events`."""
    dropped = 0
    for name in _column(database, sa.select(t.events.c.service).distinct()):
        while True:
            with database.reading() as c:
                useless = _useless(c, name, before, keep)
                if useless is None:
                    break
                lines = c.execute(
                    sa.select(t.events.c.seq).where(useless).order_by(t.events.c.seq).limit(STEP_ROWS * 100)
                )
                found = list(lines.scalars())
            for seqs in _steps(found):
                with database.writing() as c:
                    dropped += c.execute(t.events.delete().where(t.events.c.seq.in_(seqs))).rowcount
                pause()
            if len(found) < STEP_ROWS * 100:
                break
    return dropped


def _useless(c: sa.Connection, name: object, before: float, keep: int) -> sa.ColumnElement[bool] | None:
    """Return which lines of a service can be removed; None: it has no more than are kept."""
    e = t.events.c
    newest = sa.select(e.seq).where(e.service == name).order_by(e.seq.desc())
    last = c.execute(newest.offset(keep).limit(1)).scalar()
    if last is None:
        return None
    known = sa.select(t.replicas.c.id).where(t.replicas.c.service == name)
    unknown = sa.or_(e.replica_id.is_(None), e.replica_id.not_in(known))
    old = sa.and_(e.service == name, e.seq <= last, e.at < before, unknown)
    # `read_history` finds by the last end of a folded replica what it misses, and how many were wanted then.
    end = c.execute(sa.select(sa.func.max(e.seq)).where(old, e.state == ReplicaState.GONE.value)).scalar()
    missed = e.seq < (end or 0)
    scaled = sa.and_(e.replica_id.is_(None), e.state.is_not(None))
    wanted = c.execute(sa.select(sa.func.max(e.seq)).where(old, missed, scaled)).scalar()
    return sa.and_(old, sa.or_(e.state.is_(None), sa.and_(missed, e.seq != (wanted or 0))))


def _column(database: Database, query: sa.Select[tuple[object]]) -> Sequence[object]:
    with database.reading() as c:
        return list(c.execute(query).scalars())


def _steps(keys: Sequence[object]) -> Iterator[Sequence[object]]:
    for start in range(0, len(keys), STEP_ROWS):
        yield keys[start : start + STEP_ROWS]
