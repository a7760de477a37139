"""Plain spreading: a number of replicas over the zones, on the capacity that the offers have.

Own hosts are filled first. On-demand replicas are spread within a band of the cheapest price, and spot replicas
over the zones that cost at most twice the cheapest (`price_limits`). Each new replica goes to the zone with the fewest live
replicas of the service, then to the region with the fewest, then to the better offer (the order in which offers come:
by price, or by the user's preference). SkyPilot's placer sends everything beyond one per zone to the cheapest zone (10
replicas over 4 zones become 7/1/1/1), so that one zone's bad minute takes most of the service. Zones that had no room
are left alone for a while (`zone_backoff`); when all are, one replica tries the first of them that opens (`reopening`).
A fleet that has gathered in one zone is spread again later (`respread`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.model import Event, Json, Offer, Replica, ReplicaState
from policies.placement import fleet, price_limits, reopening, respread, zone_backoff
from policies.placement.base import Decision, PlannedLaunch, View
from policies.placement.zone_backoff import is_spot

ALL_BLOCKED = "{} more wanted, but every zone refused when last asked; trying again soon"


class Static:
    """Memory: {"blocks": see `zone_backoff`, "spread_again_at": the last attempt, see `respread`}."""

    def learn(
        self, memory: Json, events: Sequence[Event], replicas: Mapping[int, Replica], now: float
    ) -> Json:
        found = zone_backoff.learn(memory.get("blocks", {}), events, replicas, now)
        after = {**memory, "blocks": found}
        return {key: value for key, value in after.items() if value}

    def decide(self, view: View, memory: Json) -> Decision:
        target = view.wanted + view.goal.num_overprovision if view.wanted > 0 else 0
        closed = memory.get("blocks", {})
        missing = min(view.limit, target - len(view.replicas))
        careful = price_limits.within_limits(view, closed) if missing > 0 else price_limits.LimitedView(view)
        live = (*view.replicas, *view.others)
        launches, wake_at = _launches(careful.view, live, closed, missing) if missing > 0 else ([], None)
        keep = target + respread.surging(view, target, memory)
        due_at = respread.due_at(view, target, memory)
        if due_at is not None and due_at <= view.now:
            place = respread.surge(price_limits.within_limits(view, closed).view, target, closed)
            due_at = None if place else zone_backoff.next_opening(view.offers, closed, view.now)
            if place is not None:
                launches, keep = [place], target + 1
                memory = {**memory, respread.ATTEMPT_AT: view.now}
        return Decision(
            target=target,
            memory=memory,
            launches=launches,
            ends=fleet.ends(
                view.replicas,
                keep,
                f"{len(view.replicas)} replicas, {target} wanted",
                price_limits.own_zones(view.offers),
            ),
            wake_at=fleet.earliest(wake_at, due_at),
            notes=(*_notes(view, target, closed), *careful.notes),
        )


def _launches(
    view: View, live: Sequence[Replica], closed: Json, missing: int
) -> tuple[list[PlannedLaunch], float | None]:
    """Return where the missing replicas go, and when to look again if not all of them can be placed now."""
    usable = fleet.preferred(
        price_limits.with_room(zone_backoff.open_offers(view.offers, closed, view.now), live)
    )
    spread = fleet.Spread(live)
    own = price_limits.own_places(usable, live, missing)
    launches = [spread.put(offer, fleet.OWN_HOST) for offer in own]

    rented = price_limits.without_own_hosts(usable)
    hosts = price_limits.own_zones(view.offers)
    elsewhere = [replica for replica in live if replica.zone not in hosts] if hosts else live
    again = reopening.after_outage(
        price_limits.without_own_hosts(view.offers), rented, elsewhere, closed, view.now
    )
    band = _within_band(view, rented if again is None else again.usable)
    count = missing - len(own) if again is None else min(missing - len(own), again.most)
    launches += spread.fill(band, count)
    if len(launches) == missing:
        return launches, None
    opens_at = zone_backoff.next_opening(price_limits.with_room(view.offers, live), closed, view.now)
    return launches, fleet.earliest(opens_at, again.wake_at if again else None)


def _within_band(view: View, offers: Sequence[Offer]) -> Sequence[Offer]:
    """Return what to spread over: all spot offers (`price_limits` has left out the dear ones), else the cheap on-demand ones."""
    spot = [offer for offer in offers if is_spot(offer)]
    return spot or price_limits.within_band(offers, view.goal)


def _notes(view: View, target: int, closed: Json) -> tuple[str, ...]:
    """The note stands until a zone takes a replica; it does not come and go with every attempt."""
    short = target - sum(replica.state is not ReplicaState.REQUESTED for replica in view.replicas)
    dry = short > 0 and view.offers and zone_backoff.all_refused(view.offers, closed)
    if dry:
        return (ALL_BLOCKED.format(short),)
    full = (
        short > 0 and view.offers and not price_limits.with_room(view.offers, (*view.replicas, *view.others))
    )
    return (f"{short} more wanted, but {fleet.FULL}",) if full else ()
