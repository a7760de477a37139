"""Small machines without accelerators, for load balancer agents: which type, and roughly what it costs.

The catalog is about accelerators. An agent needs two virtual CPUs and a network, which every region of every cloud has, so
one type per cloud is enough here, and a few others that people request. Prices are the clouds' list prices on demand, in
US dollars per hour, for their cheapest regions (us-east-1, us-central1, eastus): elsewhere a machine costs up to half as
much again, and the bill shows the truth. They are for `serve status`; nothing is decided by them. A type without a
price here is not offered: it would look as if it cost nothing.

AWS: aws/karpenter-provider-aws@265ee0ba, 2026-02-09 (t3: read in 2025). Google Cloud: e2 by skypilot-org/skypilot-catalog@006059e0
(2026), others read in 2025. Azure: Standard_D2s_v5 by Azure/karpenter-provider-azure@352646f5, 2026-06-18, others read in
2025.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from policies.model import CapacityType, Offer, Zone
from provisioners.port.base import Requirements

_USD_HOUR: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {  # the first of each cloud is the default
        "aws": {
            "c6i.large": 0.085,
            "c6i.xlarge": 0.17,
            "c6a.large": 0.0765,
            "c7i.large": 0.08925,
            "c7i.xlarge": 0.1785,
            "c7a.large": 0.10264,
            "c7g.large": 0.0725,
            "c7g.xlarge": 0.145,
            "m6i.large": 0.096,
            "m7i.large": 0.1008,
            "t3.medium": 0.0416,
        },
        "gcp": {
            "e2-standard-2": 0.067,
            "e2-standard-4": 0.134,
            "e2-medium": 0.0335,
            "n2-standard-2": 0.0971,
            "c3-standard-4": 0.2088,
        },
        "azure": {
            "Standard_D2as_v5": 0.086,
            "Standard_D2s_v5": 0.096,
            "Standard_F2s_v2": 0.0846,
            "Standard_B2s": 0.0416,
        },
    }
)


def small_types(cloud: str) -> tuple[str, ...]:
    """Return the types that have a price; the first is the default."""
    return tuple(_USD_HOUR.get(cloud, ()))


def small_offers(
    need: Requirements, cloud: str, zones: Iterable[Zone], prices: Mapping[str, float] | None = None
) -> list[Offer]:
    """Return a machine for an agent in each of the zones that a candidate names, in the order of candidates and zones.

    `prices` are those of a plug-in's types. A candidate whose type has no price has no offer.
    """
    prices = _USD_HOUR.get(cloud, {}) if prices is None else prices
    offers: list[Offer] = []
    for candidate in need.candidates:
        if candidate.cloud not in (None, cloud):
            continue
        name = candidate.instance_type or next(iter(prices), "")
        price = prices.get(name)
        if price is None:
            continue
        offers += [
            Offer(zone, name, None, 0.0, CapacityType.ON_DEMAND, price, price)
            for zone in sorted(set(zones))
            if candidate.region in (None, zone.region) and candidate.zone in (None, zone.name)
        ]
    return offers
