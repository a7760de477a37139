"""Which regions may serve the requests of a residency zone. Pure.

A zone is a list of regions, written `cloud/region` with `*` for any text; a pattern after `!` takes regions out again, so
`[gcp/europe-*, "!gcp/europe-west2"]` is what it says. A zone never is the name of a continent: which regions the rules of a
country allow is for the operator to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

EXCEPT = "!"


@dataclass(frozen=True, slots=True)
class ResidencyZone:
    """A zone: the patterns of the regions that serve it, and of those where every request that enters is of it."""

    name: str
    served_in: tuple[str, ...]
    entered_in: tuple[str, ...] = ()


def matches(region: str, patterns: Iterable[str]) -> bool:
    """Return whether the patterns hold the region: one does, and none takes it out."""
    held = False
    for pattern in patterns:
        if pattern.startswith(EXCEPT):
            if fnmatchcase(region, pattern[len(EXCEPT) :]):
                return False
        elif fnmatchcase(region, pattern):
            held = True
    return held


def served_zones(zones: Iterable[ResidencyZone], region: str) -> tuple[str, ...]:
    """Return the zones whose requests the region may have."""
    return tuple(zone.name for zone in zones if matches(region, zone.served_in))


def entered_zones(zones: Iterable[ResidencyZone], region: str) -> tuple[str, ...]:
    """Return the zones of every request that enters in the region."""
    return tuple(zone.name for zone in zones if matches(region, zone.entered_in))
