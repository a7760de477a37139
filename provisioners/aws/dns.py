"""One name for addresses in several regions: latency records in a hosted zone of Route 53.

There is one record per AWS region, distinguished by its SetIdentifier, with the addresses of all agents there; Route 53 returns
with the record of the region to which the asker has the least latency ("Latency-based routing", Route 53 developer guide).
Agents of other clouds count for the AWS region that is nearest to theirs (`nearest_region`).

Records are ours by the mark with which their identifiers begin. Other records of the name are left alone. An agent that
fails is in the responses until its record is changed and the last copy has expired, `TTL_S` later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import boto3

from provisioners.aws.api import AwsApi, Reply
from provisioners.aws.errors import CLOUD
from provisioners.port.errors import InvalidRequestError

TTL_S = 30
_SERVICE = "route53"
_REGION = "us-east-1"  # where the one Route 53 there is responds
_FALLBACK = "us-east-1"

# The beginning of a region's name, and the AWS region nearest to it; the longest that fits counts.
_NEAREST: Mapping[str, Mapping[str, str]] = {
    "gcp": {
        "us-east": "us-east-1",
        "us-central": "us-east-2",
        "us-south": "us-east-2",
        "us-west": "us-west-2",
        "us-west2": "us-west-1",
        "northamerica": "ca-central-1",
        "southamerica": "sa-east-1",
        "europe": "eu-central-1",
        "europe-west1": "eu-west-3",
        "europe-west2": "eu-west-2",
        "europe-west8": "eu-south-1",
        "europe-west9": "eu-west-3",
        "europe-southwest": "eu-south-2",
        "europe-north": "eu-north-1",
        "asia-east1": "ap-east-1",
        "asia-east2": "ap-east-1",
        "asia-northeast": "ap-northeast-1",
        "asia-northeast3": "ap-northeast-2",
        "asia-southeast": "ap-southeast-1",
        "asia-southeast2": "ap-southeast-3",
        "asia-south": "ap-south-1",
        "australia": "ap-southeast-2",
        "me": "me-south-1",
        "africa": "af-south-1",
    },
    "azure": {
        "eastus": "us-east-1",
        "centralus": "us-east-2",
        "northcentralus": "us-east-2",
        "southcentralus": "us-east-2",
        "westus": "us-west-1",
        "westus2": "us-west-2",
        "westcentralus": "us-west-2",
        "canada": "ca-central-1",
        "brazil": "sa-east-1",
        "northeurope": "eu-west-1",
        "westeurope": "eu-central-1",
        "uk": "eu-west-2",
        "france": "eu-west-3",
        "germany": "eu-central-1",
        "switzerland": "eu-central-2",
        "italy": "eu-south-1",
        "spain": "eu-south-2",
        "poland": "eu-central-1",
        "sweden": "eu-north-1",
        "norway": "eu-north-1",
        "japan": "ap-northeast-1",
        "korea": "ap-northeast-2",
        "eastasia": "ap-east-1",
        "southeastasia": "ap-southeast-1",
        "centralindia": "ap-south-1",
        "southindia": "ap-south-1",
        "westindia": "ap-south-1",
        "australia": "ap-southeast-2",
        "uae": "me-central-1",
        "qatar": "me-south-1",
        "israel": "il-central-1",
        "southafrica": "af-south-1",
    },
}


def nearest_region(cloud: str, region: str) -> str:
    """Return the AWS region by whose latency an agent there is found.

    A pool of hosts is anywhere: it counts for one region, and is found by everybody if there is nothing else.
    """
    if cloud == CLOUD:
        return region
    fitting = [one for one in _NEAREST.get(cloud, {}) if region.startswith(one)]
    return _NEAREST[cloud][max(fitting, key=len)] if fitting else _FALLBACK


class Route53Names:
    """Thread-safe. Raises the classes of `provisioners.port.errors`."""

    def __init__(
        self,
        profile: str | None,
        now: Callable[[], float],
        sleep: Callable[[float], None],
        rng: Random | None = None,
        session: boto3.Session | None = None,
    ) -> None:
        self._api = AwsApi(profile, now, sleep, rng or Random(), session)

    def publish(self, zone: str, name: str, mark: str, addresses: Mapping[str, Sequence[str]]) -> None:
        """Have the `name` (with a dot at its end) in the hosted `zone` mean these IPv4 addresses, by AWS region.

        Records with our `mark` that are not among them are deleted.
        """
        zone_id = self._zone_id(zone)
        wanted = {
            f"{mark}{region}": _record(name, f"{mark}{region}", region, found)
            for region, found in addresses.items()
            if found
        }
        there = {one["SetIdentifier"]: one for one in self._records(zone_id, name, mark)}
        changes = [
            {"Action": "UPSERT", "ResourceRecordSet": record}
            for key, record in wanted.items()
            if there.get(key) != record
        ]
        changes += [
            {"Action": "DELETE", "ResourceRecordSet": record}
            for key, record in there.items()
            if key not in wanted
        ]
        if changes:
            self._call("ChangeResourceRecordSets", HostedZoneId=zone_id, ChangeBatch={"Changes": changes})

    def _zone_id(self, zone: str) -> str:
        """Return the public one: names of private zones resolve inside a VPC only."""
        listed = self._call("ListHostedZonesByName", DNSName=zone).get("HostedZones", ())
        for found in listed:
            if found["Name"] == zone and not found.get("Config", {}).get("PrivateZone"):
                return str(found["Id"]).rpartition("/")[2]
        raise InvalidRequestError(
            f"Route 53 has no public hosted zone {zone}: make one, or leave dns out of load_balancers",
            cloud=CLOUD,
            code="NoHostedZone",
        )

    def _records(self, zone_id: str, name: str, mark: str) -> Iterator[dict[str, Any]]:
        """Ours under that name, as they would have to be sent to be what they are."""
        start: dict[str, str] = {"StartRecordName": name, "StartRecordType": "A"}
        while True:
            page = self._call("ListResourceRecordSets", HostedZoneId=zone_id, **start)
            for record in page.get("ResourceRecordSets", ()):
                if (record["Name"], record["Type"]) != (name, "A"):
                    return
                if record.get("SetIdentifier", "").startswith(mark):
                    kept = ("Name", "Type", "SetIdentifier", "Region", "TTL", "ResourceRecords")
                    yield {key: record[key] for key in kept if key in record}
            if not page.get("IsTruncated"):
                return
            start = {
                "StartRecordName": page["NextRecordName"],
                "StartRecordType": page["NextRecordType"],
                **(
                    {"StartRecordIdentifier": page["NextRecordIdentifier"]}
                    if page.get("NextRecordIdentifier")
                    else {}
                ),
            }

    def _call(self, action: str, **params: Any) -> Reply:
        return self._api.request(_REGION, action, params, service=_SERVICE)


def _record(name: str, key: str, region: str, addresses: Sequence[str]) -> dict[str, Any]:
    return {
        "Name": name,
        "Type": "A",
        "SetIdentifier": key,
        "Region": region,
        "TTL": TTL_S,
        "ResourceRecords": [{"Value": address} for address in sorted(set(addresses))],
    }
