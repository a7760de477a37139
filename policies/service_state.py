"""The state of a service: one pure function of its goal, its replicas and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from policies import rollout
from policies.goals import Goal
from policies.model import Json, Replica, ReplicaState


class ServiceState(str, Enum):
    """SkyServe's names where they say the same thing."""

    REPLICA_INIT = "REPLICA_INIT"  # replicas are wanted or coming up, none is ready
    READY = "READY"  # at least one replica is ready
    NO_REPLICA = "NO_REPLICA"  # scaled to zero, and nothing is left
    FAILED = "FAILED"  # the newest version is given up and nothing serves
    SHUTTING_DOWN = "SHUTTING_DOWN"
    FAILED_CLEANUP = "FAILED_CLEANUP"  # an instance has not gone away for CLEANUP_TIMEOUT_S
    DOWN = "DOWN"


CLEANUP_TIMEOUT_S = 600.0


def service_state(
    goal: Goal, replicas: Sequence[Replica], target: int, rollout_memory: Json, now: float
) -> ServiceState:
    """`replicas` are the live ones (not GONE), `target` what the last plan wanted."""
    if goal.down:
        if not replicas:
            return ServiceState.DOWN
        stuck = any(
            r.state is ReplicaState.TERMINATING and now - r.since > CLEANUP_TIMEOUT_S for r in replicas
        )
        return ServiceState.FAILED_CLEANUP if stuck else ServiceState.SHUTTING_DOWN
    if any(r.state is ReplicaState.READY for r in replicas):
        return ServiceState.READY
    if rollout.has_failed(goal, rollout_memory):
        return ServiceState.FAILED
    if target == 0 and not replicas:
        return ServiceState.NO_REPLICA
    return ServiceState.REPLICA_INIT
