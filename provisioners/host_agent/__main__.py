"""What the controller asks over SSH. DIR is the folder of one machine.

status DIR [--renew]      one line of JSON: what runs, what the cloud has announced, how long the log is; --renew
                          tells the dead-man switch that somebody pays attention
start DIR                 take up DIR/order.json, or go on with it
go DIR                    `setup` is done on all nodes of the replica: `run` may start
stop DIR [GRACE_S]        end all that runs; returns when it has ended
log DIR OFFSET MAX        a part of what `setup` and `run` printed
step DIR NAME PROGRAM…    a step of bringing the machine up, once: a second time nothing happens
claim|claims|release      the claims on a host that is shared, see `claims`
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from provisioners.host_agent import claims, daemon
from provisioners.host_agent.ending import stop
from provisioners.host_agent.files import is_locked, lock, read_json, write_text
from provisioners.host_agent.log import append_log, log_window, pump, read_log
from provisioners.host_agent.scripts import (
    claimed_port,
    exit_code,
    obituary,
    was_lost,
    was_started,
    watch_script,
)

_LEASE = Path("/var/lib/skyserve/lease")  # what the dead-man switch of the user data looks at
_TAKE_OVER_S = 10.0


def status(folder: Path) -> dict[str, Any]:
    order = read_json(folder / "order.json")
    first, end = log_window(folder)
    notice = read_json(folder / "notice.json") or {}
    state, script = state_of(folder, order)
    return {
        "state": state,
        "message": obituary(folder, script) if script else "",
        "exit_code": exit_code(folder, script) if script else None,
        "prepared": order is not None and exit_code(folder, "setup") == (0 if order["setup"] else None),
        "alive": is_locked(folder / daemon.LOCK),
        "preempt_at": notice.get("preempt_at"),
        "rebalance_at": notice.get("rebalance_at"),
        "log": [first, end],
        "port": claimed_port(order),
    }


def state_of(folder: Path, order: dict[str, Any] | None) -> tuple[str, str]:
    """What the machine is at, and the script that has ended if that is what it is."""
    if order is None:
        return "pending", ""
    if order["setup"] and exit_code(folder, "setup") != 0:
        ended = exit_code(folder, "setup") is not None or was_lost(folder, "setup")
        return ("setup_failed", "setup") if ended else ("setup", "")
    if not was_started(folder, "run"):
        return "setup", ""
    ended = exit_code(folder, "run") is not None or was_lost(folder, "run")
    return ("run_exited", "run") if ended else ("running", "")


def renew_lease() -> None:
    with suppress(OSError):  # a machine without a dead-man switch
        _LEASE.touch()


def step(folder: Path, name: str, program: list[str]) -> int:
    """Of two at a time the later one goes on: it ends the earlier, left behind by a controller that has died."""
    holder = folder / "step.pid"
    held = lock(folder / "step.lock", 0.5)
    if held is None:
        with suppress(OSError, ValueError):
            os.killpg(
                int(holder.read_text()), signal.SIGKILL
            )  # it holds the lock, so it is alive and the one
        held = lock(folder / "step.lock", _TAKE_OVER_S)
    if held is None:
        print("another step is under way and does not end", file=sys.stderr)
        return 75
    done = folder / f"done.{name}"
    if done.exists():
        return 0
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    write_text(holder, str(os.getpid()))
    with subprocess.Popen(
        program, cwd=str(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for chunk in iter(lambda: os.read(process.stdout.fileno(), 65536), b""):  # type: ignore[union-attr]
            append_log(folder, chunk)
            sys.stdout.buffer.write(chunk)
    code = process.returncode
    if code == 0:
        write_text(done, "")
    return code if code >= 0 else 128 - code


def main(words: list[str]) -> int:
    verb, folder, rest = words[0], Path(words[1]).resolve(), words[2:]
    if verb == "status":
        if "--renew" in rest:
            renew_lease()
        print(json.dumps(status(folder)))
    elif verb == "log":
        sys.stdout.buffer.write(read_log(folder, int(rest[0]), int(rest[1])))
    elif verb == "start":
        daemon.start(folder)
    elif verb == "go":
        (folder / "go").touch()
    elif verb == "stop":
        return 0 if stop(folder, float(rest[0]) if rest else 10.0) else 1
    elif verb == "step":
        return step(folder, rest[0], rest[1:])
    elif verb == "daemon":
        daemon.live(folder)
    elif verb == "pump":
        pump(folder)
    elif verb == "script":
        watch_script(folder, rest[0])
    else:
        return claims.main(verb, folder, rest)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
