"""Replicas whose machines have been announced to go, an hour ahead or more: maintenance of the host, a retirement.

There is time, so the replacement comes first: they count as replicas of an old version do in a rolling update. They serve and
occupy their zones, and are drained as new ones become ready; at the latest when the drain must begin to end in time. At
most `max_surge` replicas, and at least one, are launched beyond the target, however many are announced at once. A preemption
notice, which leaves seconds, is another matter (`lifecycle`).
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.model import Goal, Replica, ReplicaState

MARGIN_S = 60.0  # between the end of the drain and the announced instant, which is about right


def is_leaving(replica: Replica) -> bool:
    return replica.retire_at is not None


def launch_limit(size: int, staying: Sequence[Replica], others: Sequence[Replica], goal: Goal) -> int:
    """How many replicas may be launched now, for a fleet of `size` of which the `others` serve until they are replaced."""
    return max(0, size + max(1, goal.max_surge) - len(staying) - len(others))


def to_drain(
    size: int, staying: Sequence[Replica], leaving: Sequence[Replica], goal: Goal, now: float
) -> list[Replica]:
    """Those that are replaced by now, and those whose time is over."""
    late = [replica for replica in leaving if now >= drains_at(replica, goal)]
    rest = [replica for replica in leaving if replica not in late]
    # One that is not ready shields nobody: it goes first.
    rest.sort(key=lambda one: (one.state is ReplicaState.READY, one.retire_at, one.id))
    ready = sum(replica.state is ReplicaState.READY for replica in staying)
    keep = max(0, size - ready)
    return [*late, *rest[: max(0, len(rest) - keep)]]


def drains_at(replica: Replica, goal: Goal) -> float:
    """When its drain begins at the latest."""
    at = replica.retire_at if replica.retire_at is not None else float("inf")
    return at - goal.drain_timeout_s - MARGIN_S
