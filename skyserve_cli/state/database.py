"""The database behind the store: its connections and its schema, and which controller may write to it.

SQLite runs in WAL mode with full synchronisation: an intent that was committed is on the disk before the cloud
gets the request for the machine, so not even a power cut can separate the two.
"""

from __future__ import annotations

import os
import secrets as random_source
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, make_url

from skyserve_cli.state import statements as q
from skyserve_cli.state import tables as t
from skyserve_cli.state.connect import connected, without_limit
from skyserve_cli.state.lease import ControllerLease, LeaseTable, verify
from skyserve_cli.state.opening import FileIdentity, check_file, identity_of, is_damage, sqlite_file
from skyserve_cli.state.revisions import NEWEST, revision_of, stamp, upgrade
from skyserve_cli.state.transactions import Transactions, deadline

DELETED, REPLACED = "was deleted", "was replaced"


class Database:
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
        shared_with: Database | None = None,
    ) -> None:
        """Raise DatabaseUnusableError.

        `migrate` False makes the tables as they are now, without Alembic. `draw` returns unique names: a number
        of random bytes, as hexadecimal digits. `database_clock` stands in for the database's, in virtual time. `shared_with` is
        another one in memory, whose tables this one is to share.
        """
        self.draw = draw
        self.transactions = Transactions()
        self._epoch: int | None = None
        url = make_url(url)
        self.file = sqlite_file(url)
        self._opened: FileIdentity | None = None  # the file's, once it is open
        #: Whether a query has met a page that is damaged.
        self.has_met_damage = False
        if self.file is not None and migrate:
            check_file(self.file)
        in_memory = url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")
        self.engine: sa.Engine = (
            connected(url, in_memory=in_memory, insist=self._insist_on_file)
            if shared_with is None
            else shared_with.engine
        )
        self.is_exclusive = in_memory and shared_with is None  # no other process can write to it
        if shared_with is not None:
            shared_with.is_exclusive = False
        self._leases = LeaseTable(url.get_backend_name(), database_clock)
        one_photograph = {} if url.get_backend_name() == "sqlite" else {"isolation_level": "REPEATABLE READ"}
        self._reader = self.engine.execution_options(**one_photograph)
        self._writer = self.engine.execution_options(writes=True)
        # A renewal waits for no other query of this process, and none for the disk: a power cut ends all terms here. Reads
        # lock nothing there that writes would, so one kind of transaction does for both.
        renewing = (
            self.engine
            if in_memory
            else connected(url, in_memory=False, durable=False, insist=self._insist_on_file)
        )
        if self.file is not None:
            for engine in (self.engine, renewing):
                sa.event.listen(engine, "handle_error", self._meet)
        self._renewer = renewing.execution_options(writes=True)
        if in_memory or not migrate:
            with self._writer.begin() as c:
                _create_tables(c)
        else:
            self._migrate()
        if self.file is not None:
            self._opened = identity_of(self.file)

    @property
    def url(self) -> URL:
        return self.engine.url

    def close(self) -> None:
        self.engine.dispose()
        self._renewer.dispose()

    def fence(self, epoch: int) -> None:
        """From now on write only in the term of this epoch; NO_TERM (of `lease`): not at all."""
        self._epoch = epoch

    def lease(self) -> ControllerLease:
        with self._renewer.connect() as c:
            return self._leases.read(c)

    def take_lease(
        self, holder: str, about: str, *, ttl_s: float, unrenewed: ControllerLease | None = None
    ) -> ControllerLease | None:
        """Begin a term, and fence this database with it; None if another controller leads.

        `unrenewed`: the lease as it has been for a whole time to live by the caller's own clock.
        """
        with self._renewer.begin() as c:
            lease = self._leases.take(c, holder, about, ttl_s, unrenewed)
        if lease is not None:
            self.fence(lease.epoch)
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
        with self.reading() as c:
            return {row.key: row.value for row in c.execute(sa.select(t.fingerprints))}

    def put_fingerprints(self, values: Mapping[str, str]) -> None:
        """In place of those that are there."""
        with self.writing() as c:
            replace_fingerprints(c, values)

    def owner(self) -> str:
        """Return the tag of everything this controller launches; drawn once per database."""
        with self._writer.begin() as c:  # needs no lease: of two that come at once, one draws
            found = c.execute(q.OWNER).scalar()
            if found is None:
                c.execute(q.DRAW_OWNER[c.dialect.name], {"id": 1, "owner": self.draw(4)})
                found = c.execute(q.OWNER).scalar_one()
            return str(found)

    def known_owner(self) -> str:
        """Return `owner`, or "" if none was drawn yet."""
        with self.reading() as c:
            return str(c.execute(q.OWNER).scalar() or "")

    def changes(self) -> int:
        """Return how often the services have been written: a number that only a copy of before has a smaller one than."""
        with self._renewer.connect() as c:
            return int(c.execute(q.COUNT).scalar_one())

    def file_trouble(self) -> str:
        """Return what became of the file since it was opened, DELETED or REPLACED; "" if nothing did."""
        if self.file is None:
            return ""
        found = identity_of(self.file)
        if found == self._opened:
            return ""
        return DELETED if found is None else REPLACED

    def rescue(self, target: Path) -> None:
        """Write what this process has open, of which there may be no name any more, to a file. Raises sqlite3.Error, SQLAlchemyError, OSError."""
        draft = target.with_name(f".{target.name}.draft")
        draft.unlink(missing_ok=True)
        try:
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            with (
                closing(self._renewer.raw_connection()) as connection,
                closing(connection.cursor()) as cursor,
            ):
                cursor.execute("VACUUM INTO ?", (str(draft),))
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    def _insist_on_file(self) -> None:
        """SQLite would open whatever file has the name now, and make one if none has it."""
        trouble = "" if self._opened is None else self.file_trouble()
        if trouble:
            raise sqlite3.OperationalError(f"{self.file} {trouble} while it was open")

    def _meet(self, context: Any) -> None:
        self.has_met_damage = self.has_met_damage or is_damage(context.original_exception)

    def create(self, tables: sa.MetaData) -> None:
        """Make those of a part, where they are missing."""
        with self._writer.begin() as c:
            tables.create_all(c)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection on which one transaction reads. Raises DeadlinePassedError."""
        limit = deadline()
        if limit is not None:
            limit.insist()
        with self.transactions.one(), self._reader.connect() as c:
            yield c

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction of the controller that leads. Raises DeadlinePassedError, and has then written nothing."""
        limit = deadline()
        if limit is not None:
            limit.insist()
        with self.transactions.one(), self._writer.begin() as c:
            if self._epoch is not None:
                verify(c, self._epoch)
            yield c
            if limit is not None:
                limit.begin_commit()

    def _migrate(self) -> None:
        with self._writer.begin() as c:
            if revision_of(c) == NEWEST:
                return
            without_limit(c)
            if sa.inspect(c).get_table_names():
                upgrade(c)
            else:
                _create_tables(c)
                stamp(c)


def _create_tables(c: Connection) -> None:
    """Make what is missing, of the shape of this release, and the rows that each database has."""
    t.metadata.create_all(c)
    if c.execute(q.COUNT).first() is None:
        c.execute(t.changes.insert().values(id=1, count=0))
        term = {"holder": "", "about": "", "epoch": 0, "renewals": 0, "expires_at": 0.0}
        c.execute(t.lease.insert().values(id=1, **term))


def replace_fingerprints(c: Connection, values: Mapping[str, str]) -> None:
    """See `Database.put_fingerprints`."""
    c.execute(t.fingerprints.delete())
    c.execute(t.fingerprints.insert(), [{"key": key, "value": value} for key, value in values.items()])
