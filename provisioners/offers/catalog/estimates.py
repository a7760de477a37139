"""A price for a machine that no source lists a price of, so that it can be ranked among others. Pure.

Estimated high rather than low: a machine of unknown price must not be launched for being cheap.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Sequence

from provisioners.offers.catalog.model import Listing, Origin, Price, Quality, Shape


class Estimates:
    """Estimate a price from the most similar known listings.

    1. the same type in other regions: the median;
    2. the same accelerator in the same cloud, then in any cloud: the median price of one;
    3. another accelerator: the highest known price of one; no accelerator: the highest of a virtual CPU.
    """

    def __init__(self, known: Sequence[Listing]) -> None:
        self._by_type = _grouped(
            ((each.shape.cloud, each.shape.name), each.on_demand.usd_hour) for each in known
        )
        accelerated = [(each, _usd_each(each)) for each in known if each.shape.accelerator_count > 0]
        self._by_cloud = _grouped(
            ((each.shape.cloud, each.shape.accelerator), usd) for each, usd in accelerated
        )
        self._by_accelerator = _grouped((each.shape.accelerator, usd) for each, usd in accelerated)
        self._highest = max((usd for _, usd in accelerated), default=0.0)
        plain = (each for each in known if each.shape.accelerator is None and each.shape.vcpus > 0)
        self._highest_vcpu = max((each.on_demand.usd_hour / each.shape.vcpus for each in plain), default=0.0)

    def of(self, shape: Shape) -> Price:
        """On demand."""
        usd, source = self._found(shape)
        return Price(round(max(usd, 0.0001), 4), Origin(f"estimated from {source}", None, Quality.ESTIMATED))

    def _found(self, shape: Shape) -> tuple[float, str]:
        name, count = shape.accelerator, shape.accelerator_count
        if same := self._by_type.get((shape.cloud, shape.name)):
            return statistics.median(same), "other regions"
        if name is None:
            return self._highest_vcpu * shape.vcpus, "the highest price of a CPU"
        if one := self._by_cloud.get((shape.cloud, name)):
            return statistics.median(one) * count, f"other machines with {name}"
        if one := self._by_accelerator.get(name):
            return statistics.median(one) * count, f"other clouds' machines with {name}"
        return self._highest * max(count, 1.0), "the highest price of an accelerator"


def _usd_each(listing: Listing) -> float:
    return listing.on_demand.usd_hour / listing.shape.accelerator_count


def _grouped(pairs: Iterable[tuple[Hashable, float]]) -> dict[Hashable, list[float]]:
    groups: dict[Hashable, list[float]] = {}
    for key, usd in pairs:
        groups.setdefault(key, []).append(usd)
    return groups
