"""The demand forecast: what it learns, from when, and that gaps, zeros and jumps do not break it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from policies.forecast.demand import DAY_MIN, Floats, Horizon, Model, fit

NEXT = Horizon(1, 1, peak=False)
SOON = Horizon(5, 2)


def daily(days: float, seed: int = 0, mean: float = 900.0) -> Floats:
    """Requests per minute that rise sharply at the same minute of every day, with the noise of a Poisson process."""
    minutes = np.arange(round(days * DAY_MIN))
    rate = mean * (1.0 + 0.8 * ((minutes % DAY_MIN) // 240 % 2))
    return np.random.RandomState(seed).poisson(rate).astype(float)


def noise(minutes: int, seed: int = 0, mean: float = 900.0) -> Floats:
    return np.random.RandomState(seed).poisson(mean, minutes).astype(float)


def error(model: Model, series: Floats, rows: range) -> float:
    """Mean absolute error of the median for the next step, relative to the mean."""
    found = model.many(series, np.array(rows), (0.5,))[:, 0]
    return float(np.abs(found - series[np.array(rows) + 1]).mean() / series.mean())


# --- from the first minute ----------------------------------------------------------------------------------


@pytest.mark.parametrize("minutes", [1, 5, 60, 179])
def test_before_anything_is_learned_the_forecast_is_the_level(minutes: int) -> None:
    model = fit(np.full(minutes, 60.0), SOON)
    low, middle, high = model.quantiles(np.full(minutes, 60.0), (0.1, 0.5, 0.9))
    assert middle == pytest.approx(60.0, rel=0.01)
    assert 45.0 < low < middle < high < 75.0


def test_from_the_second_day_it_knows_a_rise_that_comes_at_the_same_time_every_day() -> None:
    series = daily(3.0)
    at = 2 * DAY_MIN + 240 - 5  # the rise comes in five minutes
    (foreseen,) = fit(series[:at], Horizon(5, 10)).quantiles(series[:at], (0.5,))
    (level,) = fit(series[at - 170 : at], Horizon(5, 10)).quantiles(series[:at], (0.5,))
    assert foreseen > 1.15 * level


def test_a_trend_is_followed_before_any_day_is_over() -> None:
    series = np.linspace(500.0, 1500.0, 600)
    (found,) = fit(series, Horizon(10, 1)).quantiles(series, (0.5,))
    assert found > 1.005 * series[-1]


# --- how good -----------------------------------------------------------------------------------------------


def test_white_noise_is_forecast_no_worse_than_two_percent_over_persistence() -> None:
    series = noise(6 * DAY_MIN)
    rows = range(5 * DAY_MIN, 6 * DAY_MIN - 1)
    model = fit(series[: 5 * DAY_MIN], NEXT)
    persistence = float(np.abs(np.diff(series[5 * DAY_MIN :])).mean() / series.mean())
    assert error(model, series, rows) <= 1.02 * persistence


@pytest.mark.parametrize("seed", range(3))
def test_the_course_of_a_day_is_known_without_the_noise_of_yesterday(seed: int) -> None:
    day = DAY_MIN // 10
    windows = np.arange(7 * day)
    course = 1000.0 * (1.0 - 0.5 * np.cos(2 * np.pi * windows / day))
    series = course * np.exp(np.random.RandomState(seed).normal(0.0, 0.03, len(windows)))
    rows = windows[5 * day : -3]
    model = fit(series[: 5 * day + 1], Horizon(2, 1, peak=False), step_min=10)
    truth = series[rows + 2]
    found = np.abs(model.many(series, rows, (0.5,))[:, 0] - truth) / truth
    persistence = np.abs(series[rows] - truth) / truth
    assert found.mean() < 0.56 * persistence.mean()


@pytest.mark.parametrize("share", [0.5, 0.6, 0.9])
@pytest.mark.parametrize("series", [noise(4 * DAY_MIN), daily(4.0)], ids=["noise", "daily"])
def test_quantiles_cover_as_much_as_they_say(series: Floats, share: float) -> None:
    start = 3 * DAY_MIN
    model = fit(series[:start], SOON)
    rows = np.arange(start, len(series) - 7)
    busiest = np.maximum(series[rows + 5], series[rows + 6])
    covered = float((busiest <= model.many(series, rows, (share,))[:, 0]).mean())
    assert covered == pytest.approx(share, abs=0.04)


# --- trouble ------------------------------------------------------------------------------------------------


def test_missing_minutes_are_not_zero_demand() -> None:
    series = daily(3.0)
    series[-30:] = np.nan
    (found,) = fit(series, SOON).quantiles(series, (0.5,))
    assert found == pytest.approx(series[-40:-30].mean(), rel=0.35)


def test_a_day_of_missing_minutes_changes_little() -> None:
    whole = noise(5 * DAY_MIN)
    holed = whole.copy()
    holed[2 * DAY_MIN : 3 * DAY_MIN] = np.nan
    (told,) = fit(whole, SOON).quantiles(whole, (0.9,))
    (found,) = fit(holed, SOON).quantiles(holed, (0.9,))
    assert found == pytest.approx(told, rel=0.03)


@pytest.mark.parametrize(
    "series",
    [
        pytest.param(np.zeros(2000), id="zeros"),
        pytest.param(np.full(2000, np.nan), id="nothing known"),
        pytest.param(np.concatenate((noise(2000), np.zeros(300))), id="an outage now"),
        pytest.param(np.concatenate((np.zeros(2000), noise(5))), id="the first requests"),
        pytest.param(np.concatenate((np.full(100, np.nan), noise(10))), id="a late beginning"),
        pytest.param(np.full(1, np.nan), id="one missing minute"),
    ],
)
def test_whatever_the_history_the_forecast_is_finite_and_not_negative(series: Floats) -> None:
    found = fit(series, SOON).quantiles(series, (0.05, 0.5, 0.95))
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    assert (np.diff(found) >= 0).all()
    assert found.max() <= 3 * np.nan_to_num(series).max() + 1e-6


def test_the_same_history_gives_the_same_forecast() -> None:
    series = daily(2.5)
    assert fit(series, SOON).quantiles(series, (0.6,)) == fit(series.copy(), SOON).quantiles(series, (0.6,))


def test_numpy_is_not_imported_for_services_without_an_slo() -> None:
    """Nor with the policies as a whole."""
    code = "import sys, policies.registry as r, policies.goals as g; r.scaler_for(g.ScalingGoal(1, 4, 2.0)); "
    subprocess.run([sys.executable, "-c", code + "sys.exit('numpy' in sys.modules)"], check=True)
