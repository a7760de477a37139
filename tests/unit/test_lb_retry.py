"""Who may be tried again, how often and after how long."""

from __future__ import annotations

import random

import pytest

from lb.config.options import Retries
from lb.core.retry import (
    BUDGET_WINDOW_S,
    RetryBudget,
    RetryHistory,
    RetryVerdict,
    Tries,
    backoff_s,
    is_free,
    may_retry,
)
from lb.core.sliding_window import WindowCounter

OURS = Retries()
SGLANG = Retries(max_worker_retries=3, max_total_retries=6, budget_ratio=100.0, slow_after_s=86_400.0)
SLOW_S = OURS.slow_after_s


@pytest.mark.parametrize(
    ("rules", "begun", "on_target", "reached", "longest_s", "others", "verdict"),
    [
        pytest.param(OURS, 1, 1, True, 0.1, True, RetryVerdict.ELSEWHERE, id="died once"),
        pytest.param(OURS, 2, 1, True, 0.1, True, RetryVerdict.ELSEWHERE, id="died twice"),
        pytest.param(OURS, 3, 1, True, 0.1, True, RetryVerdict.TOO_OFTEN, id="died three times"),
        pytest.param(OURS, 0, 1, False, 0.0, True, RetryVerdict.ELSEWHERE, id="not reached"),
        pytest.param(
            OURS, 2, 1, False, 0.1, True, RetryVerdict.ELSEWHERE, id="not reached after dying twice"
        ),
        pytest.param(OURS, 1, 1, True, SLOW_S, True, RetryVerdict.ELSEWHERE, id="slow: once more"),
        pytest.param(OURS, 2, 1, True, SLOW_S, True, RetryVerdict.TOO_SLOW, id="slow: never a third time"),
        pytest.param(
            OURS, 2, 1, False, SLOW_S, True, RetryVerdict.TOO_SLOW, id="slow before, now not reached"
        ),
        pytest.param(OURS, 1, 1, True, 0.1, False, RetryVerdict.NO_TARGET_LEFT, id="nobody else: held"),
        pytest.param(OURS, 3, 1, True, 0.1, False, RetryVerdict.TOO_OFTEN, id="nobody else and too often"),
        pytest.param(SGLANG, 1, 1, True, 0.1, True, RetryVerdict.ELSEWHERE, id="SGLang: others first, here"),
        pytest.param(
            SGLANG, 3, 3, True, 0.1, False, RetryVerdict.SAME_TARGET, id="SGLang: third retry on a worker"
        ),
        pytest.param(
            SGLANG, 4, 4, True, 0.1, False, RetryVerdict.NO_TARGET_LEFT, id="SGLang: no fourth on it"
        ),
        pytest.param(
            SGLANG, 6, 2, True, 900.0, True, RetryVerdict.ELSEWHERE, id="SGLang: sixth retry, however slow"
        ),
        pytest.param(SGLANG, 7, 2, True, 0.1, True, RetryVerdict.TOO_OFTEN, id="SGLang: no seventh"),
        pytest.param(
            Retries(max_total_retries=0), 1, 1, True, 0.1, True, RetryVerdict.TOO_OFTEN, id="no retries"
        ),
        pytest.param(
            Retries(max_total_retries=0),
            0,
            1,
            False,
            0.0,
            True,
            RetryVerdict.ELSEWHERE,
            id="no retries, not reached",
        ),
    ],
)
def test_may_it_be_tried_again(
    rules: Retries,
    begun: int,
    on_target: int,
    reached: bool,
    longest_s: float,
    others: bool,
    verdict: RetryVerdict,
) -> None:
    story = RetryHistory(begun, on_target, reached, longest_s)
    assert may_retry(story, rules, others) is verdict
    assert is_free(story) is not reached


@pytest.mark.parametrize(
    ("begun", "reached", "died", "free"),
    [
        pytest.param(0, False, False, True, id="no connection"),
        pytest.param(2, False, False, True, id="no connection, after others"),
        pytest.param(1, True, False, False, id="an answer of no use"),
        pytest.param(1, True, True, True, id="its target died"),
        pytest.param(2, True, True, False, id="a second one died"),
    ],
)
def test_what_is_outside_the_budget(begun: int, reached: bool, died: bool, free: bool) -> None:
    assert is_free(RetryHistory(begun, 1, reached, 0.1, died)) is free


def test_which_verdicts_go_on() -> None:
    assert {verdict for verdict in RetryVerdict if verdict.goes_on} == {
        RetryVerdict.ELSEWHERE,
        RetryVerdict.SAME_TARGET,
        RetryVerdict.NO_TARGET_LEFT,
    }


@pytest.mark.parametrize(
    ("ratio", "floor_per_s", "requests", "allowed"),
    [
        pytest.param(0.2, 0.0, 100, 20, id="a share of the requests"),
        pytest.param(0.0, 3.0, 100, 30, id="the floor"),
        pytest.param(0.2, 3.0, 100, 50, id="both"),
        pytest.param(0.0, 0.0, 100, 0, id="none"),
        pytest.param(0.2, 0.0, 4, 0, id="less than one whole retry"),
    ],
)
def test_the_budget(ratio: float, floor_per_s: float, requests: int, allowed: int) -> None:
    arrivals = WindowCounter()
    budget = RetryBudget(Retries(budget_ratio=ratio, budget_floor_per_s=floor_per_s), arrivals)
    for number in range(requests):
        arrivals.add(100.0 + number / requests)
    assert sum(budget.allow(101.0) for _ in range(200)) == allowed
    assert budget.refused == 200 - allowed


def test_what_has_been_spent_comes_back_with_time_and_new_requests() -> None:
    arrivals = WindowCounter()
    budget = RetryBudget(Retries(budget_ratio=0.0, budget_floor_per_s=0.1), arrivals)
    assert [budget.allow(100.0), budget.allow(100.5)] == [True, False]
    assert not budget.allow(99.0 + BUDGET_WINDOW_S)
    assert budget.allow(101.0 + BUDGET_WINDOW_S)
    budget.rules = Retries(budget_ratio=1.0, budget_floor_per_s=0.0)
    arrivals.add(112.0)
    arrivals.add(112.0)
    assert [budget.allow(112.0), budget.allow(112.0)] == [True, False]


@pytest.mark.parametrize(
    ("retry", "full_s"), [(1, 0.0), (2, 0.05), (3, 0.1), (4, 0.2), (7, 1.0), (9999, 1.0)], ids=str
)
def test_the_first_retry_is_immediate_and_later_ones_back_off(retry: int, full_s: float) -> None:
    rng = random.Random(4)
    waits = [backoff_s(OURS, retry, rng) for _ in range(200)]
    assert max(waits) <= full_s
    assert min(waits) >= full_s * (1.0 - OURS.jitter)
    assert len(set(waits)) == (200 if full_s else 1)
    assert backoff_s(Retries(jitter=0.0), retry, rng) == full_s


@pytest.mark.parametrize(
    ("deaths", "attempts_on_rest", "others", "verdict"),
    [
        pytest.param(1, 0, True, RetryVerdict.ELSEWHERE, id="one target died"),
        pytest.param(2, 0, True, RetryVerdict.KILLS_TARGETS, id="two died"),
        pytest.param(2, 2, True, RetryVerdict.ELSEWHERE, id="two died of the rest of a stream"),
        pytest.param(3, 3, True, RetryVerdict.KILLS_TARGETS, id="three died of it"),
        pytest.param(1, 0, False, RetryVerdict.NO_TARGET_LEFT, id="all have failed it: held"),
        pytest.param(1, 1, False, RetryVerdict.SAME_TARGET, id="all have failed the rest: once more"),
        pytest.param(1, 5, False, RetryVerdict.SAME_TARGET, id="and again"),
        pytest.param(1, 6, False, RetryVerdict.NO_TARGET_LEFT, id="often enough: held"),
    ],
)
def test_the_rest_of_a_stream_is_tried_more_often(
    deaths: int, attempts_on_rest: int, others: bool, verdict: RetryVerdict
) -> None:
    """Its request has run well once, so a connection that was cut says less against it, and its client waits."""
    history = RetryHistory(1, 1, True, 0.1, True, deaths, True, attempts_on_rest)
    assert may_retry(history, OURS, others) is verdict


def test_attempts_on_the_rest_are_counted_from_the_break() -> None:
    tries = Tries(True, 60.0, 60.0)
    tries.begin(1)
    assert tries.after(reached=True, died=True, ran_s=0.1, epoch=1).attempts_on_rest == 0
    tries.resume(60.0, 60.0)
    tries.begin(2)
    tries.begin(3)
    assert tries.after(reached=False, died=False, ran_s=0.1, epoch=3).attempts_on_rest == 2
