"""The values of the catalog: shapes of machines, what they cost in a region, and the rows that follow from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TypeVar

from policies.model import CapacityType, Zone
from provisioners.port.image_family import ImageFamily, image_family


class CatalogError(Exception):
    """A catalog file is not one; the text names it and the reason."""


class Quality(str, Enum):
    """How much a price can be relied on."""

    EXACT = "exact"  # as the source lists it
    DERIVED = "derived"  # computed from listed prices by a ratio that holds for the cloud
    APPROXIMATE = "approximate"  # a guess of the right size
    ESTIMATED = (
        "estimated"  # of a machine that no source has a price of: worked out from others, and rather too high
    )


@dataclass(frozen=True, slots=True)
class Origin:
    """Who says what something costs. `as_of` is UNIX seconds; None where the source has no date."""

    source: str
    as_of: float | None
    quality: Quality

    def age_s(self, now: float) -> float | None:
        return None if self.as_of is None else max(0.0, now - self.as_of)

    def is_newer_than(self, other: Origin) -> bool:
        """Return what has no date is older than all that has one."""
        return (self.as_of or 0.0) > (other.as_of or 0.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """An instance type.

    GCP attaches accelerators to machines of a general kind; each combination is a shape of its own, called
    ``n1-standard-4+1xnvidia-tesla-t4``. With `no_on_demand` the cloud sells it as spot, and otherwise by reservation only:
    its price on demand is known, and it is never offered for it.
    """

    cloud: str
    name: str
    accelerator: str | None
    accelerator_count: float
    vcpus: float
    memory_gib: float
    no_on_demand: bool = False

    @property
    def image_family(self) -> ImageFamily:
        """What an image must have to boot with working accelerators."""
        return image_family(self.cloud, self.machine_type, self.accelerator)

    @property
    def machine_type(self) -> str:
        """The name without attached parts."""
        return self.name.partition("+")[0]


@dataclass(frozen=True, slots=True)
class Price:
    usd_hour: float
    origin: Origin


@dataclass(frozen=True, slots=True)
class Reserved:
    """The name of a reservation of the user's, and how many machines it has room for."""

    name: str
    places: int


@dataclass(frozen=True, slots=True)
class Listing:
    """What a shape costs in a region: one price on demand, a spot price per zone (None: not known).

    Of `reserved` capacity the price on demand is what a machine costs beyond the reservation, and there is no other.
    """

    shape: Shape
    region: str
    on_demand: Price
    spot: Mapping[str, Price | None]
    reserved: Reserved | None = None

    @property
    def id(self) -> tuple[str, str, str]:
        return self.shape.cloud, self.shape.name, self.region

    def updated(self, other: Listing) -> Listing:
        """With the prices of `other` that are newer. The zones stay: they are facts, and `other` has prices only."""
        return replace(
            self,
            on_demand=_newer(self.on_demand, other.on_demand),
            spot={zone: _newer(price, other.spot.get(zone)) for zone, price in self.spot.items()},
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A listing in one of its zones: what can be launched.

    `spot` is None where its price is not known, and `on_demand` is known also where the type is not sold on demand.
    """

    shape: Shape
    zone: Zone
    on_demand: Price
    spot: Price | None
    places: int | None = None  # of machines that are reserved; None: what the cloud has

    def price(self, capacity_type: CapacityType) -> Price | None:
        """None where it is not known, and where the type is not sold so."""
        if capacity_type is CapacityType.SPOT:
            return self.spot
        return self.on_demand if self.is_on_demand else None

    @property
    def is_on_demand(self) -> bool:
        """Whether it can be launched without being spot."""
        return self.places is not None or not self.shape.no_on_demand


@dataclass(frozen=True)
class Catalog:
    """Immutable. Not slotted: what follows from the listings is worked out when it is first requested."""

    listings: tuple[Listing, ...] = ()

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return tuple(
            _row(listing, zone, spot) for listing in self.listings for zone, spot in listing.spot.items()
        )

    @cached_property
    def by_accelerator(self) -> Mapping[str | None, tuple[Row, ...]]:
        """The rows of each accelerator; None has those without any."""
        return _grouped((row.shape.accelerator, row) for row in self.rows)

    @cached_property
    def by_instance_type(self) -> Mapping[str, tuple[Row, ...]]:
        """By the name in lower case, over all clouds; what has accelerators attached also by its machine type."""
        return _grouped(
            (name.lower(), row)
            for row in self.rows
            for name in dict.fromkeys((row.shape.name, row.shape.machine_type))
        )

    @cached_property
    def accelerators(self) -> tuple[str, ...]:
        return tuple(sorted(name for name in self.by_accelerator if name is not None))

    @cached_property
    def clouds(self) -> tuple[str, ...]:
        return tuple(sorted({listing.shape.cloud for listing in self.listings}))

    def of(self, cloud: str) -> Catalog:
        return Catalog(tuple(each for each in self.listings if each.shape.cloud == cloud))

    def within(self, regions: Sequence[str]) -> Catalog:
        return Catalog(tuple(each for each in self.listings if each.region in regions))

    def at(self, places: Collection[str]) -> Catalog:
        """Of these regions, and of these zones in others."""
        found = []
        for each in self.listings:
            spot = each.spot
            if each.region not in places:
                spot = {zone: price for zone, price in spot.items() if zone in places}
            if spot:
                found.append(replace(each, spot=spot))
        return Catalog(tuple(found))

    def updated(self, overlay: Iterable[Listing]) -> Catalog:
        """With the overlay's prices where they are newer.

        What the overlay has and this catalog has not is left out: nothing is known of its shape and its zones.
        """
        newer = {listing.id: listing for listing in overlay}
        return Catalog(
            tuple(
                listing.updated(newer[listing.id]) if listing.id in newer else listing
                for listing in self.listings
            )
        )


def _row(listing: Listing, zone: str, spot: Price | None) -> Row:
    reserved = listing.reserved
    name, places = ("", None) if reserved is None else (reserved.name, reserved.places)
    place = Zone(listing.shape.cloud, listing.region, zone, name)
    return Row(listing.shape, place, listing.on_demand, spot, places)


_K = TypeVar("_K")
_P = TypeVar("_P", Price, Price | None)


def _newer(known: _P, other: _P) -> _P:
    if known is None or other is None:
        return known or other
    return other if other.origin.is_newer_than(known.origin) else known


def _grouped(pairs: Iterable[tuple[_K, Row]]) -> Mapping[_K, tuple[Row, ...]]:
    groups: dict[_K, list[Row]] = {}
    for key, row in pairs:
        groups.setdefault(key, []).append(row)
    return {key: tuple(rows) for key, rows in groups.items()}
