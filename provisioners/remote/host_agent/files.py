"""Files of the machine's folder, locks that end with the process that holds them, and clocks."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

from provisioners import files


def unix_now() -> float:
    return time.time()  # noqa: TID251 (this runs on another machine: the clock enters here)


def uptime_s() -> float:
    """Return seconds on a clock that cannot be set."""
    return time.monotonic()  # noqa: TID251 (as above)


def read_json(path: Path) -> Any:
    """Return the content, or None if there is no such file, or it is not JSON."""
    try:
        return files.read_json(path)
    except ValueError:
        return None


def lock(path: Path, timeout_s: float = 0.0) -> int | None:
    """Return the lock's descriptor, or None if another process has it. Children do not inherit it; it ends with us."""
    fd = os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = uptime_s() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if uptime_s() >= until:
                os.close(fd)
                return None
            time.sleep(0.05)
        else:
            return fd


def is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    fd = os.open(str(path), os.O_RDWR | os.O_CLOEXEC)
    try:
        # Shared, so that two who look at a time do not take each other for the holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)
