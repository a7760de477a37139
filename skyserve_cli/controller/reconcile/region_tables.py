"""The table of each load balancer agent of a service that stands in several regions: what it owns, and its peers. Pure.

An agent of the only region has every replica, as ever. With two regions or more each replica is in the tables of the agents
that own it (`policies.regions.ownership`), and the agents of other regions are peers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from lb.config.regions import PeerAgent, Regions
from lb.config.schema import Readiness, Table, Target
from policies.model import Replica, ReplicaState, Zone
from policies.regions.ownership import ownership
from provisioners.port.base import peers_port
from skyserve_cli.spec.model import ServiceSpec

Elsewhere = Mapping[str, tuple[Target, ...]]
"""Targets that an agent does not own, by the region whose agents do."""
_SERVING = (ReplicaState.READY, ReplicaState.NOT_READY)


def is_linked(spec: ServiceSpec) -> bool:
    """Return whether the agents of the service are linked: they stand in two regions at least."""
    return len({(place.cloud, place.region) for place in spec.regional.places}) > 1


def region_of(zone: Zone) -> str:
    """Return the name of a region among those of all clouds."""
    return f"{zone.cloud}/{zone.region}"


def agent_name(agent: Replica) -> str:
    """Return how an agent is called in tables, metrics and explanations."""
    return f"{region_of(agent.zone)}#{agent.id}"


def own_table(
    table: Table,
    replicas: Sequence[Replica],
    agents: Sequence[Replica],
    agent: Replica,
    tls_name: Callable[[Replica], str],
    rtt_s: Callable[[str, str], float | None] = lambda one, other: None,
) -> tuple[Table, Elsewhere]:
    """Return the part of the service's `table` that `agent` owns, and the rest by the regions that own it.

    `replicas` are those of the table, `agents` all of the service, `tls_name` the name in an agent's certificate. An agent that is not
    ready gets what it will own: a region is handed back once its agent serves it. `rtt_s` is the round trip between two regions.
    """
    here = region_of(agent.zone)
    regions: Mapping[str, str] = {str(one.id): region_of(one.zone) for one in replicas}
    living = {region_of(one.zone) for one in agents if one.state is ReplicaState.READY}
    found = ownership(regions.values(), living | {here}, rtt_s)
    owned = found.owned(here)
    peers = tuple(
        PeerAgent(agent_name(one), region_of(one.zone), _peer_url(one.endpoint), tls_name(one))
        for one in sorted(agents, key=lambda one: one.id)
        if one.state in _SERVING and one.endpoint is not None and region_of(one.zone) != here
    )
    kept = tuple(target for target in table.targets if regions.get(target.id, here) in owned)
    of_agent = Regions(agent_name(agent), here, peers=peers, owned=owned)
    content = json.dumps([of_agent.to_json(), [target.id for target in kept]], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    own = replace(table, targets=kept, regions=of_agent, revision=f"{table.revision}-{digest}")
    elsewhere: dict[str, list[Target]] = {}
    for target in table.targets:
        if target not in kept:
            elsewhere.setdefault(found.owners[regions[target.id]], []).append(target)
    return own, {owner: tuple(targets) for owner, targets in elsewhere.items()}


def reachable_table(own: Table, elsewhere: Elsewhere, reached: Collection[str]) -> Table:
    """Return the table to push: with the replicas whose owners the agent cannot reach, as if there were no regions.

    `reached` are the regions of which the agent hears an agent. Where a port for peers is closed, or an agent is dead, requests go
    to the replicas themselves.
    """
    missed = sorted(elsewhere.keys() - set(reached))
    if not missed:
        return own
    more = tuple(target for owner in missed for target in elsewhere[owner])
    digest = hashlib.sha256("\0".join(missed).encode()).hexdigest()[:8]
    return replace(own, targets=own.targets + more, revision=f"{own.revision}+{digest}")


def drained_elsewhere(elsewhere: Elsewhere, pushed: Table) -> frozenset[int]:
    """Return the replicas that are being drained and that are not in the table of an agent: it sends them nothing."""
    kept = {target.id for target in pushed.targets}
    return frozenset(
        int(target.id)
        for targets in elsewhere.values()
        for target in targets
        if target.state is Readiness.DRAINING and target.id not in kept
    )


def _peer_url(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    return f"https://{shown}:{peers_port(parts.port or 80)}"
