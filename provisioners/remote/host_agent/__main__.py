"""The commands of the host agent, which the controller runs over SSH. DIR is the folder of one machine.

status DIR [--renew]      one line of JSON: what runs, what the cloud has announced, how long the log is; --renew
                          renews the lease of the dead-man switch
follow DIR HEARTBEAT_S    the same line whenever it changes and at every heartbeat, until standard input is closed; a byte on
                          standard input renews, see `follow`
start DIR                 start the daemon for DIR/order.json, unless it runs
go DIR                    `setup` is done on all nodes of the replica: `run` may start
stop DIR [GRACE_S]        terminate all processes of the replica, and wait until they have ended
log DIR OFFSET MAX        a part of what `setup` and `run` printed
log-times DIR AFTER OFFSET MAX   when it was printed (`log_times`)
step DIR NAME PROGRAM…    run a step of the machine's setup, unless it has succeeded before
exec DIR SCRIPT           run it where the replica runs, until standard input is closed; see `visit`
shell DIR                 the same as a shell for a terminal
claim|claims|release      the claims on a host that is shared, see `claims`
daemon|pump|front|script  processes that the host agent starts itself

A verb imports what it needs and no more: modules are compiled at each start, as an archive keeps no bytecode, and some verbs
run every few seconds on a machine of one core.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from provisioners.files import write_text
from provisioners.remote.host_agent.files import lock
from provisioners.remote.host_agent.log import append_log

_TAKE_OVER_S = 10.0


def step(folder: Path, name: str, program: list[str]) -> int:
    """Run a step of the setup, unless it has succeeded before. Returns the program's exit code; 75: another step is running.

    Of two at a time the later one goes on: it kills the earlier, which a controller that has died left behind.
    """
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
    if verb in _OBSERVE:
        _observe(verb, folder, rest)
    elif verb == "start":
        from provisioners.remote.host_agent import daemon

        daemon.start(folder)
    elif verb == "go":
        (folder / "go").touch()
    elif verb == "stop":
        from provisioners.remote.host_agent.process_kill import stop

        return 0 if stop(folder, float(rest[0]) if rest else 10.0) else 1
    elif verb == "step":
        return step(folder, rest[0], rest[1:])
    elif verb in _ATTEND:
        return _attend(verb, folder, rest)
    elif verb in _STAY:
        _stay(verb, folder, rest)
    else:
        from provisioners.remote.host_agent import claims

        return claims.main(verb, folder, rest)
    return 0


_OBSERVE = frozenset(("status", "follow", "log", "log-times"))
_ATTEND = frozenset(("exec", "shell"))
_STAY = frozenset(("daemon", "pump", "front", "script"))


def _observe(verb: str, folder: Path, rest: list[str]) -> None:
    """Print what a controller reads."""
    if verb == "status":
        import json

        from provisioners.remote.host_agent import lease
        from provisioners.remote.host_agent.status import status

        if "--renew" in rest:
            lease.visit()
        print(json.dumps(status(folder)))
    elif verb == "follow":
        from provisioners.remote.host_agent import lease
        from provisioners.remote.host_agent.follow import follow

        follow(folder, float(rest[0]), lease.visit)
    elif verb == "log":
        from provisioners.remote.host_agent.log import read_log

        sys.stdout.buffer.write(read_log(folder, int(rest[0]), int(rest[1])))
    else:
        from provisioners.remote.host_agent.log_times import read_times

        sys.stdout.buffer.write(read_times(folder, float(rest[0]), int(rest[1]), int(rest[2])))


def _attend(verb: str, folder: Path, rest: list[str]) -> int:
    """Run a program of a user who waits for it."""
    from provisioners.remote.host_agent.user_commands import execute, interact

    if verb == "exec":
        return execute(folder, rest[0])
    interact(folder)
    return 0


def _stay(verb: str, folder: Path, rest: list[str]) -> None:
    """Run one of the machine's own processes, which outlive the login."""
    if verb == "daemon":
        from provisioners.remote.host_agent import daemon

        daemon.live(folder)
    elif verb == "pump":
        from provisioners.remote.host_agent.log import pump

        pump(folder)
    elif verb == "front":
        from provisioners.remote.host_agent import tls_proxy

        tls_proxy.serve(folder)
    else:
        from provisioners.remote.host_agent.scripts import watch_script

        watch_script(folder, rest[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
