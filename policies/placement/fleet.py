"""A service's fleet as placers see it: counts per capacity type, the shortfall, the cheapest offers and the order of termination."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from policies.goals import AcceleratorQps
from policies.model import CapacityType, Json, Offer, Replica, ReplicaState, Zone
from policies.placement import price_limits, zone_backoff
from policies.placement.base import PlannedLaunch, PlannedTermination, View
from policies.placement.zone_backoff import is_spot
from policies.throughput import usd_of_work

FLAP_GRACE_S = 30.0
#: Prices that differ by less than this fraction are the same price: a cent is no reason to crowd a zone.
EQUAL_COST = 0.05
FULL = "every host or reservation of yours is full and nothing else is on offer"
OWN_HOST = "a free place on a host or reservation of yours"

_WORDS = {CapacityType.SPOT: "on spot", CapacityType.ON_DEMAND: "on demand"}

_ENDING_ORDER = {
    ReplicaState.REQUESTED: 0,
    ReplicaState.PROVISIONING: 1,
    ReplicaState.STARTING: 2,
    ReplicaState.NOT_READY: 3,
    ReplicaState.READY: 4,
}


def spot(replicas: Iterable[Replica]) -> list[Replica]:
    return [replica for replica in replicas if is_spot(replica.offer)]


def on_demand(replicas: Iterable[Replica]) -> list[Replica]:
    return [replica for replica in replicas if not is_spot(replica.offer)]


def ready(replicas: Iterable[Replica], now: float) -> int:
    """Return how many serve. One probe that failed buys no GPU: a replica that has just become NOT_READY still counts."""
    return sum(
        r.state is ReplicaState.READY or (r.state is ReplicaState.NOT_READY and now - r.since < FLAP_GRACE_S)
        for r in replicas
    )


def grace_ends_at(replicas: Iterable[Replica], now: float) -> float | None:
    """Return when the first replica that only counts as ready by grace stops doing so."""
    ends = [r.since + FLAP_GRACE_S for r in replicas if r.state is ReplicaState.NOT_READY]
    return min((at for at in ends if at > now), default=None)


def ends(
    replicas: Sequence[Replica], keep: int, why: str, own: frozenset[Zone] = frozenset()
) -> list[PlannedTermination]:
    """Return the replicas beyond `keep`.

    First those that do not serve yet, then the oldest version, then those not in a zone of `own` hosts, then from the
    zone that holds most, then the youngest.
    """
    count = len(replicas) - max(0, keep)
    if count <= 0:
        return []
    in_zone = Counter(replica.zone for replica in replicas)
    groups: dict[tuple[int, int, bool], dict[Zone, list[int]]] = {}
    for r in sorted(replicas, key=lambda r: r.id):
        group = groups.setdefault((_ENDING_ORDER[r.state], r.version, r.zone in own), {})
        group.setdefault(r.zone, []).append(r.id)
    chosen: list[PlannedTermination] = []
    for _, by_zone in sorted(groups.items()):
        # One entry per zone: of those that end, only the zone of the last one has fewer than before.
        crowds = [(-in_zone[zone], -ids[-1], zone) for zone, ids in by_zone.items()]
        heapify(crowds)
        while crowds and len(chosen) < count:
            _, _, zone = heappop(crowds)
            chosen.append(PlannedTermination(by_zone[zone].pop(), why))
            in_zone[zone] -= 1
            if by_zone[zone]:
                heappush(crowds, (-in_zone[zone], -by_zone[zone][-1], zone))
    return chosen


class Share(NamedTuple):
    """The part of the fleet that is of one capacity type: what should be there, what exists, and what can be launched.

    Nothing is on offer to a share that is complete: `offers`, and the `usable` of them that may be tried now, are
    only looked up for one that is not. `opens_at` is when the first may be tried where none may be now.
    """

    kind: CapacityType
    wanted: int
    replicas: Sequence[Replica]
    offers: Sequence[Offer] = ()
    usable: Sequence[Offer] = ()
    opens_at: float | None = None
    refused: bool = False
    full: bool = False
    own: frozenset[Zone] = frozenset()

    @staticmethod
    def of(view: View, kind: CapacityType, wanted: int, closed: Json) -> Share:
        """`closed` are the blocks."""
        own = price_limits.own_zones(view.offers)
        replicas = [replica for replica in view.replicas if replica.offer.capacity_type is kind]
        if wanted <= sum(replica.state is not ReplicaState.REQUESTED for replica in replicas):
            return Share(kind, wanted, replicas, own=own)
        offers = [offer for offer in view.offers if offer.capacity_type is kind]
        roomy = price_limits.with_room(offers, (*view.replicas, *view.others))
        usable = preferred(zone_backoff.open_offers(roomy, closed, view.now))
        waits = not usable and wanted > len(replicas)
        opens_at = zone_backoff.next_opening(roomy, closed, view.now) if waits else None
        refused = zone_backoff.all_refused(offers, closed)
        full = bool(offers) and not roomy
        return Share(kind, wanted, replicas, offers, usable, opens_at, refused, full, own)

    @property
    def missing(self) -> int:
        """How many replicas are missing; negative if there are too many."""
        return self.wanted - len(self.replicas)

    def ends(self, why: str) -> list[PlannedTermination]:
        return ends(self.replicas, self.wanted, why, self.own)

    def note(self) -> tuple[str, ...]:
        """The sentence for the user while nothing is available.

        It stands until a zone takes a replica, and does not come and go with every attempt.
        """
        short = self.wanted - sum(r.state is not ReplicaState.REQUESTED for r in self.replicas)
        if short <= 0 or not (self.refused or self.full):
            return ()
        if self.full:
            return (f"{short} more {_WORDS[self.kind]} wanted, but {FULL}",)
        problem = "every zone refused when last asked" if self.offers else "nothing on offer fits"
        return (f"{short} more {_WORDS[self.kind]} wanted, but {problem}",)


def earliest(*instants: float | None) -> float | None:
    return min((at for at in instants if at is not None), default=None)


def preferred(offers: Sequence[Offer]) -> Sequence[Offer]:
    """Return those that the user would rather have than all others; all of them where no order was given.

    Own hosts have few places. What they cannot take goes to rented machines at once, so these are the rented offers of
    the best preference that has any, and the own hosts of that preference or a better one.
    """
    best = min((offer.preference for offer in price_limits.without_own_hosts(offers)), default=None)
    if best is None:
        return sorted(offers, key=lambda offer: offer.preference)
    own = [offer for offer in offers if offer.places is not None and offer.preference <= best]
    own.sort(key=lambda offer: offer.preference)
    return [*own, *(offer for offer in price_limits.without_own_hosts(offers) if offer.preference == best)]


def cheapest(
    offers: Sequence[Offer], work: Sequence[AcceleratorQps] = (), margin: float = EQUAL_COST
) -> list[Offer]:
    """Return the offers of the least price (for their `work`, if that is known), or within `margin` (a fraction) of it.

    They cost the same.
    """
    limit = min((usd_of_work(offer, work) for offer in offers), default=0.0) * (1.0 + margin)
    return [offer for offer in offers if usd_of_work(offer, work) <= limit]


class Spread:
    """Fills zones evenly: the zone with the fewest replicas, then (`by_region`) the region with the fewest, then the better offer."""

    def __init__(self, replicas: Iterable[Replica], *, by_region: bool = True) -> None:
        self.by_region = by_region
        self.in_zone: Counter[Zone] = Counter([replica.offer.zone for replica in replicas])
        self.in_region: Counter[tuple[str, str]] = Counter()
        for zone, count in self.in_zone.items():
            self.in_region[zone.cloud, zone.region] += count

    def take(self, offers: Sequence[Offer], why: str = "") -> PlannedLaunch:
        """Return the next place among `offers`, which must not be empty; it is counted at once."""
        return self.put(min(offers, key=lambda offer: self.crowd(offer.zone)), why)  # the first of equals

    def fill(self, offers: Sequence[Offer], count: int, why: str = "") -> list[PlannedLaunch]:
        """Return the next `count` places, as many calls of `take` would; only regions that got one are looked at again."""
        crowds = [self.crowd(offer.zone) for offer in offers]
        places = []
        for _ in range(count if offers else 0):
            pick = offers[min(range(len(offers)), key=crowds.__getitem__)]
            places.append(self.put(pick, why))
            region = pick.zone.region
            for number, offer in enumerate(offers):
                if offer.zone.region == region:
                    crowds[number] = self.crowd(offer.zone)
        return places

    def put(self, offer: Offer, why: str = "") -> PlannedLaunch:
        """Return a place decided elsewhere, counted."""
        there = self.in_zone[offer.zone]
        self._count(offer.zone)
        return PlannedLaunch(
            offer, why or ("no replica there yet" if there == 0 else f"{there} there, no zone has fewer")
        )

    def crowd(self, zone: Zone) -> tuple[int, int]:
        """Return how many are in the zone, and in its region."""
        in_zone = self.in_zone.get(zone, 0)  # a Counter's own default is Python code, and this is called most
        return in_zone, self.in_region.get((zone.cloud, zone.region), 0) if self.by_region else 0

    def _count(self, zone: Zone) -> None:
        self.in_zone[zone] += 1
        self.in_region[zone.cloud, zone.region] += 1


def on_demand_places(share: Share, view: View, why: str) -> list[PlannedLaunch]:
    """Return where the missing on-demand replicas go: on own hosts, then evenly over offers within the price band."""
    count = min(share.missing, view.limit) if share.usable else 0
    if count <= 0:
        return []
    own = price_limits.own_places(share.usable, (*view.replicas, *view.others), count)
    band = price_limits.within_band(price_limits.without_own_hosts(share.usable), view.goal)
    spread = Spread(on_demand((*view.replicas, *view.others)))
    launches = [spread.put(offer, f"{OWN_HOST}; {why}") for offer in own]
    return launches + spread.fill(band, count - len(own), why)
