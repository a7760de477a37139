"""What the tests of hosts share: an owner with keys, orders, machines as a cloud makes them, and patience with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from policies.model import CapacityType, Offer, Zone
from provisioners.clock import unix_now
from provisioners.port.base import LaunchOrder
from provisioners.port.commands import Login
from provisioners.port.lease import LeaseTerms
from provisioners.port.vm import Machine, MachineOrder, MachineState, machine_token
from provisioners.remote.bootstrap_runner import BootstrapRunner, Progress
from provisioners.remote.bootstrap_steps import ReplicaNode, steps_for
from provisioners.remote.host import Host
from provisioners.remote.ssh import connect
from provisioners.remote.ssh_keys import Keys, user_data
from tests.clouds.vms.vm_world import Vm, VmWorld

T = TypeVar("T")
KEYS = Keys(b"0123456789abcdef" * 2, "owner-1")
PATIENCE_S = 90.0


def until(holds: Callable[[], T | None], what: str = "it") -> T:
    """The first response that is true; not for ever."""
    ends_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends_at:
        answer = holds()
        if answer:
            return answer
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come to be")


def host_key(vm: Vm) -> str:
    """The kind and the key, when logins are possible."""
    until(lambda: "Server listening" in vm.console(), "sshd")
    return " ".join(vm.run("cat /etc/ssh/ssh_host_ed25519_key.pub").split()[:2])


def ssh_pool(
    folder: Path, private_key: str, vms: Mapping[str, Vm], gpus: int = 1, **facts: object
) -> dict[str, Any]:
    """A pool of `config.yaml` with these machines, whose user is `me`; its files are in the folder. `facts` are of each host."""
    identity, known_hosts = folder / "id", folder / "known_hosts"
    identity.write_text(private_key)
    known_hosts.write_text("".join(f"{vm.address} {host_key(vm)}\n" for vm in vms.values()))
    return {
        "user": "me",
        "identity_file": str(identity),
        "known_hosts": str(known_hosts),
        "hosts": [
            {"name": name, "address": vm.address, "accelerators": {"L4": gpus}, **facts}
            for name, vm in vms.items()
        ],
    }


def launch_order(
    token: str,
    *,
    run: str = "exec sleep 1000",
    setup: str | None = None,
    cloud: str = "aws",
    accelerator: str | None = None,
    count: float = 0.0,
    num_nodes: int = 1,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    workdir: str | None = None,
    file_mounts: Mapping[str, str] | None = None,
) -> LaunchOrder:
    zone = Zone(cloud, "us-east-1", "use1-az1")
    return LaunchOrder(
        token=token,
        owner=KEYS.owner,
        service="chat",
        replica_id=1,
        version=1,
        offer=Offer(zone, "g6.xlarge", accelerator, count, CapacityType.SPOT, 1.0),
        setup=setup,
        run=run,
        port=port,
        env=env or {},
        secrets=secrets or {},
        workdir=workdir,
        file_mounts=file_mounts or {},
        num_nodes=num_nodes,
    )


def machine_order(token: str, rank: int = 0, num_nodes: int = 1, cloud: str = "aws") -> MachineOrder:
    return MachineOrder(
        token=token,
        owner=KEYS.owner,
        service="chat",
        replica_id=1,
        rank=rank,
        num_nodes=num_nodes,
        zone=Zone(cloud, "us-east-1", "use1-az1"),
        instance_type="g6.xlarge",
        capacity_type=CapacityType.SPOT,
        public_key=KEYS.login("chat").public,
    )


def boot(
    world: VmWorld,
    token: str,
    *,
    lease_s: int = 1800,
    cloud: str = "aws",
    boot_s: float = 0.0,
    disk_mb: int = 512,
    gpus: int = 0,
) -> Vm:
    """A machine as a cloud makes it of an order."""
    data = user_data(machine_order(token), KEYS.host(token), LeaseTerms(lease_s, lease_s))
    return world.boot(token, user_data=data, cloud=cloud, boot_s=boot_s, disk_mb=disk_mb, gpus=gpus)


def login(vm: Vm) -> Login:
    return Login(vm.name, vm.address, "skyserve", KEYS.login("chat").private, (KEYS.host(vm.name).public,))


def machine_of(vm: Vm, order: LaunchOrder, rank: int = 0) -> Machine:
    """As the cloud lists it."""
    return Machine(
        id=vm.name,
        token=machine_token(order.token, rank),
        owner=order.owner,
        service=order.service,
        replica_id=order.replica_id,
        rank=rank,
        num_nodes=order.num_nodes,
        zone=order.offer.zone,
        capacity_type=order.offer.capacity_type,
        state=MachineState.RUNNING,
        address=vm.address,
    )


def node_of(
    order: LaunchOrder, *, rank: int = 0, ips: tuple[str, ...] = ("127.0.0.1",), port: int = 8000
) -> ReplicaNode:
    return ReplicaNode(machine_token(order.token, rank), rank, ips, port)


def bring_up(
    vm: Vm,
    order: LaunchOrder,
    node: ReplicaNode | None = None,
    on_progress: Callable[[Progress], object] = lambda progress: None,
    boot_timeout_s: float = 60.0,
) -> Host:
    node = node or node_of(order)
    drive = BootstrapRunner(
        lambda: connect(login(vm)),
        node.folder,
        steps_for(order, node),
        now=unix_now,
        pause=lambda duration_s: time.sleep(min(duration_s, 0.1)),
        on_progress=on_progress,
        boot_timeout_s=boot_timeout_s,
    )
    return drive.drive()


def whole_log(host: Host) -> str:
    """All that is kept of it."""
    at, end = host.status().log
    parts = []
    while at < end:
        parts.append(host.read_log(at, end - at))
        at += len(parts[-1])
    return b"".join(parts).decode()
