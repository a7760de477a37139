"""The load of the next step: doubled until it is surely too high, then halfway into the gap, then beside the estimate.

Halfway is meant on a logarithmic scale. Once the highest load that is not surely too high and the lowest that is are within
`NARROW`, further steps are a little below the estimate or above it, on the side on which the interval is wider: requests at the
estimate itself would show nothing, since there as many are late as may be. It ends when the interval is within `PRECISE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from skyserve_cli.profile.capacity import Step, capacity, grouped, surely_too_high

CLIMB = 2.0
NARROW = 1.15
BESIDE = 1.08
PRECISE = 1.2
LEAST_OF_FIRST = 1 / 64  # of the first load: below it the SLO cannot be met
MOST_LOAD = 100_000.0


def is_climbing(steps: Sequence[Step], attainment: float) -> bool:
    """Return whether no load was surely too high yet."""
    return not any(surely_too_high(step, attainment) for step in grouped(steps))


def next_load(steps: Sequence[Step], attainment: float, first: float) -> float | None:
    """Return requests per second and replica; None if enough is known, or if nothing that is tried would be in time."""
    if not steps:
        return first
    known = grouped(steps)
    too_high = min((step.load for step in known if surely_too_high(step, attainment)), default=None)
    if too_high is None:
        higher = CLIMB * max(step.load for step in steps)
        return higher if higher <= MOST_LOAD else None
    fine = max((step.load for step in known if step.load < too_high), default=None)
    if fine is None:
        lower = too_high / CLIMB
        return lower if lower >= LEAST_OF_FIRST * first else None
    if too_high / fine > NARROW:
        return math.sqrt(fine * too_high)
    found = capacity(steps, attainment)
    if found is None:
        return fine / NARROW
    above = math.inf if found.high is None else found.high / found.qps
    below = found.qps / found.low if found.low > 0.0 else math.inf
    if above * below <= PRECISE:
        return None
    return found.qps / BESIDE if below >= above else found.qps * BESIDE
