"""Counts and means over a sliding window, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.core.sliding_window import MAX_WINDOW_S, WindowCounter, WindowMean


@given(st.lists(st.floats(0.0, 30.0), max_size=60), st.integers(1, 600))
def test_the_window_counts_to_within_a_second(gaps: list[float], window_s: int) -> None:
    counter = WindowCounter()
    now, seen = 0.0, []
    for gap in gaps:
        now += gap
        counter.add(now)
        seen.append(now)
    inner = sum(1 for at in seen if at > now - window_s + 1)
    outer = sum(1 for at in seen if at > now - window_s - 1)
    assert inner <= counter.count(now, window_s) <= outer


def test_the_window_is_bounded_in_memory() -> None:
    counter = WindowCounter()
    for second in range(5000):
        counter.add(float(second))
    assert len(counter._buckets) <= MAX_WINDOW_S + 1
    assert counter.count(4999.0, 1e9) == MAX_WINDOW_S


def test_the_mean_is_over_time_not_over_changes() -> None:
    mean = WindowMean(100.0)
    assert mean.mean(100.0, 60.0) == 0.0
    mean.step(100.0, 4)
    assert mean.mean(100.0, 60.0) == 4.0, "at the first instant: what is"
    mean.step(110.0, -4)
    assert mean.mean(110.0, 60.0) == 4.0, "no longer than it has lived"
    assert mean.mean(120.0, 60.0) == 2.0
    assert mean.mean(160.0, 60.0) == pytest.approx(40.0 / 60.0)
    assert mean.mean(165.0, 60.0) == pytest.approx(20.0 / 60.0), "the window has left half of it behind"
    assert mean.mean(171.0, 60.0) == pytest.approx(0.0)


def test_what_is_shorter_than_a_look_is_seen() -> None:
    mean = WindowMean(0.0)
    for second in range(60):
        mean.step(second + 0.25, 1)
        mean.step(second + 0.5, -1)
    assert mean.mean(60.0, 60.0) == pytest.approx(0.25)


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(-1, 2)), max_size=60), st.integers(1, 600))
def test_the_mean_agrees_with_its_definition(steps: list[tuple[float, int]], window_s: int) -> None:
    """To what changes within the second in which the window begins."""
    mean = WindowMean(0.0)
    now, level, history, swings = 0.0, 0, [(0.0, 0)], [0.0]
    for gap, by in steps:
        now += gap
        by = max(by, -level)
        mean.step(now, by)
        level += by
        history.append((now, level))
        swings.append(now)
    now += 1.0
    start = max(0.0, now - window_s)
    ends = [at for at, _ in history[1:]] + [now]
    area = sum(
        number * max(0.0, end - max(at, start)) for (at, number), end in zip(history, ends, strict=True)
    )
    near = [number for at, number in history if start - 1.0 <= at <= start + 1.0]
    before = [number for at, number in history if at <= start]
    slack = max([*near, before[-1]]) - min([*near, before[-1]]) + 1e-6
    assert abs(mean.mean(now, window_s) * (now - start) - area) <= slack


def test_the_mean_is_bounded_in_memory() -> None:
    mean = WindowMean(0.0)
    for tick in range(20_000):
        mean.step(tick / 4.0, 1)
    assert len(mean._marks) <= 2 * MAX_WINDOW_S + 3
