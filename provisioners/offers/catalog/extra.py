"""Rows of the user's own: `catalog/extra.json` in the home, for what the catalog lacks and for prices that were negotiated.

    [{"cloud": "aws", "instance_type": "p5e.48xlarge", "accelerator": "H200", "accelerator_count": 8, "vcpus": 192,
      "memory_gib": 2048, "region": "us-east-2", "zones": ["use2-az1"], "usd_hour": 63.3, "spot_usd_hour": 25.1,
      "as_of": "2026-11-01"}]

What a type is and what it costs may be left out where the catalog knows it. A price that is written here holds against every
other, except for what a spot machine costs at the moment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from provisioners.offers.catalog.estimates import Estimates
from provisioners.offers.catalog.model import CatalogError, Listing, Origin, Price, Quality, Shape
from provisioners.port.accelerator_names import canonical

_MAX_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class Extra:
    """One row. `accelerator`, the sizes and the prices are None where they are not written; `where` is its place in the file."""

    where: str
    cloud: str
    instance_type: str
    region: str
    zones: tuple[str, ...]
    accelerator: str | None
    accelerator_count: float | None
    vcpus: float | None
    memory_gib: float | None
    on_demand: Price | None
    spot: Price | None


def decode(text: str | bytes, file: str) -> list[Extra]:
    """Return the rows of a file of that name. Raises CatalogError, which names the key."""
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise CatalogError(f"{file} is no JSON: {error}") from error
    if not isinstance(rows, list) or len(rows) > _MAX_ROWS:
        raise CatalogError(f"{file} must be a list of at most {_MAX_ROWS} rows")
    return [_row(row, f"{file}: [{number}]") for number, row in enumerate(rows)]


def with_extra(known: Sequence[Listing], rows: Sequence[Extra]) -> list[Listing]:
    """Raise CatalogError for a row of a type whose sizes neither it nor the catalog has."""
    estimates = Estimates(known)
    merged = {listing.id: listing for listing in known}
    shapes = {(listing.shape.cloud, listing.shape.name): listing.shape for listing in known}
    for row in rows:
        shape = shapes[row.cloud, row.instance_type] = _shape(row, shapes.get((row.cloud, row.instance_type)))
        old = merged.get((row.cloud, row.instance_type, row.region))
        on_demand = row.on_demand or (old.on_demand if old else estimates.of(shape))
        zones = row.zones or tuple(old.spot if old else (row.region,))
        known_spot = dict(old.spot) if old else {}
        spot = {**known_spot, **{zone: row.spot or known_spot.get(zone) for zone in zones}}
        merged[row.cloud, row.instance_type, row.region] = Listing(shape, row.region, on_demand, spot)
    return list(merged.values())


_TEXTS = ("cloud", "instance_type", "region")
_NUMBERS = ("accelerator_count", "vcpus", "memory_gib", "usd_hour", "spot_usd_hour")
_KEYS = (*_TEXTS, *_NUMBERS, "zones", "accelerator", "as_of")


def _row(row: Any, where: str) -> Extra:
    if not isinstance(row, Mapping):
        raise CatalogError(f"{where} must be an object")
    for key in row:
        if key not in _KEYS:
            raise CatalogError(f"{where}.{key}: there is no such key; it has {', '.join(_KEYS)}")
    for key in _TEXTS:
        if not isinstance(row.get(key), str) or not row[key]:
            raise CatalogError(f"{where}.{key}: must be a name")
    numbers = {key: _number(row.get(key), f"{where}.{key}") for key in _NUMBERS}
    zones = row.get("zones", [])
    if not isinstance(zones, list) or not all(isinstance(zone, str) and zone for zone in zones):
        raise CatalogError(f"{where}.zones: must be a list of names")
    accelerator = row.get("accelerator")
    if accelerator is not None and not isinstance(accelerator, str):
        raise CatalogError(f"{where}.accelerator: must be a name")
    origin = Origin("catalog/extra.json", _day(row.get("as_of"), f"{where}.as_of"), Quality.EXACT)
    on_demand, spot = numbers["usd_hour"], numbers["spot_usd_hour"]
    return Extra(
        where,
        row["cloud"].lower(),
        row["instance_type"],
        row["region"].lower(),
        tuple(zones),
        None if accelerator is None else canonical(accelerator),
        numbers["accelerator_count"],
        numbers["vcpus"],
        numbers["memory_gib"],
        None if on_demand is None else Price(on_demand, origin),
        None if spot is None else Price(spot, origin),
    )


def _shape(row: Extra, known: Shape | None) -> Shape:
    accelerator = row.accelerator if row.accelerator is not None else known.accelerator if known else None
    count = row.accelerator_count
    if count is None:
        count = known.accelerator_count if known else 0.0 if accelerator is None else 1.0
    vcpus = row.vcpus if row.vcpus is not None else known.vcpus if known else None
    memory = row.memory_gib if row.memory_gib is not None else known.memory_gib if known else None
    if vcpus is None or memory is None:
        missing = "vcpus" if vcpus is None else "memory_gib"
        raise CatalogError(
            f"{row.where}.{missing}: is needed, since the catalog does not know {row.instance_type}"
        )
    is_reserved = known is not None and known.no_on_demand and row.on_demand is None
    return Shape(row.cloud, row.instance_type, accelerator, count, vcpus, memory, is_reserved)


def _number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CatalogError(f"{where}: must be a number above 0")
    return float(value)


def _day(value: Any, where: str) -> float | None:
    if value is None:
        return None
    try:
        at = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise CatalogError(f"{where}: must be a date such as 2026-11-01") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
