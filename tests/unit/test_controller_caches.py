"""What the tick reads without waiting: specs and offers; and the eye on the clouds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import sleep
from typing import Any, ClassVar

import pytest
from cryptography.fernet import Fernet

from policies.model import CapacityType, Offer, Replica, ReplicaState, Zone
from provisioners.port.base import (
    Candidate,
    Instance,
    InstanceList,
    InstanceState,
    LaunchOrder,
    Provisioner,
    Requirements,
)
from provisioners.port.errors import AuthError, ProvisionError, RegionClosedError, TransientError
from skyserve_cli.controller.clouds.caches import OfferCache, SpecCache, all_offers
from skyserve_cli.controller.clouds.instance_poller import PATIENCE, ThreadInstancePoller
from skyserve_cli.controller.reconcile.mappers import requirements_of, token_of
from skyserve_cli.controller.reconcile.ports import CloudOperation, InstanceListing, OperationKind
from skyserve_cli.controller.secret_box import CannotUnsealError, SecretBox
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.model import Probe, ServiceSpec
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from tests.clouds.fake import FakeProvisioner

NEED = Requirements((Candidate(use_spot=True),))
SPEC = ServiceSpec(
    "chat", "run", secrets=("KEY",), probe=Probe("/", headers=(("Authorization", "Bearer $KEY"),))
)


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        sleep(0.005)
    raise AssertionError("it did not come to be")


# --- offers ----------------------------------------------------------------------------------------------------


class Shop(FakeProvisioner):
    """A cloud with one price; asked `times`; raises `error` while there is one."""

    def __init__(self, price: float, error: Exception | None = None, zone: str = "z") -> None:
        super().__init__(lambda: 0.0)
        self.price = price
        self.error = error
        self.zone = Zone("shop", "r", zone)
        self.times = 0
        self.gate = threading.Event()
        self.gate.set()

    def offers(self, need: Requirements) -> Sequence[Offer]:
        self.times += 1
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return [Offer(self.zone, "m", None, 0.0, CapacityType.SPOT, self.price)]


def prices(offers: Sequence[Offer] | None) -> list[float] | None:
    return None if offers is None else [offer.price_usd_hour for offer in offers]


def test_offers_of_all_clouds_come_cheapest_first() -> None:
    assert prices(all_offers([Shop(3.0), Shop(1.0), Shop(2.0)], NEED)) == [1.0, 2.0, 3.0]


def test_an_order_of_preference_is_kept() -> None:
    assert prices(all_offers([Shop(3.0), Shop(1.0)], replace(NEED, ordered=True))) == [1.0, 3.0]


@pytest.mark.parametrize(
    "error", [AuthError("no right", cloud="shop"), ZeroDivisionError()], ids=["refused", "a defect"]
)
def test_a_cloud_that_cannot_be_asked_keeps_no_other_from_being_used(error: Exception) -> None:
    assert prices(all_offers([Shop(1.0, error), Shop(2.0)], NEED)) == [2.0]


def test_the_book_never_waits_and_asks_once_at_a_time() -> None:
    shop, woken = Shop(1.0), threading.Event()
    shop.gate.clear()
    book = OfferCache([shop], Clock(), woken.set)
    assert [book.get(NEED) for _ in range(5)] == [None] * 5
    shop.gate.set()
    eventually(woken.is_set)
    assert prices(book.get(NEED)) == [1.0]
    assert shop.times == 1


def test_the_book_shows_the_old_prices_until_the_new_are_there() -> None:
    shop, clock, woken = Shop(1.0), Clock(), threading.Event()
    book = OfferCache([shop], clock, woken.set, ttl_s=60.0)
    book.get(NEED)
    eventually(woken.is_set)
    shop.price = 2.0
    clock.time += 60.0
    assert prices(book.get(NEED)) == [1.0]
    assert shop.times == 1
    clock.time += 0.1
    assert prices(book.get(NEED)) == [1.0]
    eventually(lambda: prices(book.get(NEED)) == [2.0])
    assert shop.times == 2


# --- specs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(Database("sqlite://"))
    yield store
    store.close()


def stored(store: Store, seal: SecretBox, spec: ServiceSpec = SPEC) -> None:
    sealed = seal.close({"KEY": "hunter2"})
    store.put_service(
        "chat",
        spec_to_json(spec),
        replica_hash="h",
        sealed_secrets=sealed,
        lb_port=1,
        target=1,
        mode=None,
        now=0.0,
    )


def test_specs_come_back_as_they_were_with_secrets_only_where_they_are_needed(store: Store) -> None:
    seal = SecretBox(Fernet.generate_key())
    stored(store, seal)
    book = SpecCache(store, seal)
    assert book.get("chat", 1) == SPEC
    assert book.get("chat", 1) is book.get("chat", 1)
    assert book.probe("chat", 1).headers == (("Authorization", "Bearer hunter2"),)
    assert book.get("chat", 1).probe.headers == (("Authorization", "Bearer $KEY"),)
    offer = Offer(Zone("c", "r", "z"), "m", None, 0.0, CapacityType.SPOT, 0.3)
    replica = Replica(4, 1, offer, ReplicaState.REQUESTED, 0.0, 0.0)
    order = book.order("me", CloudOperation("chat", "abcd", OperationKind.LAUNCH, replica))
    assert (order.token, order.secrets) == (token_of("me", "chat", "abcd", 4, offer), {"KEY": "hunter2"})


def test_another_homes_secrets_stay_closed(store: Store) -> None:
    stored(store, SecretBox(Fernet.generate_key()))
    book = SpecCache(store, SecretBox(Fernet.generate_key()))
    assert book.get("chat", 1) == SPEC
    with pytest.raises(CannotUnsealError):
        book.probe("chat", 1)


def test_a_version_that_never_was(store: Store) -> None:
    with pytest.raises(KeyError):
        SpecCache(store, SecretBox(Fernet.generate_key())).get("chat", 1)


def test_every_need_of_a_spec_can_be_a_key() -> None:
    assert {requirements_of(SPEC): 1}[requirements_of(SPEC)] == 1


# --- the witness -----------------------------------------------------------------------------------------------


class Sky:
    """A cloud that lists what it is configured to, and counts."""

    name: ClassVar[str] = "sky"

    def __init__(self) -> None:
        self.listed: list[Instance] = []
        self.error: Exception | None = None
        self.times = self.refused = 0

    def instances(self, owner: str, service: str | None = None) -> Sequence[Instance]:
        self.times += 1
        assert owner == "me"
        if self.error is not None:
            self.refused += 1
            raise self.error
        return list(self.listed)

    def offers(self, need: Requirements) -> Sequence[Offer]:
        return []

    def launch(self, order: LaunchOrder) -> Instance:
        raise NotImplementedError

    def terminate(self, instance: Instance) -> None:
        raise NotImplementedError


INSTANCE = Instance(
    "i-1", "t-1", "me", "chat", 1, Zone("sky", "r", "z"), CapacityType.SPOT, InstanceState.RUNNING
)


class Looking:
    """A witness of one or more clouds."""

    def __init__(self, *names: str) -> None:
        self.clouds: dict[str, Any] = {name: Sky() for name in names}
        self.clock = Clock()
        self.woken = 0
        self.listings: list[InstanceListing] = []
        provisioners: Callable[[str], Provisioner] = lambda name: self.clouds[name]  # noqa: E731
        self.told: list[str] = []
        self.instance_poller = ThreadInstancePoller(
            provisioners, "me", self.clock, self._wake, dict.fromkeys(names, 0.005), report=self.told.append
        )

    def _wake(self) -> None:
        self.woken += 1

    def sees(self, holds: Callable[[], bool]) -> None:
        def look() -> bool:
            self.listings += self.instance_poller.drain()
            return holds()

        eventually(look)


@pytest.fixture
def looking() -> Iterator[Looking]:
    looking = Looking("sky", "sea")
    yield looking
    looking.instance_poller.close()


def test_it_looks_over_and_over_and_wakes_the_tick_for_news_alone(looking: Looking) -> None:
    sky = looking.clouds["sky"]
    looking.instance_poller.watch(frozenset({"sky"}))
    looking.sees(lambda: len(looking.listings) >= 3)
    assert looking.woken == 1
    assert {(one.cloud, one.asked_at, one.instances) for one in looking.listings} == {("sky", 1000.0, ())}
    sky.listed = [INSTANCE]
    looking.sees(lambda: looking.listings[-1].instances == (INSTANCE,))
    eventually(lambda: looking.woken == 2)
    assert looking.clouds["sea"].times == 0


@pytest.mark.parametrize(
    "error", [AuthError("no right", cloud="sky"), ZeroDivisionError()], ids=["refused", "a defect"]
)
def test_a_cloud_that_cannot_be_listed_gives_no_sighting_and_is_asked_again(
    looking: Looking, error: Exception
) -> None:
    """No listing is not an empty listing: no one must be thought gone because the cloud did not respond."""
    sky = looking.clouds["sky"]
    sky.error = error
    looking.instance_poller.watch(frozenset({"sky", "sea"}))
    looking.sees(lambda: sky.times >= 3 and len(looking.listings) >= 1)
    assert {one.cloud for one in looking.listings} == {"sea"}
    sky.error = None
    looking.sees(lambda: any(one.cloud == "sky" for one in looking.listings))


@pytest.mark.parametrize(
    ("error", "times"),
    [
        pytest.param(AuthError("renew the login", cloud="sky"), 1, id="a login does not mend itself"),
        pytest.param(TransientError("no answer", cloud="sky"), PATIENCE, id="what may pass is waited for"),
    ],
)
def test_what_keeps_a_cloud_from_being_listed_is_told_until_it_is_mended(
    looking: Looking, error: ProvisionError, times: int
) -> None:
    sky = looking.clouds["sky"]
    looking.instance_poller.watch(frozenset({"sky"}))
    looking.sees(lambda: bool(looking.listings))
    sky.error = error
    eventually(lambda: bool(looking.instance_poller.trouble()))
    assert sky.refused >= times
    assert looking.instance_poller.trouble() == {"sky": error.message}
    sky.error = None
    eventually(lambda: looking.instance_poller.trouble() == {})
    eventually(lambda: looking.woken == 3)  # the first listing, the trouble, its end


class RegionalSky(Sky):
    """One whose regions fail one by one."""

    silent: Mapping[str, ProvisionError] = {}
    closed: Mapping[str, str] = {}

    def listing(self, owner: str) -> InstanceList:
        return InstanceList(self.instances(owner), self.silent, self.closed)


def test_a_silent_region_is_told_of_after_some_listings_and_hides_no_other(looking: Looking) -> None:
    sky = looking.clouds["sky"] = RegionalSky()
    sky.listed = [INSTANCE]
    looking.instance_poller.watch(frozenset({"sky"}))
    looking.sees(lambda: bool(looking.listings))
    sky.silent = {"far": TransientError("no answer", cloud="sky")}
    eventually(lambda: looking.instance_poller.trouble() == {"sky/far": "no answer"})
    looking.sees(lambda: looking.listings[-1].silent == {"far"})
    assert looking.listings[-1].instances == (INSTANCE,)
    sky.silent = {}
    eventually(lambda: looking.instance_poller.trouble() == {})


def test_a_closed_region_is_told_of_once(looking: Looking) -> None:
    sky = looking.clouds["sky"] = RegionalSky()
    error = RegionClosedError("a policy forbids it", cloud="sky", region="far")
    sky.silent, sky.closed = {"far": error}, {"far": error.message}
    looking.instance_poller.watch(frozenset({"sky"}))
    looking.sees(lambda: len(looking.listings) > 3)
    assert looking.told == ["sky/far is left out: a policy forbids it"]
    assert looking.listings[-1].closed == {"far"}
    assert looking.instance_poller.trouble() == {"sky/far": "a policy forbids it"}


def test_a_cloud_that_is_not_watched_any_more_is_not_asked(looking: Looking) -> None:
    looking.instance_poller.watch(frozenset({"sky", "sea"}))
    looking.sees(lambda: {one.cloud for one in looking.listings} == {"sky", "sea"})
    looking.instance_poller.watch(frozenset({"sea"}))
    sky, sea = looking.clouds["sky"], looking.clouds["sea"]
    before, seen = sky.times, sea.times
    eventually(lambda: sea.times > seen + 5)
    assert sky.times <= before + 1  # one look may have been under way
