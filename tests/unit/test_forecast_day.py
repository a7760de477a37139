"""The forecast of the next 24 hours."""

from __future__ import annotations

import numpy as np
import pytest

from policies.forecast.day import HOUR_MIN, HOURS, next_day

DAY = HOURS * HOUR_MIN


def days(count: int, *, noise: float = 0.05, seed: int = 1) -> np.ndarray:
    """Demand of 100 to 1,100 requests a minute, busiest at noon of each day."""
    at = np.arange(count * DAY)
    shape = 600.0 - 500.0 * np.cos(2 * np.pi * at / DAY)
    return shape * np.random.RandomState(seed).normal(1.0, noise, len(at))


def peaks(requests: np.ndarray) -> np.ndarray:
    return requests.reshape(-1, HOUR_MIN).max(axis=1)


@pytest.mark.parametrize("known", [2, 5, 10])
def test_a_day_like_the_days_before_is_foreseen(known: int) -> None:
    series = days(known + 1)
    truth = peaks(series[known * DAY :])
    found = next_day(series[: known * DAY])
    assert len(found) == HOURS
    assert np.abs([hour.p50 for hour in found] / truth - 1.0).max() < 0.2
    assert all(hour.p50 <= hour.p90 < 1.5 * hour.p50 for hour in found)


def test_nine_of_ten_hours_stay_below_the_90_percent_quantile() -> None:
    series = days(40, noise=0.2)
    below = [
        truth <= hour.p90
        for known in range(20, 39)
        for hour, truth in zip(
            next_day(series[: known * DAY]), peaks(series[known * DAY : (known + 1) * DAY]), strict=True
        )
    ]
    assert np.mean(below) == pytest.approx(0.9, abs=0.05)


def test_a_weekend_is_known_from_the_week_before() -> None:
    series = days(14, noise=0.01)
    for day in (5, 6, 12, 13):
        series[day * DAY : (day + 1) * DAY] *= 0.3
    at_noon = 12
    saturday = next_day(series[: 12 * DAY])[at_noon].p50
    assert saturday < 0.8 * next_day(series[: 11 * DAY])[at_noon].p50


def test_what_the_last_hour_was_off_fades() -> None:
    series = days(4, noise=0.0)
    series[-HOUR_MIN:] *= 2.0
    usual, found = next_day(days(4, noise=0.0)), next_day(series)
    ratios = [a.p50 / b.p50 for a, b in zip(found, usual, strict=True)]
    assert ratios[0] > 1.5
    assert ratios[12] == pytest.approx(1.0, abs=0.1)


def test_an_hour_of_history_is_taken_as_it_is() -> None:
    assert [hour.p50 for hour in next_day(np.full(HOUR_MIN + 7, 50.0))] == pytest.approx([50.0] * HOURS)


def test_missing_minutes_are_no_silence() -> None:
    series = days(4, noise=0.0)
    series[2 * DAY + 300 : 2 * DAY + 500] = np.nan
    series[-30:] = np.nan
    usual, found = next_day(days(4, noise=0.0)), next_day(series)
    assert [hour.p50 for hour in found] == pytest.approx([hour.p50 for hour in usual], rel=0.25)
    with pytest.raises(ValueError, match="no hour"):
        next_day(np.full(DAY, np.nan))
    with pytest.raises(ValueError, match="no hour"):
        next_day(np.zeros(59))


def test_silence_stays_silent() -> None:
    assert set(next_day(np.zeros(3 * DAY))) == {(0.0, 0.0)}
