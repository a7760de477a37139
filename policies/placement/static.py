"""Plain spreading: so many replicas over the zones, on whatever capacity the offers are of.

Own hosts are filled first. What is rented on demand is spread within a band of the cheapest price, and spot
replicas over the zones that cost at most twice the cheapest. Each new replica goes to the zone with the fewest live replicas of the service, then to the region with the
fewest, then to the better offer (the order in which offers come: by price, or by the user's preference).
SkyPilot's placer sends everything beyond one per zone to the cheapest zone (10 replicas over 4 zones become
7/1/1/1), so that one zone's bad minute takes most of the service. Zones that had no room are left alone for a
while (`blocks`); when all are, nothing is launched until the first of them opens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.model import Event, Json, Offer, Replica, ReplicaState
from policies.placement import blocks, fleet
from policies.placement.base import Decision, View
from policies.placement.blocks import is_spot
from policies.work import usd_of_work

ALL_BLOCKED = "{} more wanted, but every zone refused when last asked; trying again soon"

#: On-demand offers up to this fraction above the cheapest are spread over.
PRICE_BAND = 0.10
#: No spot replica costs more than this many times the cheapest spot offer.
MOST_SPOT = 2.0


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
        usable = fleet.preferred(fleet.with_room(opened, (*view.replicas, *view.others)))
        spread = fleet.Spread((*view.replicas, *view.others) if usable else ())
        own = fleet.own_places(usable, (*view.replicas, *view.others), max(0, missing))
        launches = [spread.put(offer, fleet.OWN_HOST) for offer in own]
        band = _affordable(view, usable)
        launches += [spread.take(band) for _ in range(missing - len(own) if band else 0)]
        waits = missing > 0 and not launches
        return Decision(
            target=target,
            memory=memory,
            launches=launches,
            ends=fleet.ends(view.replicas, target, f"{len(view.replicas)} replicas, {target} wanted"),
            wake_at=blocks.next_opening(view.offers, closed, view.now) if waits else None,
            notes=_notes(view, target, closed),
        )


def _affordable(view: View, usable: Sequence[Offer]) -> Sequence[Offer]:
    """The rented offers to spread over.

    On demand: those within `PRICE_BAND` of the cheapest that may be asked now, so a refusal leads to dearer zones.
    Spot: those up to `MOST_SPOT` times the cheapest on offer, even while that one refuses. Spread over zones is what
    spot replicas need, and a zone beyond the limit is not worth it.
    """
    work = view.goal.work
    rented = [offer for offer in usable if offer.places is None]
    on_demand = [offer for offer in rented if not is_spot(offer)]
    spot = [offer for offer in rented if is_spot(offer)]
    least = min((usd_of_work(offer, work) for offer in view.offers if is_spot(offer)), default=0.0)
    spot = [offer for offer in spot if usd_of_work(offer, work) <= least * MOST_SPOT]
    return spot or fleet.cheapest(on_demand, work, PRICE_BAND)


def _notes(view: View, target: int, closed: Json) -> tuple[str, ...]:
    """The note stands until a zone takes a replica; it does not come and go with every attempt."""
    short = target - sum(replica.state is not ReplicaState.REQUESTED for replica in view.replicas)
    dry = short > 0 and view.offers and blocks.all_refused(view.offers, closed)
    if dry:
        return (ALL_BLOCKED.format(short),)
    full = short > 0 and view.offers and not fleet.with_room(view.offers, (*view.replicas, *view.others))
    return (f"{short} more wanted, but {fleet.FULL}",) if full else ()
