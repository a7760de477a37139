"""What tags say about a machine, in its name alone: for clouds that have names and no tags.

    TOKEN.s2     the token, the market (s: spot, o: on demand) and the number of nodes

The token begins with the owner and has service, replica and rank in it (`controller.orders.token_of`), the service in lower case
and, if it is long, cut short: a machine shows that form. A name has at most 64 characters, which the strictest known cloud
(Lambda) allows, as long as a replica has fewer than ten nodes.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from policies.model import CapacityType
from provisioners.port.firewall import FirewallAccess, Opening, openings
from provisioners.port.vm import MachineOrder

MAX_NAME = 64

_MARKETS = {CapacityType.SPOT: "s", CapacityType.ON_DEMAND: "o"}
_TYPES = {letter: market for market, letter in _MARKETS.items()}
_PARTS = (
    r"(?P<token>(?P<head>[a-z0-9-]+)-(?P<replica>[0-9]+){digest}(?:-n(?P<rank>[1-9][0-9]*))?)"
    r"\.(?P<market>[so])(?P<nodes>[1-9][0-9]*)"
)
_WITH_DIGEST = re.compile(
    _PARTS.replace("{digest}", "-[0-9a-f]{10}")
)  # of digits alone it could be a replica's id
_WITHOUT = re.compile(_PARTS.replace("{digest}", ""))


@dataclass(frozen=True, slots=True)
class Named:
    """What a name says."""

    token: str
    service: str
    replica_id: int
    rank: int
    num_nodes: int
    capacity_type: CapacityType


def name_of(order: MachineOrder) -> str:
    """Return the same for the same order. ValueError if it is too long, or could not be read back."""
    name = f"{order.token}.{_MARKETS[order.capacity_type]}{order.num_nodes}"
    if len(name) > MAX_NAME or parse(name, order.owner) is None:
        raise ValueError(f"{name!r} cannot be a machine's name")
    return name


def parse(name: str, owner: str) -> Named | None:
    """None unless it is the name of a machine of that owner."""
    found = _WITH_DIGEST.fullmatch(name) or _WITHOUT.fullmatch(name)
    if found is None or not found["head"].startswith(f"{owner}-"):
        return None
    return Named(
        token=found["token"],
        service=found["head"].removeprefix(f"{owner}-"),
        replica_id=int(found["replica"]),
        rank=int(found["rank"] or 0),
        num_nodes=int(found["nodes"]),
        capacity_type=_TYPES[found["market"]],
    )


def openings_of(
    access: FirewallAccess, named: Named, ports: Collection[int], public_ports: Collection[int]
) -> frozenset[Opening]:
    """`firewall.openings` for a machine whose name may have only the first part of its service.

    Of services that begin alike the load balancers of all are let in.
    """
    alike = [service for service in access.balancers if service.lower().startswith(named.service)]
    balancers = frozenset[str]().union(*(access.balancers[service] for service in alike))
    return openings(
        FirewallAccess(access.sources, {named.service: balancers}), named.service, ports, public_ports
    )
