"""What an account can have, as its cloud lists it: instance types by region, zones, markets and quotas. Pure.

A discovery adds to the catalog what that lacks, at an estimated price, and marks which of the catalog's rows the account cannot
have. It is no evidence about regions that it has not seen whole, nor about kinds of machines that it did not look for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from policies.model import CapacityType, Zone
from provisioners.offers.catalog.codec import facts_of, shape_of
from provisioners.offers.catalog.estimates import Estimates
from provisioners.offers.catalog.model import Catalog, CatalogError, Listing, Shape

BELIEVED_S = 30 * 86400.0  # accounts get quotas, and regions new types; an older discovery forbids nothing

Progress = Callable[[int, int, str], None]  # as of `catalog.refresh`


@dataclass(frozen=True, slots=True)
class RegionalType:
    """An instance type in a region.

    `zones` are those where the account may launch it, none where the cloud closes it. `closed` has the markets that the
    account cannot use, each with the reason.
    """

    shape: Shape
    region: str
    zones: tuple[str, ...]
    closed: Mapping[CapacityType, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Discovery:
    """Of one cloud, as of `at` (UNIX seconds).

    `regions` are those that were listed whole, `notes` what could not be determined. Not slotted: what follows from the
    offerings is worked out when it is first needed.
    """

    cloud: str
    at: float
    regions: tuple[str, ...]
    offerings: tuple[RegionalType, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def _by_place(self) -> Mapping[tuple[str, str], RegionalType]:
        return {(one.shape.name, one.region): one for one in self.offerings}

    @cached_property
    def _looked_for(self) -> frozenset[str]:
        """Types without accelerators are looked for by name; one that is listed nowhere was not."""
        return frozenset(one.shape.name for one in self.offerings)

    def reason(self, shape: Shape, zone: Zone, market: CapacityType) -> str:
        """Return why the account cannot launch the type there; "" if it can, or if that is not known."""
        if zone.region not in self.regions:
            return ""
        found = self._by_place.get((shape.name, zone.region))
        if found is None:
            is_known = shape.accelerator is not None or shape.name in self._looked_for
            return (
                f"{self.cloud} does not offer {shape.name} in {zone.region} to this account"
                if is_known
                else ""
            )
        if market in found.closed:
            return found.closed[market]
        return "" if zone.name in found.zones else f"{shape.name} is not offered in {zone.name}"


@runtime_checkable
class Discoverer(Protocol):
    """`Machines` of a cloud that lists what an account can have."""

    def discover(self, known: Sequence[Shape], progress: Progress) -> Discovery:
        """`known` are the catalog's types, so that those without accelerators are looked for, too.

        Raises ProvisionError if no region can be listed; a single one that cannot is a note. May take a minute.
        """
        ...


def shapes_of(catalog: Catalog, cloud: str) -> list[Shape]:
    """Return the types of a cloud that the catalog has, each once."""
    return list(
        {each.shape.name: each.shape for each in catalog.listings if each.shape.cloud == cloud}.values()
    )


def reasons(
    discoveries: Iterable[Discovery], now: Callable[[], float]
) -> Callable[[Shape, Zone, CapacityType], str]:
    """`Discovery.reason` over several clouds, of those that are recent enough when it is called."""
    by_cloud = {one.cloud: one for one in discoveries}

    def reason(shape: Shape, zone: Zone, market: CapacityType) -> str:
        found = by_cloud.get(zone.cloud)
        is_recent = found is not None and now() - found.at <= BELIEVED_S
        return found.reason(shape, zone, market) if found is not None and is_recent else ""

    return reason


def with_discovered(known: Sequence[Listing], discoveries: Iterable[Discovery]) -> list[Listing]:
    """`known` and what the discoveries have beyond it: zones, regions and types.

    Spot prices of these are unknown, and prices on demand estimated.
    """
    estimates = Estimates(known)
    merged = {listing.id: listing for listing in known}
    shapes = {(listing.shape.cloud, listing.shape.name): listing.shape for listing in known}
    for offering in (one for discovery in discoveries for one in discovery.offerings if one.zones):
        shape = shapes.get((offering.shape.cloud, offering.shape.name), offering.shape)
        id = (shape.cloud, shape.name, offering.region)
        listing = merged.get(id) or Listing(shape, offering.region, estimates.of(shape), {})
        new = {zone: None for zone in offering.zones if zone not in listing.spot}
        if new or id not in merged:
            merged[id] = replace(listing, spot={**listing.spot, **new})
    return list(merged.values())


# --- files ---------------------------------------------------------------------------------------------------------------


def decode(text: str | bytes, file: str) -> Discovery:
    """Of a file of that name. Raises CatalogError."""
    try:
        document = json.loads(text)
        cloud = str(document["cloud"])
        shapes = {name: shape_of(cloud, name, *facts) for name, facts in document["types"].items()}
        offerings = tuple(
            RegionalType(
                shapes[name],
                str(region),
                tuple(map(str, zones)),
                {CapacityType(market): str(why) for market, why in closed.items()},
            )
            for name, regions in document["offerings"].items()
            for region, (zones, closed) in regions.items()
        )
        return Discovery(
            cloud,
            float(document["at"]),
            tuple(map(str, document["regions"])),
            offerings,
            tuple(map(str, document.get("notes", ()))),
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CatalogError(f"{file} is no discovery: {type(error).__name__}: {error}") from error


def encode(discovery: Discovery) -> str:
    offerings: dict[str, dict[str, Any]] = {}
    for one in discovery.offerings:
        closed = {market.value: why for market, why in one.closed.items()}
        offerings.setdefault(one.shape.name, {})[one.region] = [list(one.zones), closed]
    document = {
        "cloud": discovery.cloud,
        "at": discovery.at,
        "regions": list(discovery.regions),
        "notes": list(discovery.notes),
        "types": {one.shape.name: facts_of(one.shape) for one in discovery.offerings},
        "offerings": offerings,
    }
    return json.dumps(document, indent=1) + "\n"
