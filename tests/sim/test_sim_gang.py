"""Replicas of several nodes under the production controller, in virtual time."""

from __future__ import annotations

import random

import pytest

from policies.goals import ScalingGoal
from policies.model import EndReason, ReplicaState, Zone
from provisioners.port.base import Candidate, Instance, InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import CapacityError
from skyserve_cli.spec.model import Probe, ResourceChoice, ServiceSpec
from tests.kit.clock import SimClock
from tests.kit.fault_cloud import Faults, SimCloud, SimZone
from tests.kit.life import Life, run_seed

CALM = Faults(slow_call_s=1.0)


def life_of_gangs(replicas: int, num_nodes: int, room: int = 20) -> Life:
    life = Life(7, CALM)
    for place in life.cloud.zones:
        place.spot_capacity = room
    spec = ServiceSpec(
        name="chat",
        run="serve",
        probe=Probe(path="/health", initial_delay_s=120.0, failure_threshold_s=30.0),
        scaling=ScalingGoal(replicas, replicas),
        drain_timeout_s=30.0,
        resources=(ResourceChoice(cloud="sim", use_spot=True),),
        num_nodes=num_nodes,
    )
    life.put(spec)
    return life


def settle(life: Life, count: int) -> None:
    for _ in range(300):
        states = [replica.state for replica in life.row("chat").replicas]
        if states == [ReplicaState.READY] * count:
            return
        life.run_for(2.0, 2.0)
    pytest.fail(f"never {count} ready: {life.row('chat').replicas}")


@pytest.mark.parametrize("notice_s", [0.0, 60.0], ids=["without notice", "with notice"])
def test_a_gang_that_loses_a_node_goes_and_is_replaced_whole(notice_s: float) -> None:
    life = life_of_gangs(2, num_nodes=2)
    settle(life, 2)
    victim = life.row("chat").replicas[0]
    assert victim.instance_id is not None
    life.cloud.preempt(victim.instance_id, notice_s, one_node=True)
    life.run_for(notice_s + 30.0, 1.0)
    settle(life, 2)
    assert [replica.id for replica in life.row("chat").replicas] == [2, 3]
    ended = next(replica for replica in life.store.replicas("chat") if replica.id == victim.id)
    assert (ended.state, ended.end_reason) == (ReplicaState.GONE, EndReason.PREEMPTED)
    assert sum(one.nodes(life.clock.now()) for one in life.cloud.alive()) == 4
    life.invariants.bill()


def test_gangs_that_fit_nowhere_are_not_launched_by_halves() -> None:
    life = life_of_gangs(1, num_nodes=3, room=2)
    life.run_for(120.0, 2.0)
    assert not life.cloud.made
    life.cloud.zones[0].spot_capacity = 3
    life.run_for(400.0, 2.0)
    settle(life, 1)
    assert [one.order.num_nodes for one in life.cloud.alive()] == [3]


@pytest.mark.long
def test_lives_of_trouble_have_gangs_that_lose_nodes() -> None:
    stories = [run_seed(seed).story for seed in range(100, 106)]
    assert any(" NodeLost TERMINATING " in line for story in stories for line in story)


# --- The cloud of it ----------------------------------------------------------------------------------------


class World:
    """One zone with room for three spot nodes."""

    def __init__(self) -> None:
        self.clock = SimClock()
        zone = SimZone(Zone("sim", "r", "z"), spot_usd_hour=0.3, on_demand_usd_hour=1.0, spot_capacity=3)
        self.cloud = SimCloud(self.clock, random.Random(1), [zone])

    def launch(self, number: int, num_nodes: int) -> Instance:
        offer = self.cloud.offers(Requirements((Candidate(use_spot=True),), num_nodes=num_nodes))[0]
        return self.cloud.launch(
            LaunchOrder(f"t-{number}", "me", "chat", number, 1, offer, None, "run", num_nodes=num_nodes)
        )

    def state(self, number: int) -> InstanceState:
        return next(one.state for one in self.cloud.instances("me") if one.token == f"t-{number}")

    def later(self, seconds: float) -> None:
        self.clock.advance(self.clock.now() + seconds)


def test_nodes_take_places_and_a_broken_gang_holds_those_it_has_left() -> None:
    world = World()
    gang = world.launch(1, 2)
    with pytest.raises(CapacityError):
        world.launch(2, 2)
    world.launch(3, 1)
    world.cloud.preempt(gang.id, one_node=True)
    assert world.state(1) is InstanceState.BROKEN
    world.launch(4, 1)
    with pytest.raises(CapacityError):
        world.launch(5, 1)
    world.cloud.terminate(gang)
    assert world.state(1).is_gone
    world.launch(5, 1)


def test_each_node_is_paid_for_as_long_as_it_lives() -> None:
    world = World()
    gang = world.launch(1, 2)
    world.later(3600.0)
    assert world.cloud.ledger_usd() == pytest.approx(0.6)
    world.cloud.preempt(gang.id, one_node=True)
    world.later(3600.0)
    assert world.cloud.ledger_usd() == pytest.approx(0.9)
    world.cloud.terminate(gang)
    world.later(3600.0)
    assert world.cloud.ledger_usd() == pytest.approx(0.9)


def test_what_is_broken_cannot_be_made_whole_by_another_preemption() -> None:
    world = World()
    gang = world.launch(1, 2)
    world.cloud.preempt(gang.id, one_node=True)
    world.later(10.0)
    world.cloud.preempt(gang.id, notice_s=100.0)
    assert world.state(1) is InstanceState.BROKEN
