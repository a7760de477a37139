"""The spot markets that RiskHedge chooses among, and how many units of capacity a replica of each has.

A market is a kind of machine (accelerator and count) in a zone, because room, prices and losses are the market's own: a zone
without an L4 may have an A100. Where the file says what each kind can do, capacity is counted in units of a quarter of the
weakest, and RiskHedge compares prices for the work. Otherwise every replica counts one.

Offers of the best `preference` that may be requested now come before all others, whatever they cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from policies.model import Json, Offer, Replica
from policies.placement import fleet, price_limits, reopening, zone_backoff
from policies.placement.base import View
from policies.placement.risk_market import MarketModel
from policies.placement.zone_backoff import is_spot
from policies.throughput import qps_of

MOST_MARKETS = 50  # that are searched: those in use, and the cheapest of those that may be requested
MOST_UNITS = 64  # for the wanted capacity; large services are counted in coarser units
_QUARTERS = (4, 2, 1)


class Units(NamedTuple):
    """Capacity in units: `wanted` is to be ready, and a replica on the best offer has `head`.

    `by_kind` has the units of a replica of each kind; it is empty where every replica counts one.
    """

    wanted: int
    head: int = 1
    by_kind: Mapping[tuple[str | None, float], int] = {}

    def of(self, offer: Offer) -> int:
        return self.by_kind.get((offer.accelerator, offer.accelerator_count), 1) if self.by_kind else 1

    def total(self, replicas: Iterable[Replica]) -> int:
        return sum(self.of(replica.offer) for replica in replicas)

    def ready(self, replicas: Sequence[Replica], now: float) -> int:
        if not self.by_kind:
            return fleet.ready(replicas, now)
        return sum(self.of(replica.offer) * fleet.ready((replica,), now) for replica in replicas)


def units_of(view: View) -> Units:
    """Return the units in which capacity is counted. At least `view.least` replicas are needed, however fast each is."""
    work = view.goal.work
    if not work or not view.offers:
        return Units(view.wanted)
    kinds = {_kind(offer): offer for offer in view.offers}
    kinds |= {_kind(replica.offer): replica.offer for replica in (*view.replicas, *view.others)}
    qps = {kind: qps_of(offer, work) for kind, offer in kinds.items()}
    weakest = min(qps.values())
    if weakest <= 0.0 or weakest == max(qps.values()):
        return Units(view.wanted)
    best = qps[_kind(view.offers[0])]
    demand = view.wanted * best if view.wanted_qps is None else view.wanted_qps
    parts = next((n for n in _QUARTERS if demand / weakest * n <= MOST_UNITS), 1)
    wanted = max(view.least, math.ceil(demand / weakest * parts - 1e-6))
    # No replica counts for more than its share, or fewer than `view.least` would be enough.
    most = max(1, wanted // max(1, view.least))
    by_kind = {
        kind: min(most, max(1, math.floor(rate / weakest * parts + 1e-6))) for kind, rate in qps.items()
    }
    return Units(wanted, by_kind[_kind(view.offers[0])], by_kind)


@dataclass(frozen=True, slots=True)
class Sites:
    """The markets of one decision, by index; best offer first.

    `offers` hold their prices. `usable` are the offers that may be requested now, None where a market is closed, and
    `retry_at` is when a market that had no room may be requested again. `opens_at` is when the first closed one opens.
    """

    markets: tuple[str, ...]
    offers: tuple[Offer, ...]
    usable: tuple[Offer | None, ...]
    retry_at: tuple[float | None, ...]
    opens_at: float | None
    all_asked: bool  # every market on offer has refused, and none has accepted since


def sites_of(view: View, market: MarketModel, spot: Sequence[Replica], closed: Json) -> Sites:
    """Return the markets of the view's offers and of the `spot` replicas. `closed` are the blocks."""
    now = view.now
    offers = [offer for offer in view.offers if is_spot(offer)]
    usable = _by_market(zone_backoff.open_offers(offers, closed, now))
    known = _by_market([*offers, *(replica.offer for replica in spot)])
    retry_at = _retry_at(view, market, spot, known)
    waits = [at for at in retry_at.values() if at is not None and at > now]
    open_now = {key: offer for key, offer in usable.items() if (at := retry_at[key]) is None or at <= now}
    best = min((offer.preference for offer in open_now.values()), default=0)
    open_now = {key: offer for key, offer in open_now.items() if offer.preference == best}
    all_asked = None not in retry_at.values()
    if len(known) > MOST_MARKETS:
        known = _few(view, known, open_now, {zone_backoff.market(replica.offer) for replica in spot})
    return Sites(
        tuple(known),
        tuple(known.values()),
        tuple(open_now.get(key) for key in known),
        tuple(retry_at[key] for key in known),
        fleet.earliest(zone_backoff.next_opening(offers, closed, now), *waits),
        all_asked,
    )


def _few(
    view: View, known: Mapping[str, Offer], open_now: Mapping[str, Offer], in_use: set[str]
) -> dict[str, Offer]:
    """Return the markets in use, and the cheapest for the work of those that may be requested."""
    work = view.goal.work
    qps = {_kind(offer): qps_of(offer, work) for offer in open_now.values()} if work else {}
    ranked = sorted(
        open_now, key=lambda key: open_now[key].price_usd_hour / qps.get(_kind(open_now[key]), 1.0)
    )
    kept = in_use | set(ranked[:MOST_MARKETS])
    return {key: offer for key, offer in known.items() if key in kept}


def _retry_at(
    view: View, market: MarketModel, spot: Sequence[Replica], known: Mapping[str, Offer]
) -> dict[str, float | None]:
    """Return when each market may be requested again.

    After an outage in which all markets were shut, the first that takes a replica shows that capacity is back. The others
    are requested at once, and it is left alone until `reopening.PATIENCE_S` later: otherwise it would take the whole
    fleet, and its next preemption would be an outage again.
    """
    retry_at = {key: market.retry_at(key) for key in known}
    hosts = price_limits.own_zones(view.offers)
    live = [r for r in (*spot, *fleet.spot(view.others)) if r.zone not in hosts]
    held = {zone_backoff.market(replica.offer) for replica in live if replica.launched_at is not None}
    began = reopening.accepted_at(live)
    if began is None or len(held) != 1 or view.now >= began + reopening.PATIENCE_S:
        return retry_at
    others = [key for key, offer in known.items() if key not in held and offer.zone not in hosts]
    empty = {key: span for key in others if (span := market.empty(key)) is not None}
    asked_at = min(replica.created_at for replica in live if zone_backoff.market(replica.offer) in held)
    # Markets that were requested together with this one, as at the first launch of a service, show no outage.
    if not others or len(empty) < len(others) or any(since >= asked_at for since, _ in empty.values()):
        return retry_at
    again: dict[str, float | None] = {}
    again |= reopening.ask_again_at({key: at for key, (_, at) in empty.items()}, began)
    again |= dict.fromkeys(held, began + reopening.PATIENCE_S)
    return {key: again.get(key, at) for key, at in retry_at.items()}


def _by_market(offers: Iterable[Offer]) -> dict[str, Offer]:
    """Return the best offer of each market, in their order."""
    best: dict[str, Offer] = {}
    for offer in offers:
        best.setdefault(zone_backoff.market(offer), offer)
    return best


def _kind(offer: Offer) -> tuple[str | None, float]:
    return offer.accelerator, offer.accelerator_count
