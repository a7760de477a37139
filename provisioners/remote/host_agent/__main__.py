"""Commands that the controller runs over SSH. DIR is the folder of one machine.

status DIR [--renew]      one line of JSON: what runs, what the cloud has announced, how long the log is; --renew
                          renews the lease of the dead-man switch
follow DIR HEARTBEAT_S    the same line whenever it changes and at every heartbeat, until standard input is closed; a byte on
                          standard input renews, see `follow`
start DIR                 take up DIR/order.json, or go on with it
go DIR                    `setup` is done on all nodes of the replica: `run` may start
stop DIR [GRACE_S]        end all that runs; returns when it is over
log DIR OFFSET MAX        a part of what `setup` and `run` printed
step DIR NAME PROGRAM…    a step of bringing the machine up, once: a second time nothing happens
exec DIR SCRIPT           run it where the replica runs, until standard input is closed; see `visit`
shell DIR                 the same as a shell for a terminal
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

from provisioners.files import write_text
from provisioners.remote.host_agent import claims, daemon, lease, tls_proxy
from provisioners.remote.host_agent.files import lock
from provisioners.remote.host_agent.follow import follow
from provisioners.remote.host_agent.log import append_log, pump, read_log
from provisioners.remote.host_agent.log_times import read_times
from provisioners.remote.host_agent.process_kill import stop
from provisioners.remote.host_agent.scripts import watch_script
from provisioners.remote.host_agent.status import status
from provisioners.remote.host_agent.user_commands import execute, interact

_TAKE_OVER_S = 10.0


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
            lease.visit()
        print(json.dumps(status(folder)))
    elif verb == "follow":
        follow(folder, float(rest[0]), lease.visit)
    elif verb == "log":
        sys.stdout.buffer.write(read_log(folder, int(rest[0]), int(rest[1])))
    elif verb == "log-times":
        sys.stdout.buffer.write(read_times(folder, float(rest[0]), int(rest[1]), int(rest[2])))
    elif verb == "start":
        daemon.start(folder)
    elif verb == "go":
        (folder / "go").touch()
    elif verb == "stop":
        return 0 if stop(folder, float(rest[0]) if rest else 10.0) else 1
    elif verb == "step":
        return step(folder, rest[0], rest[1:])
    elif verb == "exec":
        return execute(folder, rest[0])
    elif verb == "shell":
        interact(folder)
    elif verb == "daemon":
        daemon.live(folder)
    elif verb == "pump":
        pump(folder)
    elif verb == "front":
        tls_proxy.serve(folder)
    elif verb == "script":
        watch_script(folder, rest[0])
    else:
        return claims.main(verb, folder, rest)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
