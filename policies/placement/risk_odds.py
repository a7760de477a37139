"""How many of a fleet survive the next minutes, exactly, and what hedging that costs.

Zones fail on their own, and zones of a region also together: with `TOGETHER` times the chance of its safest zone a
shock strikes every zone of the region that we hold. That share is an assumption; results change little with it.

A fleet is a tuple, the number of spot replicas in each zone. A distribution is a list: at index i the chance that i
survive, and at the last index, the wanted number, that at least that number survive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

TOGETHER = 0.2
_MOST_PARTS = 4  # a partial loss leaves one of this number of values, evenly spread

Fleet: TypeAlias = tuple[int, ...]


class Terms(NamedTuple):
    """The trade between a shortfall and its prevention.

    Fewer than `wanted` ready cost `penalty_usd_hour`, an on-demand replica `on_demand_usd_hour`, and between `least` and `most` of these may be kept.
    """

    wanted: int
    penalty_usd_hour: float
    on_demand_usd_hour: float
    least: int
    most: int


class Hedge(NamedTuple):
    """The on-demand replicas to keep beside a fleet.

    `usd_hour` is what they and the expected shortfall cost together.
    """

    on_demand: int
    usd_hour: float
    shortfall: float


class Odds:
    """The odds of fleets over given zones.

    `region_of` numbers the region of each zone, `losses` is the chance that it drops replicas in the time considered, and
    `whole` the share of losses that take all of a zone.
    """

    def __init__(self, region_of: Sequence[int], losses: Sequence[float], whole: float, terms: Terms) -> None:
        self.terms = terms
        self._losses = losses
        self._whole = whole
        self._zones_of = [
            [zone for zone, its in enumerate(region_of) if its == region] for region in sorted(set(region_of))
        ]
        self._regions: dict[tuple[int, Fleet], list[float]] = {}
        self._hedges: dict[Fleet, Hedge] = {}

    def hedge(self, fleet: Fleet) -> Hedge:
        """Return the best one for a fleet."""
        found = self._hedges.get(fleet)
        if found is None:
            found = self._hedges[fleet] = best_hedge(self.survivors(fleet), self.terms)
        return found

    def survivors(self, fleet: Fleet) -> list[float]:
        total = [1.0]
        for number, zones in enumerate(self._zones_of):
            counts = tuple(fleet[zone] for zone in zones)
            if any(counts):
                key = number, counts
                one = self._regions.get(key)
                if one is None:
                    one = self._regions[key] = self._region(zones, counts)
                total = _sum(total, list(enumerate(one)), self.terms.wanted)
        return total

    def _region(self, zones: Sequence[int], counts: Fleet) -> list[float]:
        held = [(count, self._losses[zone]) for zone, count in zip(zones, counts, strict=True) if count]
        shock = TOGETHER * min(loss for _, loss in held) if len(held) > 1 else 0.0
        apart, struck = [1.0], [1.0]
        for count, loss in held:
            own = (loss - shock) / (1.0 - shock)
            apart = _sum(apart, [(count, 1.0 - own), *self._losing(count, own)], self.terms.wanted)
            if shock:
                struck = _sum(struck, self._losing(count, 1.0), self.terms.wanted)
        if not shock:
            return apart
        struck += [0.0] * (len(apart) - len(struck))
        return [(1.0 - shock) * a + shock * s for a, s in zip(apart, struck, strict=True)]

    def _losing(self, count: int, loss: float) -> list[tuple[int, float]]:
        """(survivors, chance) of a zone that has a loss with the chance `loss`."""
        if count == 1:
            return [(0, loss)]
        parts = min(count - 1, _MOST_PARTS)
        each = loss * (1.0 - self._whole) / parts
        return [(0, loss * self._whole), *(((i + 1) * count // (parts + 1), each) for i in range(parts))]


def best_hedge(survivors: Sequence[float], terms: Terms) -> Hedge:
    """Return the number of on-demand replicas that costs least together with the shortfall it leaves."""
    short = sum(survivors[: max(0, terms.wanted - terms.least)])
    best = Hedge(terms.least, _cost(terms, terms.least, short), short)
    for number in range(terms.least + 1, terms.most + 1):
        enough = terms.wanted - number  # survivors that suffice now, and with one on demand less did not
        short = max(0.0, short - (survivors[enough] if 0 <= enough < len(survivors) else 0.0))
        usd_hour = _cost(terms, number, short)
        if usd_hour < best.usd_hour - 1e-9:
            best = Hedge(number, usd_hour, short)
    return best


def chance(per_hour: float, hours: float) -> float:
    """That something of this rate happens in this time."""
    return -math.expm1(-per_hour * hours)


def _cost(terms: Terms, on_demand: int, short: float) -> float:
    return on_demand * terms.on_demand_usd_hour + short * terms.penalty_usd_hour


def _sum(one: Sequence[float], other: Sequence[tuple[int, float]], most: int) -> list[float]:
    """Return the distribution of the sum of two counts, at most `most`."""
    top = min(most, len(one) - 1 + max(count for count, _ in other))
    total = [0.0] * (top + 1)
    for i, p in enumerate(one):
        if p:
            for j, q in other:
                total[min(i + j, top)] += p * q
    return total
