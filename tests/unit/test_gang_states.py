"""Several nodes, one replica: what a gang is, what it costs, and what its loss teaches."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest

from policies.model import CapacityType, NodeLost, Offer, Preempted, Replica, ReplicaState, Zone
from policies.placement import zone_backoff
from provisioners.multi_node import instance_of_nodes, state_of_nodes
from provisioners.offers.zone_offers import ZonePrices, offers_for
from provisioners.port.base import Candidate, Instance, InstanceState, Requirements
from skyserve_cli.controller.reconcile.mappers import order_of, requirements_of
from skyserve_cli.spec.model import ServiceSpec

I = InstanceState  # noqa: E741
ZONE = Zone("c", "r", "z")
SPOT = Offer(ZONE, "m", "L4", 1.0, CapacityType.SPOT, 0.3, 1.0)
NODE_STATES = [state for state in I if state is not I.BROKEN]


def nodes(*states: InstanceState, **more: Any) -> list[Instance]:
    head = Instance("i-0", "t", "me", "chat", 1, ZONE, CapacityType.SPOT, I.RUNNING, "http://head:1")
    return [
        replace(head, id=f"i-{rank}", endpoint=f"http://node{rank}:1", state=state, **more)
        for rank, state in enumerate(states)
    ]


# --- The state ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "gang"),
    [
        pytest.param([I.RUNNING, I.RUNNING], I.RUNNING, id="all run"),
        pytest.param([I.RUNNING, I.SETUP, I.PENDING], I.PENDING, id="as far as the slowest"),
        pytest.param([I.RUNNING, I.SETUP], I.SETUP, id="one still sets up"),
        pytest.param([I.SETUP, I.SETUP_FAILED], I.SETUP_FAILED, id="setup failed on one"),
        pytest.param([I.RUNNING, I.RUN_EXITED], I.RUN_EXITED, id="run exited on one"),
        pytest.param([I.RUNNING, I.PREEMPTED], I.BROKEN, id="one was preempted"),
        pytest.param([I.PENDING, I.PREEMPTED], I.BROKEN, id="one was preempted at boot"),
        pytest.param([I.RUNNING, I.TERMINATED], I.BROKEN, id="one was terminated"),
        pytest.param([I.RUNNING, I.STOPPING], I.BROKEN, id="one is being terminated"),
        pytest.param([I.SETUP, I.BROKEN], I.BROKEN, id="one will never start"),
        pytest.param([I.BROKEN, I.BROKEN], I.BROKEN, id="none will ever start"),
        pytest.param([I.RUN_EXITED, I.PREEMPTED], I.BROKEN, id="one exits because it lost its peer"),
        pytest.param([I.STOPPING, I.STOPPING], I.STOPPING, id="all are being terminated"),
        pytest.param([I.STOPPING, I.TERMINATED], I.STOPPING, id="the rest is being terminated"),
        pytest.param([I.STOPPING, I.PREEMPTED], I.STOPPING, id="the rest of a preempted one goes"),
        pytest.param([I.TERMINATED, I.TERMINATED], I.TERMINATED, id="all terminated"),
        pytest.param([I.TERMINATED, I.PREEMPTED], I.PREEMPTED, id="one preempted, then the rest ended"),
        pytest.param([I.PREEMPTED, I.PREEMPTED], I.PREEMPTED, id="all preempted"),
    ],
)
def test_what_a_gang_is(states: list[InstanceState], gang: InstanceState) -> None:
    for order in permutations(states):
        assert state_of_nodes(order) is gang


@pytest.mark.parametrize("state", NODE_STATES, ids=lambda s: s.value)
def test_nodes_of_one_mind_make_a_gang_of_that_mind(state: InstanceState) -> None:
    assert state_of_nodes([state] * 3) is state


def test_a_gang_is_gone_only_when_every_node_is() -> None:
    for states in product(NODE_STATES, repeat=3):
        assert state_of_nodes(states).is_gone is all(state.is_gone for state in states)


# --- The instance -------------------------------------------------------------------------------------------


def test_a_single_node_is_shown_as_it_is() -> None:
    (node,) = nodes(I.RUNNING, preempt_at=9.0, message="hello")
    assert instance_of_nodes([node]) is node


def test_a_gang_has_the_name_and_the_endpoint_of_its_head() -> None:
    gang = instance_of_nodes(nodes(I.RUNNING, I.SETUP))
    assert (gang.id, gang.endpoint, gang.state) == ("i-0", "http://node0:1", I.SETUP)


@pytest.mark.parametrize(
    ("states", "gang"), [((I.RUNNING, I.RUNNING), 20.0), ((I.PREEMPTED, I.TERMINATED), None)]
)
def test_a_notice_on_any_node_is_a_notice_of_the_gang(
    states: tuple[InstanceState, ...], gang: float | None
) -> None:
    head, worker = nodes(*states)
    noticed = [replace(head, preempt_at=30.0), replace(worker, preempt_at=20.0)]
    assert instance_of_nodes(noticed).preempt_at == gang
    assert instance_of_nodes([head, noticed[1]]).preempt_at == gang


def test_the_first_node_to_go_decides_and_nothing_is_announced_only_if_all_say_so() -> None:
    head, worker = nodes(I.RUNNING, I.RUNNING)
    for told, gang in (
        ((9.0, 5.0), 5.0),
        ((0.0, 5.0), 5.0),
        ((0.0, 0.0), 0.0),
        ((0.0, None), None),
        ((None, 5.0), 5.0),
    ):
        both = [replace(head, retire_at=told[0]), replace(worker, retire_at=told[1])]
        assert instance_of_nodes(both).retire_at == gang


@pytest.mark.parametrize(
    ("states", "message"),
    [
        pytest.param((I.RUNNING, I.RUN_EXITED), "node 1: exit 3", id="whose run exited"),
        pytest.param((I.SETUP_FAILED, I.SETUP), "node 0: exit 3", id="whose setup failed"),
        pytest.param((I.RUNNING, I.PREEMPTED), "node 1 of 2 is gone: exit 3", id="who is gone"),
        pytest.param(
            (I.PREEMPTED, I.RUNNING, I.PREEMPTED), "nodes 0, 2 of 3 are gone: exit 3", id="two gone"
        ),
    ],
)
def test_the_message_names_the_node(states: tuple[InstanceState, ...], message: str) -> None:
    assert instance_of_nodes(nodes(*states, message="exit 3")).message == message


# --- The price ----------------------------------------------------------------------------------------------


def test_a_replica_costs_what_its_nodes_cost() -> None:
    prices = [ZonePrices(ZONE, 0.3, 1.0)]
    asked = Candidate(accelerator="L4", accelerator_count=2.0, use_spot=True)
    (one,) = offers_for(Requirements((asked,)), prices, "m")
    (three,) = offers_for(Requirements((asked,), num_nodes=3), prices, "m")
    assert (one.price_usd_hour, one.on_demand_usd_hour) == (0.6, 2.0)
    assert three == replace(one, price_usd_hour=1.8, on_demand_usd_hour=6.0)


@pytest.mark.parametrize(
    ("limit", "offered"), [(0.3, 1), (0.29, 0)], ids=["a node fits", "a node is too dear"]
)
def test_the_price_limit_is_of_a_node(limit: float, offered: int) -> None:
    need = Requirements((Candidate(use_spot=True, max_hourly_cost=limit),), num_nodes=4)
    assert len(offers_for(need, [ZonePrices(ZONE, 0.3, 1.0)], "m")) == offered


# --- From the spec, and back to placement ---------------------------------------------------------------------


def test_the_number_of_nodes_reaches_the_cloud() -> None:
    spec = ServiceSpec("chat", "serve", num_nodes=2)
    replica = Replica(1, 1, SPOT, ReplicaState.REQUESTED, 0.0, 0.0)
    assert requirements_of(spec).num_nodes == 2
    assert order_of("me", "chat", "abcd", replica, spec, {}).num_nodes == 2


@pytest.mark.parametrize(
    ("offer", "preempt_at", "counted"),
    [
        pytest.param(SPOT, None, True, id="spot"),
        pytest.param(SPOT, 9.0, False, id="spot, and the notice was counted"),
        pytest.param(replace(SPOT, capacity_type=CapacityType.ON_DEMAND), None, False, id="on demand"),
    ],
)
def test_a_lost_node_teaches_what_a_preemption_teaches(
    offer: Offer, preempt_at: float | None, counted: bool
) -> None:
    replica = Replica(1, 1, offer, ReplicaState.READY, 0.0, 0.0, preempt_at=preempt_at, ready_at=0.0)
    learned = [
        zone_backoff.learn({}, [event], {1: replica}, 100.0)
        for event in (NodeLost(1), Preempted(1, message="taken"))
    ]
    assert learned[0] == learned[1]
    assert bool(learned[0]) is counted
