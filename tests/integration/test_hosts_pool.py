"""A pool of two hosts with two GPUs each, over real sshd: claims, and what goes wrong with hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from policies.model import CapacityType, Zone
from provisioners.port.base import InstanceState
from provisioners.port.errors import (
    AuthError,
    CapacityError,
    InvalidRequestError,
    ProvisionError,
    TransientError,
)
from provisioners.port.vm import Machine, MachineOrder, MachineState
from provisioners.remote.async_ssh import connect_commands
from provisioners.remote.bootstrap_steps import ReplicaNode, steps_for
from provisioners.remote.host import Host
from provisioners.remote.ssh import connect
from provisioners.remote.ssh_hosts import SshHosts
from provisioners.remote.ssh_keys import Keys
from provisioners.ssh.host_cache import SeenClaims
from provisioners.ssh.machines import SshMachines
from provisioners.ssh.pool import HostPools, load_pools
from tests.clouds.schedules import only_long
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_bench import KEYS, launch_order, ssh_pool, until
from tests.clouds.vms.vm_world import Vm, VmWorld

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(vm_world.why_not() is not None, reason=str(vm_world.why_not())),
]

LOGIN = Keys(KEYS.secret, "the user").login("chat")
ANOTHER = Keys(KEYS.secret, "somebody else").login("chat")


@dataclass
class Rack:
    """The two hosts, and config.yaml about them."""

    world: VmWorld
    vms: dict[str, Vm]
    raw: dict[str, Any]
    home: Path

    def machines(
        self, change: Callable[[dict[str, Any]], object] = lambda raw: None, seen: SeenClaims | None = None
    ) -> SshMachines:
        """A controller's, of its own."""
        change(self.raw)
        return SshMachines(self.pools(), dial=lambda login: connect_commands(login, timeout_s=2.0), seen=seen)

    def pools(self) -> HostPools:
        return load_pools(self.raw)


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Rack]:
    with VmWorld() as world:
        vms = {
            name: world.boot(name, logins={"me": LOGIN.public}, gpus=2, disk_mb=24) for name in ("h1", "h2")
        }
        section = ssh_pool(tmp_path, LOGIN.private, vms, gpus=2, zone="row-1")
        yield Rack(world, vms, {"rack": section}, tmp_path)


def wish(
    number: int, count: float = 1, owner: str = "owner-1", zone: str = "row-1", **facts: Any
) -> MachineOrder:
    return MachineOrder(
        token=f"{owner}-chat-{number}",
        owner=owner,
        service="chat",
        replica_id=number,
        rank=0,
        num_nodes=1,
        zone=Zone("ssh", "rack", zone),
        instance_type="host",
        capacity_type=CapacityType.ON_DEMAND,
        public_key="",
        accelerator="L4",
        accelerator_count=count,
        **facts,
    )


def states(machines: SshMachines, owner: str = "owner-1") -> dict[str, MachineState]:
    return {machine.token: machine.state for machine in machines.machines(owner)}


def test_gpus_are_counted_over_hosts_and_controllers(rack: Rack) -> None:
    mine, others = rack.machines(), rack.machines()
    made = [mine.create(wish(1, 1)), others.create(wish(2, 2, owner="owner-2")), mine.create(wish(3, 1))]
    assert [machine.id.partition("/")[0] for machine in made] == ["h1", "h2", "h1"]
    with pytest.raises(CapacityError) as caught:
        others.create(wish(4, 1, owner="owner-2"))
    assert (
        caught.value.message
        == "no room in ssh/rack/row-1: h1: 0 of 2 GPUs are free; h2: 0 of 2 GPUs are free"
    )
    assert list(states(mine)) == ["owner-1-chat-1", "owner-1-chat-3"]
    mine.destroy(made[0])
    assert others.create(wish(4, 1, owner="owner-2")).id == "h1/owner-2-chat-4"


def test_the_same_order_is_the_same_machine_even_when_it_is_gone(rack: Rack) -> None:
    machines = rack.machines()
    made = machines.create(wish(1))
    assert machines.create(wish(1)) == made
    assert rack.machines().create(wish(1)) == made
    machines.destroy(made)
    machines.destroy(made)
    assert machines.create(wish(1)).state is MachineState.TERMINATED
    assert states(machines) == {"owner-1-chat-1": MachineState.TERMINATED}


def test_an_exclusive_host_is_had_as_a_whole(rack: Rack) -> None:
    def change(raw: dict[str, Any]) -> None:
        for host in raw["rack"]["hosts"]:
            host.update(exclusive=True, zone=host["name"])

    machines = rack.machines(change)
    machines.create(wish(1, zone="h1"))
    with pytest.raises(CapacityError, match="h1: it is taken as a whole"):
        machines.create(wish(2, zone="h1"))


def test_two_replicas_cannot_have_one_port_of_a_host(rack: Rack) -> None:
    machines = rack.machines()
    first, second = [machines.create(wish(number, ports=(8000,))) for number in (1, 2)]
    assert (first.address, second.address) == (rack.vms["h1"].address, rack.vms["h2"].address)


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        pytest.param(
            wish(1, zone="nowhere"), "no host of config.yaml is in ssh/rack/nowhere", id="no such zone"
        ),
        pytest.param(
            wish(1, 4), "no host in ssh/rack/row-1 has 4 L4; see config.yaml", id="more than any host has"
        ),
        pytest.param(
            replace(wish(1), accelerator="H100"),
            "no host in ssh/rack/row-1 has 1 H100; see config.yaml",
            id="other GPUs",
        ),
    ],
)
def test_an_order_that_no_host_could_ever_take(rack: Rack, order: MachineOrder, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        rack.machines().create(order)
    assert caught.value.message == sentence


def test_a_silent_host_keeps_its_machines_and_gets_no_new_ones(rack: Rack) -> None:
    machines = rack.machines()
    made = [machines.create(wish(1, 2)), machines.create(wish(2, 2))]
    assert len(states(machines)) == 2
    rack.vms["h2"].kill()
    listed = {machine.token: machine for machine in machines.machines("owner-1")}
    assert listed[made[1].token].state is MachineState.RUNNING
    assert "h2" in listed[made[1].token].message
    assert listed[made[0].token] == made[0]
    with pytest.raises(TransientError, match="h2"):
        machines.destroy(made[1])
    with pytest.raises(TransientError, match="what runs there is not known, so nothing is listed"):
        rack.machines().machines("owner-1")


@pytest.mark.parametrize("verb", ["create", "machines"])
def test_a_host_with_another_key_is_not_used(rack: Rack, verb: str) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["rack"]["hosts"][0].update(host_key=ANOTHER.public, zone="h1")

    machines = rack.machines(change)
    calls: dict[str, tuple[Callable[[], object], type[ProvisionError]]] = {
        "create": (lambda: machines.create(wish(1, zone="h1")), CapacityError),
        "machines": (lambda: machines.machines("owner-1"), TransientError),
    }
    call, kind = calls[verb]
    with pytest.raises(kind, match="shows another host key than the one we know") as caught:
        call()
    assert type(caught.value) is kind


def test_a_host_that_refuses_the_login_is_not_used(rack: Rack) -> None:
    rack.vms["h1"].run("rm /home/me/.ssh/authorized_keys")
    machines = rack.machines(lambda raw: raw["rack"]["hosts"][1].update(zone="h2"))
    with pytest.raises(CapacityError, match=r"h1 .* refuses the login of 'me'"):
        machines.create(wish(1))
    assert machines.create(wish(1, zone="h2")).id.startswith("h2/")


def test_without_an_identity_file_there_is_no_login_at_all(rack: Rack) -> None:
    (rack.home / "id").unlink()
    with pytest.raises(AuthError, match=r"the file \S+ for h1 cannot be read: No such file or directory"):
        rack.machines().create(wish(1))


@only_long  # half a minute of waiting; test_cli_host_failures has the same from outside
def test_in_a_zone_of_several_hosts_the_next_one_takes_what_a_silent_one_cannot(rack: Rack) -> None:
    rack.vms["h1"].kill()
    seen = SeenClaims(rack.home / "seen")
    machines = rack.machines(seen=seen)
    assert machines.create(wish(1, 2)).id.startswith("h2/")
    rack.vms["h2"].kill()
    with pytest.raises(
        CapacityError, match=r"no room in ssh/rack/row-1: h1 .* cannot be reached.*; h2 .* cannot"
    ):
        machines.create(wish(2, 2))


def test_what_a_silent_host_had_is_remembered_over_a_restart(rack: Rack) -> None:
    folder = rack.home / "seen"
    made = rack.machines(seen=SeenClaims(folder)).create(wish(1, 2))
    rack.vms["h1"].kill()
    (known,) = rack.machines(seen=SeenClaims(folder)).machines("owner-1")
    assert (known.id, known.state) == (made.id, MachineState.RUNNING)
    assert "cannot be reached" in known.message


_CUT_OFF = r"""
PATH=/usr/local/bin:/usr/bin:/bin  # where a login looks
p=$(command -v python3); mv $p $p.real; cat >$p <<'E'
#!/bin/sh
case "$*" in *" claim "*) said=$($0.real "$@"); pkill -9 -u me sshd; exit 1;; esac
exec $0.real "$@"
E
chmod 755 $p
"""


def test_a_host_that_was_never_met_keeps_nobody_from_going(rack: Rack) -> None:
    """There can be nothing of ours on it; one that was met may have something."""
    seen = SeenClaims(rack.home / "seen")
    rack.vms["h1"].kill()
    machines = rack.machines(
        lambda raw: [host.update(zone=host["name"]) for host in raw["rack"]["hosts"]], seen
    )
    made = machines.create(wish(1, zone="h2"))
    machines.destroy(made)
    assert machines.orphans("owner-1") == []
    rack.vms["h2"].run("touch /run/no-sshd; pkill -9 sshd; true")
    with pytest.raises(TransientError, match="h2"):
        machines.orphans("owner-1")


def test_a_claim_whose_answer_was_lost_is_not_given_up(rack: Rack) -> None:
    """The host has heard it: to go elsewhere would be to have two."""
    machines = rack.machines(lambda raw: [host.update(zone=host["name"]) for host in raw["rack"]["hosts"]])
    rack.vms["h1"].run(_CUT_OFF)
    with pytest.raises(TransientError, match="h1"):
        machines.create(wish(1, zone="h1"))
    assert rack.vms["h1"].run("ls /home/me/.skyserve/claims") == f"{wish(1).token}.json\n"
    rack.vms["h1"].run("touch /run/no-sshd; pkill -9 -x sshd; true")
    with pytest.raises(TransientError, match=r"h1 .* cannot be reached"):
        machines.create(wish(1, zone="h1"))
    with pytest.raises(CapacityError, match=r"h1 .* cannot be reached"):
        machines.create(wish(2, zone="h1"))


def test_a_full_disk_is_no_room(rack: Rack) -> None:
    machines = rack.machines(lambda raw: [host.update(zone=host["name"]) for host in raw["rack"]["hosts"]])
    made = machines.create(wish(1, zone="h1"))
    rack.vms["h1"].run("cat /dev/zero >/fill 2>/dev/null || true")
    with pytest.raises(CapacityError, match="h1: the disk is full"):
        machines.create(wish(2, zone="h1"))
    machines.destroy(made)
    assert states(machines).get(made.token) in (None, MachineState.TERMINATED)


def test_check_says_what_is_wrong_with_each_host(rack: Rack) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["rack"]["hosts"][1]["accelerators"] = {"L4": 4}

    findings = rack.machines(change).check()
    assert [(finding.ok, finding.message) for finding in findings] == [
        (False, "only 0.0 GB of its disk are free"),
        (False, "config.yaml says 4 L4, nvidia-smi sees 2"),
    ]


def _attended(rack: Rack, machines: SshMachines, made: Machine, run: str) -> SshHosts:
    hosts = SshHosts(machines.login, is_booting=False, poll_s=0.1)
    order = replace(launch_order(made.token, run=run, accelerator="L4", count=1), owner=made.owner)
    hosts.supervise(made, order, [str(made.private_address)])
    until(lambda: (report := hosts.report(made)) and report.state is InstanceState.RUNNING, "the run")
    return hosts


def test_replicas_of_one_host_have_their_own_gpus_and_ports_and_end_alone(rack: Rack) -> None:
    machines = rack.machines()
    made = [machines.create(wish(number)) for number in (1, 2)]
    run = "echo gpu $CUDA_VISIBLE_DEVICES port $SKYSERVE_REPLICA_PORT; exec sleep 1000"
    hosts = [_attended(rack, machines, one, run) for one in made]
    logs = [
        until(lambda h=h, m=m: h.read_log(m, 0, 100), "the log") for h, m in zip(hosts, made, strict=True)
    ]  # type: ignore[misc]
    assert logs == [b"gpu 0 port 20000\n", b"gpu 1 port 20001\n"]
    reports = [until(lambda h=h, m=m: h.report(m), "it") for h, m in zip(hosts, made, strict=True)]  # type: ignore[misc]
    assert [report.port for report in reports] == [20000, 20001]
    hosts[0].release(made[0].token)
    machines.destroy(made[0])
    assert rack.vms["h1"].run("pgrep -c '^sleep' -x; ls /home/me/.skyserve/machines").split() == [
        "1",
        made[1].token,
    ]
    hosts[1].release(made[1].token)


def test_what_is_left_without_a_claim_is_found_and_removed(rack: Rack) -> None:
    machines = rack.machines()
    made = machines.create(wish(1))
    hosts = _attended(rack, machines, made, "exec sleep 1000")
    hosts.release(made.token)
    rack.vms["h1"].run(f"rm /home/me/.skyserve/claims/{made.token}.json")
    assert machines.orphans("owner-2") == []
    (found,) = machines.orphans("owner-1")
    machines.remove(found)
    machines.remove(found)
    assert machines.orphans("owner-1") == []
    assert rack.vms["h1"].run("pgrep -f '[s]leep 1000' || echo none") == "none\n"


def test_nothing_starts_for_a_claim_that_has_ended(rack: Rack) -> None:
    """A controller that was replaced may still be bringing up what the other one has ended."""
    machines = rack.machines()
    made = machines.create(wish(1))
    machines.destroy(made)
    order = replace(
        launch_order(made.token, run="exec sleep 1000", accelerator="L4", count=1), owner=made.owner
    )
    node = ReplicaNode(made.token, 0, (str(made.private_address),), 8000)
    with connect(machines.login(made)) as shell:
        host = Host(shell, node.folder)
        host.install()
        for step in steps_for(order, node):
            host.do(step, 30.0)
    on_host = rack.vms["h1"].run
    until(lambda: on_host("pgrep -fa '[p]yz daemon' || true") == "", "the end of any daemon")
    assert on_host("pgrep -fa '[s]leep 1000' || true") == ""
    (left,) = machines.orphans("owner-1")
    machines.remove(left)
