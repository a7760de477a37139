"""Shell commands that the controller runs for events and notifications, each with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from provisioners.remote.host_agent.lines import last_text_line
from skyserve_cli.controller.balancers.agent_process import agent_environment

TIMEOUT_S = 30.0
OUTPUT_BYTES = 4096


class CommandRunner:
    """Runs commands as processes; those that run can be killed from another thread."""

    def __init__(self, environ: Mapping[str, str] = os.environ, timeout_s: float = TIMEOUT_S) -> None:
        self._base = agent_environment(environ)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def execute(self, shell_command: str, variables: Mapping[str, str]) -> str:
        """Return why the command failed, or "". Nothing that it started in its process group is left."""
        # `timeout` stops it also if this process exits before it.
        command = ["timeout", "--signal=KILL", f"{self._timeout_s:g}", "bash", "-c", shell_command]
        with tempfile.TemporaryFile() as output:
            try:
                process = self._started(command, variables, output)
            except (OSError, ValueError) as error:
                return str(error)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its id stays taken until `wait`
            with self._lock:
                self._processes.discard(process)
                _kill(process)
                code = process.wait()
            if code == 0:
                return ""
            end = output.seek(0, os.SEEK_END)
            output.seek(max(0, end - OUTPUT_BYTES))
            said = last_text_line(output.read())
        ended = (
            f"killed (it has {self._timeout_s:g} s)"
            if code in (137, -signal.SIGKILL)
            else f"exit code {code}"
        )
        return ended + (f": {said}" if said else "")

    def _started(
        self, command: Sequence[str], variables: Mapping[str, str], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        home = self._base.get("HOME", "/")
        with self._lock:
            if self._is_closed:
                raise OSError("the controller stops")
            process = subprocess.Popen(
                command,
                env={**self._base, **variables},
                cwd=home if Path(home).is_dir() else "/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._processes.add(process)
        return process

    def kill(self) -> None:
        """End those that run, and start no more."""
        with self._lock:
            self._is_closed = True
            for process in self._processes:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
