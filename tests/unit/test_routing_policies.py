"""What holds for every routing policy, and the truth tables of the two simplest."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.routing.base import Choice, RequestView, RoutingPolicy, TargetView
from policies.routing.names import DEFAULT_POLICY, NAMES
from policies.routing.registry import POLICIES, UnknownPolicyError, make_policy
from tests.kit.request_views import changed, facts

REQUEST = RequestView("r", "POST", "/v1/chat/completions")
SESSION = changed(REQUEST, session="alice", scope="m", prompt=b"You are a helpful assistant. " * 20)
EVERY_POLICY = pytest.mark.parametrize("name", sorted(POLICIES))
PLAIN_AND_RICH = pytest.mark.parametrize(
    "request_view",
    [pytest.param(REQUEST, id="nothing known"), pytest.param(SESSION, id="session and prompt")],
)
# Who looks at some of the targets only: two drawn at random, those up to the first with room.
SOME_ONLY = {"power_of_two", "consistent_hash"}


def views(**loads: int) -> list[TargetView]:
    return [TargetView(name, load) for name, load in loads.items()]


def chosen_by(policy: RoutingPolicy, request: RequestView, targets: list[TargetView], now: float) -> Choice:
    choice = policy.choose(request, targets, now)
    assert choice is not None
    return choice


def follow(policy: RoutingPolicy, targets: list[TargetView], request: RequestView = REQUEST) -> str:
    """Choose, and do what was chosen."""
    target_id = chosen_by(policy, request, targets, 0.0).target_id
    policy.record(request, target_id, 0.0)
    return target_id


# --- Every policy ---------------------------------------------------------------------------------------------


@EVERY_POLICY
@PLAIN_AND_RICH
def test_no_target_is_no_choice(name: str, request_view: RequestView) -> None:
    assert make_policy(name).choose(request_view, [], 0.0) is None


@EVERY_POLICY
@PLAIN_AND_RICH
def test_choosing_changes_nothing(name: str, request_view: RequestView) -> None:
    policy = make_policy(name)
    targets = views(a=0, b=0, c=0)
    assert {facts(policy.choose(request_view, targets, 1.0)) for _ in range(5)} == {
        facts(policy.choose(request_view, targets, 1.0))
    }
    # and an unfollowed choice leaves no trace in what comes later
    asked, unasked = make_policy(name), make_policy(name)
    for _ in range(20):
        asked.choose(request_view, views(x=0, y=1, z=2), 0.0)
        assert follow(asked, targets, request_view) == follow(unasked, targets, request_view)


@EVERY_POLICY
@PLAIN_AND_RICH
def test_a_choice_explains_its_candidates_and_takes_the_cheapest(
    name: str, request_view: RequestView
) -> None:
    choice = chosen_by(make_policy(name), request_view, views(a=2, b=1, c=3), 0.0)
    explained = [row[0] for row in choice.scored]
    assert set(explained) <= {"a", "b", "c"}
    if name not in SOME_ONLY:
        assert explained == ["a", "b", "c"]
    assert {len(row) for row in choice.scored} == {2 + len(choice.terms)}
    costs = {row[0]: row[1] for row in choice.scored}
    assert costs[choice.target_id] == min(costs.values())


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"power_of_two"}))
def test_with_equal_loads_everybody_has_a_turn(name: str) -> None:
    policy = make_policy(name)
    assert Counter(follow(policy, views(a=0, b=0, c=0)) for _ in range(9)) == {"a": 3, "b": 3, "c": 3}


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"round_robin", "power_of_two"}))
def test_a_target_that_fails_fast_does_not_look_idle(name: str) -> None:
    targets = [TargetView("failing", 0, trouble=3.0), TargetView("sound", 1)]
    assert chosen_by(make_policy(name), REQUEST, targets, 0.0).target_id == "sound"


def _live(
    policy: RoutingPolicy, events: list[tuple[int, int, int, float, int | None]]
) -> list[tuple[object, ...]]:
    """Lead a life of requests, of which some news comes late, twice, or about an unknown target."""
    targets = views(a=0, b=1, c=2)
    now, choices = 0.0, []
    for kind, who, where, after, tokens in events:
        now += after
        request = changed(SESSION, id=f"r{who}", session=f"s{who}" if who % 2 else "")
        target_id = targets[where].id
        if kind == 0:
            choice = chosen_by(policy, request, targets, now)
            choices.append(facts(choice))
            policy.record(request, choice.target_id, now)
        elif kind == 1:
            policy.responded(request, target_id, now)
        elif kind == 2:
            policy.ended(request, target_id, now, tokens)
        else:
            policy.forget(target_id)
    return choices


EVENTS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 2, 2, 3]),
        st.integers(0, 5),
        st.integers(0, 2),
        st.floats(0.0, 5.0),
        st.none() | st.integers(0, 500),
    ),
    max_size=60,
)


@EVERY_POLICY
@given(events=EVENTS, seed=st.integers(0, 3))
def test_any_life_is_survived_and_comes_out_the_same_again(
    name: str, events: list[tuple[int, int, int, float, int | None]], seed: int
) -> None:
    lives = [_live(make_policy(name, Random(seed)), events) for _ in range(2)]
    assert lives[0] == lives[1]
    for choice in lives[0]:
        assert choice[0] in {"a", "b", "c"}


@EVERY_POLICY
def test_who_is_forgotten_comes_back_as_nobody(name: str) -> None:
    """Two policies, one of which has a past with a target that left: nothing distinguishes them."""
    fresh, old = make_policy(name), make_policy(name)
    for index in range(20):
        request = changed(SESSION, id=f"r{index}")
        old.record(request, "a", 0.0)
        old.responded(request, "a", 1.0)
        old.ended(request, "a", 9.0, 50)
    still_running = changed(SESSION, id="late")
    old.record(still_running, "a", 9.0)
    old.forget("a")
    old.forget("never seen")
    old.responded(still_running, "a", 9.5)
    old.ended(still_running, "a", 9.9, None)
    capped = changed(SESSION, max_tokens=10)  # what was learned of responses may stay
    for targets in (views(a=0, b=0), views(b=0, a=0)):
        of_old, of_fresh = (
            chosen_by(old, capped, targets, 10_000.0),
            chosen_by(fresh, capped, targets, 10_000.0),
        )
        assert (of_old.target_id, of_old.matched_bytes) == (of_fresh.target_id, of_fresh.matched_bytes)


# --- The registry ---------------------------------------------------------------------------------------------


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(UnknownPolicyError, match=r"'best'.*cache_aware.*least_load.*round_robin"):
        make_policy("best")
    assert DEFAULT_POLICY in POLICIES
    assert set(NAMES) == set(POLICIES)
    assert all(make_policy(name).name == name for name in NAMES)


@EVERY_POLICY
def test_the_registry_knows_a_policy_by_its_own_name(name: str) -> None:
    assert make_policy(name).name == name


# --- Round robin ----------------------------------------------------------------------------------------------


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


# --- Least load -----------------------------------------------------------------------------------------------


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
    """Without departures no target above the lowest level gets anything, so the lowest level only rises."""
    policy = make_policy("least_load")
    loads = {str(index): load for index, load in enumerate(start)}
    for _ in range(requests):
        lowest = min(loads.values())
        chosen = follow(policy, views(**loads))
        assert loads[chosen] == lowest
        loads[chosen] += 1
