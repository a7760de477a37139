"""Reserved capacity: from config.yaml to offers, to placement, and to what each cloud is asked for."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from azure.mgmt.compute.models import VirtualMachine
from botocore.validate import ParamValidator
from google.cloud import compute_v1

from policies.goals import PlacementGoal
from policies.model import CapacityType, FailureKind, LaunchFailed, Replica, ReplicaState, Scope, Zone
from policies.placement import zone_backoff
from policies.placement.base import View
from policies.placement.spothedge import SpotHedge
from policies.placement.static import Static
from provisioners.assembly import VmSettings, cheapest_trials, order_of, zones_of
from provisioners.aws.image import Image
from provisioners.aws.translate import request_of
from provisioners.azure.translate import NetworkIds, machine_body
from provisioners.gcp.translate import instance_of
from provisioners.offers.catalog import Catalog, packaged
from provisioners.offers.explain_no_offer import explain_no_offer
from provisioners.offers.matching import Account, offers_of
from provisioners.offers.reservations import open_at, reserved_for, reserved_listings
from provisioners.port.base import Candidate, LaunchOrder, Requirements
from provisioners.port.errors import RefusedError
from provisioners.port.vm import MachineOrder
from skyserve_cli.clouds import Clouds
from skyserve_cli.config import ConfigError, load_config
from skyserve_cli.config_clouds import AwsReservation, AzureReservation, GcpReservation
from skyserve_cli.home import Home
from skyserve_cli.spec.model import ResourceChoice, ServiceSpec
from skyserve_cli.state.codec import replica_from_row, replica_to_row

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
BLOCK = AwsReservation(
    id="cr-0a", kind="capacity_block", zone="use1-az4", instance_type="p5e.48xlarge", count=4
)
POOL = AwsReservation(id="cr-0b", zone="use1-az4", instance_type="g6.xlarge", count=2, usd_hour=0.01)
BOTH = {"block": BLOCK, "pool": POOL}


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    known = packaged().of("aws")
    return Catalog((*known.listings, *reserved_listings(BOTH, known, "aws")))


def offered(
    catalog: Catalog, candidate: Candidate, account: Account | None = None, **need: Any
) -> list[tuple[str, float, int | None]]:
    found = offers_of(Requirements((candidate,), **need), catalog, account or Account())
    return [
        (offer.zone.label, offer.price_usd_hour, offer.places)
        for offer in found
        if offer.zone.region == "us-east-1"
    ]


L4, H200 = Candidate(accelerator="L4"), Candidate(accelerator="H200", accelerator_count=8)


@pytest.mark.parametrize(
    ("candidate", "need", "reserved"),
    [
        pytest.param(L4, {}, [("use1-az4+pool", 0.01, 2)], id="what fits comes first"),
        pytest.param(H200, {}, [("use1-az4+block", 0.0, 4)], id="a type that is not sold on demand"),
        pytest.param(H200, {"num_nodes": 3}, [("use1-az4+block", 0.0, 1)], id="replicas of several nodes"),
        pytest.param(replace(L4, zone="use1-az4"), {}, [("use1-az4+pool", 0.01, 2)], id="in a named zone"),
        pytest.param(replace(L4, zone="use1-az2"), {}, [], id="in another zone"),
        pytest.param(replace(L4, use_spot=True), {}, [], id="no spot machines"),
        pytest.param(replace(L4, reservation="none"), {}, [], id="unwanted"),
        pytest.param(replace(L4, reservation="block"), {}, [], id="of another type"),
        pytest.param(replace(L4, max_hourly_cost=0.005), {}, [], id="too dear"),
    ],
)
def test_which_reservations_are_offered(
    catalog: Catalog, candidate: Candidate, need: dict[str, Any], reserved: list[object]
) -> None:
    found = offered(catalog, candidate, **need)
    assert [each for each in found if "+" in each[0]] == reserved
    assert found[: len(reserved)] == reserved


def test_a_named_reservation_is_the_only_offer(catalog: Catalog) -> None:
    assert offered(catalog, replace(L4, reservation="pool")) == [("use1-az4+pool", 0.01, 2)]


def test_a_quota_of_nothing_does_not_close_what_is_reserved(catalog: Catalog) -> None:
    account = Account(reason=lambda shape, zone, market: "the quota is 0")
    assert offered(catalog, L4, account) == [("use1-az4+pool", 0.01, 2)]


@pytest.mark.parametrize(
    ("candidate", "sentence"),
    [
        (replace(L4, reservation="pol"), "config.yaml has no reservation 'pol' on aws; did you mean 'pool'?"),
        (
            replace(L4, reservation="block"),
            "the reservation 'block' is of p5e.48xlarge on aws, and has no L4:1",
        ),
        (
            replace(L4, reservation="pool", use_spot=True),
            "L4:1 is reserved, and no spot machine; set use_spot: false",
        ),
    ],
)
def test_why_a_reservation_is_not_offered(catalog: Catalog, candidate: Candidate, sentence: str) -> None:
    assert str(explain_no_offer(candidate, catalog)) == sentence


def test_what_the_market_has_knows_nothing_of_reservations(catalog: Catalog) -> None:
    assert not [zone for zone in zones_of(catalog) if zone.reservation]
    assert not [trial for trial in cheapest_trials(catalog.rows) if trial.zone.reservation]


# --- config.yaml ------------------------------------------------------------------------------------------------


def clouds_of(tmp_path: Path, reservations: str) -> Clouds:
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path)})
    home.config.write_text(f"clouds:\n  aws:\n    reservations:\n      {reservations}\n")
    return Clouds(home, load_config(home.config))


@pytest.mark.parametrize(
    ("reservation", "said"),
    [
        (
            "none: {id: cr-0, zone: use1-az4, instance_type: g6.xlarge}",
            "clouds.aws.reservations: 'none' is no name",
        ),
        ("a: {id: x, zone: use1-az4, instance_type: g6.xlarge}", "clouds.aws.reservations.a.id"),
        ("a: {id: cr-0, zone: use1-az4}", "clouds.aws.reservations.a.instance_type"),
        (
            "a: {id: cr-0, zone: use1-az4, instance_type: g6.xlarge, until: 2027-01-31T11:30:00}",
            "clouds.aws.reservations.a.until",
        ),
        (
            "a: {id: cr-0, zone: use1-az44, instance_type: g6.xlarge}",
            "clouds.aws.reservations.a.zone: the catalog has no zone 'use1-az44' on aws; did you mean 'use1-az4'?",
        ),
        (
            "a: {id: cr-0, zone: use1-az4, instance_type: g6.xlarg}",
            "clouds.aws.reservations.a.instance_type: the catalog has no 'g6.xlarg' on aws; did you mean 'g6.xlarge'?",
        ),
    ],
)
def test_a_wrong_reservation_is_named_by_its_key(tmp_path: Path, reservation: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"clouds\.aws") as caught:
        clouds_of(tmp_path, reservation).listed(Requirements((replace(L4, cloud="aws"),)))
    assert said in str(caught.value)


def test_a_plan_and_a_controller_see_a_reservation_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_800_000_000.0]  # 2027-01-15T08:00:00Z
    monkeypatch.setattr("skyserve_cli.clouds.unix_now", lambda: clock[0])
    monkeypatch.setattr(
        "provisioners.offers.spot_prices.SpotPrices.refresh_soon", lambda prices: None
    )  # no calls
    clouds = clouds_of(
        tmp_path, "a: {id: cr-0, zone: use1-az4, instance_type: g6.xlarge, until: 2027-01-15T11:00:00Z}"
    )
    need = Requirements((replace(L4, cloud="aws", reservation="a"),))
    assert [offer.zone.label for offer in clouds.listed(need)] == ["use1-az4+a"]
    assert [offer.zone.label for offer in clouds.get("aws").offers(need)] == ["use1-az4+a"]
    clock[0] += 2 * 3600.0 + 1.0  # less than an hour is left
    assert clouds.listed(need) == ()
    assert list(clouds.get("aws").offers(need)) == []


def test_a_reservation_whose_type_leaves_the_catalog_does_not_close_the_cloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_800_000_000.0]
    monkeypatch.setattr("skyserve_cli.clouds.unix_now", lambda: clock[0])
    monkeypatch.setattr(
        "provisioners.offers.spot_prices.SpotPrices.refresh_soon", lambda prices: None
    )  # no calls
    own = tmp_path / "catalog" / "extra.json"
    own.parent.mkdir()
    row = {
        "cloud": "aws",
        "instance_type": "own.large",
        "accelerator": "L4",
        "accelerator_count": 1,
        "vcpus": 4,
    }
    row |= {
        "memory_gib": 16,
        "region": "us-east-1",
        "zones": ["use1-az4"],
        "usd_hour": 1.0,
        "as_of": "2026-11-01",
    }
    own.write_text(json.dumps([row]))
    clouds = clouds_of(tmp_path, "a: {id: cr-0, zone: use1-az4, instance_type: own.large}")
    need = Requirements((replace(L4, cloud="aws", reservation="a"),))
    assert len(clouds.get("aws").offers(need)) == 1
    own.unlink()
    clock[0] += 60.0
    assert len(clouds.get("aws").offers(need)) == 1  # a running controller goes on with what it has
    with pytest.raises(ConfigError, match=r"reservations\.a\.instance_type"):
        clouds.listed(need)


def test_when_a_reservation_is_open() -> None:
    ending = replace_until("2027-01-15T11:00:00Z")
    at = 1_800_000_000.0
    assert [
        bool(open_at({"a": each}, at + late))
        for each, late in ((POOL, 1e9), (ending, 7200.0), (ending, 7201.0))
    ] == [
        True,
        True,
        False,
    ]


def replace_until(until: str) -> AwsReservation:
    return AwsReservation.model_validate({**POOL.model_dump(), "until": until})


# --- Placement --------------------------------------------------------------------------------------------------


def placed(
    placer: SpotHedge | Static,
    wanted: int,
    catalog: Catalog,
    memory: Any = None,
    live: tuple[Replica, ...] = (),
) -> Counter[str]:
    need = Requirements((replace(L4, region="us-east-1"), replace(L4, region="us-east-1", use_spot=True)))
    goal = PlacementGoal(dynamic_ondemand_fallback=isinstance(placer, SpotHedge))
    view = View(0.0, wanted, goal, live, (), tuple(offers_of(need, catalog)), 99)
    decided = placer.decide(view, memory or {})
    return Counter(
        "reserved" if one.offer.zone.reservation else one.offer.capacity_type.value
        for one in decided.launches
    )


@pytest.mark.parametrize("placer", [SpotHedge(), Static()], ids=["spothedge", "spread"])
def test_reserved_places_are_filled_before_anything_is_rented(
    placer: SpotHedge | Static, catalog: Catalog
) -> None:
    assert placed(placer, 2, catalog) == {"reserved": 2}
    assert placed(placer, 5, catalog)["reserved"] == 2
    (pool,) = offers_of(Requirements((replace(L4, reservation="pool"),)), catalog)
    live = tuple(Replica(i, 1, pool, ReplicaState.READY, 0.0, 0.0) for i in range(2))
    assert placed(placer, 3, catalog, live=live)["reserved"] == 0


def _after(kind: FailureKind, reserved: bool, catalog: Catalog) -> dict[str, bool]:
    """Return whether reserved and on-demand capacity in the same zone may be requested after a refusal."""
    offers = {offer.zone.label: offer for offer in offers_of(Requirements((L4,)), catalog)}
    pool, market = offers["use1-az4+pool"], offers["use1-az4"]
    refused = Replica(1, 1, pool if reserved else market, ReplicaState.PROVISIONING, 0.0, 0.0)
    event = LaunchFailed(1, kind, scope=Scope.OFFER)
    closed = zone_backoff.learn({}, [event], {1: refused}, 0.0)
    opened = zone_backoff.open_offers([pool, market], closed, 1.0)
    return {"reserved": pool in opened, "market": market in opened}


@pytest.mark.parametrize("kind", [FailureKind.CAPACITY, FailureKind.QUOTA, FailureKind.REFUSED])
def test_a_refusal_of_the_one_says_nothing_about_the_other(kind: FailureKind, catalog: Catalog) -> None:
    assert _after(kind, reserved=True, catalog=catalog) == {"reserved": False, "market": True}
    assert _after(kind, reserved=False, catalog=catalog) == {"reserved": True, "market": False}


def test_a_replica_keeps_its_reservation_in_the_database(catalog: Catalog) -> None:
    (pool,) = offers_of(Requirements((replace(L4, reservation="pool"),)), catalog)
    replica = Replica(1, 1, pool, ReplicaState.READY, 0.0, 0.0)
    row = type("Row", (), replica_to_row("service", replica))
    assert replica_from_row(row).zone == Zone("aws", "us-east-1", "use1-az4", "pool")


def test_services_of_before_keep_their_hash() -> None:
    spec = ServiceSpec(
        name="s", run="r", resources=(ResourceChoice(accelerator="L4", accelerator_count=1.0),)
    )
    assert spec.replica_hash() == "45c45cba9c2cdf8e"
    reserved = replace(spec, resources=(replace(spec.resources[0], reservation="pool"),))
    assert reserved.replica_hash() != spec.replica_hash()


# --- What clouds are asked for ----------------------------------------------------------------------------------

ORDER = MachineOrder(
    token="own1-chat-1-0123456789",
    owner="own1",
    service="chat",
    replica_id=1,
    rank=0,
    num_nodes=1,
    zone=Zone("aws", "us-east-1", "use1-az4"),
    instance_type="p5e.48xlarge",
    capacity_type=ON_DEMAND,
    public_key="ssh-ed25519 AAAA controller",
    accelerator="H200",
    accelerator_count=8,
    reservation="block",
)


def test_an_order_is_for_the_zone_and_names_the_reservation(catalog: Catalog) -> None:
    (offer,) = offers_of(Requirements((replace(H200, reservation="block"),)), catalog)
    launch = LaunchOrder("own1-chat-1-0123456789", "own1", "chat", 1, 1, offer, None, "run")
    order = order_of(launch, 0, bytes(32), VmSettings())
    assert (order.zone, order.reservation) == (Zone("aws", "us-east-1", "use1-az4"), "block")


def test_a_reservation_that_is_not_configured_any_more_is_refused_alone() -> None:
    assert reserved_for(ORDER, BOTH) is BLOCK
    with pytest.raises(RefusedError, match="has no 'block' any more") as caught:
        reserved_for(ORDER, {})
    assert caught.value.scope is Scope.OFFER


@pytest.mark.parametrize(
    ("reservation", "market", "target"),
    [
        (BLOCK, {"MarketType": "capacity-block"}, {"CapacityReservationId": "cr-0a"}),
        (POOL, None, {"CapacityReservationId": "cr-0b"}),
        (
            AwsReservation(id="arn:aws:resource-groups:us-east-1:1:group/g", zone="z", instance_type="t"),
            None,
            {"CapacityReservationResourceGroupArn": "arn:aws:resource-groups:us-east-1:1:group/g"},
        ),
    ],
    ids=["capacity block", "reservation", "group of them"],
)
def test_aws_is_asked_for_it(reservation: AwsReservation, market: object, target: dict[str, str]) -> None:
    image = Image("ami-1", "/dev/sda1", 8)
    params = request_of(
        ORDER,
        "t",
        image,
        key_name=None,
        subnet="subnet-1",
        groups=(),
        use_private_ip=False,
        reservation=reservation,
    )
    assert params.get("InstanceMarketOptions") == market
    assert params["CapacityReservationSpecification"] == {"CapacityReservationTarget": target}
    model = boto3.Session(region_name="us-east-1").client("ec2").meta.service_model
    shape = model.operation_model("RunInstances").input_shape
    assert not ParamValidator().validate(params, shape).has_errors()


@pytest.mark.parametrize(("kind", "model"), [("reservation", ""), ("bound", "RESERVATION_BOUND")])
def test_google_cloud_is_asked_for_it(kind: Any, model: str) -> None:
    order = replace(ORDER, zone=Zone("gcp", "us-east4", "us-east4-a"), instance_type="a3-ultragpu-8g")
    shared = "projects/other/reservations/r1"
    reservation = GcpReservation(id=shared, kind=kind, zone="us-east4-a", instance_type="a3-ultragpu-8g")
    made = instance_of(order, project="p", public=True, reservation=reservation)
    read = compute_v1.Instance.from_json(compute_v1.Instance.to_json(made))
    affinity = read.reservation_affinity
    assert affinity.consume_reservation_type == "SPECIFIC_RESERVATION"
    assert (affinity.key, list(affinity.values)) == ("compute.googleapis.com/reservation-name", [shared])
    assert read.scheduling.provisioning_model == model


def test_azure_is_asked_for_it() -> None:
    group = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/capacityReservationGroups/crg"
    order = replace(ORDER, zone=Zone("azure", "eastus", "eastus-1"), instance_type="Standard_ND96isr_H200_v5")
    reservation = AzureReservation(id=group, zone="eastus-1", instance_type="Standard_ND96isr_H200_v5")
    body = machine_body(order, NetworkIds("/subnet", "/nsg"), "a:b:c:d", reservation=reservation)
    properties = VirtualMachine(body).properties
    assert properties is not None
    assert properties.capacity_reservation is not None
    assert properties.capacity_reservation.capacity_reservation_group is not None
    assert properties.capacity_reservation.capacity_reservation_group.id == group
