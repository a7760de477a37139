"""The statements of the tick, built once: building one costs more than running it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from policies.model import ReplicaState, Role
from skyserve_cli.state import tables as t

COUNT = sa.select(t.changes.c.count)
BUMP = t.changes.update().values(count=t.changes.c.count + 1).returning(t.changes.c.count)

OWNER = sa.select(t.identity.c.owner)
DRAW_OWNER = {
    name: dialect.insert(t.identity).on_conflict_do_nothing()
    for name, dialect in (("sqlite", sqlite), ("postgresql", postgresql))
}

SERVICES = sa.select(t.services).order_by(t.services.c.name)
LIVE = sa.select(t.replicas).where(t.replicas.c.state != ReplicaState.GONE.value).order_by(t.replicas.c.id)
KILLS = sa.select(t.kills)

#: How many of each service's newest replicas are searched for those that have terminated.
RECENT_REPLICAS = 200


def _recently_ended() -> sa.Select[Any]:
    newest = sa.func.row_number().over(partition_by=t.replicas.c.service, order_by=t.replicas.c.id.desc())
    ranked = (
        sa.select(t.replicas, newest.label("rank_"))
        .where(t.replicas.c.service.in_(sa.bindparam("names", expanding=True)))
        .subquery()
    )
    r = ranked.c
    columns = [r[column.name] for column in t.replicas.columns]
    return (
        sa.select(*columns)
        .where(
            r.rank_ <= RECENT_REPLICAS,
            r.state == ReplicaState.GONE.value,
            r.role == Role.REPLICA.value,
            r.ended_at > sa.bindparam("since"),
        )
        .order_by(r.service, r.id)
    )


RECENTLY_ENDED = _recently_ended()


def _same_replicas() -> sa.Select[Any]:
    v, newest = t.versions.c, t.versions.alias()
    same_hash = sa.and_(newest.c.service == v.service, newest.c.replica_hash == v.replica_hash)
    current = sa.and_(t.services.c.name == newest.c.service, t.services.c.version == newest.c.version)
    return sa.select(v.service, v.version).join(newest, same_hash).join(t.services, current)


#: (service, version) of every version whose replicas are identical to the current version's.
SAME_REPLICAS = _same_replicas()

_NAMED = t.services.c.name == sa.bindparam("service")
#: By the columns that are written.
SET_STATUS: dict[tuple[str, ...], sa.Update] = {
    columns: t.services.update().where(_NAMED).values({column: sa.bindparam(column) for column in columns})
    for columns in (
        ("target", "notes"),
        ("target", "notes", "wanted"),
        ("target", "notes", "memory", "next_replica_id"),
        ("target", "notes", "wanted", "memory", "next_replica_id"),
    )
}
APPEND_EVENTS = t.events.insert()
END_KILLS = t.kills.delete().where(
    t.kills.c.service == sa.bindparam("service_"),
    t.kills.c.replica_id.in_(sa.bindparam("gone", expanding=True)),
)


def _upsert(table: sa.Table, dialect: str) -> sa.Insert:
    """Insert rows, or overwrite those whose keys exist."""
    insert = sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)
    keys = [column.name for column in table.primary_key]
    rest = {column.name: insert.excluded[column.name] for column in table.columns if column.name not in keys}
    if rest:
        return insert.on_conflict_do_update(index_elements=keys, set_=rest)
    return insert.on_conflict_do_nothing(index_elements=keys)


UPSERT = {
    (table.name, dialect): _upsert(table, dialect)
    for table in (t.replicas, t.kills, t.demand, t.series)
    for dialect in ("sqlite", "postgresql")
}
