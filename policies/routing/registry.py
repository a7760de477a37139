"""The classes of the routing policies by their names. What only needs the names imports `names`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType

from policies.routing.base import RoutingPolicy
from policies.routing.cache_aware import CacheAware
from policies.routing.consistent_hash import ConsistentHash
from policies.routing.gorgo import Gorgo
from policies.routing.instance_aware_least_load import InstanceAwareLeastLoad
from policies.routing.least_load import LeastLoad
from policies.routing.power_of_two import PowerOfTwo
from policies.routing.prefix_tree import PrefixTree
from policies.routing.round_robin import RoundRobin

# Policies that compare a sample where targets are many draw it from this.
POLICIES: Mapping[str, Callable[[Random], RoutingPolicy]] = MappingProxyType(
    {
        CacheAware.name: lambda _: CacheAware(),
        ConsistentHash.name: lambda rng: ConsistentHash(rng=rng),
        Gorgo.name: lambda _: Gorgo(),
        InstanceAwareLeastLoad.name: InstanceAwareLeastLoad,
        LeastLoad.name: LeastLoad,
        PowerOfTwo.name: PowerOfTwo,
        PrefixTree.name: lambda rng: PrefixTree(rng=rng),
        RoundRobin.name: RoundRobin,
    }
)


class UnknownPolicyError(ValueError):
    """No routing policy has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown routing policy {name!r}; known: {', '.join(sorted(POLICIES))}")
        self.name = name


def make_policy(name: str, rng: Random | None = None) -> RoutingPolicy:
    """Return a fresh policy, remembering nothing. Without `rng` it draws the same numbers in every process.

    Raises UnknownPolicyError, which lists the known names.
    """
    factory = POLICIES.get(name)
    if factory is None:
        raise UnknownPolicyError(name)
    return factory(rng or Random(0))
