"""Commands of the user where a replica runs, in its work directory and with its environment.

Secrets are part of the environment only until `run` has read them: the file they were in is removed then.

A command belongs to the session that started it: when our standard input is closed, because the user has pressed Ctrl-C or the
connection is lost, the command is terminated. What the command is to read is therefore in frames: four bytes with a length, then so
many bytes; a length of 0 is the end of its input, and the session goes on. It carries the replica's mark, so it ends with the replica
as well.
"""

from __future__ import annotations

import json
import os
import select
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
    command[2:2] = ["--interactive"]
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
        command[2:2] = ["--interactive", *(["--tty"] if os.isatty(0) else [])]
    os.chdir(work)
    os.execvpe(command[0], command, env)  # noqa: S606 (it is what was requested)


def _shell() -> str:
    return "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"


def _start(command: list[str], work: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, bufsize=0, cwd=work, env=env, stdin=subprocess.PIPE, start_new_session=True
    )


def _supervise(child: subprocess.Popen[bytes], end: Callable[[int], None]) -> int:
    """Wait for the child. `end` sends all of it a signal: it is called once standard input is closed."""

    def end_with_session() -> None:
        _await_hang_up()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if ended.wait(GRACE_S if number == signal.SIGKILL else 0):
                return
            with suppress(ProcessLookupError):  # it has just exited
                end(number)

    ended = threading.Event()
    for thread in (end_with_session, lambda: _feed(child)):
        threading.Thread(target=thread, daemon=True).start()
    code = child.wait()
    ended.set()
    return code if code >= 0 else 128 - code


def _await_hang_up() -> None:
    """Wait until the other side of standard input is closed, whether or not all of it was read."""
    poll = select.poll()
    poll.register(0, select.POLLRDHUP)
    poll.poll()


def _feed(child: subprocess.Popen[bytes]) -> None:
    """Give the child what comes in frames, until the empty one."""
    assert child.stdin is not None  # noqa: S101 (it was started so)
    with suppress(OSError), child.stdin as pipe:
        while size := int.from_bytes(_read(4), "big"):
            data = _read(size)
            while data:
                data = data[os.write(pipe.fileno(), data) :]


def _read(size: int) -> bytes:
    """Return so many bytes of standard input; fewer at its end."""
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            break
        data += more
    return data
