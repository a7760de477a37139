"""Sealed backups of a home in a bucket: make one, find one, and the thread that makes one a day.

An upload is one atomic request, so a controller that is killed leaves no half object. The thread blocks no tick: the rows are read in
a transaction of their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from skyserve_cli.buckets.port import Bucket, BucketError
from skyserve_cli.config_backup import BackupConfig
from skyserve_cli.controller.backup.archive import BackupError, packed, read_passphrase, sealed
from skyserve_cli.controller.backup.schedule import (
    BackupState,
    Named,
    failed,
    is_due,
    name_of,
    newest_first,
    succeeded,
    superfluous,
    view_of,
)
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.store_health import sentence_of
from skyserve_cli.home import Home
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import EventRecord

log = logging.getLogger(__name__)

ROUND_S = 10.0
#: The bucket of a place; raises BucketError.
Open = Callable[[], Bucket]


def upload(home: Home, bucket: Bucket, passphrase: str, now: float) -> tuple[Named, str]:
    """Make a backup in a bucket. Returns its name and its content in words.

    Raises BackupError, BucketError, SQLAlchemyError or OSError; the object is there whole, or not at all.
    """
    made = packed(home, now)
    named, whole = Named(name_of(made.owner, now), made.owner, now), sealed(made.content, passphrase)
    bucket.put(named.name, whole)
    return named, f"{made.words}, {len(whole):,} bytes"


def prune(bucket: Bucket, owner: str, keep: int) -> list[str]:
    """Remove all but the `keep` newest backups of an owner; returns the names. Raises BucketError."""
    names = superfluous((each.name for each in bucket.objects()), owner, keep)
    for name in names:
        bucket.delete(name)
    return names


def the_newest(bucket: Bucket, url: str) -> Named:
    """Return the backup to restore where only the place was given. Raises BackupError, BucketError."""
    found = newest_first(each.name for each in bucket.objects())
    if not found:
        raise BackupError(f"there is no backup in {url}")
    owners = sorted({named.owner for named in found})
    if len(owners) > 1:
        raise BackupError(
            f"{url} has backups of several homes ({', '.join(owners)}); list them with --list, and name one: {url}/{found[0].name}"
        )
    return found[0]


class BackupUploader(threading.Thread):
    """Makes backups as configured, while this controller leads."""

    def __init__(self, home: Home, config: BackupConfig, opens: Open, store: Store, clock: Clock) -> None:
        super().__init__(name="backup", daemon=True)
        self._home = home
        self._config = config
        self._opens = opens
        self._store = store
        self._clock = clock
        self._stopping = threading.Event()
        self._state = BackupState(clock.now())
        self._has_listed = False

    @property
    def _every_s(self) -> float:
        return self._config.every_hours * 3600.0

    def run(self) -> None:
        self._state = BackupState(self._clock.now())
        while not self._stopping.is_set():
            self.round()
            self._stopping.wait(ROUND_S)

    def stop(self) -> None:
        """Stop after the step that is under way. It is not waited for: a backup that is cut off leaves nothing."""
        self._stopping.set()

    def view(self) -> Mapping[str, Any]:
        return view_of(self._state, self._config.place.url, self._every_s, self._clock.now())

    def round(self) -> None:
        """Make a backup if one is due. A failure is recorded, and tried again after a pause that doubles."""
        now = self._clock.now()
        if not is_due(self._state, now, self._every_s):
            return
        try:
            self._attempt(now)
        except LeaseLostError:
            return
        except SQLAlchemyError as error:
            self._failed(f"the database reports: {sentence_of(error)}")
        except (BackupError, BucketError) as error:
            self._failed(str(error))
        except OSError as error:
            self._failed(f"{error.filename or 'backup'}: {error.strerror or error}")
        except Exception as error:  # a fault of a vendor's SDK
            log.exception("backup")
            self._failed(type(error).__name__)

    def _attempt(self, now: float) -> None:
        bucket, owner = self._opens(), self._store.database.owner()
        if not self._has_listed:
            found = newest_first((each.name for each in bucket.objects()), owner)
            self._has_listed = True
            if found:
                self._state = self._state._replace(newest_at=found[0].made_at)
                if not is_due(self._state._replace(failures=0), now, self._every_s):
                    self._state = self._state._replace(failures=0, why="")
                    return
        passphrase = read_passphrase(self._config.passphrase_file)
        named, words = upload(self._home, bucket, passphrase, now)
        self._state = succeeded(self._state, now)
        log.info("backup %s/%s: %s", self._config.place.url, named.name, words)
        self._record(f"backup {named.name} is in {self._config.place.url}: {words}")
        try:
            prune(bucket, owner, self._config.keep)
        except BucketError as error:
            log.warning("old backups are not removed: %s", error)

    def _failed(self, why: str) -> None:
        """Record a failure; in the event log only the first of its kind in a row."""
        is_new = why != self._state.why
        self._state = failed(self._state, self._clock.now(), why)
        log.warning("no backup is made: %s", why)
        if is_new:
            self._record(f"no backup is made: {why}")

    def _record(self, message: str) -> None:
        try:
            self._store.append_event(EventRecord("backup", message), now=self._clock.now())
        except (SQLAlchemyError, LeaseLostError) as error:
            log.warning("an event of backups is not stored: %s", type(error).__name__)
