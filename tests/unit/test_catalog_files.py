"""Catalog files: the packaged ones are sound, and malformed ones are rejected."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from policies.model import CapacityType
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
)
from provisioners.offers.catalog.codec import decode, encode
from provisioners.offers.catalog.store import save
from provisioners.offers.matching import offers_of
from provisioners.port.accelerator_names import ACCELERATORS, canonical, close_to
from provisioners.port.base import Candidate, Requirements

JULY, AUGUST = 1_783_000_000.0, 1_785_600_000.0
L4 = Shape("aws", "g6.xlarge", "L4", 1, 4, 16)


def price(usd_hour: float, as_of: float | None = JULY, source: str = "a list") -> Price:
    return Price(usd_hour, Origin(source, as_of, Quality.EXACT))


def listing(on_demand: Price, **spot: Price | None) -> Listing:
    return Listing(L4, "us-east-1", on_demand, spot)


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_a_packaged_file_is_as_it_would_be_written(cloud: str) -> None:
    content = files("provisioners.offers.catalog").joinpath("data", f"{cloud}.json").read_text()
    assert encode(cloud, decode(content, cloud)) == content


def test_the_packaged_catalog_is_sound() -> None:
    rows = packaged().rows
    assert {row.zone.cloud for row in rows} == {"aws", "azure", "gcp"}
    assert len({(row.shape.cloud, row.shape.name, row.zone) for row in rows}) == len(rows)
    wrong = [
        row
        for row in rows
        if (row.spot is not None and row.spot.usd_hour > row.on_demand.usd_hour)
        or row.shape.accelerator not in (None, *ACCELERATORS)
        or (row.shape.accelerator is None) != (row.shape.accelerator_count == 0)
        or not (row.shape.vcpus >= 2 and row.shape.memory_gib >= 4)
        or (row.zone.cloud != "aws" and not row.zone.name.startswith(row.zone.region))
        or (row.zone.cloud == "aws" and "-az" not in row.zone.name)
    ]
    assert wrong == []


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_an_agent_finds_a_small_machine_wherever_a_replica_does(cloud: str) -> None:
    rows = packaged().of(cloud).rows
    small = {row.zone.region for row in rows if row.shape.accelerator is None and row.shape.vcpus <= 4}
    assert {row.zone.region for row in rows} == small


@pytest.mark.parametrize(
    ("accelerator", "count", "clouds", "regions"),
    [
        ("T4", 1, "aws azure gcp", 40),
        ("L4", 1, "aws gcp", 30),
        ("A10G", 1, "aws", 9),
        ("L40S", 1, "aws", 12),
        ("A100", 1, "gcp", 10),
        ("A100", 8, "aws azure gcp", 20),
        ("A100-80GB", 1, "azure gcp", 20),
        ("H100", 1, "aws azure gcp", 40),
        ("H100", 8, "aws azure gcp", 40),
        ("H100-MEGA", 8, "gcp", 10),
        ("H200", 8, "aws azure gcp", 30),
        ("B200", 8, "aws gcp", 15),
        ("B300", 8, "aws", 4),
        ("RTX-PRO-6000", 1, "aws", 9),
        ("MI300X", 8, "azure", 2),
        ("V100", 1, "gcp", 1),
    ],
)
def test_what_people_ask_for_has_prices_that_say_where_they_are_from(
    accelerator: str, count: int, clouds: str, regions: int
) -> None:
    need = Requirements((Candidate(accelerator=accelerator, accelerator_count=count, use_spot=True),))
    offers = offers_of(need, packaged())
    assert {offer.zone.cloud for offer in offers} == set(clouds.split())
    assert len({(offer.zone.cloud, offer.zone.region) for offer in offers}) >= regions
    assert all(offer.price_usd_hour > 0 for offer in offers)
    rows = [row for row in packaged().by_accelerator[accelerator] if row.shape.accelerator_count == count]
    assert all(row.spot is None or row.spot.origin.as_of is not None for row in rows), (
        "no spot without a date"
    )
    assert all(row.on_demand.origin.source for row in rows)


def test_what_a_cloud_sells_by_reservation_alone_is_known() -> None:
    types = {row.shape.name for row in packaged().rows if row.shape.no_on_demand}
    assert types == {
        "a3-highgpu-1g",
        "a3-highgpu-2g",
        "a3-highgpu-4g",
        "a3-ultragpu-8g",
        "a4-highgpu-8g",
        "p5e.48xlarge",
    }
    assert all(row.price(CapacityType.ON_DEMAND) is None for row in packaged().rows if row.shape.no_on_demand)


def test_machines_of_one_accelerator_cost_about_the_same_per_accelerator() -> None:
    """A price of a wrong SKU stands out. The dearest of a kind is not seven times the cheapest in its cloud."""
    spread = {}
    for accelerator in packaged().accelerators:
        for cloud in packaged().clouds:
            each = [
                row.on_demand.usd_hour / row.shape.accelerator_count
                for row in packaged().by_accelerator[accelerator]
                if row.zone.cloud == cloud and row.shape.vcpus / row.shape.accelerator_count <= 30
            ]
            if each:
                spread[accelerator, cloud] = max(each) / min(each)
    assert {key: times for key, times in spread.items() if times > 7} == {}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param("[]", id="no object"),
        pytest.param('{"cloud": "aws", "origins": [], "types": {}}', id="no prices"),
        pytest.param(
            '{"cloud": "aws", "origins": [["x", null, "sure"]], "types": {}, "prices": {}}', id="no quality"
        ),
        pytest.param(
            '{"cloud": "aws", "origins": [["x", "soon", "exact"]], "types": {}, "prices": {}}', id="no date"
        ),
        pytest.param(
            '{"cloud": "aws", "origins": [["x", null, "exact"]], "types": {}, "prices": {"m": {"r": [[1, 0], {}]}}}',
            id="a type that is not listed",
        ),
        pytest.param(
            '{"cloud": "aws", "origins": [], "types": {"m": [null, 0, 2, 8]}, "prices": {"m": {"r": [[1, 0], {}]}}}',
            id="an origin that is not listed",
        ),
        pytest.param(
            '{"cloud": "aws", "origins": [], "types": {"m": [null, 0, 2, 8, "no_spot"]}, "prices": {}}',
            id="a flag that is not known",
        ),
        pytest.param(
            '{"cloud": "aws", "origins": [["x", null, "exact"]], "types": {"m": [null, 0, 2, 8]}, "prices": {"m": {"r": [[-1, 0], {}]}}}',
            id="a price below zero",
        ),
        pytest.param(
            '{"cloud": "aws", "origins": [["x", null, "exact"]], "types": {"m": [null, 0, 2, 8]}, "prices": {"m": {"r": [[NaN, 0], {}]}}}',
            id="a price that is no number",
        ),
    ],
)
def test_what_is_no_catalog_is_an_error_that_names_the_file(content: str) -> None:
    with pytest.raises(CatalogError, match=r"^broken\.json is no catalog: "):
        decode(content, "broken.json")


@pytest.mark.parametrize("is_sold_so", [True, False])
def test_a_file_says_what_is_not_sold_on_demand(is_sold_so: bool) -> None:
    written = [Listing(replace(L4, no_on_demand=not is_sold_so), "us-east-1", price(0.8), {"use1-az1": None})]
    assert decode(encode("aws", written), "x") == written


def test_a_price_keeps_its_origin_through_a_file() -> None:
    written = [
        listing(
            price(0.8),
            **{
                "use1-az1": price(0.3, AUGUST, "another list"),
                "use1-az2": None,
                "use1-az3": price(0.4, None),
            },
        )
    ]
    assert decode(encode("aws", written), "x") == written


@pytest.mark.parametrize(
    ("known", "other", "kept"),
    [
        pytest.param(price(1.0), price(2.0, AUGUST), 2.0, id="the newer one"),
        pytest.param(price(1.0, AUGUST), price(2.0), 1.0, id="not the older one"),
        pytest.param(price(1.0), price(2.0), 1.0, id="of the same day the known one"),
        pytest.param(price(1.0, None), price(2.0), 2.0, id="any date is newer than none"),
        pytest.param(price(1.0), price(2.0, None), 1.0, id="none is older than any"),
    ],
)
def test_which_price_counts(known: Price, other: Price, kept: float) -> None:
    base, overlay = listing(known, a=known, b=None), listing(other, a=other, b=other, c=other)
    (found,) = Catalog((base,)).updated([overlay]).listings
    assert found.on_demand.usd_hour == kept
    spot = {zone: each and each.usd_hour for zone, each in found.spot.items()}
    assert spot == {"a": kept, "b": 2.0}, "what was not known is taken over, a zone that was not is not"


def test_a_home_without_refreshed_prices_has_the_packaged_ones(tmp_path: Path) -> None:
    assert load(tmp_path) is packaged()


def test_a_refreshed_file_lies_over_the_packaged_one(tmp_path: Path) -> None:
    known = next(each for each in packaged().listings if each.shape.name == "g6.xlarge")
    newer = replace(known, on_demand=price(0.77, 4_000_000_000.0, "the API"))
    save(tmp_path, "aws", [newer])
    found = {each.id: each for each in load(tmp_path).listings}
    assert found[known.id] == newer
    assert len(found) == len(packaged().listings)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b'{"cloud": ', "is no catalog", id="cut off"),
        pytest.param(b" " * (17 << 20), "larger than", id="too large"),
    ],
)
def test_a_broken_file_of_the_home_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "aws.json").write_bytes(content)
    with pytest.raises(CatalogError, match=f"aws.json.*{said}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("a100", "A100"),
        ("A100-40GB", "A100"),
        ("a100-sxm4-80gb", "A100-80GB"),
        ("A100 80GB", "A100-80GB"),
        ("nvidia-tesla-t4", "T4"),
        ("NVIDIA L4", "L4"),
        ("nvidia-h100-80gb", "H100"),
        ("v100_32gb", "V100-32GB"),
        ("tpu-v5e", "tpu-v5e"),
        ("AMD Instinct MI300X", "MI300X"),
        ("mi300x-192gb", "MI300X"),
        ("nvidia-b200", "B200"),
        ("nvidia-h100-mega-80gb", "H100-MEGA"),
        ("nvidia-h200-141gb", "H200"),
        ("nvidia-rtx-pro-6000", "RTX-PRO-6000"),
        ("RTX PRO Server 6000", "RTX-PRO-6000"),
    ],
)
def test_an_accelerator_has_one_name(written: str, meant: str) -> None:
    assert canonical(written) == meant


@pytest.mark.parametrize(
    ("word", "meant"),
    [("A1000", "A100"), ("h1O0", "H100"), ("us-esat-1", "us-east-1"), ("gaudi3", None)],
)
def test_a_slip_is_understood(word: str, meant: str | None) -> None:
    assert close_to(word, [*ACCELERATORS, "us-west-1", "us-east-1", "us-east-2"]) == meant


def test_a_row_knows_its_price_and_its_age() -> None:
    (row,) = Catalog((listing(price(0.8), z=price(0.3, None)),)).rows
    assert row.price(CapacityType.SPOT) == price(0.3, None)
    assert (row.on_demand.origin.age_s(JULY + 60), price(1, None).origin.age_s(JULY)) == (60, None)


def test_an_encoded_file_is_json_with_a_line_per_region() -> None:
    text = encode("aws", packaged().of("aws").listings)
    assert json.loads(text)["cloud"] == "aws"
    assert sum(line.startswith("   ") for line in text.splitlines()) == len(packaged().of("aws").listings)
