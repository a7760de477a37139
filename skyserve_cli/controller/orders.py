"""From a spec to what the floors below need: goal, requirements, token, launch order. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from policies.model import CapacityType, Goal, Offer, PlacementGoal, Replica, ScalingGoal
from policies.registry import ALIASES, AUTO, MIXERS
from provisioners.base import LaunchOrder, Requirements
from provisioners.machines import MAX_TOKEN
from skyserve_cli.controller.choices import candidates_of, choice_of, copies_of, image_of
from skyserve_cli.spec.model import ResourceChoice, ServiceSpec
from skyserve_cli.state.values import ServiceRow


def goal_of(row: ServiceRow, spec: ServiceSpec) -> Goal:
    """What policies need to know of the service."""
    policy = spec.replica_policy
    return Goal(
        version=row.version,
        scaling=ScalingGoal(
            min_replicas=policy.min_replicas,
            max_replicas=policy.max_replicas,
            target_qps_per_replica=policy.target_qps_per_replica,
            upscale_delay_s=policy.upscale_delay_s,
            downscale_delay_s=policy.downscale_delay_s,
            target_qps_by_accelerator=policy.target_qps_by_accelerator,
            target_ongoing_per_replica=policy.target_ongoing_requests_per_replica,
        ),
        placement=placement_of(spec),
        same_replicas=row.same_replicas,
        update_mode=row.update_mode,
        max_surge=spec.update.max_surge,
        max_unavailable=spec.update.max_unavailable,
        initial_delay_s=spec.probe.initial_delay_s,
        probe_failure_threshold_s=spec.probe.failure_threshold_s,
        drain_timeout_s=0.0 if row.purge else spec.drain_timeout_s,
        down=row.down,
        killed=row.killed,
    )


def placement_of(spec: ServiceSpec) -> PlacementGoal:
    """Who places the replicas of this spec, and with which knobs.

    Without a placer by name, a file that gives a knob gets the placer which that knob belongs to, and one that
    gives none is spread plainly. A service without spot replicas leaves nothing to hedge.
    """
    policy = spec.replica_policy
    if not any(choice.use_spot for choice in spec.resources):
        return PlacementGoal(
            num_overprovision=policy.num_overprovision, work=policy.target_qps_by_accelerator
        )
    aims, stands_in = policy.availability_target is not None, policy.dynamic_ondemand_fallback
    placer = policy.spot_placer
    chooses = aims or placer in ("auto", "risk_hedge")  # leaves the capacity to the placer
    if placer is None and (stands_in or policy.base_ondemand_fallback_replicas) and not aims:
        placer = "dynamic_fallback"
    if placer is None:
        placer = "auto" if aims else "spread"
    if placer == "auto":
        placer = "dynamic_fallback" if policy.num_overprovision else AUTO
    return PlacementGoal(
        placer=ALIASES.get(placer, placer),
        num_overprovision=policy.num_overprovision,
        dynamic_ondemand_fallback=chooses if stands_in is None else stands_in,
        base_ondemand_fallback_replicas=policy.base_ondemand_fallback_replicas,
        availability_target=policy.availability_target,
        work=policy.target_qps_by_accelerator,
    )


def requirements_of(spec: ServiceSpec) -> Requirements:
    """What to ask the clouds for: what the file names, and the same on demand where the placer may want that."""
    goal = placement_of(spec)
    stand_ins: tuple[ResourceChoice, ...] = ()
    if goal.dynamic_ondemand_fallback or goal.base_ondemand_fallback_replicas or goal.placer in MIXERS:
        spot = (choice for choice in spec.resources if choice.use_spot)
        stand_ins = tuple(replace(choice, use_spot=False) for choice in spot)
    choices = dict.fromkeys((*spec.resources, *stand_ins))
    return Requirements(
        candidates=tuple(
            candidate
            for place, choice in enumerate(choices)
            for candidate in candidates_of(choice, place if spec.resources_ordered else 0)
        ),
        ordered=spec.resources_ordered,
        num_nodes=spec.num_nodes,
        work=spec.replica_policy.target_qps_by_accelerator,
    )


def token_of(owner: str, service: str, incarnation: str, replica_id: int, offer: Offer) -> str:
    """The idempotency token of one attempt: the same attempt always has the same, no other ever has it.

    Fit for instance names and tags: lower-case letters, digits and hyphens, at most MAX_TOKEN characters. The offer is
    part of it because clouds refuse a known token with changed parameters.
    """
    attempt = f"{owner}/{service}/{incarnation}/{replica_id}/{offer.zone}/{offer.instance_type}/{offer.capacity_type.value}"
    digest = hashlib.sha256(attempt.encode()).hexdigest()[:10]
    head = f"{owner}-{service.lower()}"[: MAX_TOKEN - len(digest) - len(str(replica_id)) - 2].rstrip("-")
    return f"{head}-{replica_id}-{digest}"


def known_tokens(owner: str, rows: Iterable[ServiceRow]) -> frozenset[str]:
    """The tokens of all instances that we want, or have yet to see the end of. Whatever else carries our tag is nobody's."""
    return frozenset(
        token_of(owner, row.name, row.incarnation, replica.id, replica.offer)
        for row in rows
        for replica in row.replicas
    )


def order_of(
    owner: str,
    service: str,
    incarnation: str,
    replica: Replica,
    spec: ServiceSpec,
    secrets: Mapping[str, str],
) -> LaunchOrder:
    """Everything the launch of `replica` needs."""
    choice = choice_of(spec, replica.offer)
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
    )


def on_demand_price(offer: Offer) -> float:
    """The hourly price of the same instance on demand, as far as it is known."""
    if offer.capacity_type is CapacityType.ON_DEMAND or offer.on_demand_usd_hour is None:
        return offer.price_usd_hour
    return offer.on_demand_usd_hour
