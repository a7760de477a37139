"""Catalog files: one JSON document per cloud, the packaged ones and the refreshed ones alike.

    {"cloud": "aws",
     "origins": [[source, "2026-07-20" or null, "exact"], ...],
     "types":   {"g6.12xlarge": ["L4", 4, 48, 192], "m5.large": [null, 0, 2, 8], ...},
     "prices":  {"g6.12xlarge": {"us-east-1": [[4.6016, 0], {"use1-az1": [2.0968, 1], "use1-az5": null}]}}}

A type is accelerator, its count, virtual CPUs, memory in GiB, and "no_on_demand" where the cloud sells it on demand by
reservation only. A price is USD per hour and the index of its origin; a region has the one on demand, and the spot price
of each zone that has the type, null where it is not known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from provisioners.offers.catalog.model import CatalogError, Listing, Origin, Price, Quality, Shape

_NO_ON_DEMAND = "no_on_demand"


def decode(text: str | bytes, file: str) -> list[Listing]:
    """Return the listings of a file of that name. Raises CatalogError."""
    try:
        document = json.loads(text)
        cloud = str(document["cloud"])
        origins = [_origin(*entry) for entry in document["origins"]]
        shapes = {name: shape_of(cloud, name, *facts) for name, facts in document["types"].items()}
        return [
            Listing(
                shapes[name],
                region,
                _price(origins, *on_demand),
                {zone: None if spot is None else _price(origins, *spot) for zone, spot in zones.items()},
            )
            for name, regions in document["prices"].items()
            for region, (on_demand, zones) in regions.items()
        ]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CatalogError(f"{file} is no catalog: {type(error).__name__}: {error}") from error


def encode(cloud: str, listings: Iterable[Listing]) -> str:
    """Return the file of a cloud's listings: a line per type and region, for people and for diffs."""
    kept = [listing for listing in listings if listing.shape.cloud == cloud]
    prices = [price for each in kept for price in (each.on_demand, *each.spot.values()) if price]
    index = {origin: number for number, origin in enumerate(dict.fromkeys(price.origin for price in prices))}
    shapes = {listing.shape.name: listing.shape for listing in kept}
    lines: dict[str, list[str]] = {}
    for each in kept:
        entry = [
            _pair(each.on_demand, index),
            {zone: _pair(price, index) for zone, price in each.spot.items()},
        ]
        lines.setdefault(each.shape.name, []).append(f"   {json.dumps(each.region)}: {json.dumps(entry)}")
    return "\n".join(
        [
            f'{{\n "cloud": {json.dumps(cloud)},\n "origins": [',
            ",\n".join(f"  {json.dumps([o.source, _day(o.as_of), o.quality.value])}" for o in index),
            ' ],\n "types": {',
            ",\n".join(
                f"  {json.dumps(name)}: {json.dumps(facts_of(shape))}" for name, shape in shapes.items()
            ),
            ' },\n "prices": {',
            ",\n".join(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines[name]) + "\n  }" for name in shapes),
            " }\n}\n",
        ]
    )


def _origin(source: str, as_of: str | None, quality: str) -> Origin:
    at = None if as_of is None else datetime.fromisoformat(as_of)
    seconds = None if at is None else (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    return Origin(source, seconds, Quality(quality))


def shape_of(
    cloud: str, name: str, accelerator: str | None, count: float, vcpus: float, memory_gib: float, *flags: str
) -> Shape:
    """Of a type's entry in a file."""
    if flags not in ((), (_NO_ON_DEMAND,)):
        raise ValueError(f"{name} has {flags}, where only {_NO_ON_DEMAND!r} is known")
    return Shape(cloud, name, accelerator, float(count), float(vcpus), float(memory_gib), bool(flags))


def _price(origins: list[Origin], usd_hour: float, origin: int) -> Price:
    if not 0 < float(usd_hour) < math.inf:
        raise ValueError(f"{usd_hour} is no price")
    return Price(float(usd_hour), origins[origin])


def _pair(price: Price | None, index: Mapping[Origin, int]) -> list[float] | None:
    return None if price is None else [price.usd_hour, index[price.origin]]


def _day(as_of: float | None) -> str | None:
    if as_of is None:
        return None
    return datetime.fromtimestamp(as_of, UTC).isoformat(timespec="seconds").removesuffix("T00:00:00+00:00")


def facts_of(shape: Shape) -> list[Any]:
    """Return a type's entry in a file."""
    numbers = (shape.accelerator_count, shape.vcpus, shape.memory_gib)
    flags = [_NO_ON_DEMAND] if shape.no_on_demand else []
    return [shape.accelerator, *(int(n) if n == int(n) else n for n in numbers), *flags]
