"""The firewall rules of our machines, as Compute Engine takes them. Pure.

A rule is bound to machines by a network tag that is the rule's own name, which follows from the network,
the service and the ports. Its description has what `admit` needs to make it once more.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from google.cloud import compute_v1

from provisioners.gcp.errors import CLOUD
from provisioners.gcp.translate import last
from provisioners.port.errors import InvalidRequestError
from provisioners.port.firewall import ANYWHERE, SSH_PORT, FirewallAccess, ports_of_text, ports_text

_ABOUT = re.compile(r"; service (\S*), ports ([\d ]+)(, public)?$")


def prefix_of(owner: str) -> str:
    """With which the names of all that is the owner's begin; the owner's network is named so."""
    return f"skyserve-{hashlib.sha256(owner.encode()).hexdigest()[:8]}"


def outer_rules(
    owner: str,
    network: str,
    access: FirewallAccess,
    service: str,
    ports: Sequence[int],
    public_ports: Sequence[int],
) -> list[compute_v1.Firewall]:
    """Return the ports of a machine that are open to others than the machines of its service.

    The first rule is for port 22.
    """
    rules = [_ssh_rule(owner, network, access)]
    if ports:
        rules.append(_rule(owner, network, access, service, ports, is_public=False))
    if public_ports:
        rules.append(_rule(owner, network, access, service, public_ports, is_public=True))
    return rules


def renewed(
    found: compute_v1.Firewall, owner: str, network: str, access: FirewallAccess
) -> compute_v1.Firewall | None:
    """Return the rule as it should be; None if it is so already, or none that `firewall` is about."""
    about = _ABOUT.search(found.description)
    if about is None:
        return None  # among machines of ours, or of an earlier version
    if about[1]:
        ports, is_public = ports_of_text(about[2]), about[3] is not None
        wanted = _rule(owner, network, access, about[1], ports, is_public=is_public)
    else:
        wanted = _ssh_rule(owner, network, access)
    return wanted if wanted.name == found.name and not is_same(found, wanted) else None


def _ssh_rule(owner: str, network: str, access: FirewallAccess) -> compute_v1.Firewall:
    try:
        sources = access.to_ssh()
    except ValueError as error:
        raise InvalidRequestError(f"sources must be CIDR blocks: {error}", cloud=CLOUD) from error
    rule = _outer_rule(owner, network, "", [SSH_PORT], sources, is_public=False)
    rule.target_tags = [prefix_of(owner), rule.name]  # the first is the tag of machines that version 0.2 made
    return rule


def _rule(
    owner: str, network: str, access: FirewallAccess, service: str, ports: Sequence[int], *, is_public: bool
) -> compute_v1.Firewall:
    try:
        sources = (ANYWHERE,) if is_public else access.to_replicas(service)
    except ValueError as error:
        raise InvalidRequestError(f"sources must be CIDR blocks: {error}", cloud=CLOUD) from error
    return _outer_rule(owner, network, service, ports, sources, is_public=is_public)


def _outer_rule(
    owner: str,
    network: str,
    service: str,
    ports: Sequence[int],
    sources: Sequence[str],
    *,
    is_public: bool,
) -> compute_v1.Firewall:
    about = f"; service {service}, ports {ports_text(ports)}{', public' if is_public else ''}"
    digest = hashlib.sha256(f"{network}{about}".encode()).hexdigest()[:8]
    name = f"{prefix_of(owner)}-{digest}"
    return compute_v1.Firewall(
        name=name,
        network=network,
        description=description_of(owner) + about,
        direction="INGRESS",
        disabled=False,
        source_ranges=[block for block in sources if ":" not in block],  # the network has no other addresses
        source_tags=[f"{prefix_of(owner)}-none"],  # of no machine: a rule without a source admits any address
        target_tags=[name],
        allowed=[compute_v1.Allowed(I_p_protocol="tcp", ports=ports_text(ports).split())],
    )


def inner_rule(owner: str, network: str, service: str) -> compute_v1.Firewall:
    """Return the machines of a service among themselves: the nodes of one replica talk on any port.

    Names of rules are unique in a project, which may have several networks. Version 0.2 had one such rule for all machines of the owner,
    bound to the owner's tag. It stays for the machines with that tag, and ends with the owner's network.
    """
    digest = hashlib.sha256(f"{network}; inner {service}".encode()).hexdigest()[:8]
    name = f"{prefix_of(owner)}-{digest}"
    return compute_v1.Firewall(
        name=name,
        network=network,
        description=description_of(owner),
        direction="INGRESS",
        disabled=False,
        source_tags=[name],
        target_tags=[name],
        allowed=[compute_v1.Allowed(I_p_protocol="all")],
    )


def description_of(owner: str) -> str:
    return f"skyserve: machines of owner {owner}"


def is_same(found: compute_v1.Firewall, wanted: compute_v1.Firewall) -> bool:
    def essence(rule: compute_v1.Firewall) -> tuple[object, ...]:
        allowed = sorted((entry.I_p_protocol, tuple(sorted(entry.ports))) for entry in rule.allowed)
        lists = (rule.source_ranges, rule.source_tags, rule.target_tags, rule.denied)
        return (
            allowed,
            *(sorted(map(str, entries)) for entries in lists),
            rule.direction,
            rule.disabled,
            last(rule.network),
        )

    return essence(found) == essence(wanted)
