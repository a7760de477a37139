"""Names of machines that have in them what tags would: for clouds that have names and no tags.

    TOKEN.s2     the token, the market (s: spot, o: on demand) and the number of nodes

The token begins with the owner and has service, replica and rank in it (`reconcile.mappers.token_of`), the service in lower case
and, if it is long, cut short: so is the service that is read back from a name. A name has at most 64 characters, which the
strictest known cloud (Lambda) allows, as long as a replica has fewer than ten nodes.
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
)  # first: a digest of digits alone could be read as a replica's id
_WITHOUT = re.compile(_PARTS.replace("{digest}", ""))


@dataclass(frozen=True, slots=True)
class Named:
    """What is read from a machine's name."""

    token: str
    service: str
    replica_id: int
    rank: int
    num_nodes: int
    capacity_type: CapacityType


def name_of(order: MachineOrder) -> str:
    """Return the name of an order's machine, always the same. Raises ValueError if it is too long, or could not be read back."""
    name = f"{order.token}.{_MARKETS[order.capacity_type]}{order.num_nodes}"
    if len(name) > MAX_NAME or parse(name, order.owner) is None:
        raise ValueError(f"{name!r} cannot be a machine's name")
    return name


def parse(name: str, owner: str) -> Named | None:
    """Return what a name says; None unless it is that of a machine of this owner."""
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
    """Return the `firewall.openings` of a machine whose name may have only the first part of its service.

    The load balancers of all services that begin with that part are let in.
    """
    alike = [service for service in access.balancers if service.lower().startswith(named.service)]
    balancers = frozenset[str]().union(*(access.balancers[service] for service in alike))
    return openings(
        FirewallAccess(access.sources, {named.service: balancers}), named.service, ports, public_ports
    )
