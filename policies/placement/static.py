"""Plain spreading: so many replicas over the zones, on whatever capacity the offers are of.

Each new replica goes to the zone with the fewest live replicas of the service, then to the region with the
fewest, then to the better offer (the order in which offers come: by price, or by the user's preference).
SkyPilot's placer sends everything beyond one per zone to the cheapest zone (10 replicas over 4 zones become
7/1/1/1), so that one zone's bad minute takes most of the service. Zones that had no room are left alone for a
while (`blocks`); when all are, nothing is launched until the first of them opens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.model import Event, Json, Replica, ReplicaState
from policies.placement import blocks, fleet
from policies.placement.base import Decision, View

ALL_BLOCKED = "{} more wanted, but every zone refused when last asked; trying again soon"


class Static:
    """Memory: {"blocks": see `blocks`}."""

    def learn(
        self, memory: Json, events: Sequence[Event], replicas: Mapping[int, Replica], now: float
    ) -> Json:
        found = blocks.learn(memory.get("blocks", {}), events, replicas, now)
        return {"blocks": found} if found else {}

    def decide(self, view: View, memory: Json) -> Decision:
        target = view.wanted + view.goal.num_overprovision if view.wanted > 0 else 0
        missing = min(view.limit, target - len(view.replicas))
        closed = memory.get("blocks", {})
        opened = blocks.open_offers(view.offers, closed, view.now) if missing > 0 else ()
        usable = fleet.preferred(opened)
        spread = fleet.Spread((*view.replicas, *view.others) if usable else ())
        launches = [spread.take(usable) for _ in range(missing if usable else 0)]
        waits = missing > 0 and not usable
        return Decision(
            target=target,
            memory=memory,
            launches=launches,
            ends=fleet.ends(view.replicas, target, f"{len(view.replicas)} replicas, {target} wanted"),
            wake_at=blocks.next_opening(view.offers, closed, view.now) if waits else None,
            notes=_notes(view, target, closed),
        )


def _notes(view: View, target: int, closed: Json) -> tuple[str, ...]:
    """The note stands until a zone takes a replica; it does not come and go with every attempt."""
    short = target - sum(replica.state is not ReplicaState.REQUESTED for replica in view.replicas)
    dry = short > 0 and view.offers and blocks.all_refused(view.offers, closed)
    return (ALL_BLOCKED.format(short),) if dry else ()
