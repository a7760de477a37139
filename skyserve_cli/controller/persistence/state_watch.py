"""Whether the database is still the one that this controller began with; if not, what it had is saved, and it does nothing more.

A controller goes on with an SQLite file that was deleted or replaced, because it has it open: machines would be launched of
which the next one has no row. A database that was set back under it (a copy put in its place, a server restored from a backup)
would have it terminate what the copy does not know. And rows on a damaged page are rows that are missing. So each renewal of
the lease asks `trouble` first, and with one the controller stands aside: it launches and terminates nothing, and says why.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from contextlib import suppress
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from skyserve_cli.controller.persistence.known_state import (
    KnownState,
    read_known,
    way_out,
    why_other,
    write_known,
)
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.home import Home
from skyserve_cli.state.database import DELETED, Database
from skyserve_cli.state.lease import ControllerLease
from skyserve_cli.state.opening import DamagedDatabaseError, check_file

log = logging.getLogger(__name__)

CHECK_EVERY_S = 3600.0
SAVE_WITHIN_S = 10.0


class StateWatch:
    """`clock` names rescued files, `steady` measures how long ago the last check was. `trouble` is for one thread at a time."""

    def __init__(self, home: Home, database: Database, owner: str, clock: Clock, steady: Clock) -> None:
        self._home = home
        self._database = database
        self._owner = owner
        self._clock = clock
        self._steady = steady
        self._damage = ""
        self._checked_at = steady.now()  # it was read whole when it was opened
        self._known: KnownState | None = read_known(home)
        self._rescue: threading.Thread | None = None
        self._saved: Path | None = None

    def trouble(self, lease: ControllerLease | None) -> str:
        """Return why this controller must not go on, with the way out; "" if it may. Queries nothing.

        `lease` is as it was just read, None before that.
        """
        if self._damage:
            return f"{self._damage}; {way_out(self._home)}"
        became = self._database.file_trouble()
        if became:
            self._save()
            out = way_out(self._home, is_gone=became == DELETED, saved=self._saved)
            return f"{self._database.file} {became} while the controller ran; {out}"
        if lease is None:
            return ""
        why = why_other(self._known, self._owner, lease.changes)
        if why:
            return f"the database {why}; {way_out(self._home)}"
        self._remember(lease.changes)
        return ""

    def check(self) -> None:
        """Read all pages once an hour, and when a query has met a damaged one. Takes seconds; for a thread that has the time."""
        file = self._database.file
        now = self._steady.now()
        is_due = now - self._checked_at >= CHECK_EVERY_S or self._database.has_met_damage
        if file is None or self._damage or not is_due or self._database.file_trouble():
            return
        self._checked_at = now
        try:
            check_file(file)
        except DamagedDatabaseError as error:
            self._damage = str(error)
            log.error("%s", error)
        self._database.has_met_damage = False

    def close(self) -> None:
        """Look once more before the database is closed: what is not saved then is lost."""
        self.trouble(None)
        if self._rescue is not None:
            self._rescue.join(SAVE_WITHIN_S)

    def _remember(self, changes: int) -> None:
        state = (self._known or KnownState("", 0)).followed_by(self._owner, changes)
        if state == self._known:
            return
        try:
            write_known(self._home, state)
        except OSError as error:  # a full disk: what the home knows is then of before, which does no harm
            log.warning("%s cannot be written: %s", self._home.known_state, error.strerror)
        self._known = state

    def _save(self) -> None:
        """Save what is open, once, on a thread of its own: a large one takes longer than a lease lasts."""
        if self._rescue is not None:
            return
        name = time.strftime("rescued-%Y-%m-%dT%H%M%SZ.db", time.gmtime(self._clock.now()))
        self._saved = self._home.backups / name
        self._rescue = threading.Thread(target=self._write, args=(self._saved,), name="rescue", daemon=True)
        self._rescue.start()

    def _write(self, target: Path) -> None:
        with suppress(OSError):
            target.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            self._database.rescue(target)
        except (OSError, sqlite3.Error, SQLAlchemyError) as error:
            self._saved = None
            log.error("the state as it was last cannot be saved to %s: %s", target, error)
        else:
            log.warning("the state as it was last is in %s", target)
