"""The `ssh` cloud: a provisioner over the user's own hosts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from provisioners.assembly import VmSettings, order_of
from provisioners.port.base import LaunchOrder
from provisioners.port.commands import Login
from provisioners.port.vm import Machine, MachineOrder
from provisioners.remote.async_ssh import AsyncConnection, connect_async, connect_commands
from provisioners.remote.bootstrap_steps import Front
from provisioners.remote.certificates import Authority
from provisioners.remote.ssh import Shell, connect
from provisioners.remote.ssh_hosts import SshHosts
from provisioners.ssh.host_cache import SeenClaims
from provisioners.ssh.machines import SshMachines
from provisioners.ssh.pool import CLOUD, load_pools, offers_of
from provisioners.vm_provisioner import VmProvisioner


class SshProvisioner(VmProvisioner):
    """A replica is a claim on some GPUs of a host.

    `pools` is the section of config.yaml, `folder` where it is kept what was seen of hosts. Raises PoolError.
    """

    name: ClassVar[str] = CLOUD

    def __init__(
        self,
        pools: Mapping[str, Any],
        secret: bytes,
        folder: Path | None = None,
        *,
        tls: bool = False,
        dial: Callable[[Login], Shell] | None = None,
        dial_line: Callable[[Login], Awaitable[AsyncConnection]] = connect_async,
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
            plain = order_of(order, rank, secret, VmSettings())
            return plain if order.port is not None else replace(plain, ports=(), public_ports=())

        super().__init__(machines, hosts, order_here, lambda need: offers_of(known, need))
        self.remove_cache = machines.remove_cache
