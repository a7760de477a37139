"""Who may open which ports of rented machines: the decision alone. Each cloud's `network` module applies it.

A machine has three kinds of ports. Port 22 is open to the controller. The replica's ports are open to the controller, whose
probes go there, and to the load balancers of the service. A load balancer's own ports are open to any address. Nothing else is
open, and 0.0.0.0/0 only where the configuration has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_address, ip_network
from typing import NamedTuple

SSH_PORT = 22
ANYWHERE = "0.0.0.0/0"


@dataclass(frozen=True, slots=True)
class FirewallAccess:
    """CIDR blocks.

    `sources` may open port 22 of all machines and the ports of all replicas, `balancers` (by service) the ports of the
    service's replicas.
    """

    sources: frozenset[str] = frozenset()
    balancers: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def with_sources(self, more: Iterable[str]) -> FirewallAccess:
        return FirewallAccess(self.sources | frozenset(more), self.balancers)

    def to_ssh(self) -> tuple[str, ...]:
        return blocks(self.sources)

    def to_replicas(self, service: str) -> tuple[str, ...]:
        return blocks(self.sources | self.balancers.get(service, frozenset()))


class Opening(NamedTuple):
    """One port that one block may open, by TCP."""

    port: int
    source: str


def openings(
    access: FirewallAccess, service: str, ports: Collection[int], public_ports: Collection[int]
) -> frozenset[Opening]:
    """Return everything that is open on a machine of the service with these ports.

    Raises ValueError for a source that is no CIDR block.
    """
    ssh = {Opening(SSH_PORT, block) for block in access.to_ssh()}
    replica = {Opening(port, block) for port in ports for block in access.to_replicas(service)}
    return frozenset(ssh | replica | {Opening(port, ANYWHERE) for port in public_ports})


class FirewallChanges(NamedTuple):
    """From the rules that are there to those that should be. Openings come first."""

    to_open: frozenset[Opening]
    to_close: frozenset[Opening]


def changes(wanted: frozenset[Opening], found: frozenset[Opening], ports: Collection[int]) -> FirewallChanges:
    """Return only rules for port 22 and `ports` are closed: what an administrator has opened besides is left alone."""
    ours = {SSH_PORT, *ports}
    return FirewallChanges(wanted - found, frozenset(one for one in found - wanted if one.port in ours))


def blocks(sources: Iterable[str]) -> tuple[str, ...]:
    """Sorted, with one form for each block and without those that another one contains. Raises ValueError."""
    networks = [ip_network(source, strict=False) for source in sources]
    four = [one for one in networks if isinstance(one, IPv4Network)]
    six = [one for one in networks if isinstance(one, IPv6Network)]
    return (*map(str, collapse_addresses(four)), *map(str, collapse_addresses(six)))


def block_of(address: str) -> str | None:
    """Return the block of one address; None for a host name."""
    try:
        return str(ip_network(ip_address(address)))
    except ValueError:
        return None


def ports_text(ports: Iterable[int]) -> str:
    """Ports as they stand in a tag."""
    return " ".join(map(str, sorted(set(ports))))


def ports_of_text(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split() if word.isdecimal())
