"""Which backup in a bucket is the newest, when the next one is due, and which are removed. Pure.

The bucket is the only record: a controller that starts, and another one that takes the lease over, read its list. A backup's name
has the owner (of the database, `Database.owner`) and the time, so several homes can use one place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from policies.backoff import delay_s

FIRST_RETRY_S = 60.0
LONGEST_RETRY_S = 3600.0
#: Something is wrong if the newest backup is older than so many times the configured interval.
OVERDUE_INTERVALS = 2.0

_NAME = re.compile(r"skyserve-([a-z0-9]+)-(\d{8}T\d{6}Z)\.backup")
_TIME = "%Y%m%dT%H%M%SZ"


class Named(NamedTuple):
    """A backup by its name. `made_at` is UNIX time."""

    name: str
    owner: str
    made_at: float


class BackupState(NamedTuple):
    """What a controller knows of its backups. Instants are UNIX time.

    `newest_at` None: there is none. `failures` are those in a row, `failed_at` is the time of the last, `why` its reason.
    `since` is when this controller began to look after backups.
    """

    since: float
    newest_at: float | None = None
    failures: int = 0
    failed_at: float = 0.0
    why: str = ""


def name_of(owner: str, now: float) -> str:
    return f"skyserve-{owner}-{datetime.fromtimestamp(now, UTC).strftime(_TIME)}.backup"


def read_name(name: str) -> Named | None:
    """Return None for a name that no backup has."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    try:
        made = datetime.strptime(found[2], _TIME).replace(tzinfo=UTC)
    except ValueError:
        return None
    return Named(name, found[1], made.timestamp())


def newest_first(names: Iterable[str], owner: str | None = None) -> list[Named]:
    """Return the backups among the names of a bucket; with `owner` only those of one home."""
    found = [named for name in names if (named := read_name(name)) and owner in (None, named.owner)]
    return sorted(found, key=lambda named: (named.made_at, named.name), reverse=True)


def superfluous(names: Iterable[str], owner: str, keep: int) -> list[str]:
    """Return the names to remove: all but the `keep` newest of this home."""
    return [named.name for named in newest_first(names, owner)[keep:]]


def is_due(state: BackupState, now: float, every_s: float) -> bool:
    """Return whether a backup is to be made now. A clock that was set back makes one due, and never postpones one."""
    if state.failures:
        passed = now - state.failed_at
        return not 0.0 <= passed < delay_s(state.failures, FIRST_RETRY_S, min(LONGEST_RETRY_S, every_s))
    return state.newest_at is None or not 0.0 <= now - state.newest_at < every_s


def succeeded(state: BackupState, now: float) -> BackupState:
    return BackupState(state.since, newest_at=now)


def failed(state: BackupState, now: float, why: str) -> BackupState:
    return state._replace(failures=state.failures + 1, failed_at=now, why=why)


def view_of(state: BackupState, url: str, every_s: float, now: float) -> dict[str, Any]:
    """Return what `GET /v1/health` has as `backup`. `overdue`: the newest is older than two intervals, or was never made."""
    last = state.since if state.newest_at is None else state.newest_at
    return {
        "to": url,
        "newest_at": state.newest_at,
        "overdue": now - last > OVERDUE_INTERVALS * every_s,
        "why": state.why,
    }


def sentence_of(view: Mapping[str, Any], made: str) -> str:
    """Return one line about a view; `made` is when the newest backup was made, in words."""
    newest = (
        f"newest backup: {made}, in {view['to']}" if view["newest_at"] else f"no backup in {view['to']} yet"
    )
    return f"{newest}; the last attempt failed: {view['why']}" if view["why"] else newest
