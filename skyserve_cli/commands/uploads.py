"""How far local files are sent to a controller on another host: a bar on a terminal after two seconds, and a line at the end."""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING

from skyserve_cli.controller.reconcile.clock import SteadyClock
from skyserve_cli.output import inform

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

QUIET_S = 2.0


class UploadProgress:
    """One file or folder at a time."""

    def __init__(self) -> None:
        self._clock = SteadyClock()
        self._path = ""
        self._began = 0.0
        self._bar: tuple[Progress, TaskID] | None = None

    def show(self, path: str, sent: int, total: int) -> None:
        """Show that `sent` of `total` bytes of a path were sent."""
        if path != self._path:
            self._path, self._began = path, self._clock.now()
        if sent >= total:
            self._end()
            self._path = ""
            if total:
                inform(f"sent {total:,} bytes of {path}")
            return
        if self._bar is None and self._clock.now() - self._began >= QUIET_S and sys.stderr.isatty():
            self._bar = _started(path, total)
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=sent, total=total)

    def _end(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None


def _started(path: str, total: int) -> tuple[Progress, TaskID]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from skyserve_cli.text_tables import console

    columns = (TextColumn("sending {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=console(sys.stderr), transient=True)
    bar.start()
    atexit.register(bar.stop)  # after Ctrl-C, too: it hides the cursor
    return bar, bar.add_task(path, total=total)


UPLOADS = UploadProgress()
