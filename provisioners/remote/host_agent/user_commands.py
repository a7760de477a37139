"""Commands of the user where a replica runs, in its work directory and with its environment.

Secrets are part of the environment only until `run` has read them: the file they were in is removed then.

A command belongs to the session that started it: when standard input is closed, because the user has pressed Ctrl-C or the
connection is lost, so does the command. It carries the replica's mark, so it ends with the replica as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from provisioners.remote.host_agent.scripts import container_name, environment, exec_command

GRACE_S = 3.0  # between SIGTERM and SIGKILL
COMMAND_MARK = (
    "SKYSERVE_COMMAND"  # in a container, where our signals do not reach, its processes are found by it
)
_END_MARKED = """
for folder in /proc/[0-9]*; do
  if tr '\\0' '\\n' <"$folder/environ" 2>/dev/null | grep -qx "$1"; then kill -"$0" "${folder#/proc/}"; fi
done
"""


def execute(folder: Path, script: str) -> int:
    """Run a script; returns its exit code, 128 and the signal if one killed it."""
    order = json.loads((folder / "order.json").read_text())
    env, given = environment(order)
    work = str(folder / "work")
    if not order["image"]:
        child = _start([_shell(), "-c", script], work, env)
        return _supervise(child, lambda number: os.killpg(child.pid, number))
    mark, container = f"{order['token']}.{os.getpid()}", container_name(order["token"])
    command = exec_command(container, work, [*given, COMMAND_MARK], script)
    child = _start(command, work, {**env, COMMAND_MARK: mark})

    def end(number: int) -> None:
        shell = ["/bin/sh", "-c", _END_MARKED, str(int(number)), f"{COMMAND_MARK}={mark}"]
        subprocess.run(["docker", "exec", container, *shell], check=False, stdin=subprocess.DEVNULL)

    return _supervise(child, end)


def interact(folder: Path) -> None:
    """Become a shell for the terminal of this session."""
    order = json.loads((folder / "order.json").read_text())
    env, given = environment(order)
    work = str(folder / "work")
    command = [_shell()]
    if order["image"]:
        best = "exec $(command -v bash || echo sh)"
        command = exec_command(container_name(order["token"]), work, [*given, "TERM"], best)
        command[2:2] = ["--interactive", "--tty"]
    os.chdir(work)
    os.execvpe(command[0], command, env)  # noqa: S606 (it is what was requested)


def _shell() -> str:
    return "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"


def _start(command: list[str], work: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, cwd=work, env=env, stdin=subprocess.DEVNULL, start_new_session=True)


def _supervise(child: subprocess.Popen[bytes], end: Callable[[int], None]) -> int:
    """Wait for the child. `end` sends all of it a signal: it is called once standard input is closed."""

    def end_with_stdin() -> None:
        while os.read(0, 4096):
            pass
        for number in (signal.SIGTERM, signal.SIGKILL):
            if ended.wait(GRACE_S if number == signal.SIGKILL else 0):
                return
            with suppress(ProcessLookupError):  # it has just exited
                end(number)

    ended = threading.Event()
    threading.Thread(target=end_with_stdin, daemon=True).start()
    code = child.wait()
    ended.set()
    return code if code >= 0 else 128 - code
