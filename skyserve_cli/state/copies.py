"""Daily copies of an SQLite database: a few consistent files in a folder, made while others write."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

KEPT_COPIES = 7
#: At least this much stays free on the disk after a copy, which must not be what stops the controller from writing.
LEAST_FREE_BYTES = 64 << 20

_NAME = "state-*.db"


class NoRoomError(Exception):
    """The disk is too full for a copy; the text has how full."""


def copies(folder: Path) -> Sequence[Path]:
    """Return the copies in a folder, newest first."""
    return sorted(folder.glob(_NAME), reverse=True)


def copy_of_day(database: Path, folder: Path, now: float) -> Path | None:
    """Copy the database to `state-DATE.db` in the folder and remove all but the newest KEPT_COPIES.

    Returns the new copy; None if the day (UTC, of the UNIX time `now`) has one. Raises NoRoomError, sqlite3.Error or
    OSError, and leaves no half copy.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    copy = folder / f"state-{time.strftime('%Y-%m-%d', time.gmtime(now))}.db"
    if copy.exists():
        return None
    for draft in folder.glob(f".{_NAME}.draft"):
        draft.unlink(missing_ok=True)  # of a controller that was killed while it copied
    needed = sum(part.stat().st_size for part in _parts(database) if part.exists())
    free = shutil.disk_usage(folder).free
    if free < needed + LEAST_FREE_BYTES:
        raise NoRoomError(
            f"no copy of {database.name} is made in {folder}: {free >> 20} MiB are free, and "
            f"{(needed + LEAST_FREE_BYTES) >> 20} MiB are needed"
        )
    copy_to(database, copy)
    for old in copies(folder)[KEPT_COPIES:]:
        old.unlink(missing_ok=True)
    return copy


def copy_to(database: Path, target: Path) -> None:
    """Make a consistent copy of the database as of now, in one file that only its owner may read. It appears whole."""
    draft = target.with_name(f".{target.name}.draft")
    draft.unlink(missing_ok=True)
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        # `mode=rw`: a file that is gone is not made again.
        where = f"{database.absolute().as_uri()}?mode=rw"
        with closing(sqlite3.connect(where, timeout=10.0, uri=True)) as connection:
            connection.execute("VACUUM INTO ?", (str(draft),))
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _parts(database: Path) -> tuple[Path, Path]:
    return database, database.with_name(f"{database.name}-wal")
