"""Spot prices of EC2 now."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from provisioners.aws.api import AwsApi


def spot_prices_of(api: AwsApi, region: str, zone_ids: Mapping[str, str]) -> dict[tuple[str, str], float]:
    """USD per hour by (instance type, zone id) in a region. `zone_ids` are by the account's zone names.

    A history that starts now is the price of now: EC2 puts the last change before the start into it.
    """
    newest: dict[tuple[str, str], Mapping[str, Any]] = {}
    params = {"StartTime": datetime.fromtimestamp(api.now(), UTC), "ProductDescriptions": ["Linux/UNIX"]}
    for entry in api.pages(region, "DescribeSpotPriceHistory", "SpotPriceHistory", params):
        zone_id = zone_ids.get(entry["AvailabilityZone"])
        if zone_id is None:
            continue  # a zone that is not open to this account
        key = (entry["InstanceType"], zone_id)
        if key not in newest or newest[key]["Timestamp"] < entry["Timestamp"]:
            newest[key] = entry
    return {key: float(entry["SpotPrice"]) for key, entry in newest.items()}
