"""The status of a machine's replica, read from the machine's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from provisioners.remote.host_agent import daemon, lease
from provisioners.remote.host_agent.files import is_locked, read_json
from provisioners.remote.host_agent.front_port import LOCK as FRONT_LOCK
from provisioners.remote.host_agent.front_port import port_of, why_interpreted
from provisioners.remote.host_agent.log import log_window
from provisioners.remote.host_agent.scripts import (
    claimed_port,
    exit_code,
    exit_message,
    was_lost,
    was_started,
)

_ENDED = {"setup_failed": "setup", "run_exited": "run"}


def status(folder: Path) -> dict[str, Any]:
    return describe(folder, observe(folder))


def observe(folder: Path) -> dict[str, Any]:
    """Return what changes seldom, and is cheap to read: no log and no message."""
    order = read_json(folder / "order.json")
    notice = read_json(folder / "notice.json") or {}
    state = state_of(folder, order)
    script = _ENDED.get(state)
    return {
        "state": state,
        "exit_code": exit_code(folder, script) if script else None,
        "prepared": order is not None and exit_code(folder, "setup") == (0 if order["setup"] else None),
        "alive": is_locked(folder / daemon.LOCK),
        "preempt_at": notice.get("preempt_at"),
        "retire_at": notice.get("retire_at"),
        "port": claimed_port(order),
        "front": _front(folder, order),
        "interpreted": why_interpreted(folder),
    }


def _front(folder: Path, order: dict[str, Any] | None) -> int | None:
    """Return where TLS listens in front of the replica; 0 while it does not, None if there is to be none."""
    if order is None or not order.get("front"):
        return None
    return (port_of(folder) or 0) if is_locked(folder / FRONT_LOCK) else 0


def describe(folder: Path, observed: dict[str, Any]) -> dict[str, Any]:
    """Return the status: what was observed, how a script finished in a sentence, and how long the log is."""
    script = _ENDED.get(observed["state"])
    message = exit_message(folder, script) if script else ""
    seen_from = os.environ.get("SSH_CLIENT", "").partition(" ")[0]  # sshd sets it for each session
    return {
        **observed,
        "message": message,
        "log": list(log_window(folder)),
        "seen_from": seen_from,
        "lease": lease.terms(),
    }


def state_of(folder: Path, order: dict[str, Any] | None) -> str:
    if order is None:
        return "pending"
    if order["setup"] and exit_code(folder, "setup") != 0:
        ended = exit_code(folder, "setup") is not None or was_lost(folder, "setup")
        return "setup_failed" if ended else "setup"
    if not was_started(folder, "run"):
        return "setup"
    ended = exit_code(folder, "run") is not None or was_lost(folder, "run")
    return "run_exited" if ended else "running"
