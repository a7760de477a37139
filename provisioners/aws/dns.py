"""One name for addresses in several regions: latency records in a hosted zone of Route 53.

There is one record per AWS region, distinguished by its SetIdentifier; Route 53 responds with the record of the region to which the
client's resolver has the least latency ("Latency-based routing", Route 53 developer guide). Agents of other clouds count for the AWS
region that is nearest to theirs (`nearest_region`).

Each agent with a public address has a health check (`provisioners.aws.health_checks`). A region with one agent is one record with that
check. A region with several is an alias for a name of its own (`skyserve-REGION` below the service's name) with a multivalue record and
a check for each agent: so a region leaves the responses when all of its agents are unhealthy, and an agent as soon as it is. If all
are, Route 53 responds with all.

Records are ours by the mark with which their identifiers begin. Other records of the names are left alone. An agent that
fails is in the responses until its check has failed, and the last copy has expired `TTL_S` later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import boto3

from provisioners.aws.api import AwsApi, Reply
from provisioners.aws.errors import CLOUD
from provisioners.aws.health_checks import REGION, SERVICE, HealthChecks, is_checkable
from provisioners.port.dns import Endpoint
from provisioners.port.errors import AuthError, InvalidRequestError

TTL_S = 30
_LABEL = "skyserve-"  # of the names of regions, below the service's
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
        self._checks = HealthChecks(self._api)

    def publish(
        self, zone: str, name: str, owner: str, mark: str, endpoints: Mapping[str, Sequence[Endpoint]]
    ) -> None:
        """Have the `name` (with a dot at its end) in the hosted `zone` mean these endpoints, by AWS region.

        Records with our `mark` that are not among them are deleted, and then the checks of agents that are gone. Without the permission
        to make health checks the records are published without them, and AuthError is raised after that.
        """
        zone_id = self._zone_id(zone)
        missing: AuthError | None = None
        checkable = [one for found in endpoints.values() for one in found if is_checkable(one)]
        try:
            checks, unneeded = self._checks.ensure(owner, name.rstrip("."), checkable)
        except AuthError as error:
            checks, unneeded, missing = {}, [], error
        wanted = [
            record
            for region, found in endpoints.items()
            for record in _records(zone_id, name, mark, region, found, checks)
        ]
        there = list(self._records(zone_id, name, mark))
        self._change(zone_id, wanted, there)
        if missing is not None:
            raise missing
        used = set(checks.values())
        before = {one["HealthCheckId"] for one in there if "HealthCheckId" in one}
        for check_id in sorted((before | set(unneeded)) - used):
            self._checks.delete(check_id)

    def _change(
        self, zone_id: str, wanted: Sequence[dict[str, Any]], there: Sequence[dict[str, Any]]
    ) -> None:
        """Replace records: made are those of agents before the aliases for them, and deleted the other way round."""
        keys = {_key(record) for record in wanted}
        changes = [("UPSERT", record) for record in wanted if record not in there]
        changes += [("DELETE", record) for record in _aliases_first(there) if _key(record) not in keys]
        if changes:
            batch = [{"Action": action, "ResourceRecordSet": record} for action, record in changes]
            self._call("ChangeResourceRecordSets", HostedZoneId=zone_id, ChangeBatch={"Changes": batch})

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
        """Ours under that name and its regions', as they would have to be sent to be what they are."""
        yield from self._listed(zone_id, name, mark, lambda found: found == name)
        below = f".{name}"
        yield from self._listed(
            zone_id,
            f"{_LABEL}a{below}",
            mark,
            lambda found: found.startswith(_LABEL) and found.endswith(below),
        )

    def _listed(
        self, zone_id: str, first: str, mark: str, belongs: Callable[[str], bool]
    ) -> Iterator[dict[str, Any]]:
        """Route 53 lists names by their labels from the right, so those that belong together are neighbours."""
        start: dict[str, str] = {"StartRecordName": first, "StartRecordType": "A"}
        while True:
            page = self._call("ListResourceRecordSets", HostedZoneId=zone_id, **start)
            for record in page.get("ResourceRecordSets", ()):
                if not belongs(record["Name"]):
                    return
                if record["Type"] == "A" and record.get("SetIdentifier", "").startswith(mark):
                    yield {key: record[key] for key in _SENT if key in record}
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
        return self._api.request(REGION, action, params, service=SERVICE)


_SENT = (
    "Name", "Type", "SetIdentifier", "Region", "MultiValueAnswer", "TTL", "ResourceRecords", "AliasTarget", "HealthCheckId",
)  # fmt: skip


def _records(
    zone_id: str,
    name: str,
    mark: str,
    region: str,
    endpoints: Sequence[Endpoint],
    checks: Mapping[Endpoint, str],
) -> list[dict[str, Any]]:
    """Return the records of one region; those of its agents come before the alias for them."""
    distinct = sorted({one.address: one for one in endpoints}.values())
    latency = {"Name": name, "Type": "A", "SetIdentifier": f"{mark}{region}", "Region": region}
    if len(distinct) < 2:
        return [latency | _address(one, checks) for one in distinct]
    regional = f"{_LABEL}{region}.{name}"
    alias = {"HostedZoneId": zone_id, "DNSName": regional, "EvaluateTargetHealth": True}
    return [
        *(
            {"Name": regional, "Type": "A", "SetIdentifier": f"{mark}{one.address}", "MultiValueAnswer": True}
            | _address(one, checks)
            for one in distinct
        ),
        latency | {"AliasTarget": alias},
    ]


def _address(endpoint: Endpoint, checks: Mapping[Endpoint, str]) -> dict[str, Any]:
    check_id = checks.get(endpoint)
    record: dict[str, Any] = {"TTL": TTL_S, "ResourceRecords": [{"Value": endpoint.address}]}
    return record if check_id is None else record | {"HealthCheckId": check_id}


def _key(record: Mapping[str, Any]) -> tuple[str, str]:
    return record["Name"], record["SetIdentifier"]


def _aliases_first(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(records, key=lambda record: "AliasTarget" not in record)
