"""`python -m benchmarks.routing_published_agent`: our agent (`python -m lb`), which knows the published policies too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from types import MappingProxyType

from benchmarks.routing_published import PUBLISHED
from policies.routing import registry
from policies.routing.base import RoutingPolicy


def _without_chance(make: Callable[[], RoutingPolicy]) -> Callable[[Random], RoutingPolicy]:
    return lambda _: make()


registry.POLICIES = MappingProxyType(
    {**registry.POLICIES, **{name: _without_chance(make) for name, make in PUBLISHED.items()}}
)

from lb.__main__ import main  # noqa: E402  (it takes the names from the registry when it is imported)

if __name__ == "__main__":
    sys.exit(main())
