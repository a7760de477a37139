"""Since when something of an object has been so, by our own clock. Pure.

The API server, the cluster's controllers and each node stamp what they write by clocks of their own. A deadline therefore
begins when we first see its condition, and no timestamp of an object is ever compared with our clock. A controller that has just
started begins with all conditions at once: it decides later than before, never earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Instant(NamedTuple):
    """One instant by our two clocks: `steady` for durations, `unix` for what others must understand."""

    steady: float
    unix: float


class Sighting(NamedTuple):
    """When a fact was first seen, and the sentence that it comes with now."""

    since: Instant
    text: str = ""


#: By the name of the fact.
Sightings = Mapping[str, Sighting]


def followed(before: Sightings, facts: Mapping[str, str], at: Instant) -> Sightings:
    """Return the facts that hold: those of before since when they were seen first, others since now."""
    return {
        name: Sighting(before[name].since if name in before else at, text) for name, text in facts.items()
    }
