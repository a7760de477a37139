"""A step of bringing a machine up: a program that runs once."""

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
