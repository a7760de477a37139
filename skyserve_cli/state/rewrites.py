"""Rewrites of stored values: secrets that are sealed with a new key, and instants after the host's clock was set.

Every function runs in a transaction of its caller.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from policies.model import ReplicaState
from skyserve_cli.state import tables as t
from skyserve_cli.state.codec import moved_instants


def reseal(c: Connection, again: Callable[[bytes], bytes | None]) -> tuple[int, list[tuple[str, int]]]:
    """See `Store.reseal`."""
    kept: list[tuple[str, int]] = []
    v = t.versions.c
    rows = c.execute(sa.select(v.service, v.version, v.sealed_secrets)).all()
    for service, version, sealed in rows:
        content = again(sealed)
        if content is None:
            kept.append((service, version))
            continue
        here = sa.and_(v.service == service, v.version == version)
        c.execute(t.versions.update().where(here).values(sealed_secrets=content))
    return len(rows) - len(kept), kept


def move_instants(c: Connection, by_s: float) -> None:
    """See `Store.move_instants`."""
    r = t.replicas.c
    measured = (r.since, r.created_at, r.launched_at, r.ready_at, r.drain_by)
    live = r.state != ReplicaState.GONE.value
    c.execute(t.replicas.update().where(live).values({one: one + by_s for one in measured}))
    for name, memory in c.execute(sa.select(t.services.c.name, t.services.c.memory)).all():
        here = t.services.c.name == name
        c.execute(t.services.update().where(here).values(memory=moved_instants(memory, by_s)))
