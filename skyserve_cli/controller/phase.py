"""What the controller is doing while its API does not respond yet, or no longer: in a file of the home, which commands read."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from provisioners.files import write_json

log = logging.getLogger("skyserve.controller")

STOP_WITHIN_S = 20.0
SHOWN_EVERY_S = 0.5


class Phase:
    """The file of one process. `now` is UNIX time. A disk that is full keeps no controller from starting or stopping."""

    def __init__(self, file: Path, now: Callable[[], float]) -> None:
        self._file = file
        self._now = now
        self._doing = ""
        self._since = 0.0

    def enter(self, doing: str, detail: str = "") -> None:
        """Write that the process is `doing` this, such as "opening the database"; `detail` may change meanwhile."""
        if doing != self._doing:
            self._doing, self._since = doing, self._now()
        with suppress(OSError):
            write_json(
                self._file, {"pid": os.getpid(), "doing": doing, "detail": detail, "since": self._since}
            )

    def over(self) -> None:
        """The API responds, or the process ends."""
        self._file.unlink(missing_ok=True)


def read_phase(file: Path) -> Mapping[str, Any] | None:
    """Return what was written last; None if the controller has no such phase."""
    try:
        found: Mapping[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found


class StopLimit(threading.Thread):
    """Shows what a stop waits for, and ends the process if that takes longer than `within_s`.

    Nothing is lost: all is stored on the way, and the lease runs out by itself.
    """

    def __init__(
        self,
        phase: Phase,
        waits_for: Callable[[], str],
        end: Callable[[], object],
        within_s: float = STOP_WITHIN_S,
    ) -> None:
        super().__init__(name="stop", daemon=True)
        self._phase = phase
        self._waits_for = waits_for
        self._end = end
        self._within_s = within_s
        self._over = threading.Event()

    def run(self) -> None:
        for _ in range(int(self._within_s / SHOWN_EVERY_S)):
            self._phase.enter("stopping", self._waits_for())
            if self._over.wait(SHOWN_EVERY_S):
                return
        log.warning(
            "the stop is not over after %g s, so the process ends now: %s", self._within_s, self._waits_for()
        )
        self._end()

    def cancel(self) -> None:
        """The stop is over."""
        self._over.set()
        self.join(timeout=1.0)
        self._phase.over()
