"""What the requests of API keys have used, by day, in a file that outlives the process.

The agents of one host that have the same file (those that share a port, and an agent and its successor) add to the same rows, and each of
them can report them all. It is an SQLite database: it keeps what was added when a process is killed, and lets several add at once.
Nothing waits for the disk (`synchronous=OFF`). A host that loses its power may lose the file, and with it what no controller has
read.

Every row has the mark of its last change, a number that only grows. A reader that gives the last mark that it has seen gets what
changed after it.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from lb.config.usage import DAY_S, KEPT_DAYS, MOST_ROWS, UsageReport, UsageRow
from lb.observe.key_usage import KeyUsage, UsageSum

STORE_EVERY_S = 1.0
_LAYOUT = 1
_BUSY_MS = 10  # the event loop waits meanwhile; a row that could not be stored is stored a second later
_PATIENT_MS = 2000  # where no request is served yet, or any longer

_log = logging.getLogger("lb.agent.usage_file")

_TABLES = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS about (source TEXT NOT NULL, mark INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS usage (
    day INTEGER NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    requests INTEGER NOT NULL, tokens_in INTEGER NOT NULL, tokens_out INTEGER NOT NULL,
    mark INTEGER NOT NULL, PRIMARY KEY (day, key, model)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS usage_mark ON usage (mark);
PRAGMA user_version = {_LAYOUT};
COMMIT;
"""
_ADD = """
INSERT INTO usage (day, key, model, requests, tokens_in, tokens_out, mark) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (day, key, model) DO UPDATE SET requests = requests + excluded.requests, tokens_in = tokens_in + excluded.tokens_in,
    tokens_out = tokens_out + excluded.tokens_out, mark = excluded.mark
"""
_CHANGED = """
SELECT day, key, model, requests, tokens_in, tokens_out, mark FROM usage WHERE mark > ? ORDER BY mark LIMIT ?
"""


class UsageFile:
    """Moves what was counted into the file, and reports what the file has."""

    def __init__(
        self,
        path: Path | None,
        counted: KeyUsage,
        unix_time_s: Callable[[], float],
        seen: Callable[[UsageSum], None],
    ) -> None:
        """Keep the rows at `path`, None: in memory. `seen` gets each sum once, when it is moved."""
        self._path = path
        self._counted = counted
        self._unix_time_s = unix_time_s
        self._seen = seen
        self._unstored: dict[tuple[int, str, str], UsageSum] = {}  # by day, key and model
        self._day = self._today()
        self._trouble = ""
        self._database = self._opened()

    def count(self) -> None:
        """Take what was counted since the last call. It belongs to the day of that call, which is a second ago at most."""
        day, unstored = self._day, self._unstored
        for counted in self._counted.take():
            self._seen(counted)
            row = day, counted.key, counted.model
            held = unstored.get(row)
            unstored[row] = counted if held is None else _added(held, counted)

    def store(self) -> None:
        """Add what was counted to the rows. Called every STORE_EVERY_S. What cannot be stored is stored at a later call."""
        self.count()
        today = self._today()
        if today != self._day:
            self._day = today
            self._counted.forget_models()
        if not self._unstored:
            return
        try:
            self._add(self._unstored)
        except sqlite3.Error as error:
            self._failed(error)
        else:
            self._unstored, self._trouble = {}, ""

    def report(self, source: str, since: int) -> UsageReport:
        """Return the rows that have changed after the mark `since` of that source; of another source, all rows.

        Raises sqlite3.Error.
        """
        self.store()
        return _changed(self._database, source, since, MOST_ROWS)

    def close(self) -> None:
        """Store what is left."""
        with suppress(sqlite3.Error):
            self._database.execute(f"PRAGMA busy_timeout = {_PATIENT_MS}")
        self.store()
        self._database.close()

    def _today(self) -> int:
        return int(self._unix_time_s() // DAY_S)

    def _add(self, sums: Mapping[tuple[int, str, str], UsageSum]) -> None:
        """Add all of them or none. Raises sqlite3.Error."""
        database = self._database
        with database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("UPDATE about SET mark = mark + ?", (len(sums),))
            (last,) = database.execute("SELECT mark FROM about").fetchone()
            rows = (
                (day, *one, mark)
                for mark, ((day, _, _), one) in enumerate(sums.items(), last - len(sums) + 1)
            )
            database.executemany(_ADD, rows)
            database.execute("DELETE FROM usage WHERE day <= ?", (self._day - KEPT_DAYS,))

    def _failed(self, error: sqlite3.Error) -> None:
        trouble = str(error)
        if trouble != self._trouble and not _is_busy(error):
            _log.error("usage of API keys is not stored yet: usage_file=%s why=%r", self._path, trouble)
            self._trouble = trouble
        if _is_broken(error):
            self._database.close()
            self._database = self._opened()

    def _opened(self) -> sqlite3.Connection:
        """An agent that does not start helps no client, so one without a file keeps its rows in memory."""
        if self._path is not None:
            try:
                return _open(self._path)
            except (OSError, sqlite3.Error) as error:
                _log.error("usage of API keys is in memory: usage_file=%s why=%r", self._path, str(error))
        return _connect(":memory:")


def _added(one: UsageSum, other: UsageSum) -> UsageSum:
    return one._replace(
        requests=one.requests + other.requests,
        tokens_in=one.tokens_in + other.tokens_in,
        tokens_out=one.tokens_out + other.tokens_out,
    )


def left_in(path: Path, source: str, since: int) -> UsageReport | None:
    """Return what the file of an agent that has ended reports (`UsageFile.report`), in one piece; None if there is no file.

    Raises OSError or sqlite3.Error.
    """
    if not path.exists():
        return None
    database = _connect(path)
    try:
        return _changed(database, source, since, most=-1)
    finally:
        database.close()


def _changed(database: sqlite3.Connection, source: str, since: int, most: int) -> UsageReport:
    """Return at most `most` rows; -1: all."""
    (own,) = database.execute("SELECT source FROM about").fetchone()
    since = since if source == own else 0
    found = database.execute(_CHANGED, (since, most + 1 if most >= 0 else -1)).fetchall()
    more = 0 <= most < len(found)
    found = found[:most] if more else found
    mark = found[-1][-1] if found else since
    return UsageReport(own, mark, more, tuple(UsageRow(*row[:-1]) for row in found))


def _open(path: Path) -> sqlite3.Connection:
    """Return the database at `path`, a new one where it is broken or of another release. Raises OSError or sqlite3.Error."""
    try:
        return _connect(path)
    except sqlite3.DatabaseError as error:
        if not _is_broken(error):
            raise
        _log.error("usage of API keys begins at 0: usage_file=%s why=%r", path, str(error))
    for part in ("", "-wal", "-shm"):
        path.with_name(path.name + part).unlink(missing_ok=True)
    return _connect(path)


def _connect(place: Path | str) -> sqlite3.Connection:
    if isinstance(place, Path):
        os.close(os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    database = sqlite3.connect(place, isolation_level=None, timeout=_PATIENT_MS / 1000)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = OFF")
        database.execute("PRAGMA cache_size = -512")
        (layout,) = database.execute("PRAGMA user_version").fetchone()
        if layout not in (0, _LAYOUT):
            raise sqlite3.DatabaseError(f"layout {layout} is of another release")
        database.executescript(_TABLES)
        with database:
            database.execute("BEGIN IMMEDIATE")
            if database.execute("SELECT count(*) FROM about").fetchone() == (0,):
                database.execute("INSERT INTO about VALUES (?, 0)", (secrets.token_hex(8),))
        database.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
    except BaseException:
        database.close()
        raise
    return database


def _is_busy(error: sqlite3.Error) -> bool:
    return "locked" in str(error)


def _is_broken(error: sqlite3.Error) -> bool:
    """Return whether the file can no longer be used: damaged, or not of this layout."""
    return not isinstance(error, sqlite3.OperationalError) and isinstance(error, sqlite3.DatabaseError)
