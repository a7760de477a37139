"""The end of all that runs for a replica, found by mark and by kinship, because each misses something.

A program may clear its environment, and one whose parents are dead is an orphan.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from provisioners.remote.host_agent.daemon import kill_unit
from provisioners.remote.host_agent.files import read_json, uptime_s
from provisioners.remote.host_agent.log import drain
from provisioners.remote.host_agent.scripts import MARK, container_name

_OURS = ("daemon", "pump", "front", "script")
_DRAIN_FOR_S = 2.0
_KILL_FOR_S = 10.0  # what the kernel does not let die within this is beyond us


def stop(folder: Path, grace_s: float) -> bool:
    """End everything, with `grace_s` between SIGTERM and SIGKILL; whether nothing is left. Nothing starts any more."""
    try:
        (folder / "stop").touch()
    except FileNotFoundError:  # another release has killed everything, and removed the folder
        return True
    order = read_json(folder / "order.json")
    if order is None:
        return True
    token = order["token"]
    if order["image"]:
        _quietly("docker", "exec", container_name(token), "kill", "-TERM", "-1")
    _signal(_scripts(token, folder), signal.SIGTERM)
    until = uptime_s() + grace_s
    while _scripts(token, folder) and uptime_s() < until:
        time.sleep(0.05)
    with suppress(FileNotFoundError):
        drain(folder, _DRAIN_FOR_S)
    ended = _kill(token)
    if order["image"]:
        _quietly("docker", "rm", "--force", container_name(token))
    kill_unit(token)
    with suppress(FileNotFoundError):
        Path(order["secrets_path"]).unlink()
    return ended


def _kill(token: str) -> bool:
    """Return until two looks in a row find nothing: one that is just starting a program shows no mark for a moment."""
    until, missed = uptime_s() + _KILL_FOR_S, 0
    while missed < 2 and uptime_s() < until:
        left = belonging(token)
        missed = 0 if left else missed + 1
        _signal(left, signal.SIGKILL)
        time.sleep(0.02)
    return missed == 2


def _scripts(token: str, folder: Path) -> list[int]:
    return [pid for pid in belonging(token) if not _is_ours(pid, folder)]


def belonging(token: str) -> set[int]:
    """Return all living processes of the replica but this one: those with the mark, and their descendants."""
    mark = f"{MARK}={token}".encode()
    children: dict[int, list[int]] = {}
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it has exited, or is another user's
            # The command's name is in parentheses and may itself contain some.
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] not in (b"Z", b"X"):
                children.setdefault(int(fields[1]), []).append(int(entry.name))
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    frontier = list(found)
    while frontier:
        below = [pid for pid in children.get(frontier.pop(), []) if pid not in found]
        found.update(below)
        frontier += below
    return found - {os.getpid()}


def _is_ours(pid: int, folder: Path) -> bool:
    """Return whether it is the daemon or one of its helpers, which would not let a script end in peace if they were gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return True  # it has exited
    return len(words) > 3 and words[2].decode(errors="replace") in _OURS and words[3] == os.fsencode(folder)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _quietly(*words: str) -> None:
    with suppress(OSError):
        subprocess.run(words, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
