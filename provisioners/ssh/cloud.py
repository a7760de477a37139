"""The `ssh` cloud: a provisioner over the user's own hosts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from provisioners.base import LaunchOrder
from provisioners.bootstrap import Front
from provisioners.certificates import Authority
from provisioners.fleet import FleetProvisioner
from provisioners.hosts import SshHosts
from provisioners.line import Line, connect_commands, connect_line
from provisioners.machines import Machine, MachineOrder
from provisioners.rented import Rent, order_of
from provisioners.shell import Login, Shell, connect
from provisioners.ssh.machines import SshMachines
from provisioners.ssh.memory import SeenClaims
from provisioners.ssh.pool import CLOUD, load_pools, offers_of


class SshProvisioner(FleetProvisioner):
    """A replica is a claim on some GPUs of a host. `pools` is the section of config.yaml, `folder` where it is kept
    what was seen of hosts. Raises PoolError."""

    name: ClassVar[str] = CLOUD

    def __init__(
        self,
        pools: Mapping[str, Any],
        secret: bytes,
        folder: Path | None = None,
        *,
        tls: bool = False,
        dial: Callable[[Login], Shell] | None = None,
        dial_line: Callable[[Login], Awaitable[Line]] = connect_line,
    ) -> None:
        known = load_pools(pools)
        machines = SshMachines(known, dial or connect_commands, SeenClaims(folder))

        def front(machine: Machine, order: LaunchOrder) -> Front | None:
            """On any port of the host that is free."""
            return Front(Authority(secret, machine.owner).of_machine(machine.token)) if tls else None

        hosts = SshHosts(
            machines.login, is_booting=False, dial=dial or connect, dial_line=dial_line, front=front
        )

        def order_here(order: LaunchOrder, rank: int) -> MachineOrder:
            """Without a port of its own the replica takes one that is free on its host."""
            plain = order_of(order, rank, secret, Rent())
            return plain if order.port is not None else replace(plain, ports=(), public_ports=())

        super().__init__(machines, hosts, order_here, lambda need: offers_of(known, need))
