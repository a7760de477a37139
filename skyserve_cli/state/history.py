"""The stored past of a service."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from policies.model import ReplicaState, Role
from skyserve_cli.state import tables as t
from skyserve_cli.state.codec import replica_from_row
from skyserve_cli.state.values import ServiceHistory, StateChange

_CHANGES_PER_REPLICA = 10
_FOR_EVER = 1e18  # later than any end


def read_history(c: Connection, name: str, since: float, most: int) -> ServiceHistory:
    """See `Store.history`. Rows that were folded away are missed by the ends that the event log still has."""
    complete_from = since
    r, e = t.replicas.c, t.events.c
    ended_at = sa.func.coalesce(r.ended_at, _FOR_EVER)
    lived = sa.select(t.replicas).where(r.service == name, r.role == Role.REPLICA.value, ended_at >= since)
    rows = c.execute(lived.order_by(ended_at.desc(), r.id.desc()).limit(most + 1)).all()
    if len(rows) > most:
        complete_from = max(complete_from, rows[most].ended_at or complete_from)
    replicas = sorted((replica_from_row(row) for row in rows[:most]), key=lambda replica: replica.id)

    known = sa.select(r.id).where(r.service == name)
    folded = sa.select(sa.func.max(e.at)).where(
        e.service == name, e.state == ReplicaState.GONE.value, e.at >= since, e.replica_id.not_in(known)
    )
    complete_from = max(complete_from, c.execute(folded).scalar() or complete_from)

    changed = sa.select(e.at, e.replica_id, e.state, e.seq).where(
        e.service == name,
        e.state.is_not(None),
        sa.or_(e.replica_id.is_(None), e.replica_id.in_(sa.select(lived.subquery().c.id))),
    )
    lines = list(c.execute(changed.order_by(e.seq.desc()).limit(most * _CHANGES_PER_REPLICA + 1)))
    if len(lines) > most * _CHANGES_PER_REPLICA:
        complete_from = max(complete_from, lines.pop().at)
    changes = tuple(StateChange(line.at, line.replica_id, line.state) for line in reversed(lines))
    return ServiceHistory(since, complete_from, tuple(replicas), changes)
