"""How a cloud's provisioner is put together: orders that never change, logins that follow from them, live prices."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from threading import Event

import pytest
from paramiko import Ed25519Key

from policies.model import CapacityType, Offer, Role, Zone
from provisioners.assembly import VmSettings, heartbeat_s, login_of, offer, order_of, within, zones_of
from provisioners.name_tags import name_of, parse
from provisioners.offers.catalog import packaged
from provisioners.offers.matching import Account
from provisioners.offers.spot_prices import PRICES_EVERY_S, PRICES_KEPT_S, SpotPrices
from provisioners.port.base import Candidate, LaunchOrder, Requirements
from provisioners.port.errors import AuthError
from provisioners.port.lease import terms_of
from provisioners.port.vm import Machine, MachineState, Silent, role_in
from provisioners.remote.ssh_keys import MAX_USER_DATA_BYTES, Keys
from skyserve_cli.controller.reconcile.mappers import token_of
from tests.clouds.memory_machines import MemoryMachines

SECRET = bytes(range(32))
ZONE = Zone("aws", "us-east-1", "use1-az1")
OFFER = Offer(ZONE, "g6.xlarge", "L4", 1.0, CapacityType.SPOT, 0.3)


def an_order(**changes: str) -> LaunchOrder:
    return LaunchOrder(
        "own-chat-1-abc", "own", "chat", 1, 1, OFFER, "setup", "run", secrets=changes, num_nodes=2
    )


def test_an_order_is_the_same_to_the_byte_whenever_it_is_made() -> None:
    assert order_of(an_order(), 1, SECRET, VmSettings()) == order_of(an_order(), 1, SECRET, VmSettings())


def test_an_image_for_each_region_is_taken_by_region_and_gives_way_to_the_order() -> None:
    region = OFFER.zone.region
    assert (
        order_of(an_order(), 0, SECRET, VmSettings(image={region: "ami-1", "else": "ami-2"})).image == "ami-1"
    )
    assert order_of(an_order(), 0, SECRET, VmSettings(image={"else": "ami-2"})).image is None
    assert order_of(an_order(), 0, SECRET, VmSettings(image="ami-3")).image == "ami-3"
    own = replace(an_order(), image="ami-4")
    assert order_of(own, 0, SECRET, VmSettings(image={region: "ami-1"})).image == "ami-4"


def test_the_machines_of_a_replica_have_tokens_and_host_keys_of_their_own() -> None:
    head, other = (order_of(an_order(), rank, SECRET, VmSettings()) for rank in (0, 1))
    assert (head.token, other.token) == ("own-chat-1-abc", "own-chat-1-abc-n1")
    assert head.user_data != other.user_data
    assert head.public_key == other.public_key


def test_the_dead_mans_switch_is_the_users() -> None:
    never, soon = (order_of(an_order(), 0, SECRET, VmSettings(dead_man_minutes=after)) for after in (0, 10))
    assert "shutdown" not in never.user_data
    terms = terms_of(10, soon.token)
    assert terms is not None
    every_s = terms.lease_s // 30
    assert f"while sleep {every_s}; do" in soon.user_data
    assert f"l={terms.lease_s // every_s}\n" in soon.user_data


def test_user_data_is_small_and_has_no_secret_but_the_machines_own_key() -> None:
    order = order_of(an_order(HF_TOKEN="hf_verysecret"), 0, SECRET, VmSettings())
    assert len(order.user_data.encode()) < MAX_USER_DATA_BYTES
    assert "hf_verysecret" not in repr(order) + order.user_data
    assert Keys(SECRET, "own").login("chat").private.splitlines()[4] not in order.user_data


def test_we_log_in_with_the_key_of_the_order_and_expect_its_host_key() -> None:
    order = order_of(an_order(), 1, SECRET, VmSettings())
    machine = Machine(
        "i-1",
        order.token,
        "own",
        "chat",
        1,
        1,
        2,
        ZONE,
        CapacityType.SPOT,
        MachineState.RUNNING,
        "198.51.100.7",
    )
    login = login_of(machine, SECRET)
    assert (login.address, login.user) == ("198.51.100.7", order.user)
    assert Keys(SECRET, "own").boot_host(order.token).public in order.user_data
    # What others may read with the user data differs from the expected key once the machine was prepared.
    assert login.host_keys[0].split()[1] not in order.user_data
    assert login.private_key == Keys(SECRET, "own").login("chat").private


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure", "lambda"])
@pytest.mark.parametrize("role", [Role.REPLICA, Role.LOAD_BALANCER])
def test_the_key_of_an_order_opens_its_machine_and_none_of_another_service(cloud: str, role: Role) -> None:
    """As the cloud shows the machine: one that has names alone shows no role, and of a long service its first part."""
    keys: dict[str, str] = {}
    for service in ("Chat", "chat-2", "a-service-with-a-name-that-is-longer-than-a-token-may-be-by-far"):
        offer = replace(OFFER, zone=Zone(cloud, "us-east-1", "us-east-1"))
        token = token_of("0a1b2c3d", service, "i", 12, offer)
        order = order_of(
            LaunchOrder(token, "0a1b2c3d", service, 12, 1, offer, None, "run", role=role),
            0,
            SECRET,
            VmSettings(),
        )
        shown = Machine(
            "i-1",
            token,
            order.owner,
            service,
            12,
            0,
            1,
            order.zone,
            order.capacity_type,
            MachineState.RUNNING,
        )
        if cloud == "lambda":
            named = parse(name_of(order), order.owner)
            assert named is not None
            shown = replace(shown, token=named.token, service=named.service)
        else:
            shown = replace(shown, role=role_in(order.tags))
        private = login_of(shown, SECRET).private_key
        key = Ed25519Key.from_private_key(StringIO(private)).get_base64()
        assert order.public_key.split()[1] == key
        keys[service] = key
    assert len(set(keys.values())) == 3
    assert Keys(SECRET, "0a1b2c3d").owner_login().public.split()[1] not in keys.values()


def test_load_balancers_have_another_key_than_replicas() -> None:
    keys = Keys(SECRET, "own")
    assert keys.login("chat") != keys.login("chat", Role.LOAD_BALANCER)


@dataclass
class Priced(MemoryMachines):
    prices: Mapping[tuple[str, str], float] = field(default_factory=dict)
    asked: list[Sequence[str]] = field(default_factory=list)
    ill: bool = False
    silent_regions: set[str] = field(default_factory=set)
    gate: Event | None = None

    def spot_prices(
        self, regions: Sequence[str], instance_types: Collection[str] = (), silent: Silent | None = None
    ) -> Mapping[tuple[str, str], float]:
        self.asked.append(regions)
        if self.gate is not None:
            assert self.gate.wait(10.0)
        if self.ill:
            raise AuthError("expired", cloud="aws")
        for region in self.silent_regions:
            assert silent is not None
            silent(region, AuthError("closed", cloud="aws"))
        return self.prices


class Clock:
    time = 1e9

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_live_price_goes_before_the_catalogs_until_it_is_old(clock: Clock) -> None:
    machines = Priced(clock, prices={("g6.xlarge", "use1-az4"): 0.0123})
    prices = SpotPrices(machines, [Zone("aws", "us-east-1", "use1-az4")], clock)
    need = Requirements((Candidate("aws", "us-east-1", accelerator="L4", use_spot=True),))
    catalog = packaged().of("aws")

    def cheapest() -> Offer:
        return offer(need, catalog, Account(spot_price=prices), prices)[0]

    machines.ill = True
    before = cheapest()
    machines.ill = False
    prices.refresh()
    assert (cheapest().zone.name, cheapest().price_usd_hour) == ("use1-az4", 0.0123)
    machines.ill = True
    prices.refresh()
    assert cheapest().price_usd_hour == 0.0123
    clock.time += PRICES_KEPT_S + 1
    assert cheapest() == before


def test_prices_are_asked_for_now_and_then(clock: Clock) -> None:
    machines = Priced(clock)
    prices = SpotPrices(machines, [Zone("aws", region, f"{region}-1") for region in ("b", "a", "b")], clock)
    for _ in range(3):
        prices.refresh_soon()
    clock.time += PRICES_EVERY_S
    prices.refresh_soon()
    for _ in range(1000):
        if len(machines.asked) == 2:
            break
        prices.refresh_soon()
    assert machines.asked == [["a", "b"]] * 2


def test_a_region_that_does_not_respond_loses_only_its_own_prices_and_keeps_them_for_an_hour(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    east, west = (Zone("aws", region, f"{region}-1") for region in ("east", "west"))
    both = {("g6.xlarge", zone.name): 0.1 for zone in (east, west)}
    machines = Priced(clock, prices=both)
    prices = SpotPrices(machines, [east, west], clock, {"g6.xlarge"})
    prices.refresh()
    machines.prices, machines.silent_regions = {("g6.xlarge", east.name): 0.2}, {"west"}
    clock.time += PRICES_KEPT_S - 1
    prices.refresh()
    assert (prices("g6.xlarge", east), prices("g6.xlarge", west)) == (0.2, 0.1)
    assert "memory/west: spot prices cannot be read: closed" in caplog.text
    clock.time += 2
    assert (prices("g6.xlarge", east), prices("g6.xlarge", west)) == (0.2, None)
    machines.silent_regions, machines.prices = set(), {}
    prices.refresh()  # both respond, and neither sells it any more
    assert (prices("g6.xlarge", east), prices("g6.xlarge", west)) == (None, None)


def end_refreshes() -> None:
    for thread in threading.enumerate():
        if thread.name == "prices-memory":
            thread.join(10.0)
            assert not thread.is_alive()


def test_one_refresh_is_in_flight_at_most(clock: Clock) -> None:
    gate = Event()
    machines = Priced(clock, gate=gate)
    prices = SpotPrices(machines, [ZONE], clock)
    for _ in range(5):
        prices.refresh_soon()
        clock.time += PRICES_EVERY_S + 1
    gate.set()
    end_refreshes()
    assert len(machines.asked) == 1
    prices.refresh_soon()
    end_refreshes()
    assert len(machines.asked) == 2


def test_every_zone_of_a_cloud_is_known() -> None:
    assert ZONE in zones_of(packaged().of("aws"))


def test_the_catalog_of_some_regions_has_no_other() -> None:
    some = within(packaged().of("aws"), ["us-east-1", "us-west-2"], "aws")
    assert {row.zone.region for row in some.rows} == {"us-east-1", "us-west-2"}


def test_a_region_that_is_none_is_told_with_what_may_be_meant() -> None:
    with pytest.raises(
        ValueError, match=r"clouds\.gcp\.regions: .*'us-centrall1'; did you mean 'us-central1'"
    ):
        within(packaged().of("gcp"), ["us-centrall1"], "gcp")


@pytest.mark.parametrize(
    ("lease_s", "every_s"),
    [
        pytest.param(43_200, 60.0, id="a minute"),
        pytest.param(0, 60.0, id="a minute without a dead-man switch"),
        pytest.param(60, 15.0, id="more often than the machine needs visits"),
    ],
)
def test_machines_report_often_enough_to_live(lease_s: int, every_s: float) -> None:
    assert heartbeat_s(lease_s) == every_s
