"""When each target is polled for its load: its state, and its place in the interval."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from lb.config.schema import Target
from lb.core.targets import Key
from lb.engines.kinds import Adapter, EngineKind

GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples spread evenly over an interval, however many there are


@dataclass(slots=True, eq=False)
class PolledLoad:
    """State of one target."""

    key: Key
    target: Target
    place: float  # in the interval, 0 to 1
    polled_at: float  # until it was polled: when it was first seen
    kind: EngineKind = EngineKind.UNKNOWN
    adapter: Adapter | None = None
    mute_since: float | None = None  # since when it has been polled for its load in vain
    failed: int = 0  # attempts in a row to find out what it is
    probe: asyncio.Task[None] | None = None
    interval_s: float = math.inf
    due_at: float = math.inf  # infinite while a probe is under way


def due_at_of(watch: PolledLoad, interval_s: float) -> float:
    """Return when its place in the interval will come next, but for half an interval since it was polled."""
    return place_after(watch.polled_at + 0.5 * interval_s, watch.place, interval_s)


def place_after(instant: float, place: float, interval_s: float) -> float:
    # Without the hundredth, rounding would have a target that was polled in its place polled there again.
    intervals = math.floor(instant / interval_s + place + 0.01) + 1
    return (intervals - place) * interval_s
