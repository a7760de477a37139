"""Routing policies as truth tables and properties: pure, so no fixture is needed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.routing.base import RequestView, RoutingPolicy, TargetView
from policies.routing.registry import DEFAULT_POLICY, POLICIES, UnknownPolicyError, make_policy

REQUEST = RequestView("r", "POST", "/v1/chat/completions")


def views(**loads: int) -> list[TargetView]:
    return [TargetView(name, load) for name, load in loads.items()]


def follow(policy: RoutingPolicy, targets: list[TargetView]) -> str:
    """Choose, and do what was chosen."""
    choice = policy.choose(REQUEST, targets, 0.0)
    assert choice is not None
    policy.record(REQUEST, choice.target_id, 0.0)
    return choice.target_id


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_target_is_no_choice(name: str) -> None:
    assert make_policy(name).choose(REQUEST, [], 0.0) is None


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_choosing_changes_nothing(name: str) -> None:
    policy = make_policy(name)
    targets = views(a=0, b=0, c=0)
    assert {policy.choose(REQUEST, targets, now) for now in (0.0, 1.0, 2.0)} == {
        policy.choose(REQUEST, targets, 0.0)
    }


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_choice_explains_every_candidate_and_takes_the_cheapest(name: str) -> None:
    choice = make_policy(name).choose(REQUEST, views(a=2, b=1, c=3), 0.0)
    assert choice is not None
    assert [one.target_id for one in choice.scored] == ["a", "b", "c"]
    assert all(one.terms for one in choice.scored)
    costs = {one.target_id: one.cost for one in choice.scored}
    assert costs[choice.target_id] == min(costs.values())


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_with_equal_loads_everybody_has_a_turn(name: str) -> None:
    policy = make_policy(name)
    assert Counter(follow(policy, views(a=0, b=0, c=0)) for _ in range(9)) == {"a": 3, "b": 3, "c": 3}


def test_round_robin_ignores_load() -> None:
    policy = make_policy("round_robin")
    assert [follow(policy, views(a=9, b=0)) for _ in range(4)] == ["a", "b", "a", "b"]


def test_round_robin_skips_nobody_when_the_list_changes() -> None:
    policy = make_policy("round_robin")
    assert follow(policy, views(a=0, b=0, c=0)) == "a"
    assert follow(policy, views(b=0, c=0)) == "b"  # a was excluded: not c
    assert follow(policy, views(a=0, b=0, c=0, d=0)) == "c"
    assert [follow(policy, views(a=0, b=0, c=0, d=0)) for _ in range(4)] == ["d", "a", "b", "c"]


def test_a_forgotten_target_comes_back_as_a_newcomer() -> None:
    policy = make_policy("round_robin")
    for _ in range(3):
        follow(policy, views(a=0, b=0, c=0))
    policy.forget("c")
    policy.forget("never seen")
    assert follow(policy, views(a=0, b=0, c=0)) == "c"


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        pytest.param(views(a=2, b=1), "b", id="fewest in flight"),
        pytest.param(
            [TargetView("a", 0, trouble=1.0), TargetView("b", 0)], "b", id="a failing target is not idle"
        ),
        pytest.param(
            [TargetView("a", 0, trouble=2.0), TargetView("b", 1)], "b", id="failures weigh like requests"
        ),
        pytest.param([TargetView("a", 0, trouble=0.4), TargetView("b", 1)], "a", id="faded failures do not"),
    ],
)
def test_least_load(targets: list[TargetView], chosen: str) -> None:
    assert follow(make_policy("least_load"), targets) == chosen


def test_least_load_does_not_send_everything_to_a_fresh_target() -> None:
    policy = make_policy("least_load")
    loads = {"old": 0, "new": 0}
    policy.record(REQUEST, "old", 0.0)
    for _ in range(10):
        loads[follow(policy, views(**loads))] += 1
    assert loads == {"old": 5, "new": 5}


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 40))
def test_least_load_keeps_loads_level(start: list[int], requests: int) -> None:
    """Without departures nobody above the lowest level gets anything, so the lowest level only rises."""
    policy = make_policy("least_load")
    loads = {str(index): load for index, load in enumerate(start)}
    for _ in range(requests):
        lowest = min(loads.values())
        chosen = follow(policy, views(**loads))
        assert loads[chosen] == lowest
        loads[chosen] += 1


@given(st.lists(st.sets(st.sampled_from("abcde"), min_size=1), min_size=1, max_size=60))
def test_round_robin_serves_whoever_waited_longest(lists: list[set[str]]) -> None:
    policy = make_policy("round_robin")
    history: list[str] = []
    for present in lists:
        chosen = follow(policy, views(**dict.fromkeys(sorted(present), 0)))
        last = {
            name: max((i for i, seen in enumerate(history) if seen == name), default=-1) for name in present
        }
        assert last[chosen] == min(last.values())
        history.append(chosen)


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(UnknownPolicyError, match=r"'best'.*least_load, round_robin"):
        make_policy("best")
    assert DEFAULT_POLICY in POLICIES


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_registry_knows_a_policy_by_its_own_name(name: str) -> None:
    assert make_policy(name).name == name
