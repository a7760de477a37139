"""The clock enters here, and nowhere else."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, never going backwards."""
        ...


class SystemClock:
    """UNIX time that does not go backwards when the host's clock is set back."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset_s
