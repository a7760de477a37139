"""Replicas with a preemption notice: they serve until shortly before their end, while their replacements start.

Two minutes of warning are most of a cold start, so a replica that is ready goes on taking requests. To placers it is lost
at the notice; it is in `View.leaving` for what serves now. It drains in the last `Goal.notice_drain_s` before the announced
instant, so that its streams end or move to other replicas in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.goals import Goal
from policies.lifecycle import NOTICE_MARGIN_S
from policies.model import Drain, EndReason, Replica


class Noticed(NamedTuple):
    """The replicas that have a notice and are not drained yet, and the rest."""

    leaving: list[Replica]
    rest: list[Replica]


def split(replicas: Sequence[Replica], counted: Sequence[Replica]) -> Noticed:
    """Return which of the `counted` replicas have a notice, and all `replicas` without them."""
    leaving = [replica for replica in counted if replica.preempt_at is not None]
    ids = {replica.id for replica in leaving}
    return Noticed(leaving, [replica for replica in replicas if replica.id not in ids])


def drains(leaving: Sequence[Replica], goal: Goal, now: float) -> list[Drain]:
    """Return the drains that are due."""
    return [
        Drain(
            replica.id,
            EndReason.PREEMPTED,
            replica.message or "preemption notice",
            min(now + goal.drain_timeout_s, _end_of(replica) - NOTICE_MARGIN_S),
        )
        for replica in leaving
        if now >= drains_at(replica, goal)
    ]


def drains_at(replica: Replica, goal: Goal) -> float:
    return _end_of(replica) - goal.notice_drain_s


def _end_of(replica: Replica) -> float:
    return float("inf") if replica.preempt_at is None else replica.preempt_at
