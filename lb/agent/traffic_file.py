"""A file that is written while the agent has traffic: it renews the lease of the machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NOTE_EVERY_S = 20.0


class TrafficNotes:
    """Touches a file of the machine. Where the file's folder is missing, the machine has no lease.

    `served` counts responses of 2xx and 3xx.
    """

    def __init__(self, file: Path, served: Callable[[], int], in_flight: Callable[[], int]) -> None:
        self._file = file
        self._served = served
        self._in_flight = in_flight
        self._before = served()

    def note(self) -> None:
        """Touch the file if a request was served since the last call, or is still being served. Called every NOTE_EVERY_S."""
        now = self._served()
        if now > self._before or self._in_flight():
            with suppress(OSError):
                self._file.touch()
        self._before = now
