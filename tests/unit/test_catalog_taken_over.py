"""Which of a price API's responses are believed."""

from __future__ import annotations

import pytest

from policies.model import CapacityType
from provisioners.offers.catalog import Listing, Origin, Price, Quality, Shape
from provisioners.offers.catalog.refresh import PRICE_APIS, Quote, taken_over

KNOWN = Origin("a list", 0.0, Quality.EXACT)
NEW = Origin("the API", 1.0, Quality.EXACT)
LISTING = Listing(
    Shape("aws", "g6.xlarge", "L4", 1, 4, 16),
    "us-east-1",
    Price(1.0, KNOWN),
    {"use1-az1": Price(0.5, KNOWN), "use1-az2": None},
)
SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND


def quote(kind: CapacityType, usd_hour: float, zone: str | None = None) -> Quote:
    return Quote("g6.xlarge", "us-east-1", kind, usd_hour, zone)


@pytest.mark.parametrize(
    ("quotes", "accept", "prices", "why"),
    [
        pytest.param([], False, (1.0, 0.5, None), [], id="nothing said, nothing changed"),
        pytest.param([quote(ON_DEMAND, 2.9)], False, (2.9, 0.5, None), [], id="nearly three times the price"),
        pytest.param([quote(ON_DEMAND, 3.1)], False, (1.0, 0.5, None), ["3.1 USD per hour, and was 1"], id="more than that"),
        pytest.param([quote(ON_DEMAND, 3.1)], True, (3.1, 0.5, None), [], id="more than that, accepted"),
        pytest.param([quote(SPOT, 0.1, "use1-az1")], False, (1.0, 0.5, None), ["0.1 USD per hour, and was 0.5"], id="less than a third"),
        pytest.param([quote(SPOT, 0.1, "use1-az1")], True, (1.0, 0.1, None), [], id="less than a third, accepted"),
        pytest.param([quote(SPOT, 0.4)], False, (1.0, 0.4, 0.4), [], id="a spot price of all zones"),
        pytest.param([quote(SPOT, 0.4), quote(SPOT, 0.6, "use1-az2")], False, (1.0, 0.4, 0.6), [], id="a zone's own goes before it"),
        pytest.param([quote(SPOT, 0.01, "use1-az2")], False, (1.0, 0.5, 0.01), [], id="the first price of a zone has nothing to differ from"),
        pytest.param([quote(SPOT, 1.1)], True, (1.0, 0.5, None), ["spot for 1.1 USD per hour is above on-demand (1)"], id="spot above on-demand, accepted or not"),
        pytest.param([quote(ON_DEMAND, 1.5), quote(SPOT, 1.2)], False, (1.5, 1.2, 1.2), [], id="on-demand of now is what counts"),
        pytest.param([quote(SPOT, 0.0)], True, (1.0, 0.5, None), ["0 USD per hour is no price"], id="free of charge"),
        pytest.param([quote(ON_DEMAND, float("nan"))], True, (1.0, 0.5, None), ["nan USD per hour is no price"], id="no number"),
        pytest.param([Quote("g6.xlarge", "eu-west-1", ON_DEMAND, 1.2)], False, (1.0, 0.5, None), [], id="another region"),
    ],
)  # fmt: skip
def test_what_is_taken_over(
    quotes: list[Quote], accept: bool, prices: tuple[float | None, ...], why: list[str]
) -> None:
    done = taken_over([LISTING], quotes, NEW, accept=accept)
    (found,) = done.listings
    after = (found.on_demand, *found.spot.values())
    before = (LISTING.on_demand, *LISTING.spot.values())
    assert tuple(price and price.usd_hour for price in after) == prices
    assert [str(refusal) for refusal in done.refused] == [f"g6.xlarge in us-east-1: {each}" for each in why]
    changed = [new for new, old in zip(after, before, strict=True) if new != old]
    assert done.taken == len(changed)
    assert {price.origin for price in changed if price} <= {NEW}


def test_every_cloud_of_the_catalog_has_an_api() -> None:
    assert set(PRICE_APIS) == {"aws", "azure", "gcp"}
