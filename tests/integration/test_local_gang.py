"""Replicas of several nodes on the local cloud: real processes that start together and end together."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import pytest

from policies.model import CapacityType, NodeLost, Offer, Replica, ReplicaState, RunExited
from provisioners.local import controls as local_controls
from provisioners.local import network as local_net
from provisioners.local import process_tree as local_process
from provisioners.local.cloud import LocalProvisioner
from provisioners.local.host import HostOrder
from provisioners.local.spawn import spawn_host
from provisioners.local.store import InstanceFolder, LocalStore
from provisioners.port.base import Candidate, Instance, InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import CapacityError, TransientError
from skyserve_cli.controller.clouds.execute import perform
from skyserve_cli.controller.reconcile.listing_events import events_of
from skyserve_cli.controller.reconcile.ports import CloudOperation, OperationKind
from tests.kit.eventually import eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the local cloud needs Linux"),
]

OWNER = "owner-1"
FIRST = "chat-1"
CLOUD_YAML = """
cold_start_s: 0
stop_grace_s: 0.5
regions:
  us:
    us-a: {spot_usd_hour: 0.3, on_demand_usd_hour: 1.0, spot_capacity: 4}
"""
WHO = 'echo "$SKYPILOT_NODE_RANK/$SKYPILOT_NUM_NODES x$SKYPILOT_NUM_GPUS_PER_NODE" $SKYPILOT_NODE_IPS; '


def has_ended(process: psutil.Process) -> bool:
    """One whose parent has died may wait for init to be reaped."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


class Lab:
    """A local cloud of one zone, and its gangs."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.store = LocalStore(home)
        self.store.create()
        self.store.config_path.write_text(CLOUD_YAML)
        self.cloud = LocalProvisioner(home)

    def offer(self) -> Offer:
        return self.cloud.offers(Requirements((Candidate(use_spot=True, accelerator="L4"),), num_nodes=2))[0]

    def order(
        self,
        run: str = "exec sleep 1000",
        *,
        number: int = 1,
        num_nodes: int = 2,
        setup: str | None = None,
        port: int | None = None,
    ) -> LaunchOrder:
        return LaunchOrder(
            f"chat-{number}", OWNER, "chat", number, 1, self.offer(), setup, run, port, num_nodes=num_nodes
        )

    def listed(self, token: str = FIRST) -> Instance:
        return {instance.token: instance for instance in self.cloud.instances(OWNER)}[token]

    def until(self, state: InstanceState, token: str = FIRST) -> Instance:
        eventually(lambda: self.listed(token).state is state, f"{token} is {state.value}")
        return self.listed(token)

    def log(self, instance: Instance, node: int) -> str:
        return self.cloud.read_log(instance, 0, 1 << 20, node).decode()

    def processes(self, rank: int, token: str = FIRST) -> list[int]:
        """What setup and run of a node have started."""
        return local_process.marked(self.store.node_id(self.store.folder(token).at(rank)))

    def host(self, rank: int, token: str = FIRST) -> psutil.Process:
        pid = self.store.folder(token).at(rank).host_pid()
        assert pid is not None
        return psutil.Process(pid)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    nodes = made.store.nodes()
    for instance in made.cloud.instances(OWNER):
        made.cloud.terminate(instance)
    for node in nodes:
        name = made.store.node_id(node)
        assert not node.is_host_alive()
        assert not local_process.marked(name)
        assert not node.work_path.exists()
        assert not Path("/run/netns", local_net.namespace_name(name)).exists()


# --- How they start -----------------------------------------------------------------------------------------


def test_every_node_has_a_process_a_rank_and_a_log_of_its_own(lab: Lab) -> None:
    gang = lab.cloud.launch(lab.order(WHO + "exec sleep 1000", num_nodes=3))
    lab.until(InstanceState.RUNNING)
    for rank in range(3):
        eventually(lambda rank=rank: lab.log(gang, rank) != "", f"node {rank} says who it is")  # type: ignore[misc]
        assert lab.log(gang, rank) == f"{rank}/3 x1 127.0.0.1 127.0.0.1 127.0.0.1\n"
        eventually(lambda rank=rank: len(lab.processes(rank)) == 1, f"node {rank} has a process")  # type: ignore[misc]
    assert lab.cloud.log_window(gang, 2) == (0, len(lab.log(gang, 2)))
    assert (lab.log(gang, 3), lab.cloud.log_window(gang, 3)) == ("", (0, 0))


def test_all_nodes_are_in_the_zone_of_the_offer_and_each_takes_a_place(lab: Lab) -> None:
    lab.cloud.launch(lab.order(num_nodes=3))
    assert {record.zone for node in lab.store.nodes() if (record := node.record())} == {"us-a"}
    assert local_controls.zones(lab.home)[0].spot_live == 3
    with pytest.raises(CapacityError, match="for 2 nodes"):
        lab.cloud.launch(lab.order(number=2))
    assert [folder.token for folder in lab.store.folders()] == ["chat-1"]
    lab.cloud.launch(lab.order(number=3, num_nodes=1))


def test_run_starts_when_setup_is_done_on_every_node(lab: Lab, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    setup = f"[ $SKYPILOT_NODE_RANK = 0 ] || while [ ! -e {gate} ]; do sleep 0.02; done; echo prepared"
    gang = lab.cloud.launch(lab.order("echo running; exec sleep 1000", setup=setup))
    eventually(lambda: lab.log(gang, 0) == "prepared\n", "the head has done its setup")
    lab.until(InstanceState.SETUP)
    looks = [(lab.listed().state, lab.log(gang, 0)) for _ in range(20)]
    assert set(looks) == {(InstanceState.SETUP, "prepared\n")}
    gate.touch()
    lab.until(InstanceState.RUNNING)
    eventually(lambda: lab.log(gang, 0) == lab.log(gang, 1) == "prepared\nrunning\n", "both run")


def test_requests_go_to_the_head(lab: Lab) -> None:
    serve = (
        'echo "node $SKYPILOT_NODE_RANK" > index.html; exec python3 -m http.server "$SKYSERVE_REPLICA_PORT"'
    )
    gang = lab.cloud.launch(lab.order(serve))
    eventually(lambda: answer(gang.endpoint or "") == "node 0", "the head answers")


# --- How they end -------------------------------------------------------------------------------------------


def test_terminate_ends_every_node(lab: Lab) -> None:
    gang = lab.cloud.launch(lab.order("trap '' TERM; while :; do sleep 0.1; done"))
    lab.until(InstanceState.RUNNING)
    hosts = [lab.host(rank) for rank in (0, 1)]
    lab.cloud.terminate(gang)
    assert lab.listed().state is InstanceState.TERMINATED
    assert all(map(has_ended, hosts))
    assert not [pid for rank in (0, 1) for pid in lab.processes(rank)]


@pytest.mark.parametrize("rank", [0, 1], ids=["the head", "the other"])
def test_when_run_exits_on_one_node_it_has_exited(lab: Lab, rank: int) -> None:
    lab.cloud.launch(lab.order(f"[ $SKYPILOT_NODE_RANK = {rank} ] && exit 3; exec sleep 1000"))
    assert lab.until(InstanceState.RUN_EXITED).message == f"node {rank}: `run` ended with exit code 3"
    eventually(lambda: bool(lab.processes(1 - rank)), "the other goes on until it is terminated")


def test_when_setup_fails_on_one_node_it_has_failed(lab: Lab) -> None:
    lab.cloud.launch(lab.order(setup="[ $SKYPILOT_NODE_RANK = 0 ] || { echo no disk; exit 1; }"))
    failed = lab.until(InstanceState.SETUP_FAILED)
    assert failed.message == "node 1: `setup` failed with exit code 1: no disk"


@pytest.mark.parametrize("rank", [0, 1], ids=["the head", "the other"])
def test_a_host_killed_hard_breaks_the_gang(lab: Lab, rank: int) -> None:
    lives(lab)
    lab.host(rank).kill()
    broken = lab.until(InstanceState.BROKEN)
    assert broken.message.startswith(f"node {rank} of 2 is gone: the host process died")
    eventually(lambda: not lab.processes(rank), "its processes are gone")
    assert lab.processes(1 - rank)


def test_a_market_with_room_for_half_a_gang_takes_its_last_node(lab: Lab) -> None:
    lab.cloud.launch(lab.order(num_nodes=1, number=2))
    lab.cloud.launch(lab.order())
    lab.until(InstanceState.RUNNING)
    local_controls.set_capacity(lab.home, "us-a", 2)
    assert lab.until(InstanceState.BROKEN).message == "node 1 of 2 is gone: the spot market took it"
    assert lab.listed("chat-2").state is InstanceState.RUNNING
    local_controls.set_capacity(lab.home, "us-a", 0)
    lab.until(InstanceState.PREEMPTED)


# --- What the controller makes of it --------------------------------------------------------------------------


def lives(lab: Lab) -> Replica:
    """The controller's row of the gang."""
    gang = lab.cloud.launch(lab.order())
    lab.until(InstanceState.RUNNING)
    eventually(lambda: all(map(lab.processes, (0, 1))), "run was started on both")
    return Replica(
        1,
        1,
        lab.offer(),
        ReplicaState.READY,
        0.0,
        0.0,
        instance_id=gang.id,
        endpoint=gang.endpoint,
        launched_at=0.0,
    )


@pytest.mark.parametrize(
    ("kill", "kind"),
    [
        pytest.param(lambda lab, rank: lab.host(rank).kill(), NodeLost, id="the machine of one node"),
        pytest.param(
            lambda lab, rank: [os.kill(pid, signal.SIGKILL) for pid in lab.processes(rank)],
            RunExited,
            id="the process of one node",
        ),
    ],
)
@pytest.mark.parametrize("rank", [0, 1], ids=["the head", "the other"])
def test_killing_one_ends_the_other(
    lab: Lab, rank: int, kill: Callable[[Lab, int], object], kind: type[NodeLost | RunExited]
) -> None:
    replica = lives(lab)

    def seen() -> list[object]:
        instances = {instance.id: instance for instance in lab.cloud.instances(OWNER)}
        return list(events_of([replica], instances, asked_at=1.0))

    assert seen() == []
    kill(lab, rank)
    eventually(lambda: seen() != [], "the controller learns of it")
    (event,) = seen()
    assert type(event) is kind
    call = CloudOperation("chat", "abcd", OperationKind.TERMINATE, replica)
    perform(call, lab.cloud, lab.order, FIRST, OWNER)
    assert not [pid for rank in (0, 1) for pid in lab.processes(rank)]
    assert lab.listed().state.is_gone


# --- Launches that are cut short ------------------------------------------------------------------------------


def spawn_the_last_and_die(folder: InstanceFolder, order: HostOrder) -> None:
    if folder.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    spawn_host(folder, order)


def launch_and_die(lab: Lab, order: LaunchOrder) -> int:
    """The exit code of a launcher that is killed between the nodes."""
    launcher = os.fork()
    if launcher == 0:
        try:
            LocalProvisioner(lab.home, spawn=spawn_the_last_and_die).launch(order)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])


def test_half_a_launch_is_made_whole_by_the_same_token(lab: Lab) -> None:
    order = lab.order()
    assert launch_and_die(lab, order) == -signal.SIGKILL
    half = lab.host(1)
    assert lab.listed().state is InstanceState.PENDING
    lab.cloud.launch(order)
    assert has_ended(half)
    lab.until(InstanceState.RUNNING)
    assert local_controls.zones(lab.home)[0].spot_live == 2


def test_half_a_launch_is_undone_by_the_next(lab: Lab) -> None:
    assert launch_and_die(lab, lab.order()) == -signal.SIGKILL
    half = lab.host(1)
    lab.cloud.launch(lab.order(number=2, num_nodes=4))  # there is room for it only without the half
    assert has_ended(half)
    assert [folder.token for folder in lab.store.folders()] == ["chat-2"]


def test_half_a_launch_can_be_terminated(lab: Lab) -> None:
    assert launch_and_die(lab, lab.order()) == -signal.SIGKILL
    half = lab.host(1)
    lab.cloud.terminate(lab.listed())
    assert has_ended(half)


def test_a_host_that_does_not_start_leaves_no_node_behind(lab: Lab) -> None:
    started: list[psutil.Process] = []

    def spawn(folder: InstanceFolder, order: HostOrder) -> None:
        if folder.rank == 0:
            raise OSError("no more processes")
        spawn_host(folder, order)
        started.append(psutil.Process(folder.host_pid()))

    with pytest.raises(TransientError, match="no more processes"):
        LocalProvisioner(lab.home, spawn=spawn).launch(lab.order())
    assert not lab.cloud.instances(OWNER)
    assert [has_ended(host) for host in started] == [True]


# --- A network of their own -----------------------------------------------------------------------------------


@pytest.fixture
def permitted() -> None:
    names = [local_net.namespace_name(f"i-gang{rank}0") for rank in (0, 1)]
    try:
        local_net.create_namespaces(names, IPv4Network("10.213.0.0/16"))
    except local_net.NotPermittedError as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")
    for name in names:
        local_net.remove_namespace(name)


def answer(url: str) -> str:
    try:
        with urlopen(url, timeout=5) as response:
            return str(response.read().decode().strip())
    except URLError:
        return ""


# The same port on every node; node 1 requests a word of node 0 and publishes what it received.
TALK = """
head=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
if [ $SKYPILOT_NODE_RANK = 0 ]; then echo "I am the head" > index.html; else
  until python3 -c "import urllib.request as u; print(u.urlopen('http://$head:8000').read().decode())" > index.html
  do sleep 0.1; done 2>/dev/null
fi
exec python3 -m http.server 8000
"""


@pytest.mark.usefixtures("permitted")
def test_nodes_with_a_fixed_port_have_addresses_of_their_own_and_reach_each_other(lab: Lab) -> None:
    gangs = [lab.cloud.launch(lab.order(TALK, number=number, port=8000)) for number in (1, 2)]
    hosts = [record.host for node in lab.store.nodes() if (record := node.record())]
    assert len(set(hosts)) == 4
    for host in hosts:
        eventually(lambda host=host: answer(f"http://{host}:8000") == "I am the head", host)  # type: ignore[misc]
    lab.cloud.terminate(gangs[0])
    assert answer(gangs[1].endpoint or "") == "I am the head"


def test_on_demand_nodes_are_not_preempted(lab: Lab) -> None:
    (on_demand,) = lab.cloud.offers(Requirements((Candidate(),), num_nodes=2))
    assert on_demand.capacity_type is CapacityType.ON_DEMAND
    assert (on_demand.price_usd_hour, on_demand.on_demand_usd_hour) == (2.0, 2.0)
