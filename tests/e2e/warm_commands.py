"""Commands of `serve` in forks of one process; see `tests.kit.forks`. What depends on the start of an interpreter is tested with
`Serve.command`.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.kit.forks import ForkServer


class WarmCommands:
    """Runs commands one after another."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._server = ForkServer("serve", environment)

    def fits(self, environment: Mapping[str, str]) -> bool:
        return self._server.fits(environment)

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Raise TimeoutExpired, after which the command is gone."""
        outs, errs = os.pipe(), os.pipe()
        pipes = [outs[0], errs[0]]
        try:
            try:
                pipes.append(self._server.start(arguments, environment, cwd, outs[1], errs[1]))
            finally:
                os.close(outs[1])
                os.close(errs[1])
            out, err, result = _read_all(pipes, time.monotonic() + timeout_s)
        finally:
            for pipe in pipes:
                os.close(pipe)
        pid, _, code = result.decode().partition(" ")
        if not code:
            if pid:
                os.kill(int(pid), signal.SIGKILL)
            raise subprocess.TimeoutExpired(["serve", *arguments], timeout_s, out, err)
        return subprocess.CompletedProcess([*arguments], int(code), out.decode(), err.decode())


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
