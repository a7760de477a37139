"""The classes of the region policies by their names. What only needs the names imports `names`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from policies.regions.base import RegionPolicy
from policies.regions.gorgo import Gorgo
from policies.regions.local import Local
from policies.regions.one_cost import OneCost
from policies.regions.skywalker import SkyWalker

REGION_POLICIES: Mapping[str, Callable[[], RegionPolicy]] = MappingProxyType(
    {Gorgo.name: Gorgo, Local.name: Local, OneCost.name: OneCost, SkyWalker.name: SkyWalker}
)


class UnknownRegionPolicyError(ValueError):
    """No region policy has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown region policy {name!r}; known: {', '.join(sorted(REGION_POLICIES))}")
        self.name = name


def make_region_policy(name: str) -> RegionPolicy:
    """Return the policy of that name. Raises UnknownRegionPolicyError, which lists the known names."""
    factory = REGION_POLICIES.get(name)
    if factory is None:
        raise UnknownRegionPolicyError(name)
    return factory()
