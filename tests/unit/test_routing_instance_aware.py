"""Least load for the size of each target."""

from __future__ import annotations

import pytest

from policies.routing.base import RequestView, TargetView
from policies.routing.instance_aware_least_load import InstanceAwareLeastLoad

REQUEST = RequestView("r", "POST", "/v1/chat/completions")


def big_and_small(big: int, small: int, trouble_of_big: float = 0.0) -> list[TargetView]:
    return [
        TargetView("big", big, trouble_of_big, capacity=4.0),
        TargetView("small", small, capacity=1.0),
    ]


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        pytest.param(big_and_small(0, 0), "big", id="idle: the big one is faster"),
        pytest.param(big_and_small(2, 0), "big", id="three quarters full is better than full"),
        pytest.param(big_and_small(4, 0), "small", id="the big one would be over-full"),
        pytest.param(big_and_small(6, 1), "big", id="7/4 before 2/1"),
        pytest.param(big_and_small(1, 0, trouble_of_big=3.0), "small", id="failures weigh like requests"),
    ],
)
def test_load_for_size(targets: list[TargetView], chosen: str) -> None:
    for order in (targets, targets[::-1]):
        choice = InstanceAwareLeastLoad().choose(REQUEST, order, 0.0)
        assert choice is not None
        assert choice.target_id == chosen


def test_in_the_long_run_targets_are_filled_by_their_size() -> None:
    policy = InstanceAwareLeastLoad()
    targets = [
        TargetView("h100", capacity=8.0),
        TargetView("a100", capacity=4.0),
        TargetView("l4", capacity=1.0),
    ]
    for _ in range(13 * 20):
        choice = policy.choose(REQUEST, targets, 0.0)
        assert choice is not None
        policy.record(REQUEST, choice.target_id, 0.0)
        next(one for one in targets if one.id == choice.target_id).in_flight += 1
    assert [target.in_flight for target in targets] == [160, 80, 20]
