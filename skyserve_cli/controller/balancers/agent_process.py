"""One load balancer agent as a process: its folder, its start, its life and its end.

The folder holds what a later controller needs to take the agent back: `agent.json` (what the agent printed once
it listened: ports and pid), `shape.json` (what it was started with), `token`, `table.json` (the table it
begins with; it writes each later one itself), `table.json.limits` (what is left of the keys' limits), `table.json.usage` (what the
keys have used, by day), `agent.log`, and `agent.lock`, which the agent holds for as long as it lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lb.config.options import Listen
from lb.config.schema import Table
from lb.config.workers import workers_argument
from skyserve_cli.controller.reconcile.ports import AgentOrder
from skyserve_cli.home import is_held

Shape = tuple[object, ...]

_PASSED_ON = frozenset(
    {
        "HOME",
        "LANG",
        "LANGUAGE",
        "PATH",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
    }
)
_PREFIXES = ("LC_", "LD_", "OTEL_", "PYTHON")


@dataclass(slots=True)
class LocalAgent:
    """A running agent. `process` is None for one that an earlier controller started."""

    pid: int
    admin_url: str
    token: str
    shape: Shape
    process: subprocess.Popen[bytes] | None

    def alive(self) -> bool:
        """Polls the pidfd: a dead process whose parent has not reaped it still has a pid that takes signals."""
        if self.process is not None:
            return self.process.poll() is None
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            watch = select.poll()
            watch.register(fd, select.POLLIN)
            return not watch.poll(0)
        finally:
            os.close(fd)

    def send(self, sign: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, sign)

    @property
    def authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


class AgentFolder:
    """`path` belongs to the agent of one service."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token_file = path / "token"
        self.usage = path / "table.json.usage"

    def start(self, order: AgentOrder) -> subprocess.Popen[bytes]:
        """Start an agent.

        It inherits the lock, so a controller that was killed while it started one cannot be followed by one that starts a
        second: BlockingIOError if an agent runs.
        """
        self.path.mkdir(exist_ok=True, mode=0o700)
        lock = os.open(self.path / "agent.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / "shape.json").write_text(json.dumps(shape_of(order)))
            _write_secret(self._token_file, secrets.token_urlsafe(32))
            # It begins with the table of its order: one that had to wait for the first push would know no API key
            # until then, and accept every client.
            _write_secret(self.path / "table.json", json.dumps(table_for(order).to_json()))
            command = agent_command(order, self._token_file, self.path / "table.json")
            with (
                (self.path / "agent.json").open("wb") as out,
                (self.path / "agent.log").open("ab") as err,
            ):
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    env=agent_environment(os.environ),
                    pass_fds=(lock,),
                )
        finally:
            os.close(lock)

    def started(self, process: subprocess.Popen[bytes], order: AgentOrder) -> LocalAgent | None:
        """The agent `process` has become, or None until it listens. OSError if it has exited instead."""
        running = self._running()
        if running is not None:
            return self._agent(running, shape_of(order), process)
        if process.poll() is not None:
            raise OSError(f"the agent exited with {process.returncode}: {self._log_tail()}")
        return None

    def left(self) -> LocalAgent | None:
        """Return the agent that an earlier controller left, if it runs."""
        try:
            running = self._running()
            if running is None:
                return None
            shape = tuple(json.loads((self.path / "shape.json").read_text()))
            found = self._agent(running, shape, None)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if found.alive() and self._is_ours(found.pid) else None

    def is_held(self) -> bool:
        """Return whether some agent holds the lock: one that listens, or one that is starting."""
        return is_held(self.path / "agent.lock")

    def clear(self) -> None:
        """The agent is gone for good; its log stays."""
        usage = [f"{self.usage.name}{part}" for part in ("", "-wal", "-shm")]
        for name in (
            "agent.json",
            "table.json",
            "table.json.limits",
            "token",
            "shape.json",
            "agent.lock",
            *usage,
        ):
            (self.path / name).unlink(missing_ok=True)

    def _agent(
        self, running: dict[str, int], shape: Shape, process: subprocess.Popen[bytes] | None
    ) -> LocalAgent:
        url = f"http://127.0.0.1:{running['admin_port']}"
        return LocalAgent(int(running["pid"]), url, self._token_file.read_text(), shape, process)

    def _running(self) -> dict[str, int] | None:
        """Return what the agent prints once it listens: one line of JSON."""
        text = (self.path / "agent.json").read_text()
        if not text.endswith("\n"):
            return None
        running: dict[str, int] = json.loads(text)
        return running

    def _is_ours(self, pid: int) -> bool:
        """The pid may have been given to a stranger; but a stranger was not started with our token file."""
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return os.fsencode(self._token_file) in words

    def _log_tail(self) -> str:
        lines = (self.path / "agent.log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no output"


def agent_command(order: AgentOrder, token_file: Path, table_file: Path) -> list[str]:
    """Return how an agent is started. Nothing in it is a secret."""
    command = [sys.executable, "-m", "lb", "--service", order.service, "--host", order.host]
    command += ["--port", str(order.port), "--admin-host", "127.0.0.1", "--admin-port", "0"]
    command += ["--admin-token-file", str(token_file), "--table-file", str(table_file)]
    command += ["--policy", order.table.policy]
    command += workers_argument(order.workers)
    if order.tls is not None:
        command += ["--tls-certfile", order.tls[0], "--tls-keyfile", order.tls[1]]
    return command


def agent_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what an agent needs of our environment.

    It faces the Internet, so it is not given the keys of clouds and databases.
    """
    return {
        name: value for name, value in environ.items() if name in _PASSED_ON or name.startswith(_PREFIXES)
    }


def shape_of(order: AgentOrder) -> Shape:
    """Return what can only be changed by starting the agent again."""
    return (*(order.tls or ()), *workers_argument(order.workers))


def table_for(order: AgentOrder) -> Table:
    """Return the table with the address on which the agent listens: another one is opened before this one is closed."""
    return replace(order.table, listen=Listen(order.host, order.port))


def _write_secret(path: Path, content: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
