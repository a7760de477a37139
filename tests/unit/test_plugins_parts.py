"""Plug-ins: tags in a machine's name, the guard, and which plug-ins are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.model import CapacityType, Offer, Zone
from provisioners.name_tags import MAX_NAME, Named, name_of, openings_of, parse
from provisioners.plugin_guard import guarded
from provisioners.plugins import API_VERSION, CloudPlugin, PluginError, checked, listings_of
from provisioners.port.commands import Login
from provisioners.port.errors import CapacityError, ProvisionError, TransientError
from provisioners.port.firewall import FirewallAccess, Opening
from provisioners.port.vm import Finding, Level, Machine, MachineOrder, machine_token
from provisioners.remote.first_login import FirstLogins
from skyserve_cli.controller.reconcile.mappers import token_of
from tests.clouds.memory_machines import CLOUD, ZONES, MemoryMachines

OFFER = Offer(Zone("meadow", "north", "north-1"), "sheep-1", "L4", 1.0, CapacityType.SPOT, 1.0)


def order(token: str, owner: str = "own", **changes: Any) -> MachineOrder:
    plain = MachineOrder(
        token=token,
        owner=owner,
        service="chat",
        replica_id=7,
        rank=0,
        num_nodes=1,
        zone=OFFER.zone,
        instance_type="sheep-1",
        capacity_type=CapacityType.SPOT,
        public_key="ssh-ed25519 AAAA x",
    )
    return replace(plain, **changes)


# Names.


@given(
    service=st.from_regex(r"[a-zA-Z][a-zA-Z0-9-]{0,61}[a-z0-9]", fullmatch=True),
    replica_id=st.integers(1, 10**6),
    rank=st.integers(0, 8),
    market=st.sampled_from(CapacityType),
)
def test_what_a_name_says_is_what_was_ordered(
    service: str, replica_id: int, rank: int, market: CapacityType
) -> None:
    owner = "3f2a9c1b"
    token = machine_token(token_of(owner, service, "1", replica_id, OFFER), rank)
    name = name_of(order(token, owner, rank=rank, num_nodes=9, capacity_type=market))
    assert len(name) <= MAX_NAME
    read = parse(name, owner)
    assert read is not None
    assert service.lower().startswith(read.service)
    assert replace(read, service="") == Named(token, "", replica_id, rank, 9, market)


@pytest.mark.parametrize(
    "name", ["", "own-chat-7-0123456789", "web-1", "other-chat-7-0123456789.s1", "own-chat-7.x1"]
)
def test_what_is_no_name_of_ours_is_nothing(name: str) -> None:
    assert parse(name, "own") is None


def test_a_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be a machine's name"):
        name_of(order("own-" + "x" * 50 + "-7-0123456789"))


def test_load_balancers_of_a_service_are_let_in_by_the_first_part_of_its_name() -> None:
    named = Named("t", "a-long-na", 1, 0, 1, CapacityType.SPOT)
    access = FirewallAccess(
        frozenset({"1.1.1.1/32"}),
        {"A-Long-Name": frozenset({"2.2.2.2/32"}), "other": frozenset({"3.3.3.3/32"})},
    )
    assert openings_of(access, named, (8443,), ()) == {
        Opening(22, "1.1.1.1/32"),
        Opening(8443, "1.1.1.1/32"),
        Opening(8443, "2.2.2.2/32"),
    }


# The guard.


class Broken(MemoryMachines):
    """`wrong` is raised by every call, or returned as the listing."""

    wrong: Any = ZeroDivisionError("oops")

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise self.wrong

    create = destroy = spot_prices = orphans = remove = shared = admit = delete_shared = check = _fail

    def machines(self, *_: Any) -> Any:
        if isinstance(self.wrong, BaseException):
            raise self.wrong
        return self.wrong


CALLS: dict[str, Callable[[Any, MachineOrder, Machine], object]] = {
    "create": lambda inner, order, machine: inner.create(order),
    "machines": lambda inner, order, machine: inner.machines("own"),
    "destroy": lambda inner, order, machine: inner.destroy(machine),
    "spot_prices": lambda inner, order, machine: inner.spot_prices([]),
    "orphans": lambda inner, order, machine: inner.orphans("own"),
    "remove": lambda inner, order, machine: inner.remove(None),
    "shared": lambda inner, order, machine: inner.shared("own"),
    "admit": lambda inner, order, machine: inner.admit("own", FirewallAccess()),
    "delete_shared": lambda inner, order, machine: inner.delete_shared("own"),
}


def made_of(machines: MemoryMachines) -> tuple[MachineOrder, Machine]:
    wanted = order("own-chat-7", zone=ZONES[0])
    return wanted, machines.create(wanted)


@pytest.mark.parametrize("call", CALLS)
def test_a_defect_of_a_plugin_is_a_transient_error_that_names_it(call: str) -> None:
    wanted, machine = made_of(MemoryMachines(lambda: 0.0))
    with pytest.raises(TransientError) as caught:
        CALLS[call](guarded(Broken(lambda: 0.0)), wanted, machine)
    assert caught.value.message == f"the plug-in for {CLOUD} has a defect: {call}: ZeroDivisionError: oops"


@pytest.mark.parametrize("call", CALLS)
def test_what_a_plugin_says_in_our_own_words_is_passed_on(call: str) -> None:
    wanted, machine = made_of(MemoryMachines(lambda: 0.0))
    broken = Broken(lambda: 0.0)
    broken.wrong = CapacityError("full", cloud=CLOUD)
    with pytest.raises(ProvisionError) as caught:
        CALLS[call](guarded(broken), wanted, machine)
    assert caught.value is broken.wrong


@pytest.mark.parametrize("wrong", [None, 7, ["m-1"], [None]])
def test_a_listing_that_is_none_is_an_error_and_not_an_empty_one(wrong: Any) -> None:
    broken = Broken(lambda: 0.0)
    broken.wrong = wrong
    with pytest.raises(TransientError, match="has a defect: machines"):
        guarded(broken).machines("own")


def test_a_listing_loses_what_belongs_to_others() -> None:
    inner = MemoryMachines(lambda: 0.0)
    _, mine = made_of(inner)
    broken = Broken(lambda: 0.0)
    broken.wrong = [mine, replace(mine, owner="other", token="other-chat-7")]
    assert guarded(broken).machines("own") == [mine]


def test_a_check_that_breaks_is_a_finding() -> None:
    (found,) = guarded(Broken(lambda: 0.0)).check()
    assert (found.level, "ZeroDivisionError" in found.message) == (Level.MISSING, True)
    assert isinstance(found, Finding)


# Which are refused.

GOOD = CloudPlugin("meadow", machines=lambda setup: MemoryMachines(lambda: 0.0))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (object(), "is no CloudPlugin but object"),
        (replace(GOOD, api_version=API_VERSION + 1), f"for version {API_VERSION + 1} of the interface"),
        (replace(GOOD, name="other"), "calls itself 'other'"),
    ],
)
def test_what_is_no_plugin_for_us_is_refused(found: object, why: str) -> None:
    with pytest.raises(PluginError, match=why):
        checked("meadow", found)
    assert checked("meadow", GOOD) is GOOD


def test_listings_of_another_cloud_are_refused() -> None:
    with pytest.raises(PluginError, match="no listing of its own"):
        listings_of(replace(GOOD, listings=lambda: [7]))  # type: ignore[list-item, return-value]
    with pytest.raises(PluginError, match="cannot list what it has: ZeroDivisionError"):
        listings_of(replace(GOOD, listings=lambda: [1 / 0]))  # type: ignore[list-item, return-value]


# The first login.


def test_a_user_who_is_not_root_runs_the_script_by_sudo() -> None:
    ran: list[tuple[str, str, bytes]] = []
    usual = Login("m-1", "10.0.0.1", "skyserve", "key", ("ssh-ed25519 EXPECTED",))

    class Connection:
        def __init__(self, login: Login) -> None:
            self.login = login

        def run(self, command: str, *, stdin: bytes, timeout_s: float) -> None:
            ran.append((f"{self.login.user}@{self.login.host_keys[0]}", command, stdin))

        def close(self) -> None: ...

        def __enter__(self) -> Connection:
            return self

        def __exit__(self, *_: object) -> None: ...

    logins = FirstLogins(
        "ubuntu",
        lambda machine: usual,
        lambda machine: "the script",
        dial=Connection,  # type: ignore[arg-type]
        host_key=lambda login: "ssh-ed25519 SHOWN",
    )
    _, machine = made_of(MemoryMachines(lambda: 0.0))
    logins.prepare(machine)
    logins.prepare(machine)
    ((where, command, stdin),) = ran
    assert (where, stdin) == ("ubuntu@ssh-ed25519 SHOWN", b"the script")
    assert command.endswith('as="sudo -n"; }; exec $as /bin/sh -s')
