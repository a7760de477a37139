"""AWS: the Price List API for on-demand, the spot price history for spot. Both want credentials.

The public price files of EC2 want none, but are 250 MB per region; a question per instance type is one page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from random import Random
from typing import Any

from policies.model import CapacityType
from provisioners.aws.api import AwsApi
from provisioners.clock import unix_now
from provisioners.offers.catalog.fetch import Sources
from provisioners.offers.catalog.model import Listing
from provisioners.offers.catalog.refresh import Progress, Quote
from provisioners.port.errors import TransientError

SOURCE = "AWS Price List API, EC2 spot price history"
_CLOUD = "aws"
_PRICES_ARE_AT = "us-east-1"  # one of the few regions that have the Price List API
_MAX_PAGES = 20
_LINUX = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}


def quotes(listings: Sequence[Listing], sources: Sources, progress: Progress) -> list[Quote]:
    api = AwsApi(sources.aws_profile, unix_now, sources.sleep, Random())
    names = list(dict.fromkeys(listing.shape.name for listing in listings))
    open_here = {
        each["RegionName"] for each in api.request(api.home_region, "DescribeRegions").get("Regions", ())
    }
    regions = [region for region in dict.fromkeys(each.region for each in listings) if region in open_here]
    questions = len(names) + len(regions)
    found: list[Quote] = []
    for number, name in enumerate(names):
        progress(number, questions, name)
        found += on_demand_quotes(name, _products(api, name))
    for number, region in enumerate(regions, len(names)):
        progress(number, questions, f"spot in {region}")
        there = [each.shape.name for each in listings if each.region == region]
        found += spot_quotes(region, _history(api, region, there))
    progress(questions, questions, "")
    return found


def on_demand_quotes(name: str, products: Iterator[Mapping[str, Any]]) -> list[Quote]:
    """Return the hourly price of a Linux machine by region; of several the dearest."""
    best: dict[str, float] = {}
    for product in products:
        attributes = product["product"]["attributes"]
        region = attributes.get("regionCode")
        if region is None or attributes.get("instanceType") != name:
            continue
        for term in product.get("terms", {}).get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                price = float(dimension["pricePerUnit"].get("USD", 0))
                if dimension["unit"] == "Hrs" and price > 0:
                    best[region] = max(price, best.get(region, price))
    return [Quote(name, region, CapacityType.ON_DEMAND, price) for region, price in best.items()]


def spot_quotes(region: str, history: Iterator[Mapping[str, Any]]) -> list[Quote]:
    """Return the newest price of each type in each zone (by zone id)."""
    newest: dict[tuple[str, str], Mapping[str, Any]] = {}
    for entry in history:
        key = entry["InstanceType"], entry["AvailabilityZoneId"]
        if key not in newest or newest[key]["Timestamp"] < entry["Timestamp"]:
            newest[key] = entry
    return [
        Quote(name, region, CapacityType.SPOT, float(entry["SpotPrice"]), zone)
        for (name, zone), entry in newest.items()
    ]


def _products(api: AwsApi, name: str) -> Iterator[Mapping[str, Any]]:
    wanted = {"instanceType": name, **_LINUX}
    params: dict[str, Any] = {
        "ServiceCode": "AmazonEC2",
        "FormatVersion": "aws_v1",
        "Filters": [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in wanted.items()],
    }
    for _ in range(_MAX_PAGES):
        page = api.request(_PRICES_ARE_AT, "GetProducts", params, service="pricing")
        yield from (json.loads(text) for text in page.get("PriceList", ()))
        if not page.get("NextToken"):
            return
        params["NextToken"] = page["NextToken"]
    raise TransientError(f"the Price List API has no end of pages about {name}", cloud=_CLOUD)


def _history(api: AwsApi, region: str, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield a history that starts now is the price of now: EC2 puts the last change before the start into it."""
    ids = {
        zone["ZoneName"]: zone["ZoneId"]
        for zone in api.request(region, "DescribeAvailabilityZones").get("AvailabilityZones", ())
    }
    params = {
        "StartTime": datetime.fromtimestamp(api.now(), UTC),
        "ProductDescriptions": ["Linux/UNIX"],
        "InstanceTypes": list(names),
    }
    for entry in api.pages(region, "DescribeSpotPriceHistory", "SpotPriceHistory", params):
        zone_id = entry.get("AvailabilityZoneId") or ids.get(entry.get("AvailabilityZone", ""))
        if zone_id is not None:
            yield {**entry, "AvailabilityZoneId": zone_id}
