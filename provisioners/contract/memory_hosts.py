"""Hosts in memory: what runs on machines, without machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from provisioners.port.base import InstanceState, LaunchOrder
from provisioners.port.commands import HostConnection, Login, UnreachableError
from provisioners.port.host_port import HostReport
from provisioners.port.vm import Machine


@dataclass
class MemoryHosts:
    """SETUP for `setup_s` after `supervise`, then RUNNING. `reports` replaces the report of a machine's token."""

    now: Callable[[], float]
    setup_s: float = 60.0
    supervised: dict[str, tuple[LaunchOrder, tuple[str, ...], float]] = field(default_factory=dict)
    reports: dict[str, HostReport] = field(default_factory=dict)
    changed: Callable[[], None] = lambda: None

    def on_report(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def set_report(self, token: str, report: HostReport) -> None:
        """The machine reports this from now on."""
        self.reports[token] = report
        self.changed()

    def supervise(self, machine: Machine, order: LaunchOrder, node_ips: Sequence[str]) -> None:
        self.supervised.setdefault(machine.token, (order, tuple(node_ips), self.now()))

    def report(self, machine: Machine) -> HostReport | None:
        known = self.supervised.get(machine.token)
        if known is None:
            return None
        ready = self.now() >= known[2] + self.setup_s
        plain = HostReport(InstanceState.RUNNING if ready else InstanceState.SETUP, known[0].port or 8000)
        return self.reports.get(machine.token, plain)

    def release(self, token: str) -> None:
        self.supervised.pop(token, None)

    def read_log(self, machine: Machine, offset: int, max_bytes: int) -> bytes:
        return f"log of {machine.token}".encode()[offset : offset + max_bytes]

    def log_window(self, machine: Machine) -> tuple[int, int]:
        return 0, len(f"log of {machine.token}")

    def log_times(self, machine: Machine, after: float, offset: int, most: int) -> bytes:
        return b""

    def log_in(self, machine: Machine) -> HostConnection:
        raise UnreachableError(f"{machine.id} is in memory: there is nothing to log in to")

    def login(self, machine: Machine) -> Login:
        raise UnreachableError(f"{machine.id} is in memory: there is nothing to log in to")
