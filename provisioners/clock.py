"""The only module of this package that reads the clock. Everything else takes `now` as an argument."""

from __future__ import annotations

import time


def unix_now() -> float:
    """Return seconds since the epoch."""
    return time.time()


def steady_now() -> float:
    """Return seconds since some instant, for durations: it is never set."""
    return time.monotonic()
