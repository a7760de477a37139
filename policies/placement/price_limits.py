"""The price limits that placers set to the offers before they choose among them: what a careful user would spend.

1.  Own hosts first. They are paid for whether they are used or not.
2.  One continent, unless the file names regions: the one of the cheapest offer of the same capacity type.
3.  Spot: at most `spot_price_cap` times the price of the cheapest. A kind of machine of which no offer is left
    then (the file lists an A100 beside an L4) is measured by its own cheapest, and is tried when no cheaper kind may be
    tried.
4.  On demand: within `price_band` of the cheapest that may be tried now.

Refusals widen limits 2 and 4, because a dearer replica is better than no replica. Limit 3 stands. Placers that spread
spot replicas for availability keep two zones: where limits 2 and 3 leave one, the next cheapest is added, unless it costs
more than on demand.
The prices are those for the work that a replica does, where that is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from policies.goals import PlacementGoal
from policies.model import CapacityType, Json, Offer, Replica, Zone
from policies.placement import zone_backoff
from policies.placement.base import View
from policies.placement.continents import continent_of
from policies.placement.zone_backoff import is_spot
from policies.throughput import usd_of_work

BEYOND = "no zone in {} takes more {} replicas now; those of other continents are asked"


class LimitedView(NamedTuple):
    """A view with only the offers that a careful user would take now, and the note for the user about it."""

    view: View
    notes: tuple[str, ...] = ()


def within_limits(
    view: View, closed: Json, *, least_spot_zones: int = 1, avoids: Callable[[Offer], bool] = lambda _: False
) -> LimitedView:
    """Return the view within the limits.

    `closed` are the blocks; `avoids` returns whether the placer would not try a spot offer now for reasons of its own. The
    limits give way so that `least_spot_zones` zones of spot offers are kept, if that many cost no more than on demand.

    Own hosts that are open are wanted as on-demand replicas at all times, so that spot replicas are only rented for
    what does not fit on them.
    """
    kept: set[int] = set()  # by identity: hashing an offer takes as long as all the rest
    notes = []
    for kind in CapacityType:
        every = [o for o in view.offers if o.capacity_type is kind and o.places is None]
        rented = _within_cap(every, view, closed, avoids) if kind is CapacityType.SPOT else every
        if view.goal.one_continent and rented:
            home = continent_of(
                min(rented, key=lambda o: (o.preference, usd_of_work(o, view.goal.work))).zone
            )
            near = [o for o in rented if home is None or continent_of(o.zone) in (home, None)]
            if zone_backoff.open_offers(near, closed, view.now) or not zone_backoff.open_offers(
                rented, closed, view.now
            ):
                rented = near
            else:
                notes.append(BEYOND.format(home, kind.value.replace("_", "-")))
        if kind is CapacityType.SPOT:
            rented = _in_zones(rented, every, view, least_spot_zones)
        kept.update(map(id, rented))
    offers = tuple(offer for offer in view.offers if offer.places is not None or id(offer) in kept)
    base = max(view.goal.base_ondemand_fallback_replicas, _on_own_hosts(view, closed))
    if len(offers) < len(view.offers):
        view = replace(view, offers=offers)
    if base != view.goal.base_ondemand_fallback_replicas:
        view = replace(view, goal=replace(view.goal, base_ondemand_fallback_replicas=base))
    return LimitedView(view, tuple(notes))


def _within_cap(
    offers: Sequence[Offer], view: View, closed: Json, avoids: Callable[[Offer], bool]
) -> list[Offer]:
    work = view.goal.work
    found: list[Offer] = []
    for preference in sorted({offer.preference for offer in offers}):
        ranked = [offer for offer in offers if offer.preference == preference]
        best = _capped(ranked, view)
        kinds = {_kind(offer) for offer in best}
        others = [offer for offer in ranked if _kind(offer) not in kinds]
        while others and all(avoids(offer) for offer in zone_backoff.open_offers(best, closed, view.now)):
            cheapest = _kind(min(others, key=lambda offer: usd_of_work(offer, work)))
            best += _capped([offer for offer in others if _kind(offer) == cheapest], view)
            others = [offer for offer in others if _kind(offer) != cheapest]
        found += best
    return found


def _capped(offers: Sequence[Offer], view: View) -> list[Offer]:
    work = view.goal.work
    limit = min(usd_of_work(offer, work) for offer in offers) * view.goal.spot_price_cap
    return [offer for offer in offers if usd_of_work(offer, work) <= limit]


def _in_zones(kept: Sequence[Offer], offers: Sequence[Offer], view: View, least: int) -> list[Offer]:
    """Return `kept`, and the cheapest of the other offers that the user prefers as much, until there are `least` zones.

    The continent of those kept comes first.
    """
    best = min((offer.preference for offer in kept), default=0)
    found = list(kept)
    zones = {offer.zone for offer in kept if offer.preference == best}
    near = {continent_of(zone) for zone in zones} if view.goal.one_continent else set()
    others = [o for o in offers if o.preference == best and o.zone not in zones and _saves(o)]
    others.sort(
        key=lambda o: (bool(near) and continent_of(o.zone) not in near, usd_of_work(o, view.goal.work))
    )
    for offer in others:
        if not 0 < len(zones) < least:
            break
        if offer.zone not in zones:
            zones.add(offer.zone)
            found.append(offer)
    return found


def _saves(offer: Offer) -> bool:
    return offer.on_demand_usd_hour is None or offer.price_usd_hour <= offer.on_demand_usd_hour


def _kind(offer: Offer) -> tuple[str | None, float]:
    return offer.accelerator, offer.accelerator_count


def without_own_hosts(offers: Sequence[Offer]) -> list[Offer]:
    return [offer for offer in offers if offer.places is None]


def within_band(offers: Sequence[Offer], goal: PlacementGoal) -> list[Offer]:
    """Return the offers that cost at most `price_band` more than the cheapest of them."""
    limit = min((usd_of_work(offer, goal.work) for offer in offers), default=0.0) * (1.0 + goal.price_band)
    return [offer for offer in offers if usd_of_work(offer, goal.work) <= limit]


# --- own hosts -------------------------------------------------------------------------------------------------


def own_zones(offers: Iterable[Offer]) -> frozenset[Zone]:
    return frozenset(offer.zone for offer in offers if offer.places is not None)


def free_places(offer: Offer, replicas: Iterable[Replica]) -> int:
    """Return how many more replicas the own hosts of this zone hold. Replicas of every version occupy their share."""
    if offer.places is None:
        return 0
    there = [replica.offer for replica in replicas if replica.zone == offer.zone]
    per_place = offer.accelerator_count or 1.0
    used = math.ceil(sum((each.accelerator_count or 1.0) for each in there) / per_place)
    return max(0, offer.places - used)


def with_room(offers: Sequence[Offer], replicas: Sequence[Replica]) -> list[Offer]:
    """Return the offers without the own hosts whose places are all taken."""
    return [offer for offer in offers if offer.places is None or free_places(offer, replicas)]


def own_places(offers: Sequence[Offer], replicas: Sequence[Replica], most: int) -> list[Offer]:
    """Return the free places of the user's own hosts, at most `most`, in the order of the offers, one entry per place.

    A zone that is on offer in several ways is filled in the first of them.
    """
    found: list[Offer] = []
    seen: set[Zone] = set()
    for offer in offers:
        if offer.places is not None and offer.zone not in seen:
            seen.add(offer.zone)
            found += [offer] * min(free_places(offer, replicas), most - len(found))
    return found


def _on_own_hosts(view: View, closed: Json) -> int:
    """Return how many replicas of the wanted version the own hosts hold or could take now."""
    own = own_zones(view.offers)
    if not own:
        return 0
    held = sum(replica.zone in own and not is_spot(replica.offer) for replica in view.replicas)
    places = [offer for offer in view.offers if not is_spot(offer)]
    opened = zone_backoff.open_offers(places, closed, view.now)
    missing = max(0, view.wanted - held)
    return held + len(own_places(opened, (*view.replicas, *view.others), missing))
