"""What an Azure subscription can have: sizes with GPUs by region and zone, and the quotas of vCPUs.

Resource SKUs have the number of GPUs and not their name, which only the name of the size has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from policies.model import CapacityType
from provisioners.azure.api import Arm
from provisioners.azure.errors import CLOUD
from provisioners.offers.catalog.discovered import Discovery, Progress, RegionalType
from provisioners.offers.catalog.model import Shape
from provisioners.port.errors import ProvisionError

# Sizes whose GPU works with the image that we boot; others are left out (`offers/catalog/data/README.md`).
_GPUS: Sequence[tuple[str, str]] = (
    (r"NC\d+as_T4_v3", "T4"),
    (r"NC\d+ads_A100_v4", "A100-80GB"),
    (r"ND\d+asr_v4", "A100"),
    (r"ND\d+amsr_A100_v4", "A100-80GB"),
    (r"NC\d+adi?s_H100_v5", "H100"),
    (r"ND\d+isr_H100_v5", "H100"),
    (r"ND\d+isr_H200_v5", "H200"),
    (r"ND\d+isr_MI300X_v5", "MI300X"),
)
_SPOT_CORES = "lowprioritycores"

Usages = Mapping[str, float]  # limits by name in lower case


def discover(
    arm: Arm, wanted: Sequence[str], known: Sequence[Shape], now: float, progress: Progress
) -> Discovery:
    """`wanted` are the regions; none are all that have sizes with GPUs, which one long list shows."""
    plain = {shape.name: shape for shape in known if shape.accelerator is None}
    by_region: dict[str, list[tuple[Any, Shape]]] = {region: [] for region in wanted}
    progress(0, len(wanted), "sizes")
    for sku in _skus(arm, wanted):
        shape = shape_of(sku) or plain.get(sku.name or "")
        if sku.resource_type == "virtualMachines" and shape is not None:
            by_region.setdefault(str(sku.locations[0]).lower(), []).append((sku, shape))
    offerings, notes, listed = list[RegionalType](), list[str](), list[str]()
    for region, found in sorted(by_region.items()):
        if not wanted and all(shape.accelerator is None for _, shape in found):
            continue
        usages = _usages(arm, region, notes)
        listed.append(region)
        offerings += [
            RegionalType(shape, region, _zones(sku, region), _closed(sku, shape, region, usages))
            for sku, shape in found
        ]
        progress(len(listed), len(by_region), region)
    return Discovery(CLOUD, now, tuple(listed), tuple(offerings), tuple(notes))


def _skus(arm: Arm, regions: Sequence[str]) -> Iterator[Any]:
    if not regions:
        yield from arm.call(lambda: list(arm.compute.resource_skus.list()))
    for region in regions:
        yield from arm.call(partial(_skus_in, arm, region))


def _skus_in(arm: Arm, region: str) -> list[Any]:
    return list(arm.compute.resource_skus.list(filter=f"location eq '{region}'"))


def shape_of(sku: Any) -> Shape | None:
    """None for a size without a GPU that we know."""
    name = sku.name or ""
    gpu = next((gpu for pattern, gpu in _GPUS if re.fullmatch(f"Standard_{pattern}", name)), None)
    held = _capabilities(sku)
    try:
        sizes = float(held["GPUs"]), float(held["vCPUs"]), float(held["MemoryGB"])
    except (KeyError, ValueError):
        return None
    return None if gpu is None else Shape(CLOUD, name, gpu, *sizes)


def _capabilities(sku: Any) -> dict[str, str]:
    return {one.name: one.value for one in sku.capabilities or ()}


def _zones(sku: Any, region: str) -> tuple[str, ...]:
    """Return those that are open to the subscription. A region without zones is a zone itself."""
    if _closes_region(sku):
        return ()
    listed = {zone for place in sku.location_info or () for zone in place.zones or ()}
    if not listed:
        return (region,)
    shut = {
        zone
        for one in sku.restrictions or ()
        if one.type == "Zone" and one.restriction_info is not None
        for zone in one.restriction_info.zones or ()
    }
    return tuple(f"{region}-{zone}" for zone in sorted(listed - shut))


def _closes_region(sku: Any) -> bool:
    return any(one.type == "Location" for one in sku.restrictions or ())


def _closed(sku: Any, shape: Shape, region: str, usages: Usages) -> dict[CapacityType, str]:
    """By market, why the subscription cannot use it."""
    if _closes_region(sku):
        why = f"Azure has closed {shape.name} in {region} to this subscription: request access in the portal (Usage + quotas)"
        return dict.fromkeys(CapacityType, why)
    closed = {}
    if _capabilities(sku).get("LowPriorityCapable", "True").lower() == "false":
        closed[CapacityType.SPOT] = f"Azure does not sell {shape.name} as spot"
    for market, quota in (
        (CapacityType.SPOT, _SPOT_CORES),
        (CapacityType.ON_DEMAND, (sku.family or "").lower()),
    ):
        limit = usages.get(quota)
        if limit is not None and limit < shape.vcpus:
            name = "lowPriorityCores" if quota == _SPOT_CORES else sku.family
            why = f"the quota {name} is {limit:g} vCPUs in {region}, and {shape.name} has {shape.vcpus:g}"
            closed.setdefault(market, why)
    return closed


def _usages(arm: Arm, region: str, notes: list[str]) -> Usages:
    try:
        listed = arm.call(lambda: list(arm.compute.usage.list(region)))
    except ProvisionError as error:
        notes.append(f"quotas of {region}: {error}")
        return {}
    return {(one.name.value or "").lower(): float(one.limit) for one in listed}
