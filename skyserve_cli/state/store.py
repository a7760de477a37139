"""The store: a dozen verbs, each one transaction.

Who writes what: the API writes goals (`put_service`, `set_down`, `kill_replica`), the reconciler everything
else through `commit`. No transaction is open during a call to a cloud or a load balancer. The statements are in the
modules of their subjects (`goals`, `snapshot`, `ticks`, `event_log`, `costs`, `demand`, `history`, `prune`).
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from lb.config.usage import KeyTotal
from policies.goals import UpdateMode
from policies.model import Replica, ReplicaState
from skyserve_cli.state import costs, demand, event_log, goals, prune, series, snapshot, usage
from skyserve_cli.state import statements as q
from skyserve_cli.state import tables as t
from skyserve_cli.state.codec import moved_instants, replica_from_row
from skyserve_cli.state.database import Database
from skyserve_cli.state.history import read_history
from skyserve_cli.state.lease import ControllerLease
from skyserve_cli.state.opening import sqlite_file
from skyserve_cli.state.read_cache import ReadCache
from skyserve_cli.state.samples import Slot
from skyserve_cli.state.ticks import PreparedCommits
from skyserve_cli.state.usage import StoredUsage, UsageTotal, UsdOf
from skyserve_cli.state.values import (
    Commit,
    DemandRow,
    EventRecord,
    ServiceHistory,
    ServiceRow,
    Spent,
    StoredEvent,
    VersionRow,
)

_LEAST_FREE_BYTES = 256 << 10
_FOLLOWS_WITHIN_S = 1.0


class Store:
    """The verbs over services: one method is one transaction. `outbox` and `team` of this package have those over other tables."""

    def __init__(self, database: Database) -> None:
        """The store closes the database."""
        self.database = database
        self._read_cache: ReadCache | None = None
        self._lock = threading.Condition()  # notified when what was written is in the cache
        self._writers = 0
        self._moving = threading.RLock()

    def close(self) -> None:
        self.database.close()

    def take_lease(
        self, holder: str, about: str, *, ttl_s: float, unrenewed: ControllerLease | None = None
    ) -> ControllerLease | None:
        """See `Database.take_lease`. What was read before the term is read again."""
        lease = self.database.take_lease(holder, about, ttl_s=ttl_s, unrenewed=unrenewed)
        if lease is not None:
            self.forget()
        return lease

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
        author: str = "",
        team: str | None = None,
    ) -> int:
        """Create the service, or add a version to it; returns the version.

        `target` is how many replicas a new service begins with, `author` who wants it, for the event log. `team` None: an update
        keeps the team, a new service has none.

        `mode` None means "must be new": raises ServiceExistsError if the service is up. A name that is down
        is revived: versions and replica ids go on, so no id is ever used twice; StillGoingDownError as long
        as replicas of before live. A `mode` raises NoSuchServiceError if there is nothing up to update. NotKeptError: the spec
        would not be read back as it is.
        """
        new = goals.NewVersion(spec, replica_hash, sealed_secrets, lb_port, target, team)
        with self._followed() as (c, _):
            return goals.put_service(c, name, new, mode, now, self.database.draw, author)

    def set_down(self, name: str, *, purge: bool, now: float, author: str = "") -> None:
        """Take the service down; `purge`: without waiting for requests to finish."""
        with self._followed() as (c, _):
            goals.set_down(c, name, purge=purge, now=now, author=author)

    def kill_replica(self, name: str, replica_id: int, *, now: float, author: str = "") -> None:
        """End one replica; another will take its place.

        Raises NoSuchServiceError, or KeyError if it is not alive.
        """
        with self._followed() as (c, _):
            goals.kill_replica(c, name, replica_id, now=now, author=author)

    # --- the reconciler's ---------------------------------------------------------------------------------

    def services(self, *, down: bool = False) -> list[ServiceRow]:
        """Return a snapshot: every service that is up or of which something is left (`down`: also the others)."""
        kept = self._read_cache
        if self.database.is_exclusive and kept is not None and not kept.has_old_goals and not down:
            return list(kept.rows.values())
        with self.database.reading() as c, self._lock:
            count = int(c.execute(q.COUNT).scalar_one())
            if down:
                return snapshot.read_services(c, down=True)
            kept = self._read_cache
            if kept is None or (kept.count != count and not self._follows(kept, count)):
                rows = snapshot.read_services(c, down=False)
                kept = self._read_cache = ReadCache(count, {row.name: row for row in rows})
            elif kept.has_old_goals:
                kept.take_goals(snapshot.read_services(c, down=False, before=kept.rows))
            return list(kept.rows.values())

    def count(self) -> int:
        """Return how many times what `services` shows has changed."""
        with self.database.reading() as c:
            return int(c.execute(q.COUNT).scalar_one())

    def forget(self) -> None:
        """Read everything again next time, as a process does that has just started."""
        with self._lock:
            self._read_cache = None

    def commit(self, name: str, **tick: Any) -> None:
        """One tick of one service; `tick` has the fields of Commit."""
        self.commit_all([Commit(name, **tick)])

    def commit_all(self, commits: Sequence[Commit]) -> None:
        """One tick: intents, memory and events of several services, each at most once, in one transaction."""
        prepared = PreparedCommits.of(commits, self._unasked)
        with self._followed(prepared.read) as (c, revision):
            prepared.write(c, revision)

    def reseal(
        self, again: Callable[[bytes], bytes | None], also: Callable[[Connection], None] = lambda c: None
    ) -> tuple[int, list[tuple[str, int]]]:
        """Replace the sealed secrets of all versions by what `again` returns for them (None: they stay).

        `also` runs in the same transaction. Returns how many were replaced, and the (service, version) of those that were not.
        """
        kept: list[tuple[str, int]] = []
        v = t.versions.c
        with self.database.writing() as c:
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
        file = sqlite_file(self.database.url)
        if file is not None and shutil.disk_usage(file.parent).free < _LEAST_FREE_BYTES:
            raise sa.exc.OperationalError("", None, sqlite3.OperationalError("database or disk is full"))
        with self.database.writing() as c:
            c.execute(t.changes.update().values(count=t.changes.c.count))

    def append_event(self, record: EventRecord, *, now: float, service: str = "") -> None:
        """Append one event; without `service` it belongs to no service."""
        with self.database.writing() as c:
            event_log.append_events(c, service, now, [record])

    def move_instants(self, by_s: float, then: Callable[[], None] = lambda: None) -> None:
        """Move stored instants by as much as the host's clock was set.

        These are what our clock has measured of live replicas, and what policies remember, so that ages, waits and costs stay what
        they were. `then` sets the controller's clock; no reader within `still` sees the one
        without the other. What a cloud said (`preempt_at`), terminated replicas and past events stay as they are.
        """
        with self._moving:
            with self.database.writing() as c:
                self._bump_revision(c)
                _move_instants(c, by_s)
            then()
            self.forget()

    def still(self) -> AbstractContextManager[object]:
        """While it is entered, the clock and the instants of rows do not move apart."""
        return self._moving

    def latest_instant(self) -> float | None:
        """Return the latest instant of a live replica that our own clock has measured."""
        r = t.replicas.c
        live = r.state != ReplicaState.GONE.value
        with self.database.reading() as c:
            found = c.execute(sa.select(sa.func.max(r.since)).where(live)).scalar()
        return None if found is None else float(found)

    def archive_replicas(
        self, *, before: float, keep: int = 200, pause: Callable[[], None] = lambda: None
    ) -> int:
        """Drop GONE replicas that terminated before `before`, but the newest `keep` of each service.

        Their cost is added to the service, so no total changes. Returns how many were dropped. Other writers are served
        while `pause` runs, which is called after each step.
        """
        with self.database.writing():
            pass  # or it would only be noticed when there is something to remove
        return prune.archive_replicas(self.database, before, keep, pause)

    def prune_events(
        self, *, before: float, keep: int = 1000, pause: Callable[[], None] = lambda: None
    ) -> int:
        """Drop events from before `before`. Returns how many were dropped.

        The newest `keep` of each service stay, those about replicas that are not folded, and what `history` needs. `pause`: as for
        `archive_replicas`.
        """
        with self.database.writing():
            pass  # or it would only be noticed when there is something to remove
        return prune.prune_events(self.database, before, keep, pause)

    # --- what services were asked for ---------------------------------------------------------------------

    def put_demand(self, name: str, rows: Sequence[DemandRow], *, drop_from: int | None = None) -> None:
        """Store minutes of a service, after removing those from `drop_from` on. What `services` shows does not change."""
        with self.database.writing() as c:
            if drop_from is not None:
                demand.drop(c, name, drop_from)
            demand.write(c, name, rows)

    def demand(self, name: str, *, since: int = 0, folded: bool = False) -> list[DemandRow]:
        """Return the stored minutes of a service from minute `since` on; `folded`: means of ten minutes, of longer ago."""
        with self.database.reading() as c:
            return demand.read(c, name, since, demand.FOLDED if folded else demand.MINUTE)

    def fold_demand(self, now_minute: int, *, pause: Callable[[], None] = lambda: None) -> int:
        """Replace minutes of more than two weeks ago by means of ten, and forget those of more than eight weeks ago.

        Returns how many rows were removed. `pause`: as for `fold`.
        """
        with self.database.reading() as c:
            known = demand.names(c)
        dropped = 0
        for name in known:
            step = 1
            while step:
                with self.database.writing() as c:
                    step = demand.fold(c, name, now_minute)
                dropped += step
                pause()
        return dropped

    # --- what load balancers have counted -----------------------------------------------------------------

    def put_series(self, at: int, slots: Mapping[str, Slot]) -> None:
        """Store ten seconds from `at` on (UNIX seconds) for each of these services, and fold finished slots."""
        with self.database.writing() as c:
            series.write(c, series.RINGS[0].span_s, at, slots)
        for name in slots if at % series.RINGS[1].span_s == 0 else ():
            self._fold_series(name, at)

    def series(self, name: str, span_s: int, *, since: float, until: float) -> list[tuple[int, Slot]]:
        """Return the slots of a ring (`state.series.RINGS`) that start in [since, until), in order."""
        with self.database.reading() as c:
            return series.read(c, name, span_s, since, until)

    def fold_series(self, now: float, *, pause: Callable[[], None] = lambda: None) -> None:
        """Fold finished slots, and delete old ones, of every service. `pause`: as for `fold`."""
        with self.database.reading() as c:
            known = series.names(c)
        for name in known:
            self._fold_series(name, now, pause)

    def _fold_series(self, name: str, now: float, pause: Callable[[], None] = lambda: None) -> None:
        left = True
        while left:
            with self.database.writing() as c:
                left = series.fold(c, name, now)
            pause()

    # --- what the requests of API keys have used ----------------------------------------------------------

    def put_usage(self, rows: Sequence[StoredUsage]) -> None:
        """Store the sums of a day so far. The same ones again, or older ones, change nothing."""
        with self.database.writing() as c:
            usage.write(c, rows)

    def usage(
        self,
        name: str,
        *,
        since: int,
        until: int,
        by: Sequence[str],
        most: int,
        top: bool = False,
        usd: UsdOf | None = None,
    ) -> tuple[list[UsageTotal], UsageTotal]:
        """Return sums of the days [since, until] by some of `usage.GROUPS`, and the sum of all; see `usage.read`.

        With `usd` they have what their tokens cost.
        """
        with self.database.reading() as c:
            if usd is not None:
                return usage.read_priced(c, name, since, until, by, most, top=top, usd=usd)
            rows = usage.read(c, name, since, until, by, most, top=top)
            return rows, usage.total(c, name, since, until)

    def usage_totals(self, name: str, today: int, most: int) -> list[KeyTotal]:
        """Return what all agents have counted today and in its month, by key and model; see `usage.totals`."""
        with self.database.reading() as c:
            return usage.totals(c, name, today, most)

    def fold_usage(self, now: float, *, pause: Callable[[], None] = lambda: None) -> None:
        """Fold days that no agent reports any more, and delete those that are too old. `pause`: as for `archive_replicas`."""
        with self.database.reading() as c:
            steps = [(usage.drop, *one) for one in usage.old(c, now)]
            gone = {(name, day) for _, name, day in steps}
            steps += [(usage.fold, *one) for one in usage.unfolded(c, now) if one not in gone]
        for step, name, day in steps:
            with self.database.writing() as c:
                step(c, name, day)
            pause()

    # --- reading ------------------------------------------------------------------------------------------

    def version(self, name: str, version: int) -> VersionRow:
        """Raise KeyError for a version that never was."""
        with self.database.reading() as c:
            return snapshot.read_version(c, name, version)

    def specs_of_versions(self) -> list[dict[str, Any]]:
        """Return the JSON of the spec of every version of the services that are up, or of which something is left."""
        names = [row.name for row in self.services()]
        with self.database.reading() as c:
            return snapshot.specs_of(c, names)

    def replicas(self, name: str, *, limit: int = 200) -> list[Replica]:
        """Return the newest replicas of a service, terminated ones included, oldest first."""
        with self.database.reading() as c:
            return snapshot.newest_replicas(c, name, limit)

    def recently_ended(self, names: Collection[str], since: float) -> dict[str, list[Replica]]:
        """Return the replicas of these services that terminated after `since`, oldest first, of each service's newest RECENT_REPLICAS.

        One query, however many services there are.
        """
        if not names:
            return {}
        found: dict[str, list[Replica]] = {}
        with self.database.reading() as c:
            for row in c.execute(q.RECENTLY_ENDED, {"names": sorted(names), "since": since}):
                found.setdefault(row.service, []).append(replica_from_row(row))
        return found

    def spent(self, now: float, name: str = "") -> dict[str, Spent]:
        """Return what each service has cost so far; or only the one of that name."""
        with self.database.reading() as c:
            return costs.read_spent(c, now, name)

    def spent_by_team(self, since: float, now: float) -> dict[str, float]:
        """Return what the services of each team have cost from `since` to `now`, in USD, as far as replicas have not been archived."""
        with self.database.reading() as c:
            return costs.read_spent_by_team(c, since, now)

    def events(
        self,
        name: str | Collection[str] | None,
        *,
        after: int = 0,
        limit: int = 1000,
        newest: bool = False,
    ) -> list[StoredEvent]:
        """Return the event log after `seq` = `after`, oldest first; `newest`: the last `limit` lines instead of the first."""
        with self.database.reading() as c:
            return event_log.read_events(c, name, after=after, limit=limit, newest=newest)

    def history(self, name: str, *, since: float, most: int) -> ServiceHistory:
        """Return the stored past of a service since then.

        Of more than `most` replicas, or ten times as many changes, those are left out that terminated, or came, first.
        """
        with self.database.reading() as c:
            return read_history(c, name, since, most)

    # --- inside -------------------------------------------------------------------------------------------

    def _unasked(self, name: str) -> int | None:
        """Return the count of changes for which it is known that no replica of the service is to be terminated by id."""
        with self._lock:
            kept = self._read_cache
            row = None if kept is None else kept.rows.get(name)
            is_known = kept is not None and not kept.has_old_goals and row is not None and not row.killed
            return kept.count if kept is not None and is_known else None

    def _follows(self, kept: ReadCache, count: int) -> bool:
        """Wait until the cache has what this process writes. Returns whether that is all there was to read at `count`."""
        if kept.count > count or not self._writers:
            return False  # it is another database, or another process has written
        self._lock.wait_for(lambda: kept.count >= count or not self._writers, _FOLLOWS_WITHIN_S)
        is_later = kept.count > count and not kept.has_old_goals
        return kept is self._read_cache and (kept.count == count or is_later)

    @contextmanager
    def _followed(self, commits: Sequence[Commit] = ()) -> Iterator[tuple[Connection, int]]:
        """One transaction with its number, which the cache then follows. It writes these commits, or one goal and no replica."""
        with self._lock:
            self._writers += 1
        revision = 0
        try:
            with self.database.writing() as c:
                number = self._bump_revision(c)
                yield c, number
            revision = number
        finally:
            with self._lock:
                self._writers -= 1
                if revision and self._read_cache is not None:
                    self._read_cache.follow(revision, commits)
                self._lock.notify_all()

    def _bump_revision(self, c: Connection) -> int:
        """Say that what `services` shows has changed. In the transaction that changes it."""
        return int(c.execute(q.BUMP).scalar_one())


def _move_instants(c: Connection, by_s: float) -> None:
    r = t.replicas.c
    measured = (r.since, r.created_at, r.launched_at, r.ready_at, r.drain_by)
    live = r.state != ReplicaState.GONE.value
    c.execute(t.replicas.update().where(live).values({one: one + by_s for one in measured}))
    for name, memory in c.execute(sa.select(t.services.c.name, t.services.c.memory)).all():
        here = t.services.c.name == name
        c.execute(t.services.update().where(here).values(memory=moved_instants(memory, by_s)))
