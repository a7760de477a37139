"""Which keys a database belongs to.

Secrets in it are sealed with the home's sealing key, and machines are reached with keys that follow from its machine
secret: with other ones a controller would neither open the one nor reach the other. So digests of both are in the database,
and a home with other keys is refused before anything is made or terminated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from skyserve_cli.home import Home
from skyserve_cli.state.store import Store

_LABEL = b"skyserve fingerprint\0"


class ForeignKeysError(Exception):
    """The database was written with other keys than the home's."""


def check(store: Store, home: Home) -> None:
    """Raise ForeignKeysError. Makes no key: one that is missing is to be copied, not drawn."""
    _compare(store.database.fingerprints(), home)


def record(store: Store, home: Home) -> None:
    """Write down whose database it is: once, and after a rotation."""
    store.database.put_fingerprints({path.name: _digests(path, home)[0] for path in home.key_files()})


def of_files(home: Home) -> dict[str, list[str]]:
    """Return the digests of the keys that the home has now."""
    return {path.name: _digests(path, home) for path in home.key_files() if path.exists()}


def check_or_record(store: Store, home: Home) -> None:
    """Raise ForeignKeysError. For a controller whose term has started."""
    known = store.database.fingerprints()
    _compare(known, home)
    if not known:
        record(store, home)


def _compare(known: Mapping[str, str], home: Home) -> None:
    for path in home.key_files():
        if path.name not in known:
            continue
        if not path.exists():
            raise ForeignKeysError(
                f"{path} is missing, and the database was written with one: copy it from the home that wrote it, "
                "or restore a backup"
            )
        if known[path.name] not in _digests(path, home):
            raise ForeignKeysError(
                f"{path} is not the key that the database was written with: copy it from the home that wrote it, "
                "or use another database"
            )


def _digests(path: Path, home: Home) -> list[str]:
    """Of the key, or while a rotation is under way of the new and the old ones."""
    keys = home.sealing_keys() if path == home.sealing_key_file else home.machine_secrets()
    return [_digest(key) for key in keys]


def _digest(key: bytes) -> str:
    return hashlib.sha256(_LABEL + key).hexdigest()[:32]
