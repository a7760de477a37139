"""When a service that sleeps will be requested again, by the days before: NumPy only, pure.

`forecast.demand` predicts changes relative to the level, and silence has none. So a silent service is expected to be requested
when it was on earlier days: demand *begins* in a minute with requests after `IDLE_MIN` without. It is expected if it began
around this time, from `LATE_MIN` ago until the end of the question, on at least half of the last seven days that are known. A
day on which nothing comes therefore costs at most `LATE_MIN` and a cold start per time of day.
"""

from __future__ import annotations

import numpy as np

from policies.forecast.demand import DAY_MIN, Floats

IDLE_MIN = 15
LATE_MIN = 30
DAYS = 7
KNOWN_SHARE = 0.8  # of the minutes of a day's window


def is_idle(requests: Floats) -> bool:
    """Return whether the last minutes are known to have had no request; NaN is not known."""
    recent = requests[-IDLE_MIN:]
    return len(recent) == IDLE_MIN and not np.isnan(recent).any() and not recent.any()


def first_demand(requests: Floats, until: int) -> float | None:
    """Return the requests of the busiest of the first minutes of demand that is expected within the next `until` minutes.

    `requests` are those of consecutive minutes until now. 0.0: none is expected; None: no earlier day is known.
    """
    found: list[float] = []
    for day in range(1, DAYS + 1):
        now = len(requests) - day * DAY_MIN
        start, end = now - LATE_MIN - IDLE_MIN, now + until
        if start < 0:
            break
        window = requests[start:end]
        known = ~np.isnan(window)
        if known.mean() >= KNOWN_SHARE:
            found.append(_first(np.where(known, window, 0.0)))
    if not found:
        return None
    starts = [one for one in found if one > 0.0]
    return float(np.median(starts)) if 2 * len(starts) >= len(found) else 0.0


def _first(window: Floats) -> float:
    """Return the most requests of a minute within `IDLE_MIN` of the first beginning; 0.0 without one."""
    busy = np.flatnonzero(window)
    gaps = np.diff(np.concatenate(([-1], busy)))
    starts = busy[(gaps > IDLE_MIN) & (busy >= IDLE_MIN)]
    if not len(starts):
        return 0.0
    return float(window[starts[0] : starts[0] + IDLE_MIN].max())
