"""Replicas whose machines have been announced to go, an hour ahead or more: maintenance of the host, a retirement.

There is time, so the replacement comes first: they count as replicas of an old version do in a rolling update. They serve and
occupy their zones, and are drained as new ones become ready; at the latest when the drain must begin to end in time. However
many are announced, `max_surge` of them, and at least one, are replaced at a time, the most urgent first: placers see the rest of
the fleet unchanged, and launch no extra hedge. `lifecycle` handles preemption notices, which leave seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.goals import Goal
from policies.model import Replica, ReplicaState

MARGIN_S = 60.0  # from the end of the drain to the announced instant, which clouds give to the minute
_ENDING = (ReplicaState.DRAINING, ReplicaState.TERMINATING)


def is_announced(replica: Replica) -> bool:
    return replica.retire_at is not None


def leaving(counted: Sequence[Replica], every: Sequence[Replica], goal: Goal, now: float) -> list[Replica]:
    """Return those that are replaced now, and those that can wait for it no longer.

    The next one's turn comes when the drain of the one before is over.
    """
    announced = sorted(filter(is_announced, counted), key=lambda one: (one.retire_at, one.id))
    if not announced:
        return []
    ending = sum(is_announced(replica) and replica.state in _ENDING for replica in every)
    first = announced[: max(0, max(1, goal.max_surge) - ending)]
    return [one for one in announced if one in first or now >= drains_at(one, goal)]


def launch_limit(target: int, staying: Sequence[Replica], others: Sequence[Replica], goal: Goal) -> int:
    """Return how many replicas may be launched now, for a fleet of `target` of which the `others` serve until they are replaced."""
    return max(0, target + max(1, goal.max_surge) - len(staying) - len(others))


def to_drain(
    size: int, staying: Sequence[Replica], leaving: Sequence[Replica], goal: Goal, now: float
) -> list[Replica]:
    """Return those that are replaced by now, and those whose time is over."""
    late = [replica for replica in leaving if now >= drains_at(replica, goal)]
    rest = [replica for replica in leaving if replica not in late]
    # A replica that is not ready serves no requests, so it is drained first.
    rest.sort(key=lambda one: (one.state is ReplicaState.READY, one.retire_at, one.id))
    ready = sum(replica.state is ReplicaState.READY for replica in staying)
    keep = max(0, size - ready)
    return [*late, *rest[: max(0, len(rest) - keep)]]


def drains_at(replica: Replica, goal: Goal) -> float:
    """Return when its drain begins at the latest."""
    at = replica.retire_at if replica.retire_at is not None else float("inf")
    return at - goal.drain_timeout_s - MARGIN_S
