"""After a restore: whose instances are adopted, which are terminated, and that nothing is launched twice meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from policies.model import CapacityType, Offer, ReplicaState, Zone
from provisioners.port.base import Instance, InstanceState, Requirements
from skyserve_cli.controller.reconcile.adoption import PATIENCE_S, Adoption, match
from skyserve_cli.controller.reconcile.inputs import Doubts
from skyserve_cli.controller.reconcile.mappers import token_of
from skyserve_cli.controller.reconcile.ports import InstanceListing
from skyserve_cli.spec.model import ServiceSpec
from tests.unit.test_controller_reconciler import OFFERS, SPEC, World, a_replica

S = ReplicaState
FIRST_UNKNOWN = 50


@dataclass
class RestoredWorld(World):
    """Its database was restored: ids from 50 on are unknown to it."""

    finished: list[str] = field(default_factory=list)
    waiting_for: frozenset[str] = frozenset({"sky"})

    def doubts(self) -> Doubts:
        world = self

        class Specs:
            def get(self, service: str, version: int) -> ServiceSpec:
                return SPEC

        class Offered:
            def get(self, need: Requirements) -> tuple[Offer, ...] | None:
                return world.offers

        adoption = Adoption(
            {"chat": FIRST_UNKNOWN},
            self.waiting_for,
            self.store.database.owner(),
            self.store,
            Specs(),  # type: ignore[arg-type]
            Offered(),
            done=lambda: self.finished.append("done"),
        )
        return Doubts(adoption=adoption)

    def unknown(self, number: int, offer: Offer = OFFERS[0], **changes: Any) -> Instance:
        """An instance that was launched for this service after the backup."""
        (row,) = self.store.services()
        owner = self.store.database.owner()
        token = token_of(owner, "chat", row.incarnation, number, offer)
        made = Instance(
            f"i-{number}",
            token,
            owner,
            "chat",
            number,
            offer.zone,
            offer.capacity_type,
            InstanceState.RUNNING,
        )
        return replace(made, **changes)

    def ids(self) -> Mapping[int, ReplicaState]:
        (row,) = self.store.services()
        return {one.id: one.state for one in row.replicas}


@pytest.fixture
def world() -> Iterator[RestoredWorld]:
    world = RestoredWorld()
    world.up()
    world.has()
    yield world
    world.store.close()


OTHER = Offer(Zone("sky", "r", "a"), "another", None, 0.0, CapacityType.SPOT, 0.3)


@pytest.mark.parametrize(
    ("changes", "is_adopted", "is_unfit"),
    [
        pytest.param({}, True, False, id="one of this service"),
        pytest.param({"state": InstanceState.SETUP}, True, False, id="one that is not ready yet"),
        pytest.param({"state": InstanceState.PREEMPTED}, False, False, id="one that is gone"),
        pytest.param({"state": InstanceState.STOPPING}, False, False, id="one that ends"),
        pytest.param({"service": "other"}, False, False, id="of another service"),
        pytest.param({"token": "me-chat-60-0000000000"}, False, True, id="of another life of the service"),
    ],
)
def test_which_are_adopted(
    world: RestoredWorld, changes: dict[str, Any], is_adopted: bool, is_unfit: bool
) -> None:
    (row,) = world.store.services()
    instance = world.unknown(60, OFFERS[1], **changes)
    offers = [(a_replica(1).role, offer) for offer in OFFERS]
    found = match(world.store.database.owner(), row, [instance], FIRST_UNKNOWN, offers, 7.0)
    assert [one.id for one in found.adopted] == ([60] if is_adopted else [])
    assert [one.id for one in found.unfit] == (["i-60"] if is_unfit else [])
    for one in found.adopted:
        assert (one.offer, one.instance_id, one.state, one.launched_at) == (
            OFFERS[1],
            "i-60",
            S.PROVISIONING,
            7.0,
        )


def test_an_id_the_backup_knew_is_not_adopted(world: RestoredWorld) -> None:
    (row,) = world.store.services()
    offers = [(a_replica(1).role, offer) for offer in OFFERS]
    found = match(
        world.store.database.owner(), row, [world.unknown(FIRST_UNKNOWN - 1)], FIRST_UNKNOWN, offers, 7.0
    )
    assert (found.adopted, found.unfit) == ((), ())


def test_nothing_is_launched_before_the_clouds_were_listed_and_what_runs_is_adopted(
    world: RestoredWorld,
) -> None:
    reconciler = world.reconciler()
    for _ in range(3):
        world.time += 1.0
        reconciler.tick()
    assert world.ids() == {}
    world.lists(world.unknown(60), world.unknown(61, OFFERS[1]))
    reconciler.tick()
    assert set(world.ids()) == {60, 61}
    assert world.finished == ["done"]
    for _ in range(3):
        world.time += 1.0
        world.lists(world.unknown(60), world.unknown(61, OFFERS[1]))
        reconciler.tick()
    assert set(world.ids()) == {60, 61}
    assert world.abandoned == []
    assert world.store.services()[0].memory.next_replica_id == 62
    told = [line.record.message for line in world.store.events("chat")]
    assert sum("launched after the backup" in one for one in told) == 2


def test_ids_of_instances_that_have_ended_are_not_used_again(world: RestoredWorld) -> None:
    reconciler = world.reconciler()
    world.lists(world.unknown(75, state=InstanceState.PREEMPTED))
    reconciler.tick()
    assert sorted(world.ids()) == [76, 77]


def test_an_instance_that_fits_nothing_is_terminated_and_the_story_has_it(world: RestoredWorld) -> None:
    reconciler = world.reconciler()
    orphan = world.unknown(60, OTHER)
    for _ in range(3):
        world.time += 1.0
        world.lists(orphan)
        reconciler.tick()
    assert set(world.abandoned) == {"i-60"}
    assert any("i-60" in line.record.message for line in world.store.events("chat"))


def test_of_a_service_that_is_down_nothing_is_adopted(world: RestoredWorld) -> None:
    world.has(a_replica(1))
    world.store.set_down("chat", purge=True, now=world.time)
    reconciler = world.reconciler()
    for _ in range(3):
        world.time += 1.0
        world.lists(world.instance_of(a_replica(1)), world.unknown(60))
        reconciler.tick()
    assert 60 not in world.ids()
    assert set(world.abandoned) == {"i-60"}


def test_instances_are_spared_until_the_offers_are_known(world: RestoredWorld) -> None:
    world.offers = None
    reconciler = world.reconciler()
    for _ in range(4):
        world.time += 1.0
        world.lists(world.unknown(60))
        reconciler.tick()
    assert (world.ids(), world.abandoned) == ({}, [])
    world.offers = OFFERS
    world.lists(world.unknown(60))
    reconciler.tick()
    assert 60 in world.ids()


def test_a_cloud_that_is_never_listed_keeps_a_service_waiting_for_so_long_and_no_longer(
    world: RestoredWorld,
) -> None:
    world.waiting_for = frozenset({"sky", "silent"})
    reconciler = world.reconciler()
    world.lists()
    reconciler.tick()
    assert world.ids() == {}
    world.time += PATIENCE_S
    reconciler.tick()
    assert sorted(world.ids()) == [50, 51]
    assert world.finished == []


def test_a_listing_that_is_none_adopts_nothing(world: RestoredWorld) -> None:
    reconciler = world.reconciler()
    world.listings.append(InstanceListing("sky", world.time, (world.unknown(60),), is_listing=False))
    reconciler.tick()
    assert world.ids() == {}
