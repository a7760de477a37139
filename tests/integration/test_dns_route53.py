"""Names in Route 53: the official SDK against moto's server."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from provisioners.aws.api import AwsApi
from provisioners.aws.dns import TTL_S, Route53Names, nearest_region
from provisioners.aws.health_checks import HealthChecks, is_checkable
from provisioners.aws.orphans import remove
from provisioners.port.dns import Endpoint
from provisioners.port.errors import AuthError, InvalidRequestError, ProvisionError
from provisioners.port.vm import OWNER_TAG, TOKEN_TAG

ZONE, NAME, MARK = "names.example.com.", "chat.names.example.com.", "skyserve-own-chat-"
# Addresses that Route 53 would check; nothing connects to them.
ONE, TWO, THREE = (
    Endpoint(f"203.0.112.{number}", f"own-chat-{number}", 8000, "http") for number in (1, 2, 3)
)


class Dns:
    """The zone, and the requests to it."""

    def __init__(self) -> None:
        self.client = boto3.client("route53", region_name="us-east-1")
        self.zone_id = self.client.create_hosted_zone(Name=ZONE, CallerReference="test")["HostedZone"]["Id"]
        self.time = 1_800_000_000.0
        self.names = Route53Names(None, self.now, lambda duration_s: None, Random(1))
        self.checks = HealthChecks(AwsApi(None, self.now, lambda duration_s: None, Random(1)))

    def now(self) -> float:
        """Each call is a second later: Route 53 takes no reference twice."""
        self.time += 1.0
        return self.time

    def publish(self, name: str = NAME, **endpoints: list[Endpoint]) -> None:
        by_region = {region.replace("_", "-"): found for region, found in endpoints.items()}
        self.names.publish(ZONE, name, "own", MARK, by_region)

    def records(self) -> list[dict[str, Any]]:
        pages = self.client.get_paginator("list_resource_record_sets").paginate(HostedZoneId=self.zone_id)
        return [one for page in pages for one in page["ResourceRecordSets"] if one["Type"] == "A"]

    def meaning(self) -> dict[str, list[str]]:
        """The addresses by region, aliases followed."""
        found: dict[str, list[str]] = {}
        for one in self.records():
            if "Region" not in one:
                continue
            target = one.get("AliasTarget", {}).get("DNSName", one["SetIdentifier"])
            those = [each for each in self.records() if target in (each["Name"], each.get("SetIdentifier"))]
            found[one["Region"]] = sorted(
                value["Value"] for each in those for value in each.get("ResourceRecords", ())
            )
        return found

    def watched(self) -> dict[str, str]:
        """The address that each check of a record watches, by the address of the record."""
        by_id = {one["Id"]: one["HealthCheckConfig"]["IPAddress"] for one in self.listed()}
        return {
            one["ResourceRecords"][0]["Value"]: by_id[one["HealthCheckId"]]
            for one in self.records()
            if "HealthCheckId" in one
        }

    def listed(self) -> list[dict[str, Any]]:
        return list(self.client.list_health_checks()["HealthChecks"])

    def add(self, record: dict[str, Any]) -> None:
        changes = {"Changes": [{"Action": "CREATE", "ResourceRecordSet": record}]}
        self.client.change_resource_record_sets(HostedZoneId=self.zone_id, ChangeBatch=changes)  # type: ignore[arg-type]


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dns]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL_ROUTE_53", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATESTTESTTESTTEST")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-nobody")
        made = Dns()
        yield made
        for record in made.records():
            changes = {"Changes": [{"Action": "DELETE", "ResourceRecordSet": record}]}
            made.client.change_resource_record_sets(HostedZoneId=made.zone_id, ChangeBatch=changes)  # type: ignore[arg-type]
        for check in made.listed():
            made.client.delete_health_check(HealthCheckId=check["Id"])
        made.client.delete_hosted_zone(Id=made.zone_id)
    finally:
        server.stop()


@pytest.mark.long
def test_a_name_follows_its_agents_and_goes_with_them(dns: Dns) -> None:
    dns.publish(us_east_1=[ONE])
    assert dns.meaning() == {"us-east-1": [ONE.address]}
    (record,) = dns.records()
    assert (record["SetIdentifier"], record["TTL"]) == (f"{MARK}us-east-1", TTL_S)

    dns.publish(us_east_1=[THREE, ONE], eu_central_1=[TWO])
    assert dns.meaning() == {"us-east-1": [ONE.address, THREE.address], "eu-central-1": [TWO.address]}

    dns.publish(us_east_1=[], eu_central_1=[TWO])
    assert dns.meaning() == {"eu-central-1": [TWO.address]}
    assert len(dns.records()) == 1

    dns.publish()
    assert dns.records() == []
    dns.publish()
    assert dns.records() == []


def test_the_name_of_the_zone_itself(dns: Dns) -> None:
    dns.add({"Name": f"www.{ZONE}", "Type": "A", "TTL": 60, "ResourceRecords": [{"Value": "192.0.2.9"}]})
    dns.publish(ZONE, us_east_1=[ONE, TWO])
    assert dns.meaning() == {"us-east-1": [ONE.address, TWO.address]}
    dns.publish(ZONE, us_east_1=[TWO])
    assert dns.meaning() == {"us-east-1": [TWO.address]}
    dns.publish(ZONE)
    assert [one["Name"] for one in dns.records()] == [f"www.{ZONE}"]


def test_each_agent_has_a_check_of_its_own(dns: Dns) -> None:
    dns.publish(us_east_1=[ONE, THREE], eu_central_1=[TWO])
    assert dns.watched() == {one.address: one.address for one in (ONE, TWO, THREE)}
    config = next(one for one in dns.listed() if one["HealthCheckConfig"]["IPAddress"] == ONE.address)
    assert config["HealthCheckConfig"].items() >= {
        "Type": "HTTP", "Port": 8000, "ResourcePath": "/-/ready", "RequestInterval": 10, "FailureThreshold": 3,
        "FullyQualifiedDomainName": "chat.names.example.com",
    }.items()  # fmt: skip
    tags = dns.client.list_tags_for_resource(ResourceType="healthcheck", ResourceId=config["Id"])
    found = {one["Key"]: one["Value"] for one in tags["ResourceTagSet"]["Tags"]}
    assert (found[OWNER_TAG], found[TOKEN_TAG]) == ("own", ONE.token)
    aliases = [one["AliasTarget"] for one in dns.records() if "AliasTarget" in one]
    assert [one["EvaluateTargetHealth"] for one in aliases] == [True]


def test_the_same_again_changes_nothing(dns: Dns) -> None:
    dns.publish(us_east_1=[ONE, THREE], eu_central_1=[TWO])
    before = dns.records(), dns.listed()
    dns.publish(us_east_1=[ONE, THREE], eu_central_1=[TWO])
    assert (dns.records(), dns.listed()) == before


def test_a_check_follows_the_address_and_the_scheme_of_its_agent(dns: Dns) -> None:
    dns.publish(us_east_1=[ONE])
    moved = ONE._replace(address="203.0.112.9", scheme="https", port=443)
    dns.publish(us_east_1=[moved])
    (check,) = dns.listed()
    assert dns.watched() == {moved.address: moved.address}
    assert (check["HealthCheckConfig"]["Type"], check["HealthCheckConfig"]["EnableSNI"]) == ("HTTPS", True)
    dns.publish(us_east_1=[moved._replace(scheme="")])
    assert dns.watched() == {}
    assert dns.listed() == []


def test_no_check_is_left_when_the_name_goes(dns: Dns) -> None:
    dns.publish(us_east_1=[ONE, THREE], eu_central_1=[TWO])
    dns.publish()
    assert dns.records() == dns.listed() == []
    dns.publish(us_east_1=[ONE])  # again, by a reference of its own
    assert dns.watched() == {ONE.address: ONE.address}


@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.1.1", "100.64.0.1", "lb.example.com"])
def test_what_cannot_be_reached_from_outside_has_no_check(dns: Dns, address: str) -> None:
    found = ONE._replace(address=address)
    assert not is_checkable(found)
    assert is_checkable(ONE)
    if address[0].isdigit():
        dns.publish(us_east_1=[found])
        assert dns.meaning() == {"us-east-1": [address]}
        assert dns.listed() == []


@pytest.mark.long
def test_a_publisher_that_was_killed_between_two_calls_goes_on(dns: Dns) -> None:
    """After the check was made and before a record names it: it is found again. The check of an agent that is gone: as an orphan."""
    api = AwsApi(None, dns.now, lambda duration_s: None, Random(1))
    made, _ = HealthChecks(api).ensure("own", NAME.rstrip("."), [ONE, TWO])
    dns.publish(us_east_1=[ONE])
    assert len(dns.listed()) == 2
    assert dns.watched() == {ONE.address: ONE.address}
    orphans = {one.id: one for one in dns.checks.orphans("own")}
    assert {one.token for one in orphans.values()} == {ONE.token, TWO.token}
    assert list(dns.checks.orphans("another")) == []
    for _ in range(2):  # gone already is fine
        remove(api, orphans[made[TWO]])
    assert len(dns.listed()) == 1


class Denied(AwsApi):
    """An account whose policy is of before health checks."""

    def call(self, region: str, action: str, *args: Any, **how: Any) -> Any:
        if "HealthCheck" in action:
            raise AuthError(f"aws route53:{action} is missing", cloud="aws")
        return super().call(region, action, *args, **how)


def test_without_the_permission_records_are_published_all_the_same(dns: Dns) -> None:
    dns.names._api = Denied(None, dns.now, lambda duration_s: None, Random(1))
    dns.names._checks = HealthChecks(dns.names._api)
    with pytest.raises(AuthError, match="ListHealthChecks"):
        dns.publish(us_east_1=[ONE], eu_central_1=[TWO])
    assert dns.meaning() == {"us-east-1": [ONE.address], "eu-central-1": [TWO.address]}
    dns.publish()  # that needs none
    assert dns.records() == []
    assert HealthChecks(dns.names._api).orphans("own") == []


def test_records_of_others_are_left_alone(dns: Dns) -> None:
    dns.add({"Name": f"www.{ZONE}", "Type": "A", "TTL": 60, "ResourceRecords": [{"Value": "192.0.2.9"}]})
    theirs = {"Name": NAME, "Type": "A", "SetIdentifier": "theirs", "Region": "ap-south-1", "TTL": 60}
    dns.add({**theirs, "ResourceRecords": [{"Value": "192.0.2.8"}]})
    other = {"Type": "HTTP", "IPAddress": "203.0.112.7", "Port": 80, "ResourcePath": "/"}
    dns.client.create_health_check(CallerReference="theirs", HealthCheckConfig=other)  # type: ignore[arg-type]
    dns.publish(us_east_1=[ONE])
    dns.publish()
    assert sorted(one["Name"] for one in dns.records()) == [NAME, f"www.{ZONE}"]
    assert [one["CallerReference"] for one in dns.listed()] == ["theirs"]


def test_a_zone_that_is_not_there_is_named(dns: Dns) -> None:
    with pytest.raises(InvalidRequestError, match=r"no public hosted zone example\.org\."):
        dns.names.publish("example.org.", "chat.example.org.", "own", MARK, {"us-east-1": [ONE]})


def test_a_private_zone_of_that_name_is_none(dns: Dns) -> None:
    made = dns.client.create_hosted_zone(
        Name="corp.example.",
        CallerReference="private",
        VPC={"VPCRegion": "us-east-1", "VPCId": "vpc-1"},
        HostedZoneConfig={"PrivateZone": True},
    )
    with pytest.raises(ProvisionError):
        dns.names.publish("corp.example.", "chat.corp.example.", "own", MARK, {"us-east-1": [ONE]})
    dns.client.delete_hosted_zone(Id=made["HostedZone"]["Id"])


@pytest.mark.parametrize(
    ("cloud", "region", "nearest"),
    [
        pytest.param("aws", "eu-west-2", "eu-west-2", id="AWS's own"),
        pytest.param("gcp", "europe-west4", "eu-central-1", id="the Netherlands"),
        pytest.param("gcp", "europe-west2", "eu-west-2", id="London, which is in Europe, too"),
        pytest.param("gcp", "asia-south1", "ap-south-1", id="Mumbai"),
        pytest.param("gcp", "asia-southeast1", "ap-southeast-1", id="Singapore, not Mumbai"),
        pytest.param("azure", "eastus2", "us-east-1", id="Virginia"),
        pytest.param("azure", "westus2", "us-west-2", id="Washington, not California"),
        pytest.param("azure", "uksouth", "eu-west-2", id="London again"),
        pytest.param("ssh", "rack", "us-east-1", id="nobody knows"),
    ],
)
def test_the_region_that_is_nearest(cloud: str, region: str, nearest: str) -> None:
    assert nearest_region(cloud, region) == nearest
