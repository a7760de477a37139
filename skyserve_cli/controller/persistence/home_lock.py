"""The lock that a home's controller holds as long as it runs, for commands that change what the controller works on."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyserve_cli.output import CommandFailed


@contextmanager
def locked(lock: Path) -> Iterator[None]:
    """With the lock. Raises CommandFailed where a controller has it."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CommandFailed("a controller of this home is starting; stop it, and try again") from None
    else:
        yield
    finally:
        os.close(descriptor)
