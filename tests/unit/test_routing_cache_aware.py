"""`cache_aware`: SGLang's rule as a truth table, and what it must never do."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.routing.base import RequestView, TargetView
from policies.routing.cache_aware import CacheAware
from tests.kit.request_views import facts
from tests.unit.prefix_world import LETTER_BYTES, ask, chosen, closed_loop, views

LITTLE, BALANCE, CACHED = (
    "little of the prompt is cached",
    "the load is out of balance",
    "has most of the prompt cached",
)


def knowing(**known: str) -> CacheAware:
    """A policy that has sent some words to each target."""
    policy = CacheAware()
    for target, words in known.items():
        for word in words.split():
            policy.record(ask(word), target, 0.0)
    return policy


@pytest.mark.parametrize(
    ("known", "loads", "word", "target", "because", "letters"),
    [
        pytest.param({}, {"x": 1, "y": 0}, "abcd", "y", LITTLE, 0, id="nothing known: least load"),
        pytest.param(
            {"x": "abcd"}, {"x": 9, "y": 0}, "abcd", "x", CACHED, 4, id="known: its holder, though busier"
        ),
        pytest.param(
            {"x": "abc"}, {"x": 9, "y": 0}, "abcdefghi", "x", CACHED, 3, id="a third matches: the holder"
        ),
        pytest.param({"x": "abc"}, {"x": 9, "y": 0}, "abcdefghij", "y", LITTLE, 0, id="0.3 is not above 0.3"),
        pytest.param(
            {"x": "abcz"}, {"x": 0, "y": 1}, "abcdefghij", "x", LITTLE, 3, id="a miss may be partly known"
        ),
        pytest.param(
            {"x": "abcd", "y": "abcd"},
            {"x": 5, "y": 3, "z": 0},
            "abcd",
            "y",
            CACHED,
            4,
            id="least loaded holder",
        ),
        pytest.param(
            {"x": "abcd", "y": "abef"},
            {"x": 5, "y": 0},
            "abcd",
            "x",
            CACHED,
            4,
            id="the deeper match, not the idler",
        ),
        pytest.param(
            {"x": "abcd"}, {"x": 64, "y": 0}, "abcd", "x", CACHED, 4, id="64 more is still in balance"
        ),
        pytest.param({"x": "abcd"}, {"x": 65, "y": 0}, "abcd", "y", BALANCE, 0, id="65 more is not"),
        pytest.param(
            {"x": "abcd"}, {"x": 195, "y": 130}, "abcd", "x", CACHED, 4, id="but 1.5 times as many is"
        ),
        pytest.param(
            {"x": "abcd"}, {"x": 196, "y": 130}, "abcd", "y", BALANCE, 0, id="and more than that is not"
        ),
        pytest.param(
            {"gone": "abcd"}, {"x": 1, "y": 0}, "abcd", "y", LITTLE, 0, id="the holder is not offered"
        ),
        pytest.param(
            {"gone": "abcdef", "x": "abcd"},
            {"x": 9, "y": 0},
            "abcdef",
            "x",
            CACHED,
            4,
            id="the best who is offered",
        ),
        pytest.param(
            {"x": "abcd"}, {"x": 0, "y": 0}, "", "y", LITTLE, 0, id="no prompt: least load, in turn"
        ),
    ],
)
def test_cache_aware(
    known: dict[str, str], loads: dict[str, int], word: str, target: str, because: str, letters: int
) -> None:
    choice = chosen(knowing(**known), ask(word), loads)
    assert (choice.target_id, choice.because) == (target, because)
    assert choice.matched_bytes == letters * LETTER_BYTES


def test_less_than_a_block_of_a_cache_ties_nobody_to_anybody() -> None:
    policy = CacheAware()
    hello = RequestView("r", "POST", "/", prompt=b"user\0hello, who are you? Tell me of yourself.")
    got: Counter[str] = Counter()
    for _ in range(9):
        choice = chosen(policy, hello, {"x": 0, "y": 0, "z": 0})
        policy.record(hello, choice.target_id, 0.0)
        got[choice.target_id] += 1
    assert set(got.values()) == {3}


def test_a_request_without_prompt_is_routed_and_teaches_nothing() -> None:
    policy = CacheAware()
    request = RequestView("r", "GET", "/v1/models")
    policy.record(request, chosen(policy, request, {"x": 0, "y": 0}).target_id, 0.0)
    assert policy.gauges() == {"size_bytes": 0, "nodes": 0}
    assert chosen(policy, request, {"x": 0, "y": 0}).target_id == "y"


def test_no_target_is_no_choice() -> None:
    assert CacheAware().choose(ask("abc"), [], 0.0) is None


def test_what_imbalance_puts_elsewhere_is_cached_there() -> None:
    policy = knowing(x="abcd")
    request = ask("abcd")
    assert chosen(policy, request, {"x": 100, "y": 0}).target_id == "y"
    policy.record(request, "y", 0.0)
    assert chosen(policy, request, {"x": 20, "y": 10}).target_id == "y"


def test_failures_count_as_load() -> None:
    policy = knowing(x="abcd", y="abcd")
    targets = [TargetView("x", 0, trouble=3.0), TargetView("y", 2)]
    choice = policy.choose(ask("abcd"), targets, 0.0)
    assert choice is not None
    assert choice.target_id == "y"


def test_holders_take_turns() -> None:
    policy = knowing(x="abcd", y="abcd", z="abcd")
    got = []
    for _ in range(6):
        got.append(chosen(policy, ask("abcd"), {"x": 0, "y": 0, "z": 0}).target_id)
        policy.record(ask("abcd"), got[-1], 0.0)
    assert got == ["x", "y", "z"] * 2


def test_a_prompt_is_known_only_within_its_scope() -> None:
    policy = CacheAware()
    policy.record(ask("abcd", scope="llama/alice"), "x", 0.0)
    loads = {"x": 1, "y": 0}
    assert chosen(policy, ask("abcd", scope="llama/alice"), loads).target_id == "x"
    assert chosen(policy, ask("abcd", scope="llama/bob"), loads).because == LITTLE


def test_a_target_that_left_is_unknown_at_once_and_when_it_returns() -> None:
    policy = knowing(x="abcd")
    policy.forget("x")
    policy.forget("never seen")
    assert chosen(policy, ask("abcd"), {"x": 1, "y": 0}).because == LITTLE
    policy.record(ask("efgh"), "x", 0.0)
    assert chosen(policy, ask("abcd"), {"x": 1, "y": 0}).because == LITTLE
    assert chosen(policy, ask("efgh"), {"x": 1, "y": 0}).target_id == "x"


def test_prompts_beyond_the_limit_are_told_apart_by_their_first_part() -> None:
    policy = CacheAware()
    long = bytes(300_000)
    policy.record(RequestView("r", "POST", "/", prompt=long + b"one" * 9_000), "x", 0.0)
    assert policy.gauges()["size_bytes"] < 300_000
    other = RequestView("r", "POST", "/", prompt=long + b"two" * 9_000)
    assert chosen(policy, other, {"x": 1, "y": 0}).matched_bytes == 256 * 1024


@pytest.mark.long
@given(st.data())
def test_choosing_leaves_no_trace_and_takes_an_offered_target(data: st.DataObject) -> None:
    words = st.text("ab", max_size=6)
    policy = CacheAware()
    for _ in range(data.draw(st.integers(0, 8))):
        policy.record(ask(data.draw(words)), data.draw(st.sampled_from("wxyz")), 0.0)
    loads = data.draw(st.dictionaries(st.sampled_from("wxyz"), st.integers(0, 200), min_size=1))
    request = ask(data.draw(words))
    first = chosen(policy, request, loads)
    assert first.target_id in loads
    for word in ("aabb", "b"):
        policy.choose(ask(word), views(loads), 1.0)
    assert facts(chosen(policy, request, loads)) == facts(first)


def test_a_new_target_gets_its_share_of_misses_and_no_more() -> None:
    """The smallest tree would take them all until it is full."""
    policy = CacheAware()
    rng = random.Random(5)
    loads = {"old": 10, "older": 10}
    for index in range(200):
        request = RequestView(str(index), "POST", "/", prompt=rng.randbytes(1000))
        policy.record(request, ("old", "older")[index % 2], 0.0)
    loads["new"] = 10
    got: Counter[str] = Counter()
    for index in range(90):
        request = RequestView(str(index), "POST", "/", prompt=rng.randbytes(1000))
        target = chosen(policy, request, loads).target_id
        policy.record(request, target, 0.0)
        loads[target] += 1
        got[target] += 1
    assert set(got.values()) == {30}


def test_one_shared_block_does_not_collapse_onto_one_target() -> None:
    shared = random.Random(7).randbytes(512)
    got, highest = closed_loop(CacheAware(), lambda rng: shared + rng.randbytes(3584))
    assert highest == 64 / 8
    shares = Counter(got)
    assert max(shares.values()) <= 1.5 * min(shares.values())


@pytest.mark.parametrize(("concurrency", "highest"), [(32, 32), (256, 65)])
def test_where_most_is_shared_one_target_may_have_64_requests_more(concurrency: int, highest: int) -> None:
    """The rule's own bound, and no less: below it one target takes everything."""
    shared = random.Random(7).randbytes(3584)
    _, seen = closed_loop(CacheAware(), lambda rng: shared + rng.randbytes(512), concurrency)
    assert seen == highest
