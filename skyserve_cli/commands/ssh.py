"""`serve ssh`: a shell where a replica runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import termios
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import typer

from skyserve_cli.commands.options import ServiceName, controller
from skyserve_cli.commands.reach import Node, ReplicaId, chosen, local_place
from skyserve_cli.commands.sessions import relay
from skyserve_cli.controller.api.client import ControllerClient


def ssh(name: ServiceName, replica: ReplicaId = None, node: Node = 0) -> None:
    """Open a shell where a replica runs.

    It starts in the replica's work directory with its environment; on machines that is without the secrets. The
    controller logs in there and relays the session. On the local cloud it is your $SHELL.

    \b
    serve ssh chat
    serve ssh chat --replica 3
    """
    client = controller()
    replica_id = chosen(client, name, replica)
    place = local_place(client, name, replica_id, node)
    if place is not None:
        shell = os.environ.get("SHELL") or "/bin/sh"
        raise typer.Exit(_wait_for(place.command([shell]), cwd=place.work, env=place.env))
    raise typer.Exit(_on_machine(client, name, replica_id, node))


def _on_machine(client: ControllerClient, name: str, replica_id: int, node: int) -> int:
    """Return the exit code of the shell. It has a terminal if this command has one."""
    link = client.session(name, replica_id, node=node)

    def write(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def size() -> tuple[int, int]:
        with suppress(OSError):
            columns, rows = os.get_terminal_size(0)
            return columns or 80, rows or 24
        return 80, 24

    term = os.environ.get("TERM", "xterm") if os.isatty(0) else None
    with _raw_terminal():
        return relay(link, None, out=write, err=_write_error, stdin=0, term=term, size=size)


def _write_error(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Have the terminal of this command, if it has one, pass every key on: Ctrl-C is for the program on the machine."""
    if not os.isatty(0):
        yield
        return
    before = termios.tcgetattr(0)
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    try:
        tty.setraw(0, termios.TCSADRAIN)  # keys that were pressed before are not lost
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _wait_for(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> int:
    """Return the exit code of a program that has the terminal: Ctrl-C is its own business, and does not end us before it."""
    process = subprocess.Popen(command, cwd=cwd, env=None if env is None else dict(env))
    try:
        while True:
            with suppress(KeyboardInterrupt):
                code = process.wait()
                return code if code >= 0 else 128 - code
    finally:
        if process.poll() is None:  # we are being terminated
            process.terminate()


def _leave(number: int, _frame: FrameType | None) -> None:
    """End by way of the clean-up."""
    sys.exit(128 + number)
