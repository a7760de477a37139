"""The table a load balancer should have. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from lb.wire import Limits, Table, Target, TargetState
from policies import rollout
from policies.model import Goal, Json, Replica, ReplicaState
from policies.routing.registry import DEFAULT_POLICY, POLICIES
from skyserve_cli.spec.model import ServiceSpec

_STATES = {
    ReplicaState.READY: TargetState.READY,
    ReplicaState.NOT_READY: TargetState.UNHEALTHY,
    ReplicaState.DRAINING: TargetState.DRAINING,
}


def table_of(
    service: str, spec: ServiceSpec, replicas: Sequence[Replica], goal: Goal, rollout_memory: Json
) -> Table:
    """The targets that may serve, and the limits of the service. Equal contents have equal revisions."""
    limits = Limits(
        time_to_first_byte_s=_within_a_day(spec.load_balancer.time_to_first_byte_s),
        idle_timeout_s=_within_a_day(spec.load_balancer.stream_timeout_s),
        hold_s=_hold_s(goal),
    )
    # For a sign of life any answer will do, so a path that costs the engine nothing: a probe with a payload is
    # real work, and one with a secret in its path is nobody's business.
    plain = spec.probe.method == "GET" and "$" not in spec.probe.path
    health_path = spec.probe.path if plain else "/health"
    targets = tuple(
        Target(
            id=str(replica.id),
            url=replica.endpoint or "",
            region=replica.zone.region,
            zone=replica.zone.name,
            capacity_type=replica.offer.capacity_type.value,
            accelerator=replica.offer.accelerator or "",
            state=_STATES[replica.state],
            health_path=health_path,
        )
        for replica in rollout.serving(replicas, goal, rollout_memory)
    )
    policy = spec.load_balancing_policy
    table = Table(service, "-", targets, policy if policy in POLICIES else DEFAULT_POLICY, limits)
    content = json.dumps(table.to_json(), sort_keys=True)
    return replace(table, revision=hashlib.sha256(content.encode()).hexdigest()[:16])


def _hold_s(goal: Goal) -> float:
    """How long a request waits for a replica. Whoever wakes a service that sleeps waits for the whole start."""
    if goal.down:  # nothing will come up: to hold a request would be to lie to its client
        return 0.0
    plain = Limits().hold_s
    if goal.scaling.min_replicas > 0:
        return plain
    return _within_a_day(plain + goal.initial_delay_s)


def _within_a_day(seconds: float) -> float:
    """An agent refuses longer limits than a day, and whole tables with them."""
    return min(86_400.0, max(0.001, seconds))
