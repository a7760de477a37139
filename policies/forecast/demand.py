"""Forecast of a service's demand, as quantiles: NumPy only, pure, and cheap enough for every minute.

A scaler needs two numbers: how much demand comes in the busiest minute once a replica launched now is ready, and what
is the most that comes before a replica terminated now could be replaced. `Horizon` names such a question; `fit` learns
the result from a series of equal steps, and `Model.quantiles` gives it for the last step of a series.

The target is predicted relative to the level, which is the mean of the last ten minutes:

    target / level - 1  =  ridge regression over
        the last 1, 2 and 5 minutes, and the five blocks of 10 minutes before the level      from the first hours
        how demand went on from here yesterday, also smoothed widely, and how high it was    from the second day
        how it went on a week ago                                                            from the eighth day

The regression is a robust one (Huber's weights): the steps of a few large clients are no rule for the rest. Quantiles are those of the residuals in the same history, so they are as wide as this service is unpredictable. Below
three hours of history the forecast is the level, with the spread of a noisy minute.

A missing step is NaN. It is never taken for zero demand: it is filled from the step before, and rows that depend on
more than a few such steps are left out of the regression. Zeros are demand of zero. Days are counted in steps, so a clock
that is set forward leaves a gap, and nothing else. A jump that comes at the same minute of every day is foreseen as a slope of 40 minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DAY_MIN = 1440
LEVEL_MIN = 10
RECENT_MIN = (1, 2, 5)
BLOCKS = 5
SMOOTH_MIN = 20  # to either side, of a day that is over
WIDE_MIN = 75  # a day's course without its noise, beside its sharp rises
LEAST_MIN = 180  # of history, before anything is fitted
MOST_ROWS = 1_000
RIDGE = 10.0
HUBER_ROUNDS = 3
PARTS = 4
RECENT_SHARE = 0.8  # of the rows give the residuals: a service is not for ever as regular as it was
SHRINKAGES = (0.0, 0.25, 0.5, 0.75, 1.0)
LEAST_GAIN = 0.98  # in error over the level alone, or the regression is shrunk
MEDIAN_ROWS = 500  # whose residuals give the median
HUBER = 1.5  # residuals beyond this multiple of the median count less
LEAST_COUNT = 0.3  # but never less than this, or a rise that comes every morning would teach nothing
CLIPPED = 0.5  # relative changes beyond this teach no more than this
KNOWN_SHARE = 0.8  # of the steps that a row of the regression depends on
FLOOR_SHARE = 0.02  # of the mean demand: the least level that changes are relative to
NOISE = 0.08  # relative spread of a minute before anything is known
_GRID = np.linspace(0.0, 1.0, 199)  # of a spread
_TINY = 1e-9


class Horizon(NamedTuple):
    """The steps of a forecast: those from `lead` on, `width` of them; 1 is the next step. Their busiest one, or their mean."""

    lead: int
    width: int
    peak: bool = True


@dataclass(frozen=True, slots=True)
class Model:
    """What was learned for one horizon. `spread` are the residuals' quantiles on an even grid, relative to the level."""

    horizon: Horizon
    step_min: int
    days: int
    mean: Floats
    scale: Floats
    weights: Floats
    bias: float
    spread: Floats
    low: float
    high: float

    def quantiles(self, series: Floats | Known, shares: Sequence[float]) -> Floats:
        """Return the quantiles `shares` of the target, after the last step of the series."""
        known = series if isinstance(series, Known) else Known.of(series)
        row: Floats = self.many(known, np.array([len(known.filled) - 1]), shares)[0]
        return row

    def many(self, series: Floats | Known, rows: NDArray[np.int64], shares: Sequence[float]) -> Floats:
        """As `quantiles`, after each of `rows`: an array of (rows, shares)."""
        windows = _windows(self.horizon, self.step_min, self.days)
        known = series if isinstance(series, Known) else Known.of(series)
        level, found = _features(known, rows, windows)
        change = np.full(len(rows), self.bias)
        if len(self.weights):
            change += ((found - self.mean) / self.scale) @ self.weights
        change = np.minimum(np.maximum(change, self.low), self.high)
        widths = np.interp(shares, _GRID, self.spread)
        values: Floats = np.maximum(0.0, level[:, None] * (1.0 + change[:, None] + widths[None, :]))
        return values


def fit(series: Floats, horizon: Horizon, step_min: int = 1) -> Model:
    """Return what the series teaches about the horizon. `step_min` is the length of its steps, in minutes."""
    day = DAY_MIN // step_min
    first = (BLOCKS + 1) * LEVEL_MIN // step_min
    last = len(series) - horizon.lead - horizon.width + 1  # rows before it know their target
    days = _days(last, day)
    first = max(first, days * day)
    if (last - first) * step_min < LEAST_MIN:
        return _level_only(horizon, step_min)
    every = max(1, (last - first) // MOST_ROWS)
    rows = np.arange(last - 1, first - 1, -every)[::-1]
    rows = rows[_observed(series, rows, horizon, step_min)]
    if len(rows) * every * step_min < LEAST_MIN:
        return _level_only(horizon, step_min)

    known = Known.of(series)
    level, found = _features(known, rows, _windows(horizon, step_min, days))
    target = _target(known.filled, rows, horizon) / level - 1.0
    mean, scale = found.mean(axis=0), np.maximum(found.std(axis=0), 1e-6)
    bias, weights, residuals = _regression((found - mean) / scale, target)
    spread = np.quantile(residuals, _GRID)
    # A combination of features that was never seen is no reason for a change that was never seen.
    low, high = float(target.min()), float(target.max())
    return Model(horizon, step_min, days, mean, scale, weights, bias, spread, low, high)


def _regression(features: Floats, target: Floats) -> tuple[float, Floats, Floats]:
    """Return bias, weights and residuals of a ridge regression with Huber's weights; residuals are of the target as it is.

    Half of the residuals are those of parts that were left out of the regression (cross-validation), since those of parts that
    were in it are too small. Where the level alone predicts left-out parts nearly as well, the regression is shrunk.
    """
    inputs = np.column_stack((np.ones(len(target)), features))
    penalty = RIDGE * np.eye(inputs.shape[1])
    penalty[0, 0] = 0.0
    clipped, counts = np.clip(target, -CLIPPED, CLIPPED), np.ones(len(target))
    for _ in range(HUBER_ROUNDS):
        weighted = inputs * counts[:, None]
        squares, products = weighted.T @ inputs, weighted.T @ clipped
        found = np.linalg.solve(squares + penalty, products).astype(np.float64)
        errors = np.abs(clipped - inputs @ found)
        usual = float(np.median(errors[:: max(1, len(errors) // MEDIAN_ROWS)]))
        counts = np.maximum(1.0 / np.maximum(1.0, errors / (HUBER * usual + _TINY)), LEAST_COUNT)
    left_out = np.empty(len(target))
    for part in np.array_split(np.arange(len(target)), PARTS):
        here = weighted[part].T
        others = np.linalg.solve(squares - here @ inputs[part] + penalty, products - here @ clipped[part])
        left_out[part] = inputs[part] @ others
    share = _shrinkage(target, left_out)
    recent = slice(round((1.0 - RECENT_SHARE) * len(target)), None)
    found = share * found
    residuals = np.concatenate(((target - inputs @ found)[recent], (target - share * left_out)[recent]))
    return float(found[0]), found[1:], residuals


def _shrinkage(target: Floats, left_out: Floats) -> float:
    """Return the factor from 0 to 1 for changes that were predicted as `held`: 1 unless the level alone is nearly as good."""
    errors = [float(np.abs(target - share * left_out).mean()) for share in SHRINKAGES]
    return 1.0 if errors[-1] <= LEAST_GAIN * errors[0] else SHRINKAGES[int(np.argmin(errors))]


def _level_only(horizon: Horizon, step_min: int) -> Model:
    """Return the level, and a spread that is about that of a minute."""
    none = np.zeros(0)
    sample = np.random.RandomState(0).normal(0.0, NOISE, 20_000)
    spread = np.quantile(sample, _GRID)
    return Model(horizon, step_min, 0, none, none, none, 0.0, spread, 0.0, 0.0)


def _days(last: int, day: int) -> int:
    """Return how many days back the features reach: 7, 1 or 0, so that enough rows remain that know them."""
    if last - 7 * day >= day:
        return 7
    return 1 if last - day >= day // 4 else 0


# --- series -------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """A series without gaps, its sums from the beginning, and the least level that changes are relative to."""

    filled: Floats
    sums: Floats
    floor: float

    @classmethod
    def of(cls, series: Floats) -> Known:
        filled = _filled(series)
        sums = np.empty(len(filled) + 1)
        sums[0] = 0.0
        np.cumsum(filled, out=sums[1:])
        return cls(filled, sums, max(FLOOR_SHARE * float(sums[-1]) / max(1, len(filled)), _TINY))


def _filled(series: Floats) -> Floats:
    """Return the series without gaps: a missing step is like the last known one, at the beginning like the first."""
    missing = np.isnan(series)
    if not missing.any():
        return series
    if missing.all():
        return np.zeros(len(series))
    known = np.where(missing, -1, np.arange(len(series)))
    known = np.maximum.accumulate(known)
    known[known < 0] = int(np.argmin(missing))
    filled: Floats = series[known]
    return filled


def _observed(series: Floats, rows: NDArray[np.int64], horizon: Horizon, step_min: int) -> NDArray[np.bool_]:
    """Return which rows have a target and a recent past that were mostly observed."""
    missing = np.isnan(series)
    if not missing.any():
        return np.ones(len(rows), dtype=np.bool_)
    known = np.concatenate(([0.0], np.cumsum(~missing)))
    past = max(LEVEL_MIN // step_min, 1)
    ahead = known[rows + horizon.lead + horizon.width] - known[rows + horizon.lead]
    before = known[rows + 1] - known[np.maximum(rows + 1 - past, 0)]
    enough: NDArray[np.bool_] = (ahead >= KNOWN_SHARE * horizon.width) & (before >= KNOWN_SHARE * past)
    return enough


def _target(filled: Floats, rows: NDArray[np.int64], horizon: Horizon) -> Floats:
    windows = np.lib.stride_tricks.sliding_window_view(filled, horizon.width)[rows + horizon.lead]
    found: Floats = windows.max(axis=1) if horizon.peak else windows.mean(axis=1)
    return found


class _Windows(NamedTuple):
    """The windows of steps whose means the features are made of: each begins and ends so many steps after the last one.

    The level, the minutes and blocks before, and pairs of how demand was once and at the horizon after it.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    pairs: int


@lru_cache(maxsize=64)
def _windows(horizon: Horizon, step_min: int, days: int) -> _Windows:
    block, day = max(LEVEL_MIN // step_min, 1), DAY_MIN // step_min
    found = [(1 - block, 1)]
    found += [(1 - minutes // step_min, 1) for minutes in RECENT_MIN if minutes // step_min]
    found += [(1 - (back + 1) * block, 1 - back * block) for back in range(1, BLOCKS + 1)]
    ago = [(1, SMOOTH_MIN), (1, WIDE_MIN)] * (days >= 1) + [(7, SMOOTH_MIN)] * (days >= 7)
    # Of a day that is over, both sides of an instant are known.
    for back, smooth_min in ago:
        then, smooth = -back * day, smooth_min // step_min
        ahead = then + horizon.lead
        found += [(then - smooth, then + 1 + smooth), (ahead - smooth, ahead + horizon.width + smooth)]
    starts, ends = np.array(found, dtype=np.int64).T
    return _Windows(starts, ends, len(ago))


def _features(known: Known, rows: NDArray[np.int64], windows: _Windows) -> tuple[Floats, Floats]:
    """Return the level, at least a small share of the mean of all, and an array of (rows, features)."""
    last = len(known.filled)
    # Not np.clip, which takes five times as long for one row.
    start = np.minimum(np.maximum(rows[:, None] + windows.starts, 0), last - 1)
    end = np.minimum(np.maximum(rows[:, None] + windows.ends, 1), last)
    means: Floats = (known.sums[end] - known.sums[start]) / np.maximum(end - start, 1)
    level: Floats = np.maximum(means[:, 0], known.floor)
    recent = means.shape[1] - 2 * windows.pairs
    columns = [means[:, 1:recent] / level[:, None] - 1.0]
    if windows.pairs:
        then, ahead = means[:, recent::2], means[:, recent + 1 :: 2]
        change = ahead / np.maximum(then, known.floor) - 1.0
        columns += [change[:, :1], then[:, :1] / level[:, None] - 1.0, change[:, 1:]]
    found = np.concatenate(columns, axis=1)
    return level, np.minimum(np.maximum(found, -CLIPPED), CLIPPED)
