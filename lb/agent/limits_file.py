"""The limits of API keys, shared by the agents of one host: a file that each of them maps into its memory.

Agents that share a port (`--reuse-port`), and an agent and its successor while both have requests, count as one, so a
`LimitStore` (`lb.core.limit_store`) of theirs is a file. It keeps the levels over a restart, too.

Why not a share of the limit for each process: the kernel spreads connections, not requests, so a client with one
connection would get a 1/n of its limit; and during a handover one of two processes is nearly idle. With one set of
numbers there is nothing to divide, and how many processes there are does not matter.

*Layout.* A header, then one row per tenant: the digest of its name, the two levels and their instant. After the rows each process (a
slot) has a column: of every row its requests under way and its reserved tokens. On the disk the file
has room for all rows, and for the columns of those processes that have used it: a row costs little where there are few processes.
The instant is one of CLOCK_MONOTONIC, which all processes of one boot share; the header names the boot, and a file of another boot, or of another layout, is replaced and never
written to, since processes of another release may still have it mapped.

*Locks.* Levels are read and written under an exclusive lock of the file (`flock`), for some microseconds per request of
a tenant that has limits. A process that is frozen while it holds the lock must not stop the others: after
`_TRIES` attempts they go on without the lock for some seconds. Limits may then be off by a few requests.

*Processes.* Each holds a record lock on its slot for as long as it runs, which the kernel releases on any exit. What a
dead process had in flight is no longer, and what it had reserved returns to the bucket: its clients have lost those
requests by no fault of theirs.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import struct
import tempfile
import time
from pathlib import Path

from lb.core.limit_store import FULL, LimitRow, MemoryLimits

SLOTS = 64  # processes that share a file
ROWS = 32_768  # tenants; further ones are limited per process
_LAYOUT = b"SKYLIM02"
_MEMORY = Path("/dev/shm")  # noqa: S108 (others' files are refused)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# In doubles of 8 bytes. The header: layout, boot (two), number of rows, number of slots that were ever in use.
_HEADER = 8
_ROWS_AT, _SLOTS_AT = 3, 4
# A row: digest of the tenant's name (two), then these, and three that are free.
_REQUESTS, _TOKENS, _FILLED_AT = 2, 3, 4
_ROW = 8
# A column: two of each row.
_COLUMNS = _HEADER + ROWS * _ROW
_IN_FLIGHT, _RESERVED = 0, 1
_CELL = 2
_COLUMN = ROWS * _CELL
_SIZE = 8 * (_COLUMNS + SLOTS * _COLUMN)

_TRIES = 1000  # to get the lock: on an overloaded host its holder may wait for a core meanwhile
_PAUSE_S = 0.0002  # between two of them
_UNLOCKED_S = 5.0
_REAP_EVERY_S = 1.0

_log = logging.getLogger("lb.agent.limits_file")


class FileRow:
    """One tenant's numbers in the mapped file."""

    __slots__ = ("_at", "_in_flight_at", "_numbers", "_reserved_at")

    def __init__(self, numbers: memoryview[float], at: int, slot: int) -> None:
        self._numbers = numbers
        self._at = at
        self._in_flight_at = _cell(at, slot) + _IN_FLIGHT
        self._reserved_at = _cell(at, slot) + _RESERVED

    @property
    def requests(self) -> float:
        return float(self._numbers[self._at + _REQUESTS])

    @requests.setter
    def requests(self, level: float) -> None:
        self._numbers[self._at + _REQUESTS] = level

    @property
    def tokens(self) -> float:
        return float(self._numbers[self._at + _TOKENS])

    @tokens.setter
    def tokens(self, level: float) -> None:
        self._numbers[self._at + _TOKENS] = level

    @property
    def filled_at(self) -> float:
        return float(self._numbers[self._at + _FILLED_AT])

    @filled_at.setter
    def filled_at(self, instant: float) -> None:
        self._numbers[self._at + _FILLED_AT] = instant

    @property
    def own_in_flight(self) -> float:
        return float(self._numbers[self._in_flight_at])

    @own_in_flight.setter
    def own_in_flight(self, count: float) -> None:
        self._numbers[self._in_flight_at] = count

    @property
    def own_reserved(self) -> float:
        return float(self._numbers[self._reserved_at])

    @own_reserved.setter
    def own_reserved(self, tokens: float) -> None:
        self._numbers[self._reserved_at] = tokens

    def in_flight(self) -> int:
        return self._sum(_IN_FLIGHT)

    def reserved(self) -> int:
        return self._sum(_RESERVED)

    def _sum(self, which: int) -> int:
        first, slots = _cell(self._at, 0) + which, int(self._numbers[_SLOTS_AT])
        return int(sum(self._numbers[first : first + slots * _COLUMN : _COLUMN]))


class LimitsFile:
    """A `LimitStore` in a file. The agent's clock must be CLOCK_MONOTONIC, as an event loop's is."""

    def __init__(self, path: Path) -> None:
        """Raise OSError if there can be no such file, or if SLOTS processes share it already."""
        self._path = path
        self._file = _open(path)
        self._unlocked_until = self._reap_at = 0.0
        self._beyond = MemoryLimits()  # of tenants for whom the file has no room
        self._known: dict[bytes, int] = {}
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._map = mmap.mmap(self._file, _SIZE)
            self._numbers: memoryview[float] = memoryview(self._map).cast("d")
            self._slot = self._claim()
        except BaseException:
            os.close(self._file)
            raise
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def row(self, tenant: str) -> LimitRow:
        digest = hashlib.blake2b(tenant.encode(), digest_size=16).digest()
        at = self._known.get(digest)
        if at is None and self._try_lock():
            try:
                at = self._find_or_add(digest)
            finally:
                self.unlock()
        if at is None:
            _log.warning("no free row in limits_file=%s: a tenant is limited per process", self._path)
            return self._beyond.row(tenant)
        return FileRow(self._numbers, at, self._slot)

    def lock(self, now: float) -> None:
        if now >= self._unlocked_until and not self._try_lock():
            self._unlocked_until = now + _UNLOCKED_S
            _log.warning("limits_file=%s is locked by a process that does not run: go on without", self._path)

    def unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def reap(self, now: float) -> bool:
        if now < self._reap_at:
            return False
        self._reap_at = now + _REAP_EVERY_S
        self.lock(now)
        try:
            slots = range(int(self._numbers[_SLOTS_AT]))
            return sum(self._clear(slot) for slot in slots if self._is_dead(slot)) > 0
        finally:
            self.unlock()

    def _try_lock(self) -> bool:
        for _ in range(_TRIES):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(_PAUSE_S)
        return False

    # --- under the lock

    def _claim(self) -> int:
        """Take a slot that no living process has."""
        for slot in range(SLOTS):
            try:
                _record_lock(self._file, fcntl.F_OFD_SETLK, slot)
            except (BlockingIOError, PermissionError):
                continue
            os.posix_fallocate(self._file, 8 * (_COLUMNS + slot * _COLUMN), 8 * _COLUMN)
            self._clear(slot)
            self._numbers[_SLOTS_AT] = max(self._numbers[_SLOTS_AT], slot + 1)
            return slot
        raise OSError(f"{SLOTS} processes share {self._path} already")

    def _is_dead(self, slot: int) -> bool:
        return slot != self._slot and not _record_lock(self._file, fcntl.F_OFD_GETLK, slot)

    def _clear(self, slot: int) -> bool:
        """Forget what the slot's former process left; whether there was anything."""
        numbers, left = self._numbers, False
        for at in range(_HEADER, _HEADER + int(numbers[_ROWS_AT]) * _ROW, _ROW):
            in_flight, reserved = _cell(at, slot) + _IN_FLIGHT, _cell(at, slot) + _RESERVED
            if numbers[in_flight] or numbers[reserved]:
                left = True
                numbers[at + _TOKENS] += numbers[reserved]
                numbers[in_flight] = numbers[reserved] = 0.0
        return left

    def _find_or_add(self, digest: bytes) -> int | None:
        """Return where the tenant's row begins; None if there is no room for one more."""
        count = int(self._numbers[_ROWS_AT])
        for at in range(_HEADER + len(self._known) * _ROW, _HEADER + count * _ROW, _ROW):
            self._known[self._map[8 * at : 8 * at + 16]] = at
        if digest not in self._known:
            if count >= ROWS:
                return None
            at = _HEADER + count * _ROW
            self._map[8 * at : 8 * at + 16] = digest
            self._numbers[at + _REQUESTS] = self._numbers[at + _TOKENS] = FULL
            self._numbers[_ROWS_AT] = count + 1  # last: a process that fails before it has added nothing
            self._known[digest] = at
        return self._known[digest]


def _cell(at: int, slot: int) -> int:
    """Return where a slot has its numbers of the row at `at`."""
    return _COLUMNS + slot * _COLUMN + (at - _HEADER) // _ROW * _CELL


def shared_path(service: str, port: int) -> Path:
    """Return where agents of one user that share this port find each other without the path of a file: in memory."""
    name = hashlib.blake2b(service.encode(), digest_size=8).hexdigest()
    folder = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
    return folder / f"skyserve-lb-{os.geteuid()}-{port}-{name}.limits"


def _open(path: Path) -> int:
    """Return the descriptor of a file of this boot and layout, new if need be."""
    stamp = _LAYOUT + hashlib.blake2b(_BOOT_ID.read_bytes(), digest_size=16).digest()
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            status = os.fstat(file)
            if status.st_uid != os.geteuid():
                raise PermissionError(f"{path} is another user's")
            if not _is_at(path, status):
                continue  # replaced while we waited
            if status.st_size == _SIZE and os.pread(file, len(stamp), 0) == stamp:
                found, file = file, -1
                fcntl.flock(found, fcntl.LOCK_UN)
                return found
            _replace(path, stamp)
        finally:
            if file >= 0:
                os.close(file)


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:
        return False


def _replace(path: Path, stamp: bytes) -> None:
    """Put a new file there in one step, with the room of its rows on the disk: a mapped page that finds none is a SIGBUS."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.new")
    scratch.unlink(missing_ok=True)
    file = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(file, _SIZE)
        os.posix_fallocate(file, 0, 8 * _COLUMNS)
        os.pwrite(file, stamp, 0)
        scratch.replace(path)
    finally:
        os.close(file)
        scratch.unlink(missing_ok=True)


def _record_lock(file: int, command: int, slot: int) -> bool:
    """Return whether another process holds the slot's lock (F_OFD_GETLK), or take it (F_OFD_SETLK; raises OSError)."""
    # struct flock: type, origin, start, length, pid. The bytes that are locked need not exist.
    asked = struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, _SIZE + slot, 1, 0)
    found = struct.unpack("@hhqqi0q", fcntl.fcntl(file, command, asked))
    return bool(found[0] != fcntl.F_UNLCK)
