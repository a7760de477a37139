"""The controller on a host whose clock can be set: it is ahead by as many seconds as the file $SKYSERVE_CHAOS_CLOCK says. With
$SKYSERVE_CHAOS_DATABASE_TOO an SQLite database reads the same clock, as it does on one host.

    python -m benchmarks.chaos.shifted_controller
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

_FILE = Path(os.environ["SKYSERVE_CHAOS_CLOCK"])
_UNIX_EPOCH_JULIAN_DAY = 2440587.5
_wall = time.time


def _ahead_s() -> float:
    return float(_FILE.read_text() or "0")


def _shifted() -> float:
    return _wall() + _ahead_s()


def _read_shifted(connection: Any, _record: Any) -> None:
    connection.create_function("julianday", 1, lambda _now: _shifted() / 86400.0 + _UNIX_EPOCH_JULIAN_DAY)


if __name__ == "__main__":
    time.time = _shifted
    if os.environ.get("SKYSERVE_CHAOS_DATABASE_TOO"):
        sa.event.listen(sa.engine.Engine, "connect", _read_shifted)
    from skyserve_cli.controller import daemon

    sys.exit(daemon.main())
