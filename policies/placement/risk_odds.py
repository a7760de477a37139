"""How much of a fleet survives the next minutes, exactly, and what hedging that costs.

A market is a kind of machine in a zone. Markets fail on their own, those of one kind in a region also together, and those
of different groups sometimes all at once (common causes, as the beta factor of reliability engineering: Fleming, 1975). The
recordings have these shares: where two zones have had room for 2 to 24 h and one drops its replicas, the other does so
within a cold start of it in .21 (V100) and .31 (AWS 3) of the cases in one region, and in .02 (V100), .04 (AWS 3) and 0
(AWS 1) in different regions; by chance it would be .02 each. Such losses decide at a target of 99.9 %: with
shares of .2 and 0 less than half of the shortfall was predicted there on V100 and AWS 3.

*   A shock strikes all that we hold in a group. Its chance is `TOGETHER` times that of a loss in the safest market held there.
*   A shock strikes all of a fleet in several groups. Its chance is `ACROSS` times that of a loss in the safest market.

A fleet is a tuple, the number of spot replicas in each market. Capacity is counted in units: one for each replica where
all can do the same, else as `risk_sites` weighs them. A distribution is a list: at index i the chance that i units
survive, and at the last index, the most that can be wanted, that at least that number survive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple, TypeAlias

TOGETHER = 0.3
ACROSS = 0.03
_MOST_PARTS = 4  # a partial loss leaves one of this number of values, evenly spread

Fleet: TypeAlias = tuple[int, ...]


#: (units, chance): how many more may be wanted when a replica launched now would be ready.
Growth: TypeAlias = tuple[tuple[int, float], ...]
NO_GROWTH: Growth = ((0, 1.0),)


class Terms(NamedTuple):
    """The trade between a shortfall and its prevention.

    Fewer than `wanted` units ready cost `penalty_usd_hour`. Where `growth` has several numbers, that many more units are
    wanted, each number with its chance. An on-demand replica of `on_demand_units` costs `on_demand_usd_hour`, and between
    `least` and `most` of these may be kept.
    """

    wanted: int
    penalty_usd_hour: float
    on_demand_usd_hour: float
    least: int
    most: int
    on_demand_units: int = 1
    growth: Growth = NO_GROWTH


class Hedge(NamedTuple):
    """The on-demand replicas to keep beside a fleet.

    `shortfall` is the chance that fewer units are ready than are wanted, and `usd_hour` what that and the replicas cost together.
    """

    on_demand: int
    usd_hour: float
    shortfall: float


class Odds:
    """The odds of fleets over given markets.

    `group_of` numbers the group (the kind in its region) of each market, `losses` is the chance that it drops replicas in
    the time considered, and `whole` the share of losses that take all of a market. `units` is what a replica there counts;
    None: one.
    """

    def __init__(
        self,
        group_of: Sequence[int],
        losses: Sequence[float],
        whole: float,
        terms: Terms,
        units: Sequence[int] | None = None,
    ) -> None:
        self.terms = terms
        self._losses = losses
        self._whole = whole
        self._units = units
        self._top = terms.wanted + max(more for more, _ in terms.growth)
        members: dict[int, list[int]] = {}
        for market, its in enumerate(group_of):
            members.setdefault(its, []).append(market)
        self._markets_of = [members[group] for group in sorted(members)]
        self._group_of = {market: number for number, its in enumerate(self._markets_of) for market in its}
        self._common = ACROSS * min(losses, default=0.0)
        self._groups: dict[tuple[float, int, Fleet], list[tuple[int, float]]] = {}
        self._sums: dict[float, dict[tuple[tuple[int, Fleet], ...], list[float]]] = {}
        self._hedges: dict[Fleet, Hedge] = {}

    def hedge(self, fleet: Fleet) -> Hedge:
        """Return the best hedge for a fleet."""
        found = self._hedges.get(fleet)
        if found is None:
            found = self._hedges[fleet] = best_hedge(self.survivors(fleet), self.terms)
        return found

    @property
    def least_units(self) -> int:
        return 1 if self._units is None else min(self._units, default=1)

    def units_of(self, market: int) -> int:
        return 1 if self._units is None else self._units[market]

    def total(self, fleet: Fleet) -> int:
        """Return the units of a fleet in which nothing is lost."""
        return sum(fleet) if self._units is None else sum(map(mul, fleet, self._units))

    def survivors(self, fleet: Fleet) -> list[float]:
        """Return the distribution of the units of a fleet that survive."""
        groups = sorted({self._group_of[market] for market, count in enumerate(fleet) if count})
        held = [(number, tuple([fleet[market] for market in self._markets_of[number]])) for number in groups]
        if len(held) < 2:
            return self._added(held, 0.0)
        each = self._units or [1] * len(fleet)
        parted = sorted([(count, units) for count, units in zip(fleet, each, strict=True) if count > 1])
        struck = _struck(tuple(parted), self._whole, self._top)
        return _mixed(self._added(held, self._common), struck, self._common)

    def _added(self, held: Sequence[tuple[int, Fleet]], common: float) -> list[float]:
        """Return the distribution of the groups' sum where the loss across groups, of the chance `common`, has not struck."""
        sums = self._sums.setdefault(common, {(): [1.0]})
        # Fleets that a search compares differ in a group or two: what those before come to is the same.
        known = len(held)
        while known and tuple(held[:known]) not in sums:
            known -= 1
        total = sums[tuple(held[:known])]
        for upto in range(known, len(held)):
            number, counts = held[upto]
            one = self._groups.get((common, number, counts))
            if one is None:
                one = _sparse(self._group(self._markets_of[number], counts, common))
                self._groups[common, number, counts] = one
            total = sums[tuple(held[: upto + 1])] = _sum(total, one, self._top)
        return total

    def _group(self, markets: Sequence[int], counts: Fleet, common: float) -> list[float]:
        """Return the distribution of a group where the loss across groups has not struck."""
        held = [(market, count) for market, count in zip(markets, counts, strict=True) if count]
        apart, struck = [1.0], [1.0]
        shock = TOGETHER * min(self._losses[market] for market, _ in held) if len(held) > 1 else 0.0
        spared = (1.0 - shock) * (1.0 - common)
        for market, count in held:
            each = self.units_of(market)
            if shock:
                struck = _sum(struck, _losing(count, each, 1.0, self._whole), self._top)
            own = 1.0 - (1.0 - self._losses[market]) / spared
            apart = _sum(
                apart, [(count * each, 1.0 - own), *_losing(count, each, own, self._whole)], self._top
            )
        return _mixed(apart, struck, shock) if shock else apart


def _losing(count: int, each: int, loss: float, whole: float) -> list[tuple[int, float]]:
    """Return (surviving units, chance) for each outcome of a loss in a market, which has the chance `loss`."""
    if count == 1:
        return [(0, loss)]
    parts = min(count - 1, _MOST_PARTS)
    share = loss * (1.0 - whole) / parts
    some = [(((i + 1) * count // (parts + 1)) * each, share) for i in range(parts)]
    return [(0, loss * whole), *some]


@lru_cache(maxsize=4096)
def _struck(markets: tuple[tuple[int, int], ...], whole: float, top: int) -> list[float]:
    """Return the distribution of what a loss leaves of all these markets, each (replicas, units of one).

    Whichever markets they are: fleets that a search compares mostly have the same numbers of replicas, elsewhere.
    """
    if not markets:
        return [1.0]
    *before, (count, each) = markets
    return _sum(_struck(tuple(before), whole, top), _losing(count, each, 1.0, whole), top)


def _sparse(distribution: Sequence[float]) -> list[tuple[int, float]]:
    return [(units, p) for units, p in enumerate(distribution) if p]


def _mixed(apart: Sequence[float], struck: Sequence[float], shock: float) -> list[float]:
    """Return the distribution where a shock of this chance leaves `struck`, the shorter list, and else `apart`."""
    mixed = [(1.0 - shock) * p for p in apart]
    for units, p in enumerate(struck):
        mixed[units] += shock * p
    return mixed


def best_hedge(survivors: Sequence[float], terms: Terms) -> Hedge:
    """Return the number of on-demand replicas that costs least together with the shortfall it leaves."""
    below = [0.0, *accumulate(survivors)]  # at index i the chance that fewer than i units survive
    best, least, shortfall = terms.least, math.inf, 1.0
    for number in range(terms.least, max(terms.least, terms.most) + 1):
        short = _shortfall(below, terms, terms.wanted - number * terms.on_demand_units)
        penalty = short * terms.penalty_usd_hour
        usd_hour = number * terms.on_demand_usd_hour + penalty
        if usd_hour < least - 1e-9:
            best, least, shortfall = number, usd_hour, short
        if penalty <= terms.on_demand_usd_hour:
            break  # one more costs more than the rest of the shortfall
    return Hedge(best, least, shortfall)


def _shortfall(below: Sequence[float], terms: Terms, enough: int) -> float:
    """Return the chance that fewer units survive than are wanted, `enough` without growth."""
    last = len(below) - 1
    if terms.growth is NO_GROWTH:
        return min(1.0, below[enough if enough < last else last]) if enough > 0 else 0.0
    return min(1.0, sum(p * below[min(max(0, enough + more), last)] for more, p in terms.growth))


def chance(per_hour: float, hours: float) -> float:
    """Return the chance that something of this rate happens in this time."""
    return -math.expm1(-per_hour * hours)


def _sum(one: Sequence[float], other: Sequence[tuple[int, float]], most: int) -> list[float]:
    """Return the distribution of the sum of two counts, at most `most`."""
    some = _sparse(one)
    total = [0.0] * (len(one) + max(count for count, _ in other))
    for j, q in other:
        for i, p in some:
            total[i + j] += p * q
    if len(total) > most + 1:
        total[most:] = [sum(total[most:])]
    return total
