"""The daemon: starts `setup`, waits until it is done on all nodes of the replica, starts `run`, listens for notices.

It can be killed at any time and started again; what it started goes on without it. It starts nothing twice, because
what it starts takes a lock first.
"""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from provisioners.remote.host_agent import lease
from provisioners.remote.host_agent.files import is_locked, lock, read_json, uptime_s
from provisioners.remote.host_agent.front_port import LOCK as FRONT_LOCK
from provisioners.remote.host_agent.log import LOCK as LOG_LOCK
from provisioners.remote.host_agent.log import pipe_of
from provisioners.remote.host_agent.scripts import (
    MARK,
    container_name,
    exit_code,
    is_released,
    is_watched,
    was_started,
)

LOCK = "daemon.lock"
_LOOK_EVERY_S = 0.2
_SYSTEMD = Path("/run/systemd/system")  # there while systemd runs the machine


def live(folder: Path) -> None:
    # With an HTTP client, which the other verbs do not need.
    from provisioners.remote.host_agent.notices import watch

    held = lock(folder / LOCK)
    if held is None:
        return
    signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # children are not waited for: their own lock shows whether they run
    order = json.loads((folder / "order.json").read_text())
    (folder / "work").mkdir(exist_ok=True)
    pipe_of(folder)  # kept open: scripts outlive a pump that was killed
    threading.Thread(target=watch, args=(folder, order["cloud"]), daemon=True).start()
    port, peers, looked_at = connected_port(order), lease.peers_of(order), float("-inf")
    while not ((folder / "stop").exists() or is_released(order)):
        if uptime_s() - looked_at >= lease.NOTE_EVERY_S:
            looked_at = uptime_s()
            has_lease = lease.FOLDER.is_dir() and (port is not None or bool(peers))
            if has_lease and lease.is_connected(port, peers):
                lease.traffic()
        if not is_locked(folder / LOG_LOCK):
            _spawn(folder, "pump")
        if order.get("front") and not is_locked(folder / FRONT_LOCK):
            _spawn(folder, "front")
        due = next_script(folder, order)
        if due is not None and not is_watched(folder, due):
            _spawn(folder, "script", due)
        time.sleep(_LOOK_EVERY_S)


def connected_port(order: dict[str, Any]) -> int | None:
    """Return the port whose connections count as traffic; None where TLS in front of it sees more, or nothing is served."""
    is_head = order["env"].get("SKYPILOT_NODE_RANK", "0") == "0"
    if order.get("front") or not is_head or order.get("role") == "load_balancer":
        return None
    value = order["env"].get("SKYSERVE_REPLICA_PORT", "")
    return int(value) if value.isdigit() else None


def next_script(folder: Path, order: dict[str, Any]) -> str | None:
    """Return the one that is to be started now."""
    if order["setup"] and exit_code(folder, "setup") is None:
        return None if was_started(folder, "setup") else "setup"
    if exit_code(folder, "setup") in (None, 0) and (order["num_nodes"] == 1 or (folder / "go").exists()):
        return None if was_started(folder, "run") else "run"
    return None


def start(folder: Path) -> None:
    """Start the daemon, unless it runs, so that it outlives the login."""
    order = read_json(folder / "order.json")
    if order is None or is_locked(folder / LOCK) or (folder / "stop").exists() or is_released(order):
        return
    if _SYSTEMD.is_dir():
        # Or logind removes the user's shared memory when the last login ends: the secrets, and what engines share.
        as_root("loginctl", "enable-linger", getpass.getuser())
        if _start_unit(folder, order["token"]):
            return
    _spawn(folder, "daemon")


def _start_unit(folder: Path, token: str) -> bool:
    """As a unit of its own: out of the control group of the login, and started again if it fails."""
    unit = container_name(token)
    settings = ["--unit", unit, "--collect", f"--uid={os.getuid()}"]
    settings += ["--property=Restart=on-failure", "--property=KillMode=process"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "USER", "LANG") if name in os.environ}
    settings += [f"--setenv={name}={value}" for name, value in {**kept, MARK: token}.items()]
    as_root("systemctl", "reset-failed", unit)
    return as_root("systemd-run", *settings, *command(folder, "daemon"))


def kill_unit(token: str) -> None:
    """All that is left in the control group of the unit."""
    if _SYSTEMD.is_dir():
        as_root("systemctl", "kill", "--signal=KILL", container_name(token))


def as_root(*words: str) -> bool:
    """Run a command as root, if we may; whether it was a success."""
    sudo = [] if os.getuid() == 0 else ["sudo", "-n"]
    quiet = subprocess.DEVNULL
    try:
        return (
            subprocess.run([*sudo, *words], check=False, stdin=quiet, stdout=quiet, stderr=quiet).returncode
            == 0
        )
    except OSError:
        return False


def command(folder: Path, verb: str, *words: str) -> list[str]:
    return [sys.executable or "python3", str(Path(sys.argv[0]).resolve()), verb, str(folder), *words]


def _spawn(folder: Path, verb: str, *words: str) -> None:
    order = read_json(folder / "order.json")
    with (folder / "agent.err").open("ab") as errors:
        subprocess.Popen(
            command(folder, verb, *words),
            env={**os.environ, MARK: order["token"]},
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
