"""Spot prices from Azure's Retail Prices API, which is open to anyone.

A region has one price for all its zones. The API lists every meter of virtual machines (Windows, dedicated hosts, the
retired Low Priority, prices to come); which of them is the spot price of a Linux machine only their names show. Its
filter is kept to what its documentation lists, and the choice is made here, by `spot_prices_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

_API_VERSION = "2023-01-01-preview"
_MAX_PAGES = 200  # of 100 to 1000 prices; a region has some 10 000
_ZONES = ("", "-1", "-2", "-3")  # a region without zones has machines anyway
_NO_LINUX_VM = ("windows", "dedicated", "cloud services", "cloudservices")

Fetch = Callable[[str, Mapping[str, str] | None], Mapping[str, Any]]


def region_spot_prices(
    fetch: Fetch, url: str, region: str, now: float, sizes: Collection[str] = ()
) -> dict[tuple[str, str], float]:
    """Return USD per hour by (size, zone name) in a region, of `sizes` or of all; `now` is in UNIX seconds."""
    by_size = spot_prices_of(_pages(fetch, url, region, sizes), now)
    return {(size, region + zone): price for size, price in by_size.items() for zone in _ZONES}


def spot_prices_of(items: Iterable[Mapping[str, Any]], now: float) -> dict[str, float]:
    """Return USD per hour by size.

    Of several prices of a size the one in force counts, and of those the dearest: better a dollar too many expected than
    one too few.
    """
    today = datetime.fromtimestamp(now, UTC)
    found: dict[str, tuple[datetime, float]] = {}
    for item in items:
        if not _is_linux_spot(item):
            continue
        since = datetime.fromisoformat(item["effectiveStartDate"].replace("Z", "+00:00"))
        entry = (since, float(item["retailPrice"]))
        if since <= today and entry > found.get(item["armSkuName"], (since.min.replace(tzinfo=UTC), 0.0)):
            found[item["armSkuName"]] = entry
    return {size: price for size, (_, price) in found.items()}


def _is_linux_spot(item: Mapping[str, Any]) -> bool:
    product = str(item.get("productName", "")).lower()
    return (
        "spot" in f"{item.get('skuName', '')} {item.get('meterName', '')}".lower()
        and not any(word in product for word in _NO_LINUX_VM)
        and item.get("type") == "Consumption"
        and item.get("currencyCode") == "USD"
        and item.get("unitOfMeasure") == "1 Hour"
        and float(item.get("retailPrice") or 0) > 0
        and bool(item.get("armSkuName"))
    )


def _pages(fetch: Fetch, url: str, region: str, sizes: Collection[str]) -> Iterator[Mapping[str, Any]]:
    wanted = (
        f"serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armRegionName eq '{region}'"
    )
    if sizes:
        wanted += f" and ({' or '.join(f'armSkuName eq {one!r}' for one in sorted(sizes))})"
    page = fetch(url, {"api-version": _API_VERSION, "$filter": wanted})
    for _ in range(_MAX_PAGES):
        yield from page.get("Items", ())
        following = page.get("NextPageLink")
        if not following:
            return
        page = fetch(following, None)
