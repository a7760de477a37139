"""Controllers in forks of the command that starts them: nine tenths of the time until one responds is its imports.

Supervisor and daemon are processes of their own, with their own session, streams, environment and folder, as `python -m` makes them,
and they are found under the same words and the same environment in `/proc`. Only the interpreter and the modules are there before.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

from skyserve_cli.controller import daemon, supervisor
from skyserve_cli.controller.api import client

MODULES = {module.__name__: module for module in (supervisor, daemon)}
_kept: list[object] = []  # streams, which would close descriptors of the fork


class ForkedProcess:
    """What the callers need of `subprocess.Popen`."""

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.pid = pid
        self.args = command
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        while (code := self._wait(0)) is None:
            pass
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # a signal handler has called `poll` meanwhile
                self.returncode = self.returncode or 0
                return self.returncode
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def install() -> None:
    """From now on this process, and the supervisors that it starts, fork what they would start."""
    shim: Any = SimpleNamespace(**{**vars(subprocess), "Popen": _popen})
    for module in (client, supervisor):
        module.subprocess = shim  # type: ignore[attr-defined]


def _popen(command: Sequence[str], **options: Any) -> Any:
    module = MODULES.get(command[2]) if command[:2] == [sys.executable, "-m"] else None
    if module is None:
        return subprocess.Popen(command, **options)
    pid = os.fork()
    if pid == 0:
        _become(module, command, **options)
    return ForkedProcess(pid, command)


def _become(
    module: ModuleType,
    command: Sequence[str],
    *,
    stdin: int,
    stdout: IO[bytes] | None = None,
    stderr: IO[bytes] | None = None,
    start_new_session: bool = False,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Be what `python -m module` would start, without input. What the process before the fork holds is never released."""
    code = 1
    try:
        gc.disable()
        gc.freeze()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if start_new_session:
            os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, stream in ((1, stdout), (2, stderr)):
            if stream is not None:
                os.dup2(stream.fileno(), descriptor)
        os.closerange(3, 1 << 16)
        _kept.extend((sys.stdin, sys.stdout, sys.stderr))
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        if cwd is not None:
            os.chdir(cwd)
        environment = dict(os.environ if env is None else env)
        os.environ.clear()
        os.environ.update(environment)
        show(command, environment)
        sys.argv, sys.orig_argv = [str(module.__file__)], list(command)
        logging.getLogger().handlers.clear()
        random.seed()
        code = module.main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:  # noqa: BLE001 (as an interpreter does at its top)
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Write words and environment where `/proc` reads those of this process. The C library must not use what was there."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    words_at, words_end, environment_at, environment_end = map(int, fields[45:49])
    for at, end, texts in (
        (words_at, words_end, list(command)),
        (environment_at, environment_end, [f"{name}={value}" for name, value in environment.items()]),
    ):
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)
        ctypes.memmove(at, data[: end - at - 1].ljust(end - at, b"\0"), end - at)
