"""The store: a dozen verbs, each one transaction.

Who writes what: the API writes goals (`put_service`, `set_down`, `kill_replica`), the reconciler everything
else through `commit`. No transaction is open during a call to a cloud or a load balancer.

SQLite runs in WAL mode with full synchronisation: an intent that was committed is on the disk before the cloud
is requested the machine, so not even a power cut can separate the two.
"""

from __future__ import annotations

import secrets as random_source
import shutil
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.engine import URL, Connection, make_url

from policies.goals import UpdateMode
from policies.model import Memory, Replica, ReplicaState, Role
from skyserve_cli.state import demand, prune
from skyserve_cli.state import statements as q
from skyserve_cli.state import tables as t
from skyserve_cli.state.codec import (
    memory_from_json,
    memory_to_json,
    moved_instants,
    replica_from_row,
    replica_to_row,
)
from skyserve_cli.state.connect import connected
from skyserve_cli.state.history import read_history
from skyserve_cli.state.lease import ControllerLease, LeaseTable, verify
from skyserve_cli.state.opening import check_file, check_revision, sqlite_file
from skyserve_cli.state.read_cache import ReadCache
from skyserve_cli.state.values import (
    Commit,
    DemandRow,
    EventRecord,
    NoSuchServiceError,
    ServiceExistsError,
    ServiceHistory,
    ServiceRow,
    Spent,
    StillGoingDownError,
    StoredEvent,
    VersionRow,
)

_LEAST_FREE_BYTES = 256 << 10


class Store:
    """The database behind a SQLAlchemy URL. Thread-safe: every verb takes its own connection.

    Once it is fenced (`fence`) every verb that writes raises LeaseLostError, and writes nothing, unless the lease has that
    epoch.
    """

    def __init__(
        self,
        url: str | URL,
        *,
        migrate: bool = True,
        draw: Callable[[int], str] = random_source.token_hex,
        database_clock: Callable[[], float] | None = None,
        beside: Store | None = None,
    ) -> None:
        """Raise DatabaseUnusableError.

        `migrate` False makes the tables as they are now, without Alembic. `draw` returns unique names: a number
        of random bytes, as hexadecimal digits. `database_clock` stands in for the database's, in virtual time. `beside` is
        another store, whose database in memory this one is to share.
        """
        self._draw = draw
        self._epoch: int | None = None
        self._read_cache: ReadCache | None = None
        self._lock = threading.Lock()
        self._moving = threading.RLock()
        url = make_url(url)
        file = sqlite_file(url)
        if file is not None and migrate:
            check_file(file)
        in_memory = url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")
        self._engine: sa.Engine = connected(url, in_memory=in_memory) if beside is None else beside._engine
        self._is_exclusive = in_memory and beside is None  # no other process can write to it
        if beside is not None:
            beside._is_exclusive = False
        self._leases = LeaseTable(url.get_backend_name(), database_clock)
        one_photograph = {} if url.get_backend_name() == "sqlite" else {"isolation_level": "REPEATABLE READ"}
        self._reader = self._engine.execution_options(**one_photograph)
        self._writer = self._engine.execution_options(writes=True)
        # A renewal waits for no other query of this process, and none for the disk: a power cut ends all terms here. Reads
        # lock nothing there that writes would, so one kind of transaction does for both.
        renewing = self._engine if in_memory else connected(url, in_memory=False, durable=False)
        self._renewer = renewing.execution_options(writes=True)
        if in_memory or not migrate:
            t.metadata.create_all(self._writer)
            with self._writer.begin() as c:
                if c.execute(q.COUNT).first() is None:
                    c.execute(t.changes.insert().values(id=1, count=0))
                    c.execute(
                        t.lease.insert().values(
                            id=1, holder="", about="", epoch=0, renewals=0, expires_at=0.0
                        )
                    )
        else:
            self._migrate()

    @property
    def url(self) -> URL:
        return self._engine.url

    def close(self) -> None:
        self._engine.dispose()
        self._renewer.dispose()

    # --- who may write ------------------------------------------------------------------------------------

    def fence(self, epoch: int) -> None:
        """From now on write only in the term of this epoch; NO_TERM (of `lease`): not at all."""
        self._epoch = epoch

    def lease(self) -> ControllerLease:
        with self._renewer.connect() as c:
            return self._leases.read(c)

    def take_lease(
        self, holder: str, about: str, *, ttl_s: float, unrenewed: ControllerLease | None = None
    ) -> ControllerLease | None:
        """Begin a term, and fence this store with it; None if another controller leads.

        `unrenewed`: the lease as it has been for a whole time to live by the caller's own clock.
        """
        with self._renewer.begin() as c:
            lease = self._leases.take(c, holder, about, ttl_s, unrenewed)
        if lease is not None:
            self.fence(lease.epoch)
            self.forget()
        return lease

    def renew_lease(self, epoch: int, *, ttl_s: float) -> ControllerLease | None:
        """Return None if that term is over."""
        with self._renewer.begin() as c:
            return self._leases.renew(c, epoch, ttl_s)

    def release_lease(self, epoch: int) -> None:
        with self._renewer.begin() as c:
            self._leases.release(c, epoch)

    def reconnect_lease(self) -> None:
        """Read the lease over a new connection from now on."""
        self._renewer.dispose()

    def fingerprints(self) -> dict[str, str]:
        """Of the keys that this database was written with, by the key's name."""
        with self._reader.connect() as c:
            return {row.key: row.value for row in c.execute(sa.select(t.fingerprints))}

    def put_fingerprints(self, values: Mapping[str, str]) -> None:
        """In place of those that are there."""
        with self._writing() as c:
            c.execute(t.fingerprints.delete())
            c.execute(
                t.fingerprints.insert(), [{"key": key, "value": value} for key, value in values.items()]
            )

    # --- goals: written by the API ------------------------------------------------------------------------

    def put_service(
        self,
        name: str,
        spec: Mapping[str, Any],
        *,
        replica_hash: str,
        sealed_secrets: bytes,
        lb_port: int,
        target: int,
        mode: UpdateMode | None,
        now: float,
    ) -> int:
        """Create the service, or add a version to it; returns the version.

        `target` is how many replicas a new service begins with.

        `mode` None means "must be new": raises ServiceExistsError if the service is up. A name that is down
        is revived: versions and replica ids go on, so no id is ever used twice; StillGoingDownError as long
        as replicas of before live. A `mode` raises NoSuchServiceError if there is nothing up to update.
        """
        with self._writing() as c:
            self._bump_revision(c)
            same_name = t.services.c.name == name
            row = c.execute(sa.select(t.services).where(same_name).with_for_update()).first()
            if row is not None and not row.down and mode is None:
                raise ServiceExistsError(name)
            if (row is None or row.down) and mode is not None:
                raise NoSuchServiceError(name)
            if row is not None and row.down and self._live(c, name):
                raise StillGoingDownError(name)
            version = 1 if row is None else row.version + 1
            goal = {
                "version": version,
                "update_mode": (mode or UpdateMode.ROLLING).value,
                "down": False,
                "purge": False,
                "lb_port": lb_port,
            }
            if row is None:
                fresh = {
                    "name": name,
                    "incarnation": self._draw(4),
                    "created_at": now,
                    "wanted": 0,
                    "target": target,
                    "notes": "",
                    "next_replica_id": 1,
                    "memory": memory_to_json(Memory()),
                    "folded_usd": 0.0,
                    "folded_on_demand_usd": 0.0,
                }
                c.execute(t.services.insert().values(**fresh, **goal))
            else:
                if row.down:
                    goal |= {
                        "incarnation": self._draw(4),
                        "created_at": now,
                        "memory": memory_to_json(Memory()),
                        "wanted": 0,
                        "target": target,
                        "notes": "",
                    }
                c.execute(t.services.update().where(same_name).values(**goal))
            c.execute(
                t.versions.insert().values(
                    service=name,
                    version=version,
                    created_at=now,
                    replica_hash=replica_hash,
                    spec=dict(spec),
                    sealed_secrets=sealed_secrets,
                )
            )
            verb = "up" if mode is None else f"{mode.value} update"
            self._append(c, name, now, [EventRecord("goal", f"{verb}: version {version}")])
        self.forget()
        return version

    def set_down(self, name: str, *, purge: bool, now: float) -> None:
        """Take the service down; `purge`: without waiting for requests to finish."""
        with self._writing() as c:
            self._bump_revision(c)
            where = t.services.c.name == name
            if c.execute(sa.select(t.services.c.name).where(where)).first() is None:
                raise NoSuchServiceError(name)
            c.execute(t.services.update().where(where).values(down=True, purge=purge))
            self._append(c, name, now, [EventRecord("goal", "down, without drain" if purge else "down")])
        self.forget()

    def kill_replica(self, name: str, replica_id: int, *, now: float) -> None:
        """End one replica; another will take its place.

        Raises NoSuchServiceError, or KeyError if it is not alive.
        """
        with self._writing() as c:
            self._bump_revision(c)
            live = {replica.id for replica in self._live(c, name)}
            if (
                not live
                and not c.execute(sa.select(t.services.c.name).where(t.services.c.name == name)).first()
            ):
                raise NoSuchServiceError(name)
            if replica_id not in live:
                raise KeyError(replica_id)
            self._upsert(c, t.kills, [{"service": name, "replica_id": replica_id}])
            self._append(c, name, now, [EventRecord("goal", "end this replica", replica_id)])
        self.forget()

    # --- the reconciler's ---------------------------------------------------------------------------------

    def owner(self) -> str:
        """Return the tag of everything this controller launches; drawn once per database."""
        with self._writer.begin() as c:  # needs no lease: of two that come at once, one draws
            found = c.execute(q.OWNER).scalar()
            if found is None:
                c.execute(q.DRAW_OWNER[c.dialect.name], {"id": 1, "owner": self._draw(4)})
                found = c.execute(q.OWNER).scalar_one()
            return str(found)

    def services(self, *, down: bool = False) -> list[ServiceRow]:
        """Return the photograph: every service that is up or of which something is left (`down`: also the others)."""
        if self._is_exclusive and self._read_cache is not None and not down:
            return list(self._read_cache.rows.values())
        with self._reader.connect() as c, self._lock:
            count = int(c.execute(q.COUNT).scalar_one())
            if down:
                return self._read(c, down=True)
            if self._read_cache is None or self._read_cache.count != count:
                rows = self._read(c, down=False)
                self._read_cache = ReadCache(count, {row.name: row for row in rows})
            return list(self._read_cache.rows.values())

    def count(self) -> int:
        """Return how many times what `services` shows has changed."""
        with self._reader.connect() as c:
            return int(c.execute(q.COUNT).scalar_one())

    def forget(self) -> None:
        """Read everything again next time, as a process does that has just started."""
        with self._lock:
            self._read_cache = None

    def _read(self, c: Connection, *, down: bool) -> list[ServiceRow]:
        rows = c.execute(q.SERVICES).all()
        live: dict[str, list[Replica]] = {}
        for row in c.execute(q.LIVE):
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
                update_mode=UpdateMode(row.update_mode),
                down=row.down,
                purge=row.purge,
                wanted=row.wanted,
                target=row.target,
                notes=row.notes,
                memory=memory_from_json(row.memory, row.next_replica_id),
                lb_port=row.lb_port,
                killed=frozenset(kills.get(row.name, ())),
                replicas=_of_role(live.get(row.name, ()), Role.REPLICA),
                balancers=_of_role(live.get(row.name, ()), Role.LOAD_BALANCER),
            )
            for row in shown
        ]

    def commit(self, name: str, **tick: Any) -> None:
        """One tick of one service; `tick` has the fields of Commit."""
        self.commit_all([Commit(name, **tick)])

    def commit_all(self, commits: Sequence[Commit]) -> None:
        """One tick: intents, memory and events of several services, each at most once, in one transaction."""
        rows, lines, ended = [], [], []
        values: dict[tuple[str, ...], list[dict[str, Any]]] = {}  # by the columns that are written
        read: list[Commit] = []  # as they would be read
        for commit in commits:
            one: dict[str, Any] = {"service": commit.name, "target": commit.target, "notes": commit.notes}
            if commit.wanted is not None:
                one["wanted"] = commit.wanted
            if commit.memory is not None:
                written = memory_to_json(commit.memory)
                one |= {"memory": written, "next_replica_id": commit.memory.next_replica_id}
                # JSON has no tuples, and only text for keys.
                memory = memory_from_json(orjson.loads(orjson.dumps(written)), commit.memory.next_replica_id)
                read.append(replace(commit, memory=memory))
            else:
                read.append(commit)
            values.setdefault(tuple(one), []).append(one)
            rows += [replica_to_row(commit.name, replica) for replica in commit.changed]
            lines += _lines(commit.name, commit.now, commit.records)
            gone = [replica.id for replica in commit.changed if replica.state is ReplicaState.GONE]
            if gone:
                ended.append((commit.name, gone, self._unasked(commit.name)))
        with self._writing() as c:
            count = self._bump_revision(c)
            for group in values.values():
                c.execute(q.SET_STATUS[tuple(group[0])[1:]], group)
            if rows:
                self._upsert(c, t.replicas, rows)
            for name, gone, unasked in ended:
                # As of this count no user has requested the end of a replica by id, so there is no wish to strike out.
                if unasked is None or count != unasked + 1:
                    c.execute(q.END_KILLS, {"service_": name, "gone": gone})
            if lines:
                c.execute(q.APPEND_EVENTS, lines)
        with self._lock:
            if self._read_cache is not None:
                self._read_cache.follow(count, read)

    def reseal(
        self, again: Callable[[bytes], bytes | None], also: Callable[[Connection], None] = lambda c: None
    ) -> tuple[int, list[tuple[str, int]]]:
        """Replace the sealed secrets of all versions by what `again` returns for them (None: they stay).

        `also` runs in the same transaction. Returns how many were replaced, and the (service, version) of those that were not.
        """
        kept: list[tuple[str, int]] = []
        v = t.versions.c
        with self._writing() as c:
            rows = c.execute(sa.select(v.service, v.version, v.sealed_secrets)).all()
            for service, version, sealed in rows:
                content = again(sealed)
                if content is None:
                    kept.append((service, version))
                    continue
                here = sa.and_(v.service == service, v.version == version)
                c.execute(t.versions.update().where(here).values(sealed_secrets=content))
            also(c)
        return len(rows) - len(kept), kept

    def try_to_write(self) -> None:
        """Write something that changes nothing.

        Raises SQLAlchemyError if it cannot be written, or if a larger write could not: on a full disk a transaction of one
        page still fits where a failed one of several has reserved some.
        """
        file = sqlite_file(self.url)
        if file is not None and shutil.disk_usage(file.parent).free < _LEAST_FREE_BYTES:
            raise sa.exc.OperationalError("", None, sqlite3.OperationalError("database or disk is full"))
        with self._writing() as c:
            c.execute(t.changes.update().values(count=t.changes.c.count))

    def append_event(self, record: EventRecord, *, now: float, service: str = "") -> None:
        """Append one event; without `service` it belongs to no service."""
        with self._writing() as c:
            self._append(c, service, now, [record])

    def move_instants(self, by_s: float, then: Callable[[], None] = lambda: None) -> None:
        """Move stored instants by as much as the host's clock was set.

        These are what our clock has measured of live replicas, and what policies remember, so that ages, waits and costs stay what
        they were. `then` sets the controller's clock; no reader within `still` sees the one
        without the other. What a cloud said (`preempt_at`), terminated replicas and past events stay as they are.
        """
        r = t.replicas.c
        measured = (r.since, r.created_at, r.launched_at, r.ready_at, r.drain_by)
        with self._moving:
            with self._writing() as c:
                self._bump_revision(c)
                live = r.state != ReplicaState.GONE.value
                c.execute(t.replicas.update().where(live).values({one: one + by_s for one in measured}))
                for name, memory in c.execute(sa.select(t.services.c.name, t.services.c.memory)).all():
                    here = t.services.c.name == name
                    c.execute(t.services.update().where(here).values(memory=moved_instants(memory, by_s)))
            then()
            self.forget()

    def still(self) -> AbstractContextManager[object]:
        """While it is entered, the clock and the instants of rows do not move apart."""
        return self._moving

    def latest_instant(self) -> float | None:
        """Return the latest instant of a live replica that our own clock has measured."""
        r = t.replicas.c
        live = r.state != ReplicaState.GONE.value
        with self._reader.connect() as c:
            found = c.execute(sa.select(sa.func.max(r.since)).where(live)).scalar()
        return None if found is None else float(found)

    def archive_replicas(
        self, *, before: float, keep: int = 200, pause: Callable[[], None] = lambda: None
    ) -> int:
        """Drop GONE replicas that ended before `before`, but the newest `keep` of each service.

        Their cost is added to the service, so no total changes. Returns how many were dropped. Other writers are served
        while `pause` runs, which is called after each step.
        """
        with self._writing():
            pass  # or it would only be noticed when there is something to remove
        return prune.archive_replicas(self._reader, self._writing, before, keep, _spent_columns, pause)

    def prune_events(
        self, *, before: float, keep: int = 1000, pause: Callable[[], None] = lambda: None
    ) -> int:
        """Drop events from before `before`. Returns how many were dropped.

        The newest `keep` of each service stay, those about replicas that are not folded, and what `history` needs. `pause`: as for
        `archive_replicas`.
        """
        with self._writing():
            pass  # or it would only be noticed when there is something to remove
        return prune.prune_events(self._reader, self._writing, before, keep, pause)

    # --- what services were asked for ---------------------------------------------------------------------

    def put_demand(self, name: str, rows: Sequence[DemandRow], *, drop_from: int | None = None) -> None:
        """Store minutes of a service, after removing those from `drop_from` on. What `services` shows does not change."""
        with self._writing() as c:
            if drop_from is not None:
                demand.drop(c, name, drop_from)
            demand.write(c, name, rows)

    def demand(self, name: str, *, since: int = 0, folded: bool = False) -> list[DemandRow]:
        """Return the stored minutes of a service from minute `since` on; `folded`: means of ten minutes, of longer ago."""
        with self._reader.connect() as c:
            return demand.read(c, name, since, demand.FOLDED if folded else demand.MINUTE)

    def fold_demand(self, now_minute: int, *, pause: Callable[[], None] = lambda: None) -> int:
        """Replace minutes of more than two weeks ago by means of ten, and forget those of more than eight weeks ago.

        Returns how many rows were removed. `pause`: as for `fold`.
        """
        with self._reader.connect() as c:
            known = demand.names(c)
        dropped = 0
        for name in known:
            step = 1
            while step:
                with self._writing() as c:
                    step = demand.fold(c, name, now_minute)
                dropped += step
                pause()
        return dropped

    # --- reading ------------------------------------------------------------------------------------------

    def version(self, name: str, version: int) -> VersionRow:
        """Raise KeyError for a version that never was."""
        where = sa.and_(t.versions.c.service == name, t.versions.c.version == version)
        with self._reader.connect() as c:
            row = c.execute(sa.select(t.versions).where(where)).first()
        if row is None:
            raise KeyError((name, version))
        return VersionRow(row.service, row.version, row.replica_hash, row.spec, row.sealed_secrets)

    def replicas(self, name: str, *, limit: int = 200) -> list[Replica]:
        """Return the newest replicas of a service, terminated ones included, oldest first."""
        query = sa.select(t.replicas).where(t.replicas.c.service == name)
        with self._reader.connect() as c:
            rows = c.execute(query.order_by(t.replicas.c.id.desc()).limit(limit)).all()
        return [replica_from_row(row) for row in reversed(rows)]

    def recently_ended(self, names: Collection[str], since: float) -> dict[str, list[Replica]]:
        """Return the replicas of these services that ended after `since`, oldest first, of each service's newest RECENT_REPLICAS.

        One query, however many services there are.
        """
        if not names:
            return {}
        found: dict[str, list[Replica]] = {}
        with self._reader.connect() as c:
            for row in c.execute(q.RECENTLY_ENDED, {"names": sorted(names), "since": since}):
                found.setdefault(row.service, []).append(replica_from_row(row))
        return found

    def spent(self, now: float) -> dict[str, Spent]:
        """Return what each service has cost so far."""
        query = sa.select(t.replicas.c.service, *_spent_columns(now)).group_by(t.replicas.c.service)
        with self._reader.connect() as c:
            sums = {row[0]: (row[1] or 0.0, row[2] or 0.0) for row in c.execute(query)}
            folded = c.execute(
                sa.select(t.services.c.name, t.services.c.folded_usd, t.services.c.folded_on_demand_usd)
            ).all()
        nothing = (0.0, 0.0)
        return {
            name: Spent(usd + sums.get(name, nothing)[0], on_demand + sums.get(name, nothing)[1])
            for name, usd, on_demand in folded
        }

    def events(
        self, name: str | None, *, after: int = 0, limit: int = 1000, newest: bool = False
    ) -> list[StoredEvent]:
        """Return the event log after `seq` = `after`, oldest first; `newest`: the last `limit` lines instead of the first."""
        query = sa.select(t.events).where(t.events.c.seq > after)
        if name is not None:
            query = query.where(t.events.c.service == name)
        order = t.events.c.seq.desc() if newest else t.events.c.seq
        with self._reader.connect() as c:
            rows = c.execute(query.order_by(order).limit(limit)).all()
        return [
            StoredEvent(r.seq, r.at, r.service, EventRecord(r.kind, r.message, r.replica_id, r.state))
            for r in (reversed(rows) if newest else rows)
        ]

    def history(self, name: str, *, since: float, most: int) -> ServiceHistory:
        """Return the stored past of a service since then.

        Of more than `most` replicas, or ten times as many changes, those are left out that ended, or came, first.
        """
        with self._reader.connect() as c:
            return read_history(c, name, since, most)

    # --- inside -------------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A transaction of the controller that leads."""
        with self._writer.begin() as c:
            if self._epoch is not None:
                verify(c, self._epoch)
            yield c

    def _live(self, c: Connection, name: str) -> list[Replica]:
        alive = sa.and_(t.replicas.c.service == name, t.replicas.c.state != ReplicaState.GONE.value)
        return [replica_from_row(row) for row in c.execute(sa.select(t.replicas).where(alive))]

    def _unasked(self, name: str) -> int | None:
        """Return the count of changes for which it is known that no replica of the service is to be terminated by id."""
        with self._lock:
            kept = self._read_cache
            row = None if kept is None else kept.rows.get(name)
            return None if kept is None or row is None or row.killed else kept.count

    def _bump_revision(self, c: Connection) -> int:
        """Say that what `services` shows has changed. In the transaction that changes it."""
        return int(c.execute(q.BUMP).scalar_one())

    def _append(self, c: Connection, name: str, now: float, records: Iterable[EventRecord]) -> None:
        lines = _lines(name, now, records)
        if lines:
            c.execute(q.APPEND_EVENTS, lines)

    def _upsert(self, c: Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
        c.execute(q.UPSERT[table.name, c.dialect.name], list(rows))

    def _migrate(self) -> None:
        config = migrations()
        with self._writer.begin() as connection:
            check_revision(connection, ScriptDirectory.from_config(config))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def _lines(name: str, now: float, records: Iterable[EventRecord]) -> list[dict[str, Any]]:
    return [
        {
            "at": now,
            "service": name,
            "replica_id": line.replica_id,
            "kind": line.kind,
            "state": line.state,
            "message": line.message,
        }
        for line in records
    ]


def migrations() -> Config:
    """Return what Alembic needs to know to bring a database to the shape of this release."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


def _of_role(attempts: Iterable[Replica], role: Role) -> tuple[Replica, ...]:
    return tuple(one for one in attempts if one.role is role)


def _spent_columns(now: float) -> tuple[sa.ColumnElement[float], sa.ColumnElement[float]]:
    r = t.replicas.c
    seconds = sa.func.coalesce(r.ended_at, now) - r.launched_at
    hours = (
        sa.case((seconds < 0.0, 0.0), else_=seconds) / 3600.0
    )  # no cost is negative, also if the clock was set back
    on_demand = sa.func.coalesce(r.on_demand_usd_hour, r.price_usd_hour)
    return sa.func.sum(r.price_usd_hour * hours), sa.func.sum(on_demand * hours)
