"""Which spot replicas are worth their price: the search among fleets near the one there is.

Adding is looked at several steps ahead, because a second zone is often of no use until it holds enough to stand in
for the first. Every change must be worth a margin, so that a change is not undone by a little more age.

Where a cloud may refuse, a change must also be worth the refusals to be expected, each at a fixed cost: boxes of
uncertain content that cost something to open are best opened in the order of gain - cost / chance (Weitzman,
Econometrica 1979). So markets that we are in come before markets that may be empty, and an empty one is tried the sooner,
the more it would save. A market (a kind of machine in a zone) accepts or refuses once, however many are to go there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from policies.placement.risk_odds import Fleet, Odds

_MOST_MOVES = 3
_STEPS = 8  # large services grow in larger steps


class Site(NamedTuple):
    """A market for the search.

    It has the price of a spot replica there, whether one can be requested now, what a request must gain because it may be
    refused, and the capacity of a replica as a multiple of a wanted one.
    """

    usd_hour: float
    open: bool
    asking_usd_hour: float = 0.0
    heads: float = 1.0


def grown(odds: Odds, have: Fleet, sites: Sequence[Site], room: int, margin: float) -> Fleet | None:
    """Return the best of the fleets on the way to `room` more replicas, each step the best one.

    None if none is better by `margin` of a replica's price.
    """
    open_sites = [zone for zone, site in enumerate(sites) if site.open]
    start = odds.hedge(have).usd_hour
    if start <= min((sites[zone].usd_hour for zone in open_sites), default=math.inf):
        return None  # the quick way out: all that can be saved is less than one replica costs
    fleet, best, paid, saved = have, None, 0.0, margin * _cheapest(sites)
    longest = odds.terms.wanted // (_STEPS * odds.least_units)
    while room > 0:
        step = max(1, min(room, longest))
        room -= step
        tried = [_with(fleet, zone, step) for zone in open_sites]
        prices = [_asked(sites[zone], step, fleet[zone] > have[zone]) for zone in open_sites]
        costs = [odds.hedge(after).usd_hour + price for after, price in zip(tried, prices, strict=True)]
        least = min(costs)
        # Of equals the zone with fewest: what fails there takes less along.
        equals = [i for i, cost in enumerate(costs) if cost <= least + 1e-9]
        pick = min(equals, key=lambda i: fleet[open_sites[i]])
        fleet = tried[pick]
        paid += prices[pick]
        gain = start - odds.hedge(fleet).usd_hour - paid
        if gain > saved + 1e-9:
            saved, best = gain, fleet
    return best


def moved(odds: Odds, have: Fleet, sites: Sequence[Site], room: int, margin: float) -> Fleet | None:
    """Return the same number, a few of them elsewhere, where they come up before the others end: at most `room`.

    None if that is not better by `margin` of a replica's price.
    """
    open_sites = [zone for zone, site in enumerate(sites) if site.open]
    start, saved = odds.hedge(have).usd_hour, margin * _cheapest(sites)
    if start <= saved:
        return None
    fleet, best, paid = have, None, 0.0
    for _ in range(min(room, _MOST_MOVES)):
        moves = [
            (odds.hedge(_with(_with(fleet, old, -1), new, 1)).usd_hour + price, price, old, new)
            for old, count in enumerate(fleet) if count
            for new in open_sites if new != old
            for price in (_asked(sites[new], 1, fleet[new] > have[new]) - sites[old].usd_hour,)
        ]  # fmt: skip
        if not moves:
            break
        _, price, old, new = min(moves)
        fleet = _with(_with(fleet, old, -1), new, 1)
        paid += price
        gain = start - odds.hedge(fleet).usd_hour - paid
        if gain > saved:
            saved, best = gain, fleet
    return best


def shrunk(odds: Odds, have: Fleet, sites: Sequence[Site], least: int, margin: float) -> list[Fleet]:
    """Return ever smaller fleets, of which each lacks one more replica that saves less than it costs.

    The least useful goes first; at least `least` units stay.
    """
    fleet, smaller = have, []
    while (spare := odds.total(fleet) - least) > 0:
        now = odds.hedge(fleet).usd_hour
        gains = [
            (now - odds.hedge(_with(fleet, zone, -1)).usd_hour + sites[zone].usd_hour, zone)
            for zone, count in enumerate(fleet)
            if count and odds.units_of(zone) <= spare
        ]
        if not gains:
            break
        gain, zone = max(gains)
        if gain <= margin * sites[zone].usd_hour:
            break
        fleet = _with(fleet, zone, -1)
        smaller.append(fleet)
    return smaller


def _asked(site: Site, count: int, asked_already: bool) -> float:
    """Return what `count` more replicas of a zone cost, the launch requests included."""
    return count * site.usd_hour + (0.0 if asked_already else site.asking_usd_hour)


def _cheapest(sites: Sequence[Site]) -> float:
    """Return the least price of what one wanted replica does."""
    return min((site.usd_hour / site.heads for site in sites if site.open), default=math.inf)


def _with(fleet: Fleet, zone: int, more: int) -> Fleet:
    return (*fleet[:zone], fleet[zone] + more, *fleet[zone + 1 :])
