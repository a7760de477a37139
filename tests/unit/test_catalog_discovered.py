"""What an account was found to have: how it adds to the catalog, and what it forbids."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from policies.model import CapacityType, Zone
from provisioners.offers.catalog import (
    Catalog,
    CatalogError,
    Listing,
    Origin,
    Price,
    Quality,
    Shape,
    load,
    packaged,
    stock,
)
from provisioners.offers.catalog.discovered import (
    BELIEVED_S,
    Discovery,
    RegionalType,
    decode,
    encode,
    reasons,
    with_discovered,
)
from provisioners.offers.catalog.estimates import Estimates
from provisioners.offers.catalog.refresh import Quote, taken_over
from provisioners.offers.catalog.store import save, save_discovery
from provisioners.offers.explain_no_offer import explain_no_offer
from provisioners.offers.matching import Account, offers_of
from provisioners.port.base import Candidate, Requirements

NOW = 1_790_000_000.0
SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
G6 = Shape("aws", "g6.xlarge", "L4", 1, 4, 16)
P5E = Shape("aws", "p5e.48xlarge", "H200", 8, 192, 2048)
M5 = Shape("aws", "m5.large", None, 0, 2, 8)
LISTED = Origin("a list", NOW - 86400.0, Quality.EXACT)


def priced(usd_hour: float) -> Price:
    return Price(usd_hour, LISTED)


KNOWN = [
    Listing(G6, "us-east-1", priced(0.8), {"use1-az1": priced(0.3)}),
    Listing(G6, "us-west-2", priced(1.0), {"usw2-az1": None}),
    Listing(M5, "us-east-1", priced(0.1), {"use1-az1": None}),
]
FOUND = Discovery(
    "aws",
    NOW,
    ("us-east-1", "mx-central-1"),
    (
        RegionalType(G6, "us-east-1", ("use1-az1", "use1-az2")),
        RegionalType(G6, "mx-central-1", ("mxc1-az1",), {ON_DEMAND: "the quota is 0"}),
        RegionalType(P5E, "us-east-1", ("use1-az4",), {SPOT: "not sold as spot"}),
    ),
    ("quotas of mx-central-1: denied",),
)


def test_zones_regions_and_types_are_added_at_estimated_prices() -> None:
    merged = {listing.id[1:]: listing for listing in with_discovered(KNOWN, [FOUND])}
    assert merged["g6.xlarge", "us-east-1"].spot == {"use1-az1": priced(0.3), "use1-az2": None}
    assert merged["g6.xlarge", "us-east-1"].on_demand == priced(0.8)
    mexico = merged["g6.xlarge", "mx-central-1"]
    assert (mexico.on_demand.usd_hour, mexico.on_demand.origin.quality) == (0.9, Quality.ESTIMATED)
    assert merged["p5e.48xlarge", "us-east-1"].spot == {"use1-az4": None}
    assert merged["g6.xlarge", "us-west-2"] == KNOWN[1]


def test_a_type_without_an_open_zone_is_not_added() -> None:
    closed = replace(FOUND, offerings=(RegionalType(P5E, "us-east-1", ()),))
    assert with_discovered(KNOWN, [closed]) == KNOWN


@pytest.mark.parametrize(
    ("shape", "usd", "source"),
    [
        (G6, 0.9, "other regions"),
        (Shape("aws", "g6.12xlarge", "L4", 4, 48, 192), 3.6, "other machines with L4"),
        (Shape("gcp", "g2-standard-24", "L4", 2, 24, 96), 1.8, "other clouds' machines with L4"),
        (P5E, 8.0, "the highest price of an accelerator"),
        (Shape("aws", "c7i.xlarge", None, 0, 4, 8), 0.2, "the highest price of a CPU"),
    ],
)
def test_a_price_is_estimated_from_what_is_most_alike(shape: Shape, usd: float, source: str) -> None:
    price = Estimates(KNOWN).of(shape)
    assert price.usd_hour == pytest.approx(usd)
    assert (price.origin.source, price.origin.as_of) == (f"estimated from {source}", None)


@pytest.mark.parametrize(
    ("shape", "zone", "market", "reason"),
    [
        (G6, ("us-east-1", "use1-az1"), SPOT, ""),
        (G6, ("us-east-1", "use1-az3"), SPOT, "g6.xlarge is not offered in use1-az3"),
        (G6, ("mx-central-1", "mxc1-az1"), ON_DEMAND, "the quota is 0"),
        (G6, ("mx-central-1", "mxc1-az1"), SPOT, ""),
        (
            P5E,
            ("mx-central-1", "mxc1-az1"),
            SPOT,
            "aws does not offer p5e.48xlarge in mx-central-1 to this account",
        ),
        (P5E, ("us-east-1", "use1-az4"), SPOT, "not sold as spot"),
        (P5E, ("eu-west-1", "euw1-az1"), SPOT, ""),  # a region that was not listed
        (M5, ("us-east-1", "use1-az1"), ON_DEMAND, ""),  # a type that was not looked for
    ],
)
def test_reasons(shape: Shape, zone: tuple[str, str], market: CapacityType, reason: str) -> None:
    found = reasons([FOUND], lambda: NOW + BELIEVED_S)
    assert found(shape, Zone("aws", *zone), market) == reason
    assert reasons([FOUND], lambda: NOW + BELIEVED_S + 1.0)(shape, Zone("aws", *zone), market) == ""


def test_what_the_account_cannot_have_is_not_offered_and_the_reason_is_said() -> None:
    catalog = Catalog(tuple(with_discovered(KNOWN, [FOUND])))
    account = Account(reason=reasons([FOUND], lambda: NOW))
    on_demand = Candidate(cloud="aws", accelerator="L4", accelerator_count=1, region="mx-central-1")
    spot = replace(on_demand, use_spot=True)
    assert offers_of(Requirements((on_demand,)), catalog, account) == []
    (offer,) = offers_of(Requirements((spot,)), catalog, account)
    assert (offer.zone.name, offer.price_usd_hour) == ("mxc1-az1", 0.9)
    nothing = explain_no_offer(on_demand, catalog, account)
    assert nothing is not None
    assert nothing.field == "usable"
    assert "this account cannot have L4:1 as on-demand" in nothing.message
    assert nothing.message.endswith(": the quota is 0")
    assert "serve catalog discover" in str(nothing)


def test_a_discovery_survives_its_file(tmp_path: Path) -> None:
    assert decode(encode(FOUND), "aws.json") == FOUND
    with pytest.raises(CatalogError, match=r"aws.json is no discovery"):
        decode("{}", "aws.json")
    save_discovery(tmp_path, FOUND)
    held = stock(tmp_path)
    assert held.discoveries == (FOUND,)
    assert any(row.zone.region == "mx-central-1" for row in held.catalog.by_instance_type["g6.xlarge"])
    assert stock(tmp_path) is held


def test_an_estimate_gives_way_to_any_price_of_the_cloud(tmp_path: Path) -> None:
    save_discovery(tmp_path, FOUND)
    place = ("p5e.48xlarge", "us-east-1")
    added = [listing for listing in load(tmp_path).listings if listing.id[1:] == place]
    done = taken_over(added, [Quote(*place, ON_DEMAND, 700.0)], LISTED)
    assert (done.taken, done.refused) == (1, ())
    save(tmp_path, "aws", done.listings)
    (listing,) = [each for each in load(tmp_path).listings if each.id[1:] == place]
    assert listing.on_demand == Price(700.0, LISTED)


# --- rows of the user's own --------------------------------------------------------------------------------------------


def extra(home: Path, *rows: object) -> Path:
    file = home / "catalog" / "extra.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(rows))
    return file


ROW = {
    "cloud": "aws",
    "instance_type": "p9.48xlarge",
    "accelerator": "b300",
    "accelerator_count": 8,
    "vcpus": 192,
    "memory_gib": 4096,
    "region": "us-east-2",
    "zones": ["use2-az1"],
    "usd_hour": 120.5,
    "spot_usd_hour": 50,
    "as_of": "2026-11-01",
}


def test_a_row_of_ones_own_adds_a_type(tmp_path: Path) -> None:
    extra(tmp_path, ROW)
    (row,) = load(tmp_path).by_instance_type["p9.48xlarge"]
    assert row.shape.accelerator == "B300"
    assert (row.shape.name, row.zone.name, row.on_demand.usd_hour) == ("p9.48xlarge", "use2-az1", 120.5)
    assert row.spot is not None
    assert (row.spot.usd_hour, row.spot.origin.source) == (50.0, "catalog/extra.json")


def test_a_negotiated_price_holds_against_refreshed_ones(tmp_path: Path) -> None:
    place = {"cloud": "aws", "instance_type": "g6.xlarge", "region": "us-east-1"}
    extra(tmp_path, place | {"usd_hour": 0.5})
    refreshed = [each for each in packaged().listings if each.id == ("aws", "g6.xlarge", "us-east-1")]
    newer = Origin("an API", NOW, Quality.EXACT)
    save(
        tmp_path,
        "aws",
        taken_over(refreshed, [Quote("g6.xlarge", "us-east-1", ON_DEMAND, 0.81)], newer).listings,
    )
    rows = [row for row in load(tmp_path).by_instance_type["g6.xlarge"] if row.zone.region == "us-east-1"]
    before = [row for row in packaged().by_instance_type["g6.xlarge"] if row.zone.region == "us-east-1"]
    assert {row.on_demand.usd_hour for row in rows} == {0.5}
    assert [(row.zone, row.spot) for row in rows] == [(row.zone, row.spot) for row in before]


def test_a_negotiated_price_is_gone_with_its_row(tmp_path: Path) -> None:
    """A refresh keeps what clouds list, not what the user wrote."""
    file = extra(
        tmp_path, {"cloud": "aws", "instance_type": "g6.xlarge", "region": "us-east-1", "usd_hour": 0.5}
    )
    save(tmp_path, "aws", stock(tmp_path).listed.listings)
    file.unlink()
    rows = load(tmp_path).by_instance_type["g6.xlarge"]
    assert 0.5 not in {row.on_demand.usd_hour for row in rows}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({**ROW, "usd_hour": "12"}, "[0].usd_hour: must be a number above 0"),
        ({**ROW, "usd_hour": True}, "[0].usd_hour: must be a number above 0"),
        ({**ROW, "region": ""}, "[0].region: must be a name"),
        ({**ROW, "zones": "use2-az1"}, "[0].zones: must be a list of names"),
        ({**ROW, "as_of": "yesterday"}, "[0].as_of: must be a date such as 2026-11-01"),
        ({**ROW, "price": 1}, "[0].price: there is no such key"),
        ({**ROW, "vcpus": None}, "[0].vcpus: is needed, since the catalog does not know p9.48xlarge"),
        ("p9.48xlarge", "[0] must be an object"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: object, sentence: str) -> None:
    file = extra(tmp_path, row)
    with pytest.raises(CatalogError) as caught:
        load(tmp_path)
    assert str(file) in str(caught.value)
    assert sentence in str(caught.value)
