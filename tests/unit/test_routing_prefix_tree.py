"""`prefix_tree`: SkyWalker's rule and our additions as truth tables, and that it never collapses."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.routing.base import RequestView, TargetView
from policies.routing.prefix_tree import PrefixTree
from tests.kit.request_views import facts
from tests.unit.prefix_world import LETTER_BYTES, ask, chosen, closed_loop, spell, views

LITTLE, BUSY, CACHED = (
    "little of the prompt is cached",
    "who has it cached has too much to do",
    "has most of the prompt cached",
)


TWENTY, TEN, NINE, EIGHT = "abcdefghijklmnopqrst", "abcdefghij", "abcdefghi", "abcdefgh"


def knowing(known: dict[str, str], policy: PrefixTree | None = None) -> PrefixTree:
    """A policy that has sent some words to each target."""
    policy = policy or PrefixTree()
    for target, words in known.items():
        for word in words.split():
            policy.record(ask(word), target, 0.0)
    return policy


@pytest.mark.parametrize("policy", [PrefixTree, PrefixTree.published], ids=["ours", "published"])
@pytest.mark.parametrize(
    ("known", "loads", "word", "target", "because", "letters"),
    [
        pytest.param({}, {"x": 1, "y": 0}, "abcd", "y", LITTLE, 0, id="nothing known: least load"),
        pytest.param({"x": "abcd"}, {"x": 3, "y": 0}, "abcd", "x", CACHED, 4, id="known: its holder"),
        pytest.param({"x": "ab"}, {"x": 2, "y": 0}, "abcd", "x", CACHED, 2, id="half is enough"),
        pytest.param({"x": "ab"}, {"x": 3, "y": 0}, "abcde", "y", LITTLE, 0, id="less than half: explore"),
        pytest.param({"x": "abz"}, {"x": 0, "y": 3}, "abcde", "x", LITTLE, 2, id="exploring may find a part"),
        pytest.param(
            {"x": "abcd", "y": "abcd"},
            {"x": 3, "y": 2, "z": 0},
            "abcd",
            "y",
            CACHED,
            4,
            id="least loaded holder",
        ),
        pytest.param(
            {"x": "abcd", "y": "abc"}, {"x": 3, "y": 0}, "abcd", "x", CACHED, 4, id="the longest match"
        ),
        pytest.param(
            {"gone": "abcdef", "x": "abcd"},
            {"x": 3, "y": 0},
            "abcdef",
            "x",
            CACHED,
            4,
            id="the best who is offered",
        ),
        pytest.param(
            {"gone": "abcdef", "x": "ab"},
            {"x": 3, "y": 0},
            "abcdef",
            "y",
            LITTLE,
            0,
            id="only the offered count",
        ),
        pytest.param(
            {"x": "abcd"}, {"x": 0, "y": 0}, "", "y", LITTLE, 0, id="no prompt: least load, in turn"
        ),
    ],
)
def test_prefix_tree(
    policy: Callable[[], PrefixTree],
    known: dict[str, str],
    loads: dict[str, int],
    word: str,
    target: str,
    because: str,
    letters: int,
) -> None:
    choice = chosen(knowing(known, policy()), ask(word), loads)
    assert (choice.target_id, choice.because) == (target, because)
    assert choice.matched_bytes == letters * LETTER_BYTES


@pytest.mark.parametrize(
    ("known", "loads", "target", "because"),
    [
        pytest.param({"x": "abcd"}, {"x": 14, "y": 10}, "x", CACHED, id="4 KiB are worth 4 requests"),
        pytest.param({"x": "abcd"}, {"x": 15, "y": 10}, "y", BUSY, id="but not 5: another learns it"),
        pytest.param({"x": TWENTY}, {"x": 16, "y": 4}, "x", CACHED, id="a long match is worth more"),
        pytest.param(
            {"x": TWENTY}, {"x": 17, "y": 3}, "y", BUSY, id="but not to be above 1.2 times the mean and 4"
        ),
        pytest.param(
            {"x": "abcdef", "y": "abc"},
            {"x": 17, "y": 8, "z": 5},
            "y",
            CACHED,
            id="above the gate: the next best",
        ),
        pytest.param({"x": "abcd"}, {"x": 4, "y": 0}, "x", CACHED, id="small differences mean nothing"),
        pytest.param({"x": "abcd"}, {"x": 9, "y": 9}, "x", CACHED, id="at equal loads whoever has it"),
    ],
)
def test_the_load_gate(known: dict[str, str], loads: dict[str, int], target: str, because: str) -> None:
    word = known["x"]
    choice = chosen(knowing(known), ask(word), loads)
    assert (choice.target_id, choice.because) == (target, because)
    assert chosen(knowing(known, PrefixTree.published()), ask(word), loads).target_id == "x"


@pytest.mark.parametrize(
    ("known", "loads", "target"),
    [
        pytest.param({"x": TEN, "y": NINE}, {"x": 8, "y": 4}, "y", id="a tenth shorter, half the load"),
        pytest.param({"x": TEN, "y": EIGHT}, {"x": 8, "y": 4}, "x", id="a fifth shorter is too much"),
        pytest.param({"x": TEN, "y": NINE}, {"x": 9, "y": 5}, "x", id="more than half the load"),
        pytest.param({"x": TEN, "y": NINE}, {"x": 3, "y": 0}, "x", id="3 requests less is no difference"),
        pytest.param({"x": TEN, "y": NINE}, {"x": 4, "y": 0}, "y", id="4 requests less is one"),
        pytest.param(
            {"x": TEN, "y": NINE, "z": TEN},
            {"x": 8, "y": 4, "z": 7},
            "z",
            id="another of the longest is near enough",
        ),
        pytest.param(
            {"x": TEN, "y": NINE, "z": NINE}, {"x": 8, "y": 4, "z": 3}, "z", id="the freest of the near"
        ),
        pytest.param({"x": TEN}, {"x": 8, "y": 4}, "x", id="nobody else has any of it"),
    ],
)
def test_giving_up_a_little_depth(known: dict[str, str], loads: dict[str, int], target: str) -> None:
    assert chosen(knowing(known), ask(TEN), loads).target_id == target
    deepest = chosen(knowing(known, PrefixTree.published()), ask(TEN), loads)
    assert deepest.matched_bytes == 10 * LETTER_BYTES


@pytest.mark.parametrize(
    ("match", "because"), [(63, LITTLE), (64, CACHED)], ids=["not a whole block", "a block of a cache"]
)
def test_the_shortest_match_that_counts(match: int, because: str) -> None:
    policy = PrefixTree()
    prompt = spell("ab")
    policy.record(RequestView("r", "POST", "/", prompt=prompt[:match]), "x", 0.0)
    assert (
        chosen(policy, RequestView("r", "POST", "/", prompt=prompt[:100]), {"x": 0, "y": 0}).because
        == because
    )


def test_no_target_is_no_choice() -> None:
    assert PrefixTree().choose(ask("abc"), [], 0.0) is None


def test_holders_take_turns() -> None:
    policy = knowing({"x": "abcd", "y": "abcd", "z": "abcd"})
    got = []
    for _ in range(6):
        got.append(chosen(policy, ask("abcd"), {"x": 0, "y": 0, "z": 0}).target_id)
        policy.record(ask("abcd"), got[-1], 0.0)
    assert got == ["x", "y", "z"] * 2


def test_failures_count_as_load() -> None:
    targets = [TargetView("x", 0, trouble=4.0), TargetView("y", 0)]
    choice = knowing({"x": "abcd"}).choose(ask("abcd"), targets, 0.0)
    assert choice is not None
    assert (choice.target_id, choice.because) == ("x", CACHED)
    targets[0].trouble = 5.0
    choice = knowing({"x": "abcd"}).choose(ask("abcd"), targets, 0.0)
    assert choice is not None
    assert (choice.target_id, choice.because) == ("y", BUSY)


def test_a_target_that_left_is_unknown_at_once_and_when_it_returns() -> None:
    policy = knowing({"x": "abcd", "y": "ab"})
    policy.forget("x")
    loads = {"x": 0, "y": 1}
    assert chosen(policy, ask("abcd"), loads).target_id == "y"
    policy.record(ask("efgh"), "x", 0.0)
    assert chosen(policy, ask("abcd"), loads).target_id == "y"
    policy.forget("y")
    assert chosen(policy, ask("abcd"), loads).because == LITTLE


def test_the_oldest_records_go_first() -> None:
    policy = PrefixTree(max_tree_bytes=4096)
    rng = random.Random(1)
    prompts = [rng.randbytes(512) for _ in range(12)]
    for prompt in prompts:
        policy.record(RequestView("r", "POST", "/", prompt=prompt), "x", 0.0)
    requests = [RequestView("r", "POST", "/", prompt=prompt) for prompt in prompts]
    known = [chosen(policy, request, {"x": 0, "y": 0}).because == CACHED for request in requests]
    assert known == [False] * 8 + [True] * 4
    assert policy.gauges() == {"size_bytes": 4 * 912 + 400, "nodes": 5}


@given(st.data())
def test_choosing_leaves_no_trace_and_takes_an_offered_target(data: st.DataObject) -> None:
    words = st.text("ab", max_size=6)
    policy = PrefixTree()
    for _ in range(data.draw(st.integers(0, 8))):
        policy.record(ask(data.draw(words)), data.draw(st.sampled_from("wxyz")), 0.0)
    loads = data.draw(st.dictionaries(st.sampled_from("wxyz"), st.integers(0, 200), min_size=1))
    request = ask(data.draw(words))
    first = chosen(policy, request, loads)
    assert first.target_id in loads
    for word in ("aabb", "b"):
        policy.choose(ask(word), views(loads), 1.0)
    assert facts(chosen(policy, request, loads)) == facts(first)


@given(st.dictionaries(st.sampled_from("wxyz"), st.integers(0, 200), min_size=1), st.text("ab", max_size=6))
def test_nobody_above_the_gate_is_taken(loads: dict[str, int], word: str) -> None:
    policy = knowing(dict.fromkeys("wx", "ab abab bbbb"))
    choice = chosen(policy, ask(word), loads)
    assert loads[choice.target_id] <= 1.2 * sum(loads.values()) / len(loads) + 4


SHARED = random.Random(7).randbytes(512)


@pytest.mark.parametrize("concurrency", [16, 64, 256])
@pytest.mark.parametrize("length", [600, 900, 1024, 1100, 4096], ids=lambda length: f"{length} bytes")
def test_one_shared_block_does_not_collapse_onto_one_target(length: int, concurrency: int) -> None:
    """Half a KiB is worth less than one request: the target that is chosen had the lowest load of all."""
    got, highest = closed_loop(
        PrefixTree(), lambda rng: SHARED + rng.randbytes(length - 512), concurrency=concurrency
    )
    assert highest == concurrency / 8
    shares = Counter(got)
    assert len(shares) == 8
    assert max(shares.values()) <= 1.5 * min(shares.values())


def test_the_published_rule_collapses() -> None:
    """Why there is a gate: every prompt begins with one block, and the target that has it takes all."""
    got, highest = closed_loop(PrefixTree.published(), lambda rng: SHARED + rng.randbytes(256))
    assert len(set(got)) == 1
    assert highest == 64


def test_long_conversations_stay_where_they_are() -> None:
    """The gate does not cost them their caches: a turn goes where the one before it went, but for very few."""
    texts = [random.Random(index).randbytes(8000) for index in range(64)]
    talks: list[int] = []

    def next_turn(rng: random.Random) -> bytes:
        talks.append(rng.randrange(64))
        texts[talks[-1]] += rng.randbytes(200)
        return texts[talks[-1]]

    got, highest = closed_loop(PrefixTree(), next_turn)
    homes: dict[int, str] = {}
    moved = 0
    for talk, target in zip(talks, got, strict=True):
        moved += homes.get(talk, target) != target
        homes[talk] = target
    assert moved <= 0.05 * len(got)
    assert highest <= 1.2 * 8 + 5
