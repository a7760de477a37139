"""Two random choices: who is compared by what, whether draws are fair, and what the second one is for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

from policies.routing.base import RequestView, TargetView
from policies.routing.power_of_two import PowerOfTwo

REQUEST = RequestView("r", "POST", "/v1/chat/completions")


def told(name: str, running: int, pending: int, kv_usage: float | None = None, **own: float) -> TargetView:
    return replace(TargetView(name), running=running, pending=pending, kv_usage=kv_usage, **own)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "other", "chosen"),
    [
        pytest.param(TargetView("a", 3), TargetView("b", 2), "b", id="silent engines: fewer in flight"),
        pytest.param(told("a", 5, 0), told("b", 3, 1), "b", id="fewer running and pending"),
        pytest.param(
            told("a", 5, 0, in_flight=1), told("b", 3, 1, in_flight=9), "b", id="the engine's word counts"
        ),
        pytest.param(
            told("a", 0, 0, in_flight=9), TargetView("b", 8), "b", id="one is silent: our own count of both"
        ),
        pytest.param(told("a", 4, 0, 0.6), told("b", 4, 0, 0.5), "b", id="of equals the emptier cache"),
        pytest.param(told("a", 3, 0, 0.9), told("b", 4, 0, 0.1), "a", id="requests go before the cache"),
        pytest.param(told("a", 0, 0, trouble=2.0), told("b", 1, 0), "b", id="failures weigh like requests"),
    ],
)
def test_of_two(one: TargetView, other: TargetView, chosen: str) -> None:
    for targets in ([one, other], [other, one]):
        policy = PowerOfTwo(Random(0))
        policy.record(REQUEST, chosen, 0.0)  # not its turn: what decides must be more than that
        choice = policy.choose(REQUEST, targets, 0.0)
        assert choice is not None
        assert choice.target_id == chosen


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_cache_that_is_unknown_is_not_compared(first: str) -> None:
    """Neither the one that reports nor the one that does not has an advantage: they take turns."""
    policy = PowerOfTwo(Random(0))
    policy.record(REQUEST, first, 0.0)
    choice = policy.choose(REQUEST, [told("a", 4, 0, 0.5), told("b", 4, 0, None)], 0.0)
    assert choice is not None
    assert choice.target_id != first


def test_a_lone_target_is_taken() -> None:
    choice = PowerOfTwo(Random(0)).choose(REQUEST, [TargetView("a", 7)], 0.0)
    assert choice is not None
    assert choice.target_id == "a"


def test_two_equal_targets_take_turns() -> None:
    policy, targets = PowerOfTwo(Random(0)), [TargetView("a"), TargetView("b")]
    chosen = []
    for _ in range(6):
        choice = policy.choose(REQUEST, targets, 0.0)
        assert choice is not None
        policy.record(REQUEST, choice.target_id, 0.0)
        chosen.append(choice.target_id)
    assert chosen == ["a", "b"] * 3 or chosen == ["b", "a"] * 3


def test_every_pair_is_drawn_equally_often() -> None:
    policy, targets = PowerOfTwo(Random(7)), [TargetView(name) for name in "abcde"]
    drawn: Counter[frozenset[object]] = Counter()
    for _ in range(10_000):
        choice = policy.choose(REQUEST, targets, 0.0)
        assert choice is not None
        drawn[frozenset(row[0] for row in choice.scored)] += 1
        policy.record(REQUEST, choice.target_id, 0.0)
    assert set(drawn) == {frozenset(pair) for pair in combinations("abcde", 2)}
    # 1000 each on average, standard deviation 30
    assert all(850 < times < 1150 for times in drawn.values())


def test_a_question_costs_no_randomness() -> None:
    rng = Random(3)
    policy = PowerOfTwo(rng)
    before = rng.getstate()
    for _ in range(5):
        policy.choose(REQUEST, [TargetView(name) for name in "abc"], 0.0)
    assert rng.getstate() == before


def test_the_second_choice_levels_the_loads() -> None:
    """100 requests for each of 100 targets: one random choice is off by 25 at worst, the better of two by 3."""
    rng, policy = Random(5), PowerOfTwo(Random(5))
    two = [TargetView(str(index)) for index in range(100)]
    one = [0] * 100
    for _ in range(10_000):
        choice = policy.choose(REQUEST, two, 0.0)
        assert choice is not None
        two[int(choice.target_id)].in_flight += 1
        policy.record(REQUEST, choice.target_id, 0.0)
        one[int(rng.random() * 100)] += 1
    assert max(target.in_flight for target in two) <= 104
    assert max(one) >= 115
