"""When a cloud's provisioner calls its cloud about firewalls, and when a launch waits for it; the controller's side too."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from policies.model import CapacityType, Role
from provisioners.assembly import RULES_EVERY_S, SETTLED_S, VmCloudProvisioner
from provisioners.offers.catalog import Catalog
from provisioners.own_address import OwnAddresses
from provisioners.port.errors import AuthError, TransientError
from provisioners.port.firewall import FirewallAccess
from skyserve_cli.config_clouds import AwsConfig, RentedConfig
from skyserve_cli.controller.clouds.firewalls import ThreadFirewalls
from skyserve_cli.controller.reconcile.mappers import agent_addresses
from tests.clouds.memory_machines import CLOUD, ZONES, MemoryMachines
from tests.contract.contract_subjects import FakeSubject
from tests.unit.test_controller_mappers import S, a_replica, a_row

HERE, THERE, AGENT = "8.8.4.4", "9.9.9.9", "198.51.100.1"


class World:
    def __init__(self, section: RentedConfig | None = None) -> None:
        self.time = 1000.0
        self.route: str | None = HERE
        self.admitted: list[FirewallAccess] = []
        self.refuses = False
        self.machines = MemoryMachines(self.now, after=self.called)
        own = OwnAddresses(None, None, self.now, local=lambda towards: self.route, read=_nobody)

        class Rented(VmCloudProvisioner):
            name = CLOUD

        self.cloud = Rented(
            self.machines, section or RentedConfig(), Catalog(()), bytes(32), own=own, now=self.now
        )

    def now(self) -> float:
        return self.time

    def called(self, call: str, token: str) -> None:
        if call == "admit":
            if self.refuses:
                raise AuthError("ec2:RevokeSecurityGroupIngress is missing", cloud=CLOUD)
            self.admitted.append(self.machines.access[token])

    def admit(self, *agents: str) -> None:
        self.cloud.admit("owner-1", {"chat": frozenset(agents)})

    def launch(self) -> None:
        offer = FakeSubject(Path()).offer()
        offer = replace(offer, zone=ZONES[0], capacity_type=CapacityType.SPOT)
        self.cloud.launch(FakeSubject(Path()).order(offer=offer))


def _nobody(url: str, headers: Mapping[str, str], method: str, timeout_s: float) -> str:
    raise OSError("nobody there")


def test_nothing_is_asked_of_a_cloud_that_nobody_uses() -> None:
    world = World()
    world.admit()
    assert world.admitted == []


def test_the_first_launch_waits_until_it_is_known_who_may_come_in() -> None:
    world = World()
    launching = threading.Thread(target=world.launch)
    launching.start()
    while not world.admitted:
        world.admit(AGENT)
    launching.join(10)
    wanted = FirewallAccess(frozenset({f"{HERE}/32"}), {"chat": frozenset({f"{AGENT}/32"})})
    assert world.admitted[0] == wanted
    assert world.machines.live() == ["owner-1-chat-1"]


def test_the_configuration_goes_before_what_is_found_out() -> None:
    world = World(RentedConfig(sources=("203.0.113.0/24",)))
    world.launch()
    world.admit(AGENT)
    assert world.admitted[-1].sources == {"203.0.113.0/24"}
    assert world.admitted[-1].balancers == {"chat": {f"{AGENT}/32"}}


def test_the_cloud_is_called_on_a_change_once_more_soon_and_then_seldom() -> None:
    world = World(RentedConfig(sources=("203.0.113.0/24",)))
    world.launch()
    started = world.time
    called_at = []
    while world.time < started + SETTLED_S + 2 * RULES_EVERY_S + 5:
        before = len(world.admitted)
        world.admit(AGENT)
        if len(world.admitted) > before:
            called_at.append(world.time - started)
        world.time += 1.0
    assert called_at == [0.0, SETTLED_S, SETTLED_S + RULES_EVERY_S, SETTLED_S + 2 * RULES_EVERY_S]
    world.admit()
    assert world.admitted[-1].balancers == {"chat": frozenset()}


def test_a_refusal_is_raised_and_tried_again() -> None:
    world = World(RentedConfig(sources=("203.0.113.0/24",)))
    world.launch()
    world.refuses = True
    for _ in range(2):
        with pytest.raises(AuthError, match="Revoke"):
            world.admit(AGENT)
    world.refuses = False
    world.admit(AGENT)
    assert len(world.admitted) == 1


def test_a_controller_that_has_moved_is_let_in_at_its_new_address() -> None:
    world = World()
    world.cloud._is_needed = True
    world.admit()
    world.route = THERE
    world.admit()
    assert world.admitted[-1].sources == {f"{HERE}/32", f"{THERE}/32"}


def test_a_host_that_cannot_know_its_address_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioners.assembly._ADMIT_WAIT_S", 0.0)
    world = World()
    world.route = None
    with pytest.raises(TransientError, match=r"clouds\.memory\.sources"):
        world.launch()
    for _ in range(2):
        with pytest.raises(TransientError, match=r"clouds\.memory\.sources"):
            world.admit()
    assert world.machines.live() == []


def test_inside_a_network_the_machines_own_addresses_show_the_way() -> None:
    world = World(AwsConfig(use_private_ip=True))
    world.route = "10.0.0.2"
    world.cloud._is_needed = True
    world.admit()
    assert world.admitted[-1].sources == {"10.0.0.2/32"}


class Gate:
    def __init__(self) -> None:
        self.calls: list[Mapping[str, frozenset[str]]] = []
        self.refuses = False
        self.woken = threading.Event()

    def admit(self, owner: str, balancers: Mapping[str, frozenset[str]]) -> None:
        self.calls.append(balancers)
        self.woken.set()
        if self.refuses:
            raise AuthError("not allowed", cloud="aws")


class Clock:
    def now(self) -> float:
        return 0.0


def test_the_gatekeeper_passes_on_what_the_tick_says_and_tells_trouble_once() -> None:
    gate, told = Gate(), list[tuple[str, str]]()
    heard = threading.Event()

    def report(cloud: str, sentence: str) -> None:
        told.append((cloud, sentence))
        heard.set()

    gate.refuses = True
    supervisor = ThreadFirewalls(
        ["aws", "local"], lambda name: gate if name == "aws" else None, "own", Clock(), report=report
    )
    supervisor.ensure({"chat": frozenset({AGENT})})
    assert heard.wait(10)
    heard.clear()
    gate.refuses = False
    supervisor.ensure({"chat": frozenset()})
    assert heard.wait(10)
    assert gate.calls[0] == {"chat": {AGENT}}
    assert gate.calls[-1] == {"chat": frozenset()}
    assert told == [("aws", "not allowed"), ("aws", "")]


def test_nothing_is_changed_by_a_controller_that_may_not() -> None:
    gate, asked = Gate(), threading.Event()

    def allows() -> bool:
        asked.set()
        return False

    supervisor = ThreadFirewalls(["aws"], lambda name: gate, "own", Clock(), allows)
    supervisor.ensure({"chat": frozenset()})
    assert asked.wait(10)
    assert gate.calls == []


def test_a_load_balancer_calls_from_where_it_listens_until_it_is_to_be_terminated() -> None:
    agents = [
        replace(a_replica(number, state), role=Role.LOAD_BALANCER)
        for number, state in enumerate((S.STARTING, S.READY, S.DRAINING, S.TERMINATING), start=1)
    ]
    unknown = replace(a_replica(9, S.PROVISIONING), endpoint=None)
    rows = [a_row(balancers=(*agents, unknown)), replace(a_row(), name="quiet")]
    assert agent_addresses(rows) == {"chat": {"10.0.0.1", "10.0.0.2", "10.0.0.3"}, "quiet": frozenset()}
