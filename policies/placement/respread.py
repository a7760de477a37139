"""When a fleet that has gathered in one zone is spread again: one replica is launched elsewhere, then one is drained.

Spot replicas gather in a zone because it was the only one with room when they were launched, or because others were lost.
The next preemption there takes most of the service. So when one zone has held more than half of the wanted replicas
for `spread_again_after_s`, and all of them are ready, one more is launched in the zone with the fewest, within the limits
of price and continent. Once it is ready, the ordinary rule terminates one in the zone that holds most. There are never fewer
ready than wanted.

There is one attempt per `spread_again_after_s`, whether or not the zone takes it, and none during a rolling update. It
costs one spot replica for one start. On-demand replicas are not preempted, so they stay where they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from policies.model import Json, Offer, Replica, ReplicaState, Zone
from policies.placement import fleet, price_limits, zone_backoff
from policies.placement.base import PlannedLaunch, View
from policies.placement.zone_backoff import is_spot

ATTEMPT_AT = "spread_again_at"
_SERVING = (ReplicaState.READY, ReplicaState.NOT_READY)


def crowded_zone(replicas: Sequence[Replica], target: int) -> Zone | None:
    """Return the zone that holds more than half of the target in spot replicas; None if there is none."""
    in_zone = Counter(replica.zone for replica in replicas if is_spot(replica.offer))
    zone, count = max(in_zone.items(), key=lambda item: item[1], default=(None, 0))
    return zone if count > math.ceil(target / 2) else None


def due_at(view: View, target: int, memory: Json) -> float | None:
    """Return when the next attempt may be made if nothing changes; None if the fleet is as it should be, or not complete."""
    patience_s = view.goal.spread_again_after_s
    if patience_s <= 0 or view.others or len(view.replicas) != target:
        return None
    if any(replica.state is not ReplicaState.READY for replica in view.replicas):
        return None
    if crowded_zone(view.replicas, target) is None:
        return None
    settled_at = max(replica.since for replica in view.replicas)
    attempted_at: float = memory.get(ATTEMPT_AT, 0.0)
    return max(settled_at, attempted_at) + patience_s


def surge(view: View, target: int, closed: Json) -> PlannedLaunch | None:
    """Return the place of one more replica outside the crowded zone; None if no other zone may be tried.

    `closed` are the blocks, `view` is within the limits of `price_limits`.
    """
    crowded = crowded_zone(view.replicas, target)
    opened = zone_backoff.open_offers(view.offers, closed, view.now)
    rented = [offer for offer in price_limits.without_own_hosts(fleet.preferred(opened)) if is_spot(offer)]
    spread = fleet.Spread(view.replicas)
    others = [offer for offer in rented if _is_emptier(offer, crowded, spread)]
    why = f"most replicas are in {crowded}; one of them is drained when this one is ready"
    return spread.take(others, why) if crowded and others and view.limit > 0 else None


def _is_emptier(offer: Offer, crowded: Zone | None, spread: fleet.Spread) -> bool:
    return crowded is not None and spread.in_zone[offer.zone] + 1 < spread.in_zone[crowded]


def surging(view: View, target: int, memory: Json) -> int:
    """Return how many replicas beyond the target are kept: 1 while that of the last attempt starts, else 0."""
    if ATTEMPT_AT not in memory or view.others or len(view.replicas) != target + 1:
        return 0
    newest = max(view.replicas, key=lambda replica: replica.id)
    return int(newest.created_at >= memory[ATTEMPT_AT] and newest.state not in _SERVING)
