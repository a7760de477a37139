"""Commands of `serve` in forks of a process that has imported them: half of the time of a short command is its imports.

Each command is a process of its own, with its own arguments, environment, folder and streams, as one that the shell starts;
only the interpreter and the modules are there before it begins. What depends on the start of an interpreter is tested with
`Serve.command`.
"""

from __future__ import annotations

import array
import atexit
import gc
import importlib
import json
import os
import pkgutil
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_MESSAGE_BYTES = 1 << 17
#: What modules read while they are imported.
_READ_BY_IMPORTS = ("PYTHON", "LANG", "LC_", "TERM", "COLUMNS", "NO_COLOR", "FORCE_COLOR")


class WarmCommands:
    """The client. One process per set of tests, started with the first command; it ends when its client does."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        kept = {k: v for k, v in environment.items() if not k.startswith("SKYSERVE_")}
        self._environment = {**kept, "OPENBLAS_NUM_THREADS": "1"}  # a process with threads cannot be forked
        self._ours: socket.socket | None = None

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Return whether a command with that environment would import what is imported here."""
        names = {*self._environment, *environment}
        return all(
            self._environment.get(name) == environment.get(name)
            for name in names
            if name.startswith(_READ_BY_IMPORTS)
        )

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Raise TimeoutExpired, after which the command is gone."""
        order = {"arguments": list(arguments), "environment": dict(environment), "cwd": str(cwd)}
        outs, errs, results = os.pipe(), os.pipe(), os.pipe()
        try:
            fds = array.array("i", [outs[1], errs[1], results[1]])
            self._server().sendmsg(
                [json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
            )
        finally:
            for pipe in (outs, errs, results):
                os.close(pipe[1])
        try:
            out, err, result = _read_all((outs[0], errs[0], results[0]), time.monotonic() + timeout_s)
        finally:
            for pipe in (outs, errs, results):
                os.close(pipe[0])
        pid, _, code = result.decode().partition(" ")
        if not code:
            if pid:
                os.kill(int(pid), signal.SIGKILL)
            raise subprocess.TimeoutExpired(["serve", *arguments], timeout_s, out, err)
        return subprocess.CompletedProcess([*arguments], int(code), out.decode(), err.decode())

    def _server(self) -> socket.socket:
        if self._ours is None:
            self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (self._ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=self._environment,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
        return self._ours


def _read_all(pipes: Sequence[int], until: float) -> list[bytes]:
    """Return what came from each pipe before all of them were closed, or until that time of the monotonic clock."""
    content = {pipe: bytearray() for pipe in pipes}
    with selectors.DefaultSelector() as ready:
        for pipe in pipes:
            ready.register(pipe, selectors.EVENT_READ)
        while ready.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in ready.select(left):
                chunk = os.read(key.fd, 1 << 16)
                content[key.fd] += chunk
                if not chunk:
                    ready.unregister(key.fd)
    return [bytes(content[pipe]) for pipe in pipes]


def serve(orders: socket.socket) -> int | None:
    """Fork a command for each order. Returns its exit code in the fork; None here, when the client is gone."""
    running: dict[int, tuple[int, int]] = {}  # by pidfd: the pid, and where its exit code goes
    with selectors.DefaultSelector() as ready:
        ready.register(orders, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fd != orders.fileno():
                    ready.unregister(key.fd)
                    _report(key.fd, *running.pop(key.fd))
                    continue
                message, (out, err, result) = _received(orders)
                if not message:
                    return None
                pid = os.fork()
                if pid == 0:
                    ready.close()
                    orders.detach()  # or these would close descriptors of the command at some time
                    return _command(json.loads(message), out, err)
                os.write(result, f"{pid} ".encode())
                os.close(out)
                os.close(err)
                watch = os.pidfd_open(pid)
                running[watch] = (pid, result)
                ready.register(watch, selectors.EVENT_READ)


def _received(orders: socket.socket) -> tuple[bytes, tuple[int, int, int]]:
    message, ancillary, _, _ = orders.recvmsg(_MESSAGE_BYTES, socket.CMSG_LEN(3 * array.array("i").itemsize))
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data)
    return message, (fds[0], fds[1], fds[2]) if fds else (-1, -1, -1)


def _report(watch: int, pid: int, result: int) -> None:
    os.close(watch)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):
        os.write(result, str(code).encode())
    os.close(result)


def _command(order: dict[str, Any], out: int, err: int) -> int:
    """Become the command."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, 1 << 16)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[0] = order["cwd"]
    sys.argv = ["serve", *order["arguments"]]
    random.seed()
    gc.enable()
    from skyserve_cli.app import run

    return run(order["arguments"])


def main() -> None:
    """Serve the client at the descriptor that is the argument."""
    import skyserve_cli.commands

    for module in pkgutil.iter_modules(skyserve_cli.commands.__path__):
        importlib.import_module(f"skyserve_cli.commands.{module.name}")
    gc.collect()
    gc.freeze()
    code = serve(socket.socket(fileno=int(sys.argv[1])))
    if code is not None:
        _exit(code)


def _exit(code: int) -> None:
    """As an interpreter ends, without taking the modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
