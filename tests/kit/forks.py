"""Programs in forks of a process that has imported their modules: half of the time of a short run is its imports.

Each run is a process of its own, with its own arguments, environment, folder and streams, as one that the shell starts; only
the interpreter and the modules are there before it starts. Tests of what depends on the start of an interpreter start one.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

#: In the environment: start an interpreter for each program, as a shell does.
COLD = "SKYSERVE_TEST_COLD"
PROGRAMS = ("serve", "lb")
_MESSAGE_BYTES = 1 << 17
#: Room where `/proc` reads words and environment of the process, in which a fork shows its own.
_WORDS_BYTES, _ENVIRONMENT_BYTES = 1 << 10, 1 << 15
#: What modules read while they are imported.
_READ_BY_IMPORTS = ("PYTHON", "LANG", "LC_", "TERM", "COLUMNS", "NO_COLOR", "FORCE_COLOR")


class ForkServer:
    """Starts a program again and again. Its process starts with the first run, and ends when this one does."""

    def __init__(self, program: str, environment: Mapping[str, str]) -> None:
        kept = {k: v for k, v in environment.items() if not k.startswith("SKYSERVE_")}
        self._program = program
        self._environment = {**kept, "OPENBLAS_NUM_THREADS": "1"}  # a process with threads cannot be forked
        self._ours: socket.socket | None = None

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Return whether a program with that environment would import what is imported here."""
        names = {*self._environment, *environment}
        return COLD not in environment and all(
            self._environment.get(name) == environment.get(name)
            for name in names
            if name.startswith(_READ_BY_IMPORTS)
        )

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, out: int, err: int
    ) -> int:
        """Start the program with these descriptors as its output and errors, which the caller still has to close.

        Returns a descriptor that gives the pid and a space at once, the exit code when the program has ended, and then ends.
        """
        order = {"arguments": list(arguments), "environment": dict(environment), "cwd": str(cwd)}
        result, theirs = os.pipe()
        try:
            fds = array.array("i", [out, err, theirs])
            self._server().sendmsg(
                [json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
            )
        except BaseException:
            os.close(result)
            raise
        finally:
            os.close(theirs)
        return result

    def _server(self) -> socket.socket:
        if self._ours is None:
            self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (self._ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
            subprocess.Popen(
                [sys.executable, __file__, self._program, str(theirs.fileno()), "x" * _WORDS_BYTES],
                env={**self._environment, "SKYSERVE_TEST_ROOM": "x" * _ENVIRONMENT_BYTES},
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
        return self._ours


def serve(orders: socket.socket, program: str) -> int | None:
    """Fork a program for each order. Returns its exit code in the fork; None here, when the client is gone."""
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
                    orders.detach()  # or these would close descriptors of the program at some time
                    return _become(program, json.loads(message), out, err)
                with suppress(BrokenPipeError):  # the client may have given up: the next one need not
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


def _become(program: str, order: dict[str, Any], out: int, err: int) -> int:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, 1 << 16)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[0] = order["cwd"]
    sys.argv = [program, *order["arguments"]]
    random.seed()
    gc.enable()
    return _run(program, order["arguments"])


def _import(program: str) -> None:
    package = importlib.import_module("lb" if program == "lb" else "skyserve_cli.commands")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    if program == "serve":
        importlib.import_module("tests.kit.forked_controllers")


def _run(program: str, arguments: list[str]) -> int:
    if program == "lb":
        from lb.__main__ import main

        return main(arguments)
    from skyserve_cli.app import run
    from tests.kit import forked_controllers

    forked_controllers.install()
    return run(arguments)


def _exit(code: int) -> None:
    """As an interpreter ends, without taking the modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Serve the client at the descriptor that is the second argument with the program that is the first one."""
    program, descriptor, _ = sys.argv[1:]
    sys.path[0] = str(Path(__file__).parents[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, meant for pytest
    _import(program)
    gc.collect()
    gc.freeze()
    try:
        code = serve(socket.socket(fileno=int(descriptor)), program)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    if code is not None:
        _exit(code)


if __name__ == "__main__":
    main()
