"""Names in Route 53: the official SDK against moto's server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from provisioners.aws.dns import TTL_S, Route53Names, nearest_region
from provisioners.port.errors import InvalidRequestError, ProvisionError

ZONE, NAME, MARK = "names.example.com.", "chat.names.example.com.", "skyserve-own-chat-"


class Dns:
    """The zone, and the requests to it."""

    def __init__(self) -> None:
        self.client = boto3.client("route53", region_name="us-east-1")
        self.zone_id = self.client.create_hosted_zone(Name=ZONE, CallerReference="test")["HostedZone"]["Id"]
        self.names = Route53Names(None, time.monotonic, lambda duration_s: None, Random(1))

    def publish(self, **addresses: list[str]) -> None:
        by_region = {region.replace("_", "-"): found for region, found in addresses.items()}
        self.names.publish(ZONE, NAME, MARK, by_region)

    def records(self) -> list[dict[str, Any]]:
        pages = self.client.get_paginator("list_resource_record_sets").paginate(HostedZoneId=self.zone_id)
        return [one for page in pages for one in page["ResourceRecordSets"] if one["Type"] == "A"]

    def meaning(self) -> dict[str, list[str]]:
        return {one["Region"]: [each["Value"] for each in one["ResourceRecords"]] for one in self.records()}

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
        made.client.delete_hosted_zone(Id=made.zone_id)
    finally:
        server.stop()


def test_a_name_follows_its_agents_and_goes_with_them(dns: Dns) -> None:
    dns.publish(us_east_1=["192.0.2.1"])
    assert dns.meaning() == {"us-east-1": ["192.0.2.1"]}
    (record,) = dns.records()
    assert (record["SetIdentifier"], record["TTL"]) == (f"{MARK}us-east-1", TTL_S)

    dns.publish(us_east_1=["192.0.2.3", "192.0.2.1"], eu_central_1=["192.0.2.2"])
    assert dns.meaning() == {"us-east-1": ["192.0.2.1", "192.0.2.3"], "eu-central-1": ["192.0.2.2"]}

    dns.publish(us_east_1=[], eu_central_1=["192.0.2.2"])
    assert dns.meaning() == {"eu-central-1": ["192.0.2.2"]}

    dns.publish()
    assert dns.records() == []
    dns.publish()
    assert dns.records() == []


def test_records_of_others_are_left_alone(dns: Dns) -> None:
    dns.add({"Name": f"www.{ZONE}", "Type": "A", "TTL": 60, "ResourceRecords": [{"Value": "192.0.2.9"}]})
    theirs = {"Name": NAME, "Type": "A", "SetIdentifier": "theirs", "Region": "ap-south-1", "TTL": 60}
    dns.add({**theirs, "ResourceRecords": [{"Value": "192.0.2.8"}]})
    dns.publish(us_east_1=["192.0.2.1"])
    dns.publish()
    assert sorted(one["Name"] for one in dns.records()) == [NAME, f"www.{ZONE}"]


def test_a_zone_that_is_not_there_is_named(dns: Dns) -> None:
    with pytest.raises(InvalidRequestError, match=r"no public hosted zone example\.org\."):
        dns.names.publish("example.org.", "chat.example.org.", MARK, {"us-east-1": ["192.0.2.1"]})


def test_a_private_zone_of_that_name_is_none(dns: Dns) -> None:
    made = dns.client.create_hosted_zone(
        Name="corp.example.",
        CallerReference="private",
        VPC={"VPCRegion": "us-east-1", "VPCId": "vpc-1"},
        HostedZoneConfig={"PrivateZone": True},
    )
    with pytest.raises(ProvisionError):
        dns.names.publish("corp.example.", "chat.corp.example.", MARK, {"us-east-1": ["192.0.2.1"]})
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
