"""A number that no other process of these tests has: for addresses and ports, of which two processes must not share any."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

#: On disk, and the same for all runs on this machine, whatever their folder for temporary files is.
SHARED = Path("/tmp")
_held: list[int] = []  # locks, until the process ends


def own_number(count: int) -> int:
    """Return a number below `count`, and keep it until this process, and those that it has forked, have ended."""
    folder = SHARED / f"skyserve-tests-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for turn in range(count):
        number = (os.getpid() + turn) % count
        lock = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        _held.append(lock)
        return number
    raise RuntimeError(f"{count} processes of these tests are running")
