"""The file of API keys that a table names: watched, read in slices, and in force within two seconds of a change.

It is a local file, or one of a mounted Secret, which Kubernetes replaces by another link. A file that cannot be used changes nothing:
the keys of the last good one stay in force, and the problem is in the log, the metrics and the statistics. An agent that starts with
such a file knows no key of it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lb.config.key_limits import OTHER_MODELS
from lb.config.keys_file import MOST_BYTES, KeysFileError, KeysReading, merged, unpriced
from lb.config.options import ApiKey
from lb.config.schema import Table

LOOK_EVERY_S = 0.5
_SLICE = 50  # entries: about a millisecond
_PAUSE_S = 0.002  # between two slices, for requests
#: A file that is younger may change again with the same size and time of change: it is read again.
_YOUNG_NS = 2_000_000_000

_log = logging.getLogger("lb.agent.keys_file")

_Stamp = tuple[int, int, int, int]


class KeysFile:
    """Calls `changed` when other keys are in force. `problem` is why the file cannot be used as it is; empty: it is in force."""

    def __init__(self, changed: Callable[[], object]) -> None:
        self._changed = changed
        self._path = ""
        self._stamp: _Stamp | None = None
        self._is_young = False
        self._digest = b""  # of the content that was read last
        self._reading: KeysReading | None = None
        self._keys: tuple[ApiKey, ...] = ()
        self._left_out = 0
        self._problem = self._unpriced = ""

    @property
    def problem(self) -> str:
        return self._problem or self._unpriced

    def __len__(self) -> int:
        return len(self._keys)

    def extended(self, table: Table) -> Table:
        """Return the table with the keys of its file. Those of another file stay in force until it has been read.

        The first file is read at once, because clients would be refused without it.
        """
        path = table.access.keys_file
        if path != self._path:
            self._path, self._stamp, self._digest, self._reading, self._problem = path, None, b"", None, ""
            if not path:
                self._keys = ()
            elif not self._keys:
                self._keys = self._read_at_once()
        access = merged(table.access, self._keys)
        left_out = len(table.access.keys) + len(self._keys) - len(access.keys)
        if left_out != self._left_out:
            self._left_out = left_out
            _log.warning(
                "api_keys_file=%s: %d keys are left out, the table has their names or keys", path, left_out
            )
        name, before = unpriced(access, self._keys), self._unpriced
        self._unpriced = (
            f'api_keys_file {path}: usd_per_month of {name!r} needs an entry "{OTHER_MODELS}" in load_balancer.prices: '
            "models without a price are free"
            if name
            else ""
        )
        if name and self._unpriced != before:
            _log.warning("%s", self._unpriced)
        return table if access is table.access else replace(table, access=access)

    def tick(self) -> float | None:
        """Look for another content, or read on in one that has been found. Returns when to go on."""
        if not self._path:
            return None
        try:
            if self._reading is None:
                content = self._new_content()
                if content is None:
                    return None
                self._reading = KeysReading(content, self._keys)
            if self._reading.step(_SLICE):
                return _PAUSE_S
        except (OSError, KeysFileError) as error:
            self._reading = None
            self._failed(error)
            return None
        keys, self._reading = tuple(self._reading.keys), None
        self._take(keys)
        return None

    def _read_at_once(self) -> tuple[ApiKey, ...]:
        try:
            content = self._new_content()
            if content is not None:
                reading = KeysReading(content)
                while reading.step(_SLICE):
                    pass
                return tuple(reading.keys)
        except (OSError, KeysFileError) as error:
            self._failed(error)
        return ()

    def _new_content(self) -> bytes | None:
        """Return the content if it is another one than was read last. Raises OSError or KeysFileError."""
        found = Path(self._path).stat()
        stamp = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)
        if stamp == self._stamp and not self._is_young:
            return None
        self._stamp = None  # until it has been read
        content = _content(self._path)
        self._stamp = stamp
        self._is_young = time.time_ns() - found.st_mtime_ns < _YOUNG_NS
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if digest == self._digest:
            return None
        self._digest = digest
        return content

    def _take(self, keys: tuple[ApiKey, ...]) -> None:
        self._problem = ""
        if keys != self._keys:
            before, self._keys = self._keys, keys
            try:
                self._changed()
            except BaseException:  # the next look tries again
                self._keys, self._stamp, self._digest = before, None, b""
                raise
        _log.info("api_keys_file=%s keys=%d", self._path, len(keys))

    def _failed(self, error: OSError | KeysFileError) -> None:
        if isinstance(error, OSError):
            self._stamp, self._digest = None, b""  # the same file may come back
        why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        problem = f"api_keys_file {self._path}: {why}; the last good keys stay in force ({len(self._keys)})"
        if problem != self._problem:
            self._problem = problem
            _log.warning("%s", problem)


def _content(path: str) -> bytes:
    """Raise OSError or KeysFileError."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise KeysFileError("is no file")
        if found.st_size > MOST_BYTES:
            raise KeysFileError(f"has more than {MOST_BYTES >> 20} MiB")
        parts: list[bytes] = []
        left = MOST_BYTES + 1
        while left > 0 and (part := os.read(file, left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(file)
