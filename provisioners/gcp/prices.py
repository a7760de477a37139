"""Spot prices of machine types, put together from the Cloud Billing catalog.

Google prices parts, not machines: a core, a GiB of memory, an accelerator, a GiB of local disk, each a SKU per region.
What a SKU is about is only in its description alone, so a SKU that is not understood without doubt (an unknown unit, two
prices for one part) is left out, and so is every machine type that would need it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from google.cloud import compute_v1

from provisioners.gcp.api import GcpApi
from provisioners.gcp.translate import last, zone_of

_BILLING = "cloudbilling.googleapis.com"
_COMPUTE_ENGINE = "services/6F81-5844-456A"
_PAGE = 5000

_LOCAL_SSD_GIB = 375
_HOURS_A_MONTH = 730.0

_HOST = re.compile(r"(?:Spot )?Preemptible (A2|A3|A4|G2|N1)(?: Predefined)? Instance (Core|Ram) running in ")
_GPU = re.compile(r"(?:Nvidia )?(?:Tesla )?(.+) GPU attached to Spot Preemptible VMs running in ")
_SSD = re.compile(r"SSD backed Local Storage attached to Spot Preemptible VMs")
_ACCELERATORS = {
    "T4": "nvidia-tesla-t4",
    "V100": "nvidia-tesla-v100",
    "P100": "nvidia-tesla-p100",
    "P4": "nvidia-tesla-p4",
    "L4": "nvidia-l4",
    "A100": "nvidia-tesla-a100",
    "A100 80GB": "nvidia-a100-80gb",
    "H100 80GB": "nvidia-h100-80gb",
    "H100 80GB Mega": "nvidia-h100-mega-80gb",
    "H200 141GB": "nvidia-h200-141gb",
}
_UNITS = {"core": "h", "ram": "GiBy.h", "gpu": "h", "ssd": "GiBy.mo"}

Part = tuple[str, str]  # ("core", "g2"), ("ram", "g2"), ("gpu", "nvidia-l4"), ("ssd", "")
PartPrices = Mapping[tuple[Part, str], float]  # by part and region


def spot_prices(api: GcpApi, key: str, regions: Sequence[str]) -> dict[tuple[str, str], float]:
    """Return USD per hour by (machine type, zone) of everything with accelerators; n1 as `n1-standard-8+1xnvidia-tesla-t4`."""
    prices = part_prices(_skus(api, key))
    zones = machine_types(api)
    guests = guest_accelerators(api)
    found: dict[tuple[str, str], float] = {}
    for zone, types in zones.items():
        region = zone_of(zone).region
        if region not in regions:
            continue
        for machine in types:
            for name, accelerators in shapes_of(machine, guests.get(zone, {})):
                price = _price(machine, accelerators, region, prices)
                if price is not None:
                    found[name, zone] = price
    return found


def part_prices(skus: Iterable[Mapping[str, Any]]) -> PartPrices:
    """Return the catalog's prices of spot parts, USD per hour."""
    found: dict[tuple[Part, str], set[float]] = {}
    for sku in skus:
        part = _part(sku)
        price = None if part is None else _unit_price(sku, _UNITS[part[0]])
        if part is not None and price is not None:
            for region in sku.get("serviceRegions", []):
                found.setdefault((part, region), set()).add(price)
    return {key: prices.pop() for key, prices in found.items() if len(prices) == 1}


def _part(sku: Mapping[str, Any]) -> Part | None:
    description = str(sku.get("description", ""))
    if sku.get("category", {}).get("usageType") != "Preemptible":
        return None
    if host := _HOST.match(description):
        return host[2].lower(), host[1].lower()
    if (gpu := _GPU.match(description)) and gpu[1] in _ACCELERATORS:
        return "gpu", _ACCELERATORS[gpu[1]]
    return ("ssd", "") if _SSD.match(description) else None


def _unit_price(sku: Mapping[str, Any], unit: str) -> float | None:
    """Return USD an hour of one unit: the last entry is in force now, and must be the same at any amount."""
    expression = (sku.get("pricingInfo") or [{}])[-1].get("pricingExpression", {})
    rates = expression.get("tieredRates", [])
    if (
        expression.get("usageUnit") != unit
        or len(rates) != 1
        or rates[0]["unitPrice"].get("currencyCode") != "USD"
    ):
        return None
    money = rates[0]["unitPrice"]
    price = int(money.get("units", 0)) + int(money.get("nanos", 0)) / 1e9
    return price / _HOURS_A_MONTH if unit.endswith(".mo") else price


def _price(
    machine: compute_v1.MachineType, accelerators: tuple[str, int], region: str, prices: PartPrices
) -> float | None:
    family = machine.name.partition("-")[0]
    gpu, count = accelerators
    amounts: dict[Part, float] = {
        ("core", family): machine.guest_cpus,
        ("ram", family): machine.memory_mb / 1024,
        ("gpu", gpu): count,
    }
    if machine.bundled_local_ssds.partition_count:
        amounts["ssd", ""] = machine.bundled_local_ssds.partition_count * _LOCAL_SSD_GIB
    costs = [(prices.get((part, region)), amount) for part, amount in amounts.items()]
    if any(price is None for price, _ in costs):
        return None
    return round(sum(price * amount for price, amount in costs if price is not None), 6)


def shapes_of(
    machine: compute_v1.MachineType, guests: Mapping[str, int]
) -> Iterator[tuple[str, tuple[str, int]]]:
    """(name, (accelerator, how many)) of what can be made of a machine type in a zone."""
    for built_in in machine.accelerators:
        yield machine.name, (built_in.guest_accelerator_type, built_in.guest_accelerator_count)
    if machine.name.startswith("n1-"):
        for accelerator, most in sorted(guests.items()):
            for count in (1, 2, 4, 8):
                if count <= most:
                    yield f"{machine.name}+{count}x{accelerator}", (accelerator, count)


def _skus(api: GcpApi, key: str) -> Iterator[Mapping[str, Any]]:
    token = ""
    while True:
        params = {"currencyCode": "USD", "pageSize": _PAGE} | ({"pageToken": token} if token else {})
        page = api.rest(
            "GET", _BILLING, f"v1/{_COMPUTE_ENGINE}/skus", params=params, headers={"X-Goog-Api-Key": key}
        )
        yield from page.get("skus", [])
        token = page.get("nextPageToken", "")
        if not token:
            return


def machine_types(api: GcpApi) -> dict[str, list[compute_v1.MachineType]]:
    """By zone."""
    request = compute_v1.AggregatedListMachineTypesRequest(project=api.project)
    scopes = api.listed(api.client(compute_v1.MachineTypesClient).aggregated_list, request)
    found: dict[str, list[compute_v1.MachineType]] = defaultdict(list)  # a zone may be on several pages
    for scope, held in scopes:
        found[last(scope)] += held.machine_types
    return found


def guest_accelerators(api: GcpApi) -> dict[str, dict[str, int]]:
    """By zone, what n1 machines can be given, and how many of it at most."""
    request = compute_v1.AggregatedListAcceleratorTypesRequest(project=api.project)
    scopes = api.listed(api.client(compute_v1.AcceleratorTypesClient).aggregated_list, request)
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for scope, held in scopes:
        for kind in held.accelerator_types:
            if re.fullmatch(r"nvidia-tesla-(t4|v100|p100|p4)", kind.name):
                found[last(scope)][kind.name] = kind.maximum_cards_per_instance
    return found
