"""Statements about the event log. Every function runs in a transaction of its caller."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from skyserve_cli.state import statements as q
from skyserve_cli.state import tables as t
from skyserve_cli.state.values import EventRecord, StoredEvent


def append_events(c: Connection, service: str, now: float, records: Iterable[EventRecord]) -> None:
    lines = event_rows(service, now, records)
    if lines:
        c.execute(q.APPEND_EVENTS, lines)


def event_rows(service: str, now: float, records: Iterable[EventRecord]) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    return [
        {
            "at": now,
            "service": service,
            "replica_id": line.replica_id,
            "kind": line.kind,
            "state": line.state,
            "message": line.message,
            "author": line.author,
        }
        for line in records
    ]


def read_events(
    c: Connection, service: str | Collection[str] | None, *, after: int, limit: int, newest: bool
) -> list[StoredEvent]:
    """See `Store.events`."""
    query = sa.select(t.events).where(t.events.c.seq > after)
    if isinstance(service, str):
        query = query.where(t.events.c.service == service)
    elif service is not None:
        query = query.where(t.events.c.service.in_(sorted(service)))
    order = t.events.c.seq.desc() if newest else t.events.c.seq
    rows = c.execute(query.order_by(order).limit(limit)).all()
    return [
        StoredEvent(r.seq, r.at, r.service, EventRecord(r.kind, r.message, r.replica_id, r.state, r.author))
        for r in (reversed(rows) if newest else rows)
    ]
