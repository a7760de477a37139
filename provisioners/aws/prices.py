"""Spot prices of EC2 now."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from provisioners.aws.api import AwsApi

_MAX_VALUES = 200  # of one filter of EC2


def spot_prices_of(
    api: AwsApi, region: str, zone_ids: Mapping[str, str], instance_types: Collection[str] = ()
) -> dict[tuple[str, str], float]:
    """Return USD per hour by (instance type, zone id) in a region.

    `zone_ids` are by the account's zone names. Of all types, which are thousands of rows, or of `instance_types` alone; a
    filter, unlike the parameter, accepts types that EC2 does not know.

    A history that starts now is the price of now: EC2 puts the last change before the start into it.
    """
    newest: dict[tuple[str, str], Mapping[str, Any]] = {}
    params: dict[str, Any] = {
        "StartTime": datetime.fromtimestamp(api.now(), UTC),
        "ProductDescriptions": ["Linux/UNIX"],
    }
    if 0 < len(instance_types) <= _MAX_VALUES:
        params["Filters"] = [{"Name": "instance-type", "Values": sorted(instance_types)}]
    for entry in api.pages(region, "DescribeSpotPriceHistory", "SpotPriceHistory", params):
        zone_id = zone_ids.get(entry["AvailabilityZone"])
        if zone_id is None:
            continue  # a zone that is not open to this account
        key = (entry["InstanceType"], zone_id)
        if key not in newest or newest[key]["Timestamp"] < entry["Timestamp"]:
            newest[key] = entry
    return {key: float(entry["SpotPrice"]) for key, entry in newest.items()}
