"""A replica over machines: launched whole or not at all, supervised, found again, never leaked."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate

import pytest

from policies.model import CapacityType, Offer, Zone
from provisioners.cloud_clock import CloudClock
from provisioners.contract.memory_hosts import MemoryHosts
from provisioners.port.base import Candidate, Instance, InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import (
    CapacityError,
    InvalidRequestError,
    ProvisionError,
    RegionClosedError,
    TransientError,
)
from provisioners.port.host_port import HostReport
from provisioners.port.regions import CLOSED_S
from provisioners.port.vm import Machine, MachineState
from provisioners.vm_provisioner import VmProvisioner, state_of
from tests.clouds.memory_machines import (
    CLOUD,
    ZONES,
    KilledError,
    MemoryMachines,
    Trouble,
    lost,
    order_of,
)

_S = InstanceState


class MemoryFleet(VmProvisioner):
    name = CLOUD


class World:
    def __init__(self) -> None:
        self.time = 1000.0
        self.machines = MemoryMachines(self.now)
        self.hosts = MemoryHosts(self.now)
        self.fleet = self.restarted()

    def now(self) -> float:
        return self.time

    def restarted(self) -> VmProvisioner:
        """The process has died: everything it knew is gone, and the cloud is as it was."""
        self.hosts = MemoryHosts(self.now)
        self.fleet = MemoryFleet(self.machines, self.hosts, order_of, lambda need: (), self.now)
        return self.fleet

    def order(self, replica_id: int = 1, num_nodes: int = 1, zone: Zone = ZONES[0]) -> LaunchOrder:
        offer = Offer(zone, "g1", "L4", 1.0, CapacityType.SPOT, 0.3)
        token = f"own-chat-{replica_id}"
        return LaunchOrder(
            token, "own", "chat", replica_id, 1, offer, None, "exec run", 8080, num_nodes=num_nodes
        )

    def one(self) -> Instance:
        return next(one for one in self.fleet.instances("own") if one.replica_id == 1)


@pytest.fixture
def w() -> World:
    return World()


def test_from_launch_to_running(w: World) -> None:
    assert w.fleet.launch(w.order()).state is _S.PENDING
    w.time += 30
    assert w.one().state is _S.SETUP
    w.time += 60
    assert (w.one().state, w.one().endpoint) == (_S.RUNNING, "http://10.0.0.1:8080")


def test_a_cloud_is_listed_less_often_while_nothing_comes_or_goes(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryFleet, "steady_poll_s", 30.0)
    told: list[float] = []
    w.fleet.on_report(lambda: told.append(w.fleet.poll_s()))
    assert w.fleet.poll_s() == 30.0
    instance = w.fleet.launch(w.order())
    assert told == [10.0]  # a thread that waits for the next listing is notified that it is due sooner
    w.time += 61.0
    w.fleet.instances("own")
    assert w.fleet.poll_s() == 30.0
    w.fleet.terminate(instance)
    w.fleet.instances("own")
    assert w.fleet.poll_s() == 30.0  # the dead are listed for a while, and need no haste


def test_after_a_restart_the_order_is_asked_for_again(w: World) -> None:
    w.fleet.launch(w.order())
    w.time += 100
    assert w.one().state is _S.SETUP
    w.restarted()
    assert w.one().state is _S.UNSUPERVISED
    assert w.fleet.launch(w.order()).id == "m-1"
    assert w.one().state is _S.SETUP
    assert w.machines.live() == ["own-chat-1"]


def test_nodes_are_attended_together_and_know_each_other(w: World) -> None:
    w.fleet.launch(w.order(num_nodes=3))
    w.time += 30
    assert w.one().state is _S.SETUP
    assert {ips for _, ips, _ in w.hosts.supervised.values()} == {
        ("192.168.0.1", "192.168.0.2", "192.168.0.3")
    } or len({ips for _, ips, _ in w.hosts.supervised.values()}) == 1
    assert sorted(w.hosts.supervised) == ["own-chat-1", "own-chat-1-n1", "own-chat-1-n2"]


def test_a_gang_that_cannot_be_completed_is_given_back(w: World) -> None:
    w.machines.room["us-a", CapacityType.SPOT] = 2
    with pytest.raises(CapacityError):
        w.fleet.launch(w.order(num_nodes=3))
    assert not w.machines.live()


def test_a_gang_whose_giving_back_fails_is_tried_again(w: World) -> None:
    w.machines.room["us-a", CapacityType.SPOT] = 2

    def stuck(call: str, token: str) -> None:
        if call == "destroy":
            raise lost()

    w.machines.before = stuck
    with pytest.raises(TransientError, match="not destroyed yet"):
        w.fleet.launch(w.order(num_nodes=3))
    w.machines.before = lambda call, token: None
    with pytest.raises(CapacityError):
        w.fleet.launch(w.order(num_nodes=3))
    assert not w.machines.live()


def test_a_gang_that_loses_a_machine_is_broken_and_goes_whole(w: World) -> None:
    w.fleet.launch(w.order(num_nodes=2))
    w.time += 100
    w.machines.take("own-chat-1-n1")
    broken = w.one()
    assert broken.state is _S.BROKEN
    assert "node 1 of 2 is gone" in broken.message
    w.fleet.terminate(broken)
    assert not w.machines.live()
    assert w.one().state is _S.PREEMPTED


def test_what_a_late_list_leaves_out_is_not_gone(w: World) -> None:
    w.machines.late_s = 20
    w.fleet.launch(w.order())
    assert w.one().state is _S.PENDING
    w.time += 100
    assert w.one().state is _S.SETUP


def test_what_a_late_list_leaves_out_is_destroyed_all_the_same(w: World) -> None:
    w.machines.late_s = 20
    launched = w.fleet.launch(w.order())
    w.restarted().terminate(launched)
    assert not w.machines.live()


def test_nobody_attends_what_is_terminated(w: World) -> None:
    w.fleet.launch(w.order(num_nodes=2))
    w.time += 100
    w.fleet.terminate(w.one())
    assert not w.hosts.supervised
    assert w.one().state is _S.TERMINATED
    assert not w.hosts.supervised


def test_nobody_attends_what_the_cloud_has_forgotten(w: World) -> None:
    w.fleet.launch(w.order())
    w.time += 100
    assert w.one().state is _S.SETUP
    w.machines.kept.clear()
    assert not w.fleet.instances("own")
    assert not w.hosts.supervised


def test_the_earliest_notice_stands(w: World) -> None:
    w.fleet.launch(w.order())
    w.time += 100
    assert w.one().preempt_at is None
    w.hosts.reports["own-chat-1"] = HostReport(_S.RUNNING, 8080, preempt_at=2000.0)
    w.machines.kept["own-chat-1"].preempt_at = 1900.0
    assert w.one().preempt_at == 1900.0


class MachinesWithClock(MemoryMachines):
    """Whose cloud has a clock."""

    cloud_clock: CloudClock


def test_notices_are_by_our_clock() -> None:
    """Those of the cloud, and those of the machine, which has the cloud's."""
    w = World()
    w.machines = MachinesWithClock(w.now)
    w.machines.cloud_clock = CloudClock(w.now)
    w.restarted()
    w.fleet.launch(w.order())
    w.time += 100
    w.machines.cloud_clock.set_from_header(formatdate(w.now() + 60.0, usegmt=True))
    w.machines.kept["own-chat-1"].preempt_at = 1900.0
    told = w.one().preempt_at
    assert told == pytest.approx(1840.0, abs=1.0)
    w.hosts.reports["own-chat-1"] = HostReport(_S.RUNNING, 8080, preempt_at=1800.0)
    assert w.one().preempt_at == pytest.approx(1740.0, abs=1.0)
    assert "60 s behind" in w.fleet.clock_warning()


def test_without_a_cloud_that_tells_the_time_there_is_no_warning(w: World) -> None:
    assert w.fleet.clock_warning() == ""


def test_reports_are_read_without_a_call_to_the_cloud(w: World) -> None:
    calls: list[int] = []
    w.fleet.launch(w.order())
    w.fleet.on_report(lambda: calls.append(1))
    w.time += 100
    assert w.one().state is _S.SETUP
    w.machines.kept.clear()  # a listing would show nothing
    w.hosts.set_report("own-chat-1", HostReport(_S.RUNNING, 8080, preempt_at=2000.0))
    (seen,) = w.fleet.reported("own")
    assert (seen.state, seen.preempt_at, calls) == (_S.RUNNING, 2000.0, [1])


def test_a_gang_that_was_listed_in_part_is_not_reported(w: World) -> None:
    """Its other nodes may have come since: no report may call them lost."""
    w.fleet.launch(w.order(num_nodes=2))
    w.restarted()
    w.machines.kept.pop("own-chat-1-n1")
    assert w.one().state is _S.BROKEN
    assert w.fleet.reported("own") == []


def test_a_failed_setup_says_why(w: World) -> None:
    w.fleet.launch(w.order())
    w.time += 100
    w.hosts.reports["own-chat-1"] = HostReport(_S.SETUP_FAILED, 8080, "setup: pip: no such package")
    w.one()
    assert (w.one().state, w.one().message) == (_S.SETUP_FAILED, "setup: pip: no such package")


@pytest.mark.parametrize(
    ("token", "zone"),
    [("../up", ZONES[0]), ("x" * 59, ZONES[0]), ("ok", Zone("aws", "us", "us-a"))],
    ids=["no token", "too long", "another cloud's zone"],
)
def test_orders_that_are_refused(w: World, token: str, zone: Zone) -> None:
    with pytest.raises(InvalidRequestError):
        w.fleet.launch(replace(w.order(zone=zone), token=token))
    assert not w.machines.live()


@pytest.mark.parametrize(
    ("state", "report", "awaited", "expected"),
    [
        (MachineState.PENDING, None, True, _S.PENDING),
        (MachineState.PENDING, None, False, _S.PENDING),
        (MachineState.RUNNING, None, True, _S.PENDING),
        (MachineState.RUNNING, None, False, _S.UNSUPERVISED),
        (MachineState.RUNNING, HostReport(_S.SETUP, 1), False, _S.SETUP),
        (MachineState.RUNNING, HostReport(_S.RUN_EXITED, 1), True, _S.RUN_EXITED),
        (MachineState.STOPPING, None, True, _S.STOPPING),
        (MachineState.PREEMPTED, None, True, _S.PREEMPTED),
        (MachineState.TERMINATED, None, True, _S.TERMINATED),
        (MachineState.FAILED, None, True, _S.BROKEN),
    ],
)
def test_two_truths_one_state(
    state: MachineState, report: HostReport | None, awaited: bool, expected: InstanceState
) -> None:
    machine = Machine("m", "t", "o", "s", 1, 0, 1, ZONES[0], CapacityType.SPOT, state)
    assert state_of(machine, report, awaited)[0] is expected


@pytest.mark.parametrize("seed", range(40))
def test_whenever_the_process_dies_or_an_answer_is_lost_nothing_is_left_and_nothing_is_doubled(
    seed: int,
) -> None:
    """Launch until a response arrives, terminate until a response arrives, over crashes and lost responses at random calls."""
    rng = random.Random(seed)
    w = World()
    order = w.order(num_nodes=rng.choice([1, 2, 3]))

    def trouble() -> Trouble:
        kind: Callable[[], BaseException] = rng.choice([lost, KilledError])
        return Trouble(rng.randrange(6), kind)

    def insist(call: Callable[[], object]) -> None:
        for _ in range(20):
            w.machines.before, w.machines.after = trouble(), trouble()
            try:
                call()
                return
            except ProvisionError:
                w.time += 5
            except KilledError:
                w.restarted()
            w.machines.before = w.machines.after = lambda name, token: None
        call()

    insist(lambda: w.fleet.launch(order))
    w.machines.before = w.machines.after = lambda name, token: None
    assert len(w.machines.live()) == order.num_nodes
    w.time += 200
    if w.one().state is _S.UNSUPERVISED:
        w.fleet.launch(order)
    assert w.one().state in (_S.SETUP, _S.RUNNING)
    found = w.one()
    insist(lambda: w.fleet.terminate(found))
    assert not w.machines.live()
    assert w.one().state is _S.TERMINATED


def test_a_silent_region_is_named_and_what_was_there_is_not_forgotten(w: World) -> None:
    w.fleet.launch(w.order(1))
    w.fleet.launch(w.order(2, zone=ZONES[2]))
    w.time += 100.0
    w.fleet.listing("own")
    w.machines.mute = {"eu"}
    listing = w.fleet.listing("own")
    assert [one.replica_id for one in listing.instances] == [1]
    assert set(listing.silent) == {"eu"}
    assert {one.replica_id for one in w.fleet.reported("own")} == {1, 2}
    with pytest.raises(TransientError):
        w.fleet.instances("own")
    w.machines.mute = set()
    assert {one.replica_id for one in w.fleet.listing("own").instances} == {1, 2}


def test_a_gang_half_of_which_is_silent_is_not_broken(w: World) -> None:
    w.fleet.launch(w.order(1, num_nodes=2))
    w.time += 100.0
    w.machines.mute = {"us"}
    assert w.fleet.listing("own").instances == []
    w.machines.mute = set()
    assert w.one().state is not InstanceState.BROKEN


def test_a_closed_region_is_left_out_of_offers_for_an_hour(w: World) -> None:
    offers = [w.order(zone=zone).offer for zone in ZONES]
    w.fleet = MemoryFleet(w.machines, w.hosts, order_of, lambda need: offers, w.now)
    need = Requirements((Candidate(),))

    def closed(call: str, token: str) -> None:
        raise RegionClosedError("a policy forbids it", cloud="memory", region="us")

    w.machines.before = closed
    with pytest.raises(RegionClosedError):
        w.fleet.launch(w.order())
    assert [one.zone.region for one in w.fleet.offers(need)] == ["eu"]
    assert w.fleet.listing("own").closed == {"us": "a policy forbids it"}
    w.time += CLOSED_S
    assert w.fleet.offers(need) == offers
