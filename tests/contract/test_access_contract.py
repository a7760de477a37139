"""Who may open which port of rented machines: every cloud, by its SDK, against a server that is as strict as the cloud."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from policies.model import Role
from provisioners.port.errors import TransientError
from provisioners.port.firewall import ANYWHERE, FirewallAccess, Opening, openings
from provisioners.port.vm import MachineOrder, Machines
from tests.contract.contract_access import OWNER, WALLED, Walled

pytestmark = pytest.mark.long

HERE, THERE = "203.0.113.7/32", "203.0.113.99/32"
AGENT, MOVED, OTHER = "198.51.100.1/32", "198.51.100.2/32", "198.51.100.3/32"


@pytest.fixture(params=sorted(WALLED))
def cloud(request: pytest.FixtureRequest) -> Iterator[Walled]:
    made = WALLED[request.param]()
    yield made
    made.close()


def access(*sources: str, **balancers: str) -> FirewallAccess:
    return FirewallAccess(
        frozenset(sources), {service: frozenset({block}) for service, block in balancers.items()}
    )


def on_replica(access: FirewallAccess, service: str = "chat") -> frozenset[Opening]:
    return openings(access, service, (8000,), ())


def test_nothing_is_open_before_somebody_is_admitted(cloud: Walled) -> None:
    cloud.machines().create(cloud.order("t-1"))
    assert cloud.open("t-1") == frozenset()


def test_only_the_controller_and_the_services_load_balancers_open_the_port(cloud: Walled) -> None:
    machines, admitted = cloud.machines(), access(HERE, chat=AGENT, other=OTHER)
    machines.create(cloud.order("t-1"))
    machines.admit(OWNER, admitted)
    machines.create(cloud.order("t-2"))
    machines.create(cloud.order("t-3", service="other"))
    chat = {Opening(22, HERE), Opening(8000, HERE), Opening(8000, AGENT)}
    assert cloud.open("t-1") == cloud.open("t-2") == chat
    assert cloud.open("t-3") == {Opening(22, HERE), Opening(8000, HERE), Opening(8000, OTHER)}


def test_a_load_balancers_own_port_is_open_to_all_and_its_ssh_is_not(cloud: Walled) -> None:
    machines = cloud.machines()
    machines.admit(OWNER, access(HERE, chat=AGENT))
    machines.create(cloud.order("t-1"))
    machines.create(cloud.order("lb", role=Role.LOAD_BALANCER))
    assert cloud.open("lb") == {Opening(22, HERE), Opening(8000, ANYWHERE)}
    assert Opening(8000, ANYWHERE) not in cloud.open("t-1"), "the same port, in the same region"


def test_rules_follow_load_balancers_that_come_move_and_go(cloud: Walled) -> None:
    machines = cloud.machines()
    machines.create(cloud.order("t-1"))
    for now in (access(HERE), access(HERE, chat=AGENT), access(HERE, chat=MOVED), access(HERE)):
        machines.admit(OWNER, now)
        assert cloud.open("t-1") == on_replica(now)


def test_a_controller_with_another_address_gets_in_and_the_old_address_does_not(cloud: Walled) -> None:
    cloud.machines().create(cloud.order("t-1", sources=(HERE,)))
    assert cloud.open("t-1") == on_replica(access(HERE))
    cloud.machines().admit(OWNER, access(THERE, chat=AGENT))
    assert cloud.open("t-1") == on_replica(access(THERE, chat=AGENT))


def test_everybody_is_let_in_where_the_configuration_says_so(cloud: Walled) -> None:
    machines = cloud.machines()
    machines.admit(OWNER, access(ANYWHERE, chat=AGENT))
    machines.create(cloud.order("t-1", sources=(ANYWHERE,)))
    assert cloud.open("t-1") == {Opening(22, ANYWHERE), Opening(8000, ANYWHERE)}


def test_what_is_as_it_should_be_is_not_written_again(cloud: Walled) -> None:
    machines = cloud.machines()
    machines.create(cloud.order("t-1"))
    machines.admit(OWNER, access(HERE, chat=AGENT))
    before = cloud.writes
    for again in (machines, cloud.machines()):
        again.admit(OWNER, access(HERE, chat=AGENT))
    assert cloud.writes == before


def test_what_somebody_opened_by_hand_is_closed(cloud: Walled) -> None:
    machines = cloud.machines()
    machines.create(cloud.order("t-1"))
    machines.admit(OWNER, access(HERE))
    cloud.widen()
    assert Opening(8000, ANYWHERE) in cloud.open("t-1")
    machines.admit(OWNER, access(HERE))
    assert cloud.open("t-1") == on_replica(access(HERE))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_controller_that_dies_at_any_call_leaves_nothing_that_the_next_does_not_put_right(
    cloud: Walled, after: bool
) -> None:
    machines = cloud.machines()
    machines.create(cloud.order("t-1"))
    machines.create(cloud.order("t-2", service="other"))
    before, wanted = access(HERE, chat=AGENT, other=OTHER), access(THERE, chat=MOVED)
    for at in range(60):
        machines.admit(OWNER, before)
        died = cloud.dies(at, after, lambda machines: machines.admit(OWNER, wanted))
        for token, service in (("t-1", "chat"), ("t-2", "other")):
            left = cloud.open(token)
            assert left <= on_replica(before, service) | on_replica(wanted, service)
            assert Opening(22, HERE) in left or Opening(22, THERE) in left, "shut for good"
        cloud.machines().admit(OWNER, wanted)
        assert cloud.open("t-1") == on_replica(wanted)
        assert cloud.open("t-2") == on_replica(wanted, "other")
        if not died:
            break
    assert 3 <= at < 59, "a listing, and a change for each service"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_controller_that_dies_while_it_launches_leaves_no_rule_for_others(
    cloud: Walled, after: bool
) -> None:
    at, died = 0, True
    while died and at < 60:
        order = cloud.order(f"t-{at}", owner=f"own-{at}")  # with nothing set up for it yet

        def launch(machines: Machines, order: MachineOrder = order) -> None:
            machines.admit(order.owner, access(HERE))
            machines.create(order)

        died = cloud.dies(at, after, launch)
        machines = cloud.machines()
        machines.admit(order.owner, access(THERE))
        for _ in range(20):
            with suppress(TransientError):  # what the dead one has started goes on
                machines.create(order)
                break
            cloud.pass_time()
        assert cloud.open(order.token) == on_replica(access(THERE), order.service)
        at += 1
    assert 5 < at < 60
