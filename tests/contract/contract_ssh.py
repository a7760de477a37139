"""The user's own hosts under the contract: two machines with sshd, in network namespaces of their own, and nothing that is
not real. The hosts are booted once; each test finds them without claims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from policies.model import CapacityType, Offer, Zone
from provisioners.contract.subject import ON_DEMAND, Subject
from provisioners.port.base import LaunchOrder, Requirements
from provisioners.port.commands import CommandOutput, Login, UnreachableError
from provisioners.port.errors import TransientError
from provisioners.port.vm import MachineOrder, machine_token
from provisioners.remote.async_ssh import AsyncConnection, connect_async, ssh_loop
from provisioners.remote.ssh import Shell, connect
from provisioners.ssh.cloud import SshProvisioner
from provisioners.ssh.machines import SshMachines
from provisioners.ssh.pool import load_pools
from tests.clouds.vms.vm_bench import KEYS, host_key
from tests.clouds.vms.vm_world import Vm, VmWorld

GPUS = 8  # of each host
OWNERS = ("owner-1", "owner-2")


@dataclass
class Rack:
    """Two hosts, and config.yaml about them."""

    vms: dict[str, Vm]
    pools: dict[str, Any]

    def forget_all(self) -> None:
        """Nothing that runs, no claim, and none that was ever there."""
        for vm in self.vms.values():
            left = vm.run("pgrep -fa '[s]leep 1000' || true; rm -f ~me/.skyserve/claims/*.json")
            assert left == "", left


@contextmanager
def rack_of(folder: Path) -> Iterator[Rack]:
    login = KEYS.login("chat")
    (folder / "id").write_text(login.private)
    with VmWorld() as world:
        hosts = []
        for number, name in enumerate(("h1", "h2"), 1):
            vm = world.boot(name, logins={"me": login.public}, gpus=GPUS, disk_mb=64)
            key = host_key(vm)
            facts = {"host_key": key, "accelerators": {"L4": GPUS}, "price_usd_hour": 8.0 * number}
            hosts.append({"name": name, "address": vm.address, **facts})
        pool = {"user": "me", "identity_file": str(folder / "id"), "hosts": hosts}
        yield Rack(world.vms, {"rack": pool})


class SshSubject(Subject):
    """Where nothing is said of accelerators, L4 is meant: hosts count nothing else."""

    markets = (ON_DEMAND,)

    def __init__(self, rack: Rack) -> None:
        self.rack = rack
        self.cutting = False
        self.has_dialled = False
        self.life = 0
        self.lines: list[AsyncConnection] = []
        self.cloud = self.restarted()

    def restarted(self) -> SshProvisioner:
        """The one before is dead: its threads are still here, and reach no host any more."""
        self._end_life()
        return _Pool(
            self.rack.pools,
            KEYS.secret,
            dial=partial(self._dial, self.life),
            dial_line=partial(self._dial_line, self.life),
        )

    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        """A neighbour, who shares the hosts with us, has the rest of the GPUs."""
        machines = SshMachines(load_pools(self.rack.pools))
        living = [
            one
            for owner in OWNERS
            for one in machines.machines(owner)
            if one.zone == zone and not one.state.is_gone
        ]
        taken = min(GPUS - count, GPUS - len(living))
        machines.create(
            MachineOrder(
                token="neighbour-1",
                owner="neighbour",
                service="theirs",
                replica_id=1,
                rank=0,
                num_nodes=1,
                zone=zone,
                instance_type="host",
                capacity_type=capacity_type,
                public_key="",
                accelerator="L4",
                accelerator_count=float(taken),
            )
        )

    def preempt_node(self, token: str, rank: int) -> None:
        """Someone ends the claim by hand."""
        machines = SshMachines(load_pools(self.rack.pools))
        name = machine_token(token, rank)
        (lost,) = [one for one in machines.machines("owner-1") if one.token == name]
        machines.destroy(lost)

    def lose_response(self, order: LaunchOrder) -> None:
        self.cutting = True
        with pytest.raises(TransientError):
            self.cloud.launch(order)
        self.cutting = False

    def refuse_us(self) -> None:
        pytest.skip("each host has a login of its own, and one that refuses it is a zone without room")

    def pass_time(self) -> None:
        sleep(0.4)  # each look costs both hosts a process

    def close(self) -> None:
        if not self.has_dialled:
            return
        left = [one for owner in OWNERS for one in self.cloud.instances(owner) if not one.state.is_gone]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self.cloud.terminate, left))
        self._end_life()
        self.rack.forget_all()

    def _end_life(self) -> None:
        self.life += 1
        while self.lines:
            ssh_loop().call_soon_threadsafe(self.lines.pop().close)

    def _dial(self, life: int, login: Login) -> Shell:
        self.has_dialled = True
        if life != self.life:
            raise UnreachableError(f"{login.name}: this controller has died")
        return _Line(connect(login), login, self)

    async def _dial_line(self, life: int, login: Login) -> AsyncConnection:
        line = await connect_async(login)
        self.lines.append(line)
        if life != self.life:
            line.close()
            raise UnreachableError(f"{login.name}: this controller has died")
        return line


class _Pool(SshProvisioner):
    def offers(self, need: Requirements) -> Sequence[Offer]:
        meant = [one if one.accelerator else replace(one, accelerator="L4") for one in need.candidates]
        return super().offers(replace(need, candidates=tuple(meant)))


class _Line(Shell):
    """A connection that can break when a claim has been made and its response is on the way."""

    def __init__(self, shell: Shell, login: Login, subject: SshSubject) -> None:
        super().__init__(shell._client, login)
        self._subject = subject
        self._life = subject.life

    def run(self, command: str | Sequence[str], **how: Any) -> CommandOutput:
        if self._life != self._subject.life:
            raise UnreachableError(f"{self.login.name}: this controller has died")
        output = super().run(command, **how)
        if self._subject.cutting and "claim" in command:
            self.close()
            raise UnreachableError(f"{self.login.name}: the connection was lost")
        return output
