"""The first decision about a service, before anything is launched: what `serve plan` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from policies.balancers import decide as decide_agents
from policies.goals import AcceleratorQps, UpdateMode
from policies.model import CapacityType, Launch, Memory, Observation, Offer
from policies.placement import price_limits
from policies.plan import plan
from policies.registry import policies_for
from policies.throughput import usd_of_work
from skyserve_cli.clouds import Clouds
from skyserve_cli.controller.reconcile.mappers import (
    agent_fleet_of,
    agent_requirements_of,
    goal_of,
    on_demand_price,
)
from skyserve_cli.controller.reconcile.region_places import insist_on_regions
from skyserve_cli.controller.reconcile.resource_match import candidates_of
from skyserve_cli.controller.reconcile.update_plan import course, extra, usual_start_s
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.state.values import ServiceRow

LEAST_USD_HOUR = 0.000_001


class Spreading(NamedTuple):
    """The rented replicas of a plan in USD per hour.

    `usd_per_hour` is what the spreading costs, `usd_per_hour_cheapest_only` what they cost without it. `zones` is how many
    they are spread over.
    """

    usd_per_hour: float
    usd_per_hour_cheapest_only: float
    zones: int

    def view(self) -> dict[str, Any]:
        return self._asdict()


def spreading(
    launched: Sequence[Offer], offers: Sequence[Offer], work: Sequence[AcceleratorQps] = ()
) -> Spreading | None:
    """Return what spreading costs where these are launched; None where it costs nothing.

    Each rented replica is compared with the cheapest offer of its capacity type that the user prefers as much, for the same
    `work`. Replicas on own hosts do not count.
    """
    rented = price_limits.without_own_hosts(offers)
    preferences = {replace(offer, preference=0): offer.preference for offer in rented}
    own = price_limits.own_zones(offers)
    paid, least, zones = 0.0, 0.0, set()
    for offer in launched:
        preference = preferences.get(offer)
        if preference is None or offer.zone in own:
            continue
        alike = (o for o in rented if (o.capacity_type, o.preference) == (offer.capacity_type, preference))
        share = min(usd_of_work(o, work) for o in alike) / (usd_of_work(offer, work) or 1.0)
        paid += offer.price_usd_hour
        least += offer.price_usd_hour * share
        zones.add(offer.zone)
    more = round(paid - least, 6)
    return Spreading(more, round(least, 6), len(zones)) if more >= LEAST_USD_HOUR else None


def update_plan(
    spec: ServiceSpec,
    offers: Sequence[Offer],
    clouds: Clouds,
    now: float,
    running: ServiceRow,
    *,
    keeps: bool,
    mode: UpdateMode,
) -> dict[str, Any]:
    """As `first_plan`, of a new version of a running service.

    `launches` are those of the whole update, and `ends` the replicas that it terminates. `usd_per_hour` is the price when it is
    complete. `update` is what it needs meanwhile: in each of `steps` it waits until replicas are ready, `usual_start_s` is
    how long the running ones took (null if none is ready).
    """
    planned = first_plan(spec, offers, clouds, now)
    same = frozenset({running.version, *running.same_replicas}) if keeps else frozenset[int]()
    row = replace(running, version=running.version + 1, same_replicas=same, update_mode=mode)
    # What failed is no evidence about the new version.
    memory = replace(running.memory, rollout={})
    made = course(goal_of(row, spec), running.replicas, offers, memory, now)
    ended = {each.replica_id for each in made.ends}
    replicas, dollars = extra(made, [each.offer for each in running.replicas])
    kept = [each.offer for each in running.replicas if each.id not in ended]
    left = [*kept, *(each.offer for each in made.launches if each.replica_id not in ended)]
    return {
        **planned,
        "target": made.target,
        "launches": [_launch_view(launch, spec) for launch in made.launches],
        "ends": [{"replica_id": each.replica_id, "why": each.why} for each in made.ends],
        "notes": list(made.notes),
        "replicas": len(left),
        "update": {
            "mode": mode.value,
            "steps": made.steps,
            "extra_replicas": replicas,
            "extra_usd_per_hour": round(dollars, 6),
            "usual_start_s": usual_start_s(running.replicas),
            "drain_timeout_s": spec.drain_timeout_s,
        },
        "spreading": _spreading_view(made.launches, offers, spec),
        "usd_per_hour": round(sum(offer.price_usd_hour for offer in left), 6),
        "usd_per_hour_on_demand": round(sum(on_demand_price(offer) for offer in left), 6),
    }


def _spreading_view(
    launches: Sequence[Launch], offers: Sequence[Offer], spec: ServiceSpec
) -> dict[str, Any] | None:
    found = spreading([launch.offer for launch in launches], offers, spec.scaling.target_qps_by_accelerator)
    return found.view() if found else None


def _launch_view(launch: Launch, spec: ServiceSpec) -> dict[str, Any]:
    return {
        "replica_id": launch.replica_id,
        **offer_view(launch.offer),
        "num_nodes": spec.num_nodes,
        "why": launch.why,
    }


def first_plan(spec: ServiceSpec, offers: Sequence[Offer], clouds: Clouds, now: float) -> dict[str, Any]:
    """Return the first tick of this spec on empty ground: what would be launched where, and what it costs.

    Launches that `stands_in` are on-demand replicas beyond the target, which run until the others are ready; the sums
    per hour count them too. `offers` are how many there are. `refused` says of each alternative without any why there is none: `choice` is its
    index, `field` what it says that leaves nothing. `spreading` is what it costs that the replicas are not all in the
    cheapest zone; null where it costs nothing. `beside_usd_per_hour` is about what disks and addresses cost beyond
    `usd_per_hour`.
    """
    row = new_row(spec, now)
    observation = Observation(now, goal_of(row, spec), (), tuple(offers))
    decided = plan(observation, row.memory, policies_for(observation.goal))
    launches = [action for action in decided.actions if isinstance(action, Launch)]
    on_demand = [each.replica_id for each in launches if each.offer.capacity_type is CapacityType.ON_DEMAND]
    stand_ins = frozenset(on_demand[: max(0, len(launches) - decided.target)])
    agents = _first_agents(spec, observation, clouds)
    return {
        "name": spec.name,
        "target": decided.target,
        "placement": spec.placement.placer,
        "load_balancing_policy": spec.load_balancing_policy,
        "launches": [
            {**_launch_view(launch, spec), "stands_in": launch.replica_id in stand_ins} for launch in launches
        ],
        "load_balancers": [offer_view(agent.offer) for agent in agents],
        "notes": list(decided.notes),
        "offers": len(offers),
        "refused": _refused(spec, offers, clouds),
        "usd_per_hour": round(sum(launch.offer.price_usd_hour for launch in launches), 6),
        "usd_per_hour_on_demand": round(sum(on_demand_price(launch.offer) for launch in launches), 6),
        "beside_usd_per_hour": round(_extra_usd_hour(launches, spec, clouds), 6),
        "spreading": _spreading_view(launches, offers, spec),
    }


def _extra_usd_hour(launches: Sequence[Launch], spec: ServiceSpec, clouds: Clouds) -> float:
    """Disks and addresses of all machines."""
    each = (
        clouds.extra_usd_hour(launch.offer.zone.cloud, spec.resources[launch.offer.choice].disk_size_gb)
        for launch in launches
    )
    return spec.num_nodes * sum(each)


def _first_agents(spec: ServiceSpec, observation: Observation, clouds: Clouds) -> list[Launch]:
    """Return the load balancers that would be launched, as the catalog has them."""
    if not spec.regional.places:
        return []
    insist_on_regions(spec, clouds)
    offers = clouds.listed(agent_requirements_of(spec.regional))
    fleet = agent_fleet_of(new_row(spec, observation.now), (), lambda version: spec)
    decided = decide_agents(fleet, offers, observation.goal, {}, 1, observation.now)
    return [action for action in decided.actions if isinstance(action, Launch)]


def offer_view(offer: Offer) -> dict[str, Any]:
    """Return an offer in JSON; the price is of all nodes of a replica."""
    return {
        "cloud": offer.zone.cloud,
        "region": offer.zone.region,
        "zone": offer.zone.label,
        "capacity_type": offer.capacity_type.value,
        "instance_type": offer.instance_type,
        "accelerator": offer.accelerator,
        "accelerator_count": offer.accelerator_count,
        "price_usd_hour": offer.price_usd_hour,
    }


def _refused(spec: ServiceSpec, offers: Sequence[Offer], clouds: Clouds) -> list[dict[str, Any]]:
    responded = {offer.choice for offer in offers}
    refused = []
    for index, choice in enumerate(spec.resources):
        if index in responded:
            continue
        reasons = [clouds.explain_no_offer(candidate) for candidate in candidates_of(choice)]
        why = reasons[0] if reasons and None not in reasons else None
        if why is not None:
            reason = {"field": why.field, "message": why.message, "hint": why.hint}
            refused.append({"choice": index, **reason})
    return refused


def new_row(spec: ServiceSpec, now: float) -> ServiceRow:
    """Return the row of a service that nothing was done for yet."""
    return ServiceRow(
        name=spec.name,
        incarnation="",
        created_at=now,
        version=1,
        same_replicas=frozenset(),
        update_mode=UpdateMode.ROLLING,
        down=False,
        purge=False,
        wanted=0,
        target=0,
        notes="",
        memory=Memory(),
        lb_port=0,
        killed=frozenset(),
        replicas=(),
    )
