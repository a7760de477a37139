"""Findings about whether the subnets of machines have default routes to the Internet. Nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from policies.model import FailureKind, Zone
from provisioners.aws.api import AwsApi
from provisioners.aws.network import SubnetPlace
from provisioners.port.errors import ProvisionError
from provisioners.port.vm import Finding, Level

_EVERYWHERE = "0.0.0.0/0"


def outbound(
    api: AwsApi, zones: Sequence[Zone], place: Callable[[Zone], SubnetPlace], is_private: bool
) -> Iterator[Finding]:
    """Yield a finding for the subnet of each zone. The trial launch reports why `place` finds none."""
    tables: dict[str, list[Mapping[str, Any]]] = {}  # by VPC
    for zone in zones:
        try:
            subnet, vpc = place(zone)
        except ProvisionError:
            continue
        what = f"way out of {subnet} in {zone.name}"
        try:
            if vpc not in tables:
                of_vpc = {"Filters": [{"Name": "vpc-id", "Values": [vpc]}]}
                tables[vpc] = list(api.pages(zone.region, "DescribeRouteTables", "RouteTables", of_vpc))
        except ProvisionError as error:
            denied = "; the policy must allow ec2:DescribeRouteTables" * (error.kind is FailureKind.AUTH)
            yield Finding(what, Level.NOTE, f"not determined{denied}: {error}")
            continue
        message = problem(default_route(tables[vpc], subnet), is_private)
        yield Finding(what, Level.NOTE if message else Level.FINE, message)


def default_route(tables: Sequence[Mapping[str, Any]], subnet: str) -> Mapping[str, Any] | None:
    """Return the default route of a subnet: that of its own route table, else of the main one of its VPC. None if it has none."""

    def of(key: str, value: object) -> list[Mapping[str, Any]]:
        return [
            table for table in tables if any(one.get(key) == value for one in table.get("Associations", ()))
        ]

    for table in of("SubnetId", subnet) or of("Main", True):
        for route in table.get("Routes", ()):
            if route.get("DestinationCidrBlock") == _EVERYWHERE and route.get("State") == "active":
                return dict(route)
    return None


def problem(route: Mapping[str, Any] | None, is_private: bool) -> str:
    """Return what is wrong with a default route, which is None if there is none; "" if nothing is."""
    is_gateway = route is not None and str(route.get("GatewayId", "")).startswith("igw-")
    if is_private and route is None:
        return (
            "the subnet has no default route: machines without public addresses download nothing; route 0.0.0.0/0 to a NAT "
            "gateway (docs/network.md)"
        )
    if is_private and is_gateway:
        return (
            "the default route leads to an Internet gateway, which is of no use to machines without public addresses: route "
            "0.0.0.0/0 to a NAT gateway, or name another subnet in clouds.aws.subnets (docs/network.md)"
        )
    if not is_private and not is_gateway:
        return (
            "the subnet has no route to an Internet gateway, so nothing reaches machines by their public addresses: name another "
            "one in clouds.aws.subnets, or set use_private_ip (docs/network.md)"
        )
    return ""
