"""Deadlines: the events that only the passing of time brings about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from policies.goals import Goal
from policies.history import Load
from policies.model import Drained, EndReason, Event, GaveUp, Replica, ReplicaState


def due(replicas: Iterable[Replica], goal: Goal, load: Load, now: float) -> Iterator[Event]:
    """Yield the events that are due at `now`: start and probe time-outs, and drains that are over."""
    for replica in replicas:
        if replica.state is ReplicaState.READY:
            continue  # it has all the time, and nearly all are
        event = _due(replica, goal, load, now)
        if event is not None:
            yield event


def next_due(replicas: Iterable[Replica], goal: Goal) -> float | None:
    """Return when the first of these deadlines is, if nothing happens before."""
    busy = (replica for replica in replicas if replica.state is not ReplicaState.READY)
    return min((at for one in busy if (at := _ends_at(one, goal)) is not None), default=None)


def _ends_at(replica: Replica, goal: Goal) -> float | None:
    """Return the instant at which the time for what the replica is doing is over; None: it has all the time."""
    match replica.state:
        case ReplicaState.PROVISIONING:
            return replica.since + goal.provision_timeout_s
        case ReplicaState.STARTING:
            return replica.since + goal.initial_delay_s
        case ReplicaState.NOT_READY:
            return replica.since + goal.probe_failure_threshold_s
        case ReplicaState.DRAINING:
            return replica.drain_by
        case _:
            return None


def _due(replica: Replica, goal: Goal, load: Load, now: float) -> Event | None:
    if replica.state is ReplicaState.DRAINING and replica.id in load.empty:
        return Drained(replica.id, "nothing in flight")
    ends_at = _ends_at(replica, goal)
    if ends_at is None or now < ends_at:
        return None
    match replica.state:
        case ReplicaState.PROVISIONING:
            return GaveUp(
                replica.id, EndReason.START_TIMEOUT, f"not set up within {goal.provision_timeout_s:g} s"
            )
        case ReplicaState.STARTING:
            return GaveUp(
                replica.id,
                EndReason.START_TIMEOUT,
                f"no readiness probe passed within {goal.initial_delay_s:g} s of starting `run`",
            )
        case ReplicaState.NOT_READY:
            return GaveUp(
                replica.id,
                EndReason.PROBE_FAILED,
                f"readiness probe failed for {goal.probe_failure_threshold_s:g} s",
            )
        case _:
            return Drained(replica.id, "time to drain is over")
