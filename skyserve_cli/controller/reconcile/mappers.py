"""From a spec to values of the packages below: goal, requirements, token, launch order. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from policies.balancers import AgentFleetState
from policies.goals import Goal, ScalingGoal, SloGoal
from policies.model import CapacityType, Offer, Replica, ReplicaState, Role
from policies.registry import MIXERS
from provisioners.port.base import Cache, Candidate, LaunchOrder, Requirements
from provisioners.port.dns import Endpoint
from provisioners.port.vm import MAX_TOKEN
from skyserve_cli.controller.agent_files import TOKEN_VARIABLE, supervisor_file
from skyserve_cli.controller.reconcile.ports import NameOrder
from skyserve_cli.controller.reconcile.region_tables import is_linked
from skyserve_cli.controller.reconcile.resource_match import candidates_of, copies_of, image_of
from skyserve_cli.spec.model import RegionalAgents, ResourceChoice, ServiceSpec
from skyserve_cli.spec.schedule import limits_at
from skyserve_cli.state.values import ServiceRow

_PORTS = {"http": 80, "https": 443}
_AGENT_DISK_GB = 30
_FIRST_COLD_START_S = 300.0  # before a replica of the service has shown how long it takes
_FIRST_FREE_PORT = 1024  # below it ports are root's, unless the kernel is configured otherwise


def goal_of(row: ServiceRow, spec: ServiceSpec, now: float | None = None) -> Goal:
    """Return what policies need to know of the service, with the limits of its schedule at `now` (None: at no special time)."""
    placement = replace(
        spec.placement,
        work=spec.scaling.target_qps_by_accelerator,
        one_continent=not any(region for choice in spec.resources for _, region in choice.places()),
    )
    return Goal(
        version=row.version,
        scaling=scaling_of(spec, now),
        placement=placement,
        same_replicas=row.same_replicas,
        update_mode=row.update_mode,
        max_surge=spec.update.max_surge,
        max_unavailable=spec.update.max_unavailable,
        initial_delay_s=spec.probe.initial_delay_s,
        probe_failure_threshold_s=spec.probe.failure_threshold_s,
        drain_timeout_s=0.0 if row.purge else spec.drain_timeout_s,
        notice_drain_s=spec.notice_drain_s,
        down=row.down,
        killed=row.killed,
        max_usd_hour=spec.max_usd_hour,
    )


def scaling_of(spec: ServiceSpec, now: float | None = None) -> ScalingGoal:
    """Return the limits, targets and delays of the autoscaler, with what follows from the schedule and the SLO."""
    least, most = spec.scaling.min_replicas, spec.scaling.max_replicas
    if spec.schedule and now is not None:
        least, most, _ = limits_at(spec, now)
    return replace(spec.scaling, min_replicas=least, max_replicas=most, slo=_slo_of(spec))


def _slo_of(spec: ServiceSpec) -> SloGoal | None:
    if spec.slo is None:
        return None
    return SloGoal(
        attainment=spec.slo.attainment,
        capacity_qps=spec.slo.capacity_qps,
        cold_start_s=min(_FIRST_COLD_START_S, max(1.0, spec.probe.initial_delay_s)),
        forecast=spec.slo.autoscaler == "predictive",
        computes_forecast=spec.slo.autoscaler != "reactive",
        learns_cold_start=True,
        response_weight=spec.slo.response_weight,
    )


def requirements_of(spec: ServiceSpec) -> Requirements:
    """Return what to request from the clouds: what the file names, and the same on demand where the placer may want that."""
    goal = spec.placement
    alternatives: dict[ResourceChoice, int] = {}  # each with the index of the one under `resources`
    for index, choice in enumerate(spec.resources):
        alternatives.setdefault(choice, index)
    if goal.dynamic_ondemand_fallback or goal.base_ondemand_fallback_replicas or goal.placer in MIXERS:
        for index, choice in enumerate(spec.resources):
            if choice.use_spot:
                alternatives.setdefault(replace(choice, use_spot=False), index)
    return Requirements(
        candidates=tuple(
            candidate
            for place, (choice, index) in enumerate(alternatives.items())
            for candidate in candidates_of(choice, place if spec.resources_ordered else 0, index)
        ),
        ordered=spec.resources_ordered,
        num_nodes=spec.num_nodes,
        work=spec.scaling.target_qps_by_accelerator,
    )


def token_of(owner: str, service: str, incarnation: str, replica_id: int, offer: Offer) -> str:
    """Return the idempotency token of one attempt: the same attempt always has the same, no other ever has it.

    Fit for instance names and tags: lower-case letters, digits and hyphens, at most MAX_TOKEN characters. The offer is
    part of it because clouds refuse a known token with changed parameters.
    """
    attempt = f"{owner}/{service}/{incarnation}/{replica_id}/{offer.zone}/{offer.instance_type}/{offer.capacity_type.value}"
    digest = hashlib.sha256(attempt.encode()).hexdigest()[:10]
    head = f"{owner}-{service.lower()}"[: MAX_TOKEN - len(digest) - len(str(replica_id)) - 2].rstrip("-")
    return f"{head}-{replica_id}-{digest}"


def tls_name_of(owner: str, row: ServiceRow, replica: Replica) -> str:
    """Return the name in the certificate of a replica that is reached by TLS: its machine's token."""
    if not (replica.endpoint or "").startswith("https:"):
        return ""
    return token_of(owner, row.name, row.incarnation, replica.id, replica.offer)


def known_tokens(owner: str, rows: Iterable[ServiceRow]) -> frozenset[str]:
    """Return the tokens of all instances that we want, or have yet to see the end of.

    Every other instance with our tag is an orphan.
    """
    return frozenset(
        token_of(owner, row.name, row.incarnation, replica.id, replica.offer)
        for row in rows
        for replica in row.attempts
    )


def order_of(
    owner: str,
    service: str,
    incarnation: str,
    replica: Replica,
    spec: ServiceSpec,
    secrets: Mapping[str, str],
    team: str = "",
) -> LaunchOrder:
    """Everything the launch of `replica` needs."""
    choice = spec.resources[replica.offer.choice]
    return LaunchOrder(
        token=token_of(owner, service, incarnation, replica.id, replica.offer),
        owner=owner,
        service=service,
        replica_id=replica.id,
        version=replica.version,
        offer=replica.offer,
        setup=spec.setup,
        run=spec.run,
        port=spec.port,
        env=dict(spec.envs),
        secrets=dict(secrets),
        workdir=spec.workdir,
        file_mounts=copies_of(spec.file_mounts),
        num_nodes=spec.num_nodes,
        image=image_of(choice, replica.offer.zone),
        disk_gb=choice.disk_size_gb,
        labels=dict(choice.labels),
        pod=spec.pod,
        cache=cache_of(owner, team, service, spec),
    )


def cache_of(owner: str, team: str, service: str, spec: ServiceSpec) -> Cache | None:
    """Return the cache of the service. No other owner or team has its folder; the next life of the service does."""
    if spec.cache is None:
        return None
    return Cache(f"{owner}/{team or '-'}/{service}", spec.cache.variables, spec.cache.claim)


def agent_requirements_of(regional: RegionalAgents) -> Requirements:
    """Return what to request from the clouds for the agents on machines of their own."""
    candidates = (
        Candidate(cloud=place.cloud, region=place.region, instance_type=regional.instance_type(place.cloud))
        for place in regional.places
    )
    return Requirements(tuple(candidates), ordered=True, role=Role.LOAD_BALANCER)


def agent_fleet_of(
    row: ServiceRow, agents: Sequence[Replica], spec_of: Callable[[int], ServiceSpec]
) -> AgentFleetState:
    """Return the agents that are wanted and those that there are; `spec_of` gives the spec of a version."""
    wanted = spec_of(row.version).regional

    def fits(agent: Replica) -> bool:
        kind = wanted.instance_type(agent.zone.cloud)
        was = spec_of(agent.version).regional
        return was.port == wanted.port and kind in (None, agent.offer.instance_type)

    return AgentFleetState(
        places=wanted.places,
        count=wanted.count,
        agents=tuple(agents),
        fitting=frozenset(agent.id for agent in agents if fits(agent)),
    )


def name_orders_of(
    owner: str, row: ServiceRow, agents: Sequence[Replica], spec_of: Callable[[int], ServiceSpec]
) -> list[NameOrder]:
    """Return the service's name and what it should mean; and that the name which it had before an update means nothing any more.

    An agent that does not respond to us may serve its clients, so it is left in.
    """
    found = []
    spec = spec_of(row.version)
    now = None if row.down else spec.regional.dns
    if now is not None:
        serving = [one for one in agents if one.state in (ReplicaState.READY, ReplicaState.NOT_READY)]
        scheme = "" if not now.health_check else "http" if spec.tls is None else "https"

        def endpoint(agent: Replica) -> Endpoint:
            at = urlsplit(agent.endpoint or "")
            token = token_of(owner, row.name, row.incarnation, agent.id, agent.offer)
            return Endpoint(at.hostname or "", token, at.port or _PORTS[scheme or "http"], scheme)

        named = sorted((one.zone.cloud, one.zone.region, endpoint(one)) for one in serving)
        found.append(NameOrder(row.name, now.zone, now.full, tuple(named)))
    for version in (row.version, row.version - 1):
        was = spec_of(version).regional.dns if version > 0 else None
        if was is not None and all(was.full != order.name for order in found):
            found.append(NameOrder(row.name, was.zone, was.full))
    return found


def agent_addresses(rows: Iterable[ServiceRow]) -> dict[str, frozenset[str]]:
    """By service, where its load balancers on machines of their own call from: the addresses at which they listen.

    Every service has an entry. An agent that is about to be terminated has none any more.
    """

    def of(row: ServiceRow) -> Iterator[str]:
        for agent in row.balancers:
            host = urlsplit(agent.endpoint or "").hostname
            if host is not None and agent.state not in (ReplicaState.TERMINATING, ReplicaState.GONE):
                yield host

    return {row.name: frozenset(of(row)) for row in rows}


def has_local_agent(row: ServiceRow, spec: ServiceSpec) -> bool:
    """Return whether the service has an agent beside the controller.

    As its only one, or until the first one of those that an update put into regions is ready.
    """
    if not spec.regional.places:
        return True
    had_one = row.version > 1
    return had_one and not row.down and not any(agent.state is ReplicaState.READY for agent in row.balancers)


def agent_order_of(
    owner: str, service: str, incarnation: str, agent: Replica, spec: ServiceSpec, admin_token: str
) -> LaunchOrder:
    """Everything the launch of an agent's machine needs.

    What the agent is made of comes later, and again with every release; its machine only has the supervisor and the token of
    its admin port.
    """
    port = spec.regional.port
    opened = f"sudo -n sysctl -qw net.ipv4.ip_unprivileged_port_start={port}"
    return LaunchOrder(
        token=token_of(owner, service, incarnation, agent.id, agent.offer),
        owner=owner,
        service=service,
        replica_id=agent.id,
        version=agent.version,
        offer=agent.offer,
        setup=opened if port is not None and port < _FIRST_FREE_PORT else None,
        run="exec python3 keeper.py",
        port=port,
        secrets={TOKEN_VARIABLE: admin_token},
        file_mounts={"keeper.py": supervisor_file()},
        disk_gb=_AGENT_DISK_GB,
        role=Role.LOAD_BALANCER,
        has_peers=is_linked(spec),
    )


def on_demand_price(offer: Offer) -> float:
    """Return the hourly price of the same instance on demand, as far as it is known."""
    if offer.capacity_type is CapacityType.ON_DEMAND or offer.on_demand_usd_hour is None:
        return offer.price_usd_hour
    return offer.on_demand_usd_hour
