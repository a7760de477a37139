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

from dataclasses import dataclass
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
GRID = 199
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

    def quantiles(self, series: Floats, shares: tuple[float, ...], now: int | None = None) -> Floats:
        """Return the quantiles `shares` of the target, after step `now` of the series (default: the last)."""
        at = len(series) - 1 if now is None else now
        row: Floats = self.many(series, np.array([at]), shares)[0]
        return row

    def many(self, series: Floats, rows: NDArray[np.int64], shares: tuple[float, ...]) -> Floats:
        """As `quantiles`, after each of `rows`: an array of (rows, shares)."""
        known = _Series.of(series)
        level = _level(known, rows, self.step_min)
        change = np.full(len(rows), self.bias)
        if len(self.weights):
            found = _features(known, rows, level, self.horizon, self.step_min, self.days)
            change += ((found - self.mean) / self.scale) @ self.weights
        change = np.clip(change, self.low, self.high)
        widths = np.interp(shares, np.linspace(0.0, 1.0, GRID), self.spread)
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

    known = _Series.of(series)
    level = _level(known, rows, step_min)
    target = _target(known.filled, rows, horizon) / level - 1.0
    found = _features(known, rows, level, horizon, step_min, days)
    mean, scale = found.mean(axis=0), np.maximum(found.std(axis=0), 1e-6)
    bias, weights, residuals = _regression((found - mean) / scale, target)
    spread = np.quantile(residuals, np.linspace(0.0, 1.0, GRID))
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
    spread = np.quantile(sample, np.linspace(0.0, 1.0, GRID))
    return Model(horizon, step_min, 0, none, none, none, 0.0, spread, 0.0, 0.0)


def _days(last: int, day: int) -> int:
    """Return how many days back the features reach: 7, 1 or 0, so that enough rows remain that know them."""
    if last - 7 * day >= day:
        return 7
    return 1 if last - day >= day // 4 else 0


# --- series -------------------------------------------------------------------------------------------------


class _Series(NamedTuple):
    """A series without gaps, its sums from the beginning, and the least level that changes are relative to."""

    filled: Floats
    sums: Floats
    floor: float

    @classmethod
    def of(cls, series: Floats) -> _Series:
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


def _level(known: _Series, rows: NDArray[np.int64], step_min: int) -> Floats:
    """Return the mean of the last minutes; at least a small share of the mean of all."""
    recent = _mean(known.sums, rows - max(LEVEL_MIN // step_min, 1) + 1, rows + 1)
    found: Floats = np.maximum(recent, known.floor)
    return found


def _mean(sums: Floats, start: NDArray[np.int64], end: NDArray[np.int64]) -> Floats:
    """Return the means of the steps from `start` to before `end`, as far as there are any."""
    last = len(sums) - 1
    # Not np.clip, which takes five times as long for one row.
    start = np.minimum(np.maximum(start, 0), last - 1)
    end = np.minimum(np.maximum(end, 1), last)
    found: Floats = (sums[end] - sums[start]) / np.maximum(end - start, 1)
    return found


def _features(
    known: _Series, rows: NDArray[np.int64], level: Floats, horizon: Horizon, step_min: int, days: int
) -> Floats:
    """Return an array of (rows, features)."""
    sums, block = known.sums, max(LEVEL_MIN // step_min, 1)
    lengths = [minutes // step_min for minutes in RECENT_MIN if minutes // step_min]
    columns = [_mean(sums, rows - length + 1, rows + 1) / level - 1.0 for length in lengths]
    for back in range(1, BLOCKS + 1):
        end = rows + 1 - back * block
        columns.append(_mean(sums, end - block, end) / level - 1.0)
    if days >= 1:
        then, change = _change_since(known, rows, horizon, step_min, 1, SMOOTH_MIN)
        columns += [change, then / level - 1.0, _change_since(known, rows, horizon, step_min, 1, WIDE_MIN)[1]]
    if days >= 7:
        columns.append(_change_since(known, rows, horizon, step_min, 7, SMOOTH_MIN)[1])
    found: Floats = np.clip(np.stack(columns, axis=1), -CLIPPED, CLIPPED)
    return found


def _change_since(
    known: _Series, rows: NDArray[np.int64], horizon: Horizon, step_min: int, days: int, smooth_min: int
) -> tuple[Floats, Floats]:
    """Return demand `days` ago, and by how much it changed from there to the horizon.

    Both are means over `smooth_min` to either side: of a day that is over, both sides of an instant are known.
    """
    sums, smooth = known.sums, smooth_min // step_min
    then = rows - days * (DAY_MIN // step_min)
    around = _mean(sums, then - smooth, then + 1 + smooth)
    ahead = _mean(sums, then + horizon.lead - smooth, then + horizon.lead + horizon.width + smooth)
    return around, ahead / np.maximum(around, known.floor) - 1.0
