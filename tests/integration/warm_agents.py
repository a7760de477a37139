"""Load balancer agents as processes: forks of one process (see `tests.kit.forks`), or an interpreter for each."""

from __future__ import annotations

import asyncio
import os
import signal as signals
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tests.kit.forks import ForkServer

_warm: dict[str, ForkServer] = {}  # by PYTHONPATH


class AgentProcess(Protocol):
    """What tests use of a process."""

    pid: int
    stdout: asyncio.StreamReader | None

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, signal: int) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


async def start_agent(
    arguments: Sequence[str], environment: Mapping[str, str], stderr: int, cwd: Path
) -> AgentProcess:
    """Start `python -m lb` with `arguments`; its standard output is a pipe."""
    server = _warm.setdefault(environment.get("PYTHONPATH", ""), ForkServer("lb", environment))
    if not server.fits(environment):
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lb", *arguments),
            stdout=asyncio.subprocess.PIPE, stderr=stderr, env=environment, cwd=cwd,
        )  # fmt: skip
    output, out = os.pipe()
    try:
        result = server.start(arguments, environment, cwd, out, stderr)
    finally:
        os.close(out)
    exits = await _reader(result)
    pid = int(await asyncio.wait_for(exits.readuntil(b" "), 20))
    return _Fork(pid, await _reader(output), exits)


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    return reader


class _Fork:
    """A process whose parent is not this one: the fork server reports its end."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader, exits: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout: asyncio.StreamReader | None = stdout
        self._ended: asyncio.Task[int] = asyncio.create_task(_code(exits))

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, signal: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal)

    def terminate(self) -> None:
        self.send_signal(signals.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signals.SIGKILL)


async def _code(exits: asyncio.StreamReader) -> int:
    return int(await exits.read())
