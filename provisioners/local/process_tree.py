"""Processes by kinship and by mark, so that an instance can die as a whole.

Two ways to find what belongs to an instance, because each misses something:

* Kinship: the host is a *child subreaper*, so for all that its descendants do (double fork, setsid, a daemon of
  their own) they stay below it in the process tree. Ends with the host.
* Mark: every process of an instance inherits SKYSERVE_INSTANCE_ID, readable in /proc/PID/environ. Finds the
  ones whose host was killed.

Linux only: prctl(2), proc(5).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from provisioners.remote.host_agent.processes import descendants, processes

__all__ = ["descendants"]

INSTANCE_MARK = "SKYSERVE_INSTANCE_ID"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """To be called in a forked child: the kernel kills it when `parent_pid`, its parent, exits."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we looked
        os._exit(1)


def marked(instance_id: str) -> list[int]:
    """Return all living processes that carry the mark of this instance."""
    mark = f"{INSTANCE_MARK}={instance_id}".encode()
    found = []
    for pid, _, is_zombie in processes():
        # Another user's process, or one that just exited: not ours.
        with suppress(PermissionError, FileNotFoundError, ProcessLookupError):
            if not is_zombie and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def signal_all(pids: list[int], signal_number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def kill_marked(instance_id: str, rounds: int = 50) -> None:
    """Kill all processes that still carry the mark.

    In rounds, because a process may fork while we look, and until two looks in a row find nothing, because one that is just
    starting a program shows no mark for a moment.
    """
    missed = 0
    for _ in range(rounds):
        pids = marked(instance_id)
        missed = 0 if pids else missed + 1
        if missed == 2:
            return
        signal_all(pids, signal.SIGKILL)
        time.sleep(0.005)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
