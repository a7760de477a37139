"""Alternatives of `resources` whose machines are alike: every replica is launched with the settings of its own one.

From the file over the offers of the packaged catalog, the plan and the database to the order of the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.history import Load
from policies.model import CapacityType, Launch, Observation, Offer, Zone
from policies.plan import plan
from policies.registry import policies_for
from provisioners.offers.catalog import packaged
from provisioners.offers.matching import in_order, offers_of
from provisioners.offers.zone_offers import ZonePrices, offers_for
from provisioners.port.base import LaunchOrder, Requirements
from provisioners.ssh import pool
from skyserve_cli.controller.reconcile.mappers import goal_of, order_of, requirements_of
from skyserve_cli.controller.reconcile.resource_match import candidates_of
from skyserve_cli.controller.reconcile.transitions import TickTransitions
from skyserve_cli.spec import spec_from_json, spec_to_json
from skyserve_cli.spec.load import load_text
from skyserve_cli.spec.model import ResourceChoice, ServiceSpec
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store

CLOUDS = ("aws", "gcp", "azure")
CATALOG = packaged()
L4 = 'infra: aws/us-east-1, accelerators: "L4:1"'
FIRST = 'image_id: "docker:first", disk_size: 1000, labels: {tier: first}'
SECOND = 'image_id: "docker:second", disk_size: 100, labels: {tier: second}'


def a_spec(how: str, alternatives: Sequence[str], policy: str = "") -> ServiceSpec:
    text = f"service: {{readiness_probe: /health, {policy or 'replicas: 1'}}}\nresources:\n  {how}:\n"
    text += "".join(f"    - {{{one}}}\n" for one in alternatives) + "run: serve\n"
    return load_text(text, enabled=CLOUDS).spec


def the_offers(spec: ServiceSpec) -> tuple[Offer, ...]:
    return in_order(requirements_of(spec), lambda part: offers_of(part, CATALOG))


def orders_of(spec: ServiceSpec) -> list[LaunchOrder]:
    """What the first tick sends to the clouds, every replica having been through the database."""
    store = Store(Database("sqlite://"))
    document = spec_to_json(spec)
    store.put_service(
        "chat", document, replica_hash="h", sealed_secrets=b"", lb_port=1, target=1, mode=None, now=0.0
    )
    stored = spec_from_json(dict(store.version("chat", 1).spec))
    (row,) = store.services()
    goal = goal_of(row, stored)
    observation = Observation(0.0, goal, (), the_offers(stored), Load())
    decided = plan(observation, row.memory, policies_for(goal))
    change = TickTransitions((), goal, 0.0)
    change.act(action for action in decided.actions if isinstance(action, Launch))
    store.commit(
        "chat", now=0.0, changed=change.changed(), memory=decided.memory, target=1, notes="", records=()
    )
    store.forget()  # read what was written
    (row,) = store.services()
    store.close()
    return [order_of("own", "chat", row.incarnation, one, stored, {}) for one in row.replicas]


@pytest.mark.parametrize("how", ["any_of", "ordered"])
@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        # `taken`: by price (any_of), and in the user's order (ordered)
        pytest.param(f"{L4}, memory: 64+", L4, ("second", "first"), id="more memory costs more"),
        pytest.param(f"{L4}, cpus: 32+", L4, ("second", "first"), id="more CPUs cost more"),
        pytest.param(L4, f"{L4}, memory: 64+", ("first", "first"), id="the larger one comes second"),
        pytest.param(f"{L4}, max_hourly_cost: 0.05", L4, ("second", "second"), id="the first has no offer"),
        pytest.param(f"{L4}, memory: 9999+", L4, ("second", "second"), id="no machine is so large"),
        pytest.param(L4, L4, ("first", "first"), id="machines of equal price: the first"),
        pytest.param(L4, f"{L4}, use_spot: true", ("second", "first"), id="spot costs less"),
        pytest.param(f"{L4}, use_spot: true", L4, ("first", "first"), id="spot comes first"),
        pytest.param(
            "infra: aws/us-east-1, instance_type: g6.4xlarge", L4, ("second", "first"), id="a named machine"
        ),
        pytest.param(
            'infra: aws, accelerators: "L4:1", memory: 64+',
            'infra: gcp, accelerators: "L4:1"',
            ("second", "first"),
            id="another cloud",
        ),
        pytest.param(
            "infra: aws/us-east-1, accelerators: {L4: 4}", L4, ("second", "first"), id="another number"
        ),
    ],
)
def test_a_replica_has_what_its_own_alternative_says(
    how: str, first: str, second: str, taken: tuple[str, str]
) -> None:
    (order,) = orders_of(a_spec(how, [f"{first}, {FIRST}", f"{second}, {SECOND}"]))
    expected = taken[how == "ordered"]
    disk_gb = {"first": 1000, "second": 100}[expected]
    assert (order.docker_image, order.disk_gb, order.labels) == (expected, disk_gb, {"tier": expected})


FALLBACK = "replica_policy: {min_replicas: 2, dynamic_ondemand_fallback: true}"


@pytest.mark.parametrize(
    ("alternatives", "images"),
    [
        pytest.param([f"{L4}, use_spot: true, {SECOND}"], {"second"}, id="it has those of the spot one"),
        pytest.param(
            [f"{L4}, use_spot: true, max_hourly_cost: 0.01, {FIRST}", f"{L4}, use_spot: true, {SECOND}"],
            {"second"},
            id="that of the one whose limit it keeps",
        ),
    ],
)
def test_a_stand_in_on_demand(alternatives: list[str], images: set[str]) -> None:
    on_demand = [
        one
        for one in orders_of(a_spec("any_of", alternatives, FALLBACK))
        if one.offer.capacity_type is CapacityType.ON_DEMAND
    ]
    assert {one.docker_image for one in on_demand} == images


CHOICES = st.builds(
    ResourceChoice,
    cloud=st.sampled_from([None, "aws", "gcp", "azure"]),
    region=st.sampled_from([None, "us-east-1", "us-central1", "eastus"]),
    accelerator=st.sampled_from(["L4", "T4", "A100"]),
    accelerator_count=st.sampled_from([1.0, 2.0, 4.0]),
    use_spot=st.booleans(),
    cpus=st.sampled_from([None, "8", "8+", "32+"]),
    memory=st.sampled_from([None, "32+", "64+", "4x"]),
    disk_size_gb=st.sampled_from([None, 100]),
    images=st.sampled_from([(), (("aws", "ami"), ("gcp", "img")), (("*", "docker:x"),)]),
    max_usd_hour=st.sampled_from([None, 0.3, 1.0, 5.0]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(CHOICES, min_size=1, max_size=4), st.booleans())
def test_every_offer_is_one_of_its_alternative(choices: list[ResourceChoice], ordered: bool) -> None:
    """Asked for alone, or as its stand-in on demand, the alternative has the offer."""
    spec = ServiceSpec("chat", "run", resources=tuple(choices), resources_ordered=ordered)
    for offer in the_offers(spec):
        one = choices[offer.choice]
        alone = replace(one, use_spot=offer.capacity_type is CapacityType.SPOT)
        mine = offers_of(Requirements(tuple(candidates_of(alone))), CATALOG)
        assert replace(offer, choice=0, preference=0) in mine
        assert alone == one or one.use_spot


def test_an_offer_of_two_alternatives_is_shown_once() -> None:
    spec = a_spec("any_of", [f"{L4}, {FIRST}", f"{L4}, {SECOND}"])
    offers = the_offers(spec)
    assert offers
    assert {offer.choice for offer in offers} == {0}
    assert len({replace(offer, choice=0) for offer in offers}) == len(offers)


def test_make_believe_machines_and_hosts_of_ones_own_know_the_alternative() -> None:
    alternatives = (ResourceChoice("local", disk_size_gb=1000), ResourceChoice("local", disk_size_gb=100))
    need = requirements_of(ServiceSpec("chat", "run", resources=alternatives))
    prices = [ZonePrices(Zone("local", "r", "z"), 0.1, 0.2)]
    local = offers_for(need, prices, "local")
    assert [offer.choice for offer in local] == [0]
    dear = replace(need, candidates=(replace(need.candidates[0], max_hourly_cost=0.1), *need.candidates[1:]))
    assert [offer.choice for offer in offers_for(dear, prices, "local")] == [1]
    host = {"address": "10.0.0.1", "user": "me", "identity_file": "/k", "price_usd_hour": 0.2}
    pools = pool.load_pools({"lab": {"hosts": [host]}})
    ours = replace(dear, candidates=tuple(replace(one, cloud="ssh") for one in dear.candidates))
    assert [offer.choice for offer in pool.offers_of(pools, ours)] == [1]
