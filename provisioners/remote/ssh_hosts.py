"""What runs on machines, over SSH: `host_port.Hosts` for every cloud.

Each supervised machine has a `HostSupervisor`, which sets it up in a thread of its own. It then follows the machine's reports over one
connection; the connections of all machines share one thread (`async_ssh`).
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from policies.model import Role
from provisioners.clock import unix_now
from provisioners.port.base import LaunchOrder
from provisioners.port.commands import Login, ShellError
from provisioners.port.host_port import HostReport
from provisioners.port.vm import Machine, replica_token
from provisioners.remote.async_ssh import AsyncConnection, connect_async
from provisioners.remote.bootstrap_runner import BOOT_TIMEOUT_S, boot_timeout_factor
from provisioners.remote.bootstrap_steps import Front, ReplicaNode, steps_for
from provisioners.remote.first_login import FirstLogins
from provisioners.remote.host import Host
from provisioners.remote.ssh import Shell, connect
from provisioners.remote.supervise import HEARTBEAT_S, POLL_S, HostSupervisor

T = TypeVar("T")

DEFAULT_PORT = 8000  # $SKYSERVE_REPLICA_PORT on a machine that has nothing else to do


class SshHosts:
    """`login` defines how to get into a machine.

    `is_booting`: machines are new, and need time to let us in. An idle machine reports every `heartbeat_s`; `poll_s` is the
    pause between two attempts, or two looks at a machine that cannot be followed. `dial` connects for bringing up,
    `dial_line` for following. `seen_from` is called with the address that a machine sees us at, on any thread.
    `first_login` prepares machines before they are logged in to. `front` gives what TLS in front of the machine's replica needs,
    if there is to be any.
    """

    def __init__(
        self,
        login: Callable[[Machine], Login],
        *,
        is_booting: bool = True,
        boot_timeout_s: float = BOOT_TIMEOUT_S,
        poll_s: float = POLL_S,
        heartbeat_s: float = HEARTBEAT_S,
        now: Callable[[], float] = unix_now,
        dial: Callable[[Login], Shell] = connect,
        dial_line: Callable[[Login], Awaitable[AsyncConnection]] = connect_async,
        seen_from: Callable[[str], None] = lambda address: None,
        front: Callable[[Machine, LaunchOrder], Front | None] = lambda machine, order: None,
        first_login: FirstLogins | None = None,
    ) -> None:
        self._first_login = first_login
        self._front = front
        self._seen_from = seen_from
        self._login = login
        self._is_booting = is_booting
        self._boot_timeout_s = boot_timeout_s
        self._poll_s = poll_s
        self._heartbeat_s = heartbeat_s
        self._now = now
        self._dial = dial
        self._dial_line = dial_line
        self._supervisors: dict[str, HostSupervisor] = {}
        self._prepared: dict[str, set[int]] = {}  # by the replica's token: the ranks whose `setup` is done
        self._changed: Callable[[], None] = _ignore
        self._lock = threading.Lock()

    def supervise(self, machine: Machine, order: LaunchOrder, node_ips: Sequence[str]) -> None:
        with self._lock:
            if machine.token in self._supervisors:
                return
            port = DEFAULT_PORT if order.port is None else order.port
            front = self._front(machine, order) if machine.rank == 0 and order.role is Role.REPLICA else None
            node = ReplicaNode(machine.token, machine.rank, tuple(node_ips), port, order.docker_image, front)
            supervisor = HostSupervisor(
                replica_token(machine),
                node,
                steps_for(order, node),
                num_nodes=order.num_nodes,
                connect=lambda: self._connect(machine),
                connect_async=lambda: self._dial_line(self._login(machine)),
                is_booting=self._is_booting,
                boot_timeout_s=self._boot_timeout_s * boot_timeout_factor(order.offer),
                poll_s=self._poll_s,
                heartbeat_s=self._heartbeat_s,
                now=self._now,
                gather=self._gather,
                changed=self._report_change,
                seen_from=self._seen_from,
            )
            self._supervisors[machine.token] = supervisor
        supervisor.start()

    def report(self, machine: Machine) -> HostReport | None:
        with self._lock:
            supervisor = self._supervisors.get(machine.token)
        return None if supervisor is None else supervisor.report

    def on_report(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def _report_change(self) -> None:
        self._changed()  # the present callback, not that of the first call of `supervise`

    def release(self, token: str) -> None:
        with self._lock:
            supervisor = self._supervisors.pop(token, None)
            if supervisor is not None:
                self._prepared.get(supervisor.replica, set()).discard(supervisor.node.rank)
                if not self._prepared.get(supervisor.replica):
                    self._prepared.pop(supervisor.replica, None)
        if supervisor is not None:
            supervisor.release()
        if self._first_login is not None:
            self._first_login.forget(token)

    def read_log(self, machine: Machine, offset: int, max_bytes: int) -> bytes:
        said = self._with_host(machine, lambda host: host.read_log(offset, max_bytes), b"")
        return said or self._log_tail(machine)[offset : offset + max_bytes]

    def log_window(self, machine: Machine) -> tuple[int, int]:
        window = self._with_host(machine, lambda host: host.status(renew=False).log, (0, 0))
        return window if window[1] else (0, len(self._log_tail(machine)))

    def log_times(self, machine: Machine, after: float, offset: int, most: int) -> bytes:
        return self._with_host(machine, lambda host: host.log_times(after, offset, most), b"")

    def _log_tail(self, machine: Machine) -> bytes:
        """Of a step that failed where no log could be written."""
        with self._lock:
            supervisor = self._supervisors.get(machine.token)
        return b"" if supervisor is None else supervisor.log_archive

    def log_in(self, machine: Machine) -> Shell:
        return self._connect(machine)

    def login(self, machine: Machine) -> Login:
        self._prepare(machine)
        return self._login(machine)

    def _gather(self, replica: str, rank: int, num_nodes: int) -> bool:
        """Note that the node is prepared. Returns whether all of them are, and lets the others know if so."""
        with self._lock:
            ranks = self._prepared.setdefault(replica, set())
            ranks.add(rank)
            if len(ranks) < num_nodes:
                return False
            others = [
                one for one in self._supervisors.values() if one.replica == replica and one.node.rank != rank
            ]
        for other in others:
            other.recheck()
        return True

    def _connect(self, machine: Machine) -> Shell:
        return self._dial(self.login(machine))

    def _prepare(self, machine: Machine) -> None:
        if self._first_login is not None:
            self._first_login.prepare(machine)

    def _with_host(self, machine: Machine, query: Callable[[Host], T], otherwise: T) -> T:
        """Over the supervisor's connection, or one of our own; a machine that does not respond has nothing to report."""
        with self._lock:
            supervisor = self._supervisors.get(machine.token)
        host = None if supervisor is None else supervisor.host
        try:
            if host is not None and host.shell.is_open:
                return query(host)
            with self._connect(machine) as shell:
                return query(Host(shell, ReplicaNode(machine.token, machine.rank, (), 0).folder))
        except ShellError:
            return otherwise


def _ignore() -> None:
    """Nothing waits for reports yet."""
