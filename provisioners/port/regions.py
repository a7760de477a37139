"""Regions of a cloud that do not let us in, or do not respond now, and the memory of them.

A region is *closed* by a policy of the organisation or because the account has not enabled it: it is left out of launches, and
tried again after an hour. A region that is *silent* may have anything in it; it is tried again after a while that doubles,
so that one region that is down does not slow down the listing of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from provisioners.port.errors import ProvisionError, RegionClosedError

CLOSED_S = 3600.0
FIRST_SILENT_S = 15.0
LONGEST_SILENT_S = 120.0


class ClosedRegions:
    """Thread-safe."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._closed: dict[str, tuple[float, RegionClosedError]] = {}

    def note(self, error: RegionClosedError) -> None:
        with self._lock:
            self._closed[error.region] = self._now() + CLOSED_S, error

    def find(self, region: str) -> RegionClosedError | None:
        """Return why the region is left out now; None if it is not, or is to be tried again."""
        with self._lock:
            until, error = self._closed.get(region, (0.0, None))
            return error if self._now() < until else None

    def why(self) -> Mapping[str, str]:
        """Return a sentence for each region that is left out now."""
        with self._lock:
            now = self._now()
            return {region: error.message for region, (until, error) in self._closed.items() if now < until}


class SilentRegions:
    """Thread-safe."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._silent: dict[str, tuple[float, float, ProvisionError]] = {}  # until, the wait, why

    def note(self, region: str, error: ProvisionError) -> None:
        with self._lock:
            waited_s = self._silent[region][1] if region in self._silent else 0.0
            wait_s = min(LONGEST_SILENT_S, max(FIRST_SILENT_S, 2 * waited_s))
            self._silent[region] = self._now() + wait_s, wait_s, error

    def responded(self, region: str) -> None:
        with self._lock:
            self._silent.pop(region, None)

    def is_suspect(self, region: str) -> bool:
        """Return whether it did not respond at the last try."""
        with self._lock:
            return region in self._silent

    def waits(self, region: str) -> ProvisionError | None:
        """Return what it failed with, while it is not to be tried again; None if it may be tried."""
        with self._lock:
            until, _, error = self._silent.get(region, (0.0, 0.0, None))
            return error if self._now() < until else None
