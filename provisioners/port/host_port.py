"""The interface to what runs on machines: `Hosts` sets machines up and reports their status.

`provisioners.vm_provisioner` uses it, `provisioners.remote.ssh_hosts` implements it over SSH.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from provisioners.port.base import InstanceState, LaunchOrder
from provisioners.port.commands import HostConnection, Login
from provisioners.port.lease import Lease
from provisioners.port.vm import Machine


@dataclass(frozen=True, slots=True)
class HostReport:
    """What is known of what runs on a machine.

    `state` is SETUP, RUNNING, SETUP_FAILED, RUN_EXITED, or BROKEN if it is not the machine that it was; `preempt_at` (UNIX
    seconds) stands while the machine's metadata service says that it will be taken. `port` is the one at which the replica
    is reached, by TLS if `is_tls`. `lease` is the machine's, None if it has none or it is not known.
    """

    state: InstanceState
    port: int
    message: str = ""
    preempt_at: float | None = None
    retire_at: float | None = None  # 0.0: nothing is announced, None: not known
    is_tls: bool = False
    lease: Lease | None = None


class Hosts(Protocol):
    """Brings up what runs on machines, and watches it. Thread-safe; nothing here waits for a machine."""

    def supervise(self, machine: Machine, order: LaunchOrder, node_ips: Sequence[str]) -> None:
        """From now on, until `release`: bring the machine up, or go on with it, and watch. Again is nothing new."""
        ...

    def report(self, machine: Machine) -> HostReport | None:
        """Return the last report; None if no operation attends the machine."""
        ...

    def on_report(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever the state, port or notice in a report is another one; holds no lock."""
        ...

    def release(self, token: str) -> None:
        """The machine of that token is not ours any longer, or will not be."""
        ...

    def read_log(self, machine: Machine, offset: int, max_bytes: int) -> bytes: ...

    def log_window(self, machine: Machine) -> tuple[int, int]: ...

    def log_times(self, machine: Machine, after: float, offset: int, most: int) -> bytes: ...

    def log_in(self, machine: Machine) -> HostConnection:
        """Return a connection of the caller's own. Raises ShellError or ProvisionError."""
        ...

    def login(self, machine: Machine) -> Login:
        """Return how to log in to a machine that has an address."""
        ...
