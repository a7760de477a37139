"""Reads of services and their replicas. Every function runs in a transaction of its caller."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from policies.goals import UpdateMode
from policies.model import Replica, ReplicaState, Role
from skyserve_cli.state import statements as q
from skyserve_cli.state import tables as t
from skyserve_cli.state.codec import memory_from_json, replica_from_row, unread
from skyserve_cli.state.values import ServiceRow, VersionRow

_MODES = {mode.value: mode for mode in UpdateMode}


def read_services(
    c: Connection, *, down: bool, before: Mapping[str, ServiceRow] | None = None
) -> list[ServiceRow]:
    """See `Store.services`. With the rows of `before`, whose replicas are still true, those are not read."""
    rows = c.execute(q.SERVICES).all()
    live: dict[str, list[Replica]] = {}
    troubles: dict[str, str] = {}
    for was in () if before is None else before.values():
        troubles[was.name] = was.trouble
        if was.attempts:
            live[was.name] = [*was.attempts]
    for row in c.execute(q.LIVE) if before is None else ():
        if trouble := unread(row):
            troubles.setdefault(row.service, trouble)
        live.setdefault(row.service, []).append(replica_from_row(row))
    kills: dict[str, set[int]] = {}
    for row in c.execute(q.KILLS):
        kills.setdefault(row.service, set()).add(row.replica_id)
    shown = [row for row in rows if down or not row.down or row.name in live]
    same: dict[str, set[int]] = {row.name: set() for row in shown}
    for service, version in c.execute(q.SAME_REPLICAS):
        same.setdefault(service, set()).add(version)
    return [
        ServiceRow(
            name=row.name,
            incarnation=row.incarnation,
            created_at=row.created_at,
            version=row.version,
            same_replicas=frozenset(same[row.name] - {row.version}),
            update_mode=_MODES.get(row.update_mode, UpdateMode.ROLLING),
            down=row.down,
            purge=row.purge,
            wanted=row.wanted,
            target=row.target,
            notes=row.notes,
            memory=memory_from_json(row.memory, row.next_replica_id),
            lb_port=row.lb_port,
            team=row.team,
            killed=frozenset(kills.get(row.name, ())),
            replicas=_of_role(live.get(row.name, ()), Role.REPLICA),
            balancers=_of_role(live.get(row.name, ()), Role.LOAD_BALANCER),
            trouble=troubles.get(row.name, ""),
        )
        for row in shown
    ]


def live_replicas(c: Connection, service: str) -> list[Replica]:
    alive = sa.and_(t.replicas.c.service == service, t.replicas.c.state != ReplicaState.GONE.value)
    return [replica_from_row(row) for row in c.execute(sa.select(t.replicas).where(alive))]


def newest_replicas(c: Connection, service: str, limit: int) -> list[Replica]:
    """See `Store.replicas`."""
    query = sa.select(t.replicas).where(t.replicas.c.service == service)
    rows = c.execute(query.order_by(t.replicas.c.id.desc()).limit(limit)).all()
    return [replica_from_row(row) for row in reversed(rows)]


def specs_of(c: Connection, names: Collection[str]) -> list[dict[str, Any]]:
    """Return the JSON of the spec of every version of these services."""
    query = sa.select(t.versions.c.spec).where(t.versions.c.service.in_(sorted(names)))
    return [dict(spec) for spec in c.execute(query).scalars()]


def read_version(c: Connection, service: str, version: int) -> VersionRow:
    """Raise KeyError for a version that never was."""
    where = sa.and_(t.versions.c.service == service, t.versions.c.version == version)
    row = c.execute(sa.select(t.versions).where(where)).first()
    if row is None:
        raise KeyError((service, version))
    return VersionRow(row.service, row.version, row.replica_hash, row.spec, row.sealed_secrets)


def _of_role(attempts: Iterable[Replica], role: Role) -> tuple[Replica, ...]:
    return tuple(one for one in attempts if one.role is role)
