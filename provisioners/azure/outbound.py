"""Whether machines without public addresses reach anything outside of their network. Nothing is changed.

Networks that are made after 31 March 2026 have no default outbound access: the way out is a NAT gateway, or a route of the user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from azure.core.exceptions import ResourceNotFoundError

from provisioners.azure.api import Arm
from provisioners.azure.translate import group_of, name_of
from provisioners.port.errors import ProvisionError
from provisioners.port.vm import Finding, Level

_WHAT = "way out of private networks"
_OWN = (
    "with use_private_ip and without subnets, machines are in networks that skyserve makes: those have no NAT gateway, so "
    "machines download nothing, and this host is not in them; set clouds.azure.subnets (docs/network.md)"
)
_NONE = (
    "the subnet has neither a NAT gateway nor a route table: machines without public addresses download nothing; add one "
    "(`az network vnet subnet update --nat-gateway`), see docs/network.md"
)


def outbound(arm: Arm, subnets: Mapping[str, str]) -> Iterator[Finding]:
    """Findings for machines without public addresses; `subnets` are ids by region."""
    if not subnets:
        yield Finding(_WHAT, Level.NOTE, _OWN)
    for region, subnet in sorted(subnets.items()):
        yield _way_out(arm, region, subnet)


def _way_out(arm: Arm, region: str, subnet: str) -> Finding:
    what = f"way out of {name_of(subnet)} in {region}"
    network = subnet.rpartition("/subnets/")[0]
    group, name = group_of(network), name_of(network)
    if f"/subscriptions/{arm.subscription_id}/".lower() not in network.lower():
        return Finding(what, Level.NOTE, "not determined: the subnet belongs to another subscription")
    try:
        found = arm.call(lambda: arm.network.virtual_networks.get(group, name))
    except ProvisionError as error:
        is_gone = isinstance(error.__cause__, ResourceNotFoundError)
        if is_gone:
            return Finding(what, Level.MISSING, f"there is no network {network}: check clouds.azure.subnets")
        return Finding(what, Level.NOTE, f"not determined: {error.message}")
    listed: list[Any] = list((found.properties.subnets if found.properties else None) or [])
    own = next((one for one in listed if (one.id or "").lower() == subnet.lower()), None)
    if own is None or own.properties is None:
        return Finding(what, Level.MISSING, f"there is no subnet {subnet}: check clouds.azure.subnets")
    has_way = own.properties.nat_gateway is not None or own.properties.route_table is not None
    return Finding(what) if has_way else Finding(what, Level.NOTE, _NONE)
