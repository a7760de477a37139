"""Statements about goals: what the API stores for the reconciler to bring about.

Every function runs in a transaction of its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from policies.goals import UpdateMode
from policies.model import Memory, ReplicaState
from skyserve_cli.state import statements as q
from skyserve_cli.state import tables as t
from skyserve_cli.state.codec import memory_to_json
from skyserve_cli.state.event_log import append_events
from skyserve_cli.state.snapshot import live_replicas, read_version
from skyserve_cli.state.values import (
    EventRecord,
    NoSuchServiceError,
    NotKeptError,
    ServiceExistsError,
    StillGoingDownError,
)


class NewVersion(NamedTuple):
    """What a version of a service brings with it.

    `sealed_secrets` are encrypted; `target` is for a new service. `team` is whose quota it uses from now on; None: that of before, and
    of a new service none.
    """

    spec: Mapping[str, Any]
    replica_hash: str
    sealed_secrets: bytes
    lb_port: int
    target: int
    team: str | None = None


def put_service(
    c: Connection,
    name: str,
    new: NewVersion,
    mode: UpdateMode | None,
    now: float,
    draw: Callable[[int], str],
    author: str = "",
) -> int:
    """See `Store.put_service`. `draw` returns unique names: a number of random bytes, as hexadecimal digits."""
    row = c.execute(sa.select(t.services).where(t.services.c.name == name).with_for_update()).first()
    is_up = row is not None and not row.down
    if is_up and mode is None:
        raise ServiceExistsError(name)
    if not is_up and mode is not None:
        raise NoSuchServiceError(name)
    if row is not None and row.down and live_replicas(c, name):
        raise StillGoingDownError(name)
    version = 1 if row is None else row.version + 1
    goal = {
        "version": version,
        "update_mode": (mode or UpdateMode.ROLLING).value,
        "down": False,
        "purge": False,
        "lb_port": new.lb_port,
    }
    if not is_up:
        goal |= {
            "incarnation": draw(4),
            "created_at": now,
            "memory": memory_to_json(Memory()),
            "wanted": 0,
            "target": new.target,
            "notes": "",
            "team": "",
        }
    if new.team is not None:
        goal["team"] = new.team
    if row is None:
        fresh = {"name": name, "next_replica_id": 1, "folded_usd": 0.0, "folded_on_demand_usd": 0.0}
        c.execute(t.services.insert().values(**fresh, **goal))
    else:
        c.execute(t.services.update().where(t.services.c.name == name).values(**goal))
    c.execute(
        t.versions.insert().values(
            service=name,
            version=version,
            created_at=now,
            replica_hash=new.replica_hash,
            spec=dict(new.spec),
            sealed_secrets=new.sealed_secrets,
        )
    )
    kept = read_version(c, name, version).spec
    for key, value in new.spec.items():
        if key not in kept or kept[key] != value:
            raise NotKeptError(key)
    verb = "up" if mode is None else f"{mode.value} update"
    append_events(c, name, now, [EventRecord("goal", f"{verb}: version {version}", author=author)])
    return version


def set_down(c: Connection, name: str, *, purge: bool, now: float, author: str = "") -> None:
    """Raise NoSuchServiceError."""
    where = t.services.c.name == name
    if c.execute(sa.select(t.services.c.name).where(where)).first() is None:
        raise NoSuchServiceError(name)
    c.execute(t.services.update().where(where).values(down=True, purge=purge))
    what = "down, without drain" if purge else "down"
    append_events(c, name, now, [EventRecord("goal", what, author=author)])


def kill_replica(c: Connection, name: str, replica_id: int, *, now: float, author: str = "") -> None:
    """Raise NoSuchServiceError, or KeyError if the replica is not alive."""
    r = t.replicas.c
    alive = sa.select(r.id).where(r.service == name, r.state != ReplicaState.GONE.value)
    live = set(c.execute(alive).scalars())
    named = sa.select(t.services.c.name).where(t.services.c.name == name)
    if not live and not c.execute(named).first():
        raise NoSuchServiceError(name)
    if replica_id not in live:
        raise KeyError(replica_id)
    c.execute(q.UPSERT[t.kills.name, c.dialect.name], [{"service": name, "replica_id": replica_id}])
    append_events(c, name, now, [EventRecord("goal", "end this replica", replica_id, author=author)])
