"""The table of each load balancer agent of a service that stands in several regions: what it owns, and its peers. Pure.

Agents of the only region have every replica. With two regions or more each replica is in the tables of the agents
that own it (`policies.regions.ownership`), and the agents of other regions are peers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from urllib.parse import urlsplit

from lb.config.regions import PeerAgent, Place, Regions
from lb.config.schema import Readiness, Standby, Table, Target
from policies.model import Replica, ReplicaState, Zone
from policies.regions.names import DEFAULT_REGION_POLICY
from policies.regions.ownership import BACK_AFTER_S, Ownership, ownership
from policies.regions.residency import ResidencyZone, entered_zones, served_zones
from provisioners.offers.egress import egress_usd_per_gb
from provisioners.port.base import peers_port
from skyserve_cli.spec.model import ServiceSpec

Egress = Callable[[Zone, Zone], float]
Elsewhere = Mapping[str, tuple[Target, ...]]
"""Targets that an agent does not own, by the region whose agents do."""
_SERVING = (ReplicaState.READY, ReplicaState.NOT_READY)


def is_linked(spec: ServiceSpec) -> bool:
    """Return whether the agents of the service are linked: those of two regions at least, or several of one."""
    places = {(place.cloud, place.region) for place in spec.regional.places}
    return len(places) > 1 or (len(places) == 1 and spec.regional.count > 1)


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
    *,
    now: float = inf,
    zones: Sequence[ResidencyZone] = (),
    spill: str = DEFAULT_REGION_POLICY,
    usd_per_second: float | None = None,
    before: Ownership | None = None,
    is_decided: bool = True,
    has_tls: bool = False,
    egress: Egress = egress_usd_per_gb,
) -> tuple[Table, Elsewhere]:
    """Return the part of the service's `table` that `agent` owns, and the rest by the regions that own it.

    `replicas` are those of the table, `agents` all of the service, `tls_name` the name in an agent's certificate. An agent that is not
    ready gets what it will own: a region is handed back once its agent has served it for BACK_AFTER_S. `rtt_s` is the round trip
    between two regions, `before` the ownership so far. Unless it `is_decided`, the regions without agents belong to all, so that no agent
    loses what it serves while the controller does not know it. Of `zones`, an agent learns which ones its peers serve; a region is inherited
    within its zones, if it can be. `egress` is the price of a GB from one zone to another.
    """
    here = region_of(agent.zone)
    regions: Mapping[str, str] = {str(one.id): region_of(one.zone) for one in replicas}
    living = _living(agents, now)
    same_zone = partial(_serves_as_much, zones)
    found = ownership(regions.values(), living | {here}, rtt_s, same_zone, before)
    owned = found.owned(here)
    others = _others(agents, agent, tls_name, zones, egress)
    peers = tuple(one for one in others if one.region != here)
    shared = () if is_decided else found.owners.keys() - {region_of(one.zone) for one in agents}
    kept = tuple(target for target in table.targets if regions.get(target.id, here) in {*owned, *shared})
    elsewhere: dict[str, list[Target]] = {}
    for target in table.targets:
        if target not in kept:
            elsewhere.setdefault(found.owners[regions[target.id]], []).append(target)
    standby_regions = set(found.standby(here))
    standby = tuple(
        Standby(owner, those)
        for owner, targets in sorted(elsewhere.items())
        if (those := tuple(target for target in targets if regions[target.id] in standby_regions))
    )
    of_agent = Regions(
        agent_name(agent),
        here,
        spill,
        peers=peers,
        owned=owned,
        places=_places(table, regions, agents),
        usd_per_second=usd_per_second,
        endpoints=_endpoints(agents, zones, has_tls),
        siblings=tuple(one for one in others if one.region == here),
    )
    content = json.dumps(
        [of_agent.to_json(), [target.id for target in kept], [one.to_json() for one in standby]],
        sort_keys=True,
    )
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    own = replace(
        table,
        targets=kept,
        regions=of_agent,
        standby=standby,
        revision=f"{table.revision}-{digest}",
    )
    return own, {owner: tuple(targets) for owner, targets in elsewhere.items()}


def _others(
    agents: Sequence[Replica],
    agent: Replica,
    tls_name: Callable[[Replica], str],
    zones: Sequence[ResidencyZone],
    egress: Egress,
) -> tuple[PeerAgent, ...]:
    """Return the other agents that serve."""
    return tuple(
        PeerAgent(
            agent_name(one),
            region_of(one.zone),
            _peer_url(one.endpoint),
            tls_name(one),
            served_zones(zones, region_of(one.zone)),
            egress(agent.zone, one.zone),
            egress(one.zone, agent.zone),
        )
        for one in sorted(agents, key=lambda one: one.id)
        if one.state in _SERVING and one.endpoint is not None and one.id != agent.id
    )


def _endpoints(agents: Sequence[Replica], zones: Sequence[ResidencyZone], has_tls: bool) -> tuple[Place, ...]:
    """Return where clients reach the agents that are ready."""
    scheme = "https" if has_tls else "http"
    return tuple(
        Place(
            region_of(one.zone),
            f"{scheme}://{urlsplit(one.endpoint).netloc}",
            served_zones(zones, region_of(one.zone)),
        )
        for one in sorted(agents, key=lambda one: one.id)
        if one.state is ReplicaState.READY and one.endpoint is not None
    )


def _places(table: Table, regions: Mapping[str, str], agents: Sequence[Replica]) -> tuple[Place, ...]:
    """Return an address in each region that has replicas and no agents. `regions` are those of the targets."""
    staffed = {region_of(one.zone) for one in agents}
    places: dict[str, Place] = {}
    for target in table.targets:
        region = regions.get(target.id)
        if region is not None and region not in staffed and target.state is Readiness.READY:
            places.setdefault(region, Place(region, target.url))
    return tuple(places[region] for region in sorted(places))


def owners_of(
    replicas: Sequence[Replica],
    agents: Sequence[Replica],
    rtt_s: Callable[[str, str], float | None],
    now: float,
    zones: Sequence[ResidencyZone],
    before: Ownership,
) -> Ownership:
    """Return who owns the replicas of a service now."""
    regions = {region_of(one.zone) for one in replicas}
    return ownership(regions, _living(agents, now), rtt_s, partial(_serves_as_much, zones), before)


def unmeasured(owners: Ownership, living: Collection[str], rtt_s: Callable[[str, str], float | None]) -> bool:
    """Return whether a region without agents may have a nearer owner, as its distance to one that lives is not known."""
    return len(living) > 1 and any(
        region not in living and any(rtt_s(region, one) is None for one in living) for region in owners.owners
    )


def entered_table(table: Table, zones: Sequence[ResidencyZone], region: str) -> Table:
    """Return the table of an agent in that region, which says of which zones the requests are that enter there."""
    entered = entered_zones(zones, region)
    return (
        replace(table, residency=entered, revision=f"{table.revision}+{'+'.join(entered)}")
        if entered
        else table
    )


def _living(agents: Sequence[Replica], now: float) -> set[str]:
    """Return the regions with an agent that owns replicas.

    One that has just become ready does so once it has been for a while, unless no agent has been for so long: then all are new.
    """
    ready = [one for one in agents if one.state is ReplicaState.READY]
    settled = {region_of(one.zone) for one in ready if now - one.since >= BACK_AFTER_S}
    return settled or {region_of(one.zone) for one in ready}


def settles_at(agents: Sequence[Replica], now: float) -> float:
    """Return when the next agent that has become ready gets its replicas back; infinity if none has to wait."""
    due = [one.since + BACK_AFTER_S for one in agents if one.state is ReplicaState.READY]
    return min((at for at in due if at > now), default=inf)


def _serves_as_much(zones: Sequence[ResidencyZone], region: str, owner: str) -> bool:
    return set(served_zones(zones, region)) <= set(served_zones(zones, owner))


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
