"""Why a database cannot be used as it is, found before anything is written to it; and whether its file is still the one that was opened."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy.engine import URL


class DatabaseUnusableError(Exception):
    """The database is damaged, or of another release; the text names the case, and what was found."""


class DamagedDatabaseError(DatabaseUnusableError):
    """The file is not a sound SQLite database."""


class NewerDatabaseError(DatabaseUnusableError):
    """A newer release has changed the tables to a shape that this one does not know."""


def sqlite_file(url: URL) -> Path | None:
    """Return the file behind a URL; None if it names no file."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


FileIdentity = tuple[int, int]


def identity_of(path: Path) -> FileIdentity | None:
    """Return what distinguishes a file from another one under its name; None: there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def is_damage(error: BaseException | None) -> bool:
    """Return whether SQLite says by this error that the file is not a sound database."""
    said = str(error)
    return isinstance(error, sqlite3.DatabaseError) and ("malformed" in said or "not a database" in said)


def check_file(path: Path) -> None:
    """Read every page of an SQLite database.

    Raises DamagedDatabaseError; a file that is missing, locked or on a failing disk is no damage, and is reported when it
    is opened.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        with closing(sqlite3.connect(path, timeout=10.0)) as connection:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.OperationalError:
        return
    except sqlite3.DatabaseError as error:
        found = str(error)
    if found != "ok":
        raise DamagedDatabaseError(f"{path} is damaged ({str(found).splitlines()[-1]})")
