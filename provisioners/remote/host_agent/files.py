"""Atomic small files, and locks that last as long as the process that holds them."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any


def unix_now() -> float:
    return time.time()  # noqa: TID251 (this runs on another machine: the clock enters here)


def uptime_s() -> float:
    """Return seconds on a clock that cannot be set."""
    return time.monotonic()  # noqa: TID251 (as above)


def read_json(path: Path) -> Any:
    """None if there is no such file, or it is no JSON."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def write_text(path: Path, text: str) -> None:
    """Replace the file as a whole: a reader sees the old one or the new one."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    draft.write_text(text)
    draft.replace(path)


def lock(path: Path, patience_s: float = 0.0) -> int | None:
    """Return the lock's descriptor, or None if another process has it. Children do not inherit it; it ends with us."""
    fd = os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = uptime_s() + patience_s
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
