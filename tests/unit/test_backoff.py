"""The delay after failures in a row."""

from __future__ import annotations

import pytest

from policies.backoff import delay_s


def test_it_doubles_from_the_first_delay_to_the_longest() -> None:
    assert [delay_s(failures, 0.5, 5.0) for failures in range(1, 7)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


@pytest.mark.parametrize("failures", [64, 5000])
def test_any_number_of_failures_is_a_finite_delay(failures: int) -> None:
    assert delay_s(failures, 1e-3, 60.0) == 60.0


def test_the_longest_delay_holds_for_the_first_failure_too() -> None:
    assert delay_s(1, 10.0, 3.0) == 3.0
