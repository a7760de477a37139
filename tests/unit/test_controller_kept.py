"""When a service is decided about again: each rule alone, and none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from policies.history import Load
from policies.model import CapacityType, Memory, Plan, Zone
from provisioners.port.base import Instance, InstanceState
from skyserve_cli.controller.reconcile.ports import InstanceListing
from skyserve_cli.controller.reconcile.tick_cache import (
    Around,
    Kept,
    Listings,
    Orders,
    demand_of,
    is_relevant,
    why_again,
)
from tests.kit.rows import a_row

ROW = a_row()
AROUND = Around(1, frozenset({"sky"}), {})
LOAD = Load(60.0, 10, known=True)
OFFERS = ((),)
INSTANCE = Instance(
    "i-1", "t", "o", "chat", 1, Zone("sky", "r", "a"), CapacityType.SPOT, InstanceState.RUNNING
)


def kept(**more: Any) -> Kept:
    given: dict[str, Any] = {
        "row": ROW,
        "around": AROUND,
        "demand": demand_of(LOAD),
        "needs": (),
        "offers": OFFERS,
        "until": math.inf,
        "decided_at": 100.0,
        "is_settled": True,
        "plan": Plan((), Memory()),
        "orders": Orders(clouds=frozenset({"sky"})),
    }
    return Kept(**(given | more))


@pytest.mark.parametrize(
    ("last", "now", "because"),
    [
        pytest.param(kept(), {}, "", id="nothing differs"),
        pytest.param(None, {}, "it has not been decided about yet", id="new"),
        pytest.param(kept(), {"has_events": True}, "something happened to it", id="an event"),
        pytest.param(kept(is_settled=False), {}, "its last turn was not at rest", id="it wrote something"),
        pytest.param(kept(), {"row": replace(ROW, down=True)}, "its row changed", id="a goal"),
        pytest.param(
            kept(),
            {"around": AROUND._replace(epoch=2)},
            "the term, or what can be seen of the clouds, changed",
            id="another term",
        ),
        pytest.param(
            kept(),
            {"around": AROUND._replace(trouble={"sky": "login"})},
            "the term, or what can be seen of the clouds, changed",
            id="a cloud that cannot be listed",
        ),
        pytest.param(kept(until=110.0), {"now": 110.0}, "a deadline has come", id="a deadline"),
        pytest.param(kept(until=110.0), {"now": 109.9}, "", id="just before a deadline"),
        pytest.param(kept(), {"now": 99.0}, "the clock was set back", id="a clock set back"),
        pytest.param(
            kept(), {"demand": demand_of(replace(LOAD, requests=11))}, "its load changed", id="a request"
        ),
        pytest.param(kept(), {"offers": [None]}, "its offers changed", id="other offers"),
    ],
)
def test_a_service_is_decided_about_again_when(last: Kept | None, now: dict[str, Any], because: str) -> None:
    given: dict[str, Any] = {
        "row": ROW,
        "has_events": False,
        "around": AROUND,
        "demand": demand_of(LOAD),
        "offers": list(OFFERS),
        "now": 105.0,
    }
    given |= now
    assert why_again(last, given.pop("row"), **given) == because


def test_what_no_scaler_reads_of_a_load_does_not_count() -> None:
    other = replace(LOAD, responsive=frozenset({1}), empty=frozenset({2}))
    assert demand_of(other) == demand_of(LOAD)
    assert demand_of(replace(LOAD, in_flight=2)) == demand_of(replace(LOAD, queued=9)) != demand_of(LOAD)


def listing(*instances: Instance, is_listing: bool = True) -> InstanceListing:
    return InstanceListing("sky", 1.0, instances, is_listing)


@pytest.mark.parametrize(
    ("latest", "changed"),
    [
        pytest.param(listing(replace(INSTANCE)), set(), id="the same"),
        pytest.param(listing(replace(INSTANCE, message="x")), {"chat"}, id="another message"),
        pytest.param(listing(), {"chat"}, id="gone"),
        pytest.param(
            listing(INSTANCE, replace(INSTANCE, id="i-2", service="embed")), {"embed"}, id="one more"
        ),
        pytest.param(listing(INSTANCE, is_listing=False), {"chat"}, id="a report"),
    ],
)
def test_services_whose_instances_differ_from_the_last_listing(
    latest: InstanceListing, changed: set[str]
) -> None:
    listings = Listings()
    assert listings.changed([listing(INSTANCE)]) == {"chat"}
    assert listings.changed([latest]) == changed


def test_an_unattended_instance_is_news_every_time() -> None:
    listings, alone = Listings(), replace(INSTANCE, state=InstanceState.UNSUPERVISED)
    assert listings.changed([listing(alone)]) == listings.changed([listing(alone)]) == {"chat"}


def test_a_listing_is_news_to_a_row_that_was_not_compared_with_one() -> None:
    assert is_relevant(kept(), [listing()], ())
    assert not is_relevant(kept(listed={"sky": ROW}), [listing()], ())
    assert is_relevant(kept(listed={"sky": ROW}), [listing()], {"chat"})
    assert is_relevant(kept(listed={"sky": replace(ROW)}), [listing()], ())
    assert not is_relevant(kept(orders=Orders()), [listing()], ())
