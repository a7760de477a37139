"""The tick and the load balancer agents on machines of their own: rows before machines, and who goes last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from lb.config.demand import Demand
from policies.goals import AgentRegion
from policies.history import Load
from policies.model import Event, Launched, ProbePassed, Replica, ReplicaState, Role, Terminated
from policies.regions.ownership import NO_DISTANCES, Distances
from provisioners.port.base import InstanceState
from skyserve_cli.controller.reconcile.inputs import BalancerPorts
from skyserve_cli.controller.reconcile.ports import NameOrder, OperationKind, RegionalOrder
from skyserve_cli.spec.model import DnsName, RegionalAgents
from tests.unit.test_controller_reconciler import SPEC, Killed, World, a_replica

S = ReplicaState
HERE = RegionalAgents((AgentRegion("sky", "r"),))
NAMED = replace(HERE, dns=DnsName("example.com.", "chat"))


@dataclass
class RegionalWorld(World):
    """With hands for agents and names."""

    regional: Sequence[RegionalOrder] = ()
    names: Sequence[NameOrder] = ()
    settled: set[tuple[str, int]] = field(default_factory=set)  # (name, how many addresses)
    reported: list[Load] = field(default_factory=list)
    distances: Distances = NO_DISTANCES

    def balancers(self) -> BalancerPorts:
        return replace(super().balancers(), regional=_Regional(self), names=_Names(self))

    def agent(self) -> Replica:
        (found,) = self.row().balancers
        return found

    def agent_calls(self) -> str:
        """ "launch 3" """
        calls = [call for call in self.calls if call.replica.role is Role.LOAD_BALANCER]
        return " ".join(f"{call.kind.value} {call.replica.id}" for call in calls)


@dataclass
class _Regional:
    world: RegionalWorld

    def ensure(self, orders: Sequence[RegionalOrder]) -> None:
        self.world.told("agents")
        self.world.regional = orders

    def drain(self) -> Sequence[tuple[str, Event]]:
        return ()

    def loads(self, service: str) -> Sequence[Load]:
        return self.world.reported

    def demands(self, service: str) -> Sequence[Demand | None]:
        return [None for _ in self.world.reported]

    def distances(self, service: str) -> Distances:
        return self.world.distances


@dataclass
class _Names:
    world: RegionalWorld

    def ensure(self, orders: Sequence[NameOrder]) -> None:
        self.world.names = orders

    def is_settled(self, order: NameOrder) -> bool:
        return (order.name, len(order.agents)) in self.world.settled


def a_world(regional: RegionalAgents = HERE) -> RegionalWorld:
    world = RegionalWorld()
    world.up(replace(SPEC, regional=regional))
    return world


@pytest.fixture
def world() -> Iterator[RegionalWorld]:
    made = a_world()
    yield made
    made.store.close()


def an_agent(agent_id: int, state: ReplicaState = S.READY) -> Replica:
    return a_replica(agent_id, state, role=Role.LOAD_BALANCER)


def test_an_intent_is_in_the_store_before_any_hand_is_told_and_none_stands_beside_the_controller(
    world: RegionalWorld,
) -> None:
    world.reconciler().tick()
    assert world.log == ["tables", "agents", "probes", "calls", "watch"]
    (row,) = world.rows_at["agents"]
    assert [(agent.state, agent.zone.region) for agent in row.balancers] == [(S.REQUESTED, "r")]
    assert world.agent_calls() == "launch 3"
    assert world.row().memory.next_replica_id == 4
    assert world.agents == {}


@pytest.mark.parametrize("hand", ["tables", "agents", "probes", "calls", "watch"])
def test_a_controller_killed_after_the_commit_does_not_launch_a_second_one(
    world: RegionalWorld, hand: str
) -> None:
    world.die_at = hand
    with pytest.raises(Killed):
        world.reconciler().tick()
    before = world.row()
    world.die_at = ""
    world.lists()
    world.reconciler().tick()
    assert world.row() == before
    assert world.agent_calls() == "launch 3"


def test_an_agent_comes_up_step_by_step_and_is_no_replica(world: RegionalWorld) -> None:
    reconciler = world.reconciler()
    reconciler.tick()
    world.lists()
    world.happens(Launched(3, "i-3"))
    reconciler.tick()
    assert (world.agent().state, world.regional) == (S.PROVISIONING, [])
    world.time += 1
    world.lists(world.instance_of(world.agent(), endpoint="http://192.0.2.3:8000"))
    reconciler.tick()
    assert world.agent().state is S.STARTING
    (order,) = world.regional
    assert (order.replica_id, order.port, order.instance.id, order.passing) == (3, 8000, "i-3", None)
    assert world.probes == []
    world.happens(ProbePassed(3))
    reconciler.tick()
    assert world.agent().state is S.READY
    assert [order.passing for order in world.regional] == [True]
    assert [target.id for target in world.regional[0].table.targets] == []
    assert "AgentProbePassed 3" in world.story()


def test_an_agent_whose_machine_is_lost_is_followed_by_another(world: RegionalWorld) -> None:
    world.has(a_replica(1), a_replica(2), an_agent(3))
    world.lists(*[world.instance_of(one) for one in world.row().replicas])
    world.reconciler().tick()
    assert [(agent.id, agent.state) for agent in world.row().balancers] == [(50, S.REQUESTED)]
    assert len(world.row().replicas) == 2
    assert world.abandoned == []


def test_an_agent_that_nobody_attends_is_attended(world: RegionalWorld) -> None:
    world.has(a_replica(1), a_replica(2), an_agent(3))
    agent = world.agent()
    replicas = [world.instance_of(one) for one in world.row().replicas]
    world.lists(*replicas, world.instance_of(agent, InstanceState.UNSUPERVISED))
    world.reconciler().tick()
    assert [(call.kind, call.replica.id) for call in world.calls] == [(OperationKind.ATTEND, 3)]


def test_agents_go_last(world: RegionalWorld) -> None:
    world.has(a_replica(1), an_agent(3))
    world.store.set_down("chat", purge=True, now=world.time)
    reconciler = world.reconciler()
    reconciler.tick()  # it drains, which takes no time
    reconciler.tick()
    assert (world.fleet(), world.agent().state) == ("1:TERMINATING", S.READY)
    world.happens(Terminated(1))
    reconciler.tick()
    assert (world.fleet(), world.agent().state) == ("", S.TERMINATING)
    assert world.agent_calls() == "terminate 3"
    world.happens(Terminated(3))
    reconciler.tick()
    assert world.store.services() == []


def test_an_agent_does_not_end_before_its_name_has() -> None:
    world = a_world(NAMED)
    world.has(an_agent(3))
    world.settled = {("chat.example.com.", 1)}
    world.store.set_down("chat", purge=False, now=world.time)
    reconciler = world.reconciler()
    reconciler.tick()
    assert [order.agents for order in world.names] == [()]
    assert world.agent().state is S.READY
    world.settled = {("chat.example.com.", 0)}
    reconciler.tick()
    assert world.agent().state is S.TERMINATING
    world.store.close()


def test_the_name_means_the_agents_that_serve() -> None:
    world = a_world(NAMED)
    world.has(replace(an_agent(3), endpoint="http://192.0.2.3:8000"), an_agent(4, S.STARTING))
    world.reconciler().tick()
    (order,) = world.names
    (named,) = order.agents
    assert (order.name, named[:2], named[2].address) == ("chat.example.com.", ("sky", "r"), "192.0.2.3")
    world.store.close()


def test_trouble_with_a_service_leaves_its_agents_alone(world: RegionalWorld) -> None:
    world.has(a_replica(1), a_replica(2), an_agent(3))
    everything = [world.instance_of(one) for one in world.row().attempts]
    reconciler = world.reconciler()
    for broken in (set[str](), {"chat"}, {"chat"}, {"chat"}):
        world.broken = broken
        world.lists(*everything)
        reconciler.tick()
        assert [order.replica_id for order in world.regional] == [3]
    assert world.abandoned == []


def test_an_update_into_regions_keeps_the_agent_beside_the_controller_until_one_is_ready() -> None:
    world = RegionalWorld()
    world.up()
    world.has(a_replica(1), a_replica(2))
    world.up(replace(SPEC, regional=HERE), mode=world.row().update_mode)
    world.lists(*[world.instance_of(one) for one in world.row().replicas])
    reconciler = world.reconciler()
    reconciler.tick()
    assert list(world.agents) == ["chat"]
    agent = replace(
        world.agent(), state=S.READY, instance_id="i-50", launched_at=950.0, endpoint="http://192.0.2.3:1"
    )
    world.has(agent, memory=world.row().memory)
    reconciler.tick()
    assert world.agents == {}
    assert len(world.regional) == 1
    world.store.close()


def test_what_agents_report_is_the_load(world: RegionalWorld) -> None:
    world.has(a_replica(1, S.DRAINING, drain_by=5000.0), a_replica(2), an_agent(3))
    world.lists(*[world.instance_of(one) for one in world.row().attempts])
    world.reported = [Load(known=True, empty=frozenset({1}))]
    world.reconciler().tick()
    assert "1:TERMINATING" in world.fleet()


def test_what_was_learned_of_a_failure_is_kept_though_offers_are_not_known(world: RegionalWorld) -> None:
    world.has(a_replica(1), a_replica(2), an_agent(3))
    world.lists(*[world.instance_of(one) for one in world.row().attempts])
    reconciler = world.reconciler()
    reconciler.tick()
    world.offers = None
    broken = world.instance_of(world.agent(), InstanceState.RUN_EXITED)
    world.lists(*[world.instance_of(one) for one in world.row().replicas], broken)
    reconciler.tick()
    assert world.agent().state is S.TERMINATING
    assert "sky/r" in world.row().memory.balancers["pauses"]
