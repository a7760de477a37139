"""The limits of API keys, shared by the agents of one host: a file that each of them maps into its memory.

Agents that share a port (`--reuse-port`), and an agent and its successor while both have requests, count as one, so a
`LimitStore` (`lb.core.limit_store`) of theirs is a file. It keeps the levels over a restart, too.

Why not a share of the limit for each process: the kernel spreads connections, not requests, so a client with one
connection would get a 1/n of its limit; and during a handover one of two processes is nearly idle. With one set of
numbers there is nothing to divide, and how many processes there are does not matter.

*Layout.* A header, then one row per quota: the digest of its name, and the numbers of `lb.core.limit_store`. After the rows each process (a
slot) has a column, which has a cell of every row: its requests under way and what they have reserved. The file is sparse: it has room on the disk for the rows that are
used, a block of rows at a time, and for their cells of those processes that have used it.
Instants are those of CLOCK_MONOTONIC, which all processes of one boot share; the header names the boot, and a file of another boot, or of another layout, is replaced and never
written to, since processes of another release may still have it mapped. Of a file of another boot, what was used on its day and in its month is kept.

*Locks.* Levels are read and written under an exclusive lock of the file (`flock`), for some microseconds per request of
a tenant that has limits. A process that is alone needs none: it sees in the file when another one comes, which waits for a moment before it
reads or writes. A process that is frozen while it holds the lock must not stop the others: after
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
from collections.abc import Iterable, Sequence
from pathlib import Path

from lb.core.limit_store import (
    CALENDAR,
    CELL_SIZE,
    FULL,
    INPUT,
    OUTPUT,
    REQUESTS,
    RESERVED_IN,
    RESERVED_OUT,
    ROW_SIZE,
    TOKENS,
    Columns,
    LimitRow,
    MemoryLimits,
)

SLOTS = 64  # processes that share a file
ROWS = 32_768  # quotas; further ones are limited per process
_LAYOUT = b"SKYLIM03"
_MEMORY = Path("/dev/shm")  # noqa: S108 (others' files are refused)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# In doubles of 8 bytes. The header: layout, boot (two), number of rows, number of slots that were ever in use, number of rows that have room,
# number of processes that have come.
_HEADER = 8
_ROWS_AT, _SLOTS_AT, _ROOM_AT, _COME_AT = 3, 4, 5, 6
_DIGEST = 2  # of the name, at the beginning of a row
_ROW = _DIGEST + ROW_SIZE
_COLUMNS = _HEADER + ROWS * _ROW
_COLUMN = ROWS * CELL_SIZE
_SIZE = 8 * (_COLUMNS + SLOTS * _COLUMN)
_BLOCK = 128  # rows: their cells fill a page

_TRIES = 1000  # to get the lock: on an overloaded host its holder may wait for a core meanwhile
_PAUSE_S = 0.0002  # between two of them
_UNLOCKED_S = 5.0
_REAP_EVERY_S = 1.0
_SEEN_S = 0.05  # after which another process has seen that one has come

_log = logging.getLogger("lb.agent.limits_file")


class LimitsFile:
    """A `LimitStore` in a file. The agent's clock must be CLOCK_MONOTONIC, as an event loop's is."""

    def __init__(self, path: Path) -> None:
        """Raise OSError if there can be no such file, or if SLOTS processes share it already."""
        self._path = path
        self._file = _open(path)
        self._unlocked_until = self._reap_at = 0.0
        self._beyond = MemoryLimits()  # of quotas for which the file has no room
        self._known: dict[bytes, int] = {}
        self._cleared: dict[
            int, float
        ] = {}  # slots of the dead, and how many processes had come when they were cleared
        self._alone = -1.0  # how many processes had come when no other one ran
        self._holds = False
        self._stamp = 0  # of `lock`
        self._rows: set[int] = set()  # that have been given out
        self._is_shared = (
            False  # one of them may have two users here, such as a key that was removed and is back
        )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._map = mmap.mmap(self._file, _SIZE)
            self._numbers: memoryview[float] = memoryview(self._map).cast("d")
            self._slot = self._claim()
            self._columns = Columns(self._slot, _COLUMN, _SLOTS_AT)
            self._numbers[_COME_AT] += 1
            self._look_around()
        except BaseException:
            os.close(self._file)
            raise
        fcntl.flock(self._file, fcntl.LOCK_UN)
        if self._alone < 0:
            time.sleep(_SEEN_S)  # no request is served yet

    def row(self, name: str) -> LimitRow:
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        at = self._known.get(digest)
        if at is None and (self._is_alone() or self._try_lock()):
            try:
                at = self._find_or_add(digest)
            finally:
                self.unlock()
        if at is None:
            _log.warning("no free row in limits_file=%s: a key is limited per process", self._path)
            self._is_shared = True
            return self._beyond.row(name)
        self._is_shared = self._is_shared or at in self._rows
        self._rows.add(at)
        return LimitRow(self._numbers, at, _cell(at, self._slot), self._columns)

    def lock(self, now: float) -> int:
        is_alone = self._numbers[_COME_AT] == self._alone  # as `_is_alone`, on the path of each request
        if is_alone and not self._is_shared:
            return self._stamp
        self._stamp += 1
        if not is_alone and now >= self._unlocked_until and not self._try_lock():
            self._unlocked_until = now + _UNLOCKED_S
            _log.warning("limits_file=%s is locked by a process that does not run: go on without", self._path)
        return self._stamp

    def unlock(self) -> None:
        if self._holds:
            self._holds = False
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def reap(self, now: float) -> bool:
        if now < self._reap_at:
            return False
        self._reap_at = now + _REAP_EVERY_S
        self.lock(now)
        try:
            return self._look_around()
        finally:
            self.unlock()

    def _is_alone(self) -> bool:
        return bool(self._numbers[_COME_AT] == self._alone)

    def _try_lock(self) -> bool:
        for _ in range(_TRIES):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._holds = True
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
            self._make_room(0, int(self._numbers[_ROOM_AT]), (slot,))
            self._clear(slot)
            self._numbers[_SLOTS_AT] = max(self._numbers[_SLOTS_AT], slot + 1)
            return slot
        raise OSError(f"{SLOTS} processes share {self._path} already")

    def _look_around(self) -> bool:
        """Clear the slots of processes that died, and see whether any other runs. Returns whether there was anything to clear."""
        come, left, alone = float(self._numbers[_COME_AT]), False, True
        for slot in range(int(self._numbers[_SLOTS_AT])):
            if slot == self._slot or self._cleared.get(slot) == come:
                continue
            if _record_lock(self._file, fcntl.F_OFD_GETLK, slot):
                alone = False
            else:
                left = self._clear(slot) or left
                self._cleared[slot] = come
        if alone and self._alone != come:
            self._alone = come
            self._stamp += 1  # others may have changed rows until now
        elif not alone:
            self._alone = -1.0
        return left

    def _clear(self, slot: int) -> bool:
        """Forget what the slot's former process left; whether there was anything."""
        numbers, left = self._numbers, False
        for row in range(int(numbers[_ROWS_AT])):
            at = _at(row)
            cell = _cell(at, slot)
            if any(numbers[cell : cell + CELL_SIZE]):
                left = True
                tokens_in, tokens_out = numbers[cell + RESERVED_IN], numbers[cell + RESERVED_OUT]
                numbers[at + TOKENS] += tokens_in + tokens_out
                numbers[at + INPUT] += tokens_in
                numbers[at + OUTPUT] += tokens_out
                for which in range(CELL_SIZE):
                    numbers[cell + which] = 0.0
        return left

    def _find_or_add(self, digest: bytes) -> int | None:
        """Return where the row of that digest has its numbers; None if there is no room for one more."""
        count = int(self._numbers[_ROWS_AT])
        for row in range(len(self._known), count):
            at = _at(row)
            self._known[self._map[8 * (at - _DIGEST) : 8 * at]] = at
        if digest not in self._known:
            if count >= ROWS or not self._has_room(count):
                return None
            at = _at(count)
            self._map[8 * (at - _DIGEST) : 8 * at] = digest
            for which in (REQUESTS, TOKENS, INPUT, OUTPUT):
                self._numbers[at + which] = FULL
            self._numbers[_ROWS_AT] = count + 1  # last: a process that fails before it has added nothing
            self._known[digest] = at
        return self._known[digest]

    def _has_room(self, row: int) -> bool:
        """Make room on the disk for a row and those that follow it, unless it has some; whether it has now."""
        room = int(self._numbers[_ROOM_AT])
        if row < room:
            return True
        try:
            self._make_room(room, _BLOCK, range(int(self._numbers[_SLOTS_AT])))
        except OSError:
            return False
        self._numbers[_ROOM_AT] = room + _BLOCK
        return True

    def _make_room(self, first: int, count: int, slots: Iterable[int]) -> None:
        """Give rows, and their cells in these slots, room on the disk: a mapped page that finds none is a SIGBUS. Raises OSError."""
        if count:
            at = _at(first)
            os.posix_fallocate(self._file, 8 * (at - _DIGEST), 8 * count * _ROW)
            for slot in slots:
                os.posix_fallocate(self._file, 8 * _cell(at, slot), 8 * count * CELL_SIZE)


def _at(row: int) -> int:
    """Return where a row has its numbers."""
    return _HEADER + row * _ROW + _DIGEST


def _cell(at: int, slot: int) -> int:
    """Return where a slot has its numbers of the row at `at`."""
    return _COLUMNS + slot * _COLUMN + (at - _HEADER) // _ROW * CELL_SIZE


def shared_path(service: str, port: int) -> Path:
    """Return where agents of one user that share this port find each other without the path of a file: in memory."""
    name = hashlib.blake2b(service.encode(), digest_size=8).hexdigest()
    folder = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
    return folder / f"skyserve-lb-{os.geteuid()}-{port}-{name}.limits"


def _open(path: Path) -> int:
    """Return the descriptor of a file of this boot and layout, new if need be."""
    stamp = _LAYOUT + hashlib.blake2b(_BOOT_ID.read_bytes(), digest_size=16).digest()
    found = -1
    while found < 0:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if _is_good(path, file, stamp):
                found, file = file, -1
        finally:
            if file >= 0:
                os.close(file)
    return found


def _is_good(path: Path, file: int, stamp: bytes) -> bool:
    """Return whether this file can be used; if it is of another boot or layout, there is a new one at the path now."""
    fcntl.flock(file, fcntl.LOCK_EX)
    status = os.fstat(file)
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} is another user's")
    if not _is_at(path, status):
        return False  # replaced while we waited
    head = os.pread(file, len(stamp), 0)
    if status.st_size == _SIZE and head == stamp:
        fcntl.flock(file, fcntl.LOCK_UN)
        return True
    is_ours = status.st_size == _SIZE and head.startswith(_LAYOUT)
    _replace(path, stamp, _used_in(file) if is_ours else [])
    return False


def _used_in(file: int) -> list[tuple[bytes, tuple[float, ...]]]:
    """Return the digests of the rows of a file, with what has been used on their days and in their months."""
    header = struct.unpack(f"{_HEADER}d", os.pread(file, 8 * _HEADER, 0))
    count = min(ROWS, max(0, int(header[_ROWS_AT])))
    rows = os.pread(file, 8 * count * _ROW, 8 * _HEADER)
    found = []
    for begin in range(0, len(rows) - 8 * _ROW + 1, 8 * _ROW):
        numbers = struct.unpack_from(f"{ROW_SIZE}d", rows, begin + 8 * _DIGEST)
        if any(numbers[CALENDAR]):
            found.append((rows[begin : begin + 8 * _DIGEST], numbers[CALENDAR]))
    return found


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:
        return False


def _replace(path: Path, stamp: bytes, used: Sequence[tuple[bytes, tuple[float, ...]]]) -> None:
    """Put a new file there in one step, with room on the disk for its rows, which are full of what `used` does not say."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.new")
    scratch.unlink(missing_ok=True)
    file = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(file, _SIZE)
        room = -(-len(used) // _BLOCK) * _BLOCK
        os.posix_fallocate(file, 0, 8 * _at(room))
        numbers = [0.0] * (_HEADER - _ROWS_AT)
        numbers[0], numbers[_ROOM_AT - _ROWS_AT] = len(used), room
        os.pwrite(file, stamp + struct.pack(f"{len(numbers)}d", *numbers), 0)
        for row, (digest, calendar) in enumerate(used):
            fresh = [0.0] * ROW_SIZE
            fresh[REQUESTS] = fresh[TOKENS] = fresh[INPUT] = fresh[OUTPUT] = FULL
            fresh[CALENDAR] = calendar
            os.pwrite(file, digest + struct.pack(f"{ROW_SIZE}d", *fresh), 8 * (_at(row) - _DIGEST))
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
