"""Guesses of response lengths: the median of a scope, of all, the default; never above the client's limit."""

from __future__ import annotations

from statistics import median_high

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.routing.base import RequestView
from policies.routing.response_length import DEFAULT_TOKENS, Constant, ResponseLength, RunningMedian


def asked(scope: str = "m", max_tokens: int = 0) -> RequestView:
    return RequestView("r", "POST", "/v1/completions", scope=scope, max_tokens=max_tokens)


def taught(lengths: list[tuple[str, int]], **how: int) -> RunningMedian:
    forecaster = RunningMedian(**how)
    for scope, tokens in lengths:
        forecaster.learn(asked(scope), tokens)
    return forecaster


@pytest.mark.parametrize(
    ("past", "scope", "expected"),
    [
        pytest.param([], "m", DEFAULT_TOKENS, id="nothing known"),
        pytest.param([("m", 10)] * 4, "m", DEFAULT_TOKENS, id="four answers are too few"),
        pytest.param([("m", 10)] * 5, "m", 10, id="five are enough"),
        pytest.param([("m", 10)] * 4 + [("m", 90_000)], "m", 10, id="one long answer moves nothing"),
        pytest.param([("m", 10)] * 5 + [("n", 70)] * 7, "m", 10, id="each scope its own"),
        pytest.param([("m", 10)] * 5 + [("n", 70)] * 7, "new", 70, id="a new scope has the median of all"),
    ],
)
def test_running_median(past: list[tuple[str, int]], scope: str, expected: int) -> None:
    assert taught(past).predict(asked(scope)) == expected


@pytest.mark.parametrize("forecaster", [Constant(200), RunningMedian()], ids=["constant", "median"])
@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        pytest.param(0, 200, id="no limit"),
        pytest.param(20, 20, id="low limit"),
        pytest.param(900, 200, id="high limit"),
    ],
)
def test_the_clients_limit_caps_the_guess(forecaster: ResponseLength, max_tokens: int, expected: int) -> None:
    assert forecaster.predict(asked(max_tokens=max_tokens)) == expected


def test_a_guess_is_never_below_one() -> None:
    assert taught([("m", 0)] * 9).predict(asked()) == 1
    assert Constant(0).predict(asked()) == 1


@given(st.lists(st.integers(0, 5000), min_size=5, max_size=60), st.integers(5, 20))
def test_it_is_the_median_of_the_window(lengths: list[int], window: int) -> None:
    forecaster = taught([("m", tokens) for tokens in lengths], window=window)
    assert forecaster.predict(asked()) == max(1, median_high(lengths[-window:]))


def test_scopes_heard_of_longest_ago_are_dropped() -> None:
    past = [("old", 1)] * 5 + [("busy", 2)] * 5 + [("filler", 7)] * 50
    forecaster = taught([*past, ("old", 1), ("new", 9)], max_scopes=3)
    assert forecaster.predict(asked("busy")) == 7  # as of a scope never heard of
    assert forecaster.predict(asked("old")) == 1
