"""The names of the routing policies, as YAML and command lines spell them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from policies.routing.base import RoutingPolicy
from policies.routing.least_load import LeastLoad
from policies.routing.round_robin import RoundRobin

DEFAULT_POLICY = LeastLoad.name

POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = MappingProxyType(
    {
        LeastLoad.name: LeastLoad,
        RoundRobin.name: RoundRobin,
    }
)


class UnknownPolicyError(ValueError):
    """No routing policy has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown routing policy {name!r}; known: {', '.join(sorted(POLICIES))}")
        self.name = name


def make_policy(name: str) -> RoutingPolicy:
    """A fresh policy, remembering nothing. Raises UnknownPolicyError, which lists the known names."""
    factory = POLICIES.get(name)
    if factory is None:
        raise UnknownPolicyError(name)
    return factory()
