"""The agent of one machine (`host_agent`), as seen from here: every call is one command over SSH."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from provisioners.port.base import InstanceState
from provisioners.port.commands import CommandError, CommandOutput, Commands, DiskFullError, ShellError
from provisioners.port.lease import Lease
from provisioners.remote.archive import pack
from provisioners.remote.bootstrap_steps import ROOT
from provisioners.remote.host_agent.bundle import agent_bundle
from provisioners.remote.step import Content, Step, Tree

_DIGEST = hashlib.sha256(agent_bundle()).hexdigest()[:12]
AGENT = f"{ROOT}/agent-{_DIGEST}.pyz"  # by its digest: another version of us leaves its own beside it
_STOP_MARGIN_S = 30.0
_FULL_KB = 64


class NoAgentError(ShellError):
    """The host has no Python, or the agent printed something that is not a report."""


@dataclass(frozen=True, slots=True)
class HostStatus:
    """What runs on a machine.

    `prepared`: `setup` is done (or there is none). `alive`: its daemon runs; one that died is started again by
    `Host.start`. Instants are UNIX seconds, `log` the offsets between which the log can be read. `retire_at` is 0.0 where
    nothing is announced, None where that is not known. `port` is the one that a shared host has given to the replica,
    `seen_from` the address from which we are logged in, `front` the port of TLS in front of the replica, 0 while nothing
    listens there, None if there is to be none; `interpreted` says why that is not `tls_relay`, where it is not. `lease` is that of
    the machine, None without a dead-man switch.
    """

    state: InstanceState
    message: str = ""
    exit_code: int | None = None
    prepared: bool = False
    alive: bool = False
    preempt_at: float | None = None
    retire_at: float | None = None
    log: tuple[int, int] = (0, 0)
    port: int | None = None
    seen_from: str = ""
    front: int | None = None
    interpreted: str = ""
    lease: Lease | None = None


def status_of(raw: Mapping[str, Any]) -> HostStatus:
    """Return the status in a line of the agent."""
    return HostStatus(
        state=InstanceState(raw["state"]),
        message=raw["message"],
        exit_code=raw["exit_code"],
        prepared=raw["prepared"],
        alive=raw["alive"],
        preempt_at=raw["preempt_at"],
        retire_at=raw.get("retire_at"),
        log=(raw["log"][0], raw["log"][1]),
        port=raw["port"],
        seen_from=raw.get("seen_from", ""),
        front=raw.get("front"),
        interpreted=raw.get("interpreted", ""),
        lease=None if not raw.get("lease") else Lease(raw["lease"]["lease_s"], raw["lease"]["most_s"]),
    )


def agent_command(verb: str, folder: str, *words: str) -> list[str]:
    """Arguments of the agent's program on the host."""
    return ["python3", AGENT, verb, folder, *words]


class Host:
    """`folder` is the machine's, below the home of the user we are logged in as. Raises ShellError."""

    def __init__(self, shell: Commands, folder: str) -> None:
        self.shell = shell
        self.folder = folder

    def install(self) -> None:
        """Bring the agent, unless it is there, and make the machine's folder."""
        found = self.shell.run(
            f"umask 077; mkdir -p {shlex.quote(self.folder)} && command -v python3 >/dev/null || exit 3\n"
            f"[ -f {AGENT} ] || exit 4",
            check=False,
        )
        if found.code == 4:
            self.shell.put(AGENT, agent_bundle())
        elif found.code == 3:
            raise NoAgentError(f"{self.shell.login.name}: there is no python3, which the agent needs")
        elif found.code != 0:
            raise CommandError(f"{self.shell.login.name}: {found.said}", found)

    def done(self) -> frozenset[str]:
        """Return the steps that have been done."""
        listed = self.shell.run(["ls", self.folder]).out.decode().split()
        return frozenset(name.removeprefix("done.") for name in listed if name.startswith("done."))

    def do(self, step: Step, timeout_s: float) -> CommandOutput:
        """Run a step of bringing up. What failed on a full disk raises DiskFullError, independent of the program's message."""
        try:
            return self._do(step, timeout_s)
        except CommandError as error:
            full = self._full_disk()
            if full is None:
                raise
            name = self.shell.login.name
            raise DiskFullError(f"{name}: the disk is full ({full})", error.output) from error

    def _full_disk(self) -> str | None:
        """Return which one, if the disk that our folder is on has no room left."""
        said = self.shell.run(f"df -Pk {shlex.quote(self.folder)} | tail -n 1", check=False).out.decode()
        match said.split():
            case [device, size_kb, _, free_kb, _, mount] if free_kb.isdigit() and int(free_kb) < _FULL_KB:
                return f"{device} on {mount}, {int(size_kb) / 1e6:.3g} GB"
            case _:
                return None

    def _do(self, step: Step, timeout_s: float) -> CommandOutput:
        script = f'export AGENT="$HOME"/{AGENT}; cd {shlex.quote(self.folder)} && '
        program = shlex.join(["/bin/sh", "-c", step.script])
        script += program if step.always else f'exec python3 "$AGENT" step . {step.name} {program}'
        sends = step.sends
        if isinstance(sends, Tree):
            tree = sends

            def feed(stream: BinaryIO) -> None:
                pack(Path(tree.path), tree.name, stream)

            return self.shell.run(script, stdin=feed, timeout_s=timeout_s)
        return self.shell.run(
            script, stdin=sends.data if isinstance(sends, Content) else b"", timeout_s=timeout_s
        )

    def status(self, renew: bool = True) -> HostStatus:
        """`renew` renews the lease of the machine's dead-man switch."""
        return status_of(self.call("status", *(["--renew"] if renew else [])))

    def start(self) -> None:
        """Start the daemon, unless it runs."""
        self._agent("start")

    def go(self) -> None:
        """`setup` is done on all nodes."""
        self._agent("go")

    def stop(self, grace_s: float) -> None:
        """End all that runs for the replica."""
        self._agent("stop", f"{grace_s:g}", timeout_s=grace_s + _STOP_MARGIN_S)

    def read_log(self, offset: int, max_bytes: int) -> bytes:
        return self._agent("log", str(offset), str(max_bytes)).out

    def log_times(self, after: float, offset: int, most: int) -> bytes:
        """Marks of the log; see `host_agent.log_times`."""
        return self._agent("log-times", repr(after), str(offset), str(most)).out

    def call(
        self,
        verb: str,
        *words: str,
        folder: str | None = None,
        request: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
    ) -> dict[str, Any]:
        """Return one question, one line of JSON."""
        stdin = b"" if request is None else json.dumps(request).encode()
        output = self._agent(verb, *words, folder=folder, stdin=stdin, timeout_s=timeout_s)
        try:
            response: dict[str, Any] = json.loads(output.out)
        except ValueError as error:
            raise NoAgentError(f"{self.shell.login.name}: the agent said {output.said!r}") from error
        return response

    def _agent(
        self, verb: str, *words: str, folder: str | None = None, stdin: bytes = b"", timeout_s: float = 30.0
    ) -> CommandOutput:
        command = agent_command(verb, folder or self.folder, *words)
        return self.shell.run(command, stdin=stdin, timeout_s=timeout_s)
