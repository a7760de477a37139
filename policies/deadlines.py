"""Deadlines: the events that only the passing of time brings about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from policies.model import Drained, EndReason, Event, GaveUp, Goal, Load, Replica, ReplicaState


def due(replicas: Iterable[Replica], goal: Goal, load: Load, now: float) -> Iterator[Event]:
    """The events that are due at `now`: start and probe time-outs, and drains that are over."""
    for replica in replicas:
        event = _due(replica, goal, load, now)
        if event is not None:
            yield event


def next_due(replicas: Iterable[Replica], goal: Goal) -> float | None:
    """When the first of these deadlines is, if nothing happens before."""
    limits = {
        ReplicaState.PROVISIONING: goal.provision_timeout_s,
        ReplicaState.STARTING: goal.initial_delay_s,
        ReplicaState.NOT_READY: goal.probe_failure_threshold_s,
    }
    ends = [r.since + limits[r.state] for r in replicas if r.state in limits]
    ends += [r.drain_by for r in replicas if r.state is ReplicaState.DRAINING and r.drain_by is not None]
    return min(ends, default=None)


def _due(replica: Replica, goal: Goal, load: Load, now: float) -> Event | None:
    waited = now - replica.since
    match replica.state:
        case ReplicaState.PROVISIONING if waited >= goal.provision_timeout_s:
            return GaveUp(
                replica.id, EndReason.START_TIMEOUT, f"not set up within {goal.provision_timeout_s:g} s"
            )
        case ReplicaState.STARTING if waited >= goal.initial_delay_s:
            return GaveUp(
                replica.id,
                EndReason.START_TIMEOUT,
                f"no readiness probe passed within {goal.initial_delay_s:g} s of starting `run`",
            )
        case ReplicaState.NOT_READY if waited >= goal.probe_failure_threshold_s:
            return GaveUp(
                replica.id,
                EndReason.PROBE_FAILED,
                f"readiness probe failed for {goal.probe_failure_threshold_s:g} s",
            )
        case ReplicaState.DRAINING if replica.id in load.empty:
            return Drained(replica.id, "nothing in flight")
        case ReplicaState.DRAINING if replica.drain_by is not None and now >= replica.drain_by:
            return Drained(replica.id, "time to drain is over")
        case _:
            return None
