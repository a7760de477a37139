"""From a spec to what the floors below need: goal, requirements, token, launch order. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from policies.model import CapacityType, Goal, Offer, Replica, ScalingGoal
from provisioners.base import Candidate, LaunchOrder, Requirements
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.state.values import ServiceRow

_MAX_TOKEN = 63


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
            num_overprovision=policy.num_overprovision,
        ),
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


def requirements_of(spec: ServiceSpec) -> Requirements:
    """What to ask the clouds for."""
    return Requirements(
        candidates=tuple(
            Candidate(
                cloud=choice.cloud,
                region=choice.region,
                zone=choice.zone,
                accelerator=choice.accelerator,
                accelerator_count=choice.accelerator_count,
                cpus=choice.cpus,
                memory=choice.memory,
                instance_type=choice.instance_type,
                use_spot=choice.use_spot,
                max_hourly_cost=choice.max_usd_hour,
            )
            for choice in spec.resources
        ),
        ordered=spec.resources_ordered,
    )


def token_of(owner: str, service: str, incarnation: str, replica_id: int, offer: Offer) -> str:
    """The idempotency token of one attempt: the same attempt always has the same, no other ever has it.

    Fit for instance names and tags: lower-case letters, digits and hyphens, at most 63 characters. The offer is
    part of it because clouds refuse a known token with changed parameters.
    """
    attempt = f"{owner}/{service}/{incarnation}/{replica_id}/{offer.zone}/{offer.instance_type}/{offer.capacity_type.value}"
    digest = hashlib.sha256(attempt.encode()).hexdigest()[:10]
    head = f"{owner}-{service.lower()}"[: _MAX_TOKEN - len(digest) - len(str(replica_id)) - 2].rstrip("-")
    return f"{head}-{replica_id}-{digest}"


def order_of(
    owner: str,
    service: str,
    incarnation: str,
    replica: Replica,
    spec: ServiceSpec,
    secrets: Mapping[str, str],
) -> LaunchOrder:
    """Everything the launch of `replica` needs."""
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
    )


def on_demand_price(offer: Offer) -> float:
    """The hourly price of the same instance on demand, as far as it is known."""
    if offer.capacity_type is CapacityType.ON_DEMAND or offer.on_demand_usd_hour is None:
        return offer.price_usd_hour
    return offer.on_demand_usd_hour
