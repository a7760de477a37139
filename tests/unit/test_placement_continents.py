"""Every region that the packaged catalog knows lies on a continent, and some are not where their prefix suggests."""

from __future__ import annotations

import pytest

from policies.model import Zone
from policies.placement.continents import ASIA, EUROPE, NORTH_AMERICA, OCEANIA, continent_of
from provisioners.offers.catalog.store import packaged


def test_every_region_of_the_catalog_has_a_continent() -> None:
    zones = {Zone(one.shape.cloud, one.region, one.region) for one in packaged().listings}
    assert len(zones) > 50
    assert [zone for zone in zones if continent_of(zone) is None] == []


@pytest.mark.parametrize(
    ("cloud", "region", "continent"),
    [
        ("aws", "ap-southeast-1", ASIA),
        ("aws", "ap-southeast-2", OCEANIA),
        ("gcp", "us-central1", NORTH_AMERICA),
        ("gcp", "australia-southeast1", OCEANIA),
        ("azure", "westus3", NORTH_AMERICA),
        ("azure", "westeurope", EUROPE),
        ("azure", "westindia", ASIA),
        ("ssh", "office", None),
    ],
)
def test_the_continent_of_a_region(cloud: str, region: str, continent: str | None) -> None:
    assert continent_of(Zone(cloud, region, region)) == continent
