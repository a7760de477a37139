"""Instances that the cloud accepts and ends before they are of use: how often they are launched, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from policies.goals import ScalingGoal
from policies.model import CapacityType, EndReason, FailureKind, Launched, Offer, Scope, Terminated, Zone
from provisioners.port.base import InstanceState
from provisioners.port.errors import Refusal
from skyserve_cli.controller.reconcile.ports import OperationKind
from skyserve_cli.spec.model import ServiceSpec
from tests.unit.test_controller_reconciler import OFFERS, World

HALF_AN_HOUR_S = 1800
ON_DEMAND = tuple(
    Offer(Zone("sky", f"r-{name}", name), "m", None, 0.0, CapacityType.ON_DEMAND, 1.0 + index / 20)
    for index, name in enumerate("abc")
)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.store.close()


def launches(world: World, offers: tuple[Offer, ...], refusal: Refusal | None) -> Counter[str]:
    """How often each zone is asked in half an hour in which every instance is dead at the next listing."""
    world.offers = offers
    world.up(ServiceSpec("chat", "run", scaling=ScalingGoal(1, 1)))
    reconciler = world.reconciler()
    world.lists()
    asked: Counter[str] = Counter()
    responded: set[tuple[OperationKind, int]] = set()
    for second in range(HALF_AN_HOUR_S):
        world.time += 1.0
        reconciler.tick()
        for call in world.calls:
            if (call.kind, call.replica.id) in responded:
                continue
            responded.add((call.kind, call.replica.id))
            if call.kind is OperationKind.LAUNCH:
                asked[call.replica.zone.name] += 1
                world.happens(Launched(call.replica.id, f"i-{call.replica.id}"))
            elif call.kind is OperationKind.TERMINATE:
                world.happens(Terminated(call.replica.id))
        if second % 10 == 9:
            dead = {
                "state": InstanceState.TERMINATED,
                "endpoint": None,
                "message": "Client error on launch",
                "refusal": refusal,
            }
            replicas = [one for one in world.row().replicas if one.instance_id]
            world.lists(
                *(world.instance_of(one, capacity_type=one.offer.capacity_type, **dead) for one in replicas)
            )
    return asked


@pytest.mark.parametrize("offers", [ON_DEMAND, OFFERS], ids=["on demand", "spot"])
def test_unexplained_deaths_give_the_version_up_after_three(world: World, offers: tuple[Offer, ...]) -> None:
    asked = launches(world, offers, None)
    assert asked.total() == 3
    assert len(asked) > 1  # a zone is left alone for a while
    assert world.row().notes == "version 1 has failed: Client error on launch; update the service"


@pytest.mark.parametrize("offers", [ON_DEMAND, OFFERS], ids=["on demand", "spot"])
def test_a_refusal_told_late_is_asked_once_an_offer(world: World, offers: tuple[Offer, ...]) -> None:
    asked = launches(world, offers, Refusal(FailureKind.REFUSED, Scope.OFFER))
    assert asked == Counter(offer.zone.name for offer in offers)
    assert "every machine on offer was refused" in world.row().notes
    assert world.row().notes.endswith("update the service")


def test_a_lack_of_room_told_late_backs_off_and_gives_nothing_up(world: World) -> None:
    asked = launches(world, ON_DEMAND, Refusal(FailureKind.CAPACITY))
    assert 3 < asked.total() <= 3 * 11  # per zone: 10 s, doubling up to 5 minutes
    assert "every zone refused when last asked" in world.row().notes


def test_a_quota_told_late_is_asked_again_after_its_wait(world: World) -> None:
    asked = launches(world, ON_DEMAND, Refusal(FailureKind.QUOTA))
    assert asked.total() <= 3 * 6


def test_the_reason_is_the_replicas_own(world: World) -> None:
    world.offers = ON_DEMAND
    world.up(ServiceSpec("chat", "run", scaling=ScalingGoal(1, 1)))
    reconciler = world.reconciler()
    world.lists()
    reconciler.tick()
    (call,) = world.calls
    world.happens(Launched(call.replica.id, "i-1"))
    reconciler.tick()
    (replica,) = world.row().replicas
    world.lists(
        replace(
            world.instance_of(replica, InstanceState.TERMINATED, message="no room"),
            refusal=Refusal(FailureKind.CAPACITY),
        )
    )
    reconciler.tick()
    first = next(one for one in world.row().replicas if one.id == replica.id)
    assert (first.end_reason, first.message) == (EndReason.CAPACITY, "no room")
