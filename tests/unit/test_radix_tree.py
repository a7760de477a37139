"""The radix tree against a naive model, under its limits, and with targets that come and go."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from policies.routing.radix_tree import _NO_CHILDREN, NODE_BYTES, RadixTree, _Node

PLENTY = 2**40
BLOCK = 2


def tree_of(*held: tuple[str, bytes], block: int = BLOCK) -> RadixTree:
    tree = RadixTree(PLENTY, PLENTY, block)
    for target, prompt in held:
        tree.insert("m", prompt, target)
    audit(tree)
    return tree


def audit(tree: RadixTree) -> None:
    """Everything the tree keeps for speed, counted again from its nodes."""
    assert not _NO_CHILDREN
    nodes = list(walk(tree))
    assert tree.nodes == len(nodes)
    assert tree.text_bytes == sum(len(node.edge) for node, _ in nodes)
    assert tree._alive == sum(holder.bit for holder in tree._holders.values())
    for node, parent in nodes:
        assert node.holders, "nobody holds it"
        assert node.home[node.key] is node
        assert len(node.edge) % tree._block == 0
        if parent is not None:
            assert node.edge[: tree._block] == node.key
            assert node.holders & ~parent.holders == 0, "who holds a node holds its parent"
    for bit, holder in tree._by_bit.items():
        held = [(node, parent) for node, parent in nodes if node.holders & bit]
        age = {node: index for index, node in enumerate(holder.nodes)}
        assert age.keys() == {node for node, _ in held}
        assert all(parent is None or age[node] < age[parent] for node, parent in held), "leaves are oldest"
        assert holder.bytes == sum(len(node.edge) + NODE_BYTES for node, _ in held)
    assert {id(holder) for holder in tree._by_bit.values()} == {
        id(holder) for holder in [*tree._holders.values(), *tree._dead]
    }
    assert tree.size_bytes <= sum(holder.bytes for holder in tree._by_bit.values())


def walk(tree: RadixTree) -> Iterator[tuple[_Node, _Node | None]]:
    todo: list[tuple[_Node, _Node | None]] = [(root, None) for root in tree._roots.values()]
    while todo:
        node, parent = todo.pop()
        yield node, parent
        todo += [(child, node) for child in node.children.values()]


def common(one: bytes, other: bytes, block: int = BLOCK) -> int:
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return (min(len(one), len(other)) if same is None else same) // block * block


# --- what matches


@pytest.mark.parametrize(
    ("held", "prompt", "expected"),
    [
        pytest.param([], b"aabb", {}, id="an empty tree"),
        pytest.param([("x", b"aabb")], b"aabb", {"x": 4}, id="the same prompt"),
        pytest.param([("x", b"aabb")], b"aabbcc", {"x": 4}, id="a longer prompt"),
        pytest.param([("x", b"aabbcc")], b"aabb", {"x": 4}, id="a shorter prompt ends inside an edge"),
        pytest.param([("x", b"aabbcc")], b"aabbdd", {"x": 4}, id="leaves an edge half way"),
        pytest.param([("x", b"aabb")], b"abbb", {}, id="another first block"),
        pytest.param([("x", b"aabb")], b"aabx", {"x": 2}, id="only whole blocks count"),
        pytest.param([("x", b"aabbc")], b"aabbc", {"x": 4}, id="the rest behind the last block is not kept"),
        pytest.param([("x", b"a")], b"a", {}, id="less than a block is nothing"),
        pytest.param([("x", b"")], b"aabb", {}, id="an empty prompt was inserted"),
        pytest.param([("x", b"aabb")], b"", {}, id="an empty prompt is asked for"),
        pytest.param([("x", b"aabb"), ("y", b"aacc")], b"aabbdd", {"x": 4, "y": 2}, id="a depth for each"),
        pytest.param([("x", b"aabb"), ("y", b"aabb")], b"aabb", {"x": 4, "y": 4}, id="two hold the same"),
        pytest.param(
            [("x", b"aabbcc"), ("y", b"aa")], b"aabbcc", {"x": 6, "y": 2}, id="a split keeps its holder"
        ),
        pytest.param(
            [("x", b"aa"), ("x", b"aabb"), ("x", b"aabbcc")], b"aabbccdd", {"x": 6}, id="a conversation"
        ),
        pytest.param(
            [("x", b"aabb"), ("y", b"aabb"), ("x", b"aabbcc")],
            b"aabbcc",
            {"x": 6, "y": 4},
            id="one goes on alone",
        ),
    ],
)
def test_matches(held: list[tuple[str, bytes]], prompt: bytes, expected: dict[str, int]) -> None:
    assert tree_of(*held).matches("m", prompt) == expected


def test_scopes_have_nothing_in_common() -> None:
    tree = tree_of(("x", b"aabb"))
    tree.insert("other", b"aacc", "y")
    audit(tree)
    assert tree.matches("m", b"aacc") == {"x": 2}
    assert tree.matches("other", b"aabb") == {"y": 2}
    assert tree.matches("unknown", b"aabb") == {}


def test_asking_changes_nothing() -> None:
    tree = tree_of(("x", b"aabbcc"), ("y", b"aadd"))
    before = [(node.edge, node.holders) for node, _ in walk(tree)], [*tree._by_bit[1].nodes]
    tree.matches("m", b"aabbee")
    assert before == ([(node.edge, node.holders) for node, _ in walk(tree)], [*tree._by_bit[1].nodes])


def test_a_conversation_of_one_target_is_one_edge() -> None:
    tree = tree_of(*[("x", b"aabbccddee"[:end]) for end in (2, 4, 6, 8, 10)])
    assert [node.edge for node, _ in walk(tree)] == [b"", b"aabbccddee"]


def test_a_prompt_known_already_adds_no_node() -> None:
    tree = tree_of(("x", b"aabbccdd"))
    nodes = tree.nodes
    tree.insert("m", b"aabb", "x")
    tree.insert("m", b"aabbccdd", "x")
    audit(tree)
    assert tree.nodes == nodes


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)], ids=["target", "total", "block"])
def test_a_size_must_be_positive(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        RadixTree(*sizes)


# --- against a naive model

TARGETS = st.sampled_from("xyz")
SCOPES = st.sampled_from(["m", "n"])
PROMPTS = st.builds(
    lambda blocks, rest: b"".join(blocks) + rest,
    st.lists(st.sampled_from([b"aa", b"ab", b"ba"]), max_size=7),
    st.sampled_from([b"", b"", b"a"]),
)


class NaiveModel(RuleBasedStateMachine):
    """Without limits the tree must agree with a list of what was inserted, byte by byte."""

    limit = PLENTY

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(self.limit, PLENTY, BLOCK)
        self.sent: dict[str, set[tuple[str, bytes]]] = {}

    def expected(self, scope: str, prompt: bytes) -> dict[str, int]:
        best = {
            target: max(common(prompt, one) if where == scope else 0 for where, one in sent)
            for target, sent in self.sent.items()
        }
        return {target: depth for target, depth in best.items() if depth}

    @rule(scope=SCOPES, prompt=PROMPTS, holder=TARGETS)
    def insert(self, scope: str, prompt: bytes, holder: str) -> None:
        self.tree.insert(scope, prompt, holder)
        self.sent.setdefault(holder, set()).add((scope, prompt))

    @rule(holder=TARGETS)
    def forget(self, holder: str) -> None:
        self.tree.forget(holder)
        self.sent.pop(holder, None)
        assert self.tree.charged_bytes(holder) == 0

    @rule(scope=SCOPES, prompt=PROMPTS)
    def match(self, scope: str, prompt: bytes) -> None:
        assert self.tree.matches(scope, prompt) == self.expected(scope, prompt)

    @invariant()
    def the_books_are_right(self) -> None:
        audit(self.tree)


class BoundedModel(NaiveModel):
    """Under a limit it may know less, never more, and no target is above the limit."""

    limit = 5 * NODE_BYTES

    @rule(scope=SCOPES, prompt=PROMPTS)
    def match(self, scope: str, prompt: bytes) -> None:
        expected = self.expected(scope, prompt)
        for target, depth in self.tree.matches(scope, prompt).items():
            assert depth <= expected[target]

    @invariant()
    def nobody_is_above_the_limit(self) -> None:
        assert all(self.tree.charged_bytes(target) <= self.limit for target in "xyz")


TestNaiveModel = NaiveModel.TestCase
TestNaiveModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBoundedModel = BoundedModel.TestCase
TestBoundedModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(1, 40), st.integers(0, 500), st.integers(0, 500), st.integers(1, 4))
def test_edges_of_any_length_are_split_where_prompts_part(
    block: int, shared: int, rest: int, targets: int
) -> None:
    tree = RadixTree(PLENTY, PLENTY, block)
    start = random.Random(shared).randbytes(shared)
    prompts = [start + bytes([index]) * rest for index in range(targets)]
    for index, prompt in enumerate(prompts):
        tree.insert("m", prompt, str(index))
    audit(tree)
    for prompt in prompts:
        depths = {str(index): common(prompt, one, block) for index, one in enumerate(prompts)}
        assert tree.matches("m", prompt) == {target: depth for target, depth in depths.items() if depth}


# --- limits


def charge(prompt: bytes) -> int:
    """The most that a prompt can be charged: a node for every block, and the root."""
    return len(prompt) + NODE_BYTES * (len(prompt) // BLOCK + 1)


@given(st.lists(PROMPTS, min_size=1, max_size=60))
def test_the_latest_prompts_stay(prompts: list[bytes]) -> None:
    longest = max(charge(prompt) for prompt in prompts)
    tree = RadixTree(max(1, 3 * longest), PLENTY, BLOCK)
    for index, prompt in enumerate(prompts):
        tree.insert("m", prompt, "x")
        for recent in prompts[max(0, index - 2) : index + 1]:
            whole = len(recent) // BLOCK * BLOCK
            assert tree.matches("m", recent).get("x", 0) == whole
    audit(tree)


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = RadixTree(4 * NODE_BYTES + 8, PLENTY, BLOCK)
    for prompt in (b"aabb", b"aacc", b"aabb"):
        tree.insert("m", prompt, "x")  # the root, aa, bb, cc: full
    tree.insert("m", b"aadd", "x")
    audit(tree)
    assert [tree.matches("m", prompt)["x"] for prompt in (b"aabb", b"aacc", b"aadd")] == [4, 2, 4]


def test_a_prompt_above_the_limit_is_not_kept() -> None:
    tree = RadixTree(1000, PLENTY)
    tree.insert("m", b"x" * 100_000, "x")
    audit(tree)
    assert (tree.nodes, tree.text_bytes, tree.matches("m", b"x" * 100)) == (1, 0, {})  # the root


def test_one_targets_limit_does_not_touch_another() -> None:
    rng = random.Random(1)
    tree = RadixTree(20_000, PLENTY)
    kept = [rng.randbytes(400) for _ in range(20)]
    for prompt in kept:
        tree.insert("m", prompt, "quiet")
    for _ in range(500):
        tree.insert("m", rng.randbytes(400), "busy")
    audit(tree)
    assert all(tree.matches("m", prompt) == {"quiet": 400} for prompt in kept)


def test_the_total_is_shared_by_all_and_reached_step_by_step() -> None:
    rng = random.Random(1)
    tree = RadixTree(PLENTY, 100_000)
    for _ in range(300):
        tree.insert("m", rng.randbytes(400), "first")
    assert 95_000 < tree.charged_bytes("first") <= 100_000
    sizes = []
    for index in range(400):
        before = tree.nodes
        tree.insert("m", rng.randbytes(400), ("first", "second")[index % 2])
        sizes.append(tree.charged_bytes("first"))
        assert before - tree.nodes <= 4  # no insert stops to clean up everything
    assert all(after <= max(before, 50_000) for before, after in pairwise(sizes))
    assert sizes[-1] <= 50_000
    assert tree.size_bytes <= 100_000
    audit(tree)


def test_a_million_bytes_of_prompts_need_no_more_than_the_limit() -> None:
    rng = random.Random(3)
    tree = RadixTree(50_000, PLENTY)
    start = rng.randbytes(300)
    for _ in range(2_000):
        tree.insert("m", start + rng.randbytes(rng.randrange(800)), rng.choice("xy"))
        assert tree.size_bytes <= 100_000
    audit(tree)


# --- targets that leave


def test_a_target_is_forgotten_at_once_and_returns_as_nobody() -> None:
    tree = tree_of(("x", b"aabb"), ("y", b"aacc"))
    tree.forget("x")
    tree.forget("never seen")
    assert tree.matches("m", b"aabb") == {"y": 2}
    tree.insert("m", b"dddd", "x")
    assert tree.matches("m", b"aabb") == {"y": 2}
    assert tree.matches("m", b"dddd") == {"x": 4}
    audit(tree)


def test_what_a_target_leaves_behind_is_reclaimed_and_memory_never_grows_meanwhile() -> None:
    rng = random.Random(2)
    tree = RadixTree(PLENTY, PLENTY)
    for _ in range(500):
        tree.insert("m", rng.randbytes(320), "gone")
    tree.forget("gone")
    size, inserts = tree.size_bytes, 0
    while tree._dead:
        nodes = tree.nodes
        tree.insert("m", rng.randbytes(320), "here")
        inserts += 1
        assert nodes - tree.nodes <= 4  # bit by bit
        assert tree.size_bytes <= size + 2 * (320 + NODE_BYTES)
    assert inserts <= 300
    assert tree.size_bytes <= tree.charged_bytes("here") == (320 + NODE_BYTES) * inserts + NODE_BYTES
    audit(tree)


def test_hits_alone_reclaim_too_and_bits_are_used_again() -> None:
    tree = tree_of(("here", b"aabb"), ("gone", b"ccdd"), ("gone", b"eeff"))
    for generation in range(200):
        tree.forget("gone")
        for _ in range(4):
            tree.insert("m", b"aabb", "here")
        assert not tree._dead
        tree.insert("m", b"ccdd", "gone")
        assert tree._holders["gone"].bit.bit_length() <= 2, generation
    audit(tree)


def test_a_tree_that_everybody_left_is_empty_after_the_next_prompts() -> None:
    tree = tree_of(*[(target, bytes([97 + index]) * 8) for index, target in enumerate("uvwxyz")])
    for target in "uvwxyz":
        tree.forget(target)
    assert tree.matches("m", b"aaaaaaaa") == {}
    for _ in range(12):
        tree.insert("other", b"aa", "new")
    audit(tree)
    assert (tree.nodes, tree.text_bytes) == (2, 2)
