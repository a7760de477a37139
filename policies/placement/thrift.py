"""What a careful user would spend: the limits that placers set to the offers before they choose among them.

1.  Own hosts first. They are paid for whether they are used or not.
2.  Within one continent, unless the file names regions: that of the cheapest offer of the same capacity type.
3.  Spot: at most `MOST_SPOT` times the price of the cheapest. A kind of machine for which nothing is left so (the file
    lists an A100 beside an L4) is measured by its own cheapest, and is asked when no cheaper kind may be asked.
4.  On demand: within `price_band` of the cheapest that may be asked now.

Refusals widen limits 2 and 4, because a dearer replica is better than no replica. Limit 3 stands.
The prices are those for the work that a replica does, where that is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from policies.model import CapacityType, Json, Offer, PlacementGoal, Replica, Zone
from policies.placement import blocks
from policies.placement.base import View
from policies.placement.blocks import is_spot
from policies.placement.continents import continent_of
from policies.work import usd_of_work

#: No spot replica costs more than this many times the cheapest spot offer.
MOST_SPOT = 2.0
BEYOND = "no zone in {} takes more {} replicas now; those of other continents are asked"


class Thrifty(NamedTuple):
    """A view with only the offers that a careful user would take now, and what to tell the user about it."""

    view: View
    notes: tuple[str, ...] = ()


def thrifty(view: View, closed: Json, *, cap_spot: bool = True) -> Thrifty:
    """The view within the limits. `closed` are the blocks. Without `cap_spot` limit 3 is left to the placer, which
    weighs prices itself.

    Own hosts that are open are wanted as on-demand replicas at all times, so that spot replicas are only rented for
    what does not fit on them.
    """
    kept: set[Offer] = set()
    notes = []
    for kind in CapacityType:
        rented = [o for o in view.offers if o.capacity_type is kind and o.places is None]
        if kind is CapacityType.SPOT and cap_spot:
            rented = _within_cap(rented, view, closed)
        if view.goal.one_continent and rented:
            home = continent_of(
                min(rented, key=lambda o: (o.preference, usd_of_work(o, view.goal.work))).zone
            )
            near = [o for o in rented if home is None or continent_of(o.zone) in (home, None)]
            if blocks.open_offers(near, closed, view.now) or not blocks.open_offers(rented, closed, view.now):
                rented = near
            else:
                notes.append(BEYOND.format(home, kind.value.replace("_", "-")))
        kept.update(rented)
    offers = tuple(offer for offer in view.offers if offer.places is not None or offer in kept)
    base = max(view.goal.base_ondemand_fallback_replicas, _on_own_hosts(view, closed))
    goal = replace(view.goal, base_ondemand_fallback_replicas=base)
    return Thrifty(replace(view, offers=offers, goal=goal), tuple(notes))


def _within_cap(offers: Sequence[Offer], view: View, closed: Json) -> list[Offer]:
    work = view.goal.work
    found: list[Offer] = []
    for preference in sorted({offer.preference for offer in offers}):
        ranked = [offer for offer in offers if offer.preference == preference]
        best = _capped(ranked, view)
        kinds = {_kind(offer) for offer in best}
        others = [offer for offer in ranked if _kind(offer) not in kinds]
        while others and not blocks.open_offers(best, closed, view.now):
            cheapest = _kind(min(others, key=lambda offer: usd_of_work(offer, work)))
            best += _capped([offer for offer in others if _kind(offer) == cheapest], view)
            others = [offer for offer in others if _kind(offer) != cheapest]
        found += best
    return found


def _capped(offers: Sequence[Offer], view: View) -> list[Offer]:
    work = view.goal.work
    limit = min(usd_of_work(offer, work) for offer in offers) * MOST_SPOT
    return [offer for offer in offers if usd_of_work(offer, work) <= limit]


def _kind(offer: Offer) -> tuple[str | None, float]:
    return offer.accelerator, offer.accelerator_count


def rented(offers: Sequence[Offer]) -> list[Offer]:
    return [offer for offer in offers if offer.places is None]


def within_band(offers: Sequence[Offer], goal: PlacementGoal) -> list[Offer]:
    """The offers that cost at most `price_band` more than the cheapest of them."""
    limit = min((usd_of_work(offer, goal.work) for offer in offers), default=0.0) * (1.0 + goal.price_band)
    return [offer for offer in offers if usd_of_work(offer, goal.work) <= limit]


# --- own hosts -------------------------------------------------------------------------------------------------


def own_zones(offers: Iterable[Offer]) -> frozenset[Zone]:
    return frozenset(offer.zone for offer in offers if offer.places is not None)


def free_places(offer: Offer, replicas: Iterable[Replica]) -> int:
    """How many more replicas the own hosts of this zone hold. Replicas of every version occupy their share."""
    if offer.places is None:
        return 0
    there = [replica.offer for replica in replicas if replica.zone == offer.zone]
    per_place = offer.accelerator_count or 1.0
    used = math.ceil(sum((each.accelerator_count or 1.0) for each in there) / per_place)
    return max(0, offer.places - used)


def with_room(offers: Sequence[Offer], replicas: Sequence[Replica]) -> list[Offer]:
    """The offers without the own hosts whose places are all taken."""
    return [offer for offer in offers if offer.places is None or free_places(offer, replicas)]


def own_places(offers: Sequence[Offer], replicas: Sequence[Replica], most: int) -> list[Offer]:
    """The free places of the user's own hosts, at most `most`, in the order of the offers, one entry per place. A zone
    that is on offer in several ways is filled in the first of them."""
    found: list[Offer] = []
    seen: set[Zone] = set()
    for offer in offers:
        if offer.places is not None and offer.zone not in seen:
            seen.add(offer.zone)
            found += [offer] * min(free_places(offer, replicas), most - len(found))
    return found


def _on_own_hosts(view: View, closed: Json) -> int:
    """How many replicas of the wanted version the own hosts hold or could take now."""
    own = own_zones(view.offers)
    if not own:
        return 0
    held = sum(replica.zone in own and not is_spot(replica.offer) for replica in view.replicas)
    opened = blocks.open_offers(view.offers, closed, view.now)
    missing = max(0, view.wanted - held)
    return held + len(own_places(opened, (*view.replicas, *view.others), missing))
