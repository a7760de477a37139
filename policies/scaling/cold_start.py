"""How long replicas of a service take from their launch until they are ready, by capacity type.

A launch that was refused counts with the one that took its place: what matters is the time from the wish for a replica until it is
there. The last 20 of each capacity type are remembered, and the 90 % quantile is what a scaler plans with.

Memory: {capacity type: [seconds, ...], "refused": {capacity type: when the first launch in a row was refused}}.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from policies.model import Event, Json, LaunchFailed, ProbePassed, Replica, ReplicaState

KEPT = 20
SHARE = 0.9
ENOUGH = 1  # starts before the quantile is believed
REFUSED_FOR_S = 1800.0  # a refusal of longer ago belongs to another wish
_ROUNDING = 1e-9


def learn(memory: Json, events: Iterable[Event], before: Mapping[int, Replica], now: float) -> Json:
    """Return the memory after the events; `before` are the replicas as they were when these came."""
    after = memory
    for event in events:
        replica = before.get(event.replica_id)
        if replica is None:
            continue
        kind = replica.offer.capacity_type.value
        if isinstance(event, LaunchFailed):
            refused = dict(after.get("refused", {}))
            refused.setdefault(kind, replica.created_at)
            after = {**after, "refused": refused}
        elif isinstance(event, ProbePassed) and replica.state is ReplicaState.STARTING:
            refused = dict(after.get("refused", {}))
            since = refused.pop(kind, replica.created_at)
            if replica.created_at - since > REFUSED_FOR_S:
                since = replica.created_at
            took = round(max(0.0, now - min(since, replica.created_at)))
            after = {**after, kind: [*after.get(kind, ()), took][-KEPT:], "refused": refused}
    return after


def p90(memory: Json, kinds: Sequence[str]) -> float | None:
    """Return the 90 % quantile of the slowest of these capacity types; None if none has started a replica yet."""
    found = [sorted(memory.get(kind, ())) for kind in kinds]
    ranked = [
        starts[max(0, math.ceil(SHARE * len(starts) - _ROUNDING) - 1)]
        for starts in found
        if len(starts) >= ENOUGH
    ]
    return max(ranked, default=None)
