"""Google's Cloud Billing catalog: prices of parts, of which the price of a machine is made.

A core, a GiB of memory and an accelerator have a SKU each, per region and market. What a SKU is about is only in its
description alone, and others look much alike (commitments, reservations, custom machines), so that three rules stand
between a description and a price: it must begin as listed in `_PARTS`; two different prices for one part in one region are
none; and a part that costs less than `_RATIOS` times what it costs in us-central1, or more, is a wrong one. Where a part
is missing the machine has no price. Local disks are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

from policies.model import CapacityType
from provisioners.offers.catalog.fetch import Sources, fetch_json
from provisioners.offers.catalog.model import Listing, Shape
from provisioners.offers.catalog.refresh import Progress, Quote
from provisioners.port.errors import AuthError, TransientError

SOURCE = "Google Cloud Billing catalog"
_CLOUD = "gcp"
_COMPUTE_ENGINE = "6F81-5844-456A"
_PAGE = 5000
_MAX_PAGES = 40  # Compute Engine has some 40 000 SKUs
_HOME = "us-central1"
_RATIOS = (0.5, 2.5)

Part = tuple[str, str]  # ("core", "a2"), ("ram", "a2"), ("gpu", "A100")
Prices = Mapping[tuple[CapacityType, Part, str], float]  # by market, part and region; USD per hour

#: How the description of a part begins, before " running in <place>".
_PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "A2 Instance Core": ("core", "a2"),
        "A2 Instance Ram": ("ram", "a2"),
        "A3 Instance Core": ("core", "a3"),
        "A3 Instance Ram": ("ram", "a3"),
        "G2 Instance Core": ("core", "g2"),
        "G2 Instance Ram": ("ram", "g2"),
        "E2 Instance Core": ("core", "e2"),
        "E2 Instance Ram": ("ram", "e2"),
        "N2 Instance Core": ("core", "n2"),
        "N2 Instance Ram": ("ram", "n2"),
        "N1 Predefined Instance Core": ("core", "n1"),
        "N1 Predefined Instance Ram": ("ram", "n1"),
        "Nvidia L4 GPU": ("gpu", "L4"),
        "Nvidia Tesla T4 GPU": ("gpu", "T4"),
        "Nvidia Tesla V100 GPU": ("gpu", "V100"),
        "Nvidia Tesla A100 GPU": ("gpu", "A100"),
        "Nvidia Tesla A100 80GB GPU": ("gpu", "A100-80GB"),
        "Nvidia H100 80GB GPU": ("gpu", "H100"),
    }
)
_SPOT = re.compile(r"^(?:Spot )?Preemptible | attached to Spot Preemptible VMs$")
_MARKETS = {"OnDemand": CapacityType.ON_DEMAND, "Preemptible": CapacityType.SPOT}
_UNITS = {"core": "h", "ram": "GiBy.h", "gpu": "h"}


def quotes(listings: Sequence[Listing], sources: Sources, progress: Progress) -> list[Quote]:
    prices = part_prices(_skus(sources, progress))
    places = dict.fromkeys((listing.shape, listing.region) for listing in listings)
    return [
        Quote(shape.name, region, market, round(price, 6))
        for shape, region in places
        for market in CapacityType
        if (price := _machine_price(shape, region, market, prices)) is not None
    ]


def part_prices(skus: Iterable[Mapping[str, Any]]) -> Prices:
    """Return what can be believed of what the catalog says about parts."""
    found: dict[tuple[CapacityType, Part, str], set[float]] = {}
    for sku in skus:
        market = _MARKETS.get(sku.get("category", {}).get("usageType"))
        part = _part(str(sku.get("description", "")))
        price = None if part is None else _unit_price(sku, _UNITS[part[0]])
        if market is None or part is None or price is None:
            continue
        for region in sku.get("serviceRegions", ()):
            found.setdefault((market, part, region), set()).add(price)
    single = {key: prices.pop() for key, prices in found.items() if len(prices) == 1}
    return {key: price for key, price in single.items() if _is_likely(key, price, single)}


def _part(description: str) -> Part | None:
    what, running_in, _ = description.partition(" running in ")
    return _PARTS.get(_SPOT.sub("", what)) if running_in else None


def _is_likely(key: tuple[CapacityType, Part, str], price: float, prices: Prices) -> bool:
    market, part, region = key
    on_demand = prices.get((CapacityType.ON_DEMAND, part, region))
    if market is CapacityType.SPOT:  # which differs between regions as it pleases, but not from on-demand
        return on_demand is None or price <= on_demand
    home = prices.get((market, part, _HOME))
    return home is None or _RATIOS[0] * home <= price <= _RATIOS[1] * home


def _unit_price(sku: Mapping[str, Any], unit: str) -> float | None:
    """Return USD an hour of one unit. The last entry is in force now; a price that depends on the amount is none."""
    expression = (sku.get("pricingInfo") or [{}])[-1].get("pricingExpression", {})
    rates = expression.get("tieredRates", ())
    if expression.get("usageUnit") != unit or len(rates) != 1:
        return None
    money = rates[0].get("unitPrice", {})
    if money.get("currencyCode") != "USD":
        return None
    return (int(money.get("units", 0)) + int(money.get("nanos", 0)) / 1e9) or None


def _machine_price(shape: Shape, region: str, market: CapacityType, prices: Prices) -> float | None:
    family = shape.name.partition("-")[0]
    amounts: dict[Part, float] = {("core", family): shape.vcpus, ("ram", family): shape.memory_gib}
    if shape.accelerator is not None:
        amounts["gpu", shape.accelerator] = shape.accelerator_count
    total = 0.0
    for part, amount in amounts.items():
        price = prices.get((market, part, region))
        if price is None:
            return None
        total += price * amount
    return total


def _skus(sources: Sources, progress: Progress) -> Iterator[Mapping[str, Any]]:
    if sources.gcp_api_key is None:
        raise AuthError(
            "the Cloud Billing catalog is read with an API key; set SKYSERVE_GCP_API_KEY to one", cloud=_CLOUD
        )
    base = f"{sources.gcp_url}/v1/services/{_COMPUTE_ENGINE}/skus"
    token = ""
    for number in range(_MAX_PAGES):
        progress(number, 0, f"page {number + 1}")
        query = {"key": sources.gcp_api_key, "currencyCode": "USD", "pageSize": _PAGE, "pageToken": token}
        page = fetch_json(f"{base}?{urlencode(query)}", _CLOUD, sources)
        yield from page.get("skus", ())
        token = page.get("nextPageToken", "")
        if not token:
            return
    raise TransientError(f"{base} has no end of pages", cloud=_CLOUD)
