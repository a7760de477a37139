"""The demand of the next 24 hours, hour by hour: for people who plan, not for the scaler. NumPy only, pure.

The scaler's own forecast (`forecast.demand`) is made for minutes ahead: at 12 hours the level of now shows little. Here an hour is
expected to be like the same hour of yesterday, or from the ninth day on like the mean of that and of the same hour a week ago, moved by
how the day as a whole compares with that of a week ago; and by what the last hour was off from yesterday's, which fades with distance.

Demand is compared by its square root, in which a quiet night and a busy noon are about as uncertain as each other. The quantiles are those
of the errors that the same rule would have made at the same distance in the last two weeks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.forecast.demand import Floats

HOURS = 24
HOUR_MIN = 60
DAYS_OF_ERRORS = 14
WEEK_H, WEEKLY_FROM_H = 7 * HOURS, 9 * HOURS
KEPT = 0.8  # of the last hour's difference from yesterday's, from hour to hour
KNOWN_SHARE = 0.5  # of the minutes of an hour


class Hour(NamedTuple):
    """Quantiles of the busiest minute of an hour, in requests per minute."""

    p50: float
    p90: float


def next_day(requests: Floats) -> tuple[Hour, ...]:
    """Return the next `HOURS` hours after the last of the `requests`, which are those of consecutive minutes; NaN is not known.

    Raises ValueError for less than an hour, or where no hour is known.
    """
    roots = _roots(requests)
    expected, errors = _expected(roots), _errors(roots)
    hours = []
    for value, of_hour in zip(expected.tolist(), errors, strict=True):
        low, high = np.maximum(0.0, value + np.quantile(of_hour, (0.5, 0.9))) ** 2
        hours.append(Hour(float(low), float(high)))
    return tuple(hours)


def _roots(requests: Floats) -> Floats:
    """Return the square roots of the busiest minute of each hour; one that is not known is like the day before, else like the hour before."""
    count = len(requests) // HOUR_MIN
    by_hour = requests[len(requests) - count * HOUR_MIN :].reshape(count, HOUR_MIN)
    known = (~np.isnan(by_hour)).mean(axis=1) >= KNOWN_SHARE
    if not known.any():
        raise ValueError("no hour of the demand is known")
    peaks = np.where(known, np.max(np.nan_to_num(by_hour, nan=0.0), axis=1), np.nan)
    first = int(np.argmax(known))
    roots: Floats = np.sqrt(peaks[first:])
    for hour in np.flatnonzero(np.isnan(roots)):
        roots[hour] = roots[hour - HOURS] if hour >= HOURS else roots[hour - 1]
    return roots


def _expected(roots: Floats) -> Floats:
    """Return what the hours after the last one are expected to be."""
    if len(roots) <= HOURS:
        return np.full(HOURS, roots[-1])
    yesterday = roots[-HOURS:]
    expected = yesterday
    if len(roots) >= WEEKLY_FROM_H:
        drift = yesterday.mean() - roots[-WEEK_H - HOURS : -WEEK_H].mean()
        expected = (yesterday + roots[-WEEK_H : -WEEK_H + HOURS] + drift) / 2.0
    found: Floats = expected + (roots[-1] - roots[-1 - HOURS]) * KEPT ** np.arange(1, HOURS + 1)
    return found


def _errors(roots: Floats) -> list[Floats]:
    """Return the errors at each distance, of every hour in which the rule could have been asked; 0 where there was none."""
    since = max(1, len(roots) - DAYS_OF_ERRORS * HOURS)
    if len(roots) > HOURS + HOURS // 2:
        since = max(since, HOURS + 1)  # with less, the rule is another one
    found: list[list[float]] = [[] for _ in range(HOURS)]
    for now in range(since, len(roots)):
        after = roots[now : now + HOURS]
        for distance, error in enumerate((after - _expected(roots[:now])[: len(after)]).tolist()):
            found[distance].append(error)
    return [np.asarray(errors or [0.0]) for errors in found]
