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
    """The latest status of what runs on a machine.

    `state` is SETUP, RUNNING, SETUP_FAILED, RUN_EXITED, or BROKEN if it is not the same machine any more. `preempt_at` (UNIX seconds) is
    set while the machine's metadata service announces a preemption. The replica is reached at `port`, by TLS if `is_tls`. `lease` is
    None if the machine has none, or it is not known.
    """

    state: InstanceState
    port: int
    message: str = ""
    preempt_at: float | None = None
    retire_at: float | None = None  # 0.0: nothing is announced, None: not known
    is_tls: bool = False
    lease: Lease | None = None


class Hosts(Protocol):
    """Sets machines up and supervises them. Thread-safe. No method but those that read or log in waits for a machine."""

    def supervise(self, machine: Machine, order: LaunchOrder, node_ips: Sequence[str]) -> None:
        """Set the machine up, or continue its setup, and follow its reports until `release`. Idempotent."""
        ...

    def report(self, machine: Machine) -> HostReport | None:
        """Return the latest report; None if the machine has no supervisor."""
        ...

    def on_report(self, changed: Callable[[], None]) -> None:
        """Call `changed`, with no lock held, when the state, port or notice of a report changes."""
        ...

    def release(self, token: str) -> None:
        """Stop supervising the machine of that token."""
        ...

    def read_log(self, machine: Machine, offset: int, max_bytes: int) -> bytes: ...

    def log_window(self, machine: Machine) -> tuple[int, int]: ...

    def log_times(self, machine: Machine, after: float, offset: int, most: int) -> bytes: ...

    def log_in(self, machine: Machine) -> HostConnection:
        """Return a new connection, which the caller closes. Raises ShellError or ProvisionError."""
        ...

    def login(self, machine: Machine) -> Login:
        """Return how to log in to a machine that has an address, once it is prepared for it. Raises ShellError."""
        ...
