"""Reports the status of a machine over one long-lived command, so that the controller needs no process per look.

A line of JSON (`status`) is written at the start, whenever the status changes, and at every heartbeat. The controller
responds to each line with one byte on standard input. That response is a visit: it renews the lease of the dead-man
switch. A line that is only written is no visit, because an sshd may take many minutes to notice that its client has died.

The command ends when standard input is closed, or after `SILENT_BEATS` heartbeats without a response.
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provisioners.remote.host_agent.files import uptime_s
from provisioners.remote.host_agent.status import describe, observe

if TYPE_CHECKING:
    from collections.abc import Callable

SILENT_BEATS = 2.5
_LOOK_EVERY_S = 0.2
_STDIN = 0


def follow(folder: Path, heartbeat_s: float, renew: Callable[[], None]) -> None:
    shown: dict[str, Any] = {}
    written_at = heard_at = uptime_s()
    while uptime_s() - heard_at < SILENT_BEATS * heartbeat_s:
        seen = observe(folder)
        if seen != shown or uptime_s() - written_at >= heartbeat_s:
            if not _write(describe(folder, seen)):
                return
            shown, written_at = seen, uptime_s()
        if select.select([_STDIN], [], [], min(_LOOK_EVERY_S, heartbeat_s))[0]:
            if not os.read(_STDIN, 4096):
                return
            heard_at = uptime_s()
            renew()


def _write(line: dict[str, Any]) -> bool:
    """Return whether the connection still takes lines."""
    try:
        sys.stdout.buffer.write(json.dumps(line).encode() + b"\n")
        sys.stdout.buffer.flush()
    except OSError:
        return False
    return True
