"""Azure's Retail Prices API, which is open to anyone: one question per instance type, for all regions at once.

The API lists every meter of a type: Windows, dedicated hosts, the retired Low Priority. Which of them is a Linux machine
only their names show. A region has one price for all its zones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from policies.model import CapacityType
from provisioners.offers.catalog.fetch import Sources, fetch_json
from provisioners.offers.catalog.model import Listing
from provisioners.offers.catalog.refresh import Progress, Quote
from provisioners.port.errors import TransientError

SOURCE = "Azure Retail Prices API"
_CLOUD = "azure"
_API_VERSION = "2023-01-01-preview"
_MAX_PAGES = 20  # of 100 to 1000 meters; a type has some 400
_NOT_A_LINUX_VM = ("windows", "dedicated", "cloud services", "cloudservices")


def quotes(listings: Sequence[Listing], sources: Sources, progress: Progress) -> list[Quote]:
    names = list(dict.fromkeys(listing.shape.name for listing in listings))
    found: list[Quote] = []
    for number, name in enumerate(names):
        progress(number, len(names), name)
        found += quotes_of(name, _meters(name, sources))
    progress(len(names), len(names), "")
    return found


def quotes_of(name: str, meters: Iterable[Mapping[str, Any]]) -> list[Quote]:
    """Return what the meters of a type say.

    Of several prices for one thing the primary meter's counts, then the dearest: better a dollar too many expected than one
    too few.
    """
    best: dict[tuple[str, CapacityType], tuple[bool, float]] = {}
    for meter in meters:
        kind = _kind(meter)
        if kind is None or str(meter.get("armSkuName", "")).lower() != name.lower():
            continue
        key = str(meter["armRegionName"]), kind
        entry = bool(meter.get("isPrimaryMeterRegion")), float(meter["retailPrice"])
        best[key] = max(entry, best.get(key, entry))
    return [Quote(name, region, kind, price) for (region, kind), (_, price) in best.items()]


def _kind(meter: Mapping[str, Any]) -> CapacityType | None:
    """Return how a meter's machine is bought; None if it is not a Linux machine by the hour."""
    product = str(meter.get("productName", "")).lower()
    meant = f"{meter.get('skuName', '')} {meter.get('meterName', '')}".lower()
    if (
        meter.get("type") != "Consumption"
        or meter.get("currencyCode") != "USD"
        or meter.get("unitOfMeasure") != "1 Hour"
        or not float(meter.get("retailPrice") or 0) > 0
        or "low priority" in meant
        or any(word in product for word in _NOT_A_LINUX_VM)
    ):
        return None
    return CapacityType.SPOT if "spot" in meant else CapacityType.ON_DEMAND


def _meters(name: str, sources: Sources) -> Iterable[Mapping[str, Any]]:
    wanted = f"serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armSkuName eq '{name}'"
    base = f"{sources.azure_url}/api/retail/prices"
    url = f"{base}?{urlencode({'api-version': _API_VERSION, '$filter': wanted})}"
    for _ in range(_MAX_PAGES):
        page = fetch_json(url, _CLOUD, sources)
        yield from page.get("Items", ())
        following = page.get("NextPageLink")
        if not following:
            return
        # The link names the API's public address, which need not be the one that was called.
        url = f"{base}?{str(following).partition('?')[2]}"
    raise TransientError(f"{base} has no end of pages about {name}", cloud=_CLOUD)
