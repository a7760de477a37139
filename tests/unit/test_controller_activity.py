"""What the controller says of itself from memory, and to whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
from sqlalchemy.exc import OperationalError

from skyserve_cli.controller.api.access import AccessRole, Caller
from skyserve_cli.controller.api.activity import Activity
from skyserve_cli.controller.api.reasons import of_activity
from skyserve_cli.controller.reconcile.clock import Steady, SystemClock
from skyserve_cli.controller.reconcile.ports import CloudOperation, OperationKind
from skyserve_cli.controller.reconcile.reconciler import TickUnderWay
from skyserve_cli.controller.reconcile.slow_turns import SlowTurns
from skyserve_cli.controller.reconcile.store_health import StoreHealth
from skyserve_cli.state.database import Database
from tests.unit.test_controller_reconciler import a_replica

OF_CHAT = Caller("ada", AccessRole.VIEWER, frozenset(["chat"]))
TICK = TickUnderWay(34.0, "other", 33.0)


@dataclass
class World:
    at: float = 1000.0

    def now(self) -> float:
        return self.at

    def to_json(self) -> dict[str, Any]:
        """The lease."""
        return {"leads": True, "epoch": 1, "leader": "me", "unfit": ""}


@pytest.fixture
def activity() -> Iterator[Activity]:
    world = World()
    call = CloudOperation("other", "i", OperationKind.LAUNCH, a_replica(1))
    database = Database("sqlite://")
    yield Activity(
        database,
        StoreHealth(world.now()),
        cast("Any", world),
        world,
        tick_under_way=lambda: TICK,
        calls=lambda: [(call, 14.0), (call._replace(service="chat"), 3.0)],
    )
    database.close()


def test_the_owner_sees_all_of_it(activity: Activity) -> None:
    found = activity.to_json()
    assert found["tick"] == {"for_s": 34.0, "service": "other", "turn_s": 33.0, "database_s": 0.0}
    assert [(one["service"], one["for_s"]) for one in found["cloud_calls"]] == [
        ("other", 14.0),
        ("chat", 3.0),
    ]
    assert (
        of_activity(found).sentence
        == "its processor is busy: the tick has decided about service other for 33s"
    )


def test_who_covers_some_services_reads_no_name_of_another(activity: Activity) -> None:
    found = activity.to_json(OF_CHAT)
    assert [one["service"] for one in found["cloud_calls"]] == ["chat"]
    assert "other" not in str({key: found[key] for key in ("tick", "cloud_calls")})
    assert of_activity(found).sentence == "the tick has gone on for 34s"


def test_a_database_that_fails(activity: Activity) -> None:
    activity.store_health.failed(OperationalError("select", {}, Exception("disk is full")))
    cast("World", activity.clock).at += 12.0
    assert (
        of_activity(activity.to_json()).sentence
        == "it cannot read or write its state, for 12s (disk is full)"
    )


def test_a_service_has_its_turn_for_as_long_as_it_lasts() -> None:
    world = World()
    slow = SlowTurns(world.now)
    with slow.turn("chat", (), 0.0):
        world.at += 5.0
        assert slow.under_way() == ("chat", 5.0)
    assert slow.under_way() is None
    with pytest.raises(ValueError, match="x"), slow.turn("chat", (), 0.0):
        raise ValueError("x")
    assert slow.under_way() is None


def test_a_clock_that_was_set_is_known_from_when_it_was_followed() -> None:
    world = World()
    steady = Steady(world.now, counts_suspension=True)
    clock = SystemClock(lambda: 5000.0 + world.at, steady)
    assert clock.last_jump() is None
    clock.follow(3600.0)
    world.at += 12.0
    assert clock.last_jump() == (3600.0, 12.0)
