"""When a sleeping service is expected to be requested again: a truth table over earlier days."""

from __future__ import annotations

import numpy as np
import pytest

from policies.forecast.demand import DAY_MIN, Floats
from policies.forecast.waking import LATE_MIN, first_demand, is_idle

EIGHT = 480
BUSY = 300.0


def days(*busy: bool, until: int) -> Floats:
    """Days that are silent but from 8 to 18 h where `busy`, and then the minutes of today until `until`, all silent."""
    series = np.zeros(len(busy) * DAY_MIN + until)
    for day, is_busy in enumerate(busy):
        if is_busy:
            series[day * DAY_MIN + EIGHT : day * DAY_MIN + EIGHT + 600] = BUSY
    return series


@pytest.mark.parametrize(
    ("before", "at", "expected"),
    [
        pytest.param((), EIGHT - 5, None, id="no day is known"),
        pytest.param((True,), EIGHT - 20, 0.0, id="yesterday, but not yet"),
        pytest.param((True,), EIGHT - 7, 0.0, id="yesterday, in a minute"),
        pytest.param((True,), EIGHT - 6, BUSY, id="yesterday, now"),
        pytest.param((True,), EIGHT + LATE_MIN, BUSY, id="late today"),
        pytest.param((True,), EIGHT + LATE_MIN + 1, 0.0, id="does not come today"),
        pytest.param((False,), EIGHT - 6, 0.0, id="not yesterday"),
        pytest.param((True, False), EIGHT - 6, BUSY, id="every other day"),
        pytest.param((True, False, False), EIGHT - 6, 0.0, id="one of three days"),
        pytest.param((True,) * 5 + (False,) * 2, EIGHT - 6, BUSY, id="Monday"),
        pytest.param((True,), 1080, 0.0, id="where demand ended yesterday"),
    ],
)
def test_demand_is_expected_where_it_began_on_earlier_days(
    before: tuple[bool, ...], at: int, expected: float | None
) -> None:
    assert first_demand(days(*before, until=at), 7) == expected


def test_a_day_that_was_not_recorded_says_nothing() -> None:
    series = days(True, False, until=EIGHT - 5)
    series[DAY_MIN : 2 * DAY_MIN] = np.nan
    assert first_demand(series, 7) == BUSY


def test_a_single_silent_stretch_within_busy_hours_is_no_beginning() -> None:
    series = days(True, until=600)
    series[530:540] = 0.0  # ten minutes of yesterday
    assert first_demand(series, 7) == 0.0


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        pytest.param([0.0] * 15, True, id="silent"),
        pytest.param([1.0] + [0.0] * 14, False, id="just used"),
        pytest.param([0.0] * 14, False, id="not long enough"),
        pytest.param([0.0] * 14 + [np.nan], False, id="not known"),
    ],
)
def test_what_is_not_reported_is_not_silent(last: list[float], expected: bool) -> None:
    assert is_idle(np.array(last)) is expected
