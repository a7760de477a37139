"""From a price per zone to offers: which candidates fit which zones, and in which order they are returned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from policies.model import CapacityType, Offer, Zone
from provisioners.offers.explain_no_offer import NoOffer
from provisioners.offers.matching import each_once, ranked_by
from provisioners.port.base import Candidate, Requirements


@dataclass(frozen=True, slots=True)
class ZonePrices:
    """What one accelerator (or one instance without any) costs in a zone."""

    zone: Zone
    spot_usd_hour: float
    on_demand_usd_hour: float

    def price_usd_hour(self, capacity_type: CapacityType) -> float:
        return self.spot_usd_hour if capacity_type is CapacityType.SPOT else self.on_demand_usd_hour


def offers_for(need: Requirements, prices: Sequence[ZonePrices], instance_type: str) -> list[Offer]:
    """Return every zone that fits a candidate, cheapest first; with `need.ordered`, in the order of the candidates.

    For clouds of make-believe machines: any accelerator and any instance type requested is available, the
    price grows with the number of accelerators and of nodes, and `cpus` and `memory` are not looked at.
    """
    per_candidate = [
        sorted(_fitting(candidate, prices, instance_type, need.num_nodes), key=ranked_by(need.work))
        for candidate in need.candidates
    ]
    offers = each_once(offer for group in per_candidate for offer in group)
    return offers if need.ordered else sorted(offers, key=ranked_by(need.work))


def explain_no_offer(candidate: Candidate, prices: Sequence[ZonePrices]) -> NoOffer | None:
    """Return which wish of the candidate left nothing; None if it has an offer. Places and prices alone can."""
    left: Sequence[ZonePrices] = prices
    for field, asked in (("region", _or_any(candidate.region)), ("zone", _or_any(candidate.zone))):
        known = [_named(each.zone, field) for each in left]
        left = [each for each in left if asked in (None, _named(each.zone, field))]
        if not left:
            names = ", ".join(sorted(set(known))) or "none"
            return NoOffer(field, f"{candidate.cloud} has no {field} {asked!r}", f"it has {names}")
    if next(_fitting(candidate, left, "", 1), None) is not None:
        return None
    least = min(_node_usd_hour(candidate, each) for each in left)
    return NoOffer(
        "max_hourly_cost",
        f"the cheapest node on {candidate.cloud} costs {least:g} USD per hour",
        f"max_hourly_cost is {candidate.max_hourly_cost:g}",
    )


def _named(zone: Zone, field: str) -> str:
    return zone.region if field == "region" else zone.name


def _node_usd_hour(candidate: Candidate, known: ZonePrices) -> float:
    capacity_type = CapacityType.SPOT if candidate.use_spot else CapacityType.ON_DEMAND
    return round(known.price_usd_hour(capacity_type) * _scale(candidate), 6)


def _scale(candidate: Candidate) -> float:
    """A machine is worth its accelerators; one without any is worth one."""
    return (candidate.accelerator_count if candidate.accelerator else 0.0) or 1.0


def _fitting(
    candidate: Candidate, prices: Iterable[ZonePrices], instance_type: str, num_nodes: int
) -> Iterator[Offer]:
    capacity_type = CapacityType.SPOT if candidate.use_spot else CapacityType.ON_DEMAND
    count = candidate.accelerator_count if candidate.accelerator else 0.0
    for known in prices:
        node_usd_hour = _node_usd_hour(candidate, known)
        if _fits(candidate, known.zone) and node_usd_hour <= _most(candidate):
            yield Offer(
                zone=known.zone,
                instance_type=_or_any(candidate.instance_type) or instance_type,
                accelerator=candidate.accelerator,
                accelerator_count=count,
                capacity_type=capacity_type,
                price_usd_hour=round(node_usd_hour * num_nodes, 6),
                on_demand_usd_hour=round(known.on_demand_usd_hour * _scale(candidate) * num_nodes, 6),
                choice=candidate.choice,
            )


def _fits(candidate: Candidate, zone: Zone) -> bool:
    asked = (candidate.cloud, candidate.region, candidate.zone)
    has = (zone.cloud, zone.region, zone.name)
    return all(_or_any(want) in (None, have) for want, have in zip(asked, has, strict=True))


def _most(candidate: Candidate) -> float:
    return float("inf") if candidate.max_hourly_cost is None else candidate.max_hourly_cost


def _or_any(wish: str | None) -> str | None:
    return None if wish == "*" else wish
